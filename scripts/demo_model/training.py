"""Training of the model itself: a dense phase, a sparsity phase, and a quantization-aware end."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import DemoModel, FeedForwardTrace
from .text import TokenStream


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run; fractions are of `steps`."""

    steps: int = 3500
    batch: int = 4  # sequences a step
    length: int = 512  # tokens a sequence
    peak_rate: float = 2e-3
    final_rate: float = 0.03  # of peak_rate
    warmup: int = 100  # steps
    weight_decay: float = 0.1
    clip: float = 1.0  # largest gradient norm
    sparsity_from: float = 0.4
    quantized_from: float = 0.72
    target_active: float = 0.08  # neurons with gate > 0, of all
    margin: float = 0.2  # a gate closer to zero than this still costs, so that few gates sit on the fence
    first_penalty: float = 0.02  # weight of the gate penalty when the sparsity phase starts
    save_every: int = 200  # steps
    seed: int = 1


def say(message: str) -> None:
    """One progress line on stderr."""
    print(message, file=sys.stderr, flush=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to `final_rate` of the peak."""
    if step < config.warmup:
        return config.peak_rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = config.peak_rate * config.final_rate
    return low + (config.peak_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


def active_fraction(traces: list[FeedForwardTrace]) -> Tensor:
    """Mean fraction of neurons with gate > 0 (a scalar)."""
    return torch.stack([(trace.gate > 0).float().mean() for trace in traces]).mean()


def gate_penalty(traces: list[FeedForwardTrace], margin: float) -> Tensor:
    """Mean of relu(gate + margin): zero once a gate is safely negative."""
    return torch.stack([torch.relu(trace.gate.float() + margin).mean() for trace in traces]).mean()


class Trainer:
    """Owns the model's optimizer, the step counter and the penalty's weight, which together are a checkpoint."""

    def __init__(self, model: DemoModel, stream: TokenStream, config: TrainConfig, checkpoint: Path) -> None:
        self.model, self.stream, self.config, self.checkpoint = model, stream, config, checkpoint
        named = [(name, p) for name, p in model.named_parameters() if ".fc1." not in name and ".fc2." not in name]
        decayed = [p for name, p in named if p.ndim == 2 and "token_embd" not in name]
        plain = [p for name, p in named if p.ndim != 2 or "token_embd" in name]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.peak_rate, betas=(0.9, 0.95), fused=True)
        self.step = 0
        self.penalty = 0.0
        self.active = 1.0  # running mean of the active fraction
        self.seconds = 0.0  # of training, over all resumed runs

    def save(self) -> None:
        """Write the checkpoint; a half-written one never replaces a good one."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "penalty": self.penalty,
            "active": self.active,
            "seconds": self.seconds,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        """Continue from the checkpoint. Batches depend on the step alone, so they are those of an unbroken run."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.penalty = state["step"], state["penalty"]
        self.active, self.seconds = state["active"], state["seconds"]

    def run(self) -> None:
        """Train to the last step, saving as it goes."""
        started = time.monotonic() - self.seconds
        while self.step < self.config.steps:
            loss = self.one_step()
            self.step += 1
            self.seconds = time.monotonic() - started
            if self.step % 50 == 0 or self.step == self.config.steps:
                tokens = self.step * self.config.batch * self.config.length
                say(
                    f"step {self.step}/{self.config.steps}  loss {loss:.3f}  active {self.active:.3f}  "
                    f"penalty {self.penalty:.4f}  {tokens / self.seconds:.0f} tokens/s  {self.seconds:.0f} s"
                )
            if self.step % self.config.save_every == 0 or self.step == self.config.steps:
                self.save()

    def one_step(self) -> float:
        """One optimizer step; returns its cross-entropy (nats a token)."""
        config = self.config
        sparse = self.step >= config.sparsity_from * config.steps
        self.model.set_quantized(self.step >= config.quantized_from * config.steps)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        windows = self.stream.batch(config.batch, config.length, generator)
        # Measured on one AVX-512 core: 3,700 tokens/s, 2,300 in float32.
        with torch.autocast("cpu", torch.bfloat16):
            logits, traces = self.model(windows[:, :-1])
        cross_entropy = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss = cross_entropy
        if sparse:
            self.adjust_penalty(traces)
            loss = loss + self.penalty * gate_penalty(traces, config.margin)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        self.optimizer.step()
        return float(cross_entropy.detach())

    def adjust_penalty(self, traces: list[FeedForwardTrace]) -> None:
        """Raise the penalty's weight while too many neurons are active, lower it while too few are."""
        if self.penalty == 0.0:
            self.penalty = self.config.first_penalty
        fraction = float(active_fraction(traces))
        self.active += 0.1 * (fraction - self.active)
        # 1 % a step: a factor of 20 in 300 steps, slow enough for the weights to follow.
        self.penalty *= 1.01 if self.active > self.config.target_active else 0.99
