"""Opening GGUF files: memory-mapped, every field checked, nothing read that is not asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer.errors import UnsupportedError
from powerinfer.formats.metadata import Metadata
from powerinfer.formats.part import Part
from powerinfer.formats.split import open_parts
from powerinfer.formats.tensor_info import TensorInfo
from powerinfer.formats.value_types import RawBytes, ValueType, one_line
from powerinfer.quantization import QuantTensor

# Types whose elements numpy has, by GGML name.
_ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file, or all parts of a split one by its first part.

    Raises UsageError where a file cannot be opened, FormatError where one is damaged, UnsupportedError where one needs
    a version, byte order or tensor type that is not supported. No tensor data is read.
    """
    return GGUFFile(open_parts(os.fspath(path)))


class GGUFFile:
    """An open GGUF file. Use it as a context manager, or call `close`.

    Tensors and arrays are read-only views of the mapped file. They stay valid after `close`, which gives the memory
    back as soon as the last one is gone.
    """

    def __init__(self, parts: list[Part]) -> None:
        first = parts[0]
        self.path = first.path
        self.paths: tuple[str, ...] = tuple(part.path for part in parts)
        self.is_powerinfer = first.is_powerinfer
        self.version = first.version
        self.alignment = first.alignment
        self.metadata: Metadata = first.metadata
        self.tensors: Mapping[str, TensorInfo] = {info.name: info for part in parts for info in part.tensors}
        self._parts = parts
        self._closed = False

    def get(self, key: str, default: object = None) -> Any:
        """The value of a metadata key: see `Metadata` for what it can be."""
        return self.metadata.get(key, default)

    def value_type(self, key: str) -> ValueType:
        """The GGUF type of a key's value (`metadata.element_type` has an array's); KeyError without the key."""
        return self.metadata.value_type(key)

    def tensor(self, name: str) -> QuantTensor | None:
        """A tensor, None without it; UnsupportedError where its type cannot be computed with."""
        info = self.tensors.get(name)
        if info is None:
            return None
        if info.type is None:
            raise UnsupportedError(
                f"tensor {one_line(name)!r} is of type {info.type_name}, which nothing here can compute with: "
                "use a model of another type"
            )
        row_bytes = info.type.row_bytes(info.shape[-1])
        return QuantTensor(info.type, info.shape, self._data(info).reshape(-1, row_bytes or 1))

    def tensor_bytes(self, name: str) -> RawBytes:
        """A tensor's data of whatever type as it is in the file, uint8 (nbytes,); KeyError without the tensor."""
        return self._data(self.tensors[name])

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """A tensor of plain numbers (f16 to f64, i8 to i64) in its own dtype and shape; None without it.

        UnsupportedError where its type has no numpy dtype.
        """
        info = self.tensors.get(name)
        if info is None:
            return None
        dtype = _ARRAY_DTYPES.get(info.type_name)
        if dtype is None:
            raise UnsupportedError(f"tensor {one_line(name)!r} is of type {info.type_name}: expected plain numbers")
        values: npt.NDArray[Any] = self._data(info).view(dtype)
        return values.reshape(info.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def n_elements(self) -> int:
        """Elements of all tensors: the model's number of parameters."""
        return sum(info.n_elements for info in self.tensors.values())

    def release_pages(self) -> None:
        """Gives the memory of pages read so far back; they are read again when they are touched."""
        for part in self._parts:
            part.release_pages()

    def close(self) -> None:
        """No more tensors can be asked for; views that were given out stay valid. Calling it again does nothing."""
        self._closed = True
        for part in self._parts:
            part.close()

    def _data(self, info: TensorInfo) -> RawBytes:
        if self._closed:
            raise ValueError(f"{self.path} has been closed")
        return self._parts[info.part].bytes[info.offset : info.offset + info.nbytes]

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path!r}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"
