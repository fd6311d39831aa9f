"""What a model asks of a backend.

A model is a `ModelSpec`: frozen dataclasses that name its weights (fields carry GGUF's tensor names) and say what is
particular to the architecture. A backend compiles each block of a spec into a callable. A block is coarse (attention,
feed-forward, head), so a backend is free to fuse all that happens inside it.

Conventions:

* The hidden state is an opaque array of the backend's own kind, float32, shape (n_tokens, n_embd).
* A block reads `x` and *adds* its output to `residual` in place; the two may be the same array. A sequential layer is
  `attention(x, x); feed_forward(x, x)`, a parallel one `attention(x, r); feed_forward(x, r)`.
* A token is a row of a `Batch`: its id, its position in its sequence, and the KV slot that the sequence owns. Tokens
  of many sequences can share a batch. A token sees positions 0..its own in its own slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from powerinfer.errors import UsageError
from powerinfer.quantization import TYPES, QuantTensor, QuantType

Hidden = Any
"""A backend's own array, float32 (n_tokens, n_embd)."""

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


class NormKind(Enum):
    RMS = "rms"
    LAYER = "layer"


class RopeStyle(Enum):
    """Which two elements of a head form a rotary pair."""

    NONE = "none"
    INTERLEAVED = "interleaved"  # (0, 1), (2, 3), ...: llama
    NEOX = "neox"  # (0, n/2), (1, n/2 + 1), ...: falcon, qwen


