"""C++ kernels of the native backend."""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


def instruction_sets() -> list[str]:
    """Names of the instruction sets that this processor runs."""

class Runtime:
    """
    Threads, kernels of one instruction set ('': the best), and scratch memory.
    """

    def __init__(self, isa: str, n_threads: int, n_threads_batch: int) -> None: ...

    @property
    def isa(self) -> str: ...

    @property
    def n_threads(self) -> int: ...

    @property
    def n_threads_batch(self) -> int: ...

    def supports(self, type: int) -> bool:
        """Whether there are kernels for the GGML type of this number."""

class Matrix:
    """
    Rows of a quantized weight: uint8 (n_rows, row_bytes), kept, not copied.
    """

    def __init__(self, runtime: Runtime, type: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], n_cols: int, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, pack: bool = False, transposed: bool = False) -> None:
        """
        pack: also make a copy with rows interleaved, for a matrix that is always used whole.
        transposed: one row an input, so the bias has an element a column.
        """

    def dequantize(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
        """float32 (n_rows, n_cols)."""

class Norm:
    """RMSNorm, or LayerNorm if `layer`."""

    def __init__(self, weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, eps: float, layer: bool) -> None: ...

class Hidden:
    """Hidden state of a batch: float32 (n_tokens, n_embd)."""

    def __init__(self, values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def n_tokens(self) -> int: ...

    def copy(self) -> Hidden: ...

    def numpy(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
        """A copy as an array."""

class KVCache:
    """
    Keys and values of GGML types; heads: (n_head_kv, head_dim) of each layer.
    """

    def __init__(self, runtime: Runtime, type_k: int, type_v: int, n_slots: int, n_ctx: int, heads: Sequence[tuple[int, int]]) -> None: ...

    @property
    def n_slots(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

class Activation(enum.Enum):
    identity = 0

    relu = 1

    silu = 2

    gelu = 3

    gelu_erf = 4

class Attention:
    def __init__(self, runtime: Runtime, norm: Norm, q: Matrix, k: Matrix, v: Matrix, output: Matrix, q_norm: Norm | None, k_norm: Norm | None, post_norm: Norm | None, layer: int, n_head: int, n_head_kv: int, head_dim: int, scale: float, window: int, frequencies: Sequence[float], magnitude: float, neox: bool) -> None: ...

    def forward(self, x: Hidden, residual: Hidden, cache: KVCache) -> None: ...

class FeedForward:
    def __init__(self, runtime: Runtime, norm: Norm, gate: Matrix | None, up: Matrix, down: Matrix, fc1: Matrix | None, fc2: Matrix | None, post_norm: Norm | None, activation: Activation, activation_threshold: float, up_activation: Activation, threshold: float) -> None: ...

    def count_neurons(self) -> None:
        """From now on, count for how many tokens each neuron fires."""

    def neuron_counts(self) -> list[int]:
        """Those counts, n_ff of them; none before they are asked for."""

    def add_neurons(self, normed: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], mask: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        out (n_tokens, n_embd) += what the neurons give that mask, uint8 (n_tokens, n_ff), names; without biases.
        """

    def forward(self, x: Hidden, residual: Hidden) -> None: ...

    @property
    def counts(self) -> list[int]:
        """tokens, neurons predicted, neurons fired since it was last set."""

    @counts.setter
    def counts(self, arg: Sequence[int], /) -> None: ...

def embed(runtime: Runtime, token_embd: Matrix, scale: float, position_embd: Matrix | None, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Hidden:
    """Hidden state of a batch from rows of the embeddings."""

def logits(runtime: Runtime, norm: Norm, output: Matrix, x: Hidden, outputs: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
    """output · norm(x) of the rows `outputs`: float32 (n_outputs, n_vocab)."""

def read_bandwidth(runtime: Runtime, nbytes: int, repeats: int = 5) -> float:
    """GB/s at which all threads together read memory, the best of `repeats`."""

def multiply(runtime: Runtime, matrix: Matrix, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
    """x W^T: float32 (n_tokens, n_rows)."""
