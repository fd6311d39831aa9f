"""Which parts of a model are on the device."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer.backends.interface import IntArray


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """attention: with its norm and KV cache. feed_forward: the norm, the predictor and the sum of the block; without it
    the whole block is the CPU's. hot: neurons on the device, int32 ascending.
    """

    attention: bool
    feed_forward: bool
    hot: IntArray


@dataclass(frozen=True, slots=True)
class Split:
    layers: tuple[LayerSplit, ...]
    head: bool

    @property
    def uses_device(self) -> bool:
        return self.head or any(layer.attention or layer.feed_forward for layer in self.layers)
