"""Held-out measurements: perplexity with and without the predictors, and how good the predictors are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import DemoModel

CHUNK = 8  # windows evaluated at once


@dataclass(frozen=True)
class Report:
    """Held-out figures of a model; fractions are of all neurons of all layers, over all tokens."""

    dense_perplexity: float
    sparse_perplexity: float
    firing: float  # gate > 0
    active: float  # predicted active, hence computed
    recall: float  # of the firing neurons, those predicted active
    layer_firing: tuple[float, ...]
    layer_active: tuple[float, ...]
    layer_recall: tuple[float, ...]

    def lines(self) -> list[str]:
        """The report for a reader."""
        loss = 100 * (self.sparse_perplexity / self.dense_perplexity - 1)
        return [
            f"perplexity      dense {self.dense_perplexity:.3f}  sparse {self.sparse_perplexity:.3f}  ({loss:+.2f} %)",
            f"neurons         firing {self.firing:.4f}  predicted active {self.active:.4f}  recall {self.recall:.4f}",
            "firing by layer " + "  ".join(f"{value:.4f}" for value in self.layer_firing),
            "active by layer " + "  ".join(f"{value:.4f}" for value in self.layer_active),
            "recall by layer " + "  ".join(f"{value:.4f}" for value in self.layer_recall),
        ]


def perplexity(model: DemoModel, windows: Tensor, threshold: float | None) -> float:
    """exp of the mean cross-entropy over every target of `windows` (n, T + 1); `threshold` None runs densely."""
    total = 0.0
    with torch.no_grad():
        for chunk in torch.split(windows, CHUNK):
            logits, _ = model(chunk[:, :-1], threshold)
            total += float(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / windows[:, 1:].numel())


@dataclass(frozen=True)
class Predictions:
    """Counts by layer, each (n_layer,) float64: neurons firing, predicted active, both; and `total` neurons a layer."""

    firing: Tensor
    active: Tensor
    both: Tensor
    total: int


def predictions(model: DemoModel, windows: Tensor, threshold: float) -> Predictions:
    """Compare predictors and gates while the model runs sparsely over `windows` (n, T + 1)."""
    counts = torch.zeros(3, model.config.n_layer, dtype=torch.float64)
    with torch.no_grad():
        for chunk in torch.split(windows, CHUNK):
            _, traces = model(chunk[:, :-1], threshold)
            for layer, (block, trace) in enumerate(zip(model.blocks, traces, strict=True)):
                firing = trace.gate > 0
                active = block.scores(trace.residual) >= threshold
                for row, mask in enumerate((firing, active, firing & active)):
                    counts[row, layer] += mask.sum()
    return Predictions(counts[0], counts[1], counts[2], windows[:, 1:].numel() * model.config.n_ff)


def evaluate(model: DemoModel, windows: Tensor, threshold: float) -> Report:
    """All held-out figures of a model on `windows` (n, T + 1)."""
    counts = predictions(model, windows, threshold)
    n_layer = model.config.n_layer
    return Report(
        dense_perplexity=perplexity(model, windows, None),
        sparse_perplexity=perplexity(model, windows, threshold),
        firing=float(counts.firing.sum()) / counts.total / n_layer,
        active=float(counts.active.sum()) / counts.total / n_layer,
        recall=float(counts.both.sum() / counts.firing.sum()),
        layer_firing=tuple((counts.firing / counts.total).tolist()),
        layer_active=tuple((counts.active / counts.total).tolist()),
        layer_recall=tuple((counts.both / counts.firing).tolist()),
    )
