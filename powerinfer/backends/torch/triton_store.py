"""Weights on a GPU as Triton's kernels read them: the file's bytes for types with kernels, float16 for others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from powerinfer.backends.hybrid.gpu_types import gpu_row_bytes
from powerinfer.backends.interface import FeedForward, IntArray, Linear, NormKind
from powerinfer.backends.torch import triton_kernels
from powerinfer.backends.torch.triton_kernels.activations import FUNCTIONS
from powerinfer.backends.torch.weights import Neurons, NormKernel, Weight, WeightStore
from powerinfer.quantization import QuantTensor, QuantType


class TritonWeight(Weight):
    def __init__(self, held: triton_kernels.DeviceWeight) -> None:
        self.held = held
        self.shape = held.shape

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return triton_kernels.linear(x.contiguous(), self.held)

    def transposed_linear(self, h: torch.Tensor) -> torch.Tensor:
        return triton_kernels.linear_transposed(h.contiguous(), self.held)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.transposed_linear(F.one_hot(index.long(), self.shape[0]).float())


class TritonStore(WeightStore):
    """notify gets a line for each type that has no kernel, once."""

    def __init__(self, device: torch.device, notify: Callable[[str], None]) -> None:
        super().__init__(device)
        self._notify, self._said = notify, set[str]()

    def row_bytes(self, kind: QuantType, n_in: int) -> int:
        return gpu_row_bytes(kind, n_in)

    def weight(self, tensor: QuantTensor, rows: IntArray | None = None) -> Weight:
        return TritonWeight(self._upload(tensor, rows))

    def neurons(self, spec: FeedForward, rows: IntArray | None) -> Neurons | None:
        shifted = spec.activation_threshold != 0
        known = spec.activation in FUNCTIONS and spec.up_activation in FUNCTIONS
        if spec.ffn_down_t is None or spec.predictor is None or shifted or not known:
            return None
        return TritonNeurons(self, spec, spec.ffn_down_t, rows)

    def norm_kernel(self, kind: NormKind) -> NormKernel | None:
        return triton_kernels.layer_norm if kind is NormKind.LAYER else triton_kernels.rms_norm

    def _upload(self, tensor: QuantTensor, rows: IntArray | None) -> triton_kernels.DeviceWeight:
        return triton_kernels.upload(tensor, self.device, rows, self._once)

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._notify(line)


class TritonNeurons:
    """Rows that the mask does not name are not read."""

    def __init__(self, store: TritonStore, spec: FeedForward, down_t: Linear, rows: IntArray | None) -> None:
        def upload(linear: Linear) -> triton_kernels.DeviceWeight:
            return store._upload(linear.weight, rows)

        def bias(linear: Linear | None) -> torch.Tensor | None:
            return store.floats(linear.bias, rows) if linear and linear.bias else None

        self._rows = triton_kernels.Neurons(
            up=upload(spec.ffn_up),
            down_t=upload(Linear(down_t.weight)),
            gate=upload(spec.ffn_gate) if spec.ffn_gate else None,
            activation=spec.activation,
            up_activation=spec.up_activation,
            up_bias=bias(spec.ffn_up),
            gate_bias=bias(spec.ffn_gate),
        )

    def tensors(self) -> dict[str, int]:
        rows = self._rows
        weights = {"ffn_gate": rows.gate, "ffn_up": rows.up, "ffn_down_t": rows.down_t}
        biases = {"ffn_gate": rows.gate_bias, "ffn_up": rows.up_bias}
        sizes = {f"{name}.weight": held.nbytes for name, held in weights.items() if held is not None}
        return {**sizes, **{f"{name}.bias": held.nbytes for name, held in biases.items() if held is not None}}

    def __call__(self, n: torch.Tensor, active: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return triton_kernels.sparse_feed_forward(n.contiguous(), self._rows, active.contiguous(), None, counts)
