"""Compiles each block for the side that its `Split` names, and feed-forward blocks for both sides at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from powerinfer.backends.hybrid.exchange import Exchange
from powerinfer.backends.hybrid.gpu_types import STAND_IN
from powerinfer.backends.hybrid.split import LayerSplit, Split
from powerinfer.backends.interface import (
    Activity,
    Attention,
    AttentionBlock,
    Backend,
    BackendOptions,
    Batch,
    Embedding,
    FeedForward,
    FeedForwardBlock,
    FloatArray,
    Head,
    HeadBlock,
    ModelSpec,
)
from powerinfer.backends.native import NativeBackend, _kernels
from powerinfer.backends.native.backend import NativeFeedForward
from powerinfer.backends.torch.attention import TorchAttention, TorchKVCache
from powerinfer.backends.torch.backend import TorchBackend
from powerinfer.backends.torch.feed_forward import TorchFeedForward
from powerinfer.backends.torch.weights import BytesStore, WeightStore


class HybridHidden:
    """A hidden state that is on one side at a time and moves to where a block wants it."""

    def __init__(self, batch: Batch, device: torch.device, state: _kernels.Hidden | torch.Tensor) -> None:
        self._batch, self._device, self._state = batch, device, state

    def on_cpu(self) -> _kernels.Hidden:
        if isinstance(self._state, torch.Tensor):
            values = self._state.cpu().numpy()
            self._state = _kernels.Hidden(values, self._batch.positions, self._batch.slots)
        return self._state

    def on_device(self) -> torch.Tensor:
        if not isinstance(self._state, torch.Tensor):
            self._state = torch.from_numpy(self._state.numpy()).to(self._device)
        return self._state

    def copy(self) -> HybridHidden:
        state = self._state.clone() if isinstance(self._state, torch.Tensor) else self._state.copy()
        return HybridHidden(self._batch, self._device, state)


class HybridKVCache:
    """Each layer's keys and values are where its attention is."""

    def __init__(self, on_cpu: _kernels.KVCache, on_device: TorchKVCache) -> None:
        self.on_cpu, self.on_device = on_cpu, on_device

    @property
    def n_ctx(self) -> int:
        return self.on_cpu.n_ctx

    @property
    def n_slots(self) -> int:
        return self.on_cpu.n_slots

    @property
    def nbytes(self) -> int:
        return self.on_cpu.nbytes + self.on_device.nbytes


class HybridBackend(Backend):
    """A device, by torch, and the CPU, by the native kernels. Hidden states are `HybridHidden`."""

    name = "hybrid"

    def __init__(self, options: BackendOptions, split: Split, store: WeightStore | None = None) -> None:
        """options.device: the GPU, or torch-cpu to let the CPU stand in for it. store: how the device holds weights,
        None for what suits it. Raises UsageError as both sides do.
        """
        self.split = split
        self.cpu = NativeBackend(replace(options, device="cpu"))
        k, v = (kind.name for kind in self.cpu.cache_types)
        if options.device == STAND_IN and store is None:
            store = BytesStore(torch.device("cpu"), self.cpu.dequantize)
        self.gpu = TorchBackend(replace(options, cache_type_k=k, cache_type_v=v), store)
        self.cache_types = self.cpu.cache_types
        self._exchange = Exchange(self.gpu.device)
        self._tensors: dict[str, int] = {}

    @property
    def device(self) -> torch.device:
        return self.gpu.device

    def describe(self) -> str:
        layers = self.split.layers
        device = self.gpu.describe().removeprefix("torch: ")
        hot, split = sum(len(layer.hot) for layer in layers), sum(layer.feed_forward for layer in layers)
        attention = sum(layer.attention for layer in layers)
        parts = f"{attention} of {len(layers)} attention blocks, {hot} neurons of {split} layers"
        return f"hybrid: {device} ({parts}); {self.cpu.describe()}"

    @property
    def threads(self) -> tuple[int, int]:
        return self.cpu.threads

    @property
    def device_tensors(self) -> dict[str, int]:
        """Bytes of each tensor on the device by GGUF name, those of the KV cache as blk.N.cache_k and cache_v."""
        return dict(self._tensors)

    def read_bandwidth(self) -> float:
        """GB/s at which the CPU's threads read memory."""
        return self.cpu.read_bandwidth()

    def embedding(self, spec: Embedding) -> HybridEmbedding:
        return HybridEmbedding(self.cpu.embedding(spec), self.gpu.device)

    def attention(self, spec: Attention) -> AttentionBlock:
        if not self.split.layers[spec.layer].attention:
            return CpuAttention(self.cpu.attention(spec))
        block = self.gpu.attention(spec)
        self._note(f"blk.{spec.layer}.", block.tensors())
        return DeviceAttention(block)

    def feed_forward(self, spec: FeedForward) -> FeedForwardBlock:
        layer = self.split.layers[spec.layer]
        if not layer.feed_forward:
            return WholeFeedForward(self.cpu.feed_forward(spec), HybridHidden.on_cpu)
        whole = len(layer.hot) == spec.n_ff
        block = TorchFeedForward(spec, self.gpu.store, None if whole else layer.hot)
        self._note(f"blk.{spec.layer}.", block.tensors())
        if whole:
            return WholeFeedForward(block, HybridHidden.on_device)
        return SplitFeedForward(block, self.cpu.feed_forward(replace(spec, predictor=None)), layer, self._exchange)

    def head(self, spec: Head) -> HeadBlock:
        if not self.split.head:
            return WholeHead(self.cpu.head(spec), HybridHidden.on_cpu)
        block = self.gpu.head(spec)
        self._note("", block.tensors())
        return WholeHead(block, HybridHidden.on_device)

    def kv_cache(self, spec: ModelSpec, n_ctx: int, n_slots: int = 1) -> HybridKVCache:
        sides = [layer.attention for layer in self.split.layers]
        attentions = [layer.attention for layer in spec.layers]
        on_cpu = self.cpu.kv_cache_of(
            [None if s else a for s, a in zip(sides, attentions, strict=True)], n_ctx, n_slots
        )
        on_device = self.gpu.kv_cache_of(
            [a if s else None for s, a in zip(sides, attentions, strict=True)], n_ctx, n_slots
        )
        for i, on in enumerate(sides):
            if on:
                self._note(f"blk.{i}.", {"cache_k": on_device.k[i].nbytes, "cache_v": on_device.v[i].nbytes})
        return HybridKVCache(on_cpu, on_device)

    def copy(self, x: HybridHidden) -> HybridHidden:
        return x.copy()

    def _note(self, prefix: str, tensors: dict[str, int]) -> None:
        self._tensors.update({prefix + name: nbytes for name, nbytes in tensors.items()})


