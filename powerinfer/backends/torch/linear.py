"""Matrices, norms, embedding and head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from powerinfer.backends.interface import Batch, Embedding, FloatArray, Head, Linear, Norm, NormKind
from powerinfer.quantization import QuantTensor


def to_tensor(tensor: QuantTensor, device: torch.device) -> torch.Tensor:
    """float32 of the tensor's shape."""
    return torch.from_numpy(tensor.dequantize()).to(device)


class TorchLinear:
    """y = x W^T + b."""

    def __init__(self, spec: Linear, device: torch.device) -> None:
        self.weight = to_tensor(spec.weight, device)
        self.bias = None if spec.bias is None else to_tensor(spec.bias, device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class TorchNorm:
    """RMSNorm or LayerNorm over the last axis."""

    def __init__(self, spec: Norm, device: torch.device) -> None:
        self.weight = to_tensor(spec.weight, device)
        self.bias = None if spec.bias is None else to_tensor(spec.bias, device)
        self.kind, self.eps = spec.kind, spec.eps

    @classmethod
    def optional(cls, spec: Norm | None, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """The norm, or what changes nothing where there is none."""
        return cls(spec, device) if spec else lambda x: x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is NormKind.LAYER:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return y if self.bias is None else y + self.bias


class TorchEmbedding:
    def __init__(self, spec: Embedding, device: torch.device) -> None:
        self.token_embd = to_tensor(spec.token_embd, device)
        self.position_embd = None if spec.position_embd is None else to_tensor(spec.position_embd, device)
        self.scale = spec.scale

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> torch.Tensor:
        device = self.token_embd.device
        x = self.token_embd[torch.from_numpy(batch.tokens).to(device)] * self.scale
        if self.position_embd is None:
            return x
        return x + self.position_embd[torch.from_numpy(batch.positions).to(device)]


class TorchHead:
    def __init__(self, spec: Head, device: torch.device) -> None:
        self.output_norm = TorchNorm(spec.output_norm, device)
        self.output = TorchLinear(spec.output, device)

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, batch: Batch) -> FloatArray:
        rows = x[torch.from_numpy(batch.outputs).to(x.device)]
        logits: FloatArray = self.output(self.output_norm(rows)).cpu().numpy()
        return np.ascontiguousarray(logits)
