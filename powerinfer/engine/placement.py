"""Which neurons go to the GPU.

A layer whose neurons are split takes max(T_gpu(hot), T_sync + T_cpu(cold)): both sides work at the same time, and the
exchange costs T_sync. One that is wholly on the GPU needs no exchange. The sum over layers is minimised under a limit
on bytes, as in PowerInfer (SOSP'24, section 6.3), whose formulation maximises the activations that the GPU carries
instead: with neurons of equal size, no exchange costs and a GPU that is never the slower side the two agree.

Neurons of a layer are equal but for how often they fire, so the hottest go first, and what is left to decide is how
many of each layer. Until the GPU becomes the slower side, a layer's time falls by less with each neuron: taking the
best gain a byte, over all layers, is optimal. Finishing a layer saves its exchange at once, which is no such gain: sets
of layers to finish are tried, each with the best use of what it leaves.

By default the most activations are carried, as PowerInfer has it: the time that is lost to exchanges is a few percent
of a token's, and the CPU's part, which varies from token to token, is the least. `Objective.TIME` is the least sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import product

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

PLACEMENT_VERSION = 1
"""Changes when the same input gives another placement: indices made by another version are made anew."""


MAX_ATTEMPTS = 300
"""Sets of finished layers that are tried: 80 layers of 28,672 neurons take about a second."""


class Objective(Enum):
    """ACTIVATIONS: the GPU carries the most. TIME: the least predicted time."""

    ACTIVATIONS = "activations"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second that each side reads, and seconds that an exchange of one layer takes."""

    gpu_bandwidth: float
    cpu_bandwidth: float
    sync: float = 30e-6


@dataclass(frozen=True, slots=True)
class LayerNeurons:
    """Neurons of one layer: how often each fires, float64 (n_ff,) from 0 to 1, and bytes of one on either side.

    gpu_bytes: of all its rows, as the GPU holds them. cpu_bytes: as the CPU reads them.
    """

    frequencies: Floats
    gpu_bytes: int
    cpu_bytes: int
    order: Ints = field(init=False, repr=False)
    """Hottest first; of equal ones, the first."""

    def __post_init__(self) -> None:
        order = np.argsort(-self.frequencies, kind="stable").astype(np.int32)
        object.__setattr__(self, "order", order)


@dataclass(frozen=True, slots=True)
class Placement:
    """hot: of each layer the neurons on the GPU, int32 ascending. seconds: predicted for all feed-forward blocks."""

    hot: tuple[Ints, ...]
    seconds: float

    def share(self, layers: Sequence[LayerNeurons]) -> list[float]:
        """Of each layer, the part of its activations that the GPU carries."""
        shares = []
        for hot, layer in zip(self.hot, layers, strict=True):
            total = float(layer.frequencies.sum())
            shares.append(float(layer.frequencies[hot].sum()) / total if total > 0 else len(hot) / layer.order.size)
        return shares


