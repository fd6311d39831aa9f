"""Compiles blocks into handles of the C++ kernels. One call a block a step; weights stay where they are mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer.backends.interface import (
    Activation,
    Activity,
    Attention,
    Backend,
    BackendOptions,
    Batch,
    Embedding,
    FeedForward,
    FloatArray,
    Head,
    KVCache,
    Linear,
    ModelSpec,
    Norm,
    NormKind,
    RopeStyle,
    cache_row_bytes,
)
from powerinfer.backends.native import _kernels
from powerinfer.backends.native.cpu import logical_cores, physical_cores
from powerinfer.errors import UsageError
from powerinfer.quantization import TYPES, QuantTensor

ISA_VARIABLE = "POWERINFER_ISA"
CACHE_TYPES = ("F32", "F16", "Q8_0")
BANDWIDTH_BYTES = 1 << 29  # more than any cache holds

_ACTIVATIONS = {
    Activation.IDENTITY: _kernels.Activation.identity,
    Activation.RELU: _kernels.Activation.relu,
    Activation.SILU: _kernels.Activation.silu,
    Activation.GELU: _kernels.Activation.gelu,
    Activation.GELU_ERF: _kernels.Activation.gelu_erf,
}


class NativeBackend(Backend):
    """The CPU engine. Hidden states are `_kernels.Hidden`."""

    name = "native"

    def __init__(self, options: BackendOptions) -> None:
        """Raises UsageError for a device but the CPU, or an instruction set in POWERINFER_ISA that it lacks."""
        if options.device != "cpu":
            raise UsageError(f"the native backend runs on the CPU, not on {options.device!r}: choose --backend torch")
        self._options = options
        self.cache_types = options.cache_types("F16", CACHE_TYPES)
        isa = os.environ.get(ISA_VARIABLE, "")
        known = _kernels.instruction_sets()
        if isa and isa not in known:
            raise UsageError(f"{ISA_VARIABLE} is {isa!r}: this processor runs {', '.join(known)}")
        most = logical_cores()
        n_threads = min(options.n_threads or physical_cores(), most)
        n_threads_batch = min(options.n_threads_batch or options.n_threads or physical_cores(), most)
        self._runtime = _kernels.Runtime(isa, n_threads, n_threads_batch)
        self._converted: set[str] = set()

    def describe(self) -> str:
        runtime = self._runtime
        return f"native: {runtime.isa}, {runtime.n_threads} threads ({runtime.n_threads_batch} for prompts)"

    @property
    def threads(self) -> tuple[int, int]:
        """Threads for one token, and for several."""
        return self._runtime.n_threads, self._runtime.n_threads_batch

    def read_bandwidth(self) -> float:
        """GB/s at which this backend's threads read memory; takes about a second and half a GB of memory."""
        return _kernels.read_bandwidth(self._runtime, BANDWIDTH_BYTES)

    def embedding(self, spec: Embedding) -> NativeEmbedding:
        position_embd = None if spec.position_embd is None else self._matrix(spec.position_embd, pack=False)
        return NativeEmbedding(self._runtime, self._matrix(spec.token_embd, pack=False), spec.scale, position_embd)

    def attention(self, spec: Attention) -> NativeAttention:
        rope = spec.rope
        return NativeAttention(
            _kernels.Attention(
                self._runtime,
                norm=_norm(spec.attn_norm),
                q=self._linear(spec.attn_q),
                k=self._linear(spec.attn_k),
                v=self._linear(spec.attn_v),
                output=self._linear(spec.attn_output),
                q_norm=_optional_norm(spec.attn_q_norm),
                k_norm=_optional_norm(spec.attn_k_norm),
                post_norm=_optional_norm(spec.post_attention_norm),
                layer=spec.layer,
                n_head=spec.n_head,
                n_head_kv=spec.n_head_kv,
                head_dim=spec.head_dim,
                scale=spec.scale,
                window=spec.window,
                frequencies=rope.frequencies.tolist(),
                magnitude=rope.magnitude,
                neox=rope.style is RopeStyle.NEOX,
            )
        )

    def feed_forward(self, spec: FeedForward) -> NativeFeedForward:
        down = spec.ffn_down or spec.ffn_down_t
        assert down is not None, "a feed-forward block has one down projection"
        predictor = spec.predictor
        whole = spec.ffn_down is not None  # else neurons are computed one by one, from rows as they lie in the file
        return NativeFeedForward(
            _kernels.FeedForward(
                self._runtime,
                norm=_norm(spec.ffn_norm),
                gate=self._linear(spec.ffn_gate, whole) if spec.ffn_gate else None,
                up=self._linear(spec.ffn_up, whole),
                down=self._linear(down, whole, transposed=not whole),
                fc1=self._matrix(predictor.fc1) if predictor else None,
                fc2=self._matrix(predictor.fc2) if predictor else None,
                post_norm=_optional_norm(spec.post_ffw_norm),
                activation=_ACTIVATIONS[spec.activation],
                activation_threshold=spec.activation_threshold,
                up_activation=_ACTIVATIONS[spec.up_activation],
                threshold=predictor.threshold if predictor else 0.0,
            )
        )

    def head(self, spec: Head) -> NativeHead:
        return NativeHead(self._runtime, _norm(spec.output_norm), self._linear(spec.output))

    def kv_cache(self, spec: ModelSpec, n_ctx: int, n_slots: int = 1) -> KVCache:
        return self.kv_cache_of([layer.attention for layer in spec.layers], n_ctx, n_slots)

    def kv_cache_of(self, layers: Sequence[Attention | None], n_ctx: int, n_slots: int) -> _kernels.KVCache:
        """A cache of some layers only; the others' places are empty."""
        for layer in layers:
            if layer:
                cache_row_bytes(self.cache_types, layer)
        heads = [(layer.n_head_kv, layer.head_dim) if layer else (0, 32) for layer in layers]
        k, v = self.cache_types
        return _kernels.KVCache(self._runtime, k.id, v.id, n_slots, n_ctx, heads)

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        """A matrix as float32."""
        if not len(tensor.data) or not self._runtime.supports(tensor.type.id):
            return tensor.dequantize()
        return self._matrix(tensor, pack=False).dequantize()

    def copy(self, x: _kernels.Hidden) -> _kernels.Hidden:
        return x.copy()

    def _linear(self, linear: Linear, pack: bool = True, transposed: bool = False) -> _kernels.Matrix:
        return self._matrix(linear.weight, linear.bias, pack, transposed)

    def _matrix(
        self, tensor: QuantTensor, bias: QuantTensor | None = None, pack: bool = True, transposed: bool = False
    ) -> _kernels.Matrix:
        """A handle that reads the tensor's bytes in place; a type without kernels is converted to float16 first.

        pack: the matrix is always used whole, so let the kernels keep it with rows interleaved (the mapped bytes are
        then read once, here). transposed: it has a row an input.
        """
        if not self._runtime.supports(tensor.type.id):
            tensor = self._convert(tensor)
        data = np.ascontiguousarray(tensor.data.reshape(tensor.shape[0], -1))
        if data.ctypes.data % 4:  # kernels load 4-byte floats; files align tensors, but need not
            data = data.copy()
        n_cols = tensor.shape[-1]
        floats = None if bias is None else _floats(bias)
        return _kernels.Matrix(self._runtime, tensor.type.id, data, n_cols, floats, pack, transposed)

    def _convert(self, tensor: QuantTensor) -> QuantTensor:
        name = tensor.type.name
        if name not in self._converted:
            self._converted.add(name)
            self._options.notify(f"no kernels for {name} weights: they are held as F16 in memory")
        values = tensor.dequantize().astype(np.float16)
        return QuantTensor(TYPES.by_name("F16"), tensor.shape, values.view(np.uint8).reshape(tensor.shape[0], -1))


