"""y = x W^T + b with W quantized: one token, and several.

Constants are reasoned, not tuned: no kernel was timed on a GPU. What was looked at is the compiler's code for compute
capabilities 8.0, 8.9 and 9.0: weights and x come in loads of 16 bytes, shared memory fits a 4090, registers do not
spill (but for Q6_K, which is the head's type, before 9.0: 120 to 250 bytes a thread in three kernels).
"""

from __future__ import annotations

import torch
import triton

from powerinfer.backends.torch.triton_kernels.checks import FLOATS, check_bias, check_tensor
from powerinfer.backends.torch.triton_kernels.launch import launch
from powerinfer.backends.torch.triton_kernels.product_kernels import many_tokens_kernel, one_token_kernel
from powerinfer.backends.torch.triton_kernels.tiles import sum_parts_kernel
from powerinfer.backends.torch.triton_kernels.weights import DeviceWeight

PRECISION = "tf32x3"
"""Of `tl.dot`: three passes, which give float32's precision. One (tf32) would round both factors to 11 bits, and a
prompt's logits would no longer be the CPU's; it would spare arithmetic, which 16 tokens and more are bound by."""

ENOUGH_PROGRAMS = 256
"""Two programs a multiprocessor on an H200 (132) or 4090 (128): below that, long rows are split among programs."""

FEW_ROWS = 2048
"""Matrices with fewer rows than this (K and V of grouped heads) give each program one row, others four: a row of 4096
numbers keeps 128 threads busy, and four rows a program need a quarter of the reads of x."""

ROWS, SUM_COLUMNS, SUM_PARTS = 64, 128, 32


def linear(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (n_tokens, n_in) float32 or float16, weight (n_out, n_in), bias (n_out,) float32: float32 (n_tokens, n_out).

    Sums are float32. One token: so are the products; several: see PRECISION. No host synchronisation; the order of all
    sums is fixed. Raises ValueError for tensors that do not fit.
    """
    n_rows, n_cols = weight.shape
    check_tensor("x", x, (None, n_cols), FLOATS, weight.device)
    check_bias("bias", bias, n_rows, weight.device)
    n_tokens = len(x)
    if not n_tokens * n_rows:
        return torch.empty(n_tokens, n_rows, device=x.device)
    return _one(x, weight, bias) if n_tokens == 1 else _many(x, weight, bias)


def row_tile(weight: DeviceWeight) -> tuple[int, int]:
    """Units that a program takes of a row at a time, and its warps: a unit a thread, as far as rows are that long."""
    units = min(128, max(32, triton.next_power_of_2(-(-weight.shape[1] // weight.format.unit))))
    return units, units // 32


def token_tile(n_tokens: int, most: int = 128) -> tuple[int, int]:
    """Tokens of a tile (tl.dot takes 16 and more) and units of a row a step.

    With 128 tokens a weight is decoded once for 128 products; x then takes 16 KB a group and stage of the pipeline,
    and two units (76 KB in all on an H200, 35 on a 4090) leave room for another program.
    """
    tokens = min(most, max(16, triton.next_power_of_2(n_tokens)))
    return tokens, 4 if tokens <= 32 else 2


def _one(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None) -> torch.Tensor:
    n_rows, n_cols = weight.shape
    out = torch.empty(1, n_rows, device=x.device)
    rows = 1 if n_rows < FEW_ROWS else 4
    units, n_warps = row_tile(weight)
    launch(
        one_token_kernel, (triton.cdiv(n_rows, rows),),
        out, *weight.pointers, x, out if bias is None else bias, n_rows, n_cols,
        HAS_BIAS=bias is not None, DECODE=weight.format.decode, SUBS=weight.format.groups, UNITS=units, ROWS=rows,
        num_warps=n_warps,
    )  # fmt: skip
    return out


def _many(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None) -> torch.Tensor:
    n_tokens, (n_rows, n_cols) = len(x), weight.shape
    tokens, units = token_tile(n_tokens)
    tiles = triton.cdiv(n_rows, ROWS), triton.cdiv(n_tokens, tokens)
    n_steps = triton.cdiv(triton.cdiv(n_cols, weight.format.unit), units)
    n_parts = min(n_steps, max(1, ENOUGH_PROGRAMS // (tiles[0] * tiles[1])))
    steps_a_part = triton.cdiv(n_steps, n_parts)
    n_parts = triton.cdiv(n_steps, steps_a_part)
    parts = torch.empty(n_parts, n_tokens, n_rows, device=x.device)
    launch(
        many_tokens_kernel, (*tiles, n_parts),
        parts, *weight.pointers, x, n_tokens, n_rows, n_cols, steps_a_part * units,
        DECODE=weight.format.decode, SUBS=weight.format.groups, UNITS=units, ROWS=ROWS, TOKENS=tokens,
        PRECISION=PRECISION, num_warps=4, num_stages=2,
    )  # fmt: skip
    return sum_parts(parts, bias)


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The sum of parts (n_parts, n_tokens, n) over the first axis, in its order, + bias (n,)."""
    n_parts, n_tokens, n = parts.shape
    if n_parts == 1 and bias is None:
        return parts[0]
    out = torch.empty(n_tokens, n, device=parts.device)
    launch(
        sum_parts_kernel, (triton.cdiv(n_tokens * n, SUM_COLUMNS),),
        out, parts, out if bias is None else bias, n_tokens * n, n, n_parts,
        HAS_BIAS=bias is not None, COLUMNS=SUM_COLUMNS, PARTS=SUM_PARTS,
    )  # fmt: skip
    return out
