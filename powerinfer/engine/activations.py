"""How often each neuron fires: what placement goes by."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from powerinfer.errors import FormatError
from powerinfer.quantization import QuantTensor

Floats = npt.NDArray[np.float64]

FOLDER = "activation"
TENSOR = "blk.{}.ffn_activation"
"""Our own metadata tensor, float32 (n_ff,): the part of tokens for which each neuron fires."""
FALLBACK = 0.1
"""The part of tokens for which a neuron is taken to fire where nothing is known."""


class TensorFile(Protocol):
    @property
    def path(self) -> str: ...

    def tensor(self, name: str) -> QuantTensor | None: ...


@dataclass(frozen=True, slots=True)
class Activations:
    """frequencies: of each layer, float64 (n_ff,) from 0 to 1. source: where they are from, for the user."""

    frequencies: tuple[Floats, ...]
    source: str


def read_activations(file: TensorFile, n_ff: Sequence[int], notify: Callable[[str], None]) -> Activations:
    """Frequencies from the folder `activation` beside the model, else from the file itself, else equal ones.

    n_ff: neurons of each layer. notify is called with one line where nothing is known. Raises FormatError for
    statistics that do not fit the model.
    """
    model = Path(file.path)
    folder = model.parent / FOLDER
    files = activation_files(folder)
    if files:
        counts = [_read_counts(path, n) for path, n in zip(_one_each(folder, files, len(n_ff)), n_ff, strict=True)]
        return Activations(_frequencies(counts), str(folder))
    stored = [file.tensor(TENSOR.format(i)) for i in range(len(n_ff))]
    if n_ff and all(tensor is not None for tensor in stored):
        values = [tensor.dequantize().reshape(-1) for tensor in stored if tensor is not None]
        for i, (row, n) in enumerate(zip(values, n_ff, strict=True)):
            _check(f"{file.path}: {TENSOR.format(i)}", row, n)
        return Activations(_frequencies(values), "the model file")
    notify(
        "nothing is known of how often neurons fire, all are taken to be equal: "
        f"measure it with `powerinfer profile -m {model} -f TEXT`"
    )
    return Activations(tuple(np.full(n, FALLBACK) for n in n_ff), "equal ones")


def activation_files(folder: Path) -> dict[int, Path]:
    """`activation_N.pt` by N; other files are left alone."""
    if not folder.is_dir():
        return {}
    found = {}
    for path in folder.iterdir():
        match = re.fullmatch(r"activation_(0|[1-9]\d{0,5})\.pt", path.name)
        if match:
            found[int(match[1])] = path
    return found


def _one_each(folder: Path, files: dict[int, Path], n_layers: int) -> list[Path]:
    missing = [i for i in range(n_layers) if i not in files]
    if missing or len(files) != n_layers:
        lacks = f"activation_{missing[0]}.pt is missing" if missing else f"it has {len(files)} files"
        raise FormatError(
            f"{folder} does not fit a model of {n_layers} layers: {lacks}; measure again, or move it away"
        )
    return [files[i] for i in range(n_layers)]


def _read_counts(path: Path, n: int) -> Floats:
    """One layer's counts, as torch.save wrote them; nothing in the file is executed."""
    import torch

    try:
        counts = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip, torch and OS errors of a file that anyone may have made
        reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
        raise FormatError(f"cannot read {path}: no tensor that torch saved ({reason})") from None
    if not isinstance(counts, torch.Tensor) or counts.ndim != 1 or counts.is_complex() or counts.is_sparse:
        raise FormatError(f"{path} holds no list of numbers: expected a tensor of {n} counts")
    values = counts.to(torch.float64).numpy()
    _check(str(path), values, n)
    return values


def _check(name: str, values: npt.NDArray[np.floating], n: int) -> None:
    if len(values) != n:
        raise FormatError(f"{name} has {len(values)} counts, the layer {n} neurons: it is of another model")
    if not np.isfinite(values).all() or (values < 0).any():
        raise FormatError(f"{name} has counts that are negative or no numbers: measure again")


def _frequencies(counts: Sequence[npt.NDArray[np.floating]]) -> tuple[Floats, ...]:
    """Counts come without the number of tokens. The hottest neuron of all is taken to fire for each: true of a trained
    model within a few percent, and a common factor changes no order, only how the predicted time splits."""
    top = max((float(row.max()) for row in counts if row.size), default=0.0)
    scale = 1.0 / top if top > 1.0 else 1.0
    return tuple(np.asarray(row, np.float64) * scale for row in counts)
