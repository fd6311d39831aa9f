"""Every block format against gguf-py."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from powerinfer.errors import UnsupportedError
from powerinfer.quantization import TYPES, QuantTensor, QuantType

ALL = [kind for kind in TYPES if kind.name != "F64"]
LEGACY = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
F16_FIELDS = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q8_0": 1}


def oracle(kind: QuantType, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(dequantize(blocks, gguf.GGMLQuantizationType[kind.name]), np.float32)


def random_blocks(kind: QuantType, n: int, seed: int) -> np.ndarray:
    """Any bits, but for 16-bit floats that would be infinite or not a number."""
    blocks = np.random.default_rng(seed).integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    halves = blocks.reshape(-1)[: blocks.size // 2 * 2].view(np.uint16)
    halves[(halves & 0x7C00) == 0x7C00] ^= 0x4000
    return blocks


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_sizes_are_ggmls(kind: QuantType) -> None:
    number = gguf.GGMLQuantizationType[kind.name]
    assert kind.id == number
    assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[number]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_dequantize_is_gguf_pys(kind: QuantType) -> None:
    blocks = random_blocks(kind, 300, kind.id)
    have, want = kind.dequantize(blocks), oracle(kind, blocks)
    np.testing.assert_array_equal(np.isnan(have), np.isnan(want))
    finite = np.isfinite(want)
    size = np.abs(want[finite]).max()
    np.testing.assert_allclose(have[finite], want[finite], rtol=1e-6, atol=1e-6 * size)


def test_every_type_that_gguf_py_reads_is_registered() -> None:
    for number in gguf.GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[number][1]), np.uint8), number)
        except NotImplementedError:
            continue
        assert TYPES.by_id(number).name == number.name


def assert_quantizes_alike(name: str, rows: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        want = np.asarray(quantize(rows, gguf.GGMLQuantizationType[name])).view(np.uint8).reshape(len(rows), -1)
    np.testing.assert_array_equal(TYPES.by_name(name).quantize_rows(rows), want)


@pytest.mark.parametrize("name", [*LEGACY, "F16", "BF16", "F32"])
def test_quantize_is_byte_for_byte_gguf_pys(name: str) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((64, 96)) * size for size in (1e-30, 1e-6, 1.0, 1e3)]
    rows += [np.zeros((2, 96)), -np.zeros((2, 96)), np.full((2, 96), 3.5), np.full((2, 96), -7.0)]
    rows += [rng.integers(-8, 8, (64, 96)) / 2.0, np.eye(96)[:32]]
    assert_quantizes_alike(name, np.concatenate(rows).astype(np.float32))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(LEGACY),
    rows=hnp.arrays(np.float32, (3, 64), elements=st.floats(-60000, 60000, width=32, allow_subnormal=False)),
)
def test_quantize_is_gguf_pys_on_any_numbers(name: str, rows: np.ndarray) -> None:
    # Below this a scale's inverse is infinite and 0 * inf decides bytes: no weight is that small.
    assert_quantizes_alike(name, np.where(np.abs(rows) < 1e-30, np.float32(0), rows))


def test_a_tensor_dequantizes_to_its_shape_in_pieces() -> None:
    kind = TYPES.by_name("Q8_0")
    rows = np.random.default_rng(4).standard_normal((70, 4096)).astype(np.float32)
    tensor = QuantTensor(kind, (70, 4096), kind.quantize_rows(rows))
    assert tensor.dequantize().shape == (70, 4096)
    np.testing.assert_allclose(tensor.dequantize(), rows, atol=0.03)
    np.testing.assert_array_equal(tensor.rows(3, 9).dequantize(), tensor.dequantize()[3:9])


def test_a_type_that_is_only_read_says_so() -> None:
    with pytest.raises(UnsupportedError, match="IQ4_NL"):
        TYPES.by_name("iq4_nl").quantize_rows(np.zeros((1, 256), np.float32))
    with pytest.raises(UnsupportedError, match="tensor type 77"):
        TYPES.by_id(77)


def test_importing_the_types_imports_nothing_heavy() -> None:
    heavy = "{'gguf', 'torch', 'powerinfer.quantization._quantize'}"
    code = f"import sys, powerinfer.quantization; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
