"""Writing GGUF files: metadata first, then tensors one at a time, whatever the size of the whole."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer.errors import UsageError
from powerinfer.formats.encoding import encode_value
from powerinfer.formats.metadata import Metadata
from powerinfer.formats.output_file import OutputFile
from powerinfer.formats.part import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, POWERINFER_MAGIC, is_alignment
from powerinfer.formats.split import SPLIT_KEYS
from powerinfer.formats.tensor_info import MAX_NAME_BYTES, Layout, check_shape, stored_type_id, tensor_nbytes
from powerinfer.formats.value_types import MAX_KEY_BYTES, ValueType, one_line

VERSION = 3
ARCHITECTURE_KEY = "general.architecture"


@dataclass(slots=True)
class _Slot:
    """A declared tensor: offset from the start of the data section."""

    layout: Layout
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    written: bool = False


class GGUFWriter:
    """Writes one GGUF file, which appears under its name when the `with` block ends well.

        with GGUFWriter("out.gguf", powerinfer=file.is_powerinfer) as writer:
            writer.copy_metadata(file.metadata)
            writer.add("general.file_type", 2)
            for info in file.tensors.values():
                writer.declare_tensor(info.name, info.layout, info.shape)
            for name in file.tensors:
                writer.write_tensor(name, file.tensor_bytes(name))

    All metadata and declarations come before the first tensor's data; the tensors themselves may come in any order.
    Misuse of this order is a ValueError, bad values and a full disk are PowerInferErrors.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        architecture: str | None = None,
        *,
        powerinfer: bool = False,
        check: Callable[[str], None] = lambda path: None,
    ) -> None:
        """architecture: `general.architecture`, None where it is copied or added. powerinfer: mark it to run sparsely.
        check: called with the path of the complete file before it has its name; where it raises, nothing is left.

        UsageError where there can be no file at `path`.
        """
        self._output = OutputFile(os.fspath(path), check)
        self._powerinfer = powerinfer
        self._values: dict[str, bytes] = {}
        self._slots: dict[str, _Slot] = {}
        self._alignment = DEFAULT_ALIGNMENT
        self._data_start: int | None = None
        if architecture is not None:
            self.add(ARCHITECTURE_KEY, architecture)

    def add(
        self, key: str, value: Any, value_type: ValueType | None = None, element_type: ValueType | None = None
    ) -> None:
        """Sets a metadata key, in place of an earlier value; `encode_value` says how types are inferred.

        Raises UsageError where the value does not fit its type or the key its length.
        """
        self._set(key, encode_value(key, value, value_type, element_type))

    def copy_metadata(self, metadata: Metadata, skip: Collection[str] = ()) -> None:
        """Copies keys with their types, byte for byte, but for `skip` and those that say the model is split."""
        for key in metadata:
            if key not in skip and key not in SPLIT_KEYS:
                self._set(key, metadata.encoded(key))

    def declare_tensor(self, name: str, layout: Layout, shape: Sequence[int]) -> None:
        """Announces a tensor: `layout` is a `QuantType` or a `TensorInfo.layout`, shape rows first.

        Raises FormatError where the shape does not fit the layout, UsageError for a bad name, UnsupportedError for a
        type that a file with PowerInfer's magic cannot name.
        """
        self._check_open()
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
            raise UsageError(f"the tensor name {one_line(name)!r} must have 1 to {MAX_NAME_BYTES} bytes")
        if name in self._slots:
            raise ValueError(f"tensor {name} is declared twice")
        stored_type_id(layout, self._powerinfer)
        check_shape(layout, name, shape)
        self._slots[name] = _Slot(layout, tuple(map(int, shape)), 0, tensor_nbytes(layout, shape))

    def write_tensor(self, name: str, data: npt.NDArray[Any] | Iterable[npt.NDArray[Any]]) -> None:
        """Writes a tensor's data, as one array or in pieces, whose bytes are taken as they are.

        Writes the header before the first one. PowerInferError where the disk is full.
        """
        if self._data_start is None:
            self._write_header()
        assert self._data_start is not None
        slot = self._slots[name]
        if slot.written:
            raise ValueError(f"tensor {name} is written twice")
        at = start = self._data_start + slot.offset
        for piece in [data] if isinstance(data, np.ndarray) else data:
            flat = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            if at + flat.nbytes - start > slot.nbytes:
                raise ValueError(f"tensor {name} takes {slot.nbytes} bytes, got more")
            self._output.write(flat.data, at)
            at += flat.nbytes
        if at - start != slot.nbytes:
            raise ValueError(f"tensor {name} takes {slot.nbytes} bytes, got {at - start}")
        slot.written = True

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors declared so far."""
        return sum(slot.nbytes for slot in self._slots.values())

    def _set(self, key: str, encoded: bytes) -> None:
        self._check_open()
        if not 1 <= len(key.encode()) <= MAX_KEY_BYTES:
            raise UsageError(f"the metadata key {one_line(key)!r} must have 1 to {MAX_KEY_BYTES} bytes")
        if key == ALIGNMENT_KEY:
            kind, value = struct.unpack_from("<II", encoded) if len(encoded) == 8 else (None, 0)
            if kind != ValueType.UINT32 or not is_alignment(value):
                raise UsageError(f"{ALIGNMENT_KEY} must be a u32, a power of two from 8")
            self._alignment = value
        self._values[key] = encoded

    def _check_open(self) -> None:
        if self._data_start is not None:
            raise ValueError("the header has been written: metadata and declarations come before tensor data")

    def _write_header(self) -> None:
        if ARCHITECTURE_KEY not in self._values:
            raise ValueError(f"{ARCHITECTURE_KEY} is missing")
        pieces = [
            POWERINFER_MAGIC if self._powerinfer else MAGIC,
            struct.pack("<IQQ", VERSION, len(self._slots), len(self._values)),
        ]
        for key, encoded in self._values.items():
            pieces += (_string(key), encoded)
        offset = 0
        for name, slot in self._slots.items():
            slot.offset = offset
            offset += self._aligned(slot.nbytes)
            dims = slot.shape[::-1]
            type_id = stored_type_id(slot.layout, self._powerinfer)
            pieces += (_string(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, slot.offset))
        header = b"".join(pieces)
        self._data_start = self._aligned(len(header))
        self._size = self._data_start + offset
        self._output.expect(self._size)
        self._output.write(header)

    def _aligned(self, n: int) -> int:
        return -(-n // self._alignment) * self._alignment

    def __enter__(self) -> GGUFWriter:
        self._output.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException as failure:
            self._output.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._output.__exit__(kind, error, trace)

    def _finish(self) -> None:
        if self._data_start is None:
            self._write_header()
        missing = [name for name, slot in self._slots.items() if not slot.written]
        if missing:
            raise ValueError(f"tensors without data: {', '.join(missing)}")
        self._output.truncate(self._size)  # the padding behind the last tensor, which some readers ask for


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
