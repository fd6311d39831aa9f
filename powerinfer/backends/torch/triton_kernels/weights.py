"""Matrices on the device, still quantized: the file's own bytes in an order that kernels load well.

A block of GGML is a small struct (18 bytes in Q4_0): read as it lies, no load is aligned. Here a row's quants are apart
from its scales, and runs of 16 bytes are what one thread takes (see `decode.py`, which states each layout). Bytes move
but their number stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from powerinfer.backends.torch.triton_kernels import decode
from powerinfer.errors import UsageError
from powerinfer.quantization import TYPES, QuantTensor, QuantType

Bytes = npt.NDArray[np.uint8]
Arrays = tuple[npt.NDArray[Any], ...]

CHUNK_BYTES = 1 << 24
"""Bytes that are packed at a time: temporaries on the host stay small beside a weight."""

FALLBACK = "F16"
"""What a type without a kernel becomes."""


@dataclass(frozen=True, slots=True)
class Format:
    """How matrices of a type lie on the device.

    decode: the function of `decode.py`. groups: of 16 elements in a unit, 1 or 2. pack: rows as the file has them,
    uint8 (n_rows, row_bytes), to one to three arrays (n_rows, any): quants, scales, superscales.
    """

    decode: Any
    groups: int
    pack: Callable[[Bytes], Arrays]

    @property
    def unit(self) -> int:
        """Elements that 16 bytes of quants hold."""
        return 16 * self.groups


def _pack_f16(rows: Bytes) -> Arrays:
    return (rows.view("<f2"),)


def _pack_f32(rows: Bytes) -> Arrays:
    return (rows.view("<f4"),)


def _pack_bf16(rows: Bytes) -> Arrays:
    return (rows.view("<i2"),)  # NumPy has no such type


def _pack_q4_0(rows: Bytes) -> Arrays:
    blocks = rows.reshape(len(rows), -1, 18)
    return _joined(blocks[..., 2:]), _joined(blocks[..., :2]).view("<f2")


def _pack_q8_0(rows: Bytes) -> Arrays:
    blocks = rows.reshape(len(rows), -1, 34)
    return _joined(blocks[..., 2:]).view(np.int8), _joined(blocks[..., :2]).view("<f2")


def _pack_q6_k(rows: Bytes) -> Arrays:
    n = len(rows)
    blocks = rows.reshape(n, -1, 210)
    ql, qh, scales, d = (blocks[..., a:b] for a, b in ((0, 128), (128, 192), (192, 208), (208, 210)))
    # to numbers in the order of elements, as quantization/kquants.py reads them, ..
    low = np.stack([ql.reshape(n, -1, 64) & 15, ql.reshape(n, -1, 64) >> 4], axis=2).reshape(n, -1, 2, 16)
    high = (qh.reshape(n, -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(n, -1, 4, 16)
    # .. and to the order of decode_q6_k: (unit, element), and (two units, element)
    nibbles = low[:, :, 0] | low[:, :, 1] << 4
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    quants = np.concatenate([nibbles.reshape(n, -1), pairs.reshape(n, -1)], axis=1)
    return quants, _joined(scales).view(np.int8), _joined(d).view("<f2")


def _joined(fields: Bytes) -> Bytes:
    """(n_rows, n_blocks, bytes) to contiguous (n_rows, n_blocks * bytes)."""
    return np.ascontiguousarray(fields).reshape(len(fields), -1)


FORMATS = {
    "F32": Format(decode.decode_plain, 1, _pack_f32),
    "F16": Format(decode.decode_plain, 1, _pack_f16),
    "BF16": Format(decode.decode_bf16, 1, _pack_bf16),
    "Q4_0": Format(decode.decode_q4_0, 2, _pack_q4_0),
    "Q8_0": Format(decode.decode_q8_0, 1, _pack_q8_0),
    "Q6_K": Format(decode.decode_q6_k, 2, _pack_q6_k),
}
"""By the name of the type. Types that are not here become F16 when they are uploaded."""


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A matrix on a device.

    type: what it is held as. shape: (n_rows, n_cols). tensors: quants, scales and superscales as `decode.py` reads
    them, each contiguous, (n_rows, any). Kernels take three: where a format has fewer, the first stands in.
    """

    type: QuantType
    shape: tuple[int, int]
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def format(self) -> Format:
        return FORMATS[self.type.name]

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first = self.tensors[0]
        quants, scales, superscales = (*self.tensors, first, first)[:3]
        return quants, scales, superscales


def upload(
    tensor: QuantTensor,
    device: torch.device,
    rows: npt.NDArray[np.integer[Any]] | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> DeviceWeight:
    """`tensor` (a matrix) on `device`: all of its rows, or those that `rows` lists, in that order.

    notify gets one line where the type has no kernel and the weight becomes float16.
    Raises ValueError for what is not a matrix or rows that it lacks, UsageError where the device's memory is too small.
    """
    if len(tensor.shape) != 2:
        raise ValueError(f"a tensor of shape {tensor.shape} is no matrix: only matrices are uploaded")
    n_rows, n_cols = tensor.shape
    chosen = np.arange(n_rows) if rows is None else np.asarray(rows)
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < n_rows:
        raise ValueError(f"rows {chosen.min()}..{chosen.max()} were asked for: the matrix has {n_rows}")
    held = tensor.type if tensor.type.name in FORMATS else TYPES.by_name(FALLBACK)
    if held is not tensor.type:
        bits = [8 * t.block_bytes / t.block_size for t in (tensor.type, held)]
        notify(
            f"weights of type {tensor.type.name} are held as {held.name} on the GPU, which takes"
            f" {bits[1] / bits[0]:.1f} times the memory: quantize to Q4_0 or Q8_0 for kernels without conversion"
        )
    pack, row_bytes = FORMATS[held.name].pack, held.row_bytes(n_cols)
    tensors = _allocate(pack(np.zeros((1, row_bytes), np.uint8)), len(chosen), device)
    run = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(chosen), run):
        arrays = pack(_rows_as(tensor, held, chosen[start : start + run]))
        for part, array in zip(tensors, arrays, strict=True):
            part[start : start + run].copy_(torch.from_numpy(array))
    return DeviceWeight(held, (len(chosen), n_cols), tensors)


def _rows_as(tensor: QuantTensor, held: QuantType, rows: npt.NDArray[np.integer[Any]]) -> Bytes:
    """Fresh bytes (n_rows, row_bytes) of type `held`."""
    data = np.ascontiguousarray(tensor.data.reshape(tensor.shape[0], -1)[rows])
    if held is tensor.type:
        return data
    return held.quantize_rows(QuantTensor(tensor.type, (len(rows), tensor.shape[1]), data).dequantize())


def _allocate(row: Arrays, n_rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Room for n_rows rows like `row`."""
    try:
        return tuple(torch.from_numpy(a).new_empty((n_rows, a.shape[1]), device=device) for a in row)
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        reason = str(error).splitlines()[0]
        raise UsageError(f"no memory on {device} for the weights ({reason}): choose a smaller --vram-budget") from None
