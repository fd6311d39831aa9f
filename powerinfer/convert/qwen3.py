"""Qwen 3: a norm on each head's queries and keys."""

from __future__ import annotations

from powerinfer.convert.config import Config
from powerinfer.convert.family import Recipe, family, read_activation
from powerinfer.convert.gated import add_ffn_norms, add_head_norms, gated_layout
from powerinfer.convert.layout import ROTARY_BUFFERS
from powerinfer.convert.qwen2 import refuse_windows
from powerinfer.convert.rope import add_rope


@family("Qwen3ForCausalLM")
def qwen3(config: Config) -> Recipe:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    layout = gated_layout(config, "qwen3", qkv_bias=bias, output_bias=bias)
    layout.key("attention.key_length", layout.head_dim)
    layout.key("attention.value_length", layout.head_dim)
    add_ffn_norms(layout)
    add_head_norms(layout)
    add_rope(layout)
    return layout.recipe(
        activation=read_activation(config, "hidden_act", default="silu"),
        default_activation="silu",
        ignored=ROTARY_BUFFERS,
    )
