"""Tiny random transformers models as GGUF files in memory, written apart from the package's converter.

A name in a state dict becomes a GGUF name by one table a family; what the formats lay out otherwise (rotary pairs,
fused matrices, norms of 1 + w) is moved by hand. Sparsity, which transformers does not know, is hooked into its
modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import TinyFile, tensor

LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3 = LLAMA | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FALCON = {
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
OPT = {
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm",
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}


@dataclass(frozen=True)
class Family:
    """names: modules to tensors. layers: the prefix of layer modules. activation, predictor_norm: modules of a layer,
    the second the one whose input the predictor sees."""

    names: dict[str, str]
    layers: str = "model.layers"
    activation: str = "mlp.act_fn"
    predictor_norm: str = "post_attention_layernorm"


FAMILIES = {
    "llama": Family(LLAMA),
    "bamboo": Family(LLAMA),
    "qwen2": Family(LLAMA),
    "qwen3": Family(LLAMA),
    "gemma3": Family(GEMMA3, predictor_norm="pre_feedforward_layernorm"),
    "falcon": Family(FALCON, "transformer.h", "mlp.act", "input_layernorm"),
    "opt": Family(OPT, "model.decoder.layers", "activation_fn", "final_layer_norm"),
}


def random_model(config: Any, seed: int = 0) -> Any:
    """A model whose logits are some units wide, norms and biases not those of a model just made."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "embed" in name or "lm_head" in name:
                p.normal_(0, 1)
            elif p.ndim == 2:
                p.normal_(0, p.shape[1] ** -0.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.2)
            else:
                p.add_(torch.empty_like(p).uniform_(-0.4, 0.4))
    return model


def to_gguf(model: Any, architecture: str, extra: dict[str, Any] | None = None) -> TinyFile:
    """The model as an ordinary GGUF file; extra: more metadata."""
    config, family = model.config, FAMILIES[architecture]
    tensors = {}
    for name, value in model.state_dict().items():
        ours = _tensor_name(name, family)
        if ours is None or (ours == "output.weight" and config.tie_word_embeddings):
            continue
        values = value.numpy()
        if architecture in ("llama", "bamboo") and (".attn_q." in ours or ".attn_k." in ours):
            values = _interleave(values, config)
        if ".attn_qkv." in ours:
            values = _regroup(values, config)
        if architecture == "gemma3" and "norm" in ours:
            values = values + 1
        tensors[ours] = tensor(values)
    return TinyFile(_metadata(config, architecture) | (extra or {}), tensors)


def _tensor_name(name: str, family: Family) -> str | None:
    module, _, kind = name.rpartition(".")
    if module in family.names:
        return f"{family.names[module]}.{kind}"
    if not module.startswith(family.layers):
        return None
    i, _, part = module.removeprefix(f"{family.layers}.").partition(".")
    return f"blk.{i}.{family.names[part]}.{kind}" if part in family.names else None


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _interleave(values: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """Rows i and i + n/2 of a head become neighbours."""
    pairs = values.reshape(-1, 2, _head_dim(config) // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _regroup(values: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """Groups (queries of a KV head, its key, its value) become all queries, all keys, all values."""
    n_kv = _falcon_kv_heads(config)
    groups = values.reshape(n_kv, -1, _head_dim(config), *values.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _freq_base(config: Any) -> float:
    """transformers 5 keeps it with the other rotary settings, by kind of layer where there are several."""
    settings = getattr(config, "rope_parameters", None) or {}
    settings = settings.get("full_attention", settings)
    return float(settings.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    n_ff = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or config.ffn_hidden_size
    n_kv = _falcon_kv_heads(config) if architecture == "falcon" else getattr(config, "num_key_value_heads", None)
    values = {
        "context_length": getattr(config, "max_position_embeddings", 128),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": n_ff,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": n_kv or config.num_attention_heads,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_epsilon", 1e-5),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-5),
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "attention.sliding_window": getattr(config, "sliding_window", None) or 0,
        "rope.freq_base": _freq_base(config),
    }
    words = [f"w{i}" for i in range(config.vocab_size - 3)]
    vocabulary = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *words],
        "tokenizer.ggml.scores": [0.0] * 3 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * len(words),
    }
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": architecture} | named | vocabulary


def change_activation(model: Any, architecture: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """function(y) in place of an activation's output y, in every layer."""
    family = FAMILIES[architecture]
    for layer in model.get_submodule(family.layers):
        layer.get_submodule(family.activation).register_forward_hook(lambda _, args, y: function(y))


def make_drelu(model: Any) -> None:
    """relu(gate) * relu(up), for a model whose activation is ReLU."""
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda _, args, y: y.relu())


def make_sparse(
    model: Any,
    file: TinyFile,
    architecture: str,
    rank: int,
    threshold: float,
    seed: int = 0,
    states: list[dict[str, torch.Tensor]] | None = None,
) -> TinyFile:
    """A PowerInfer file with predictors, whose masks the model's activations are then multiplied by.

    states: fc1.weight and fc2.weight of each layer, random ones if None.
    """
    family, rng = FAMILIES[architecture], np.random.default_rng(seed)
    tensors = dict(file.tensors)
    for i, layer in enumerate(model.get_submodule(family.layers)):
        n_ff, n_embd = tensors[f"blk.{i}.ffn_up.weight"].shape
        fc1 = rng.standard_normal((rank, n_embd)).astype(np.float32)
        fc2 = rng.standard_normal((n_ff, rank)).astype(np.float32)
        if states is not None:
            fc1, fc2 = states[i]["fc1.weight"].numpy(), states[i]["fc2.weight"].numpy()
        tensors[f"blk.{i}.fc1.weight"], tensors[f"blk.{i}.fc2.weight"] = tensor(fc1), tensor(fc2)
        down = tensors.pop(f"blk.{i}.ffn_down.weight").dequantize()
        tensors[f"blk.{i}.ffn_down_t.weight"] = tensor(down.T)
        if f"blk.{i}.ffn_down.bias" in tensors:
            tensors[f"blk.{i}.ffn_down_t.bias"] = tensors.pop(f"blk.{i}.ffn_down.bias")
        norm = "ln_mlp" if hasattr(layer, "ln_mlp") else family.predictor_norm
        _hook_mask(layer, norm, family.activation, torch.from_numpy(fc1), torch.from_numpy(fc2), threshold)
    return TinyFile(file.metadata | {"powerinfer.sparse_threshold": threshold}, tensors, is_powerinfer=True)


def _hook_mask(layer: Any, norm: str, activation: str, fc1: torch.Tensor, fc2: torch.Tensor, threshold: float) -> None:
    seen: list[torch.Tensor] = []

    def mask(_: Any, args: Any, y: torch.Tensor) -> torch.Tensor:
        active = (seen.pop() @ fc1.T).relu() @ fc2.T >= threshold
        return y * active.reshape(y.shape)

    layer.get_submodule(norm).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer.get_submodule(activation).register_forward_hook(mask)
