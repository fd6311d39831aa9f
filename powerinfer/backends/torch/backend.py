"""Compiles blocks into modules of plain tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from powerinfer.backends.hybrid.gpu_types import STAND_IN
from powerinfer.backends.interface import (
    Attention,
    Backend,
    BackendOptions,
    Embedding,
    FeedForward,
    Head,
    ModelSpec,
)
from powerinfer.backends.torch.attention import TorchAttention, TorchKVCache
from powerinfer.backends.torch.feed_forward import TorchFeedForward
from powerinfer.backends.torch.linear import TorchEmbedding, TorchHead
from powerinfer.backends.torch.weights import BytesStore, FloatStore, WeightStore
from powerinfer.errors import UsageError

CACHE_TYPES = {"F32": torch.float32, "F16": torch.float16}


class TorchBackend(Backend):
    """Hidden states are float32 tensors (n_tokens, n_embd) on the device.

    On the CPU weights are float32, and this is the reference; a GPU, and the stand-in for one, hold the file's bytes.
    """

    name = "torch"

    def __init__(self, options: BackendOptions, store: WeightStore | None = None) -> None:
        """store: where weights go, None for what suits the device.

        Raises UsageError for a device that torch does not know or does not find.
        """
        self.stands_in = options.device == STAND_IN
        name = "cpu" if self.stands_in else options.device
        try:
            self.device = torch.device(name)
            torch.empty(1, device=self.device)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # streams and events are those of the current one
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"no device {options.device!r} for the torch backend: {reason}") from None
        holds_bytes = self.stands_in or self.device.type != "cpu"
        self.cache_types = options.cache_types("F16" if holds_bytes else "F32", CACHE_TYPES)
        self.store = store or make_store(self.device, self.stands_in, options.notify)
        if options.n_threads:
            torch.set_num_threads(options.n_threads)

    def describe(self) -> str:
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return f"torch: {STAND_IN if self.stands_in else self.device}, float32{threads}"

    def embedding(self, spec: Embedding) -> TorchEmbedding:
        return TorchEmbedding(spec, self.store)

    def attention(self, spec: Attention) -> TorchAttention:
        return TorchAttention(spec, self.store)

    def feed_forward(self, spec: FeedForward) -> TorchFeedForward:
        return TorchFeedForward(spec, self.store)

    def head(self, spec: Head) -> TorchHead:
        return TorchHead(spec, self.store)

    def kv_cache(self, spec: ModelSpec, n_ctx: int, n_slots: int = 1) -> TorchKVCache:
        return self.kv_cache_of([layer.attention for layer in spec.layers], n_ctx, n_slots)

    def kv_cache_of(self, layers: Sequence[Attention | None], n_ctx: int, n_slots: int) -> TorchKVCache:
        """A cache of some layers only; the others' places are empty."""
        dtypes = tuple(CACHE_TYPES[kind.name] for kind in self.cache_types)
        return TorchKVCache(layers, n_ctx, n_slots, dtypes, self.device)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def make_store(device: torch.device, stands_in: bool, notify: Callable[[str], None]) -> WeightStore:
    """How `device` holds weights: as floats on the CPU, as the file's bytes on a GPU and what stands in for one.

    Raises UsageError for a GPU without Triton, whose kernels read such bytes.
    """
    if stands_in:
        return BytesStore(device)
    if device.type == "cpu":
        return FloatStore(device)
    if importlib.util.find_spec("triton") is None:
        raise UsageError(f"{device} needs the package triton, whose kernels run there: pip install triton")
    from powerinfer.backends.torch.triton_store import TritonStore

    return TritonStore(device, notify)
