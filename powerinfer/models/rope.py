"""Rotary settings from metadata, weights and options."""

from __future__ import annotations

import math

import numpy as np

from powerinfer.backends.interface import Rope, RopeStyle
from powerinfer.errors import FormatError, UnsupportedError, UsageError
from powerinfer.models.spec import HyperParameters, ModelOptions, Weights

ROPE_FREQS = "rope_freqs.weight"


def read_rope(
    hparams: HyperParameters, weights: Weights, options: ModelOptions, head_dim: int, style: RopeStyle
) -> Rope:
    """Base, scaling and number of rotated elements of a head.

    `rope.scale_linear` is the spelling of files of 2023, `rope.scaling.type` and `.factor` today's. Scaling is by
    position (linear), by frequency (yarn), and by the divisors that files of Llama 3 hold as a tensor.
    """
    n_rot = hparams.integer("rope.dimension_count", head_dim)
    if n_rot > head_dim or n_rot % 2:
        raise FormatError(f"rope.dimension_count is {n_rot}: expected an even number up to the head size, {head_dim}")
    freq_base = _asked("base", options.rope_freq_base) or hparams.number("rope.freq_base", 10000.0)
    scaling = hparams.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"rotary scaling {scaling!r} is not supported: supported are none, linear, yarn")
    factor = hparams.number("rope.scaling.factor", hparams.number("rope.scale_linear", 1.0))
    if scaling == "none":
        factor = 1.0
    freq_scale = _asked("scale", options.rope_freq_scale) or 1.0 / factor
    factors, magnitude = _freq_factors(weights, n_rot), hparams.number("rope.scaling.attn_factor", 1.0)
    if scaling == "yarn":
        factor = 1.0 / freq_scale
        yarn = _yarn_factors(hparams, n_rot, freq_base, factor)
        factors = tuple(a * b for a, b in zip(factors or [1.0] * len(yarn), yarn, strict=True))
        magnitude *= 1.0 + 0.1 * math.log(max(factor, 1.0))
    return Rope(n_rot, style, freq_base, freq_scale, factors, magnitude)


def _asked(what: str, value: float | None) -> float:
    """What a user says in place of the file; 0 where it is the file's."""
    if value is not None and not 0 <= value < math.inf:
        raise UsageError(f"the rotary frequency {what} is {value}: expected a number above 0, or 0 for the model's own")
    return value or 0.0


def _freq_factors(weights: Weights, n_rot: int) -> tuple[float, ...]:
    tensor = weights.optional(ROPE_FREQS, n_rot // 2)
    if tensor is None:
        return ()
    factors = tensor.dequantize()
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise FormatError(f"{ROPE_FREQS} holds values that are not above 0: the file is damaged")
    return tuple(factors.tolist())


def _yarn_factors(hparams: HyperParameters, n_rot: int, freq_base: float, factor: float) -> tuple[float, ...]:
    """Divisors of the linearly scaled frequencies of n_rot / 2 pairs: 1 for pairs that turn fewer than beta_slow times
    in the context trained for, 1 / factor (so that they are not scaled) for those that turn more than beta_fast
    times, and between them a ramp that mixes the two frequencies. Source: YaRN (Peng et al. 2023), section 3.2.
    """
    n_ctx = hparams.integer("rope.scaling.original_context_length", hparams.integer("context_length"))
    if freq_base <= 1.0:
        raise FormatError(f"rope.freq_base is {freq_base}: yarn scaling needs one above 1")

    def pair_that_turns(times: float) -> float:
        return n_rot * (math.log(n_ctx) - math.log(times * 2 * math.pi)) / (2 * math.log(freq_base))

    low = max(math.floor(pair_that_turns(hparams.number("rope.scaling.yarn_beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_that_turns(hparams.number("rope.scaling.yarn_beta_slow", 1.0))), n_rot - 1)
    scaled = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return tuple((1.0 / (scaled + (1.0 - scaled) * factor)).tolist())
