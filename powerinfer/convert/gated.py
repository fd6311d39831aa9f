"""The layout that llama, bamboo, qwen2, qwen3 and gemma3 have in common: RMSNorms, separate q, k and v, a gate."""

from __future__ import annotations

from functools import partial

from powerinfer.convert.config import Config
from powerinfer.convert.layout import Layout, interleaved_rows


def gated_layout(
    config: Config,
    architecture: str,
    *,
    interleaved: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    ffn_bias: bool = False,
    norm_shift: float = 0.0,
    tied: bool = False,
) -> Layout:
    """Keys but those of the rotation, and all tensors but the norms that not every family has.

    interleaved: engines expect neighbours to be turned together. norm_shift: added to norm weights. tied: whether
    embedding and head are one where the settings do not say.
    """
    layout = Layout(config, architecture)
    layout.set_heads_kv(config.integer("num_key_value_heads", default=layout.n_head, high=layout.n_head))
    epsilon = config.number("rms_norm_eps", default=1e-6)
    layout.common_keys("attention.layer_norm_rms_epsilon", epsilon, config.integer("max_position_embeddings"))
    n_q, n_kv = layout.n_head * layout.head_dim, layout.n_head_kv * layout.head_dim
    q_rows = partial(interleaved_rows, layout.n_head, layout.head_dim) if interleaved else None
    k_rows = partial(interleaved_rows, layout.n_head_kv, layout.head_dim) if interleaved else None
    layout.add("token_embd.weight", "model.embed_tokens.weight", layout.n_vocab, layout.n_embd)
    for i in range(layout.n_layers):
        to, at = f"blk.{i}", f"model.layers.{i}"
        layout.norm(f"{to}.attn_norm", f"{at}.input_layernorm", shift=norm_shift)
        layout.linear(f"{to}.attn_q", f"{at}.self_attn.q_proj", n_q, layout.n_embd, bias=qkv_bias, rows=q_rows)
        layout.linear(f"{to}.attn_k", f"{at}.self_attn.k_proj", n_kv, layout.n_embd, bias=qkv_bias, rows=k_rows)
        layout.linear(f"{to}.attn_v", f"{at}.self_attn.v_proj", n_kv, layout.n_embd, bias=qkv_bias)
        layout.linear(f"{to}.attn_output", f"{at}.self_attn.o_proj", layout.n_embd, n_q, bias=output_bias)
        for name, source in (("ffn_gate", "gate_proj"), ("ffn_up", "up_proj")):
            layout.linear(f"{to}.{name}", f"{at}.mlp.{source}", layout.n_ff, layout.n_embd, bias=ffn_bias)
        layout.linear(f"{to}.ffn_down", f"{at}.mlp.down_proj", layout.n_embd, layout.n_ff, bias=ffn_bias)
    layout.norm("output_norm", "model.norm", shift=norm_shift)
    layout.head("lm_head", tied=tied)
    return layout


def add_ffn_norms(layout: Layout) -> None:
    """The norm before the feed-forward, which most call by the attention's."""
    for i in range(layout.n_layers):
        layout.norm(f"blk.{i}.ffn_norm", f"model.layers.{i}.post_attention_layernorm")


def add_head_norms(layout: Layout, shift: float = 0.0) -> None:
    """The norms of each head's queries and keys."""
    for i in range(layout.n_layers):
        for name in ("q_norm", "k_norm"):
            layout.norm(f"blk.{i}.attn_{name}", f"model.layers.{i}.self_attn.{name}", layout.head_dim, shift=shift)
