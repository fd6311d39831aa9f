"""The Triton kernels in Triton's interpreter, against dequantized weights.

Run by `test_triton_kernels.py`, in a process of its own: whether kernels are interpreted is settled when Triton is
imported.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from tiny_models import TinyLlama, oracle

from powerinfer.backends import create_backend
from powerinfer.backends.hybrid.backend import HybridBackend
from powerinfer.backends.hybrid.split import LayerSplit, Split
from powerinfer.backends.interface import Activation, BackendOptions, Batch
from powerinfer.backends.torch import TorchBackend
from powerinfer.backends.torch.triton_kernels import (
    FORMATS,
    DeviceWeight,
    Neurons,
    counters,
    layer_norm,
    linear,
    linear_transposed,
    rms_norm,
    sparse_feed_forward,
    upload,
)
from powerinfer.backends.torch.triton_store import TritonStore
from powerinfer.models import ModelOptions, Transformer, build_spec
from powerinfer.quantization import TYPES, QuantTensor

CPU = torch.device("cpu")
ODD_SIZES = (1, 3, 31, 33, 255)
# elements of a row: multiples of the type's block, not of a tile; rows of 2,080 and 4,352 take one token two steps
N_COLS = {"F32": 37, "F16": 2091, "BF16": 40, "Q4_0": 4128, "Q8_0": 2080, "Q6_K": 4352}
SHORT = {"F32": 37, "F16": 50, "BF16": 16, "Q4_0": 160, "Q8_0": 96, "Q6_K": 256}


def matrix(name: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> QuantTensor:
    """Random weights of a size that gives outputs of about one."""
    kind = TYPES.by_name(name)
    values = (rng.standard_normal((n_rows, n_cols)) / np.sqrt(n_cols)).astype(np.float32)
    return QuantTensor(kind, (n_rows, n_cols), kind.quantize_rows(values))


def floats(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def exact(weight: QuantTensor) -> torch.Tensor:
    return torch.from_numpy(weight.dequantize()).double()


def close(have: torch.Tensor, want: torch.Tensor, ceiling: float = 1e-5) -> bool:
    assert have.dtype == torch.float32
    assert have.shape == want.shape
    return bool((have - want).abs().max() < ceiling * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_takes_the_bytes_of_the_file(name: str) -> None:
    weight = matrix(name, 5, SHORT[name], np.random.default_rng(0))
    held = upload(weight, CPU)
    assert (held.nbytes, held.shape, held.type) == (weight.nbytes, weight.shape, weight.type)


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_a_block_comes_back(name: str) -> None:
    """Random bits, times the identity."""
    rng = np.random.default_rng(1)
    weight = matrix(name, 3, max(32, TYPES.by_name(name).block_size), rng)
    if name in ("Q4_0", "Q8_0", "Q6_K"):
        rows = weight.data.reshape(3, -1)
        scale_at = {"Q4_0": 0, "Q8_0": 0, "Q6_K": 208}[name]
        scales = rows[:, scale_at : scale_at + 2].copy()
        rows[:] = rng.integers(0, 256, rows.shape, dtype=np.uint8)
        rows[:, scale_at : scale_at + 2] = scales
    want = weight.dequantize()
    have = linear(torch.eye(weight.shape[1]), upload(weight, CPU)).T
    np.testing.assert_array_equal(have.numpy(), want)
    for row in range(3):
        np.testing.assert_array_equal(linear_transposed(torch.eye(3)[row : row + 1], upload(weight, CPU))[0], want[row])


@pytest.mark.parametrize(
    ("name", "n_tokens"), [*((name, n) for name in FORMATS for n in (1, 3, 33)), ("Q4_0", 31), ("Q4_0", 255)]
)
def test_products_with_odd_numbers_of_tokens(name: str, n_tokens: int) -> None:
    rng = np.random.default_rng(n_tokens)
    n_cols = N_COLS[name] if n_tokens == 1 or (n_tokens == 3 and name == "Q4_0") else SHORT[name]
    weight = matrix(name, 31, n_cols, rng)
    x, bias = floats(rng, n_tokens, n_cols), floats(rng, 31)
    assert close(linear(x, upload(weight, CPU), bias), x.double() @ exact(weight).T + bias)


@pytest.mark.parametrize(("name", "n_rows"), [*((name, n) for name in FORMATS for n in (1, 3)), ("Q4_0", 255)])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_products_with_odd_numbers_of_rows(
    name: str, n_rows: int, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powerinfer.backends.torch.triton_kernels.products.FEW_ROWS", 200)
    rng = np.random.default_rng(n_rows)
    weight = matrix(name, n_rows, SHORT[name], rng)
    x, h = floats(rng, n_tokens, SHORT[name]), floats(rng, n_tokens, n_rows)
    held, bias = upload(weight, CPU), floats(rng, SHORT[name])
    assert close(linear(x, held), x.double() @ exact(weight).T)
    assert close(linear_transposed(h, held, bias), h.double() @ exact(weight) + bias)


@pytest.mark.parametrize("n_rows", [31, 255])
def test_programs_of_four_rows(monkeypatch: pytest.MonkeyPatch, n_rows: int) -> None:
    monkeypatch.setattr("powerinfer.backends.torch.triton_kernels.products.FEW_ROWS", 9)
    rng = np.random.default_rng(2)
    weight, x = matrix("Q4_0", n_rows, 32, rng), floats(rng, 1, 32)
    assert close(linear(x, upload(weight, CPU)), x.double() @ exact(weight).T)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_half_precision_activations(n_tokens: int) -> None:
    rng = np.random.default_rng(3)
    weight, x = matrix("Q8_0", 9, 64, rng), floats(rng, n_tokens, 64).half()
    assert close(linear(x, upload(weight, CPU)), x.double() @ exact(weight).T)


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q6_K"])
def test_rows_can_be_chosen_at_upload(name: str) -> None:
    rng = np.random.default_rng(4)
    weight, x = matrix(name, 20, SHORT[name], rng), floats(rng, 1, SHORT[name])
    rows = np.array([19, 0, 7])
    held = upload(weight, CPU, rows)
    assert held.nbytes == weight.nbytes * 3 // 20
    assert close(linear(x, held), x.double() @ exact(weight)[rows].T)
    assert linear(x, upload(weight, CPU, np.array([], np.int64))).shape == (1, 0)
    with pytest.raises(ValueError, match=r"rows 0..20 were asked for: the matrix has 20"):
        upload(weight, CPU, np.array([0, 20]))


def test_a_type_without_a_kernel_becomes_float16_and_says_so() -> None:
    rng = np.random.default_rng(5)
    weight, x = matrix("Q5_1", 6, 64, rng), floats(rng, 1, 64)
    notices: list[str] = []
    held = upload(weight, CPU, notify=notices.append)
    assert held.nbytes == 6 * 64 * 2
    assert len(notices) == 1
    assert "Q5_1 are held as F16" in notices[0]
    assert close(linear(x, held), x.double() @ exact(weight).T, ceiling=1e-3)


ACTIVATIONS = {
    Activation.IDENTITY: lambda x: x,
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
    Activation.GELU: lambda x: F.gelu(x, approximate="tanh"),
}


def reference(x: torch.Tensor, parts: dict[str, QuantTensor], neurons: Neurons, mask: torch.Tensor) -> torch.Tensor:
    """h in float64."""
    up = x.double() @ exact(parts["up"]).T + (0 if neurons.up_bias is None else neurons.up_bias)
    if neurons.gate is None:
        return ACTIVATIONS[neurons.activation](up) * mask
    gate = x.double() @ exact(parts["gate"]).T + (0 if neurons.gate_bias is None else neurons.gate_bias)
    return ACTIVATIONS[neurons.activation](gate) * ACTIVATIONS[neurons.up_activation](up) * mask


@pytest.mark.parametrize(
    ("name", "gated", "activation", "up_activation"),
    [
        ("Q4_0", True, Activation.RELU, Activation.IDENTITY),  # llama
        ("Q8_0", True, Activation.RELU, Activation.RELU),  # bamboo
        ("F16", False, Activation.RELU, Activation.IDENTITY),  # falcon, opt
        ("Q6_K", True, Activation.SILU, Activation.IDENTITY),
        ("F32", False, Activation.GELU, Activation.IDENTITY),
    ],
)
@pytest.mark.parametrize(("n_tokens", "n_rows"), [(1, 9), (3, 33), (33, 3)])
def test_the_sparse_feed_forward(
    name: str, gated: bool, activation: Activation, up_activation: Activation, n_tokens: int, n_rows: int
) -> None:
    rng = np.random.default_rng(n_rows)
    n = SHORT[name]
    parts = {part: matrix(name, n_rows, n, rng) for part in ("gate", "up", "down")}
    held: dict[str, DeviceWeight] = {part: upload(weight, CPU) for part, weight in parts.items()}
    biases = (floats(rng, n_rows), floats(rng, n_rows) if gated else None)
    neurons = Neurons(held["up"], held["down"], held["gate"] if gated else None, activation, up_activation, *biases)
    x, bias = floats(rng, n_tokens, n), floats(rng, n)
    mask = torch.from_numpy(rng.random((n_tokens, n_rows)) < 0.4)
    counts = counters(CPU)
    out = sparse_feed_forward(x, neurons, mask, bias, counts)
    h = reference(x, parts, neurons, mask)
    assert close(out, h @ exact(parts["down"]) + bias)
    if activation is not Activation.GELU:  # a float32 GELU may vanish where a float64 one does not
        assert counts.tolist() == [int(mask.sum()), int(torch.count_nonzero(h))]
    sparse_feed_forward(x, neurons, mask, bias, counts)
    assert int(counts[0]) == 2 * int(mask.sum())
    torch.testing.assert_close(sparse_feed_forward(x, neurons, mask.to(torch.uint8), bias), out, rtol=0, atol=0)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_rows_that_are_not_needed_are_not_read(n_tokens: int) -> None:
    """A row that is read is NaN."""
    rng = np.random.default_rng(6)
    gate, up, down = (rng.standard_normal((40, 16)).astype(np.float32) for _ in range(3))
    x = torch.ones(n_tokens, 16)
    masked, closed = np.arange(0, 40, 4), np.arange(1, 40, 4)
    gate[closed] = -1
    gate[np.setdiff1d(np.arange(40), closed)] = 1
    want = np.delete(gate.sum(1) * up.sum(1), [*masked, *closed]) @ np.delete(down, [*masked, *closed], axis=0)
    gate[masked] = up[masked] = down[masked] = np.nan
    up[closed] = np.nan
    if n_tokens == 1:
        down[closed] = np.nan
    kind = TYPES.by_name("F32")
    held = [upload(QuantTensor(kind, (40, 16), kind.quantize_rows(w)), CPU) for w in (up, down, gate)]
    mask = torch.ones(n_tokens, 40, dtype=torch.bool)
    mask[:, masked] = False
    out = sparse_feed_forward(x, Neurons(*held), mask)
    np.testing.assert_allclose(out, np.tile(want, (n_tokens, 1)), rtol=1e-5, atol=1e-4)


def test_more_rows_than_a_tile() -> None:
    rng = np.random.default_rng(10)
    weight, mask = matrix("Q4_0", 255, 32, rng), torch.from_numpy(rng.random((3, 255)) < 0.6)
    held, x = upload(weight, CPU), floats(rng, 3, 32)
    neurons = Neurons(held, held, held)
    want = reference(x, {"gate": weight, "up": weight}, neurons, mask) @ exact(weight)
    assert close(sparse_feed_forward(x, neurons, mask), want)


def test_nothing_active_leaves_the_bias() -> None:
    rng = np.random.default_rng(7)
    held = upload(matrix("Q4_0", 40, 32, rng), CPU)
    bias = floats(rng, 32)
    for n_tokens in (1, 2):
        mask = torch.zeros(n_tokens, 40, dtype=torch.bool)
        out = sparse_feed_forward(floats(rng, n_tokens, 32), Neurons(held, held, held), mask, bias)
        torch.testing.assert_close(out, bias.expand(n_tokens, 32), rtol=0, atol=0)


def test_a_list_over_many_blocks_of_rows() -> None:
    """The list's parts join; 20,000 rows take more than one chunk of counting."""
    rng = np.random.default_rng(8)
    values: npt.NDArray[np.float32] = rng.integers(-9, 9, (20_000, 1)).astype(np.float32)
    kind = TYPES.by_name("F32")
    held = upload(QuantTensor(kind, values.shape, kind.quantize_rows(values)), CPU)
    mask = torch.from_numpy(rng.random((1, 20_000)) < 0.001)
    mask[0, [0, 1023, 1024, 19_999]] = True
    counts = counters(CPU)
    out = sparse_feed_forward(torch.ones(1, 1), Neurons(held, held), mask, counts=counts)
    active = values[mask[0].numpy(), 0]
    assert out.item() == float((np.maximum(active, 0) * active).sum())
    assert counts.tolist() == [len(active), int((active > 0).sum())]


