"""Rotary settings: transformers' spellings of them to GGUF's keys and the tensor of Llama 3's factors."""

from __future__ import annotations

import math

import numpy as np

from powerinfer.convert.config import Config
from powerinfer.convert.family import Floats
from powerinfer.convert.layout import Layout, half_of_head
from powerinfer.errors import FormatError, UnsupportedError, shown

KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


def rope_settings(config: Config, layers: str = KINDS_OF_LAYERS[0]) -> Config:
    """Base, type and scaling in one. transformers 5 keeps them in `rope_parameters`, where layers differ one each of
    KINDS_OF_LAYERS; before, the base stood beside `rope_scaling`."""
    newer = config.section("rope_parameters")
    if any(kind in newer.values for kind in KINDS_OF_LAYERS):
        newer = newer.section(layers)
    older = {"rope_theta": config.get("rope_theta")} | dict(config.section("rope_scaling").values)
    return Config(older | dict(newer.values), "config.json: rope scaling")


def add_rope(layout: Layout, *, factors: bool = False) -> None:
    """Keys of the rotation. factors: llama.cpp reads `rope_freqs.weight` in this architecture.

    Raises UnsupportedError for kinds of scaling that files or engines do not know.
    """
    config, settings = layout.config, rope_settings(layout.config)
    for where in (config, settings):
        where.refuse("partial_rotary_factor", 1, 1.0)
    half_of_head(layout.head_dim)
    base = settings.number("rope_theta", default=10000.0)
    layout.key("rope.dimension_count", layout.head_dim)
    layout.key("rope.freq_base", base)
    kind = settings.text("rope_type", "type", default="default")
    if kind == "default":
        return
    if kind == "linear":
        layout.key("rope.scaling.type", "linear")
        layout.key("rope.scaling.factor", settings.number("factor"))
    elif kind == "yarn":
        _add_yarn(layout, settings)
    elif kind == "llama3" and factors:
        layout.constants["rope_freqs.weight"] = llama3_factors(settings, base, layout.head_dim)
    else:
        raise UnsupportedError(
            f"rotary scaling {shown(kind)} of {layout.architecture} is not supported: supported are linear, yarn"
            + (", llama3" if factors else "")
        )


def _add_yarn(layout: Layout, settings: Config) -> None:
    """Attention is scaled by 1 + 0.1 ln(factor) unless a model says otherwise; files hold what it is beside that."""
    for name in ("mscale", "mscale_all_dim"):
        settings.refuse(name)
    settings.refuse("truncate", True)
    factor = settings.number("factor")
    n_ctx = layout.config.integer("max_position_embeddings")
    original = settings.integer("original_max_position_embeddings", default=n_ctx)
    layout.key("rope.scaling.type", "yarn")
    layout.key("rope.scaling.factor", factor)
    layout.key("rope.scaling.original_context_length", original)
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if settings.get(name) is not None:
            layout.key(f"rope.scaling.{key}", settings.number(name))
    if settings.get("attention_factor") is not None:
        usual = 1.0 + 0.1 * math.log(max(factor, 1.0))
        layout.key("rope.scaling.attn_factor", settings.number("attention_factor") / usual)


def llama3_factors(settings: Config, base: float, n_rot: int) -> Floats:
    """What frequencies are divided by, (n_rot / 2,): 1 for waves shorter than the context trained for divided by
    high_freq_factor, `factor` for those longer than it divided by low_freq_factor, a smooth transition between.

    Source: the reference code of Llama 3.1.
    """
    factor = settings.number("factor")
    low, high = settings.number("low_freq_factor", default=1.0), settings.number("high_freq_factor", default=4.0)
    n_ctx = settings.integer("original_max_position_embeddings")
    if low >= high:
        raise FormatError(f"config.json: low_freq_factor is {low}, high_freq_factor {high}: expected a higher one")
    waves = 2 * math.pi * base ** (np.arange(n_rot // 2) * 2 / n_rot)
    smooth = np.clip((n_ctx / waves - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
