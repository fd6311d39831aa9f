"""Every backend gives the logits of a float64 forward pass: whole prompts, single tokens, many sequences at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import TinyLlama, oracle

from powerinfer.backends import NAMES, create_backend
from powerinfer.backends.interface import Activation, BackendOptions, Batch, ModelSpec
from powerinfer.backends.native import _kernels
from powerinfer.errors import UsageError
from powerinfer.models import ModelOptions, Transformer, build_spec

# float32 sums, and for `native` a KV cache of 11 bits and activations of 15
CEILING = {"torch": 1e-5, "native": 2e-3}

MODELS = {
    "dense": TinyLlama(),
    "one KV head, tied head": TinyLlama(n_head_kv=1, tied=True, seed=1),
    "heads wider than the model": TinyLlama(head_dim=24, n_vocab=33, seed=2),
    "rotary scaling": TinyLlama(extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, seed=3),
    "part of a head turns": TinyLlama(extra={"llama.rope.dimension_count": 8}, seed=4),
    "dense relu": TinyLlama(extra={"powerinfer.activation": "relu"}, seed=5),
    "truthful predictor": TinyLlama(sparse=True, seed=6),
    "random predictor": TinyLlama(sparse=True, truthful=False, seed=7),
    "half precision": TinyLlama(kind="F16", sparse=True, seed=8),
    "bfloat16": TinyLlama(kind="BF16", seed=9),
    "q4_0": TinyLlama(kind="Q4_0", n_ff=352, rank=64, sparse=True, truthful=False, seed=10),
    "q8_0": TinyLlama(kind="Q8_0", n_ff=224, seed=11),
}


def tokens_of(spec: ModelSpec, n: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, spec.n_vocab, n).astype(np.int32)


def make(spec: ModelSpec, backend: str, n_threads: int = 2) -> Transformer:
    return Transformer(spec, create_backend(backend, BackendOptions(n_threads=n_threads)))


def spec_of(name: str, **options: object) -> ModelSpec:
    return build_spec(MODELS[name].build(), ModelOptions(**options))  # type: ignore[arg-type]


def error(have: npt.NDArray[np.float32], want: npt.NDArray[np.float64]) -> float:
    """The largest difference as a part of the logits' spread."""
    return float(np.abs(have - want).max() / want.std())


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_gives_the_oracles_logits(backend: str, name: str) -> None:
    spec = spec_of(name)
    tokens = tokens_of(spec, 21)
    model = make(spec, backend)
    logits = model.forward(Batch.of_sequence(tokens, 0, np.arange(21)), model.kv_cache(32))
    assert error(logits, oracle(spec, tokens)) < CEILING[backend]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_one_by_one_and_in_batches_give_the_same(backend: str, name: str) -> None:
    spec = spec_of(name)
    tokens = tokens_of(spec, 19)
    want = oracle(spec, tokens)
    model = make(spec, backend)
    cache = model.kv_cache(19)
    at = 0
    for n in (5, 1, 1, 8, 3, 1):
        outputs = np.array([n - 1])
        logits = model.forward(Batch.of_sequence(tokens[at : at + n], at, outputs), cache)
        at += n
        assert error(logits[0], want[at - 1]) < CEILING[backend]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", ["dense", "random predictor"])
def test_sequences_that_share_a_batch_do_not_see_each_other(backend: str, name: str) -> None:
    spec = spec_of(name)
    lengths = [4, 9, 1]
    sequences = [tokens_of(spec, n, seed=n) for n in lengths]
    model = make(spec, backend)
    cache = model.kv_cache(16, n_slots=3)
    batch = Batch(
        tokens=np.concatenate(sequences),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        slots=np.repeat(np.arange(3, dtype=np.int32), lengths),
        outputs=np.arange(sum(lengths), dtype=np.int32),
    )
    want = np.concatenate([oracle(spec, tokens) for tokens in sequences])
    assert error(model.forward(batch, cache), want) < CEILING[backend]


