"""Perplexity as llama.cpp counts it, and the numbers of other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TinyLlama, oracle

from powerinfer.backends import create_backend
from powerinfer.backends.interface import BackendOptions
from powerinfer.engine import load
from powerinfer.engine.perplexity import Perplexity, perplexity
from powerinfer.errors import UsageError
from powerinfer.models import ModelOptions, Transformer, build_spec


@pytest.mark.parametrize("n_batch", [1, 5, 16, 512])
def test_the_second_half_of_each_window_counts(n_batch: int) -> None:
    spec = build_spec(TinyLlama().build(), ModelOptions())
    model = Transformer(spec, create_backend("torch", BackendOptions(n_threads=1)))
    tokens = np.random.default_rng(1).integers(3, 61, 50).astype(np.int32)
    losses: list[float] = []
    running = []
    for i in range(3):
        window = tokens[16 * i : 16 * i + 16].copy()
        window[0] = 1
        logits = oracle(spec, window)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-logprobs[j, window[j + 1]] for j in range(8, 15)]
        running.append(np.exp(np.mean(losses)))
    seen: list[Perplexity] = []
    result = perplexity(
        model, tokens.tolist(), 1, n_ctx=16, n_batch=n_batch, on_chunk=lambda i, so_far: seen.append(so_far)
    )
    np.testing.assert_allclose([r.ppl for r in seen], running, rtol=1e-5)
    assert result == seen[-1]
    assert result.n == 3 * (16 - 1 - 8)
    np.testing.assert_allclose(result.stderr, result.ppl * np.std(losses) / np.sqrt(result.n - 1), rtol=1e-4)


def test_a_stride_makes_windows_overlap() -> None:
    spec = build_spec(TinyLlama().build(), ModelOptions())
    model = Transformer(spec, create_backend("torch", BackendOptions(n_threads=1)))
    tokens = np.random.default_rng(2).integers(3, 61, 40).astype(np.int32)
    result = perplexity(model, tokens.tolist(), None, n_ctx=16, stride=4)
    losses: list[float] = []
    for start in range(0, 40 - 16 + 1, 4):
        window = tokens[start : start + 16]
        logits = oracle(spec, window)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-logprobs[j, window[j + 1]] for j in range(11, 15)]
    np.testing.assert_allclose(result.ppl, np.exp(np.mean(losses)), rtol=1e-5)


@pytest.mark.parametrize(
    ("n_tokens", "options", "message"),
    [
        (31, {"n_ctx": 16}, "at least 32 tokens: this one has 31"),
        (0, {"n_ctx": 16}, "this one has 0"),
        (100, {"n_ctx": 2}, "context size is 2"),
        (100, {"n_ctx": 16, "stride": 16}, "stride is 16"),
        (100, {"n_ctx": 16, "chunks": 0}, "no chunks"),
    ],
)
def test_texts_and_sizes_that_make_no_sense(n_tokens: int, options: dict[str, int], message: str) -> None:
    spec = build_spec(TinyLlama().build(), ModelOptions())
    model = Transformer(spec, create_backend("torch", BackendOptions(n_threads=1)))
    with pytest.raises(UsageError, match=message):
        perplexity(model, [5] * n_tokens, None, **options)  # type: ignore[arg-type]


# In float32 arithmetic 0.05 % is allowed, with rounded activations 0.2 % (f16) and 1 % (q4_0); we ask for less.
@pytest.mark.parametrize(("backend", "ceiling"), [("torch", 2e-4), ("native", 5e-4)])
@pytest.mark.parametrize("case", ["f16", "q4_0", "q4_0_threshold_0.1"])
def test_relu_a_is_as_the_float32_oracle_has_it(
    shared_data: Path, reference: dict[str, Any], backend: str, ceiling: float, case: str
) -> None:
    kind, _, threshold = case.partition("_threshold_")
    model = load(
        shared_data / "relu-a" / f"relu-a-{kind}.powerinfer.gguf",
        backend=backend,
        sparse_threshold=float(threshold) if threshold else None,
    )
    tokens = model.tokenizer.encode((shared_data / "kjv.txt").read_text(), parse_special=False)
    assert len(tokens) == reference["relu-a"]["tokens"]
    want = reference["relu-a"]["perplexity_kjv_n_ctx_256_first_6_chunks_running"][case]["f32_oracle"]
    running: list[float] = []
    perplexity(
        model.transformer,
        tokens,
        model.tokenizer.bos_id,
        n_ctx=256,
        chunks=6,
        on_chunk=lambda i, result: running.append(result.ppl),
    )
    np.testing.assert_allclose(running, want, rtol=ceiling)
    if case == "f16":
        activity = [feed_forward.activity for _, feed_forward, _ in model.transformer.layers]
        fractions = [a.predicted / a.tokens / model.spec.layers[0].feed_forward.n_ff for a in activity]
        np.testing.assert_allclose(fractions, reference["relu-a"]["active_fraction_per_layer_f16"], atol=0.002)


def test_relu_a_in_f16_is_the_same_without_its_predictors(shared_data: Path) -> None:
    text = (shared_data / "kjv.txt").read_text()
    results = []
    for dense in (False, True):
        model = load(shared_data / "relu-a" / "relu-a-f16.powerinfer.gguf", dense=dense)
        tokens = model.tokenizer.encode(text, parse_special=False)
        results.append(perplexity(model.transformer, tokens, model.tokenizer.bos_id, n_ctx=256, chunks=2).ppl)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


def test_native_and_torch_name_the_same_next_token(shared_data: Path) -> None:
    from powerinfer.backends.interface import Batch

    text = (shared_data / "kjv.txt").read_text()
    for kind in ("f16", "q4_0"):
        logits = {}
        for backend in ("torch", "native"):
            model = load(shared_data / "relu-a" / f"relu-a-{kind}.powerinfer.gguf", backend=backend)
            tokens = np.array(model.tokenizer.encode(text)[:64], np.int32)
            batch = Batch.of_sequence(tokens, 0, np.arange(64))
            logits[backend] = model.transformer.forward(batch, model.transformer.kv_cache(64))
        top = np.sort(logits["torch"], axis=1)
        clear = top[:, -1] - top[:, -2] > 0.1
        assert clear.sum() > 40
        np.testing.assert_array_equal(logits["torch"].argmax(1)[clear], logits["native"].argmax(1)[clear])


@pytest.mark.slow
def test_smollm2_is_as_float32_has_it(shared_data: Path, reference: dict[str, Any], smollm2: Path) -> None:
    model = load(smollm2)
    tokens = model.tokenizer.encode((shared_data / "kjv.txt").read_text(), parse_special=False)
    want = reference["smollm2"]["perplexity_kjv"]
    assert len(tokens) == want["tokens"]
    result = perplexity(model.transformer, tokens, None, n_ctx=want["n_ctx"])
    np.testing.assert_allclose(result.ppl, want["f32_weights_dequantized"], rtol=2e-4)
