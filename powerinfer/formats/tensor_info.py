"""The tensor directory of a GGUF file: names, types, shapes, and where the data is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.formats.cursor import Cursor
from powerinfer.formats.value_types import one_line
from powerinfer.quantization import TYPES, QuantType

MAX_TENSORS = 1 << 18  # each costs some 500 bytes of memory for as few as 33 in the file
MAX_NAME_BYTES = 1024  # llama.cpp itself stops at 63
MAX_DIMS = 4
INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # the least that an entry takes


class Layout(Protocol):
    """How a row is cut into blocks. A `QuantType` is one."""

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """The layout of a type that has no `QuantType` here: it can be listed and copied, but not computed with."""

    name: str
    id: int
    block_size: int
    block_bytes: int


I8 = PlainLayout("I8", 24, 1, 1)
I16 = PlainLayout("I16", 25, 1, 2)
I32 = PlainLayout("I32", 26, 1, 4)
_PLAIN: dict[int, Layout] = {layout.id: layout for layout in (I8, I16, I32)}

# PowerInfer's engine forked before the IQ types came, when integers had the ids that IQ2_XXS, IQ2_XS and IQ3_XXS got
# later. Files with its magic use the old ones: the I32 of a GPU index is type 18.
_FROM_POWERINFER = {16: I8.id, 17: I16.id, 18: I32.id}
_TO_POWERINFER = {new: old for old, new in _FROM_POWERINFER.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the directory.

    shape: rows first, 1 to 4 dimensions. offset: bytes from the start of its file. part: index into `GGUFFile.paths`.
    type: None where nothing here can compute with the type; `layout` is always there.
    """

    name: str
    layout: Layout
    type: QuantType | None
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0

    @property
    def type_id(self) -> int:
        """GGML's id of the type, which a file with PowerInfer's magic may call otherwise."""
        return self.layout.id

    @property
    def type_name(self) -> str:
        return self.layout.name

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def stored_type_id(layout: Layout, powerinfer: bool) -> int:
    """The id that a file with or without PowerInfer's magic has for a layout.

    UnsupportedError for a type whose id means another one in a file with that magic.
    """
    if not powerinfer:
        return layout.id
    if layout.id in _FROM_POWERINFER:
        raise UnsupportedError(f"a PowerInfer GGUF cannot hold tensors of type {layout.name}: choose another type")
    return _TO_POWERINFER.get(layout.id, layout.id)


def layout_of(type_id: int, powerinfer: bool = False) -> tuple[Layout, QuantType | None]:
    """The layout of the type a file calls `type_id` and, where it can be computed with, its `QuantType`.

    UnsupportedError for an unknown type.
    """
    if powerinfer:
        type_id = _FROM_POWERINFER.get(type_id, type_id)
    try:
        kind = TYPES.by_id(type_id)
    except UnsupportedError as unknown:
        return _plain_layout(type_id, unknown), None
    return kind, kind


def _plain_layout(type_id: int, unknown: UnsupportedError) -> Layout:
    if type_id in _PLAIN:
        return _PLAIN[type_id]
    import gguf  # only here: it takes 50 ms, and the usual types are registered

    try:
        kind = gguf.GGMLQuantizationType(type_id)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise unknown from None
    return PlainLayout(kind.name, type_id, block_size, block_bytes)


def tensor_nbytes(layout: Layout, shape: Sequence[int]) -> int:
    """Bytes of a tensor of `shape` (rows first), whose row length is a multiple of the block size."""
    return math.prod(shape) // layout.block_size * layout.block_bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry as the file has it: offset from the start of the data section."""

    name: str
    layout: Layout
    type: QuantType | None
    shape: tuple[int, ...]
    offset: int


