"""Predictors of PowerInfer: a folder with `model_N.pt` for each layer, and maybe a threshold in config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from powerinfer.convert.family import Recipe, TensorPlan
from powerinfer.convert.json_files import read_optional
from powerinfer.convert.source import Reader
from powerinfer.convert.torch_file import TorchFile
from powerinfer.errors import FormatError, UnsupportedError, UsageError, shown

_NAMES = ("fc1.weight", "fc2.weight")
_DENSE_DOWN = re.compile(r"(blk\.\d+)\.ffn_down\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Predictors:
    """files: one a layer. threshold: None where the folder does not say."""

    files: tuple[Reader, ...]
    threshold: float | None

    def plans(self) -> Iterator[tuple[TensorPlan, Reader]]:
        for i, file in enumerate(self.files):
            for name in _NAMES:
                yield TensorPlan(f"blk.{i}.{name}", name, file.shapes[name]), file


def sparse_plan(plan: TensorPlan) -> TensorPlan:
    """As a tensor stands in a sparse file: the down projection has one row a neuron, the others stay."""
    down = _DENSE_DOWN.fullmatch(plan.name)
    if down is None:
        return plan
    return TensorPlan(f"{down[1]}.ffn_down_t.{down[2]}", plan.source, plan.shape, transposed=down[2] == "weight")


def read_predictors(folder: Path, recipe: Recipe) -> Predictors:
    """The predictors of a model, their number and shapes checked against it.

    Raises UsageError for a folder without any or a model that has no ReLU, UnsupportedError for an architecture that
    PowerInfer does not have, FormatError for predictors that are damaged or another model's.
    """
    if not recipe.takes_predictors:
        raise UnsupportedError(f"sparse files of the architecture {recipe.architecture} are not supported")
    if recipe.activation != "relu":
        raise UsageError(f"the model's activation is {recipe.activation}: predictors are for ReLU models")
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: expected one with predictors, model_0.pt and so on")
    found = predictor_files(folder)
    if not found:
        raise UsageError(f"{folder} has no predictors: expected model_0.pt and so on")
    n_layers = recipe.n_layers
    missing = next((i for i in range(n_layers) if i not in found), None)
    if missing is not None or len(found) != n_layers:
        what = f"model_{missing}.pt is missing" if missing is not None else f"it has {len(found)} predictors"
        raise FormatError(f"{folder} does not fit a model of {n_layers} layers: {what}")
    files = tuple(_read_layer(found[i], recipe) for i in range(n_layers))
    return Predictors(files, _threshold(folder))


def predictor_files(folder: Path) -> dict[int, Path]:
    """`model_N.pt` by N; other files are left alone."""
    matches = ((re.fullmatch(r"model_(0|[1-9]\d{0,5})\.pt", path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match}


def _read_layer(path: Path, recipe: Recipe) -> TorchFile:
    file = TorchFile(path)
    if set(file.shapes) != set(_NAMES):
        raise FormatError(f"{path} has the tensors {shown(sorted(file.shapes))}: expected {' and '.join(_NAMES)}")
    fc1, fc2 = (file.shapes[name] for name in _NAMES)
    fits = len(fc1) == len(fc2) == 2 and fc1[0] == fc2[1] > 0
    if not fits or fc1[1] != recipe.n_embd or fc2[0] != recipe.n_ff:
        shapes = f"{_times(fc1)} and {_times(fc2)}"
        raise FormatError(
            f"{path}: fc1 and fc2 are {shapes}, expected r x {recipe.n_embd} and {recipe.n_ff} x r: "
            "the predictors are another model's"
        )
    return file


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def _threshold(folder: Path) -> float | None:
    value = read_optional(folder / "config.json").get("sparse_threshold")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise FormatError(f"{folder / 'config.json'}: sparse_threshold is {shown(value)}: expected a finite number")
    return float(value)
