"""The feed-forward block: gated or not, dense or with neurons masked by a predictor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from powerinfer.backends.interface import Activation, Activity, FeedForward, IntArray
from powerinfer.backends.torch.linear import TorchLinear, TorchNorm
from powerinfer.backends.torch.weights import WeightStore

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.IDENTITY: lambda x: x,
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
    Activation.GELU: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
}


class TorchFeedForward:
    """Neurons that the predictor names for any token are computed; of each token the others are then set to zero.

    neurons: the rows of gate, up and down_t that are here, ascending; None for all. The predictor names neurons of all.
    """

    def __init__(self, spec: FeedForward, store: WeightStore, neurons: IntArray | None = None) -> None:
        self.spec = spec
        self.neurons = None if neurons is None else torch.from_numpy(neurons).long().to(store.device)
        self.ffn_norm = TorchNorm(spec.ffn_norm, store)
        down_t = spec.ffn_down_t
        self._kernel = store.neurons(spec, neurons)  # holds gate, up and down_t, if there is one
        plain = self._kernel is None
        self.ffn_gate = TorchLinear(spec.ffn_gate, store, neurons) if spec.ffn_gate and plain else None
        self.ffn_up = TorchLinear(spec.ffn_up, store, neurons) if plain else None
        self.ffn_down = TorchLinear(spec.ffn_down, store) if spec.ffn_down else None
        self.ffn_down_t = store.weight(down_t.weight, neurons) if down_t and plain else None
        self.ffn_down_t_bias = store.floats(down_t.bias) if down_t and down_t.bias else None
        self.post_ffw_norm = TorchNorm.optional(spec.post_ffw_norm, store)
        self.fc1 = store.weight(spec.predictor.fc1) if spec.predictor else None
        self.fc2 = store.weight(spec.predictor.fc2) if spec.predictor else None
        # Lists of neurons are made where that needs no wait for a device.
        self._lists = store.device.type == "cpu"
        self._tokens = 0
        self._counts = torch.zeros(2, dtype=torch.int64, device=store.device)  # predicted, fired

    def tensors(self) -> dict[str, int]:
        """Bytes by GGUF name, without the layer's prefix."""
        sizes = {**self.ffn_norm.tensors("ffn_norm"), **self.post_ffw_norm.tensors("post_ffw_norm")}
        sizes.update(self._kernel.tensors() if self._kernel else {})
        for name, linear in (("ffn_gate", self.ffn_gate), ("ffn_up", self.ffn_up), ("ffn_down", self.ffn_down)):
            sizes.update(linear.tensors(name) if linear else {})
        plain = {"ffn_down_t.weight": self.ffn_down_t, "ffn_down_t.bias": self.ffn_down_t_bias}
        predictor = {"fc1.weight": self.fc1, "fc2.weight": self.fc2}
        return {**sizes, **{name: w.nbytes for name, w in {**plain, **predictor}.items() if w is not None}}

    @property
    def activity(self) -> Activity:
        predicted, fired = self._counts.tolist()
        return Activity(self._tokens, predicted, fired)

    def clear_activity(self) -> None:
        self._tokens = 0
        self._counts.zero_()

    def predict(self, x: torch.Tensor) -> torch.Tensor | None:
        """Which neurons of each token to compute: bool (n_tokens, n_ff), or None for all of them."""
        if self.fc1 is None or self.fc2 is None or self.spec.predictor is None:
            return None
        return self.fc2.linear(F.relu(self.fc1.linear(x))) >= self.spec.predictor.threshold

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        active = self.predict(x)  # before `residual`, which may be x, changes
        residual += self.finish(self.neurons_of(self.ffn_norm(x), active))

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """What the residual gets, from the sum over all neurons."""
        if self.ffn_down_t_bias is not None:
            out = out + self.ffn_down_t_bias
        return self.post_ffw_norm(out)

    def neurons_of(self, n: torch.Tensor, active: torch.Tensor | None) -> torch.Tensor:
        """The sum over the neurons that are here, float32 (n_tokens, n_embd), without biases of the down projection.

        n: normalised (n_tokens, n_embd). active: bool (n_tokens, n_ff) of all neurons, or None.
        """
        named = None
        if active is None and self._kernel is not None:
            active = n.new_ones(len(n), self.spec.n_ff, dtype=torch.bool)
        if active is not None:
            active = active if self.neurons is None else active[:, self.neurons]
            if self._kernel is not None:
                self._tokens += len(n)
                return self._kernel(n, active, self._counts)
            named = active.any(dim=0).nonzero()[:, 0] if self._lists else None  # for at least one token
        assert self.ffn_up is not None, "without a kernel the rows are here"
        if self.ffn_gate is None:
            h = self._activation(self.ffn_up(n, named))
        else:
            h = self._activation(self.ffn_gate(n, named)) * _ACTIVATIONS[self.spec.up_activation](self.ffn_up(n, named))
        if active is not None:
            h = h * (active if named is None else active[:, named])
        self._tokens += len(n)
        self._counts[0] += h.numel() if active is None else active.sum()
        self._counts[1] += torch.count_nonzero(h)
        return self._down(h, named)

    def _down(self, h: torch.Tensor, named: torch.Tensor | None) -> torch.Tensor:
        """h (n_tokens, neurons of `named`), or of all."""
        if self.ffn_down is not None:
            return self.ffn_down(h)
        assert self.ffn_down_t is not None, "a feed-forward block has one down projection"
        if not self._lists:
            return self.ffn_down_t.transposed_linear(h)
        fired = (h != 0).any(dim=0).nonzero()[:, 0]
        return h[:, fired] @ self.ffn_down_t.rows(fired if named is None else named[fired])

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        threshold = self.spec.activation_threshold
        if threshold and self.spec.activation is Activation.RELU:
            return F.threshold(x, threshold, 0.0)
        return _ACTIVATIONS[self.spec.activation](x)
