"""What a family of models says about its conversion, and the registry of families by transformers' class names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from powerinfer.convert.config import Config
from powerinfer.errors import FormatError, UnsupportedError, shown

Ints: TypeAlias = npt.NDArray[np.intp]
Rows: TypeAlias = Callable[[], Ints]
"""Made when they are used, since only then is it certain that sizes in the settings are those of the weights."""
Floats: TypeAlias = npt.NDArray[np.float32]

ACTIVATIONS = {
    "relu": "relu",
    "fatrelu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
"""transformers' names of activations to those of `powerinfer.activation`."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the output.

    source: its name in the checkpoint; shape: there. rows: gives which of its rows comes where, None for all in order.
    shift: added to every element. transposed: columns become rows.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    rows: Rows | None = None
    shift: float = 0.0
    transposed: bool = False

    @property
    def target_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


@dataclass(frozen=True, slots=True)
class Recipe:
    """metadata: all keys but the tokenizer's. constants: tensors that settings give, not the checkpoint.

    ignored: names in a checkpoint, or the last parts of names, of what the model does not need.
    activation, default_activation: of the model, and what an engine takes for an ordinary file that says nothing.
    takes_predictors: whether PowerInfer has this architecture. rename: spellings of older checkpoints to today's.
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[TensorPlan, ...]
    n_vocab: int
    n_embd: int
    n_ff: int
    n_layers: int
    activation: str
    default_activation: str
    activation_threshold: float = 0.0
    takes_predictors: bool = False
    constants: dict[str, Floats] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    rename: Callable[[str], str] = str


Family = Callable[[Config], Recipe]
_FAMILIES: dict[str, Family] = {}


def family(*names: str) -> Callable[[Family], Family]:
    """Registers the function below for these `architectures` of config.json."""

    def register(build: Family) -> Family:
        _FAMILIES.update(dict.fromkeys(names, build))
        return build

    return register


def build_recipe(config: Config) -> Recipe:
    """Raises UnsupportedError for a family without a file here, FormatError for settings that make no sense."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise FormatError(f"config.json: architectures is {shown(names)}: expected the name of a model's class")
    if names[0] not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedError(f"models of the class {shown(names[0])} cannot be converted: known are {known}")
    return _FAMILIES[names[0]](config)


def read_activation(config: Config, *names: str, default: str) -> str:
    """An activation by its name in `powerinfer.activation`."""
    name = config.text(*names, default=default)
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedError(f"config.json: {names[0]} is {shown(name)}: known activations are {known}")
    return ACTIVATIONS[name]
