"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 with one scale, and a minimum in the _1 types.

Layouts and roundings are GGML's; what `quantize` makes is byte for byte what gguf-py makes. Arithmetic is float32
throughout, as there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from powerinfer.quantization.tensor import TYPES, Bytes, Floats, QuantType

# value[j] = d * (q[j] - 8); q[j] is the low nibble of qs[j] for j < 16, the high nibble of qs[j - 16] above
_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
# value[j] = d * q[j] + m
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
# value[j] = d * (q[j] - 16); bit j of qh is bit 4 of q[j], the rest as in Q4_0
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
# value[j] = d * q[j] + m
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
# value[j] = d * q[j]
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])

_Any = npt.NDArray[np.generic]


def _fields(blocks: Bytes, layout: np.dtype[np.void]) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(blocks).view(layout)[:, 0]


def _column(values: _Any) -> Floats:
    return values.astype(np.float32)[:, None]


def _nibbles(qs: Bytes) -> Bytes:
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _fifth_bits(qh: Bytes) -> Bytes:
    return np.unpackbits(qh, axis=1, bitorder="little") << np.uint8(4)


def _dequantize_q4_0(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q4_0)
    return _column(b["d"]) * (_nibbles(b["qs"]).astype(np.float32) - 8)


def _dequantize_q4_1(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q4_1)
    return _column(b["d"]) * _nibbles(b["qs"]) + _column(b["m"])


def _dequantize_q5_0(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q5_0)
    return _column(b["d"]) * ((_nibbles(b["qs"]) | _fifth_bits(b["qh"])).astype(np.float32) - 16)


def _dequantize_q5_1(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q5_1)
    return _column(b["d"]) * (_nibbles(b["qs"]) | _fifth_bits(b["qh"])) + _column(b["m"])


def _dequantize_q8_0(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q8_0)
    return _column(b["d"]) * b["qs"]


def _inverse(d: Floats) -> Floats:
    """1 / d, and 0 where d is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse: Floats = np.where(d == 0, np.float32(0), np.float32(1) / d)
    return inverse


def _whole(values: Floats, highest: int) -> Bytes:
    """Rounds down to 0..highest."""
    with np.errstate(invalid="ignore"):
        whole: Bytes = np.trunc(values).astype(np.uint8)
    return whole.clip(0, highest)


def _symmetric(values: Floats, half: int) -> tuple[Floats, Bytes]:
    """Scale and numbers 0..2 half - 1 of blocks whose element of largest magnitude becomes exactly 0 (-half * d)."""
    top = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    d = top / np.float32(-half)
    with np.errstate(over="ignore", invalid="ignore"):
        return d, _whole(values * _inverse(d) + np.float32(half + 0.5), 2 * half - 1)


def _affine(values: Floats, highest: int) -> tuple[Floats, Floats, Bytes]:
    """Scale, minimum and numbers 0..highest."""
    low = values.min(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        d = (values.max(axis=1, keepdims=True) - low) / np.float32(highest)
        return d, low, _whole((values - low) * _inverse(d) + np.float32(0.5), highest)


def _pack(layout: np.dtype[np.void], q: Bytes, d: Floats, m: Floats | None = None) -> Bytes:
    out = np.empty(len(q), layout)
    with np.errstate(over="ignore"):
        out["d"] = d[:, 0]
        if m is not None:
            out["m"] = m[:, 0]
    out["qs"] = (q[:, :16] & 15) | (q[:, 16:] << 4)
    if "qh" in (layout.names or ()):
        out["qh"] = np.packbits(q >> 4, axis=1, bitorder="little")
    return out.view(np.uint8).reshape(len(q), -1)


def _quantize_q4_0(values: Floats) -> Bytes:
    d, q = _symmetric(values, 8)
    return _pack(_Q4_0, q, d)


def _quantize_q4_1(values: Floats) -> Bytes:
    d, m, q = _affine(values, 15)
    return _pack(_Q4_1, q, d, m)


def _quantize_q5_0(values: Floats) -> Bytes:
    d, q = _symmetric(values, 16)
    return _pack(_Q5_0, q, d)


def _quantize_q5_1(values: Floats) -> Bytes:
    d, m, q = _affine(values, 31)
    return _pack(_Q5_1, q, d, m)


def _quantize_q8_0(values: Floats) -> Bytes:
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values * _inverse(d)
        size = np.abs(scaled)
        whole = np.floor(size)
        rounded = np.copysign(whole + np.floor(2 * (size - whole)), scaled)  # halves go away from zero
        out = np.empty(len(values), _Q8_0)
        out["d"] = d[:, 0]
        out["qs"] = rounded.astype(np.int8)
    return out.view(np.uint8).reshape(len(values), -1)


Q4_0 = TYPES.add(QuantType("Q4_0", 2, 32, 18, _dequantize_q4_0, _quantize_q4_0))
Q4_1 = TYPES.add(QuantType("Q4_1", 3, 32, 20, _dequantize_q4_1, _quantize_q4_1))
Q5_0 = TYPES.add(QuantType("Q5_0", 6, 32, 22, _dequantize_q5_0, _quantize_q5_0))
Q5_1 = TYPES.add(QuantType("Q5_1", 7, 32, 24, _dequantize_q5_1, _quantize_q5_1))
Q8_0 = TYPES.add(QuantType("Q8_0", 8, 32, 34, _dequantize_q8_0, _quantize_q8_0))
