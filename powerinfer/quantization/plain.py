"""Types without blocks: F32, F16, BF16, F64."""

from __future__ import annotations

import numpy as np

from powerinfer.quantization.tensor import TYPES, Bytes, Floats, QuantType


def _f32_to_floats(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f32_to_bytes(values: Floats) -> Bytes:
    return values.astype("<f4").view(np.uint8).reshape(len(values), -1)


def _f16_to_floats(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _f16_to_bytes(values: Floats) -> Bytes:
    with np.errstate(over="ignore"):  # beyond 65504: infinity, as everywhere
        return values.astype("<f2").view(np.uint8).reshape(len(values), -1)


def _bf16_to_floats(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _bf16_to_bytes(values: Floats) -> Bytes:
    """The upper 16 bits of a float32, rounded to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits  # wraps around for some NaNs only
    rounded >>= 16
    upper = rounded.astype("<u2")
    if np.isnan(values).any():
        upper = np.where(np.isnan(values), (bits >> 16 | 0x40).astype("<u2"), upper)
    return upper.view(np.uint8).reshape(len(values), -1)


def _f64_to_floats(blocks: Bytes) -> Floats:
    return blocks.view("<f8").astype(np.float32)


F32 = TYPES.add(QuantType("F32", 0, 1, 4, _f32_to_floats, _f32_to_bytes))
F16 = TYPES.add(QuantType("F16", 1, 1, 2, _f16_to_floats, _f16_to_bytes, overflow=65520))
BF16 = TYPES.add(QuantType("BF16", 30, 1, 2, _bf16_to_floats, _bf16_to_bytes, overflow=255.5 * 2.0**120))
F64 = TYPES.add(QuantType("F64", 28, 1, 8, _f64_to_floats))
