"""The sparse feed-forward over rows of gate, up and down_t, and the product with a transposed matrix that it ends in.

Like those of `products.py`, constants are reasoned and not timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from powerinfer.backends.interface import Activation
from powerinfer.backends.torch.triton_kernels.activations import FUNCTIONS
from powerinfer.backends.torch.triton_kernels.checks import FLOATS, check_bias, check_tensor, check_weight
from powerinfer.backends.torch.triton_kernels.launch import launch
from powerinfer.backends.torch.triton_kernels.neuron_kernels import (
    activate_many_kernel,
    activate_one_kernel,
    down_many_kernel,
    down_one_kernel,
    list_rows_kernel,
)
from powerinfer.backends.torch.triton_kernels.products import PRECISION, row_tile, sum_parts, token_tile
from powerinfer.backends.torch.triton_kernels.weights import DeviceWeight

BLOCK, CHUNK = 1024, 16384
"""Rows that a program lists, and mask bytes it counts at a time (8 loads of 16 bytes a thread)."""

ACTIVATE_ROWS = 2
"""Rows a program takes from the list for one token. 1,100 active neurons (10 % of 11,008) are 550 programs, four a
multiprocessor. Four rows would share more reads of x but give some multiprocessors three programs and some two."""

MOST_PROGRAMS = 2048
"""More wait for a free multiprocessor anyway (132 of them, up to 16 programs each): they walk the list instead."""

DOWN_ROWS, DOWN_UNITS, DOWN_PARTS = 8, 32, 64
"""One warp a program: 32 units of 8 rows, 128 bytes in flight a thread. 64 parts of 4,096 columns are 1 MB, which stays
in the second-level cache; more parts would make it the larger half of what 10 % of the neurons take (2.5 MB)."""

MANY_ROWS, MANY_TOKENS = 64, 64
"""With 128 tokens, gate and up of a tile do not fit the registers together."""

MANY_DOWN_ROWS, MANY_DOWN_PARTS = 32, 4


@dataclass(frozen=True, slots=True)
class Neurons:
    """Rows of gate, up (n_rows, n_embd) and down_t (n_rows, n_out), one a neuron, with biases (n_rows,) float32.

    h = activation(gate · x) * up_activation(up · x); without a gate: h = activation(up · x).
    """

    up: DeviceWeight
    down_t: DeviceWeight
    gate: DeviceWeight | None = None
    activation: Activation = Activation.RELU
    up_activation: Activation = Activation.IDENTITY
    up_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for parts that do not fit each other."""
        n_rows, device = self.up.shape[0], self.up.device
        check_weight("down_t", self.down_t, (n_rows, self.down_t.shape[1]), device)
        if self.gate is not None:
            check_weight("gate", self.gate, self.up.shape, device)
        check_bias("up_bias", self.up_bias, n_rows, device)
        check_bias("gate_bias", self.gate_bias, n_rows, device)

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down_t.nbytes + (self.gate.nbytes if self.gate else 0)


