"""Q2_K to Q6_K: blocks of 256 in sub-blocks, whose scales are quantized too. Layouts are GGML's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from powerinfer.quantization.kernels import quantizer
from powerinfer.quantization.tensor import TYPES, Bytes, Floats, QuantType

# 16 sub-blocks of 16: value = d * (scales & 15) * q - dmin * (scales >> 4). Of each 128 values, 32 bytes of qs hold the
# first 32 in their bits 0-1, the next 32 in bits 2-3, and so on.
_Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
# 16 sub-blocks of 16: value = d * (scale - 32) * (q - 4 where bit j / 32 of hmask[j % 32] is clear). qs as in Q2_K.
# Scales have 6 bits: low nibbles of 0..7 and 8..15 are in bytes 0..7, high pairs of 0..3, 4..7, .. in bits 0-1, 2-3, ..
# of bytes 8..11.
_Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
# 8 sub-blocks of 32: value = d * scale * q - dmin * min. Of each 64 values, 32 bytes of qs hold the first 32 in their
# low nibbles, the others in their high ones. For scales see `_six_bit_scales`.
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
# As Q4_K; bit s of qh[j] is bit 4 of value j of sub-block s.
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
# 16 sub-blocks of 16: value = d * scales * (q - 32). Of each 128 values, 64 bytes of ql hold the low nibbles of the
# first 64 in their low nibbles, the others in their high ones; 32 bytes of qh hold the high pairs as qs of Q2_K does.
_Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])

_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_NIBBLES = np.array([0, 4], np.uint8)[:, None]
_BITS = np.arange(8, dtype=np.uint8)[:, None]


def _fields(blocks: Bytes, layout: np.dtype[np.void]) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(blocks).view(layout)[:, 0]


def _scale(values: npt.NDArray[np.generic]) -> Floats:
    return values.astype(np.float32)[:, None]


def _unpack(packed: Bytes, n_chunks: int, shifts: Bytes, mask: int) -> Bytes:
    """(n, bytes) to (n, 256): each of n_chunks equal runs of bytes gives one run of values a shift."""
    n = len(packed)
    values: Bytes = (packed.reshape(n, n_chunks, 1, -1) >> shifts) & np.uint8(mask)
    return values.reshape(n, -1)


def _spread(scales: Floats) -> Floats:
    """(n, sub-blocks) to (n, 256)."""
    return np.repeat(scales, 256 // scales.shape[1], axis=1)


def _six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima, 8 each of 6 bits, from 12 bytes.

    Those of 0..3 are the low six bits of bytes 0..3 and 4..7; of 4..7, low nibbles are the nibbles of bytes 8..11 and
    high pairs the top bits of bytes 0..3 and 4..7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _dequantize_q2_k(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q2_K)
    scales = _scale(b["d"]) * (b["scales"] & 15)
    minima = _scale(b["dmin"]) * (b["scales"] >> 4)
    return _spread(scales) * _unpack(b["qs"], 2, _PAIRS, 3) - _spread(minima)


def _dequantize_q3_k(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q3_K)
    low = np.concatenate([b["scales"][:, :8] & 15, b["scales"][:, :8] >> 4], axis=1)
    high = _unpack(b["scales"][:, 8:], 1, _PAIRS, 3)
    scales = _scale(b["d"]) * ((low | (high << 4)).astype(np.float32) - 32)
    q = _unpack(b["qs"], 2, _PAIRS, 3).astype(np.float32)
    return _spread(scales) * (q - 4 * (1 - _unpack(b["hmask"], 1, _BITS, 1).astype(np.float32)))


def _dequantize_q4_k(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q4_K)
    scales, minima = _six_bit_scales(b["scales"])
    q = _unpack(b["qs"], 4, _NIBBLES, 15)
    return _spread(_scale(b["d"]) * scales) * q - _spread(_scale(b["dmin"]) * minima)


def _dequantize_q5_k(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q5_K)
    scales, minima = _six_bit_scales(b["scales"])
    q = _unpack(b["qs"], 4, _NIBBLES, 15) | (_unpack(b["qh"], 1, _BITS, 1) << 4)
    return _spread(_scale(b["d"]) * scales) * q - _spread(_scale(b["dmin"]) * minima)


def _dequantize_q6_k(blocks: Bytes) -> Floats:
    b = _fields(blocks, _Q6_K)
    q = _unpack(b["ql"], 2, _NIBBLES, 15) | (_unpack(b["qh"], 2, _PAIRS, 3) << 4)
    scales = _scale(b["d"]) * b["scales"]
    return _spread(scales) * (q.astype(np.float32) - 32)


for _name, _id, _bytes, _dequantize in (
    ("Q2_K", 10, 84, _dequantize_q2_k),
    ("Q3_K", 11, 110, _dequantize_q3_k),
    ("Q4_K", 12, 144, _dequantize_q4_k),
    ("Q5_K", 13, 176, _dequantize_q5_k),
    ("Q6_K", 14, 210, _dequantize_q6_k),
):
    TYPES.add(QuantType(_name, _id, 256, _bytes, _dequantize, quantizer(_name, _bytes)))
