"""Kernels for CUDA devices in Triton: products with quantized weights, the sparse feed-forward, norms.

Imported only where they are used: Triton is optional, and comes with torch's CUDA wheels. `weights` puts a matrix on
the device, `products`, `feed_forward` and `norm` check tensors and launch, the other modules are what they launch.
With TRITON_INTERPRET=1, set before this is imported, everything runs on CPU tensors, slowly.
"""

from __future__ import annotations

from powerinfer.backends.torch.triton_kernels.feed_forward import (
    Neurons,
    counters,
    linear_transposed,
    sparse_feed_forward,
)
from powerinfer.backends.torch.triton_kernels.norm import WIDEST_NORM, layer_norm, rms_norm
from powerinfer.backends.torch.triton_kernels.products import linear
from powerinfer.backends.torch.triton_kernels.weights import FORMATS, DeviceWeight, Format, upload

__all__ = [
    "FORMATS",
    "WIDEST_NORM",
    "DeviceWeight",
    "Format",
    "Neurons",
    "counters",
    "layer_norm",
    "linear",
    "linear_transposed",
    "rms_norm",
    "sparse_feed_forward",
    "upload",
]
