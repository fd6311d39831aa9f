"""A device and the CPU together give what the CPU alone does, however the model is split."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import TinyLlama

from powerinfer.backends import BackendOptions, create_backend
from powerinfer.backends.hybrid.backend import HybridBackend
from powerinfer.backends.hybrid.split import LayerSplit, Split
from powerinfer.backends.interface import Batch, ModelSpec
from powerinfer.models import ModelOptions, Transformer, build_spec

# Truthful predictors: where rounding turns a neuron on or off, its gate is almost closed.
MODELS = {
    "f32": TinyLlama(sparse=True, n_layers=3, seed=20),
    "q4_0": TinyLlama(kind="Q4_0", n_ff=352, rank=64, sparse=True, n_layers=3, seed=21),
    "one KV head": TinyLlama(kind="F16", n_head_kv=1, sparse=True, n_layers=3, seed=22),
}


def spec_of(name: str, **options: object) -> ModelSpec:
    return build_spec(MODELS[name].build(), ModelOptions(**options))  # type: ignore[arg-type]


def hybrid(spec: ModelSpec, split: Split, n_threads: int = 2) -> Transformer:
    return Transformer(spec, HybridBackend(BackendOptions(n_threads=n_threads, device="torch-cpu"), split))


def random_split(spec: ModelSpec, rng: np.random.Generator) -> Split:
    layers = []
    for layer in spec.layers:
        n_ff = layer.feed_forward.n_ff
        n_hot = int(rng.choice([0, 1, n_ff // 3, n_ff - 1, n_ff]))
        here = bool(rng.integers(0, 2))
        hot = np.sort(rng.permutation(n_ff)[:n_hot]).astype(np.int32)
        layers.append(LayerSplit(bool(rng.integers(0, 2)), here, hot if here else np.empty(0, np.int32)))
    return Split(tuple(layers), bool(rng.integers(0, 2)))


def logits_of(model: Transformer, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """A prompt of 20, one by one, and a few at once."""
    cache = model.kv_cache(len(tokens))
    rows, at = [], 0
    for n in (20, 1, 1, 4, 1):
        outputs = np.arange(n, dtype=np.int32)
        rows.append(model.forward(Batch.of_sequence(tokens[at : at + n], at, outputs), cache))
        at += n
    return np.concatenate(rows)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dense", [False, True])
def test_any_split_gives_the_same_logits(name: str, seed: int, dense: bool) -> None:
    spec = spec_of(name, dense=dense)
    tokens = np.random.default_rng(seed).integers(0, spec.n_vocab, 27).astype(np.int32)
    model = hybrid(spec, random_split(spec, np.random.default_rng(seed)))
    want = logits_of(Transformer(spec, create_backend("native", BackendOptions(n_threads=2))), tokens)
    errors = np.abs(logits_of(model, tokens) - want).max(axis=1) / want.std()
    # a quantized predictor is less than truthful: a neuron that rounding turns on shows in the tokens that see it
    assert np.median(errors) < 1e-3
    assert errors.max() < (5e-2 if name == "q4_0" else 2e-3)


def test_sides_count_activity_together() -> None:
    spec = spec_of("f32")
    tokens = np.arange(27, dtype=np.int32)
    alone = Transformer(spec, create_backend("native", BackendOptions()))
    logits_of(alone, tokens)
    half = np.arange(0, 100, 2, dtype=np.int32)
    model = hybrid(spec, Split((LayerSplit(True, True, half),) * 3, True))
    logits_of(model, tokens)
    for (_, mine, _), (_, other, _) in zip(model.layers, alone.layers, strict=True):
        assert mine.activity.tokens == other.activity.tokens
        assert mine.activity.predicted == pytest.approx(other.activity.predicted, rel=0.01)
        assert mine.activity.fired == pytest.approx(other.activity.fired, rel=0.01)
        mine.clear_activity()
        assert mine.activity.tokens == mine.activity.predicted == 0


def test_nothing_on_the_device_is_the_native_backend() -> None:
    spec = spec_of("q4_0")
    tokens = np.arange(27, dtype=np.int32)
    none = Split((LayerSplit(False, False, np.empty(0, np.int32)),) * 3, False)
    assert not none.uses_device
    native = Transformer(spec, create_backend("native", BackendOptions()))
    np.testing.assert_array_equal(logits_of(hybrid(spec, none), tokens), logits_of(native, tokens))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    spec = spec_of("q4_0")
    tokens = np.arange(27, dtype=np.int32)
    split = random_split(spec, np.random.default_rng(1))
    np.testing.assert_allclose(
        logits_of(hybrid(spec, split, 1), tokens), logits_of(hybrid(spec, split, 2), tokens), rtol=1e-5, atol=1e-5
    )
