"""Collects what a family's function says: keys, and tensors with the names that both sides give them."""

from __future__ import annotations

from typing import Any

import numpy as np

from powerinfer.convert.config import Config
from powerinfer.convert.family import Floats, Ints, Recipe, Rows, TensorPlan
from powerinfer.errors import FormatError

MAX_LAYERS = 4096
ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary.inv_freq")
"""Frequencies that older versions of transformers saved."""


class Layout:
    """Sizes that all families have, and the recipe that a family puts together with them."""

    def __init__(self, config: Config, architecture: str, *, n_ff: tuple[str, ...] = ("intermediate_size",)) -> None:
        """n_ff: what the family calls its number of neurons; where it is missing, there are four times n_embd."""
        self.config, self.architecture = config, architecture
        self.n_vocab = config.integer("vocab_size")
        self.n_embd = config.integer("hidden_size", "n_embed", "d_model")
        self.n_layers = config.integer("num_hidden_layers", "n_layer", high=MAX_LAYERS)
        self.n_head = config.integer("num_attention_heads", "n_head", high=1 << 16)
        self.n_ff = config.integer(*n_ff, default=4 * self.n_embd)
        self.head_dim = config.integer("head_dim", default=max(1, self.n_embd // self.n_head), high=1 << 16)
        self.n_head_kv = self.n_head
        self.tensors: list[TensorPlan] = []
        self.constants: dict[str, Floats] = {}
        self.metadata: dict[str, Any] = {}
        self._unused: list[str] = []

    def set_heads_kv(self, n: int) -> None:
        if self.n_head % n:
            raise FormatError(f"config.json: {self.n_head} attention heads are no multiple of {n} of keys and values")
        self.n_head_kv = n

    def key(self, name: str, value: Any) -> None:
        """Sets a key of the architecture."""
        self.metadata[f"{self.architecture}.{name}"] = value

    def common_keys(self, epsilon_name: str, epsilon: float, n_ctx: int) -> None:
        self.key("vocab_size", self.n_vocab)
        self.key("context_length", n_ctx)
        self.key("embedding_length", self.n_embd)
        self.key("block_count", self.n_layers)
        self.key("feed_forward_length", self.n_ff)
        self.key("attention.head_count", self.n_head)
        self.key("attention.head_count_kv", self.n_head_kv)
        self.key(epsilon_name, epsilon)
        if self.head_dim * self.n_head != self.n_embd:
            self.key("attention.key_length", self.head_dim)
            self.key("attention.value_length", self.head_dim)

    def add(self, name: str, source: str, *shape: int, rows: Rows | None = None, shift: float = 0.0) -> None:
        self.tensors.append(TensorPlan(name, source, shape, rows, shift))

    def linear(
        self, name: str, source: str, n_out: int, n_in: int, *, bias: bool = False, rows: Rows | None = None
    ) -> None:
        self.add(f"{name}.weight", f"{source}.weight", n_out, n_in, rows=rows)
        if bias:
            self.add(f"{name}.bias", f"{source}.bias", n_out, rows=rows)

    def norm(self, name: str, source: str, n: int = 0, *, bias: bool = False, shift: float = 0.0) -> None:
        """n: 0 for one of the hidden state."""
        self.add(f"{name}.weight", f"{source}.weight", n or self.n_embd, shift=shift)
        if bias:
            self.add(f"{name}.bias", f"{source}.bias", n or self.n_embd, shift=shift)

    def head(self, source: str, *, tied: bool) -> None:
        """The output matrix, where the embedding does not do its work (`tie_word_embeddings`; tied: the default)."""
        if self.config.flag("tie_word_embeddings", tied):
            self._unused.append(f"{source}.weight")
        else:
            self.linear("output", source, self.n_vocab, self.n_embd)

    def recipe(self, ignored: tuple[str, ...] = (), **rest: Any) -> Recipe:
        """rest: the other fields."""
        return Recipe(
            architecture=self.architecture,
            metadata=self.metadata,
            tensors=tuple(self.tensors),
            constants=self.constants,
            n_vocab=self.n_vocab,
            n_embd=self.n_embd,
            n_ff=self.n_ff,
            n_layers=self.n_layers,
            ignored=(*ignored, *self._unused),
            **rest,
        )


def half_of_head(head_dim: int) -> int:
    """Pairs of a head that are turned together. FormatError where its elements do not make up pairs."""
    if head_dim % 2:
        raise FormatError(f"config.json: a head has {head_dim} elements: rotary positions need an even number")
    return head_dim // 2


def interleaved_rows(n_head: int, head_dim: int) -> Ints:
    """Checkpoints turn elements i and i + head_dim/2 of a head together; these rows make them neighbours."""
    halves = np.arange(n_head * head_dim).reshape(n_head, 2, half_of_head(head_dim))
    return halves.swapaxes(1, 2).reshape(-1)


def grouped_rows(n_head: int, n_head_kv: int, head_dim: int) -> Ints:
    """Of a fused matrix in groups (the queries of a KV head, its key, its value): all queries, all keys, all values."""
    per_group = n_head // n_head_kv
    groups = np.arange((n_head + 2 * n_head_kv) * head_dim).reshape(n_head_kv, per_group + 2, head_dim)
    parts = groups[:, :per_group], groups[:, per_group], groups[:, per_group + 1]
    return np.concatenate([part.reshape(-1) for part in parts])
