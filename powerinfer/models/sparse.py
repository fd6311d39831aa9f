"""What a file and the user say about sparsity: activation, predictors, threshold."""

from __future__ import annotations

import math
import os

from powerinfer.backends.interface import Activation, Predictor
from powerinfer.errors import FormatError, UsageError, shown
from powerinfer.models.spec import ModelFile, ModelOptions, Weights

THRESHOLD_VARIABLE = "LLAMA_SPARSE_PRED_THRESHOLD"


def read_activation(file: ModelFile, options: ModelOptions, dense: Activation) -> Activation:
    """The gate's activation: the user's word, else `powerinfer.activation`, else ReLU in a sparse file, else `dense`.

    Without a gate it is that of the up projection.
    """
    if options.activation is not None:
        return options.activation
    default = Activation.RELU if file.is_powerinfer else dense
    name = file.get("powerinfer.activation", default.value)
    try:
        return Activation(name)
    except ValueError:
        known = ", ".join(a.value for a in Activation)
        raise FormatError(f"powerinfer.activation is {shown(name)}: expected one of {known}") from None


def read_activation_threshold(file: ModelFile) -> float:
    """`powerinfer.activation_threshold`, t of a shifted ReLU (x where x > t, else 0); 0 where the file has none."""
    value = file.get("powerinfer.activation_threshold", 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise FormatError(f"powerinfer.activation_threshold is {shown(value)}: expected a number of 0 or more")
    return float(value)


def read_threshold(file: ModelFile, options: ModelOptions) -> float:
    """The predictor's threshold: option, then environment variable, then file, then 0."""
    if options.sparse_threshold is not None:
        return options.sparse_threshold
    text = os.environ.get(THRESHOLD_VARIABLE)
    if text:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UsageError(f"{THRESHOLD_VARIABLE} is {shown(text)}: expected a finite number")
        return value
    stored = file.get("powerinfer.sparse_threshold", 0.0)
    if isinstance(stored, bool) or not isinstance(stored, (int, float)) or not math.isfinite(stored):
        raise FormatError(f"powerinfer.sparse_threshold is {shown(stored)}: expected a finite number")
    return float(stored)


def read_predictor(
    file: ModelFile, options: ModelOptions, weights: Weights, at: str, n_ff: int, n_embd: int
) -> Predictor | None:
    """The predictor of layer `at`; None in an ordinary file and where the user asks for a dense run."""
    if options.dense or not file.is_powerinfer:
        return None
    fc1 = weights.tensor(f"{at}.fc1.weight", None, n_embd)
    fc2 = weights.tensor(f"{at}.fc2.weight", n_ff, fc1.shape[0])
    return Predictor(fc1, fc2, read_threshold(file, options))