@pytest.mark.parametrize("backend", NAMES)
def test_a_truthful_predictor_changes_nothing(backend: str) -> None:
    tokens = tokens_of(spec_of("truthful predictor"), 17)
    logits = []
    for dense in (False, True):
        model = make(spec_of("truthful predictor", dense=dense), backend)
        logits.append(model.forward(Batch.of_sequence(tokens, 0, np.arange(17)), model.kv_cache(32)))
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", NAMES)
def test_activity_counts_neurons_named_and_fired(backend: str) -> None:
    spec = spec_of("random predictor")
    model = make(spec, backend)
    model.forward(Batch.of_sequence(tokens_of(spec, 11), 0, np.arange(11)), model.kv_cache(32))
    for _, feed_forward, _ in model.layers:
        activity = feed_forward.activity
        assert activity.tokens == 11
        assert 0.3 < activity.predicted / (11 * 100) < 0.7
        assert 0.3 < activity.fired / activity.predicted < 0.7
        feed_forward.clear_activity()
        assert feed_forward.activity.tokens == 0


@pytest.mark.parametrize("name", ["dense", "random predictor", "q4_0"])
def test_results_do_not_depend_on_the_number_of_threads(name: str) -> None:
    spec = spec_of(name)
    tokens = tokens_of(spec, 12)
    results = []
    for n_threads in (1, 2):
        model = make(spec, "native", n_threads)
        cache = model.kv_cache(16)
        model.forward(Batch.of_sequence(tokens[:11], 0, np.array([], np.int32)), cache)
        results.append(model.forward(Batch.of_sequence(tokens[11:], 11, np.array([0])), cache))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("isa", _kernels.instruction_sets())
