"""What launchers verify before a kernel runs: a kernel itself reads and writes wherever it is told to."""

from __future__ import annotations

import torch

from powerinfer.backends.torch.triton_kernels.weights import DeviceWeight

FLOATS = (torch.float32, torch.float16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raises ValueError unless `tensor` is contiguous, of that shape (None admits any length), type and device."""
    fits = tensor.ndim == len(shape) and all(w in (None, h) for h, w in zip(tensor.shape, shape, strict=False))
    if not fits:
        want = " x ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has the shape {' x '.join(map(str, tensor.shape))}, expected {want}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the weights are on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has the strides {tensor.stride()}: call contiguous() first")


def check_bias(name: str, bias: torch.Tensor | None, n: int, device: torch.device) -> None:
    if bias is not None:
        check_tensor(name, bias, (n,), (torch.float32,), device)


def check_weight(name: str, weight: DeviceWeight, shape: tuple[int, int], device: torch.device) -> None:
    if weight.shape != shape:
        have, want = (" x ".join(map(str, s)) for s in (weight.shape, shape))
        raise ValueError(f"{name} has the shape {have}, expected {want}")
    if weight.device != device:
        raise ValueError(f"{name} is on {weight.device}, the other weights are on {device}")
