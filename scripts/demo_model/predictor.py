"""Training of the predictors on the activations of the model as it ships, and choice of their threshold."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .evaluate import CHUNK
from .model import DemoModel
from .text import TokenStream
from .training import say


@dataclass(frozen=True)
class PredictorConfig:
    """Settings of the predictors' training."""

    steps: int = 1500
    batch: int = 4  # sequences a step
    length: int = 512  # tokens a sequence
    peak_rate: float = 3e-3
    positive_weight: float = 4.0  # a missed firing neuron costs output, a false alarm only time
    wanted_recall: float = 0.975  # a little above the aim of 0.97, for text unlike the calibration text
    seed: int = 2


def initialise(model: DemoModel, windows: Tensor) -> None:
    """Start each predictor at the best low-rank guess of its gate's sign.

    RMSNorm divides by a positive number, so gate > 0 has the sign of a matrix G times the un-normalised residual p.
    With C = mean(p p^T), G C^(1/2) cut to rank R/2 is the closest linear map; relu(b p) - relu(-b p) = b p carries it.
    """
    with torch.no_grad():
        _, traces = model(windows[:, :-1])
        for block, trace in zip(model.blocks, traces, strict=True):
            rows = trace.residual.flatten(0, 1)
            values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
            root = vectors * values.clamp_min(1e-8).sqrt() @ vectors.T
            inverse = vectors / values.clamp_min(1e-8).sqrt() @ vectors.T
            gate = block.ffn_gate.weight * block.ffn_norm.weight
            left, sizes, right = torch.linalg.svd(gate @ root, full_matrices=False)
            half = block.fc1.weight.shape[0] // 2
            scale = sizes[:half].sqrt()
            down = scale[:, None] * right[:half] @ inverse
            up = left[:, :half] * scale
            block.fc1.weight.copy_(torch.cat((down, -down)))
            block.fc2.weight.copy_(torch.cat((up, -up), dim=1))


def train(model: DemoModel, stream: TokenStream, config: PredictorConfig) -> None:
    """Fit all layers' predictors to the signs of the frozen model's gates, with binary cross-entropy."""
    parameters = [p for name, p in model.named_parameters() if ".fc1." in name or ".fc2." in name]
    optimizer = torch.optim.AdamW(parameters, lr=config.peak_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.peak_rate, total_steps=config.steps, pct_start=0.1)
    weight = torch.tensor(config.positive_weight)
    started = time.monotonic()
    for step in range(config.steps):
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        windows = stream.batch(config.batch, config.length, generator)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            _, traces = model(windows[:, :-1])
        loss = torch.zeros(())
        for block, trace in zip(model.blocks, traces, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                scores = block.scores(trace.residual)
            firing = (trace.gate > 0).float()
            loss = loss + F.binary_cross_entropy_with_logits(scores.float(), firing, pos_weight=weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == config.steps:
            seconds = time.monotonic() - started
            say(f"predictors {step + 1}/{config.steps}  loss {float(loss.detach()):.4f}  {seconds:.0f} s")


def calibrate(model: DemoModel, windows: Tensor, wanted_recall: float) -> float:
    """The highest threshold, to two decimals, at which `wanted_recall` of the neurons firing on `windows` reach it."""
    firing = []
    with torch.no_grad():
        for chunk in torch.split(windows, CHUNK):
            _, traces = model(chunk[:, :-1])
            for block, trace in zip(model.blocks, traces, strict=True):
                firing.append(block.scores(trace.residual)[trace.gate > 0])
    scores = torch.cat(firing)
    missed = int((1 - wanted_recall) * len(scores))
    return math.floor(100 * float(scores.kthvalue(missed + 1).values)) / 100
