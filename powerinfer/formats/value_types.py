"""GGUF's metadata value types and how their fixed-size ones are laid out."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np
import numpy.typing as npt

RawBytes = npt.NDArray[np.uint8]

MAX_KEY_BYTES = 65535  # the specification's limit
MAX_ARRAY_DEPTH = 4  # arrays of arrays of arrays of arrays; known files hold none deeper than 1


class ValueType(IntEnum):
    """The type tag in front of a metadata value (u32), by the specification's names."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def label(self) -> str:
        """What messages call it: u32, string, ..."""
        return _LABELS[self]


_LABELS = {
    ValueType.UINT8: "u8",
    ValueType.INT8: "i8",
    ValueType.UINT16: "u16",
    ValueType.INT16: "i16",
    ValueType.UINT32: "u32",
    ValueType.INT32: "i32",
    ValueType.FLOAT32: "f32",
    ValueType.BOOL: "bool",
    ValueType.STRING: "string",
    ValueType.ARRAY: "array",
    ValueType.UINT64: "u64",
    ValueType.INT64: "i64",
    ValueType.FLOAT64: "f64",
}

# A bool is one byte, 0 or 1. Its dtype is uint8 here, so that the byte can be looked at before it is believed.
DTYPES: dict[ValueType, np.dtype[np.generic]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

INTEGER_LIMITS: dict[ValueType, tuple[int, int]] = {
    kind: (-(1 << 8 * dtype.itemsize - 1), (1 << 8 * dtype.itemsize - 1) - 1)
    if dtype.kind == "i"
    else (0, (1 << 8 * dtype.itemsize) - 1)
    for kind, dtype in DTYPES.items()
    if dtype.kind in "iu" and kind is not ValueType.BOOL
}

STRUCTS: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


def one_line(text: str, limit: int = 80) -> str:
    """`text` fit for a message: no control characters, no lone surrogates, not longer than `limit`."""
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
