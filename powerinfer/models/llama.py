"""llama: Llama 1-3, Mistral, SmolLM2 and others of that layout; ReluLLaMA and ProSparse where the file is sparse.

RMSNorm, interleaved rotary pairs, grouped KV, gated feed-forward. The predictor looks at the residual stream that
`ffn_norm` is applied to.
"""

from __future__ import annotations

from powerinfer.backends.interface import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Linear,
    ModelSpec,
    NormKind,
    RopeStyle,
)
from powerinfer.errors import FormatError
from powerinfer.models.rope import read_rope
from powerinfer.models.sparse import read_activation, read_predictor
from powerinfer.models.spec import HyperParameters, ModelFile, ModelOptions, Weights, architecture


@architecture("llama")
def llama(file: ModelFile, options: ModelOptions) -> ModelSpec:
    hparams, weights = HyperParameters(file, "llama"), Weights(file)
    n_embd = hparams.integer("embedding_length")
    n_ff = hparams.integer("feed_forward_length")
    n_head = hparams.integer("attention.head_count")
    n_head_kv = hparams.integer("attention.head_count_kv", n_head)
    head_dim = hparams.integer("attention.key_length", max(1, n_embd // n_head))
    if n_head % n_head_kv:
        raise FormatError(f"llama.attention.head_count is {n_head}: not a multiple of head_count_kv, {n_head_kv}")
    eps = hparams.number("attention.layer_norm_rms_epsilon")
    rope = read_rope(hparams, options, head_dim, RopeStyle.INTERLEAVED)
    activation = read_activation(file, options)

    def layer(i: int) -> Layer:
        at = f"blk.{i}"
        attention = Attention(
            layer=i,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            rope=rope,
            attn_norm=weights.norm(f"{at}.attn_norm", n_embd, NormKind.RMS, eps),
            attn_q=weights.linear(f"{at}.attn_q", n_head * head_dim, n_embd),
            attn_k=weights.linear(f"{at}.attn_k", n_head_kv * head_dim, n_embd),
            attn_v=weights.linear(f"{at}.attn_v", n_head_kv * head_dim, n_embd),
            attn_output=weights.linear(f"{at}.attn_output", n_embd, n_head * head_dim),
        )
        transposed = file.is_powerinfer
        feed_forward = FeedForward(
            layer=i,
            ffn_norm=weights.norm(f"{at}.ffn_norm", n_embd, NormKind.RMS, eps),
            ffn_gate=weights.linear(f"{at}.ffn_gate", n_ff, n_embd),
            ffn_up=weights.linear(f"{at}.ffn_up", n_ff, n_embd),
            ffn_down=None if transposed else weights.linear(f"{at}.ffn_down", n_embd, n_ff),
            ffn_down_t=weights.linear_t(f"{at}.ffn_down_t", n_ff, n_embd) if transposed else None,
            activation=activation,
            predictor=read_predictor(file, options, weights, at, n_ff, n_embd),
        )
        return Layer(attention, feed_forward)

    token_embd = weights.tensor("token_embd.weight", None, n_embd)
    n_vocab = token_embd.shape[0]
    tied = "output.weight" not in weights
    return ModelSpec(
        architecture="llama",
        n_vocab=n_vocab,
        n_embd=n_embd,
        n_ctx_train=hparams.integer("context_length"),
        embedding=Embedding(token_embd),
        layers=tuple(layer(i) for i in range(hparams.integer("block_count", high=4096))),
        head=Head(
            output_norm=weights.norm("output_norm", n_embd, NormKind.RMS, eps),
            output=Linear(token_embd) if tied else weights.linear("output", n_vocab, n_embd),
        ),
    )