def counters(device: torch.device) -> torch.Tensor:
    """Fresh counts for `sparse_feed_forward`: int64 (2,), (token, neuron) pairs named and fired."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def sparse_feed_forward(
    x: torch.Tensor,
    neurons: Neurons,
    mask: torch.Tensor,
    bias: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (n_tokens, n_embd), mask (n_tokens, n_rows) bool or uint8, bias (n_out,) float32: float32 (n_tokens, n_out).

    A neuron is computed for the tokens whose mask is set; its rows are not read where no token's is, nor up's where
    activation(gate) is zero. counts: see `counters`; they are added to. No host synchronisation. Raises ValueError for
    tensors that do not fit.
    """
    n_rows, n_embd = neurons.up.shape
    device = neurons.up.device
    check_tensor("x", x, (None, n_embd), FLOATS, device)
    check_tensor("mask", mask, (len(x), n_rows), (torch.bool, torch.uint8), device)
    check_bias("bias", bias, neurons.down_t.shape[1], device)
    counts = counters(device) if counts is None else counts
    check_tensor("counts", counts, (2,), (torch.int64,), device)
    if not len(x) * n_rows:
        out = torch.zeros(len(x), neurons.down_t.shape[1], device=device)
        return out if bias is None else out + bias
    ids = torch.empty(n_rows, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    mask = mask.view(torch.uint8)
    any_token = mask if len(x) == 1 else mask.amax(dim=0)
    launch(list_rows_kernel, (triton.cdiv(n_rows, BLOCK),), ids, count, any_token, n_rows, BLOCK=BLOCK, CHUNK=CHUNK)
    counts[:1] += count if len(x) == 1 else torch.count_nonzero(mask)
    h = torch.empty(len(x), n_rows, device=device)
    _activate(h, ids, count, mask, x, neurons, counts)
    return _down(h, neurons.down_t, bias, ids, count)


def linear_transposed(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W + b: x (n_tokens, n_in), weight (n_in, n_out), bias (n_out,) float32: float32 (n_tokens, n_out).

    Rows whose x is zero are not read where there is one token. Raises ValueError for tensors that do not fit.
    """
    n_rows, n_cols = weight.shape
    check_tensor("x", x, (None, n_rows), FLOATS, weight.device)
    check_bias("bias", bias, n_cols, weight.device)
    if not len(x) * n_rows:
        out = torch.zeros(len(x), n_cols, device=x.device)
        return out if bias is None else out + bias
    return _down(x, weight, bias, None, None)


def _activate(
    h: torch.Tensor,
    ids: torch.Tensor,
    count: torch.Tensor,
    mask: torch.Tensor,
    x: torch.Tensor,
    neurons: Neurons,
    counts: torch.Tensor,
) -> None:
    up, gate = neurons.up, neurons.gate or neurons.up
    n_rows, n_cols = up.shape
    weights = (
        *gate.pointers, h if neurons.gate_bias is None else neurons.gate_bias,
        *up.pointers, h if neurons.up_bias is None else neurons.up_bias,
    )  # fmt: skip
    gated = neurons.gate is not None
    constants = {
        "GATED": gated,
        "GATE_BIASED": neurons.gate_bias is not None,
        "UP_BIASED": neurons.up_bias is not None,
        "ACTIVATION": FUNCTIONS[neurons.activation],
        "UP_ACTIVATION": FUNCTIONS[neurons.up_activation if gated else neurons.activation],
        "GATE_DECODE": gate.format.decode,
        "GATE_SUBS": gate.format.groups,
        "UP_DECODE": up.format.decode,
        "UP_SUBS": up.format.groups,
    }
    if len(x) == 1:
        units, n_warps = row_tile(up)
        grid = (min(MOST_PROGRAMS, triton.cdiv(n_rows, ACTIVATE_ROWS)),)
        launch(
            activate_one_kernel, grid, h, ids, count, x, n_cols, counts, *weights, **constants,
            UNITS=units, ROWS=ACTIVATE_ROWS, num_warps=n_warps,
        )  # fmt: skip
        return
    tokens, units = token_tile(len(x), MANY_TOKENS)
    launch(
        activate_many_kernel, (triton.cdiv(n_rows, MANY_ROWS), triton.cdiv(len(x), tokens)),
        h, ids, count, mask, x, len(x), n_rows, n_cols, counts, *weights, **constants,
        UNITS=units, ROWS=MANY_ROWS, TOKENS=tokens, PRECISION=PRECISION, num_warps=4, num_stages=2,
    )  # fmt: skip


def _down(
    h: torch.Tensor,
    weight: DeviceWeight,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    count: torch.Tensor | None,
) -> torch.Tensor:
    """The sum of h * rows over the list, or over all rows where there is none."""
    n_tokens, (n_rows, n_cols) = len(h), weight.shape
    arguments = (h, h if ids is None else ids, h if count is None else count, *weight.pointers)
    n_units = triton.cdiv(n_cols, weight.format.unit)
    constants = {"LISTED": ids is not None, "DECODE": weight.format.decode, "SUBS": weight.format.groups}
    if n_tokens == 1:
        n_parts = min(DOWN_PARTS, triton.cdiv(n_rows, DOWN_ROWS))
        parts = torch.empty(n_parts, 1, n_cols, device=h.device)
        launch(
            down_one_kernel, (triton.cdiv(n_units, DOWN_UNITS), n_parts),
            parts, *arguments, n_rows, n_cols, **constants, UNITS=DOWN_UNITS, ROWS=DOWN_ROWS, num_warps=1
        )  # fmt: skip
        return sum_parts(parts, bias)
    tokens, units = token_tile(n_tokens)
    tiles = triton.cdiv(n_units, units), triton.cdiv(n_tokens, tokens)
    n_parts = min(MANY_DOWN_PARTS, triton.cdiv(n_rows, MANY_DOWN_ROWS)) if tiles[1] == 1 else 1
    parts = torch.empty(n_parts, n_tokens, n_cols, device=h.device)
    launch(
        down_many_kernel, (*tiles, n_parts),
        parts, *arguments, n_tokens, n_rows, n_cols, **constants,
        UNITS=units, ROWS=MANY_DOWN_ROWS, TOKENS=tokens, PRECISION=PRECISION, num_warps=4, num_stages=2,
    )  # fmt: skip
    return sum_parts(parts, bias)
