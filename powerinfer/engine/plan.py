"""What of a model goes to a device under a memory budget: arithmetic on shapes, nothing is allocated here.

The order is PowerInfer's: attention layer by layer (with its KV cache, which is where its attention is), predictors,
norms, head, then neurons. Whatever fits is used; what does not is the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from powerinfer.backends.hybrid.split import LayerSplit, Split
from powerinfer.backends.interface import Attention, FeedForward, IntArray, Linear, ModelSpec, Norm
from powerinfer.engine.placement import LayerNeurons, Objective, Speeds, place
from powerinfer.quantization import QuantType

FLOAT = 4
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
NONE: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A device, as far as a plan needs it.

    row_bytes: of a row of so many elements of a type, as the device holds it. context: bytes that are gone before
    anything is allocated. slack: the share of what is allocated that an allocator loses.
    """

    name: str
    row_bytes: Callable[[QuantType, int], int]
    context: int = 0
    slack: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """n_ctx positions of n_slots sequences, n_batch tokens at once, types of keys and values."""

    n_ctx: int
    n_batch: int
    cache_types: tuple[QuantType, QuantType]
    n_slots: int = 1


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """hot of n_ff neurons, which carry `share` of the layer's activations; bytes on the device and read on the CPU."""

    hot: int
    n_ff: int
    share: float
    device_bytes: int
    gpu_seconds: float
    cpu_seconds: float
    sync_seconds: float

    @property
    def seconds(self) -> float:
        """Of one token."""
        return max(self.gpu_seconds, self.cpu_seconds + self.sync_seconds)

    @property
    def bound(self) -> str:
        return "GPU" if self.gpu_seconds >= self.cpu_seconds + self.sync_seconds else "CPU"


@dataclass(frozen=True, slots=True)
class Plan:
    """split: for the backend. tensors: bytes on the device by GGUF name. neuron_room: bytes that were left for neurons.

    context, workspace, exchange: what else the device holds. layers: feed-forward blocks. other_seconds: of a token, of
    all that is no feed-forward block, on both sides. speeds: what seconds were predicted with.
    """

    split: Split
    tensors: dict[str, int]
    budget: int
    neuron_room: int
    context: int
    workspace: int
    exchange: int
    layers: tuple[LayerPlan, ...]
    gpu_seconds: float
    cpu_seconds: float
    sync_seconds: float
    speeds: Speeds

    @property
    def device_bytes(self) -> int:
        """All that the device is to hold; 0 where nothing is put on it."""
        if not self.split.uses_device:
            return 0
        return sum(self.tensors.values()) + self.context + self.workspace + self.exchange

    @property
    def seconds(self) -> float:
        """Predicted for one token at a short context."""
        feed_forward = sum(layer.seconds for layer in self.layers)
        return feed_forward + self.gpu_seconds + self.cpu_seconds + self.sync_seconds

    @property
    def hot(self) -> int:
        return sum(len(layer.hot) for layer in self.split.layers)


