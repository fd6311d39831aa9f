"""The text part of Gemma 3: norms around both blocks and on heads, all stored as w where files hold 1 + w."""

from __future__ import annotations

from powerinfer.convert.config import Config
from powerinfer.convert.family import Recipe, family, read_activation
from powerinfer.convert.gated import add_head_norms, gated_layout
from powerinfer.convert.layout import ROTARY_BUFFERS, Layout
from powerinfer.convert.rope import KINDS_OF_LAYERS, add_rope, rope_settings
from powerinfer.errors import UnsupportedError

GLOBAL_EVERY = 6
LAYERS_OF_27B = 62
"""The one size whose scores are scaled by n_embd / n_head, not by the head's own width."""
LOCAL_FREQ_BASE = 10000.0
OLDER_LOCAL_BASE = "rope_local_base_freq"


@family("Gemma3ForCausalLM")
def gemma3(config: Config) -> Recipe:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.refuse(name)
    config.refuse("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", False)
    layout = gated_layout(config, "gemma3", qkv_bias=bias, output_bias=bias, norm_shift=1.0, tied=True)
    _check_scale(layout)
    layout.key("attention.key_length", layout.head_dim)
    layout.key("attention.value_length", layout.head_dim)
    add_head_norms(layout, shift=1.0)
    for i in range(layout.n_layers):
        to, at = f"blk.{i}", f"model.layers.{i}"
        layout.norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", shift=1.0)
        layout.norm(f"{to}.ffn_norm", f"{at}.pre_feedforward_layernorm", shift=1.0)
        layout.norm(f"{to}.post_ffw_norm", f"{at}.post_feedforward_layernorm", shift=1.0)
    add_rope(layout)
    _add_windows(layout)
    return layout.recipe(
        activation=read_activation(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        default_activation="gelu",
        ignored=ROTARY_BUFFERS,
    )


def _check_scale(layout: Layout) -> None:
    usual = layout.n_embd // layout.n_head if layout.n_layers == LAYERS_OF_27B else layout.head_dim
    scalar = layout.config.number("query_pre_attn_scalar", default=float(usual))
    if scalar != usual:
        raise UnsupportedError(f"config.json: query_pre_attn_scalar is {scalar:g}: files of Gemma 3 can hold {usual}")


def _add_windows(layout: Layout) -> None:
    """Which layers see a window only, in the file where it is not all but every sixth; and the base of their own."""
    config = layout.config
    if config.get("sliding_window") is None:
        return
    layout.key("attention.sliding_window", config.integer("sliding_window", high=1 << 31))
    newer = config.get("rope_parameters") is not None
    settings, name = (rope_settings(config, KINDS_OF_LAYERS[1]), "rope_theta") if newer else (config, OLDER_LOCAL_BASE)
    base = settings.number(name, default=LOCAL_FREQ_BASE)
    if base != LOCAL_FREQ_BASE:
        layout.key("rope.freq_base_swa", base)
    every = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=GLOBAL_EVERY)
    kinds = config.get("layer_types")
    is_local = [bool((i + 1) % every) for i in range(layout.n_layers)]
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in KINDS_OF_LAYERS for kind in kinds)
        if not known or len(kinds) != layout.n_layers:
            raise config.error("layer_types", kinds, f"{layout.n_layers} of {', '.join(KINDS_OF_LAYERS)}")
        is_local = [kind == KINDS_OF_LAYERS[1] for kind in kinds]
    if is_local != [bool((i + 1) % GLOBAL_EVERY) for i in range(layout.n_layers)]:
        layout.key("attention.sliding_window_pattern", is_local)