class _Layer:
    """costs[k]: seconds with the k hottest neurons on the GPU, k = 0..n_ff. `best`: the k below n_ff of the least."""

    def __init__(self, layer: LayerNeurons, speeds: Speeds, step: int, at_least: int) -> None:
        carried = np.concatenate([[0.0], np.cumsum(layer.frequencies[layer.order])])
        gpu = carried * layer.gpu_bytes / speeds.gpu_bandwidth
        cpu = (carried[-1] - carried) * layer.cpu_bytes / speeds.cpu_bandwidth
        n = layer.order.size
        counts = np.unique(np.concatenate([np.arange(0, n, step), [n]]))
        if at_least:
            counts = counts[(counts == 0) | (counts >= at_least)]
        costs = np.maximum(gpu, speeds.sync + cpu)
        costs[0] = speeds.sync + cpu[0]
        costs[n] = gpu[n]
        self.counts, self.costs, self.carried = counts, costs[counts], carried[counts]
        self.neuron_bytes = layer.gpu_bytes
        # gains of each step but the last, until the first that gains nothing: they never rise
        steps = -np.diff(self.costs[:-1])
        stop = int(np.argmax(steps <= 0)) if np.any(steps <= 0) else len(steps)
        self.best = stop
        widths = np.diff(self.counts[: stop + 1]) * float(self.neuron_bytes)
        self.gains = np.minimum.accumulate(steps[:stop] / widths) if stop else np.empty(0)
        self.losses = -self.gains  # rising, as searchsorted wants them

    @property
    def whole_bytes(self) -> int:
        return int(self.counts[-1]) * self.neuron_bytes

    def switching_price(self) -> float:
        """Seconds a byte: at a lower price the whole layer is better on the GPU than any part of it."""
        sizes = self.counts.astype(float) * self.neuron_bytes
        parts = (self.costs[: self.best + 1] - self.costs[-1]) / (sizes[-1] - sizes[: self.best + 1])
        return float(parts.min())


def place(
    layers: Sequence[LayerNeurons],
    capacity: int,
    speeds: Speeds,
    *,
    step: int = 1,
    at_least: Sequence[int] | None = None,
    objective: Objective = Objective.ACTIVATIONS,
) -> Placement:
    """The best placement whose neurons take at most `capacity` bytes on the GPU.

    step: neurons are placed in groups of so many (the paper's: 64). at_least: of each layer, neurons below which none
    are placed (the paper's communication constraint; only with Objective.TIME).
    Room that gains no time is still filled, hottest first, where that loses none; where all neurons fit, none is left.
    """
    if sum(layer.order.size * layer.gpu_bytes for layer in layers) <= capacity:
        everything = tuple(np.arange(layer.order.size, dtype=np.int32) for layer in layers)
        seconds = sum(float(layer.frequencies.sum()) * layer.gpu_bytes / speeds.gpu_bandwidth for layer in layers)
        return Placement(everything, seconds)
    limits = at_least or [0] * len(layers)
    tables = [_Layer(layer, speeds, step, low) for layer, low in zip(layers, limits, strict=True)]
    if objective is Objective.TIME:
        best = _fill(tables, _best_steps(tables, capacity), capacity)
    else:
        best = _hottest_steps(tables, capacity)
    hot = [np.sort(layer.order[: t.counts[k]]) for layer, t, k in zip(layers, tables, best, strict=True)]
    return Placement(tuple(hot), _seconds(tables, best))


def _seconds(tables: Sequence[_Layer], steps: Sequence[int]) -> float:
    return float(sum(t.costs[k] for t, k in zip(tables, steps, strict=True)))


def _nbytes(tables: Sequence[_Layer], steps: Sequence[int]) -> int:
    return sum(int(t.counts[k]) * t.neuron_bytes for t, k in zip(tables, steps, strict=True))


def _best_steps(tables: Sequence[_Layer], capacity: int) -> list[int]:
    """Of each layer, the index into `counts`: the best found over sets of layers that are finished.

    Of few layers all sets are tried. Otherwise those that a price for bytes leads to (Lagrange relaxation: at a price,
    each layer by itself is either worth finishing or not), the best of them improved by single layers while that helps.
    """
    tried: dict[frozenset[int], tuple[float, list[int]]] = {}

    def attempt(finished: frozenset[int]) -> float:
        if finished not in tried:
            left = capacity - sum(tables[i].whole_bytes for i in finished)
            steps = _by_gain(tables, finished, left) if left >= 0 else []
            tried[finished] = (_seconds(tables, steps) if steps else np.inf, steps)
        return tried[finished][0]

    if 1 << len(tables) <= MAX_ATTEMPTS:
        for bits in product((False, True), repeat=len(tables)):
            attempt(frozenset(i for i, finished in enumerate(bits) if finished))
        return min(tried.values())[1]
    attempt(frozenset())
    prices = [t.switching_price() for t in tables]
    for price in sorted(set(prices), reverse=True):
        attempt(frozenset(i for i, p in enumerate(prices) if p >= price and p > 0))
    best = min(tried, key=lambda finished: tried[finished][0])
    improved = True
    while improved and len(tried) < MAX_ATTEMPTS:
        neighbours = [best ^ {i} for i in range(len(tables))]
        candidate = min(neighbours, key=attempt)
        improved = attempt(candidate) < attempt(best)
        best = candidate if improved else best
    return tried[best][1]


