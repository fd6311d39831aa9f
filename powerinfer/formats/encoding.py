"""Metadata values to GGUF's bytes: the type is inferred where it is not given, and the value must fit it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer.errors import UsageError
from powerinfer.formats.string_array import StringArray
from powerinfer.formats.value_types import DTYPES, INTEGER_LIMITS, MAX_ARRAY_DEPTH, STRUCTS, ValueType, one_line

_FLOATS = (ValueType.FLOAT32, ValueType.FLOAT64)
_TYPE_OF_DTYPE: dict[str, ValueType] = {dtype.str: kind for kind, dtype in DTYPES.items() if kind is not ValueType.BOOL}
_TYPE_OF_DTYPE[np.dtype(np.bool_).str] = ValueType.BOOL


def encode_value(key: str, value: Any, kind: ValueType | None = None, element: ValueType | None = None) -> bytes:
    """The type tag and the value as they stand in a file.

    value: int, float, bool, str, bytes, numpy scalar or array, `StringArray`, or a list of these. Without `kind`, an
    int is u32 (i32, u64, i64 where it does not fit), a float f32, and the ints of a list are i32 where they fit.
    Raises UsageError where the value does not fit its type.
    """
    try:
        kind = kind if kind is not None else _infer(value)
        if kind is ValueType.ARRAY:
            return _tag(kind) + _encode_array(value, element, 1)
        return _tag(kind) + _encode_scalar(value, kind)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        shown = one_line(repr(value))
        raise UsageError(f"metadata key {one_line(key)!r}: cannot store {shown}: {one_line(str(error), 200)}") from None


def _tag(kind: ValueType) -> bytes:
    return struct.pack("<I", kind)


def _infer(value: Any) -> ValueType:
    if isinstance(value, (bool, np.bool_)):
        return ValueType.BOOL
    if isinstance(value, np.generic):
        return _TYPE_OF_DTYPE[value.dtype.str] if value.dtype.str in _TYPE_OF_DTYPE else _infer(value.item())
    if isinstance(value, int):
        return _integer_type([value], (ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64))
    if isinstance(value, float):
        return ValueType.FLOAT32
    if isinstance(value, (str, bytes)):
        return ValueType.STRING
    if isinstance(value, (list, tuple, np.ndarray, StringArray)):
        return ValueType.ARRAY
    raise TypeError(f"no metadata type holds a {type(value).__name__}")


def _integer_type(values: Iterable[int], choices: tuple[ValueType, ...]) -> ValueType:
    low, high = min(values), max(values)
    for kind in choices:
        smallest, largest = INTEGER_LIMITS[kind]
        if smallest <= low and high <= largest:
            return kind
    raise OverflowError("an integer of more than 64 bits")


def _infer_element(values: Any) -> ValueType:
    if isinstance(values, StringArray):
        return ValueType.STRING
    if isinstance(values, np.ndarray):
        dtype = values.dtype.newbyteorder("<")
        if dtype.str not in _TYPE_OF_DTYPE:
            raise TypeError(f"no metadata type holds an array of {values.dtype}")
        return _TYPE_OF_DTYPE[dtype.str]
    if len(values) == 0:
        raise TypeError("the element type of an empty list must be given")
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return _integer_type(values, (ValueType.INT32, ValueType.UINT32, ValueType.INT64, ValueType.UINT64))
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return ValueType.FLOAT32
    return _infer(values[0])


def _encode_scalar(value: Any, kind: ValueType) -> bytes:
    if kind is ValueType.STRING:
        return _encode_string(value)
    if kind is ValueType.BOOL:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError("expected a bool")
        return bytes([bool(value)])
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError(f"expected a number ({kind.label})")
    if kind in _FLOATS:
        return STRUCTS[kind].pack(float(value))
    return STRUCTS[kind].pack(int(value) if isinstance(value, np.integer) else value)


def _encode_string(value: Any) -> bytes:
    if not isinstance(value, (str, bytes)):
        raise TypeError("expected a string")
    encoded = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def _encode_array(values: Any, element: ValueType | None, depth: int) -> bytes:
    if depth > MAX_ARRAY_DEPTH:
        raise ValueError(f"arrays nest more than {MAX_ARRAY_DEPTH} deep")
    if not isinstance(values, (list, tuple, np.ndarray, StringArray)):
        raise TypeError("expected a list")
    element = element if element is not None else _infer_element(values)
    head = _tag(element) + struct.pack("<Q", len(values))
    if element is ValueType.ARRAY:
        return head + b"".join(_encode_array(value, None, depth + 1) for value in values)
    if element is ValueType.STRING:
        return head + (
            values.encoded() if isinstance(values, StringArray) else b"".join(_encode_string(v) for v in values)
        )
    return head + _encode_numbers(values, element)


def _encode_numbers(values: Any, element: ValueType) -> bytes:
    array = values if isinstance(values, np.ndarray) else _array_of(values, element)
    if array.ndim != 1:
        raise TypeError("expected an array of one dimension")
    if len(array) == 0:
        return b""
    allowed = "b" if element is ValueType.BOOL else "iuf" if element in _FLOATS else "iu"
    if array.dtype.kind not in allowed:
        raise TypeError(f"expected elements of type {element.label}")
    if element in INTEGER_LIMITS:
        _check_range(int(array.min()), int(array.max()), element)
    with np.errstate(over="ignore"):
        stored = array.astype(DTYPES[element])
    if element in _FLOATS and np.isinf(stored).sum() != np.isinf(array).sum():
        raise OverflowError(f"an element is too large for {element.label}")
    return stored.tobytes()


def _array_of(values: Sequence[Any], element: ValueType) -> npt.NDArray[Any]:
    """A list as an array. Left to itself numpy would make floats of integers that no one integer type holds."""
    if element not in INTEGER_LIMITS or not all(isinstance(value, int) for value in values) or len(values) == 0:
        return np.asarray(values)
    if any(isinstance(value, bool) for value in values):
        raise TypeError(f"expected elements of type {element.label}")
    _check_range(min(values), max(values), element)
    return np.array(values, DTYPES[element])


def _check_range(low: int, high: int, element: ValueType) -> None:
    smallest, largest = INTEGER_LIMITS[element]
    if low < smallest or high > largest:
        raise OverflowError(f"an element is out of the range of {element.label}")
