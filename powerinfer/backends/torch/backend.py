"""Compiles blocks into modules of plain tensors. Weights are dequantized to float32 when a block is made."""

from __future__ import annotations

import torch

from powerinfer.backends.interface import (
    Attention,
    Backend,
    BackendOptions,
    Embedding,
    FeedForward,
    Head,
    ModelSpec,
)
from powerinfer.backends.torch.attention import TorchAttention, TorchKVCache
from powerinfer.backends.torch.feed_forward import TorchFeedForward
from powerinfer.backends.torch.linear import TorchEmbedding, TorchHead
from powerinfer.errors import UsageError

CACHE_TYPES = {"F32": torch.float32, "F16": torch.float16}


class TorchBackend(Backend):
    """Hidden states are float32 tensors (n_tokens, n_embd) on the device."""

    name = "torch"

    def __init__(self, options: BackendOptions) -> None:
        """Raises UsageError for a device that torch does not know or does not find."""
        try:
            self.device = torch.device(options.device)
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"no device {options.device!r} for the torch backend: {reason}") from None
        self.cache_types = options.cache_types("F32", CACHE_TYPES)
        if options.n_threads:
            torch.set_num_threads(options.n_threads)

    def describe(self) -> str:
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return f"torch: {self.device}, float32{threads}"

    def embedding(self, spec: Embedding) -> TorchEmbedding:
        return TorchEmbedding(spec, self.device)

    def attention(self, spec: Attention) -> TorchAttention:
        return TorchAttention(spec, self.device)

    def feed_forward(self, spec: FeedForward) -> TorchFeedForward:
        return TorchFeedForward(spec, self.device)

    def head(self, spec: Head) -> TorchHead:
        return TorchHead(spec, self.device)

    def kv_cache(self, spec: ModelSpec, n_ctx: int, n_slots: int = 1) -> TorchKVCache:
        dtypes = tuple(CACHE_TYPES[kind.name] for kind in self.cache_types)
        return TorchKVCache([layer.attention for layer in spec.layers], n_ctx, n_slots, dtypes, self.device)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()