def read_tensor_infos(cursor: Cursor, count: int, alignment: int, part: int, powerinfer: bool) -> list[TensorInfo]:
    """Reads the directory, and checks that the data it names is aligned, inside the file and without overlap."""
    if count > MAX_TENSORS or count * INFO_BYTES > cursor.left:
        most = min(MAX_TENSORS, cursor.left // INFO_BYTES)
        raise cursor.error(f"the number of tensors is {count}: this file can hold at most {most}")
    entries: dict[str, _Entry] = {}
    for i in range(count):
        name = cursor.name(f"the name of tensor {i}", MAX_NAME_BYTES)
        if name in entries:
            raise cursor.error(f"the tensor {one_line(name)!r} appears twice")
        entries[name] = _read_entry(cursor, name, alignment, powerinfer)
    data_start = -(-cursor.at // alignment) * alignment
    size = len(cursor.view)
    infos = []
    for entry in entries.values():
        nbytes = tensor_nbytes(entry.layout, entry.shape)
        start = data_start + entry.offset
        if nbytes and start + nbytes > size:
            raise cursor.error(
                f"the data of tensor {one_line(entry.name)!r} is bytes {start} to {start + nbytes}, "
                f"but the file ends at {size}: it is cut off or damaged"
            )
        infos.append(TensorInfo(entry.name, entry.layout, entry.type, entry.shape, start, nbytes, part))
    _check_overlap(cursor, infos)
    return infos


def _read_entry(cursor: Cursor, name: str, alignment: int, powerinfer: bool) -> _Entry:
    what = f"tensor {one_line(name)!r}"
    n_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims} dimensions: expected 1 to {MAX_DIMS}")
    shape = tuple(reversed([_read_dimension(cursor, what, d, n_dims) for d in range(n_dims)]))
    type_id = cursor.u32(f"the type of {what}")
    try:
        layout, kind = layout_of(type_id, powerinfer)
    except UnsupportedError as error:
        raise UnsupportedError(f"{cursor.path}: {what}: {error}") from None
    if shape[-1] % layout.block_size:
        raise cursor.error(
            f"{what} has rows of {shape[-1]} elements: {layout.name} needs a multiple of {layout.block_size}"
        )
    offset = cursor.u64(f"the offset of {what}")
    if offset % alignment:
        raise cursor.error(f"the offset of {what} is {offset}: not a multiple of the alignment, {alignment}")
    return _Entry(name, layout, kind, shape, offset)


def _read_dimension(cursor: Cursor, what: str, d: int, n_dims: int) -> int:
    n = cursor.u64(f"dimension {d} of {what}")
    # An empty list is real: PowerInfer's exporter writes one for a layer without neurons on the GPU.
    if n == 0 and n_dims > 1:
        raise cursor.error(f"dimension {d} of {what} is 0")
    if n >= 1 << 63:
        raise cursor.error(f"dimension {d} of {what} is {n}: out of range")
    return n


def _check_overlap(cursor: Cursor, infos: Sequence[TensorInfo]) -> None:
    previous: TensorInfo | None = None
    for info in sorted((info for info in infos if info.nbytes), key=lambda info: info.offset):
        if previous is not None and info.offset < previous.offset + previous.nbytes:
            first, second = one_line(previous.name), one_line(info.name)
            raise cursor.error(f"the data of the tensors {first!r} and {second!r} overlap at byte {info.offset}")
        previous = info


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def check_shape(layout: Layout, name: str, shape: Sequence[int]) -> None:
    """FormatError where a tensor of `shape` (rows first) cannot be stored in `layout`."""
    if not 1 <= len(shape) <= MAX_DIMS or any(not 0 <= n < 1 << 63 for n in shape) or (0 in shape and len(shape) > 1):
        raise FormatError(f"tensor {one_line(name)!r} has the shape {shape_text(shape)}: expected 1 to 4 dimensions")
    if shape[-1] % layout.block_size:
        raise FormatError(
            f"tensor {one_line(name)!r} has rows of {shape[-1]} elements: "
            f"{layout.name} needs a multiple of {layout.block_size}"
        )