def _by_gain(tables: Sequence[_Layer], finished: frozenset[int], capacity: int) -> list[int]:
    """Steps by falling gain a byte, of layers that are not finished, until the capacity is used up."""
    open_ = [i for i in range(len(tables)) if i not in finished]
    steps = [len(t.counts) - 1 if i in finished else 0 for i, t in enumerate(tables)]
    if not open_:
        return steps

    def at(gain: float) -> list[int]:
        return [int(np.searchsorted(tables[i].losses, -gain, side="right")) for i in open_]

    def size(counts: Sequence[int]) -> int:
        return sum(int(tables[i].counts[k]) * tables[i].neuron_bytes for i, k in zip(open_, counts, strict=True))

    # the least gain at which what gains at least as much fits
    low, high = 0.0, max((float(tables[i].gains[0]) for i in open_ if tables[i].gains.size), default=0.0) * 2 + 1e-30
    chosen = at(low)
    if size(chosen) > capacity:
        for _ in range(30):
            middle = (low + high) / 2
            if size(at(middle)) > capacity:
                low = middle
            else:
                high = middle
        chosen = at(high)
    for i, k in zip(open_, chosen, strict=True):
        steps[i] = k
    # single steps that are left, best first
    left = capacity - size(chosen)
    while True:
        fitting = [
            (float(tables[i].gains[steps[i]]), i)
            for i in open_
            if steps[i] < tables[i].best and _next_bytes(tables[i], steps[i]) <= left
        ]
        if not fitting:
            return steps
        _, i = max(fitting, key=lambda pair: (pair[0], -pair[1]))
        left -= _next_bytes(tables[i], steps[i])
        steps[i] += 1


def _next_bytes(table: _Layer, k: int) -> int:
    return int(table.counts[k + 1] - table.counts[k]) * table.neuron_bytes


def _fill(tables: Sequence[_Layer], steps: list[int], capacity: int) -> list[int]:
    """Uses what is left for neurons that make no layer slower."""
    left = capacity - _nbytes(tables, steps)
    for i, table in enumerate(tables):
        last = len(table.counts) - 1
        while steps[i] < last and _next_bytes(table, steps[i]) <= left:
            if table.costs[steps[i] + 1] > table.costs[steps[i]]:
                break
            left -= _next_bytes(table, steps[i])
            steps[i] += 1
    return steps


def _hottest_steps(tables: Sequence[_Layer], capacity: int) -> list[int]:
    """The hottest neurons of all layers, by activations a byte."""
    rates = [np.diff(t.carried) / (np.diff(t.counts) * t.neuron_bytes) for t in tables]
    owner = np.repeat(np.arange(len(tables)), [r.size for r in rates])
    sizes = np.concatenate([np.diff(t.counts) * t.neuron_bytes for t in tables])
    order = np.argsort(-np.concatenate(rates), kind="stable")
    fits = np.cumsum(sizes[order]) <= capacity
    steps = np.bincount(owner[order][fits], minlength=len(tables)).tolist()
    left = capacity - _nbytes(tables, steps)
    for i, table in enumerate(tables):  # layers of smaller neurons may have room for more
        while steps[i] < len(table.counts) - 1 and _next_bytes(table, steps[i]) <= left:
            left -= _next_bytes(table, steps[i])
            steps[i] += 1
    return [int(k) for k in steps]
