"""Rotary settings from metadata and options."""

from __future__ import annotations

from powerinfer.backends.interface import Rope, RopeStyle
from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.models.spec import HyperParameters, ModelOptions


def read_rope(hparams: HyperParameters, options: ModelOptions, head_dim: int, style: RopeStyle) -> Rope:
    """Base, linear scaling and number of rotated elements of a head.

    `rope.scale_linear` is the spelling of files of 2023, `rope.scaling.type` and `.factor` today's; both divide
    positions by the factor.
    """
    n_rot = hparams.integer("rope.dimension_count", head_dim)
    if n_rot > head_dim or n_rot % 2:
        raise FormatError(f"rope.dimension_count is {n_rot}: expected an even number up to the head size, {head_dim}")
    scaling = hparams.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise UnsupportedError(f"rotary scaling {scaling!r} is not supported: supported are none, linear")
    factor = hparams.number("rope.scaling.factor", hparams.number("rope.scale_linear", 1.0))
    freq_scale = 1.0 / factor if scaling == "linear" else 1.0
    if options.rope_freq_scale is not None:
        freq_scale = options.rope_freq_scale
    freq_base = options.rope_freq_base or hparams.number("rope.freq_base", 10000.0)
    return Rope(n_rot=n_rot, style=style, freq_base=freq_base, freq_scale=freq_scale)
