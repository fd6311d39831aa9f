"""The metadata of a GGUF file: typed keys and values, checked when read and lazy where they are large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from powerinfer.formats.cursor import Cursor
from powerinfer.formats.string_array import LENGTH_BYTES, StringArray, scan_strings
from powerinfer.formats.value_types import (
    DTYPES,
    MAX_ARRAY_DEPTH,
    MAX_KEY_BYTES,
    STRUCTS,
    RawBytes,
    ValueType,
    one_line,
)

MAX_KEYS = 1 << 16  # each costs some 300 bytes of memory for as few as 14 in the file
MAX_NESTED_ARRAYS = 1 << 16  # in a whole file, for the same reason
KEY_BYTES = 8 + 1 + 4 + 1  # the least that a key and its value take


@dataclass(frozen=True, slots=True)
class _Entry:
    type: ValueType
    element: ValueType | None
    start: int  # of the type tag
    stop: int
    value: Any


class Metadata(Mapping[str, Any]):
    """Keys in file order to int, float, bool, str, read-only numpy array, `StringArray` or list of arrays.

    Numeric arrays are views of the mapped file and need not be aligned. Bytes of a string that are not UTF-8 decode
    to U+FFFD.
    """

    def __init__(self, raw: RawBytes, entries: dict[str, _Entry]) -> None:
        self._raw = raw
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def value_type(self, key: str) -> ValueType:
        """The type of a key's value; KeyError without the key."""
        return self._entries[key].type

    def element_type(self, key: str) -> ValueType | None:
        """The type of an array's elements, None where the value is no array; KeyError without the key."""
        return self._entries[key].element

    def encoded(self, key: str) -> bytes:
        """A value as the file holds it, type tag first: copying it keeps every type and every byte."""
        entry = self._entries[key]
        return self._raw[entry.start : entry.stop].tobytes()


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Reads `count` keys and values from `cursor`; FormatError for whatever is wrong with them."""
    if count > MAX_KEYS or count * KEY_BYTES > cursor.left:
        most = min(MAX_KEYS, cursor.left // KEY_BYTES)
        raise cursor.error(f"the number of metadata keys is {count}: this file can hold at most {most}")
    reader = _ValueReader(cursor)
    entries: dict[str, _Entry] = {}
    for i in range(count):
        key = cursor.name(f"metadata key {i}", MAX_KEY_BYTES)
        if key in entries:
            raise cursor.error(f"the metadata key {one_line(key)!r} appears twice")
        entries[key] = reader.entry(f"the value of {one_line(key)!r}")
    return Metadata(cursor.raw, entries)


class _ValueReader:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._nested = 0

    def entry(self, what: str) -> _Entry:
        start = self._cursor.at
        kind = self._type(f"the type of {what}")
        element, value = self._array(what, 1) if kind is ValueType.ARRAY else (None, self._scalar(kind, what))
        return _Entry(kind, element, start, self._cursor.at, value)

    def _type(self, what: str) -> ValueType:
        tag = self._cursor.u32(what)
        try:
            return ValueType(tag)
        except ValueError:
            raise self._cursor.error(f"{what} is {tag}: expected 0 to {max(ValueType)}") from None

    def _scalar(self, kind: ValueType, what: str) -> int | float | bool | str:
        cursor = self._cursor
        if kind is ValueType.STRING:
            return cursor.string(what).decode("utf-8", "replace")
        layout = STRUCTS[kind]
        value: int | float = layout.unpack_from(cursor.view, cursor.take(layout.size, what))[0]
        if kind is not ValueType.BOOL:
            return value
        if value not in (0, 1):
            raise cursor.error(f"{what} is {value}: a bool is 0 or 1")
        return value == 1

    def _array(self, what: str, depth: int) -> tuple[ValueType, Any]:
        element = self._type(f"the element type of {what}")
        count = self._cursor.u64(f"the length of {what}")
        if element is ValueType.STRING:
            return element, self._strings(count, what)
        if element is ValueType.ARRAY:
            return element, self._arrays(count, what, depth)
        return element, self._numbers(element, count, what)

    def _numbers(self, element: ValueType, count: int, what: str) -> Any:
        cursor, dtype = self._cursor, DTYPES[element]
        start = cursor.take(count * dtype.itemsize, f"{what} ({count} x {element.label})")
        values = cursor.raw[start : cursor.at].view(dtype)
        if element is not ValueType.BOOL:
            return values
        if count and values.max() > 1:
            raise cursor.error(f"{what} holds {values.max()}: a bool is 0 or 1")
        return values.view(np.bool_)

    def _strings(self, count: int, what: str) -> StringArray:
        cursor = self._cursor
        if count * LENGTH_BYTES > cursor.left:
            raise cursor.error(f"{what} has {count} strings, but {cursor.left} bytes are left: the file is cut off")
        bounds = scan_strings(cursor.view, cursor.at, count)
        if bounds is None:
            self._first_bad_string(count, what)
            raise cursor.error(f"{what} does not fit into the file")
        cursor.at = int(bounds[-1])
        return StringArray(cursor.raw, bounds)

    def _first_bad_string(self, count: int, what: str) -> None:
        """Raises the error of the first string that leaves the file."""
        for i in range(count):
            length = self._cursor.u64(f"the length of string {i} in {what}")
            self._cursor.take(length, f"string {i} in {what}")

    def _arrays(self, count: int, what: str, depth: int) -> list[Any]:
        cursor = self._cursor
        if depth >= MAX_ARRAY_DEPTH:
            raise cursor.error(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        self._nested += count
        if self._nested > MAX_NESTED_ARRAYS:
            raise cursor.error(f"{what} holds {count} arrays: more than {MAX_NESTED_ARRAYS} in a file")
        return [self._array(f"{what}[{i}]", depth + 1)[1] for i in range(count)]