class Activation(Enum):
    IDENTITY = "identity"
    RELU = "relu"
    SILU = "silu"
    GELU = "gelu"  # the tanh form
    GELU_ERF = "gelu_erf"  # the exact one

    @property
    def is_sparse(self) -> bool:
        """Whether a neuron whose gate is not positive is exactly zero."""
        return self is Activation.RELU


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b: weight (n_out, n_in) of any registered type, bias (n_out,) float32 or None."""

    weight: QuantTensor
    bias: QuantTensor | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm or LayerNorm over the last axis: weight and bias (n_embd,) float32."""

    weight: QuantTensor
    bias: QuantTensor | None = None
    kind: NormKind = NormKind.RMS
    eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first n_rot elements of a head: pair i turns by position * frequencies[i].

    freq_factors: n_rot / 2 numbers that the pairs' frequencies are divided by, or none. magnitude: what the turned
    elements are multiplied by.
    """

    n_rot: int
    style: RopeStyle = RopeStyle.INTERLEAVED
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    freq_factors: tuple[float, ...] = ()
    magnitude: float = 1.0

    @property
    def frequencies(self) -> npt.NDArray[np.float64]:
        """Radians a position, float64 (n_rot / 2,): float32 loses an angle's fraction at long positions."""
        if self.style is RopeStyle.NONE:
            return np.empty(0)
        frequencies = self.freq_scale * self.freq_base ** (-2 * np.arange(self.n_rot // 2) / self.n_rot)
        return frequencies / np.array(self.freq_factors) if self.freq_factors else frequencies


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention with grouped KV: query head h reads KV head h // (n_head // n_head_kv).

    scale: of the products of queries and keys. window: how many positions a token sees, its own among them; 0 for all
    before it. attn_q_norm, attn_k_norm (head_dim,): of each head, before it is turned. post_attention_norm: of what
    attn_output gives, before it is added to the residual.
    """

    layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    scale: float
    rope: Rope
    attn_norm: Norm
    attn_q: Linear
    attn_k: Linear
    attn_v: Linear
    attn_output: Linear
    window: int = 0
    attn_q_norm: Norm | None = None
    attn_k_norm: Norm | None = None
    post_attention_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Predictor:
    """active = fc2 · relu(fc1 · x) >= threshold, x the *un-normalised* input of the feed-forward block.

    fc1 (r, n_embd), fc2 (n_ff, r). Source: PowerInfer (SOSP'24), section 5.1.
    """

    fc1: QuantTensor
    fc2: QuantTensor
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """h = activation(gate · n) * up_activation(up · n), out = down · h, n = ffn_norm(x).

    Without `ffn_gate`: h = activation(up · n). Exactly one of `ffn_down` (n_embd, n_ff) and `ffn_down_t` (n_ff, n_embd,
    one row a neuron) is set. With a predictor only the neurons that it names are computed, each token's its own.

    activation_threshold: t of a shifted ReLU, x where x > t, else 0 (of `activation` only, and only where that is
    RELU). post_ffw_norm: of `out`, before it is added to the residual.
    """

    layer: int
    ffn_norm: Norm
    ffn_up: Linear
    ffn_gate: Linear | None = None
    ffn_down: Linear | None = None
    ffn_down_t: Linear | None = None
    activation: Activation = Activation.SILU
    up_activation: Activation = Activation.IDENTITY
    activation_threshold: float = 0.0
    predictor: Predictor | None = None
    post_ffw_norm: Norm | None = None

    @property
    def n_ff(self) -> int:
        return self.ffn_up.weight.shape[0]


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of token_embd (n_vocab, n_embd), times `scale`; to those at position i row i of position_embd is added."""

    token_embd: QuantTensor
    scale: float = 1.0
    position_embd: QuantTensor | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """logits = output · output_norm(x); output (n_vocab, n_embd) is token_embd where embeddings are tied."""

    output_norm: Norm
    output: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. `parallel`: attention and feed-forward both read the layer's input (falcon)."""

    attention: Attention
    feed_forward: FeedForward
    parallel: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model, as a backend compiles it and as a memory plan counts it."""

    architecture: str
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head

    @property
    def max_positions(self) -> int | None:
        """How many positions have an embedding; None where the model has no such limit."""
        position_embd = self.embedding.position_embd
        return None if position_embd is None else position_embd.shape[0]

    @property
    def is_sparse(self) -> bool:
        return any(layer.feed_forward.predictor is not None for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens that go through the model together.

    tokens, positions, slots: int32 (n_tokens,). outputs: int32 (n_outputs,), the rows that logits are wanted of.
    Tokens of one slot appear in ascending position.
    """

    tokens: IntArray
    positions: IntArray
    slots: IntArray
    outputs: IntArray

    @classmethod
    def of_sequence(cls, tokens: IntArray, start: int, outputs: IntArray, slot: int = 0) -> Batch:
        """`tokens` of one sequence at positions start, start + 1, ..."""
        n = len(tokens)
        positions = np.arange(start, start + n, dtype=np.int32)
        return cls(np.asarray(tokens, np.int32), positions, np.full(n, slot, np.int32), np.asarray(outputs, np.int32))


class KVCache(Protocol):
    """Keys (after rotary) and values of `n_slots` sequences of up to `n_ctx` positions, one contiguous run a slot.

    It keeps no lengths: a sequence owns its own, and going back is writing over. Slots are independent.
    """

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_slots(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Activity:
    """What a feed-forward block has counted since it was last cleared: tokens, and (token, neuron) pairs."""

    tokens: int = 0
    predicted: int = 0  # named by the predictor (all neurons where there is none)
    fired: int = 0  # of those, with a non-zero activation


class EmbeddingBlock(Protocol):
    def __call__(self, batch: Batch) -> Hidden:
        """A fresh (or reused) hidden state, which the caller may write to until the next call."""
        ...


class AttentionBlock(Protocol):
    def __call__(self, x: Hidden, residual: Hidden, batch: Batch, cache: Any) -> None: ...


class FeedForwardBlock(Protocol):
    @property
    def activity(self) -> Activity: ...

    def clear_activity(self) -> None: ...

    def __call__(self, x: Hidden, residual: Hidden) -> None: ...


class HeadBlock(Protocol):
    def __call__(self, x: Hidden, batch: Batch) -> FloatArray:
        """Logits of `batch.outputs`, float32 (n_outputs, n_vocab), the caller's to keep."""
        ...


def cache_row_bytes(types: tuple[QuantType, QuantType], spec: Attention) -> int:
    """Bytes that one position takes in the KV cache of one layer.

    Raises UsageError for heads that are no whole blocks of the type.
    """
    for kind in types:
        if spec.head_dim % kind.block_size:
            raise UsageError(
                f"a KV cache of {kind.name.lower()} needs heads of a multiple of {kind.block_size} elements, "
                f"this model's have {spec.head_dim}: choose f16"
            )
    return spec.n_head_kv * sum(kind.row_bytes(spec.head_dim) for kind in types)


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """n_threads for one token, n_threads_batch for several (0: the backend's choice); device as torch names it.

    cache_type_k, cache_type_v: of the KV cache, e.g. "f16" ("": the backend's choice).
    notify is called with one line for the user where a backend does something that they may not expect.
    """

    n_threads: int = 0
    n_threads_batch: int = 0
    device: str = "cpu"
    cache_type_k: str = ""
    cache_type_v: str = ""
    notify: Callable[[str], None] = lambda message: None

    def cache_types(self, default: str, supported: Collection[str]) -> tuple[QuantType, QuantType]:
        """Types of keys and of values. Raises UsageError for one that is not among `supported`."""
        types = []
        for side, wanted in (("k", self.cache_type_k), ("v", self.cache_type_v)):
            name = (wanted or default).upper()
            if name not in supported:
                known = ", ".join(supported).lower()
                raise UsageError(f"the KV cache type (-ct{side}) is {wanted!r}: this backend has {known}")
            types.append(TYPES.by_name(name))
        return types[0], types[1]


class DeviceMemoryError(UsageError):
    """A device has less memory than was counted on."""


class Backend(ABC):
    """Compiles specs into blocks. One instance serves one model. cache_types: of its KV cache's keys and values."""

    name: str
    cache_types: tuple[QuantType, QuantType]

    @abstractmethod
    def embedding(self, spec: Embedding) -> EmbeddingBlock: ...

    @abstractmethod
    def attention(self, spec: Attention) -> AttentionBlock: ...

    @abstractmethod
    def feed_forward(self, spec: FeedForward) -> FeedForwardBlock: ...

    @abstractmethod
    def head(self, spec: Head) -> HeadBlock: ...

    @abstractmethod
    def kv_cache(self, spec: ModelSpec, n_ctx: int, n_slots: int = 1) -> KVCache: ...

    @abstractmethod
    def copy(self, x: Hidden) -> Hidden:
        """A second hidden state with the same contents, valid as long as `x` (parallel layers add to it)."""

    def describe(self) -> str:
        """One line for the user: which code runs, on what, with how many threads."""
        return self.name
