"""Causal attention with rotary positions, grouped KV heads and a cache of many sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from powerinfer.backends.interface import Attention, Batch, DeviceMemoryError, Rope, RopeStyle
from powerinfer.backends.torch.linear import TorchLinear, TorchNorm
from powerinfer.backends.torch.weights import WeightStore


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
        self.n_ctx, self.n_slots = n_ctx, n_slots
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


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x (n_tokens, n_heads, head_dim) with its first n_rot elements turned in pairs, by position."""
    if rope.style is RopeStyle.NONE:
        return x
    angles = positions[:, None].double() * torch.from_numpy(rope.frequencies).to(x.device)
    cos, sin = (rope.magnitude * f(angles).float()[:, None] for f in (torch.cos, torch.sin))
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
        positions = torch.from_numpy(batch.positions).to(x.device).long()
        slots = torch.from_numpy(batch.slots).to(x.device).long()
        h = self.attn_norm(x)
        q = rotate(self.attn_q_norm(self.attn_q(h).view(n, spec.n_head, -1)), positions, spec.rope)
        keys, values = cache.k[spec.layer], cache.v[spec.layer]
        k = rotate(self.attn_k_norm(self.attn_k(h).view(n, spec.n_head_kv, -1)), positions, spec.rope)
        keys[slots, :, positions] = k.to(keys.dtype)
        values[slots, :, positions] = self.attn_v(h).view(n, spec.n_head_kv, -1).to(values.dtype)
        out = torch.empty_like(q)
        for slot in np.unique(batch.slots):
            mine = torch.from_numpy(np.flatnonzero(batch.slots == slot)).to(x.device)
            n_kv = (
                int(batch.positions[batch.slots == slot].max()) + 1
            )  # on the CPU: a device would have to be waited for
            out[mine] = self._attend(q[mine], keys[slot, :, :n_kv], values[slot, :, :n_kv], positions[mine])
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
