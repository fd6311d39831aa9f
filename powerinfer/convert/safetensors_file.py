"""Safetensors files, memory-mapped: a JSON header that names types, shapes and offsets, then the tensors' bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from powerinfer.convert.json_files import parse_object
from powerinfer.convert.source import KINDS, SourceTensor, unsupported_type
from powerinfer.errors import FormatError, shown
from powerinfer.formats.mapped_file import MappedFile

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2} | {
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


class SafetensorsFile:
    """Every offset is checked against the file's size before anything is read through it.

    Layout: u64 length of the header, the header, data; `data_offsets` count from the start of the data.
    """

    def __init__(self, path: Path) -> None:
        """Raises FormatError for a header that is damaged or does not fit the file."""
        self._path = path
        self._file = MappedFile(str(path), "safetensors")
        raw = self._file.bytes
        length = int.from_bytes(raw[:LENGTH_BYTES].tobytes(), "little")
        if len(raw) < LENGTH_BYTES or length > min(len(raw) - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise FormatError(
                f"{path}: the header has {length} bytes, the file {len(raw)}: it is cut off or no safetensors file"
            )
        self._start = LENGTH_BYTES + length
        header = parse_object(raw[LENGTH_BYTES : self._start].tobytes(), f"the header of {path}")
        header.pop("__metadata__", None)
        self._entries = {name: self._entry(name, entry) for name, entry in header.items()}
        self.shapes = {name: shape for name, (_, shape, _) in self._entries.items()}

    def _entry(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int]:
        """Type, shape and where the data starts in the file, checked."""
        where = f"{self._path}: the tensor {shown(name)}"
        try:
            kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise FormatError(f"{where} is described by {shown(entry)}: the header is damaged") from None
        numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
        if any(type(n) is not int or n < 0 for n in numbers) or not isinstance(kind, str):
            raise FormatError(f"{where} is described by {shown(entry)}: the header is damaged")
        if kind not in _ITEM_BYTES:
            raise unsupported_type(self._path, name, kind)
        size = len(self._file.bytes) - self._start
        if stop > size:
            raise FormatError(
                f"{where} ends at byte {stop} of the data, but there are {size}: the file is cut off, download it again"
            )
        nbytes = math.prod(shape) * _ITEM_BYTES[kind]
        if stop - start != nbytes:
            raise FormatError(f"{where} takes {nbytes} bytes, but has {stop - start}: the header is damaged")
        return kind, tuple(shape), self._start + start

    def tensor(self, name: str) -> SourceTensor:
        """A view of the file. Raises UnsupportedError for a type that is not of KINDS."""
        kind, shape, start = self._entries[name]
        if kind not in KINDS:
            raise unsupported_type(self._path, name, kind)
        raw = self._file.bytes[start : start + math.prod(shape) * _ITEM_BYTES[kind]]
        return SourceTensor(name, KINDS[kind], raw.view(KINDS[kind].dtype).reshape(shape))

    def release_pages(self) -> None:
        self._file.release_pages()
