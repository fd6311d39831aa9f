"""The feed-forward block: gated or not, dense or with neurons masked by a predictor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from powerinfer.backends.interface import Activation, Activity, FeedForward
from powerinfer.backends.torch.linear import TorchLinear, TorchNorm, to_tensor

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.IDENTITY: lambda x: x,
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
    Activation.GELU: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
}


class TorchFeedForward:
    """All neurons are computed; those that the predictor does not name are then set to zero."""

    def __init__(self, spec: FeedForward, device: torch.device) -> None:
        down = spec.ffn_down or spec.ffn_down_t
        assert down is not None, "a feed-forward block has one down projection"
        self.spec = spec
        self.ffn_norm = TorchNorm(spec.ffn_norm, device)
        self.ffn_gate = TorchLinear(spec.ffn_gate, device) if spec.ffn_gate else None
        self.ffn_up = TorchLinear(spec.ffn_up, device)
        self.ffn_down = TorchLinear(down, device)
        if spec.ffn_down is None:
            self.ffn_down.weight = self.ffn_down.weight.T
        self.post_ffw_norm = TorchNorm.optional(spec.post_ffw_norm, device)
        self.fc1 = to_tensor(spec.predictor.fc1, device) if spec.predictor else None
        self.fc2 = to_tensor(spec.predictor.fc2, device) if spec.predictor else None
        self.activity = Activity()

    def clear_activity(self) -> None:
        self.activity = Activity()

    def predict(self, x: torch.Tensor) -> torch.Tensor | None:
        """Which neurons of each token to compute: bool (n_tokens, n_ff), or None for all of them."""
        if self.fc1 is None or self.fc2 is None or self.spec.predictor is None:
            return None
        return F.linear(F.relu(F.linear(x, self.fc1)), self.fc2) >= self.spec.predictor.threshold

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        active = self.predict(x)  # before `residual`, which may be x, changes
        n = self.ffn_norm(x)
        if self.ffn_gate is None:
            h = self._activation(self.ffn_up(n))
        else:
            h = self._activation(self.ffn_gate(n)) * _ACTIVATIONS[self.spec.up_activation](self.ffn_up(n))
        if active is not None:
            h = h * active
        self._count(h, active)
        residual += self.post_ffw_norm(self.ffn_down(h))

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        threshold = self.spec.activation_threshold
        if threshold and self.spec.activation is Activation.RELU:
            return F.threshold(x, threshold, 0.0)
        return _ACTIVATIONS[self.spec.activation](x)

    def _count(self, h: torch.Tensor, active: torch.Tensor | None) -> None:
        before = self.activity
        predicted = h.numel() if active is None else int(active.sum())
        fired = int(torch.count_nonzero(h))
        self.activity = Activity(before.tokens + len(h), before.predicted + predicted, before.fired + fired)