@pytest.mark.parametrize("n", ODD_SIZES)
def test_norms(n: int) -> None:
    rng = np.random.default_rng(n)
    x, weight, bias = 3 + floats(rng, 3, n), floats(rng, n), floats(rng, n)
    rms = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert close(rms_norm(x, weight, 1e-5), rms)
    assert close(rms_norm(x, weight, 1e-5, bias), rms + bias)
    want = F.layer_norm(x.double(), (n,), weight.double(), bias.double(), 1e-5)
    assert close(layer_norm(x, weight, 1e-5, bias), want)


def test_tensors_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(9)
    held, other = upload(matrix("Q4_0", 8, 64, rng), CPU), upload(matrix("Q4_0", 9, 64, rng), CPU)
    x = floats(rng, 2, 64)
    with pytest.raises(ValueError, match=r"x has the shape 2 x 63, expected any x 64"):
        linear(x[:, 1:], held)
    with pytest.raises(ValueError, match=r"x is torch.float64, expected torch.float32 or torch.float16"):
        linear(x.double(), held)
    with pytest.raises(ValueError, match=r"x has the strides \(1, 2\): call contiguous"):
        linear(x.T.contiguous().T, held)
    with pytest.raises(ValueError, match="x is on meta, the weights are on cpu"):
        linear(x.to("meta"), held)
    with pytest.raises(ValueError, match=r"bias has the shape 9, expected 8"):
        linear(x, held, torch.zeros(9))
    with pytest.raises(ValueError, match=r"gate has the shape 9 x 64, expected 8 x 64"):
        Neurons(held, held, other)
    with pytest.raises(ValueError, match=r"mask has the shape 2 x 9, expected 2 x 8"):
        sparse_feed_forward(x, Neurons(held, held), torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="no matrix"):
        upload(QuantTensor(TYPES.by_name("F32"), (4,), np.zeros((1, 16), np.uint8)), CPU)
    with pytest.raises(ValueError, match="at most 65536"):
        rms_norm(torch.zeros(1, 70_000), torch.zeros(70_000), 1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_model_gives_the_oracles_logits(sparse: bool) -> None:
    tiny = TinyLlama(
        n_embd=32, n_ff=32, n_head=2, n_head_kv=1, n_layers=1, n_vocab=15, rank=32, kind="Q4_0", sparse=sparse,
        truthful=False,
    )  # fmt: skip
    spec = build_spec(tiny.build(), ModelOptions())
    tokens = np.arange(5, dtype=np.int32)
    want = oracle(spec, tokens)
    backend = TorchBackend(BackendOptions(), TritonStore(CPU, lambda line: None))
    model = Transformer(spec, backend)
    cache = model.kv_cache(8)
    have = [model.forward(Batch.of_sequence(tokens[:4], 0, np.arange(4)), cache)]
    have.append(model.forward(Batch.of_sequence(tokens[4:], 4, np.arange(1)), cache))
    assert np.abs(np.concatenate(have) - want).max() < 1e-5 * want.std()
    activity = model.layers[0][1].activity
    assert activity.tokens == 5
    assert (activity.predicted < 5 * 32) is sparse
    assert 0 < activity.fired <= activity.predicted


def test_a_split_model_gives_the_logits_of_the_cpu_alone() -> None:
    tiny = TinyLlama(n_embd=32, n_ff=64, n_head=2, n_head_kv=1, n_layers=2, n_vocab=15, kind="F16", sparse=True)
    spec = build_spec(tiny.build(), ModelOptions())
    hot = np.arange(0, 64, 3, dtype=np.int32)
    split = Split((LayerSplit(True, True, hot), LayerSplit(False, True, np.empty(0, np.int32))), True)
    store = TritonStore(CPU, lambda line: None)
    options = BackendOptions(n_threads=1, device="torch-cpu")
    results = []
    for backend in (HybridBackend(options, split, store), create_backend("native", BackendOptions(n_threads=1))):
        model = Transformer(spec, backend)
        cache = model.kv_cache(8)
        tokens = np.arange(5, dtype=np.int32)
        prompt = model.forward(Batch.of_sequence(tokens[:4], 0, np.arange(4)), cache)
        results.append(np.concatenate([prompt, model.forward(Batch.of_sequence(tokens[4:], 4, np.arange(1)), cache)]))
    assert np.abs(results[0] - results[1]).max() < 2e-3 * results[1].std()
