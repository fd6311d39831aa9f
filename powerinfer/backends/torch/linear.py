"""Matrices, norms, embedding and head."""

from __future__ import annotations

import numpy as np
import torch

from powerinfer.backends.interface import Batch, Embedding, FloatArray, Head, IntArray, Linear, Norm, NormKind
from powerinfer.backends.torch.weights import WeightStore


class TorchLinear:
    """y = x W^T + b, of all outputs or of the chosen rows."""

    def __init__(self, spec: Linear, store: WeightStore, rows: IntArray | None = None) -> None:
        self.weight = store.weight(spec.weight, rows)
        self.bias = None if spec.bias is None else store.floats(spec.bias, rows)

    def __call__(self, x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        """All outputs, or those of `index`."""
        y = self.weight.linear(x) if index is None else self.weight.linear_of(x, index)
        if self.bias is None:
            return y
        return y + (self.bias if index is None else self.bias[index])

    def tensors(self, name: str) -> dict[str, int]:
        """Bytes by GGUF name."""
        sizes = {f"{name}.weight": self.weight.nbytes}
        return sizes if self.bias is None else {**sizes, f"{name}.bias": self.bias.nbytes}


class TorchNorm:
    """RMSNorm or LayerNorm over the last axis."""

    def __init__(self, spec: Norm, store: WeightStore) -> None:
        self.weight = store.floats(spec.weight)
        self.bias = None if spec.bias is None else store.floats(spec.bias)
        self.kind, self.eps = spec.kind, spec.eps
        self._kernel = store.norm_kernel(spec.kind)

    @classmethod
    def optional(cls, spec: Norm | None, store: WeightStore) -> TorchNorm | Nothing:
        """The norm, or what changes nothing where there is none."""
        return cls(spec, store) if spec else Nothing()

    def tensors(self, name: str) -> dict[str, int]:
        """Bytes by GGUF name."""
        sizes = {f"{name}.weight": self.weight.nbytes}
        return sizes if self.bias is None else {**sizes, f"{name}.bias": self.bias.nbytes}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None and x.ndim == 2:
            return self._kernel(x.contiguous(), self.weight, self.eps, self.bias)
        if self.kind is NormKind.LAYER:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return y if self.bias is None else y + self.bias


class Nothing:
    """In the place of a norm that a model lacks."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def tensors(self, name: str) -> dict[str, int]:
        return {}


class TorchEmbedding:
    def __init__(self, spec: Embedding, store: WeightStore) -> None:
        self.token_embd = store.weight(spec.token_embd)
        self.position_embd = None if spec.position_embd is None else store.weight(spec.position_embd)
        self.scale, self.device = spec.scale, store.device

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> torch.Tensor:
        x = self.token_embd.rows(torch.from_numpy(batch.tokens).to(self.device)) * self.scale
        if self.position_embd is None:
            return x
        return x + self.position_embd.rows(torch.from_numpy(batch.positions).to(self.device))


class TorchHead:
    def __init__(self, spec: Head, store: WeightStore) -> None:
        self.output_norm = TorchNorm(spec.output_norm, store)
        self.output = TorchLinear(spec.output, store)

    def tensors(self) -> dict[str, int]:
        """Bytes by GGUF name; those of a tied output are counted as token_embd's copy, output.weight."""
        return {**self.output_norm.tensors("output_norm"), **self.output.tensors("output")}

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, batch: Batch) -> FloatArray:
        rows = x[torch.from_numpy(batch.outputs).to(x.device)]
        logits: FloatArray = self.output(self.output_norm(rows)).cpu().numpy()
        return np.ascontiguousarray(logits)
