"""The C++ quantizers: how precise, how robust, and the same on every instruction set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from powerinfer.errors import FormatError
from powerinfer.quantization import TYPES, QuantType, _quantize

K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
ALL = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS]
SHAPE = (64, 512)

# Root mean square error of llama.cpp's `quantize --pure` (0c1e570) on the rows of `rows_of`, in their order.
LLAMA_CPP = {
    "Q2_K": (0.0059279, 0.012239, 0.13477, 0.18851, 0.090925, 2964),
    "Q3_K": (0.0029907, 0.0066449, 0.072198, 0.14444, 0.080706, 1496.9),
    "Q4_K": (0.0014181, 0.0032722, 0.031458, 0.042216, 0.021005, 709.2),
    "Q5_K": (0.00072062, 0.0016548, 0.015913, 0.020803, 0.010465, 360.19),
    "Q6_K": (0.00035484, 0.0008946, 0.0076507, 0.017709, 0.009163, 177.21),
}
DISTRIBUTIONS = ("normal", "heavy-tailed", "uniform", "positive", "off centre", "large")

# The most that the root mean square error of a block may be, of its largest magnitude.
BOUNDS = {"Q4_0": 0.13, "Q4_1": 0.07, "Q5_0": 0.065, "Q5_1": 0.035, "Q8_0": 0.005}
BOUNDS |= {"Q2_K": 0.4, "Q3_K": 0.18, "Q4_K": 0.09, "Q5_K": 0.05, "Q6_K": 0.02}


def rows_of(distribution: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    make = {
        "normal": lambda: rng.standard_normal(SHAPE) * 0.02,
        "heavy-tailed": lambda: rng.standard_t(3, SHAPE) * 0.02,
        "uniform": lambda: rng.uniform(-1, 1, SHAPE),
        "positive": lambda: np.abs(rng.standard_normal(SHAPE)),
        "off centre": lambda: rng.standard_normal(SHAPE) * 0.1 + 1,
        "large": lambda: rng.standard_normal(SHAPE) * 1e4,
    }
    return np.asarray(make[distribution](), np.float32)


def round_trip(kind: QuantType, rows: np.ndarray) -> np.ndarray:
    """Through gguf-py's reading of what is made here."""
    blocks = kind.quantize_rows(rows).reshape(-1, kind.block_bytes)
    return np.asarray(dequantize(blocks, gguf.GGMLQuantizationType[kind.name]), np.float64).reshape(rows.shape)


def rmse(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.square(have - want.astype(np.float64)).mean()))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", K_QUANTS)
def test_errors_are_smaller_than_llama_cpps(name: str, distribution: str) -> None:
    rows = rows_of(distribution)
    assert rmse(round_trip(TYPES.by_name(name), rows), rows) < LLAMA_CPP[name][DISTRIBUTIONS.index(distribution)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("isa", _quantize.instruction_sets())
def test_every_instruction_set_gives_the_same_bytes(isa: str, name: str) -> None:
    kind = TYPES.by_name(name)
    rng = np.random.default_rng(6)
    rows = rng.standard_t(2, (37, 512)) * 10 ** rng.uniform(-9, 3, (37, 1))
    rows[5] = 0
    rows[6, 64:] = -rows[6, 64:].clip(0)
    blocks = rows.astype(np.float32).reshape(-1, kind.block_size)
    have, want = (np.empty((len(blocks), kind.block_bytes), np.uint8) for _ in range(2))
    assert _quantize.quantize(name, blocks, have, isa) == -1
    assert _quantize.quantize(name, blocks, want) == -1
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", ALL)
def test_a_block_does_not_depend_on_its_neighbours(name: str) -> None:
    kind = TYPES.by_name(name)
    rows = np.random.default_rng(7).standard_normal((19, kind.block_size)).astype(np.float32)
    whole = kind.quantize_rows(rows)
    for n in (1, 2, 3, 15, 16, 17):
        np.testing.assert_array_equal(kind.quantize_rows(rows[:n]), whole[:n])


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(ALL),
    values=hnp.arrays(np.float32, (2, 256), elements=st.floats(-1000, 1000, width=32)),
    size=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_any_numbers_come_back_nearly_as_they_were(name: str, values: np.ndarray, size: float) -> None:
    kind = TYPES.by_name(name)
    rows = values * np.float32(size)
    back = round_trip(kind, rows).reshape(-1, kind.block_size)
    blocks = rows.reshape(-1, kind.block_size).astype(np.float64)
    assert np.isfinite(back).all()
    error = np.sqrt(np.square(back - blocks).mean(axis=1))
    # 4e-6: 127 times what a 16-bit scale may be off where it is below 6e-5
    assert (error <= BOUNDS[name] * np.abs(blocks).max(axis=1) + 4e-6).all()


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name: str) -> None:
    for zero in (0.0, -0.0):
        assert not round_trip(TYPES.by_name(name), np.full((3, 256), zero, np.float32)).any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.37, -0.37, 1.0, -123.0, 0.05])
