"""A GGUF file with its matrices in another type."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from powerinfer.engine.quantization_mix import FILE_TYPES
from powerinfer.engine.quantization_plan import COPY, Plan, QuantizeOptions, parse_file_type
from powerinfer.errors import FormatError, UsageError
from powerinfer.formats import GGUFFile, GGUFWriter, TensorInfo, open_gguf
from powerinfer.quantization import QuantTensor, QuantType, why_not

QUANTIZATION_VERSION = 2
# Elements that go to a thread at a time: 512 KB of float32. They stay in its cache, and malloc keeps their memory; of
# twice as many it gives it back and asks for it again each time, at half the speed.
PIECE = 1 << 17

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class QuantizeStep:
    """One tensor done: its number from 1, of how many, and its types before and after."""

    number: int
    total: int
    info: TensorInfo
    type: str
    nbytes: int


@dataclass(slots=True)
class QuantizeSummary:
    """Bytes of tensor data before and after; `fallbacks`: tensors that could not have their type, and what instead."""

    path: Path
    n_elements: int
    bytes_before: int
    bytes_after: int = 0
    seconds: float = 0.0
    fallbacks: dict[str, str] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes_after / max(1, self.n_elements)


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    type_name: str,
    options: QuantizeOptions | None = None,
    on_step: Callable[[QuantizeStep], None] = lambda step: None,
) -> QuantizeSummary:
    """Writes `source` to `target` with its matrices converted; a PowerInfer file stays one.

    The target appears when it is complete, and not at all in a dry run. on_step is called after each tensor. Raises
    UsageError for a target that is the source, an unknown type, or a source that is quantized already; FormatError for
    numbers that are not finite, or too large for their type.
    """
    started = time.perf_counter()
    options = options or QuantizeOptions()
    type_name = parse_file_type(type_name)
    with open_gguf(source) as file:
        for path in file.paths:
            if os.path.exists(target) and os.path.samefile(path, target):
                raise UsageError(f"{target} is the input itself: choose another output")
        plan = Plan(file, type_name, options)
        kinds = {info.name: plan.type_of(info) for info in file.tensors.values()}
        summary = QuantizeSummary(Path(target), file.n_elements, file.nbytes, fallbacks=plan.fallbacks)
        numbers = iter(range(1, len(kinds) + 1))

        def done(info: TensorInfo) -> None:
            kind = kinds[info.name]
            nbytes = info.nbytes if kind is None else info.n_elements // kind.block_size * kind.block_bytes
            summary.bytes_after += nbytes
            on_step(QuantizeStep(next(numbers), len(kinds), info, kind.name if kind else info.type_name, nbytes))

        if options.dry_run:
            for info in file.tensors.values():
                done(info)
        else:
            _write(file, target, type_name, kinds, options.n_threads, done)
    summary.seconds = time.perf_counter() - started
    return summary


def _write(
    file: GGUFFile,
    target: str | os.PathLike[str],
    type_name: str,
    kinds: Mapping[str, QuantType | None],
    n_threads: int,
    done: Callable[[TensorInfo], None],
) -> None:
    with (
        GGUFWriter(target, powerinfer=file.is_powerinfer) as writer,
        ThreadPoolExecutor(n_threads or os.cpu_count() or 1) as pool,
    ):
        writer.copy_metadata(file.metadata)
        if type_name != COPY:
            writer.add("general.file_type", FILE_TYPES[type_name].number)
            writer.add("general.quantization_version", QUANTIZATION_VERSION)
        for info in file.tensors.values():
            writer.declare_tensor(info.name, kinds[info.name] or info.layout, info.shape)
        for info in file.tensors.values():
            kind = kinds[info.name]
            data = file.tensor_bytes(info.name) if kind is None else _converted(file, info, kind, pool)
            writer.write_tensor(info.name, data)
            file.release_pages()  # or a model's size of them gathers
            done(info)


def _converted(file: GGUFFile, info: TensorInfo, kind: QuantType, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
    """Rows of a matrix in another type, a piece for each thread at a time."""
    tensor = file.tensor(info.name)
    assert tensor is not None, "the directory names it"
    n_rows, n_cols = len(tensor.data), info.shape[-1]
    flat = QuantTensor(tensor.type, (n_rows, n_cols), tensor.data)  # the matrices of experts are stacked
    rows = max(1, PIECE // n_cols)
    # Not Executor.map: it would read the whole tensor ahead of the writing.
    waiting: deque[Future[Bytes]] = deque()
    for start in range(0, n_rows, rows):
        waiting.append(pool.submit(_convert, info.name, flat.rows(start, min(start + rows, n_rows)), kind))
        if len(waiting) > 2 * pool._max_workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _convert(name: str, rows: QuantTensor, kind: QuantType) -> Bytes:
    values = rows.dequantize()
    if kind.block_size == 1 and not np.abs(values).max() < kind.overflow:
        raise FormatError(f"{name} has {why_not(values, kind.name)}")
    try:
        return kind.quantize_rows(values)
    except FormatError as error:
        raise FormatError(f"{name} has {error}") from None
