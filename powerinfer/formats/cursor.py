"""Reading forward through a file's bytes without ever leaving them."""

from __future__ import annotations

from powerinfer.errors import FormatError
from powerinfer.formats.value_types import STRUCTS, RawBytes, ValueType, one_line

_U32 = STRUCTS[ValueType.UINT32]
_U64 = STRUCTS[ValueType.UINT64]


class Cursor:
    """A position in `raw`, uint8 (size,). Lengths are Python integers: no sum or product of them overflows."""

    def __init__(self, raw: RawBytes, path: str) -> None:
        self.raw = raw
        self.view = raw.data
        self.path = one_line(path, 400)
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.view) - self.at

    def error(self, message: str) -> FormatError:
        return FormatError(f"{self.path}: {message}")

    def take(self, n: int, what: str) -> int:
        """Moves on by n bytes and returns where they start; FormatError where fewer are left."""
        if n > self.left:
            raise self.error(f"{what} takes {n} bytes at byte {self.at}, but {self.left} are left: the file is cut off")
        start = self.at
        self.at = start + n
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.view, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.view, self.take(8, what))[0]
        return value

    def string(self, what: str) -> bytes:
        """A u64 length and that many bytes."""
        length = self.u64(f"the length of {what}")
        start = self.take(length, what)
        return bytes(self.view[start : self.at])

    def name(self, what: str, limit: int) -> str:
        """A string of 1..limit bytes of UTF-8."""
        length = self.u64(f"the length of {what}")
        if not 1 <= length <= limit:
            raise self.error(f"the length of {what} is {length}: expected 1 to {limit} bytes")
        start = self.take(length, what)
        encoded = bytes(self.view[start : self.at])
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is {encoded[:32]!r}: not UTF-8") from None
