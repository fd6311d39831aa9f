"""A GGUF file with its matrices in another type.

Which tensor gets which type follows PowerInfer's and llama.cpp's `quantize`: matrices whose name ends in `weight`, the
head finer than the rest, predictors apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from powerinfer.errors import FormatError, UsageError
from powerinfer.formats import GGUFFile, GGUFWriter, TensorInfo, open_gguf
from powerinfer.quantization import TYPES, QuantTensor, QuantType

COPY = "COPY"
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
"""Targets by name, with the number that `general.file_type` has for them."""

QUANTIZATION_VERSION = 2
PIECE = 1 << 22  # elements that go to the threads at a time: 16 MB of float32


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """allow_requantize: also tensors that are quantized already. pure: every matrix gets the target type."""

    allow_requantize: bool = False
    leave_output_tensor: bool = False
    pure: bool = False
    n_threads: int = 0


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


def parse_file_type(name: str) -> str:
    """A target's name in capitals, from a name in any case or the number of `general.file_type`.

    Raises UsageError for another word.
    """
    upper = name.upper()
    if upper == COPY or upper in FILE_TYPES:
        return upper
    for known, number in FILE_TYPES.items():
        if name == str(number):
            return known
    known_names = ", ".join(f"{n} ({i})" for n, i in FILE_TYPES.items())
    raise UsageError(f"unknown type {name!r}: choose one of {known_names}, COPY")


def is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and info.name.endswith("weight") and info.type is not None


class _Plan:
    """The type of each tensor of a file."""

    def __init__(self, file: GGUFFile, target: str, options: QuantizeOptions) -> None:
        self._target, self._options = target, options
        self._architecture = file.get("general.architecture")
        # The matrix that makes logits: where there is no `output.weight`, the embedding does.
        self._head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        self.fallbacks: dict[str, str] = {}

    def type_of(self, info: TensorInfo) -> QuantType | None:
        """The type to convert to, None to leave the tensor as it is."""
        leave = self._options.leave_output_tensor and info.name == self._head
        if self._target == COPY or not is_matrix(info) or leave:
            return None
        wanted = TYPES.by_name(self._wanted(info))
        kind = self._that_fits(info, wanted)
        if kind is not wanted:
            self.fallbacks[info.name] = kind.name
        if info.type is kind:
            return None
        if info.type is not None and info.type.block_size > 1 and not self._options.allow_requantize:
            raise UsageError(
                f"{info.name} is {info.type_name} already: quantize the original, or lose precision twice with "
                "--allow-requantize"
            )
        return kind

    def _wanted(self, info: TensorInfo) -> str:
        if self._options.pure or TYPES.by_name(self._target).block_size == 1:
            return self._target
        if info.name == self._head:
            if self._architecture == "falcon" or info.shape[-1] % 256 or self._target == "Q8_0":
                return "Q8_0"
            return "Q6_K"
        if info.name.endswith((".fc1.weight", ".fc2.weight")) and self._target != "Q4_0":
            return "Q5_0"
        return self._target

    def _that_fits(self, info: TensorInfo, wanted: QuantType) -> QuantType:
        """`wanted`, or a type whose blocks divide the row."""
        for name in (wanted.name, "Q8_0", "F16"):
            kind = TYPES.by_name(name)
            if info.shape[-1] % kind.block_size == 0:
                return kind
        raise AssertionError("F16 fits any row")


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    type_name: str,
    options: QuantizeOptions | None = None,
    on_step: Callable[[QuantizeStep], None] = lambda step: None,
) -> QuantizeSummary:
    """Writes `source` to `target` with its matrices converted; a PowerInfer file stays one.

    The target appears when it is complete. on_step is called after each tensor. Raises UsageError for a target that is
    the source, an unknown type, or a source that is quantized already; FormatError for numbers that are not finite.
    """
    started = time.perf_counter()
    options = options or QuantizeOptions()
    type_name = parse_file_type(type_name)
    with open_gguf(source) as file:
        for path in file.paths:
            if os.path.exists(target) and os.path.samefile(path, target):
                raise UsageError(f"{target} is the input itself: choose another output")
        plan = _Plan(file, type_name, options)
        infos = list(file.tensors.values())
        kinds = {info.name: plan.type_of(info) for info in infos}
        summary = QuantizeSummary(Path(target), file.n_elements, sum(i.nbytes for i in infos), fallbacks=plan.fallbacks)
        with (
            GGUFWriter(target, powerinfer=file.is_powerinfer) as writer,
            ThreadPoolExecutor(options.n_threads or os.cpu_count() or 1) as pool,
        ):
            writer.copy_metadata(file.metadata)
            if type_name != COPY:
                writer.add("general.file_type", FILE_TYPES[type_name])
                writer.add("general.quantization_version", QUANTIZATION_VERSION)
            for info in infos:
                writer.declare_tensor(info.name, kinds[info.name] or info.layout, info.shape)
            for number, info in enumerate(infos, 1):
                kind = kinds[info.name]
                if kind is None:
                    writer.write_tensor(info.name, file.tensor_bytes(info.name))
                else:
                    writer.write_tensor(info.name, _converted(file, info, kind, pool))
                nbytes = info.nbytes if kind is None else info.shape[0] * kind.row_bytes(info.shape[1])
                summary.bytes_after += nbytes
                on_step(QuantizeStep(number, len(infos), info, kind.name if kind else info.type_name, nbytes))
    summary.seconds = time.perf_counter() - started
    return summary


def _converted(
    file: GGUFFile, info: TensorInfo, kind: QuantType, pool: ThreadPoolExecutor
) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """Rows of a matrix in another type, a piece for each thread at a time."""
    tensor = file.tensor(info.name)
    assert tensor is not None, "the directory names it"
    rows = max(1, PIECE // info.shape[1])

    def convert(piece: QuantTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        values = piece.dequantize()
        if not np.isfinite(values).all():
            raise FormatError(f"{info.name} has numbers that are infinite or not numbers: the source is damaged")
        return kind.quantize_rows(values)

    starts = range(0, info.shape[0], rows)
    pieces = (tensor.rows(start, min(start + rows, info.shape[0])) for start in starts)
    # Not Executor.map: it would read the whole tensor ahead of the writing.
    waiting = []
    for piece in pieces:
        waiting.append(pool.submit(convert, piece))
        if len(waiting) > 2 * pool._max_workers:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()
