"""Qwen 1.5, 2 and 2.5: queries, keys and values have biases."""

from __future__ import annotations

from powerinfer.convert.config import Config
from powerinfer.convert.family import Recipe, family, read_activation
from powerinfer.convert.gated import add_ffn_norms, gated_layout
from powerinfer.convert.layout import ROTARY_BUFFERS
from powerinfer.convert.rope import add_rope
from powerinfer.errors import UnsupportedError


@family("Qwen2ForCausalLM")
def qwen2(config: Config) -> Recipe:
    refuse_windows(config)
    layout = gated_layout(config, "qwen2", qkv_bias=True)
    add_ffn_norms(layout)
    add_rope(layout)
    return layout.recipe(
        activation=read_activation(config, "hidden_act", default="silu"),
        default_activation="silu",
        ignored=ROTARY_BUFFERS,
    )


def refuse_windows(config: Config) -> None:
    """Qwen's settings name a window that is off in the models that are published."""
    n_layers = config.integer("num_hidden_layers")
    first = config.integer("max_window_layers", default=n_layers, low=0)
    if config.flag("use_sliding_window", False) and config.get("sliding_window") is not None and first < n_layers:
        raise UnsupportedError("config.json: use_sliding_window is true: files of Qwen models cannot say so")
