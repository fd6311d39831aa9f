"""How a device holds the weights: dequantized, or as the bytes of the file.

A `WeightStore` makes a `Weight` of a tensor of the file, or of some of its rows, and tells before that how many bytes
it will take: what a memory plan counts and what is allocated are the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from powerinfer.backends.interface import FeedForward, FloatArray, IntArray, NormKind
from powerinfer.quantization import QuantTensor, QuantType

Dequantize = Callable[[QuantTensor], FloatArray]
ROWS_AT_ONCE = 1 << 20  # elements that are dequantized at a time, so that they stay in the cache


class Weight(ABC):
    """A matrix (n_out, n_in) on a device; nbytes: what it takes there."""

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T, float32: x (n_tokens, n_in) to (n_tokens, n_out)."""

    @abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, float32 (len(index), n_in)."""

    def linear_of(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x W^T of some rows, float32 (n_tokens, len(index))."""
        return F.linear(x, self.rows(index))

    def transposed_linear(self, h: torch.Tensor) -> torch.Tensor:
        """h W, float32: h (n_tokens, n_out) to (n_tokens, n_in)."""
        return h @ self.rows(torch.arange(self.shape[0], device=h.device))


class FloatWeight(Weight):
    """Dequantized when it is made."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape = tuple(values.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.values.dtype), self.values).float()

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.values[index].float()

    def transposed_linear(self, h: torch.Tensor) -> torch.Tensor:
        return (h.to(self.values.dtype) @ self.values).float()

    def linear_of(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if 2 * len(index) > len(self.values):  # copying rows costs more than products that are not needed
            return self.linear(x)[:, index]
        return super().linear_of(x, index)


class BytesWeight(Weight):
    """The rows as they lie in the file, uint8 (n_out, row_bytes), dequantized each time that they are used.

    This is how a GPU holds them; on the CPU it is slow, and there to take the GPU's part where there is none.
    """

    def __init__(self, kind: QuantType, shape: tuple[int, ...], data: torch.Tensor, dequantize: Dequantize) -> None:
        self.kind, self.shape, self.data, self._dequantize = kind, shape, data, dequantize

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def _values(self, data: torch.Tensor) -> torch.Tensor:
        tensor = QuantTensor(self.kind, (len(data), self.shape[-1]), data.numpy())
        return torch.from_numpy(self._dequantize(tensor))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        step = max(1, ROWS_AT_ONCE // self.shape[-1])
        parts = [F.linear(x, self._values(self.data[i : i + step])) for i in range(0, len(self.data), step)]
        return torch.cat(parts, dim=-1) if parts else x.new_zeros(len(x), 0)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self._values(self.data[index])


NormKernel = Callable[[torch.Tensor, torch.Tensor, float, "torch.Tensor | None"], torch.Tensor]
"""Of x (n_tokens, n), weight (n,), eps and bias (n,) or None."""


class Neurons(Protocol):
    """Rows of gate, up and down_t on a device, and a kernel over those of them that a mask names."""

    def tensors(self) -> dict[str, int]:
        """Bytes by GGUF name, without the layer's prefix."""
        ...

    def __call__(self, n: torch.Tensor, active: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The sum over neurons, float32 (n_tokens, n_embd), of n, normalised, and active, bool (n_tokens, n_rows).

        counts, int64 (2,): pairs that were named and that fired are added. Waits for nothing.
        """
        ...


class WeightStore(ABC):
    """Where weights go. device: of all that is computed with them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def row_bytes(self, kind: QuantType, n_in: int) -> int:
        """Bytes of a row of n_in elements of the type `kind`, as this store holds it."""

    @abstractmethod
    def weight(self, tensor: QuantTensor, rows: IntArray | None = None) -> Weight:
        """The matrix, or those of its rows, on the device."""

    def nbytes(self, tensor: QuantTensor, n_rows: int | None = None) -> int:
        """What `weight` will take for a matrix, or so many of its rows."""
        return (tensor.shape[0] if n_rows is None else n_rows) * self.row_bytes(tensor.type, tensor.shape[-1])

    def neurons(self, spec: FeedForward, rows: IntArray | None) -> Neurons | None:
        """The rows of a feed-forward block's neurons, for a store that has kernels for sums over some of them."""
        return None

    def norm_kernel(self, kind: NormKind) -> NormKernel | None:
        """One kernel for a norm, where there is one."""
        return None

    def floats(self, tensor: QuantTensor, rows: IntArray | None = None) -> torch.Tensor:
        """A norm or a bias, or some of its elements: float32, one dimension."""
        values = tensor.dequantize().reshape(-1)
        return torch.from_numpy(values if rows is None else values[rows]).to(self.device)


class FloatStore(WeightStore):
    """Everything dequantized to float32: the reference."""

    def row_bytes(self, kind: QuantType, n_in: int) -> int:
        return 4 * n_in

    def weight(self, tensor: QuantTensor, rows: IntArray | None = None) -> Weight:
        return FloatWeight(torch.from_numpy(_chosen(tensor, rows).dequantize()).to(self.device))


class BytesStore(WeightStore):
    """Everything as it is in the file, on the CPU in place of a GPU. dequantize: of a matrix, float32 of its shape."""

    def __init__(self, device: torch.device, dequantize: Dequantize = QuantTensor.dequantize) -> None:
        super().__init__(device)
        self._dequantize = dequantize

    def row_bytes(self, kind: QuantType, n_in: int) -> int:
        return kind.row_bytes(n_in)

    def weight(self, tensor: QuantTensor, rows: IntArray | None = None) -> Weight:
        chosen = _chosen(tensor, rows)
        return BytesWeight(chosen.type, chosen.shape, torch.from_numpy(np.array(chosen.data)), self._dequantize)


def _chosen(tensor: QuantTensor, rows: IntArray | None) -> QuantTensor:
    if rows is None:
        return tensor
    data: npt.NDArray[np.uint8] = tensor.data[rows]
    return QuantTensor(tensor.type, (len(rows), *tensor.shape[1:]), data)