class _Room:
    """Bytes that are left of a budget, and the tensors that took the others."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.tensors: dict[str, int] = {}

    def take(self, tensors: dict[str, int]) -> bool:
        size = sum(tensors.values())
        if size > self.left:
            return False
        self.left -= size
        self.tensors.update(tensors)
        return True


def make_plan(
    spec: ModelSpec,
    shape: Shape,
    device: DeviceModel,
    budget: int,
    frequencies: Sequence[Floats],
    speeds: Speeds,
    *,
    hot: Sequence[IntArray] | None = None,
    no_neurons: bool = False,
    objective: Objective = Objective.ACTIVATIONS,
) -> Plan:
    """The plan for `budget` bytes of the device.

    frequencies: of each layer, how often each neuron fires. hot: neurons to put on the device, as an index file has
    them, in place of the best; those of layers that are the CPU's are left out. no_neurons: put none there.
    """
    sizes = _Sizes(device.row_bytes, shape)
    workspace, exchange = _workspace(spec, shape), _exchange(spec, shape)
    room = _Room(int((budget - device.context - workspace - exchange) / (1 + device.slack)))
    n = len(spec.layers)
    attention, feed_forward, head = [False] * n, [False] * n, False
    for i, layer in enumerate(spec.layers):
        attention[i] = all(attention[:i]) and room.take(sizes.attention(layer.attention))
    predictors = [attention[i] and room.take(sizes.predictor(f.feed_forward)) for i, f in enumerate(spec.layers)]
    for i, layer in enumerate(spec.layers):
        feed_forward[i] = predictors[i] and room.take(sizes.norms(layer.feed_forward))
    if all(attention):
        head = room.take(sizes.head(spec))
    neuron_room = max(0, room.left)
    chosen, seconds_of = _neurons(spec, sizes, feed_forward, room, frequencies, speeds, hot, no_neurons, objective)
    for i, layer in enumerate(spec.layers):
        if feed_forward[i] and layer.feed_forward.ffn_down_t is None and not len(chosen[i]):
            for name in sizes.norms(layer.feed_forward):  # a block that cannot be split is here whole or not at all
                room.tensors.pop(name)
            feed_forward[i] = False
    split = Split(tuple(LayerSplit(a, f, c) for a, f, c in zip(attention, feed_forward, chosen, strict=True)), head)
    gpu, cpu, sync = _other_seconds(spec, split, device, speeds)
    return Plan(
        split,
        room.tensors,
        budget,
        neuron_room,
        device.context,
        workspace,
        exchange,
        seconds_of,
        gpu,
        cpu,
        sync,
        speeds,
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes on the device by GGUF name."""

    row_bytes: Callable[[QuantType, int], int]
    shape: Shape

    def linear(self, name: str, linear: Linear | None, n_rows: int | None = None) -> dict[str, int]:
        if linear is None:
            return {}
        n = linear.weight.shape[0] if n_rows is None else n_rows
        sizes = {f"{name}.weight": n * self.row_bytes(linear.weight.type, linear.weight.shape[-1])}
        return sizes if linear.bias is None else {**sizes, f"{name}.bias": FLOAT * n}

    def norm(self, name: str, norm: Norm | None) -> dict[str, int]:
        if norm is None:
            return {}
        sizes = {f"{name}.weight": FLOAT * norm.weight.shape[-1]}
        return sizes if norm.bias is None else {**sizes, f"{name}.bias": FLOAT * norm.bias.shape[-1]}

    def attention(self, a: Attention) -> dict[str, int]:
        at = f"blk.{a.layer}"
        sizes = self.norm(f"{at}.attn_norm", a.attn_norm)
        for name, linear in (("q", a.attn_q), ("k", a.attn_k), ("v", a.attn_v), ("output", a.attn_output)):
            sizes |= self.linear(f"{at}.attn_{name}", linear)
        sizes |= self.norm(f"{at}.attn_q_norm", a.attn_q_norm) | self.norm(f"{at}.attn_k_norm", a.attn_k_norm)
        sizes |= self.norm(f"{at}.post_attention_norm", a.post_attention_norm)
        rows = self.shape.n_slots * self.shape.n_ctx * a.n_head_kv
        k, v = (rows * kind.row_bytes(a.head_dim) for kind in self.shape.cache_types)
        return {**sizes, f"{at}.cache_k": k, f"{at}.cache_v": v}

    def predictor(self, f: FeedForward) -> dict[str, int]:
        if f.predictor is None:
            return {}
        at = f"blk.{f.layer}"
        return self.linear(f"{at}.fc1", Linear(f.predictor.fc1)) | self.linear(f"{at}.fc2", Linear(f.predictor.fc2))

    def norms(self, f: FeedForward) -> dict[str, int]:
        at = f"blk.{f.layer}"
        sizes = self.norm(f"{at}.ffn_norm", f.ffn_norm) | self.norm(f"{at}.post_ffw_norm", f.post_ffw_norm)
        bias = f.ffn_down_t.bias if f.ffn_down_t else None
        return sizes if bias is None else {**sizes, f"{at}.ffn_down_t.bias": FLOAT * bias.shape[-1]}

    def neurons(self, f: FeedForward, n: int) -> dict[str, int]:
        """Of so many neurons, all their rows; of a block that is whole, all of it."""
        at = f"blk.{f.layer}"
        sizes = self.linear(f"{at}.ffn_gate", f.ffn_gate, n) | self.linear(f"{at}.ffn_up", f.ffn_up, n)
        if f.ffn_down_t is None:
            return sizes | self.linear(f"{at}.ffn_down", f.ffn_down)
        return sizes | self.linear(f"{at}.ffn_down_t", Linear(f.ffn_down_t.weight), n)

    def head(self, spec: ModelSpec) -> dict[str, int]:
        return self.norm("output_norm", spec.head.output_norm) | self.linear("output", spec.head.output)


def _workspace(spec: ModelSpec, shape: Shape) -> int:
    """Temporaries of the largest block: the feed-forward's of a batch, scores of its attention, logits."""
    n = min(shape.n_batch, shape.n_ctx)
    widest = max(layer.feed_forward.n_ff for layer in spec.layers)
    heads = max(layer.attention.n_head for layer in spec.layers)
    qkv = max(a.attn_q.weight.shape[0] * 3 for a in (layer.attention for layer in spec.layers))
    hidden = 4 * n * spec.n_embd
    return FLOAT * (max(3 * n * widest, 2 * n * heads * shape.n_ctx + n * qkv) + hidden + spec.n_vocab)