class HybridEmbedding:
    """Embeddings stay on the CPU: a token reads one row of them."""

    def __init__(self, block: Any, device: torch.device) -> None:
        self._block, self._device = block, device

    def __call__(self, batch: Batch) -> HybridHidden:
        return HybridHidden(batch, self._device, self._block(batch))


class CpuAttention:
    def __init__(self, block: AttentionBlock) -> None:
        self._block = block

    def __call__(self, x: HybridHidden, residual: HybridHidden, batch: Batch, cache: HybridKVCache) -> None:
        self._block(x.on_cpu(), residual.on_cpu(), batch, cache.on_cpu)


class DeviceAttention:
    def __init__(self, block: TorchAttention) -> None:
        self._block = block

    def __call__(self, x: HybridHidden, residual: HybridHidden, batch: Batch, cache: HybridKVCache) -> None:
        self._block(x.on_device(), residual.on_device(), batch, cache.on_device)


class WholeFeedForward:
    """A block that is on one side; `bring` moves a hidden state there."""

    def __init__(self, block: FeedForwardBlock, bring: Callable[[HybridHidden], Any]) -> None:
        self._block, self._bring = block, bring

    @property
    def activity(self) -> Activity:
        return self._block.activity

    def clear_activity(self) -> None:
        self._block.clear_activity()

    def __call__(self, x: HybridHidden, residual: HybridHidden) -> None:
        self._block(self._bring(x), self._bring(residual))


class SplitFeedForward:
    """Norm, predictor and hot neurons on the device, cold neurons that were predicted on the CPU, at the same time.

    One copy takes the normalised input and the mask to the CPU, one brings its sum back.
    """

    def __init__(self, device: TorchFeedForward, cpu: NativeFeedForward, layer: LayerSplit, exchange: Exchange) -> None:
        self._device, self._cpu, self._exchange = device, cpu, exchange
        cold = np.ones(device.spec.n_ff, bool)
        cold[layer.hot] = False
        self._cold = torch.from_numpy(cold).to(exchange.device)
        self._has_hot = len(layer.hot) > 0

    @property
    def activity(self) -> Activity:
        device, cpu = self._device.activity, self._cpu.activity
        return Activity(cpu.tokens, device.predicted + cpu.predicted, device.fired + cpu.fired)

    def clear_activity(self) -> None:
        self._device.clear_activity()
        self._cpu.clear_activity()

    @torch.inference_mode()
    def __call__(self, x: HybridHidden, residual: HybridHidden) -> None:
        block, here = self._device, x.on_device()
        n = block.ffn_norm(here)
        active = block.predict(here)
        cold = self._cold.expand(len(n), -1) if active is None else active & self._cold
        sent = self._exchange.send(n, cold)
        out = block.neurons_of(n, active) if self._has_hot else torch.zeros_like(n)  # while the copy is under way
        normed, mask = sent.wait()
        sums = self._exchange.zeros(*normed.shape)
        self._cpu.add_neurons(normed, mask, sums)
        out = out + self._exchange.receive(sums)
        residual.on_device().add_(block.finish(out))


class WholeHead:
    """The head, on one side; `bring` moves a hidden state there."""

    def __init__(self, block: HeadBlock, bring: Callable[[HybridHidden], Any]) -> None:
        self._block, self._bring = block, bring

    def __call__(self, x: HybridHidden, batch: Batch) -> FloatArray:
        return self._block(self._bring(x), batch)