@pytest.mark.parametrize("name", ["q4_0", "half precision", "q8_0"])
def test_every_instruction_set_gives_the_oracles_logits(isa: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERINFER_ISA", isa)
    spec = spec_of(name)
    tokens = tokens_of(spec, 9)
    model = make(spec, "native")
    assert isa in model.backend.describe()
    logits = model.forward(Batch.of_sequence(tokens, 0, np.arange(9)), model.kv_cache(16))
    assert error(logits, oracle(spec, tokens)) < CEILING["native"]


KV_CEILING = {"f32": 1e-4, "f16": 2e-3, "q8_0": 3e-2}
"""Errors that a KV cache of each type may cause."""


@pytest.mark.parametrize("isa", _kernels.instruction_sets())
@pytest.mark.parametrize(("k", "v"), [("f32", "f32"), ("f16", "f32"), ("q8_0", "q8_0"), ("q8_0", "f16")])
@pytest.mark.parametrize(("n_head", "n_head_kv", "head_dim"), [(6, 6, 32), (6, 2, 64), (7, 1, 32)])
def test_every_type_of_kv_cache(
    isa: str, k: str, v: str, n_head: int, n_head_kv: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POWERINFER_ISA", isa)
    shape = TinyLlama(n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim, seed=12)
    spec = build_spec(shape.build(), ModelOptions())
    tokens = tokens_of(spec, 75)
    want = oracle(spec, tokens)
    options = BackendOptions(n_threads=2, cache_type_k=k, cache_type_v=v)
    model = Transformer(spec, create_backend("native", options))
    cache = model.kv_cache(75)
    at = 0
    for n in (9, 1, 63, 1, 1):  # one to eight tokens and heads at a time, blocks of 64 positions and parts of them
        logits = model.forward(Batch.of_sequence(tokens[at : at + n], at, np.arange(n)), cache)
        assert error(logits, want[at : at + n]) < max(KV_CEILING[k], KV_CEILING[v])
        at += n


def test_a_kv_cache_takes_the_bytes_of_its_types() -> None:
    spec = build_spec(TinyLlama(head_dim=32, n_head_kv=2).build(), ModelOptions())
    for k, v, row in [("", "", 2 * 64), ("f32", "f16", 128 + 64), ("q8_0", "q8_0", 2 * 34)]:
        backend = create_backend("native", BackendOptions(cache_type_k=k, cache_type_v=v))
        assert backend.kv_cache(spec, 10, 3).nbytes == 2 * 3 * 2 * 10 * row
    assert create_backend("torch", BackendOptions(cache_type_v="f16")).kv_cache(spec, 10).nbytes == 2 * 2 * 10 * 192


def test_a_kv_cache_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(UsageError, match=r"-ctk\) is 'q5_0': this backend has f32, f16, q8_0"):
        create_backend("native", BackendOptions(cache_type_k="q5_0"))
    with pytest.raises(UsageError, match=r"-ctv\) is 'q8_0': this backend has f32, f16"):
        create_backend("torch", BackendOptions(cache_type_v="q8_0"))
    backend = create_backend("native", BackendOptions(cache_type_k="q8_0"))
    with pytest.raises(UsageError, match="a multiple of 32 elements, this model's have 16"):
        backend.kv_cache(spec_of("dense"), 8)


def test_a_long_context_is_attended_to_in_parts() -> None:
    spec = spec_of("one KV head, tied head")
    tokens = tokens_of(spec, 700)
    model = make(spec, "native")
    cache = model.kv_cache(700)
    model.forward(Batch.of_sequence(tokens[:699], 0, np.array([], np.int32)), cache)
    logits = model.forward(Batch.of_sequence(tokens[699:], 699, np.array([0])), cache)
    assert error(logits[0], oracle(spec, tokens)[-1]) < CEILING["native"]


def test_positions_and_tokens_out_of_range_are_refused() -> None:
    model = make(spec_of("dense"), "native")
    cache = model.kv_cache(4)
    with pytest.raises(IndexError, match="outside the KV cache"):
        model.forward(Batch.of_sequence(np.zeros(5, np.int32), 0, np.array([0])), cache)
    with pytest.raises(IndexError, match="no such token"):
        model.forward(Batch.of_sequence(np.array([61], np.int32), 0, np.array([0])), cache)
    with pytest.raises(IndexError, match="no such row"):
        model.forward(Batch.of_sequence(np.zeros(1, np.int32), 0, np.array([1])), cache)


def test_types_without_kernels_are_converted_with_a_notice() -> None:
    file = TinyLlama(n_embd=256, head_dim=32, n_head=8, n_ff=64, kind="F16").build()
    blocks = np.random.default_rng(1).integers(0, 256, (64, 110), dtype=np.uint8)
    blocks[:, 108:] = np.array([0.002], np.float16).view(np.uint8)
    from powerinfer.quantization import TYPES, QuantTensor

    file.tensors["blk.0.ffn_up.weight"] = QuantTensor(TYPES.by_name("Q3_K"), (64, 256), blocks)
    spec = build_spec(file, ModelOptions())
    notices: list[str] = []
    model = Transformer(spec, create_backend("native", BackendOptions(n_threads=1, notify=notices.append)))
    tokens = tokens_of(spec, 7)
    logits = model.forward(Batch.of_sequence(tokens, 0, np.arange(7)), model.kv_cache(8))
    assert error(logits, oracle(spec, tokens)) < CEILING["native"]
    assert len(notices) == 1
    assert "Q3_K" in notices[0]


def test_bad_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="unknown backend 'gpu'"):
        create_backend("gpu", BackendOptions())
    with pytest.raises(UsageError, match="no device 'nonsense'"):
        create_backend("torch", BackendOptions(device="nonsense"))
    with pytest.raises(UsageError, match="runs on the CPU, not on 'cuda'"):
        create_backend("native", BackendOptions(device="cuda"))
    monkeypatch.setenv("POWERINFER_ISA", "mmx")
    with pytest.raises(UsageError, match="POWERINFER_ISA is 'mmx'"):
        create_backend("native", BackendOptions())


def test_activations_by_name() -> None:
    assert spec_of("dense").layers[0].feed_forward.activation is Activation.SILU
    assert spec_of("dense relu").layers[0].feed_forward.activation is Activation.RELU
    assert spec_of("random predictor").layers[0].feed_forward.activation is Activation.RELU