def _exchange(spec: ModelSpec, shape: Shape) -> int:
    """Buffers of what crosses, and lists of which neurons are where."""
    n = min(shape.n_batch, shape.n_ctx)
    widest = max(layer.feed_forward.n_ff for layer in spec.layers)
    lists = sum(9 * layer.feed_forward.n_ff for layer in spec.layers)  # an 8-byte index and a 1-byte mask of each
    return n * (2 * FLOAT * spec.n_embd + widest) + lists


def _cpu_neuron_bytes(f: FeedForward) -> int:
    rows = [f.ffn_gate, f.ffn_up, f.ffn_down_t or f.ffn_down]
    return sum(linear.weight.nbytes for linear in rows if linear is not None) // f.n_ff


def _neurons(
    spec: ModelSpec,
    sizes: _Sizes,
    on_device: Sequence[bool],
    room: _Room,
    frequencies: Sequence[Floats],
    speeds: Speeds,
    hot: Sequence[IntArray] | None,
    no_neurons: bool,
    objective: Objective,
) -> tuple[list[IntArray], tuple[LayerPlan, ...]]:
    """Hot neurons of each layer, taken from the room, and what each feed-forward block will take."""
    blocks = [layer.feed_forward for layer in spec.layers]
    chosen = [NONE] * len(blocks)
    for i, f in enumerate(blocks):  # blocks that cannot be split
        if on_device[i] and f.ffn_down_t is None and not no_neurons and room.take(sizes.neurons(f, f.n_ff)):
            chosen[i] = np.arange(f.n_ff, dtype=np.int32)
    able = [i for i, f in enumerate(blocks) if on_device[i] and f.ffn_down_t is not None and not no_neurons]
    layers = [
        LayerNeurons(_rates(blocks[i], frequencies[i]), _one_neuron(sizes, blocks[i]), _cpu_neuron_bytes(blocks[i]))
        for i in able
    ]
    picked = (
        [hot[i] for i in able]
        if hot is not None
        else list(place(layers, max(0, room.left), speeds, objective=objective).hot)
    )
    for i, neurons in zip(able, picked, strict=True):
        if room.take(sizes.neurons(blocks[i], len(neurons))):
            chosen[i] = neurons
    plans = []
    for i, f in enumerate(blocks):
        rates = _rates(f, frequencies[i])
        total, carried = float(rates.sum()), float(rates[chosen[i]].sum())
        hot_bytes = sum(sizes.neurons(f, len(chosen[i])).values()) if len(chosen[i]) else 0
        per_neuron = _one_neuron(sizes, f)
        crosses = on_device[i] and len(chosen[i]) < f.n_ff
        gpu = carried * per_neuron / speeds.gpu_bandwidth
        cpu = (total - carried) * _cpu_neuron_bytes(f) / speeds.cpu_bandwidth
        share = carried / total if total > 0 else len(chosen[i]) / f.n_ff
        plans.append(LayerPlan(len(chosen[i]), f.n_ff, share, hot_bytes, gpu, cpu, speeds.sync if crosses else 0.0))
    return chosen, tuple(plans)


def _one_neuron(sizes: _Sizes, f: FeedForward) -> int:
    if f.ffn_down_t is None:
        return sum(sizes.neurons(f, f.n_ff).values()) // f.n_ff
    return sum(sizes.neurons(f, 1).values())


def _rates(f: FeedForward, frequencies: Floats) -> Floats:
    """How often each neuron is computed: always, where there is no predictor."""
    return frequencies if f.predictor is not None else np.ones(f.n_ff)


def _other_seconds(spec: ModelSpec, split: Split, device: DeviceModel, speeds: Speeds) -> tuple[float, float, float]:
    """Seconds of a token that attention, predictors and head take on the GPU and the CPU, and that crossings take."""
    gpu = cpu = 0.0
    crossings, here = 0, False  # the embedding is on the CPU
    places: list[tuple[bool, int, int]] = []

    def add(on_device: bool, linears: Sequence[Linear]) -> None:
        device_bytes = sum(x.weight.shape[0] * device.row_bytes(x.weight.type, x.weight.shape[-1]) for x in linears)
        places.append((on_device, device_bytes, sum(x.weight.nbytes for x in linears)))

    for layer, side in zip(spec.layers, split.layers, strict=True):
        a, p = layer.attention, layer.feed_forward.predictor
        add(side.attention, [a.attn_q, a.attn_k, a.attn_v, a.attn_output])
        add(side.feed_forward, [Linear(p.fc1), Linear(p.fc2)] if p else [])
    add(split.head, [spec.head.output])
    for on_device, device_bytes, cpu_bytes in places:
        crossings += on_device != here
        here = on_device
        if on_device:
            gpu += device_bytes / speeds.gpu_bandwidth
        else:
            cpu += cpu_bytes / speeds.cpu_bandwidth
    return gpu, cpu, crossings * speeds.sync
