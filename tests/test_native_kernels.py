"""The C++ kernels of every instruction set that this processor runs, against gguf-py and float64."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize

from powerinfer.backends.native import _kernels

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
K_QUANTS = {"Q4_K": (144, slice(0, 4)), "Q5_K": (176, slice(0, 4)), "Q6_K": (210, slice(208, 210))}
"""Bytes of a block, and where its float16 scales are."""
FLOATS = ("F32", "F16", "BF16")
ODD_SIZES = (1, 3, 31, 33, 255)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@pytest.fixture(params=_kernels.instruction_sets())
def runtime(request: pytest.FixtureRequest) -> _kernels.Runtime:
    return _kernels.Runtime(request.param, n_threads=2, n_threads_batch=3)


def random_rows(name: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> Bytes:
    """Rows of type `name`: quantized normal numbers, or random bits with sane scales where gguf-py cannot quantize."""
    kind = gguf.GGMLQuantizationType[name]
    if name in K_QUANTS:
        size, scales = K_QUANTS[name]
        blocks = rng.integers(0, 256, (n_rows * n_cols // 256, size), dtype=np.uint8)
        values = rng.uniform(-0.05, 0.05, (len(blocks), (scales.stop - scales.start) // 2))
        blocks[:, scales] = values.astype(np.float16).view(np.uint8)
        return blocks.reshape(n_rows, -1)
    values = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
    return np.ascontiguousarray(quantize(values, kind)).view(np.uint8).reshape(n_rows, -1)


def oracle(name: str, rows: Bytes) -> npt.NDArray[np.float64]:
    kind = gguf.GGMLQuantizationType[name]
    plain = {"F32": np.float32, "F16": np.float16}
    values = rows.view(plain[name]) if name in plain else dequantize(rows, kind)
    return values.astype(np.float64)


def matrix(runtime: _kernels.Runtime, name: str, rows: Bytes, n_cols: int, pack: bool = False) -> _kernels.Matrix:
    return _kernels.Matrix(runtime, int(gguf.GGMLQuantizationType[name]), rows, n_cols, pack=pack)


def whole_activations(n_tokens: int, n_cols: int, rng: np.random.Generator) -> Floats:
    """Whole numbers up to 16383 that reach it in each block of 32: rounding them to 15 bits loses nothing."""
    x = rng.integers(-16383, 16384, (n_tokens, n_cols)).astype(np.float32)
    x[:, ::32] = rng.choice([-16383.0, 16383.0], (n_tokens, (n_cols + 31) // 32))
    return x


@pytest.mark.parametrize("name", QUANTIZED + FLOATS)
def test_dequantize_is_gguf_pys(runtime: _kernels.Runtime, name: str) -> None:
    rows = random_rows(name, 5, 512, np.random.default_rng(1))
    want = oracle(name, rows)
    have = matrix(runtime, name, rows, 512).dequantize()
    np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", QUANTIZED + FLOATS)
@pytest.mark.parametrize("n_rows", ODD_SIZES)
@pytest.mark.parametrize("pack", [False, True])
def test_products_of_odd_sizes_are_exact_to_rounding(
    runtime: _kernels.Runtime, name: str, n_rows: int, pack: bool
) -> None:
    rng = np.random.default_rng(n_rows)
    n_cols = 768
    rows = random_rows(name, n_rows, n_cols, rng)
    weights, handle = oracle(name, rows), matrix(runtime, name, rows, n_cols, pack)
    for n_tokens in ODD_SIZES[:4] if n_rows > 3 else ODD_SIZES:
        x = whole_activations(n_tokens, n_cols, rng)
        magnitude = np.abs(x) @ np.abs(weights.T)
        error = np.abs(_kernels.multiply(runtime, handle, x) - x @ weights.T)
        assert (error / magnitude).max() < 1e-6


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("n_cols", [1, 7, 9, 100])
def test_float_rows_of_any_length(runtime: _kernels.Runtime, name: str, n_cols: int) -> None:
    rng = np.random.default_rng(n_cols)
    rows = random_rows(name, 5, n_cols, rng)
    x = rng.standard_normal((3, n_cols)).astype(np.float32)
    have = _kernels.multiply(runtime, matrix(runtime, name, rows, n_cols), x)
    np.testing.assert_allclose(have, x @ oracle(name, rows).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", QUANTIZED)
def test_rounding_activations_costs_little(runtime: _kernels.Runtime, name: str) -> None:
    rng = np.random.default_rng(2)
    rows = random_rows(name, 255, 1024, rng)
    x = rng.standard_normal((3, 1024)).astype(np.float32)
    want = x @ oracle(name, rows).T
    have = _kernels.multiply(runtime, matrix(runtime, name, rows, 1024), x)
    assert np.square(have - want).sum() / np.square(want).sum() < 1e-8


def test_extreme_activations(runtime: _kernels.Runtime) -> None:
    rows = random_rows("Q4_0", 4, 64, np.random.default_rng(3))
    weights = oracle("Q4_0", rows)
    zeros = np.zeros((1, 64), np.float32)
    handle = matrix(runtime, "Q4_0", rows, 64)
    assert not _kernels.multiply(runtime, handle, zeros).any()
    for size in (1e-30, 1e30):
        x = np.full((1, 64), size, np.float32)
        np.testing.assert_allclose(_kernels.multiply(runtime, handle, x), x @ weights.T, rtol=1e-3, atol=1e-4 * size)


def test_a_handle_refuses_an_array_of_another_size(runtime: _kernels.Runtime) -> None:
    rows = random_rows("Q4_0", 4, 64, np.random.default_rng(4))
    with pytest.raises(ValueError, match="rows of this many elements"):
        matrix(runtime, "Q4_0", rows, 96)
    with pytest.raises(ValueError, match="rows of this many elements"):
        matrix(runtime, "Q4_0", rows, 33)
    with pytest.raises(ValueError, match="no kernels"):
        _kernels.Matrix(runtime, 999, rows, 64)
    with pytest.raises(ValueError, match="width"):
        _kernels.multiply(runtime, matrix(runtime, "Q4_0", rows, 64), np.zeros((1, 32), np.float32))


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no such instruction set"):
        _kernels.Runtime("sse9", 1, 1)
