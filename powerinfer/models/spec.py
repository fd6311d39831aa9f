"""What every architecture file shares: reading hyperparameters and weights with checks, and their registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from powerinfer.backends.interface import Activation, Linear, ModelSpec, Norm, NormKind
from powerinfer.errors import FormatError, UnsupportedError, shown
from powerinfer.quantization import TYPES, QuantTensor

F32 = TYPES.by_name("F32")


class ModelFile(Protocol):
    """The part of a GGUF file that an architecture reads."""

    @property
    def is_powerinfer(self) -> bool:
        """Whether the file says (by its magic) that it is to run sparsely."""
        ...

    def get(self, key: str, default: object = None) -> object: ...

    def tensor(self, name: str) -> QuantTensor | None: ...


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a user may say about a model that its file does not.

    dense: run a sparse file without its predictors. activation: of the feed-forward's gate.
    sparse_threshold: in place of the file's.
    """

    dense: bool = False
    activation: Activation | None = None
    sparse_threshold: float | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None


class HyperParameters:
    """Typed look-ups of `{architecture}.*` keys; a wrong type or a senseless value is a FormatError."""

    def __init__(self, file: ModelFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        name = f"{self._architecture}.{key}"
        value = self._file.get(name, default)
        if value is None:
            raise FormatError(f"the model lacks the key {name}: the file is incomplete, convert it again")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FormatError(f"{name} is {shown(value)}: expected an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        name = f"{self._architecture}.{key}"
        value = self._file.get(name, default)
        if value is None:
            raise FormatError(f"the model lacks the key {name}: the file is incomplete, convert it again")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise FormatError(f"{name} is {shown(value)}: expected a finite number")
        if positive and value <= 0:
            raise FormatError(f"{name} is {shown(value)}: expected a number above 0")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._file.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, str):
            raise FormatError(f"{self._architecture}.{key} is {shown(value)}: expected a string")
        return value


class Weights:
    """Tensors by their GGUF names, with their shapes checked against what the hyperparameters say."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file

    def __contains__(self, name: str) -> bool:
        return self._file.tensor(name) is not None

    def tensor(self, name: str, *shape: int | None) -> QuantTensor:
        """The tensor `name`; None in `shape` admits any length."""
        tensor = self._file.tensor(name)
        if tensor is None:
            raise FormatError(f"the model lacks the tensor {name}: the file is incomplete, convert it again")
        fits = len(tensor.shape) == len(shape) and all(w in (None, h) for h, w in zip(tensor.shape, shape, strict=True))
        if not fits:
            want = " x ".join("any" if n is None else str(n) for n in shape)
            have = " x ".join(map(str, tensor.shape))
            raise FormatError(f"{name} has the shape {have}, expected {want}: the file does not fit its own metadata")
        return tensor

    def optional(self, name: str, *shape: int | None) -> QuantTensor | None:
        return self.tensor(name, *shape) if name in self else None

    def linear(self, name: str, n_out: int, n_in: int) -> Linear:
        """`name`.weight (n_out, n_in) and, if there, `name`.bias (n_out,)."""
        return Linear(self.tensor(f"{name}.weight", n_out, n_in), self.optional(f"{name}.bias", n_out))

    def fused(self, name: str, sizes: Sequence[int], n_in: int) -> list[Linear]:
        """Runs of `sizes` rows of one matrix `name`.weight (sum of sizes, n_in), each with its part of the bias."""
        whole = self.linear(name, sum(sizes), n_in)
        parts = []
        for start, stop in pairwise(accumulate(sizes, initial=0)):
            bias = whole.bias
            if bias is not None:
                values = F32.quantize_rows(bias.dequantize()[None, start:stop])
                bias = QuantTensor(F32, (stop - start,), values)
            parts.append(Linear(whole.weight.rows(start, stop), bias))
        return parts

    def linear_t(self, name: str, n_in: int, n_out: int) -> Linear:
        """A transposed matrix: `name`.weight (n_in, n_out), one row an input, and, if there, `name`.bias (n_out,)."""
        return Linear(self.tensor(f"{name}.weight", n_in, n_out), self.optional(f"{name}.bias", n_out))

    def norm(self, name: str, n: int, kind: NormKind, eps: float) -> Norm:
        return Norm(self.tensor(f"{name}.weight", n), self.optional(f"{name}.bias", n), kind, eps)


Architecture = Callable[[ModelFile, ModelOptions], ModelSpec]
_ARCHITECTURES: dict[str, Architecture] = {}


def architecture(name: str) -> Callable[[Architecture], Architecture]:
    """Registers the function below as the builder of GGUF architecture `name`."""

    def register(build: Architecture) -> Architecture:
        _ARCHITECTURES[name] = build
        return build

    return register


def build_spec(file: ModelFile, options: ModelOptions) -> ModelSpec:
    """The spec of a model file.

    Raises FormatError for a file that contradicts itself, UnsupportedError for an architecture without a file here.
    """
    name = file.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError(f"general.architecture is {shown(name)}: expected a string")
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedError(f"unsupported model architecture {shown(name)}: supported are {known}")
    return _ARCHITECTURES[name](file, options)
