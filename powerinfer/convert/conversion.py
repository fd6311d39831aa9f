"""A model folder to a GGUF file, one tensor at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from powerinfer.convert.config import read_config
from powerinfer.convert.families import build_recipe
from powerinfer.convert.family import Recipe, TensorPlan
from powerinfer.convert.predictors import Predictors, read_predictors, sparse_plan
from powerinfer.convert.source import Checkpoint, Floats, SourceTensor, open_checkpoint
from powerinfer.convert.vocabulary import tokenizer_metadata
from powerinfer.errors import FormatError, UsageError
from powerinfer.formats import GGUFWriter, OutputFile, ValueType
from powerinfer.quantization import TYPES, QuantType, why_not

Bytes: TypeAlias = npt.NDArray[np.uint8]

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""`general.file_type` of each outtype."""
QUANTIZATION_VERSION = 2
PIECE = 1 << 20
"""Elements that are in memory as float32 at a time: 4 MB."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """outtype: of matrices, one of FILE_TYPES; vectors are F32. predictors: a folder of them, for a sparse file."""

    outtype: str = "f16"
    predictors: Path | None = None


@dataclass(frozen=True, slots=True)
class ConvertStep:
    """One tensor done: its number from 1, of how many, its shape, types and bytes before and after."""

    number: int
    total: int
    name: str
    shape: tuple[int, ...]
    type_before: str
    nbytes_before: int
    type: str
    nbytes: int


@dataclass(slots=True)
class ConvertSummary:
    path: Path
    architecture: str
    n_tensors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    """A tensor to write. load: gives the source; release: forgets what was read of it."""

    plan: TensorPlan
    type: QuantType
    load: Callable[[], SourceTensor]
    release: Callable[[], None]


def convert_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    on_step: Callable[[ConvertStep], None] = lambda step: None,
    notify: Callable[[str], None] = lambda message: None,
    check: Callable[[Path], None] = lambda path: None,
) -> ConvertSummary:
    """Writes the Hugging Face model in the folder `source` to the GGUF file `target`.

    on_step is called after each tensor, notify with a line where something is not as a user may expect. check gets
    the finished file before it has its name; where it raises, nothing is left. Raises UsageError for folders that lack
    what is needed, FormatError for files that are damaged or do not fit each other, UnsupportedError for models that
    cannot be converted.
    """
    started = time.perf_counter()
    options = options or ConvertOptions()
    if options.outtype not in FILE_TYPES:
        raise UsageError(f"unknown type {options.outtype!r}: choose one of {', '.join(FILE_TYPES)}")
    folder, path = Path(source), Path(target)
    OutputFile(str(path))  # a target that cannot be, before the work
    config = read_config(folder)
    recipe = build_recipe(config)
    predictors = read_predictors(options.predictors, recipe) if options.predictors is not None else None
    checkpoint = open_checkpoint(folder).renamed(recipe.rename)
    _check_tensors(recipe, checkpoint)
    tokenizer = tokenizer_metadata(folder, config, recipe.n_vocab, notify)
    jobs = _jobs(recipe, checkpoint, predictors, options.outtype)
    metadata = _metadata(folder, recipe, predictors, options.outtype) | tokenizer
    if path.suffix != ".gguf" and path.exists() and path.resolve().parent == folder.resolve():
        raise UsageError(f"{path} is a file of the model itself: choose another output")
    with GGUFWriter(path, powerinfer=predictors is not None, check=lambda name: check(Path(name))) as writer:
        _write(writer, metadata, recipe, jobs, on_step)
        nbytes = writer.nbytes
    return ConvertSummary(path, recipe.architecture, len(jobs), nbytes, time.perf_counter() - started)


def _check_tensors(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Each tensor that is wanted is there with its shape, and no other but those that a family does not need."""
    wanted = {plan.source: plan.shape for plan in recipe.tensors}
    for name, shape in wanted.items():
        if name not in checkpoint:
            raise FormatError(f"the model lacks the tensor {name}: the folder is incomplete")
        if checkpoint.shape(name) != shape:
            have, want = (" x ".join(map(str, s)) for s in (checkpoint.shape(name), shape))
            raise FormatError(f"{name} is {have}, expected {want}: the weights do not fit config.json")
    for name in checkpoint.names:
        if name not in wanted and not name.endswith(recipe.ignored or ("\x00",)):
            raise FormatError(f"the model has the tensor {name}, which is unknown in a {recipe.architecture} model")


