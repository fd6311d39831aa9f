"""The forward pass, once for every architecture and every backend."""

from __future__ import annotations

from collections.abc import Callable

from powerinfer.backends.interface import (
    AttentionBlock,
    Backend,
    Batch,
    FeedForwardBlock,
    FloatArray,
    KVCache,
    ModelSpec,
)
from powerinfer.errors import UsageError


class Transformer:
    """A `ModelSpec` compiled by a backend.

    on_block is called after each block: what the backend has copied of the file need not stay in memory twice.
    """

    def __init__(self, spec: ModelSpec, backend: Backend, on_block: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self.backend = backend
        self.embedding = backend.embedding(spec.embedding)
        self.layers: list[tuple[AttentionBlock, FeedForwardBlock, bool]] = []
        for layer in spec.layers:
            blocks = backend.attention(layer.attention), backend.feed_forward(layer.feed_forward), layer.parallel
            self.layers.append(blocks)
            on_block()
        self.head = backend.head(spec.head)
        on_block()

    def kv_cache(self, n_ctx: int, n_slots: int = 1) -> KVCache:
        """Raises UsageError for more positions than the model has embeddings of."""
        most = self.spec.max_positions
        if most is not None and n_ctx > most:
            raise UsageError(f"the context size is {n_ctx}: this model has {most} positions, choose at most as many")
        return self.backend.kv_cache(self.spec, n_ctx, n_slots)

    def forward(self, batch: Batch, cache: KVCache) -> FloatArray:
        """Logits of `batch.outputs`, float32 (n_outputs, n_vocab); keys and values go into `cache`."""
        x = self.embedding(batch)
        for attention, feed_forward, parallel in self.layers:
            residual = self.backend.copy(x) if parallel else x
            attention(x, residual, batch, cache)
            feed_forward(x, residual)
            x = residual
        return self.head(x, batch)