class NativeEmbedding:
    def __init__(
        self,
        runtime: _kernels.Runtime,
        token_embd: _kernels.Matrix,
        scale: float,
        position_embd: _kernels.Matrix | None,
    ) -> None:
        self._matrices = runtime, token_embd, scale, position_embd

    def __call__(self, batch: Batch) -> _kernels.Hidden:
        return _kernels.embed(*self._matrices, batch.tokens, batch.positions, batch.slots)


class NativeAttention:
    def __init__(self, block: _kernels.Attention) -> None:
        self._forward = block.forward

    def __call__(self, x: _kernels.Hidden, residual: _kernels.Hidden, batch: Batch, cache: Any) -> None:
        self._forward(x, residual, cache)


class NativeFeedForward:
    def __init__(self, block: _kernels.FeedForward) -> None:
        self._block = block
        self._forward = block.forward

    @property
    def activity(self) -> Activity:
        return Activity(*self._block.counts)

    def clear_activity(self) -> None:
        self._block.counts = [0, 0, 0]

    def __call__(self, x: _kernels.Hidden, residual: _kernels.Hidden) -> None:
        self._forward(x, residual)

    def count_neurons(self) -> None:
        """From now on, count for how many tokens each neuron fires."""
        self._block.count_neurons()

    def neuron_counts(self) -> npt.NDArray[np.int64]:
        """Those counts, int64 (n_ff,)."""
        return np.array(self._block.neuron_counts(), np.int64)

    def add_neurons(self, normed: FloatArray, mask: npt.NDArray[np.uint8], out: FloatArray) -> None:
        """out (n_tokens, n_embd) += what the neurons give that mask (n_tokens, n_ff) names, without down's bias.

        normed: the normalised input, float32 (n_tokens, n_embd). Only for a block with rows of neurons (ffn_down_t).
        """
        self._block.add_neurons(normed, mask, out)


class NativeHead:
    def __init__(self, runtime: _kernels.Runtime, norm: _kernels.Norm, output: _kernels.Matrix) -> None:
        self._runtime, self._norm, self._output = runtime, norm, output

    def __call__(self, x: _kernels.Hidden, batch: Batch) -> FloatArray:
        return _kernels.logits(self._runtime, self._norm, self._output, x, batch.outputs)


def _floats(tensor: QuantTensor) -> FloatArray:
    return np.ascontiguousarray(tensor.dequantize().reshape(-1), dtype=np.float32)


def _norm(spec: Norm) -> _kernels.Norm:
    bias = None if spec.bias is None else _floats(spec.bias)
    return _kernels.Norm(_floats(spec.weight), bias, spec.eps, spec.kind is NormKind.LAYER)


def _optional_norm(spec: Norm | None) -> _kernels.Norm | None:
    return None if spec is None else _norm(spec)
