"""Causal attention with rotary positions, grouped KV heads and a cache of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from powerinfer.backends.interface import Attention, Batch, DeviceMemoryError, Rope, RopeStyle
from powerinfer.backends.torch.linear import TorchLinear, TorchNorm
from powerinfer.backends.torch.weights import WeightStore


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the tokens of a batch belong, on the device: copied there once, not by each layer.

    positions, slots: int64 (n_tokens,). sequences: of each slot, which tokens are its own (None for all of them) and
    how many positions they see.
    """

    batch: Batch
    positions: torch.Tensor
    slots: torch.Tensor
    sequences: list[tuple[int, torch.Tensor | None, int]]
    turns: dict[Rope, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Placed:
        def move(values: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
            return torch.from_numpy(values).to(device).long()

        sequences: list[tuple[int, torch.Tensor | None, int]] = []
        distinct = np.unique(batch.slots)
        for slot in distinct:
            mine = np.flatnonzero(batch.slots == slot)
            n_kv = int(batch.positions[mine].max()) + 1
            sequences.append((int(slot), None if len(distinct) == 1 else move(mine), n_kv))
        return cls(batch, move(batch.positions), move(batch.slots), sequences, {})

    def turn(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each token's angles, times the magnitude: float32 (n_tokens, 1, n_rot / 2)."""
        if rope not in self.turns:
            angles = self.positions[:, None].double() * torch.from_numpy(rope.frequencies).to(self.positions.device)
            cos, sin = (rope.magnitude * f(angles).float()[:, None] for f in (torch.cos, torch.sin))
            self.turns[rope] = cos, sin
        return self.turns[rope]


class TorchKVCache:
    """Keys and values of each layer: dtypes[0] and dtypes[1] (n_slots, n_head_kv, n_ctx, head_dim).

    A layer that is None keeps its own elsewhere.
    """

    def __init__(
        self,
        layers: Sequence[Attention | None],
        n_ctx: int,
        n_slots: int,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> None:
        """Raises UsageError where the device's memory does not hold it."""
        self.n_ctx, self.n_slots, self.device = n_ctx, n_slots, device
        self._placed: Placed | None = None
        try:
            self.k, self.v = (
                [
                    torch.zeros(n_slots, a.n_head_kv, n_ctx, a.head_dim, dtype=dtype, device=device)
                    if a
                    else torch.empty(0, dtype=dtype, device=device)
                    for a in layers
                ]
                for dtype in dtypes
            )
        except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
            reason = str(error).splitlines()[0]
            raise DeviceMemoryError(
                f"no memory for a KV cache of {n_ctx} positions ({reason}): choose a smaller -c"
            ) from None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def placed(self, batch: Batch) -> Placed:
        """Where a batch belongs; the same for all layers that it goes through."""
        if self._placed is None or self._placed.batch is not batch:
            self._placed = Placed.of(batch, self.device)
        return self._placed


def rotate(x: torch.Tensor, placed: Placed, rope: Rope) -> torch.Tensor:
    """x (n_tokens, n_heads, head_dim) with its first n_rot elements turned in pairs, by position."""
    if rope.style is RopeStyle.NONE:
        return x
    cos, sin = placed.turn(rope)
    turned, rest = x[..., : rope.n_rot], x[..., rope.n_rot :]
    if rope.style is RopeStyle.NEOX:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


class TorchAttention:
    def __init__(self, spec: Attention, store: WeightStore) -> None:
        self.spec = spec
        self.attn_norm = TorchNorm(spec.attn_norm, store)
        self.attn_q = TorchLinear(spec.attn_q, store)
        self.attn_k = TorchLinear(spec.attn_k, store)
        self.attn_v = TorchLinear(spec.attn_v, store)
        self.attn_output = TorchLinear(spec.attn_output, store)
        self.attn_q_norm = TorchNorm.optional(spec.attn_q_norm, store)
        self.attn_k_norm = TorchNorm.optional(spec.attn_k_norm, store)
        self.post_attention_norm = TorchNorm.optional(spec.post_attention_norm, store)

    def tensors(self) -> dict[str, int]:
        """Bytes by GGUF name, without the layer's prefix."""
        parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
        norms = ("attn_q_norm", "attn_k_norm", "post_attention_norm")
        return {key: size for name in parts + norms for key, size in getattr(self, name).tensors(name).items()}

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: Batch, cache: TorchKVCache) -> None:
        spec, n = self.spec, len(x)
        placed = cache.placed(batch)
        positions, slots = placed.positions, placed.slots
        h = self.attn_norm(x)
        q = rotate(self.attn_q_norm(self.attn_q(h).view(n, spec.n_head, -1)), placed, spec.rope)
        keys, values = cache.k[spec.layer], cache.v[spec.layer]
        k = rotate(self.attn_k_norm(self.attn_k(h).view(n, spec.n_head_kv, -1)), placed, spec.rope)
        keys[slots, :, positions] = k.to(keys.dtype)
        values[slots, :, positions] = self.attn_v(h).view(n, spec.n_head_kv, -1).to(values.dtype)
        out = torch.empty_like(q)
        for slot, mine, n_kv in placed.sequences:
            seen = keys[slot, :, :n_kv], values[slot, :, :n_kv]
            if mine is None:
                out = self._attend(q, *seen, positions)
            else:
                out[mine] = self._attend(q[mine], *seen, positions[mine])
        residual += self.post_attention_norm(self.attn_output(out.reshape(n, -1)))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q (n, n_head, head_dim) of one sequence, k and v (n_head_kv, n_kv, head_dim)."""
        distance = positions[:, None] - torch.arange(k.shape[1], device=q.device)
        seen = distance >= 0
        if self.spec.window:
            seen &= distance < self.spec.window
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None].float(),
            v[None].float(),
            attn_mask=seen,
            scale=self.spec.scale,
            enable_gqa=self.spec.n_head != self.spec.n_head_kv,
        )
        return out[0].transpose(0, 1)
