"""RMSNorm and LayerNorm of a token in one kernel: torch takes six, each as long as a launch."""

from __future__ import annotations

import torch
import triton

from powerinfer.backends.torch.triton_kernels.checks import FLOATS, check_bias, check_tensor
from powerinfer.backends.torch.triton_kernels.launch import launch
from powerinfer.backends.torch.triton_kernels.norm_kernels import norm_kernel

WIDEST_NORM = 1 << 16
"""Elements of a token that the registers of one program hold."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias, over rows of x (n_tokens, n), float32 or float16: float32.

    weight, bias (n,) float32. Raises ValueError for tensors that do not fit.
    """
    return _norm(x, weight, eps, bias, centred=False)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rms_norm` of x less its mean."""
    return _norm(x, weight, eps, bias, centred=True)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None, *, centred: bool
) -> torch.Tensor:
    n = weight.numel()
    check_tensor("x", x, (None, n), FLOATS, weight.device)
    check_tensor("weight", weight, (n,), (torch.float32,), weight.device)
    check_bias("bias", bias, n, weight.device)
    if n > WIDEST_NORM:
        raise ValueError(f"rows of {n} elements: the norm's kernel holds at most {WIDEST_NORM}")
    out = torch.empty(x.shape, device=x.device)
    if x.numel():
        columns = triton.next_power_of_2(n)
        launch(
            norm_kernel, (len(x),),
            out, x, weight, out if bias is None else bias, n, eps,
            CENTRED=centred, BIASED=bias is not None, COLUMNS=columns, num_warps=min(16, max(1, columns // 512)),
        )  # fmt: skip
    return out
