"""A model ready to run: file, tokenizer, transformer and KV cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.backends import BackendOptions, create_backend
from powerinfer.backends.hybrid.gpu_types import GPU_CACHE_TYPES
from powerinfer.backends.interface import Activation, KVCache, ModelSpec, cache_row_bytes
from powerinfer.engine.assemble import assemble, check_budget, choose_backend, objective_named
from powerinfer.engine.generate import Chunk, GenerateOptions, TokenSequence, check_prompt, generate
from powerinfer.engine.sampling import Sampler, SamplingParams
from powerinfer.engine.timings import Timings
from powerinfer.errors import PowerInferError, UsageError
from powerinfer.formats import GGUFFile, open_gguf
from powerinfer.models import ModelOptions, Transformer, build_spec
from powerinfer.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from powerinfer.engine.plan import Plan

MAX_CONTEXT = (1 << 31) - 1
CACHE_SHARE = 4
"""Where the user does not say, the KV cache may take a quarter of the machine's memory: what a model is trained for
can be 100 GB. (It is memory only as far as it is used.)"""


def default_model_path() -> Path:
    """The model that ships in the package. Raises PowerInferError where it is missing."""
    path = Path(str(resources.files("powerinfer") / "data" / "demo.powerinfer.gguf"))
    if not path.is_file():
        raise PowerInferError(f"the embedded model {path} is missing: reinstall powerinfer, or name a model with -m")
    return path


class Model:
    """What `load` returns.

    file, spec, tokenizer, transformer: the parts. n_ctx: positions of the KV cache. timings: of loading and of the last
    generation. plan: what is where, if a GPU takes part.
    """

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, tokenizer: Tokenizer, transformer: Transformer, n_ctx: int, n_batch: int
    ) -> None:
        self.file, self.spec, self.tokenizer, self.transformer = file, spec, tokenizer, transformer
        self.n_ctx, self.n_batch = n_ctx, n_batch
        self.timings = Timings()
        self.plan: Plan | None = None
        self._cache: KVCache | None = None

    @property
    def cache(self) -> KVCache:
        """Made when first used."""
        if self._cache is None:
            try:
                self._cache = self.transformer.kv_cache(self.n_ctx)
            except MemoryError:
                raise UsageError(f"no memory for a KV cache of {self.n_ctx} positions: choose a smaller -c") from None
        return self._cache

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, special tokens in it recognised, with a BOS where the model wants one.

        Raises UsageError for a prompt without tokens, too long for the context, or with ids that the model lacks.
        """
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens and self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
            tokens = [self.tokenizer.bos_id]
        check_prompt(len(tokens), self.n_ctx)
        for token in tokens:
            if not 0 <= token < self.spec.n_vocab:
                raise UsageError(f"the prompt has token {token}: this model has tokens 0 to {self.spec.n_vocab - 1}")
        return tokens

    def stream(self, prompt: str | Sequence[int], sampler: Sampler, options: GenerateOptions) -> Iterator[Chunk]:
        """One chunk a token, from an empty context. Errors of the prompt are raised by the call itself."""
        tokens = self.encode_prompt(prompt)
        self.timings = Timings(load_s=self.timings.load_s)
        sequence = TokenSequence(self.transformer, self.cache)
        return generate(sequence, tokens, self.tokenizer, sampler, options, self.timings)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n_predict: int = -1,
        sampling: SamplingParams | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Pieces of text that follow `prompt`, as they are made.

        n_predict: tokens to make; -1 until the model ends, -2 until the context is full. stop: strings that end it.
        Raises UsageError for a prompt that does not fit and settings that make no sense.
        """
        options = GenerateOptions(n_predict=n_predict, n_batch=self.n_batch, ignore_eos=ignore_eos, stop=tuple(stop))
        chunks = self.stream(prompt, Sampler(sampling or SamplingParams()), options)
        return (chunk.text for chunk in chunks if chunk.text)


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    backend: str = "auto",
    n_ctx: int = 0,
    n_batch: int = 512,
    n_threads: int = 0,
    n_threads_batch: int = 0,
    device: str = "auto",
    vram_budget: float | None = None,
    reset_gpu_index: bool = False,
    disable_gpu_index: bool = False,
    placement: str = "activations",
    cache_type_k: str = "",
    cache_type_v: str = "",
    dense: bool = False,
    sparse_threshold: float | None = None,
    activation: str | None = None,
    rope_freq_base: float | None = None,
    rope_freq_scale: float | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> Model:
    """Loads a GGUF file, or the embedded model if `path` is None.

    backend: "native" (the CPU), "torch" (one device), "hybrid" (a GPU and the CPU) or "auto", which is native where
    there is no GPU. device: "auto", "cpu", "cuda:N", or "torch-cpu", which lets the CPU stand in for a GPU.
    vram_budget: GiB of the GPU, -1 (or None) for all that is free. reset_gpu_index, disable_gpu_index: as PowerInfer's
    flags. placement: of neurons, so that the GPU carries the most "activations", or so that the predicted "time" is
    least.
    n_ctx: positions of the KV cache, 0 for the model's own as far as memory allows.
    n_threads: for one token, n_threads_batch for prompts, 0 for all cores. cache_type_k, cache_type_v: of the KV cache,
    "f32", "f16" or "q8_0", "" for the backend's own ("native": f16). dense: run a sparse model without its
    predictors. activation: of the feed-forward's gate, e.g. "relu" for a dense ReLU model whose file does not say so.
    notify is called with a line for the user where something is not as they may expect.

    Raises PowerInferError: FormatError for a damaged file, UnsupportedError for a model that cannot be run, UsageError
    for settings that make no sense.
    """
    started = time.perf_counter()
    if not 0 <= n_ctx <= MAX_CONTEXT:
        raise UsageError(f"the context size is {n_ctx}: expected 0 (the model's own) to {MAX_CONTEXT}")
    if not 1 <= n_batch <= MAX_CONTEXT:
        raise UsageError(f"the batch size is {n_batch}: expected 1 to {MAX_CONTEXT}")
    if n_threads < 0 or n_threads_batch < 0:
        raise UsageError(f"the number of threads is {min(n_threads, n_threads_batch)}: expected 0 (all cores) or more")
    check_budget(vram_budget)
    objective_named(placement)
    model_options = ModelOptions(dense, _activation(activation), sparse_threshold, rope_freq_base, rope_freq_scale)
    file = open_gguf(default_model_path() if path is None else path)
    spec = build_spec(file, model_options)
    tokenizer = load_tokenizer(file)
    if tokenizer.n_vocab > spec.n_vocab:
        notify(f"the tokenizer has {tokenizer.n_vocab} tokens, the model {spec.n_vocab}: those beyond cannot be used")
    options = BackendOptions(n_threads, n_threads_batch, device, cache_type_k, cache_type_v, notify)
    name, device = choose_backend(backend, device, vram_budget, notify)
    options = replace(options, device=device)
    alone = None if name == "hybrid" else create_backend(name, options)
    cache_types = alone.cache_types if alone else options.cache_types("F16", GPU_CACHE_TYPES)
    position = sum(cache_row_bytes(cache_types, layer.attention) for layer in spec.layers)
    context = n_ctx or default_context(spec, position, notify)
    plan = None
    if alone is None:
        from powerinfer.engine.offload import IndexOptions
        from powerinfer.engine.plan import Shape

        shape = Shape(context, n_batch, cache_types)
        index = IndexOptions(reset_gpu_index, disable_gpu_index, objective_named(placement))
        transformer, plan = assemble(file, spec, shape, options, -1.0 if vram_budget is None else vram_budget, index)
    else:
        transformer = Transformer(spec, alone, on_block=file.release_pages)
    model = Model(file, spec, tokenizer, transformer, context, n_batch)
    model.plan = plan
    model.timings.load_s = time.perf_counter() - started
    return model


def default_context(spec: ModelSpec, position: int, notify: Callable[[str], None]) -> int:
    """The context that the model is trained for, as far as it fits. position: bytes that one takes in the KV cache."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(512, memory // CACHE_SHARE // max(position, 1) // 256 * 256)
    if spec.n_ctx_train > most:
        notify(f"context of {most} tokens (the model's own is {spec.n_ctx_train}: ask for it with -c)")
    return min(spec.n_ctx_train, most)


def _activation(name: str | None) -> Activation | None:
    if name is None:
        return None
    try:
        return Activation(name.lower())
    except ValueError:
        known = ", ".join(a.value for a in Activation)
        raise UsageError(f"unknown activation {name!r}: choose one of {known}") from None
