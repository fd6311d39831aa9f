"""Protocol buffers' wire format, as far as a sentencepiece model needs it: numbers, floats, bytes and messages."""

from __future__ import annotations

import struct

_FLOAT = struct.Struct("<f")


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64-bit two's complement."""
    if 0 <= value < 128:  # nearly all of them
        return bytes((value,))
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def float32(field: int, value: float) -> bytes:
    return varint(field << 3 | 5) + _FLOAT.pack(value)


def message(field: int, contents: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(contents)) + contents


def string(field: int, text: str) -> bytes:
    return message(field, text.encode("utf-8", "replace"))
