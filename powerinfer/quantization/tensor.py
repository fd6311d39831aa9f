"""A quantized weight as one object: bytes, type, logical shape. And the registry of types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from powerinfer.errors import UnsupportedError

CHUNK = 1 << 18
"""Elements that conversions take at a time. More makes temporaries outgrow the cache, fewer makes calls the cost."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantType:
    """A GGML tensor type: `block_size` elements of a row take `block_bytes` bytes.

    dequantize: uint8 (n_blocks, block_bytes) to float32 (n_blocks, block_size). quantize: the inverse, None where
    there is none here. overflow: a type without blocks turns numbers of this size and above into infinity.
    """

    name: str
    id: int
    block_size: int
    block_bytes: int
    dequantize: Callable[[Bytes], Floats]
    quantize: Callable[[Floats], Bytes] | None = None
    overflow: float = math.inf

    def quantize_rows(self, values: Floats) -> Bytes:
        """float32 (n_rows, n_cols) to uint8 (n_rows, row_bytes); n_cols must be a multiple of the block size.

        Raises UnsupportedError for a type that is only read here, FormatError for numbers that blocks cannot hold:
        infinite, not numbers, or too large.
        """
        if self.quantize is None:
            raise UnsupportedError(f"tensors cannot be converted to {self.name}: only reading it is supported")
        n_rows, n_cols = values.shape
        out = np.empty((n_rows, self.row_bytes(n_cols)), np.uint8)
        run = max(1, CHUNK // n_cols)
        for start in range(0, n_rows, run):
            rows = np.ascontiguousarray(values[start : start + run], np.float32)
            out[start : start + run] = self.quantize(rows.reshape(-1, self.block_size)).reshape(len(rows), -1)
        return out

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n elements; n must be a multiple of the block size."""
        return n // self.block_size * self.block_bytes


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """shape: logical, rows first, 1 to 4 dimensions. data: uint8 (n_rows, row_bytes), often a view of a mapped file."""

    type: QuantType
    shape: tuple[int, ...]
    data: Bytes

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, start: int, stop: int) -> QuantTensor:
        """Rows start..stop of a matrix, as a view."""
        return QuantTensor(self.type, (stop - start, *self.shape[1:]), self.data[start:stop])

    def dequantize(self) -> Floats:
        """float32 of `shape`."""
        out = np.empty(math.prod(self.shape), np.float32)
        blocks = self.data.reshape(-1, self.type.block_bytes)
        run = max(1, CHUNK // self.type.block_size)  # blocks at a time, so that temporaries stay in the cache
        for start in range(0, len(blocks), run):
            values = self.type.dequantize(blocks[start : start + run])
            out[start * self.type.block_size :][: values.size] = values.reshape(-1)
        return out.reshape(self.shape)


class Registry:
    """Types by GGML id and by name (upper case)."""

    def __init__(self) -> None:
        self._by_id: dict[int, QuantType] = {}
        self._by_name: dict[str, QuantType] = {}

    def add(self, kind: QuantType) -> QuantType:
        self._by_id[kind.id] = kind
        self._by_name[kind.name] = kind
        return kind

    def by_id(self, id: int) -> QuantType:
        """Raises UnsupportedError for an id without an entry."""
        if id not in self._by_id:
            raise UnsupportedError(f"tensor type {id} is not supported: known are {self.describe()}")
        return self._by_id[id]

    def by_name(self, name: str) -> QuantType:
        """Raises UnsupportedError for a name without an entry."""
        if name.upper() not in self._by_name:
            raise UnsupportedError(f"tensor type {name!r} is not supported: known are {self.describe()}")
        return self._by_name[name.upper()]

    def __iter__(self) -> Iterator[QuantType]:
        return iter(self._by_name.values())

    def describe(self) -> str:
        return ", ".join(self._by_name)


TYPES = Registry()
