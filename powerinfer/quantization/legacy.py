"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 with one scale, and a minimum in the _1 types.

Layouts and roundings are GGML's; what `quantize` makes is byte for byte what gguf-py makes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from powerinfer.quantization.kernels import quantizer
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


for _name, _id, _bytes, _dequantize in (
    ("Q4_0", 2, 18, _dequantize_q4_0),
    ("Q4_1", 3, 20, _dequantize_q4_1),
    ("Q5_0", 6, 22, _dequantize_q5_0),
    ("Q5_1", 7, 24, _dequantize_q5_1),
    ("Q8_0", 8, 34, _dequantize_q8_0),
):
    TYPES.add(QuantType(_name, _id, 32, _bytes, _dequantize, quantizer(_name, _bytes)))
