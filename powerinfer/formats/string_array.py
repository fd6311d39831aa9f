"""An array of strings that stays in the file until it is looked at."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from powerinfer.formats.value_types import RawBytes

LENGTH_BYTES = 8  # each string is a u64 length and that many bytes, without an end mark


class StringArray(Sequence[str]):
    """Strings of a mapped file, decoded on access.

    Token strings in the wild hold bytes that are not UTF-8: these decode to U+FFFD, so that a str can always be
    printed. `to_bytes_list` gives what the file holds; `to_list("surrogateescape")` keeps distinct strings distinct.
    """

    def __init__(self, raw: RawBytes, bounds: npt.NDArray[np.int64]) -> None:
        """String i is `raw[bounds[i] + 8 : bounds[i + 1]]`; bounds int64 (n + 1,)."""
        self._raw = raw
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def bytes_at(self, index: int) -> bytes:
        """String `index` as it is in the file."""
        i = range(len(self))[index]
        return self._raw[int(self._bounds[i]) + LENGTH_BYTES : int(self._bounds[i + 1])].tobytes()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.bytes_at(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def to_list(self, errors: str = "replace") -> list[str]:
        """All strings; `errors` as bytes.decode has it."""
        return [piece.decode("utf-8", errors) for piece in self.to_bytes_list()]

    def to_bytes_list(self) -> list[bytes]:
        """All strings as they are in the file."""
        first = int(self._bounds[0])
        blob = self._raw[first : int(self._bounds[-1])].tobytes()
        ends = (self._bounds - first).tolist()
        return [blob[start + LENGTH_BYTES : stop] for start, stop in pairwise(ends)]

    def encoded(self) -> bytes:
        """Lengths and bytes of all strings, as a GGUF array holds them after its count."""
        return self._raw[int(self._bounds[0]) : int(self._bounds[-1])].tobytes()

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


def scan_strings(view: memoryview, start: int, count: int) -> npt.NDArray[np.int64] | None:
    """Where each of `count` strings from byte `start` on begins and the last one ends: int64 (count + 1,).

    None where they do not fit into `view`. The caller has checked that count * 8 bytes are left.
    """

    def positions() -> Iterator[int]:
        # Each string's place depends on the one before. No bound is checked inside: positions only grow, so the last
        # one tells, and reading a length past the end raises. 0.14 us a string, twice as fast as with a check.
        unpack = struct.Struct("<Q").unpack_from
        at = start
        for _ in range(count):
            yield at
            at += LENGTH_BYTES + unpack(view, at)[0]
        yield at

    try:
        bounds: npt.NDArray[Any] = np.fromiter(positions(), np.int64, count + 1)
    except (struct.error, OverflowError):
        return None
    return bounds if bounds[-1] <= len(view) else None
