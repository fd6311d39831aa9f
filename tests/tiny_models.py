"""Tiny random models, made in memory or written as GGUF files, and a float64 forward pass to hold backends against."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer.backends.interface import Activation, ModelSpec, Norm
from powerinfer.formats import GGUFWriter
from powerinfer.quantization import TYPES, QuantTensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@dataclass
class TinyFile:
    """A model file in memory."""

    metadata: dict[str, Any]
    tensors: dict[str, QuantTensor]
    is_powerinfer: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def tensor(self, name: str) -> QuantTensor | None:
        return self.tensors.get(name)

    def write(self, path: Path) -> Path:
        with GGUFWriter(path, powerinfer=self.is_powerinfer) as writer:
            for key, value in self.metadata.items():
                writer.add(key, value)
            for name, tensor in self.tensors.items():
                writer.declare_tensor(name, tensor.type, tensor.shape)
            for name, tensor in self.tensors.items():
                writer.write_tensor(name, tensor.data)
        return path


def tensor(values: npt.ArrayLike, kind: str = "F32") -> QuantTensor:
    array = np.asarray(values, np.float32)
    quant_type = TYPES.by_name("F32" if array.ndim == 1 else kind)
    return QuantTensor(quant_type, array.shape, quant_type.quantize_rows(np.atleast_2d(array)))


@dataclass
class TinyLlama:
    """Sizes of a random llama. sparse: with a predictor, truthful (its sign is the gate's) or random."""

    n_embd: int = 96
    n_ff: int = 100
    n_head: int = 6
    n_head_kv: int = 2
    head_dim: int = 16
    n_layers: int = 2
    n_vocab: int = 61
    rank: int = 24
    kind: str = "F32"
    sparse: bool = False
    truthful: bool = True
    tied: bool = False
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def build(self) -> TinyFile:
        rng = np.random.default_rng(self.seed)

        def random(*shape: int) -> npt.NDArray[np.float32]:
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        def norm(n: int) -> QuantTensor:
            return tensor(rng.uniform(0.5, 1.5, n))

        tensors = {"token_embd.weight": tensor(random(self.n_vocab, self.n_embd) * 8, self.kind)}
        tensors["output_norm.weight"] = norm(self.n_embd)
        if not self.tied:
            tensors["output.weight"] = tensor(random(self.n_vocab, self.n_embd) * 4, self.kind)
        for i in range(self.n_layers):
            at = f"blk.{i}."
            shapes = {
                "attn_q": (self.n_head * self.head_dim, self.n_embd),
                "attn_k": (self.n_head_kv * self.head_dim, self.n_embd),
                "attn_v": (self.n_head_kv * self.head_dim, self.n_embd),
                "attn_output": (self.n_embd, self.n_head * self.head_dim),
                "ffn_gate": (self.n_ff, self.n_embd),
                "ffn_up": (self.n_ff, self.n_embd),
            }
            tensors |= {f"{at}{name}.weight": tensor(random(*shape), self.kind) for name, shape in shapes.items()}
            tensors |= {f"{at}attn_norm.weight": norm(self.n_embd), f"{at}ffn_norm.weight": norm(self.n_embd)}
            if not self.sparse:
                tensors[f"{at}ffn_down.weight"] = tensor(random(self.n_embd, self.n_ff), self.kind)
                continue
            tensors[f"{at}ffn_down_t.weight"] = tensor(random(self.n_ff, self.n_embd), self.kind)
            fc1, fc2 = random(self.rank, self.n_embd), random(self.n_ff, self.rank)
            if self.truthful:
                self._make_truthful(tensors, at, random)
            else:
                tensors |= {f"{at}fc1.weight": tensor(fc1, self.kind), f"{at}fc2.weight": tensor(fc2, self.kind)}
        return TinyFile(self._metadata(), tensors, self.sparse)

    def _make_truthful(self, tensors: dict[str, QuantTensor], at: str, random: Any) -> None:
        """gate = A B and, as relu(y) - relu(-y) = y, fc1 = [B; -B], fc2 = [A, -A] score gate · x; ffn_norm is plain,
        so that the sign of the score, from the un-normalised x, is that of the gate."""
        half = self.rank // 2
        a, b = random(self.n_ff, half), random(half, self.n_embd)
        tensors[f"{at}ffn_norm.weight"] = tensor(np.ones(self.n_embd))
        tensors[f"{at}ffn_gate.weight"] = tensor(a @ b, self.kind)
        tensors[f"{at}fc1.weight"] = tensor(np.concatenate([b, -b]), self.kind)
        tensors[f"{at}fc2.weight"] = tensor(np.concatenate([a, -a], axis=1), self.kind)

    def _metadata(self) -> dict[str, Any]:
        words = [f"w{i}" for i in range(self.n_vocab - 3)]
        metadata: dict[str, Any] = {
            "general.architecture": "llama",
            "llama.context_length": 128,
            "llama.embedding_length": self.n_embd,
            "llama.block_count": self.n_layers,
            "llama.feed_forward_length": self.n_ff,
            "llama.attention.head_count": self.n_head,
            "llama.attention.head_count_kv": self.n_head_kv,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *words],
            "tokenizer.ggml.scores": [0.0] * 3 + [-float(i) for i in range(len(words))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * len(words),
        }
        if self.head_dim * self.n_head != self.n_embd:
            metadata |= {"llama.attention.key_length": self.head_dim, "llama.attention.value_length": self.head_dim}
        return metadata | self.extra


def _values(tensor: QuantTensor) -> Floats:
    return tensor.dequantize().astype(np.float64)


def _rms(x: Floats, norm: Norm) -> Floats:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + norm.eps) * _values(norm.weight)


