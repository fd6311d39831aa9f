"""The feed-forward's activations, as functions that kernels take as constants."""

from __future__ import annotations

import triton
import triton.language as tl

from powerinfer.backends.interface import Activation


@triton.jit
def identity(x):
    return x


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gelu(x):
    """The tanh form, as (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


FUNCTIONS = {
    Activation.IDENTITY: identity,
    Activation.RELU: relu,
    Activation.SILU: silu,
    Activation.GELU: gelu,
}