def _jobs(recipe: Recipe, checkpoint: Checkpoint, predictors: Predictors | None, outtype: str) -> list[_Job]:
    jobs = []
    for dense in recipe.tensors:
        plan = dense if predictors is None else sparse_plan(dense)

        def load(name: str = plan.source) -> SourceTensor:
            return checkpoint.tensor(name)

        def release(name: str = plan.source) -> None:
            checkpoint.release_pages(name)

        jobs.append(_Job(plan, target_type(plan, outtype), load, release))
    for plan, file in predictors.plans() if predictors else ():

        def load_predictor(file: Any = file, name: str = plan.source) -> SourceTensor:
            tensor: SourceTensor = file.tensor(name)
            return tensor

        jobs.append(_Job(plan, target_type(plan, outtype), load_predictor, file.release_pages))
    return jobs


def target_type(plan: TensorPlan, outtype: str) -> QuantType:
    """Vectors are F32, matrices of the type asked for, or F16 where its blocks do not divide the rows."""
    if len(plan.shape) == 1:
        return TYPES.by_name("F32")
    kind = TYPES.by_name(outtype)
    return kind if plan.target_shape[-1] % kind.block_size == 0 else TYPES.by_name("F16")


def _metadata(folder: Path, recipe: Recipe, predictors: Predictors | None, outtype: str) -> dict[str, Any]:
    general = {
        "general.architecture": recipe.architecture,
        "general.type": "model",
        "general.name": folder.resolve().name,
        "general.file_type": FILE_TYPES[outtype],
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    ours: dict[str, Any] = {}
    if recipe.activation != recipe.default_activation:
        ours["powerinfer.activation"] = recipe.activation
    if recipe.activation_threshold:
        ours["powerinfer.activation_threshold"] = recipe.activation_threshold
    if predictors is not None and predictors.threshold is not None:
        ours["powerinfer.sparse_threshold"] = predictors.threshold
    return general | recipe.metadata | ours


def _write(
    writer: GGUFWriter,
    metadata: dict[str, Any],
    recipe: Recipe,
    jobs: list[_Job],
    on_step: Callable[[ConvertStep], None],
) -> None:
    for key, value in metadata.items():
        writer.add(key, value, element_type=ValueType.STRING if value == [] else None)
    for name, values in recipe.constants.items():
        writer.declare_tensor(name, TYPES.by_name("F32"), values.shape)
    for job in jobs:
        writer.declare_tensor(job.plan.name, job.type, job.plan.target_shape)
    for name, values in recipe.constants.items():
        writer.write_tensor(name, values.astype("<f4"))
    for i, job in enumerate(jobs):
        tensor, plan = job.load(), job.plan
        writer.write_tensor(plan.name, converted(tensor, plan, job.type))
        n = int(np.prod(plan.shape))
        nbytes = job.type.row_bytes(n)
        step = ConvertStep(
            i + 1, len(jobs), plan.name, plan.target_shape, tensor.kind.name, tensor.nbytes, job.type.name, nbytes
        )
        del tensor
        job.release()
        on_step(step)


def converted(tensor: SourceTensor, plan: TensorPlan, kind: QuantType) -> Iterator[Bytes]:
    """Bytes of a tensor in another type, a run of rows at a time.

    Raises FormatError for numbers that are not finite or too large for the type.
    """
    data = tensor.data.T if plan.transposed else tensor.data
    rows = None if plan.rows is None else plan.rows()
    if data.ndim == 1:
        yield _rows(tensor, (data if rows is None else data[rows])[None], plan, kind)
        return
    run = max(1, PIECE // data.shape[1])
    for start in range(0, len(data), run):
        piece = data[start : start + run] if rows is None else data[rows[start : start + run]]
        yield _rows(tensor, piece, plan, kind)


def _rows(tensor: SourceTensor, raw: npt.NDArray[Any], plan: TensorPlan, kind: QuantType) -> Bytes:
    values: Floats = tensor.kind.floats(raw)
    if plan.shift:
        values = values + np.float32(plan.shift)
    # A comparison that NaN fails, too.
    if kind.block_size == 1 and not np.abs(values).max() < kind.overflow:
        raise FormatError(f"{plan.source} has {why_not(values, kind.name)}")
    try:
        return kind.quantize_rows(values)
    except FormatError as error:
        raise FormatError(f"{plan.source} has {error}") from None
