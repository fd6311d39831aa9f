"""GPU index files: which neurons of a model are on the GPU, in PowerInfer's format with some keys of our own.

GGUF with the magic PWRI and the architecture generic.gpu_index; two I32 tensors a layer, in this order: blk.N.gpu_idx
(n_ff, 1 for a neuron on the GPU) and blk.N.gpu_bucket (their indices, ascending). PowerInfer reuses a file whenever
split.vram_capacity fits the memory that is free; our keys say what it was made for.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from powerinfer.errors import FormatError
from powerinfer.formats.gguf_reader import GGUFFile, open_gguf
from powerinfer.formats.gguf_writer import GGUFWriter
from powerinfer.formats.tensor_info import I32
from powerinfer.formats.value_types import ValueType
from powerinfer.user_cache import user_cache_folder

Ints = npt.NDArray[np.int32]

ARCHITECTURE = "generic.gpu_index"
SUFFIX = ".generated.gpuidx"
_CAPACITY = "split.vram_capacity"
_BLOCK_COUNT = f"{ARCHITECTURE}.block_count"
_MODEL, _BUDGET = "powerinfer.split.model", "powerinfer.split.vram_budget"
_CONTEXT, _VERSION = "powerinfer.split.context_length", "powerinfer.split.placement_version"
_SAMPLES, _SAMPLE_BYTES = 16, 64


@dataclass(frozen=True, slots=True)
class GpuIndex:
    """hot: of each layer the neurons on the GPU, int32 ascending. n_ff: neurons of each layer. capacity: their bytes.

    model, budget (bytes), n_ctx and version say what the index was made for; None in files that PowerInfer wrote.
    """

    hot: tuple[Ints, ...]
    n_ff: tuple[int, ...]
    capacity: int
    model: str | None = None
    budget: int | None = None
    n_ctx: int | None = None
    version: int | None = None

    def misfit(self, wanted: GpuIndex) -> str | None:
        """Why this index cannot stand in for `wanted` (whose neurons do not matter): one clause, None if it can."""
        if self.n_ff != wanted.n_ff:
            return "it is of a model of another shape"
        if self.model is not None and self.model != wanted.model:
            return "it was made for another model"
        if self.model is not None and self.budget != wanted.budget:
            return "it was made for another budget"
        if self.model is not None and self.n_ctx != wanted.n_ctx:
            return "it was made for another context size"
        if self.model is not None and self.version != wanted.version:
            return "it was made by another version"
        if self.capacity > wanted.capacity:
            return "its neurons need more memory than there is"
        return None


def fingerprint(file: GGUFFile) -> str:
    """Tells models apart without reading them: a hash of the tensors' names, types, shapes and a few of their bytes."""
    digest = hashlib.sha256()
    for info in file.tensors.values():
        digest.update(f"{info.name}\0{info.type_name}\0{info.shape}\0".encode("utf-8", "surrogateescape"))
    names = list(file.tensors)
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        data = file.tensor_bytes(name)
        middle = len(data) // 2
        digest.update(data[middle : middle + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:32]


def index_paths(model: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where a model's index may be: beside it, as PowerInfer has it, or in the user's cache folder."""
    path = Path(model)
    unique = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    return path.with_name(path.name + SUFFIX), user_cache_folder() / f"{path.name}.{unique}{SUFFIX}"


def write_gpu_index(path: str | os.PathLike[str], index: GpuIndex) -> None:
    """Writes a file that PowerInfer reads too. Raises UsageError or PowerInferError where that cannot be."""
    with GGUFWriter(path, ARCHITECTURE, powerinfer=True) as writer:
        writer.add(_BLOCK_COUNT, len(index.hot), ValueType.UINT32)
        writer.add(_CAPACITY, index.capacity, ValueType.UINT64)
        for key, value in ((_BUDGET, index.budget), (_CONTEXT, index.n_ctx), (_VERSION, index.version)):
            if value is not None:
                writer.add(key, value, ValueType.UINT64)
        if index.model is not None:
            writer.add(_MODEL, index.model)
        for i, (hot, n_ff) in enumerate(zip(index.hot, index.n_ff, strict=True)):
            writer.declare_tensor(f"blk.{i}.gpu_idx", I32, (n_ff,))
            writer.declare_tensor(f"blk.{i}.gpu_bucket", I32, (len(hot),))
        for i, (hot, n_ff) in enumerate(zip(index.hot, index.n_ff, strict=True)):
            mask = np.zeros(n_ff, np.int32)
            mask[hot] = 1
            writer.write_tensor(f"blk.{i}.gpu_idx", mask)
            writer.write_tensor(f"blk.{i}.gpu_bucket", np.asarray(hot, np.int32))


def read_gpu_index(path: str | os.PathLike[str]) -> GpuIndex:
    """Reads an index of ours or of PowerInfer's. Buckets that are missing or empty are derived.

    Raises UsageError where it cannot be opened, FormatError where it contradicts itself.
    """
    with open_gguf(path) as file:
        name = file.get("general.architecture")
        if name != ARCHITECTURE:
            raise FormatError(f"{file.path} is no GPU index: its architecture is {name!r}, not {ARCHITECTURE!r}")
        n_layers = _whole(file, _BLOCK_COUNT, most=1 << 16)
        if n_layers is None:
            raise FormatError(f"{file.path} lacks the key {_BLOCK_COUNT}: remove it")
        hot = [_hot_of(file, i) for i in range(n_layers)]
        known = {f"blk.{i}.{kind}" for i in range(n_layers) for kind in ("gpu_idx", "gpu_bucket")}
        for extra in file.tensors.keys() - known:
            raise FormatError(f"{file.path} has the tensor {extra!r}, but {n_layers} layers: remove it")
        model = file.get(_MODEL)
        return GpuIndex(
            hot=tuple(indices for indices, _ in hot),
            n_ff=tuple(n_ff for _, n_ff in hot),
            capacity=_whole(file, _CAPACITY) or 0,
            model=model if isinstance(model, str) else None,
            budget=_whole(file, _BUDGET),
            n_ctx=_whole(file, _CONTEXT),
            version=_whole(file, _VERSION),
        )


def _whole(file: GGUFFile, key: str, most: int = (1 << 64) - 1) -> int | None:
    value = file.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise FormatError(f"{file.path}: {key} is {value!r}: expected a whole number up to {most}")
    return value


def _numbers(file: GGUFFile, name: str) -> Ints | None:
    info = file.tensors.get(name)
    if info is None:
        return None
    if info.type_name != "I32" or len(info.shape) != 1:
        raise FormatError(f"{file.path}: {name} is no list of 32-bit numbers: remove the file")
    values = file.array(name)
    assert values is not None
    return np.array(values, np.int32)


def _hot_of(file: GGUFFile, layer: int) -> tuple[Ints, int]:
    mask, bucket = (_numbers(file, f"blk.{layer}.{kind}") for kind in ("gpu_idx", "gpu_bucket"))
    if mask is None:
        raise FormatError(f"{file.path} lacks blk.{layer}.gpu_idx: remove the file")
    if ((mask != 0) & (mask != 1)).any():
        raise FormatError(f"{file.path}: blk.{layer}.gpu_idx has entries other than 0 and 1: remove the file")
    derived = np.flatnonzero(mask).astype(np.int32)
    if bucket is not None and bucket.size and not np.array_equal(bucket, derived):
        raise FormatError(f"{file.path}: blk.{layer}.gpu_bucket does not list the neurons of gpu_idx: remove the file")
    return derived, len(mask)
