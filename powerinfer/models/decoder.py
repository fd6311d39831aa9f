"""The parts that decoders have in common, read from a model file; an architecture puts them together."""

from __future__ import annotations

from collections.abc import Callable

from powerinfer.backends.interface import (
    Activation,
    Attention,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Linear,
    ModelSpec,
    Norm,
    NormKind,
    Rope,
    RopeStyle,
)
from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.models.rope import read_rope
from powerinfer.models.sparse import read_activation, read_activation_threshold, read_predictor
from powerinfer.models.spec import HyperParameters, ModelFile, ModelOptions, Weights

_EPSILON = {NormKind.RMS: "attention.layer_norm_rms_epsilon", NormKind.LAYER: "attention.layer_norm_epsilon"}


class Decoder:
    """Sizes, weights and settings of a decoder under GGUF's usual names.

    What it reads is what most have: queries, keys and values of one norm, grouped KV, a gated feed-forward. What is
    particular to an architecture replaces a field of a part.
    """

    def __init__(self, file: ModelFile, options: ModelOptions, architecture: str, norm: NormKind) -> None:
        self.architecture = architecture
        self.hparams, self.weights = HyperParameters(file, architecture), Weights(file)
        self._file, self._options = file, options
        hparams = self.hparams
        self.n_embd = hparams.integer("embedding_length")
        self.n_ff = hparams.integer("feed_forward_length")
        self.n_head = hparams.integer("attention.head_count")
        self.n_head_kv = hparams.integer("attention.head_count_kv", self.n_head)
        self.head_dim = hparams.integer("attention.key_length", max(1, self.n_embd // self.n_head), high=1 << 16)
        self.n_layers = hparams.integer("block_count", high=4096)
        self.n_ctx_train = hparams.integer("context_length")
        if self.n_head % self.n_head_kv:
            name = f"{architecture}.attention.head_count"
            raise FormatError(f"{name} is {self.n_head}: not a multiple of head_count_kv, {self.n_head_kv}")
        if hparams.integer("expert_count", 0, low=0):
            raise UnsupportedError(f"this {architecture} is a mixture of experts: only dense ones are supported")
        self._norm_kind = norm
        self._eps = hparams.number(_EPSILON[norm], 1e-5 if norm is NormKind.LAYER else None)
        self.token_embd = self.weights.tensor("token_embd.weight", None, self.n_embd)

    def rope(self, style: RopeStyle) -> Rope:
        return read_rope(self.hparams, self.weights, self._options, self.head_dim, style)

    def norm(self, name: str) -> Norm:
        """Of the hidden state."""
        return self.weights.norm(name, self.n_embd, self._norm_kind, self._eps)

    def head_norm(self, name: str) -> Norm:
        """Of one head."""
        return self.weights.norm(name, self.head_dim, self._norm_kind, self._eps)

    def attention(self, i: int, rope: Rope, fused: bool = False) -> Attention:
        """The attention of layer i. fused: queries, keys and values are rows of one matrix, in this order."""
        at, weights = f"blk.{i}", self.weights
        n_q, n_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        if fused:
            q, k, v = weights.fused(f"{at}.attn_qkv", (n_q, n_kv, n_kv), self.n_embd)
        else:
            q = weights.linear(f"{at}.attn_q", n_q, self.n_embd)
            k = weights.linear(f"{at}.attn_k", n_kv, self.n_embd)
            v = weights.linear(f"{at}.attn_v", n_kv, self.n_embd)
        return Attention(
            layer=i,
            n_head=self.n_head,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            scale=float(self.head_dim**-0.5),
            rope=rope,
            attn_norm=self.norm(f"{at}.attn_norm"),
            attn_q=q,
            attn_k=k,
            attn_v=v,
            attn_output=weights.linear(f"{at}.attn_output", self.n_embd, n_q),
        )

    def feed_forward(
        self, i: int, dense: Activation = Activation.SILU, *, gated: bool = True, norm: str = "ffn_norm"
    ) -> FeedForward:
        """The feed-forward of layer i, after the layer's `norm`.

        dense: the activation of an ordinary file that names none; that of a sparse one is ReLU.
        """
        at, weights, file = f"blk.{i}", self.weights, self._file
        transposed = file.is_powerinfer
        activation = read_activation(file, self._options, dense)
        return FeedForward(
            layer=i,
            ffn_norm=self.norm(f"{at}.{norm}"),
            ffn_gate=weights.linear(f"{at}.ffn_gate", self.n_ff, self.n_embd) if gated else None,
            ffn_up=weights.linear(f"{at}.ffn_up", self.n_ff, self.n_embd),
            ffn_down=None if transposed else weights.linear(f"{at}.ffn_down", self.n_embd, self.n_ff),
            ffn_down_t=weights.linear_t(f"{at}.ffn_down_t", self.n_ff, self.n_embd) if transposed else None,
            activation=activation,
            activation_threshold=read_activation_threshold(file) if activation is Activation.RELU else 0.0,
            predictor=read_predictor(file, self._options, weights, at, self.n_ff, self.n_embd),
        )

    def model(self, layer: Callable[[int], Layer], embedding: Embedding | None = None) -> ModelSpec:
        """The whole model; its head is the embedding's matrix where the file has no other."""
        n_vocab = self.token_embd.shape[0]
        tied = "output.weight" not in self.weights
        return ModelSpec(
            architecture=self.architecture,
            n_vocab=n_vocab,
            n_embd=self.n_embd,
            n_ctx_train=self.n_ctx_train,
            embedding=embedding or Embedding(self.token_embd),
            layers=tuple(layer(i) for i in range(self.n_layers)),
            head=Head(
                output_norm=self.norm("output_norm"),
                output=Linear(self.token_embd) if tied else self.weights.linear("output", n_vocab, self.n_embd),
            ),
        )
