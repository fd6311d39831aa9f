"""The tensors of a model folder by name, whatever the files that they are in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from powerinfer.convert.json_files import read_object
from powerinfer.errors import FormatError, UnsupportedError, UsageError, shown

Floats: TypeAlias = npt.NDArray[np.float32]
Raw: TypeAlias = npt.NDArray[Any]


def _bf16(raw: Raw) -> Floats:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _plain(raw: Raw) -> Floats:
    with np.errstate(over="ignore"):  # float64 beyond float32: infinity, which is refused later
        return np.asarray(raw, np.float32)


@dataclass(frozen=True, slots=True)
class Kind:
    """A number type of a checkpoint. dtype: as numpy holds its elements; floats: these to float32."""

    name: str
    dtype: npt.DTypeLike
    floats: Callable[[Raw], Floats]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("F64", "<f8", _plain),
        Kind("F32", "<f4", _plain),
        Kind("F16", "<f2", _plain),
        Kind("BF16", "<u2", _bf16),
    )
}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """data: the elements in the logical shape, usually a view of a mapped file; `kind.floats` reads them."""

    name: str
    kind: Kind
    data: Raw

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Reader(Protocol):
    """One file of tensors. `tensor` raises UnsupportedError for a type that is not of KINDS."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> SourceTensor: ...

    def release_pages(self) -> None: ...


def unsupported_type(where: object, name: str, kind: str) -> UnsupportedError:
    known = ", ".join(KINDS)
    return UnsupportedError(f"{where}: {name} is of type {kind}: only {known} can be converted, not quantized models")


class Checkpoint:
    """All tensors of a folder. Files are opened at once, so that what is missing or cut off shows before any work."""

    def __init__(self, entries: Mapping[str, tuple[Reader, str]]) -> None:
        """entries: a tensor's file and its name there."""
        self._entries = dict(entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        reader, inner = self._entries[name]
        return reader.shapes[inner]

    @property
    def n_elements(self) -> int:
        return sum(math.prod(self.shape(name)) for name in self._entries)

    def tensor(self, name: str) -> SourceTensor:
        reader, inner = self._entries[name]
        return reader.tensor(inner)

    def release_pages(self, name: str) -> None:
        """Gives the memory of what was read of a tensor's file back to the system."""
        self._entries[name][0].release_pages()

    def renamed(self, rename: Callable[[str], str]) -> Checkpoint:
        """The same tensors under other names."""
        return Checkpoint({rename(name): entry for name, entry in self._entries.items()})


def open_checkpoint(folder: Path) -> Checkpoint:
    """The tensors of `folder`: safetensors before PyTorch's .bin, one file or shards that an index names.

    Raises UsageError where there are none, FormatError for shards that are missing, damaged, or lack a tensor.
    """
    from powerinfer.convert.safetensors_file import SafetensorsFile
    from powerinfer.convert.torch_file import TorchFile

    formats: list[tuple[str, Callable[[Path], Reader]]] = [
        ("model.safetensors", SafetensorsFile),
        ("pytorch_model.bin", TorchFile),
    ]
    for name, reader in formats:
        if (folder / name).is_file():
            whole = reader(folder / name)
            return Checkpoint({key: (whole, key) for key in whole.shapes})
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _open_shards(folder, index, reader)
    names = ", ".join(f"{name} or {name}.index.json" for name, _ in formats)
    raise UsageError(f"{folder} has no weights: expected {names}")


def _open_shards(folder: Path, index: Path, reader: Callable[[Path], Reader]) -> Checkpoint:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index} has no weight_map: the file is damaged, download it again")
    for name, file in weight_map.items():
        # An index could name any file of the machine.
        if not isinstance(file, str) or Path(file).name != file or "\x00" in file:
            raise FormatError(f"{index} puts {shown(name)} into {shown(file)}: expected the name of a file beside it")
    shards: dict[str, Reader] = {}
    for file in dict.fromkeys(weight_map.values()):
        if not (folder / file).is_file():
            raise FormatError(f"the shard {folder / file} is missing: {index.name} names it, download it again")
        shards[file] = reader(folder / file)
    for name, file in weight_map.items():
        if name not in shards[file].shapes:
            raise FormatError(f"{folder / file} lacks the tensor {shown(name)}, which {index.name} puts there")
    for file, shard in shards.items():
        for name in shard.shapes:
            if weight_map.get(name) != file:
                raise FormatError(f"{folder / file} has the tensor {shown(name)}, of which {index.name} says nothing")
    return Checkpoint({name: (shards[file], name) for name, file in weight_map.items()})
