"""Llama 1-3, Mistral, SmolLM2 and others of that layout; ReluLLaMA and ProSparse.

Rows of queries and keys are reordered, since engines turn neighbours. ProSparse's `fatrelu` (x where x > t, else 0) is
a ReLU with a threshold.
"""

from __future__ import annotations

import math

from powerinfer.convert.config import Config
from powerinfer.convert.family import Recipe, family, read_activation
from powerinfer.convert.gated import add_ffn_norms, gated_layout
from powerinfer.convert.layout import ROTARY_BUFFERS
from powerinfer.convert.rope import add_rope

FATRELU_THRESHOLD = 0.01  # ProSparse's, where the settings do not say


@family("LlamaForCausalLM", "SparseLlamaForCausalLM", "LLaMAForCausalLM")
def llama(config: Config) -> Recipe:
    bias = config.flag("attention_bias", False)
    layout = gated_layout(
        config,
        "llama",
        interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=config.flag("mlp_bias", False),
    )
    add_ffn_norms(layout)
    add_rope(layout, factors=True)
    return layout.recipe(
        activation=read_activation(config, "hidden_act", default="silu"),
        activation_threshold=_threshold(config),
        default_activation="silu",
        takes_predictors=True,
        ignored=ROTARY_BUFFERS,
    )


@family("MistralForCausalLM")
def mistral(config: Config) -> Recipe:
    recipe = llama(config)
    if config.get("sliding_window") is not None:
        recipe.metadata["llama.attention.sliding_window"] = config.integer("sliding_window", high=1 << 31)
    return recipe


def _threshold(config: Config) -> float:
    if config.get("hidden_act") != "fatrelu":
        return 0.0
    value = config.get("hidden_act_param")
    value = FATRELU_THRESHOLD if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise config.error("hidden_act_param", value, "a number of 0 or more")
    return float(value)