def _rotate(x: Floats, base: float, scale: float, n_rot: int) -> Floats:
    """x (n, heads, head_dim), one row a position; interleaved pairs."""
    angle = np.arange(len(x))[:, None] * scale * base ** (-np.arange(0, n_rot, 2) / n_rot)
    turned = (x[..., 0:n_rot:2] + 1j * x[..., 1:n_rot:2]) * np.exp(1j * angle)[:, None]
    out = x.copy()
    out[..., 0:n_rot:2], out[..., 1:n_rot:2] = turned.real, turned.imag
    return out


_ACTIVATIONS = {
    Activation.IDENTITY: lambda x: x,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
}


def oracle(spec: ModelSpec, tokens: Ints) -> Floats:
    """Logits (n, n_vocab) of one sequence, in float64, written apart from any backend."""
    x = _values(spec.embedding.token_embd)[tokens]
    n = len(tokens)
    causal = np.tril(np.ones((n, n), bool))
    for layer in spec.layers:
        a = layer.attention
        h = _rms(x, a.attn_norm)
        heads = {
            name: (h @ _values(getattr(a, name).weight).T).reshape(n, -1, a.head_dim)
            for name in ("attn_q", "attn_k", "attn_v")
        }
        q, k = (_rotate(heads[i], a.rope.freq_base, a.rope.freq_scale, a.rope.n_rot) for i in ("attn_q", "attn_k"))
        group = a.n_head // a.n_head_kv
        k, v = np.repeat(k, group, axis=1), np.repeat(heads["attn_v"], group, axis=1)
        scores = np.where(causal, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(a.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1) @ _values(a.attn_output.weight).T
        f = layer.feed_forward
        assert f.ffn_gate is not None
        h = _rms(x, f.ffn_norm)
        gate, up = h @ _values(f.ffn_gate.weight).T, h @ _values(f.ffn_up.weight).T
        h = _ACTIVATIONS[f.activation](gate) * up
        if f.predictor is not None:
            hidden = np.maximum(x @ _values(f.predictor.fc1).T, 0)
            h = h * (hidden @ _values(f.predictor.fc2).T >= f.predictor.threshold)
        down = f.ffn_down or f.ffn_down_t
        assert down is not None
        x = x + h @ (_values(down.weight).T if f.ffn_down else _values(down.weight))
    return _rms(x, spec.head.output_norm) @ _values(spec.head.output.weight).T
