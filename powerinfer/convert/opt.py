"""OPT with LayerNorms before the blocks (all but 350M): learned positions, biases, ReLU without a gate."""

from __future__ import annotations

from powerinfer.convert.config import Config
from powerinfer.convert.family import Recipe, family, read_activation
from powerinfer.convert.layout import Layout

FIRST_POSITION = 2
"""The rows of positions start with two that were for padding."""


@family("OPTForCausalLM")
def opt(config: Config) -> Recipe:
    layout = Layout(config, "opt", n_ff=("ffn_dim",))
    config.refuse("do_layer_norm_before", True)
    config.refuse("_remove_final_layer_norm", False)
    config.refuse("layer_norm_elementwise_affine", True)
    config.refuse("word_embed_proj_dim", layout.n_embd)
    bias = config.flag("enable_bias", True)
    n_ctx = config.integer("max_position_embeddings", default=2048)
    layout.common_keys("attention.layer_norm_epsilon", 1e-5, n_ctx)  # torch's; settings do not have it
    n = layout.n_embd
    layout.add("token_embd.weight", "model.decoder.embed_tokens.weight", layout.n_vocab, n)
    layout.add("position_embd.weight", "model.decoder.embed_positions.weight", n_ctx + FIRST_POSITION, n)
    for i in range(layout.n_layers):
        to, at = f"blk.{i}", f"model.decoder.layers.{i}"
        layout.norm(f"{to}.attn_norm", f"{at}.self_attn_layer_norm", bias=True)
        for name, source in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "out_proj")):
            layout.linear(f"{to}.attn_{name}", f"{at}.self_attn.{source}", n, n, bias=bias)
        layout.norm(f"{to}.ffn_norm", f"{at}.final_layer_norm", bias=True)
        layout.linear(f"{to}.ffn_up", f"{at}.fc1", layout.n_ff, n, bias=bias)
        layout.linear(f"{to}.ffn_down", f"{at}.fc2", n, layout.n_ff, bias=bias)
    layout.norm("output_norm", "model.decoder.final_layer_norm", bias=True)
    layout.head("lm_head", tied=True)
    return layout.recipe(
        activation=read_activation(config, "activation_function", default="relu"),
        default_activation="relu",
        takes_predictors=True,
        ignored=("decoder.version",),
        rename=lambda name: f"model.{name}" if name.startswith("decoder.") else name,
    )
