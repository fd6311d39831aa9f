"""Falcon 7B, 11B and 40B, ReluFalcon: a fused matrix of queries, keys and values, whose groups are put in order.

7B has one KV head and one LayerNorm a layer; 40B groups of heads and a LayerNorm for each block, 11B one for both.
"""

from __future__ import annotations

from functools import partial

from powerinfer.convert.config import Config
from powerinfer.convert.family import Recipe, family, read_activation
from powerinfer.convert.layout import ROTARY_BUFFERS, Layout, grouped_rows
from powerinfer.convert.rope import add_rope


@family("FalconForCausalLM")
def falcon(config: Config) -> Recipe:
    config.refuse("alibi", False)
    config.refuse("parallel_attn", True)
    layout = Layout(config, "falcon", n_ff=("ffn_hidden_size",))
    newer = config.flag("new_decoder_architecture", False)
    _set_heads_kv(layout, newer)
    bias = config.flag("bias", False)
    epsilon = config.number("layer_norm_epsilon", default=1e-5)
    n_ctx = config.integer("max_position_embeddings", default=2048)
    layout.common_keys("attention.layer_norm_epsilon", epsilon, n_ctx)
    n_qkv = (layout.n_head + 2 * layout.n_head_kv) * layout.head_dim
    rows = partial(grouped_rows, layout.n_head, layout.n_head_kv, layout.head_dim)
    n_norms = config.integer("num_ln_in_parallel_attn", default=2, high=2) if newer else 1
    layout.add("token_embd.weight", "transformer.word_embeddings.weight", layout.n_vocab, layout.n_embd)
    for i in range(layout.n_layers):
        to, at = f"blk.{i}", f"transformer.h.{i}"
        if n_norms == 2:
            layout.norm(f"{to}.attn_norm", f"{at}.ln_mlp", bias=True)
            layout.norm(f"{to}.attn_norm_2", f"{at}.ln_attn", bias=True)
        else:
            layout.norm(f"{to}.attn_norm", f"{at}.input_layernorm", bias=True)
        attention, mlp = f"{at}.self_attention", f"{at}.mlp"
        layout.linear(f"{to}.attn_qkv", f"{attention}.query_key_value", n_qkv, layout.n_embd, bias=bias, rows=rows)
        n_q = layout.n_head * layout.head_dim
        layout.linear(f"{to}.attn_output", f"{attention}.dense", layout.n_embd, n_q, bias=bias)
        layout.linear(f"{to}.ffn_up", f"{mlp}.dense_h_to_4h", layout.n_ff, layout.n_embd, bias=bias)
        layout.linear(f"{to}.ffn_down", f"{mlp}.dense_4h_to_h", layout.n_embd, layout.n_ff, bias=bias)
    layout.norm("output_norm", "transformer.ln_f", bias=True)
    layout.head("lm_head", tied=True)
    add_rope(layout)
    return layout.recipe(
        activation=read_activation(config, "activation", "hidden_act", default="gelu"),
        default_activation="gelu_erf",
        takes_predictors=True,
        ignored=ROTARY_BUFFERS,
    )


def _set_heads_kv(layout: Layout, newer: bool) -> None:
    config, n_head = layout.config, layout.n_head
    if newer:
        layout.set_heads_kv(config.integer("num_kv_heads", "n_head_kv", default=n_head, high=n_head))
    else:
        layout.set_heads_kv(1 if config.flag("multi_query", True) else n_head)
