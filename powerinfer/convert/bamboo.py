"""Bamboo: the layout of Mistral; both gate and up go through a ReLU, which the architecture's name says."""

from __future__ import annotations

from powerinfer.convert.config import Config
from powerinfer.convert.family import Recipe, family
from powerinfer.convert.gated import add_ffn_norms, gated_layout
from powerinfer.convert.layout import ROTARY_BUFFERS
from powerinfer.convert.rope import add_rope


@family("BambooForCausalLM")
def bamboo(config: Config) -> Recipe:
    layout = gated_layout(config, "bamboo", interleaved=True)
    add_ffn_norms(layout)
    add_rope(layout)
    return layout.recipe(activation="relu", default_activation="relu", takes_predictors=True, ignored=ROTARY_BUFFERS)
