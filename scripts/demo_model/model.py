"""The demo model in plain PyTorch: a small llama whose feed-forward is `relu(gate x) * (up x)`.

Shapes are written with B sequences of T tokens, D = n_embd, F = n_ff, V = n_vocab, R = predictor rank
(one a layer).
Parameter names follow the GGUF tensor names, so writing and reading a file needs no name map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Q4_BLOCK = 32  # values that share one scale in Q4_0 (and Q8_0)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; every row length is a multiple of 32 so that it can be quantized."""

    n_vocab: int = 2048
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 1024
    n_ctx: int = 512
    # The first layer sees the most diverse input and needs the most: at 96 everywhere its predictor let 49 % through,
    # the middle layers' 8 %.
    predictor_ranks: tuple[int, ...] = (192, 64, 64, 128)
    rms_eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return len(self.predictor_ranks)

    @property
    def head_dim(self) -> int:
        """Values in one attention head."""
        return self.n_embd // self.n_head


def round_q4_0(weight: Tensor) -> Tensor:
    """The values `weight` (rows x cols, float32) has after a trip through Q4_0, bit for bit what gguf-py stores."""
    blocks = weight.reshape(-1, Q4_BLOCK)
    peak = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = peak / -8
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    quants = torch.clamp(torch.floor(blocks * inverse + 8.5), 0, 15) - 8
    return (quants * scale.half().float()).reshape(weight.shape)


class Linear(nn.Module):
    """`x @ weight.T`; with `quantized` set, through the Q4_0 weight and with its gradient passed straight through."""

    def __init__(self, n_in: int, n_out: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * std)
        self.quantized = False

    def effective(self) -> Tensor:
        """The weight (n_out, n_in) that takes part in the product."""
        if not self.quantized:
            return self.weight
        return self.weight + (round_q4_0(self.weight) - self.weight).detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., n_in) to (..., n_out)."""
        return F.linear(x, self.effective())


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., size), same shape out."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (n_ctx, head_dim / 2) float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.n_ctx, dtype=torch.float32), config.rope_base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs. x: (B, heads, T, head_dim); cos, sin: (T, head_dim / 2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@dataclass
class FeedForwardTrace:
    """What one layer's feed-forward saw: `residual` (p) is (B, T, D), `gate` before ReLU is (B, T, F)."""

    residual: Tensor
    gate: Tensor


class Block(nn.Module):
    """One layer: grouped-query attention, then the ReLU feed-forward with its predictor."""

    def __init__(self, config: ModelConfig, rank: int) -> None:
        super().__init__()
        d, f = config.n_embd, config.n_ff
        kv = config.n_head_kv * config.head_dim
        std, residual_std = 0.02 * (256 / d) ** 0.5 * 1.5, 0.02 / (2 * config.n_layer) ** 0.5
        self.config = config
        self.attn_norm = RMSNorm(d, config.rms_eps)
        self.attn_q = Linear(d, d, std)
        self.attn_k = Linear(d, kv, std)
        self.attn_v = Linear(d, kv, std)
        self.attn_output = Linear(d, d, residual_std)
        self.ffn_norm = RMSNorm(d, config.rms_eps)
        self.ffn_gate = Linear(d, f, std)
        self.ffn_up = Linear(d, f, std)
        # One row a neuron, as in the file: quantization blocks then run along a neuron, in training too.
        self.ffn_down_t = Linear(d, f, residual_std)
        self.fc1 = Linear(d, rank, d**-0.5)
        self.fc2 = Linear(rank, f, rank**-0.5)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: normalised hidden state (B, T, D), same shape out."""
        batch, length, _ = x.shape
        head_dim = self.config.head_dim
        q = self.attn_q(x).view(batch, length, -1, head_dim).transpose(1, 2)
        k = self.attn_k(x).view(batch, length, -1, head_dim).transpose(1, 2)
        v = self.attn_v(x).view(batch, length, -1, head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.config.n_head // self.config.n_head_kv
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attn_output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def scores(self, residual: Tensor) -> Tensor:
        """Predictor scores (..., F) for the un-normalised residual stream (..., D)."""
        scores: Tensor = self.fc2(torch.relu(self.fc1(residual)))
        return scores

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, threshold: float | None = None
    ) -> tuple[Tensor, FeedForwardTrace]:
        """x: residual stream (B, T, D). With a threshold, neurons that score below it count as zero."""
        x = x + self.attention(self.attn_norm(x), cos, sin)
        normed = self.ffn_norm(x)
        gate = self.ffn_gate(normed)
        hidden = torch.relu(gate) * self.ffn_up(normed)
        if threshold is not None:
            hidden = hidden * (self.scores(x) >= threshold)
        return x + hidden @ self.ffn_down_t.effective(), FeedForwardTrace(x, gate)


class DemoModel(nn.Module):
    """Token ids (B, T) to logits (B, T, V); the head is the embedding (no `output.weight` in the file)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.n_vocab, config.n_embd)
        nn.init.normal_(self.token_embd.weight, std=0.02)
        self.blk = nn.ModuleList(Block(config, rank) for rank in config.predictor_ranks)
        self.output_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [cast(Block, block) for block in self.blk]

    def set_quantized(self, on: bool) -> None:
        """Run the big matrices (not the predictors, which ship as Q8_0) through Q4_0."""
        for name, module in self.named_modules():
            if isinstance(module, Linear) and not name.endswith(("fc1", "fc2")):
                module.quantized = on

    def forward(self, tokens: Tensor, threshold: float | None = None) -> tuple[Tensor, list[FeedForwardTrace]]:
        """Logits (B, T, V) and a trace a layer; `threshold` None runs densely."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.token_embd(tokens)
        traces = []
        for block in self.blocks:
            x, trace = block(x, cos, sin, threshold)
            traces.append(trace)
        return F.linear(self.output_norm(x), self.token_embd.weight), traces