def test_constant_rows_keep_their_value(name: str, value: float) -> None:
    np.testing.assert_allclose(round_trip(TYPES.by_name(name), np.full((2, 256), value, np.float32)), value, rtol=1e-3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-30, 1e-20, 1e-9])
def test_numbers_below_any_scale_become_next_to_nothing(name: str, size: float) -> None:
    with np.errstate(under="ignore"):
        rows = (np.random.default_rng(8).standard_normal((4, 256)) * size).astype(np.float32)
    assert np.abs(round_trip(TYPES.by_name(name), rows)).max() < 1e-7


@pytest.mark.parametrize("name", K_QUANTS)
def test_small_weights_are_not_lost_to_the_precision_of_scales(name: str) -> None:
    """The 16-bit scales of these are the smallest there are."""
    rows = (np.random.default_rng(9).standard_normal((16, 256)) * 1e-5).astype(np.float32)
    assert rmse(round_trip(TYPES.by_name(name), rows), rows) < 0.3e-5


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_wherever_it_is(name: str, bad: float) -> None:
    kind = TYPES.by_name(name)
    for n, row, column in ((1, 0, 0), (5, 3, kind.block_size - 1), (40, 39, 7), (40, 16, 20)):
        rows = np.ones((n, kind.block_size), np.float32)
        rows[row, column] = bad
        out = np.empty((n, kind.block_bytes), np.uint8)
        assert _quantize.quantize(name, rows, out) == row
        with pytest.raises(FormatError, match="infinite or not numbers"):
            kind.quantize_rows(rows)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1e11, 1e13, 3e38])
def test_numbers_too_large_for_the_scales_are_refused(name: str, size: float) -> None:
    rows = np.ones((3, 256), np.float32)
    rows[1, 200] = size
    with pytest.raises(FormatError, match=f"too large for {name}"):
        TYPES.by_name(name).quantize_rows(rows)


def test_the_kernel_checks_its_arguments() -> None:
    values, out = np.zeros((2, 256), np.float32), np.empty((2, 144), np.uint8)
    assert _quantize.quantize("Q4_K", values, out) == -1
    for wrong in (("Q9", values, out), ("Q4_K", values[:1], out), ("Q5_K", values, out), ("Q4_0", values, out)):
        with pytest.raises(ValueError, match=r"must have a row a block|nothing is quantized to"):
            _quantize.quantize(*wrong)
    with pytest.raises(ValueError, match="no such instruction set"):
        _quantize.quantize("Q4_K", values, out, "mmx")
    assert _quantize.quantize("Q4_K", np.empty((0, 256), np.float32), np.empty((0, 144), np.uint8)) == -1


def test_threads_quantize_at_the_same_time_and_alike() -> None:
    kind = TYPES.by_name("Q4_K")
    rows = np.random.default_rng(10).standard_normal((256, 1024)).astype(np.float32)
    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(kind.quantize_rows, np.split(rows, 8)))
    np.testing.assert_array_equal(np.concatenate(pieces), kind.quantize_rows(rows))
