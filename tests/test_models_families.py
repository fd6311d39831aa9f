"""Every architecture against transformers: prompts and cached decoding, dense and sparse, on both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_gguf import change_activation, make_drelu, make_sparse, random_model, to_gguf  # noqa: E402
from tiny_models import TinyFile  # noqa: E402

from powerinfer.backends import NAMES, create_backend  # noqa: E402
from powerinfer.backends.interface import BackendOptions, Batch  # noqa: E402
from powerinfer.models import ModelOptions, Transformer, build_spec  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

CEILING = 1e-3
N_TOKENS = 23
DECODER = {
    "vocab_size": 37,
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GEMMA3 = DECODER | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 7,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
FALCON = {
    "vocab_size": 37,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "ffn_hidden_size": 77,
    "bias": False,
    "activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": False,
}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 3}
OPT = {
    "vocab_size": 37,
    "hidden_size": 60,
    "word_embed_proj_dim": 60,
    "ffn_dim": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def scaling(architecture: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {f"{architecture}.rope.scaling.{key}": value for key, value in keys.items()}


CONFIGS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "mistral": ("llama", transformers.MistralConfig(**DECODER | {"sliding_window": 7}), {}),
    "llama, tied": ("llama", transformers.LlamaConfig(**DECODER | {"tie_word_embeddings": True}), {}),
    "llama, biases": ("llama", transformers.LlamaConfig(**DECODER, attention_bias=True, mlp_bias=True), {}),
    "llama, linear scaling": (
        "llama",
        transformers.LlamaConfig(**DECODER, rope_scaling=LINEAR),
        scaling("llama", {"type": "linear", "factor": 8.0}),
    ),
    "llama, yarn": ("llama", transformers.LlamaConfig(**DECODER, rope_scaling=YARN), scaling("llama", YARN_KEYS)),
    "qwen2": ("qwen2", transformers.Qwen2Config(**DECODER), {}),
    "qwen2, tied": ("qwen2", transformers.Qwen2Config(**DECODER | {"tie_word_embeddings": True}), {}),
    "qwen3": ("qwen3", transformers.Qwen3Config(**DECODER | {"head_dim": 16}), {}),
    "qwen3, yarn": (
        "qwen3",
        transformers.Qwen3Config(**DECODER, rope_scaling=YARN, rope_theta=1e6),
        scaling("qwen3", YARN_KEYS),
    ),
    "gemma3": ("gemma3", transformers.Gemma3TextConfig(**GEMMA3), {}),
    "gemma3, linear scaling": (
        "gemma3",
        transformers.Gemma3TextConfig(**GEMMA3, rope_scaling=LINEAR),
        scaling("gemma3", {"type": "linear", "factor": 8.0}),
    ),
    "falcon 7B": ("falcon", transformers.FalconConfig(**FALCON), {}),
    "falcon 7B, tied": ("falcon", transformers.FalconConfig(**FALCON | {"tie_word_embeddings": True}), {}),
    "falcon 40B": ("falcon", transformers.FalconConfig(**FALCON, **FALCON_40B), {}),
    "falcon 11B": (
        "falcon",
        transformers.FalconConfig(**FALCON, **FALCON_40B, num_ln_in_parallel_attn=1),
        {},
    ),
    "falcon with biases": ("falcon", transformers.FalconConfig(**FALCON | {"bias": True}), {}),
    "opt": ("opt", transformers.OPTConfig(**OPT), {}),
}


def run_theirs(model: Any, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
    return logits


def check(model: Any, file: TinyFile, backend: str, ceiling: float = CEILING) -> None:
    """The same logits of a prompt at once, token by token, and in pieces."""
    tokens = np.random.default_rng(3).integers(0, 37, N_TOKENS).astype(np.int32)
    want = run_theirs(model, tokens)
    assert want.std() > 0.5  # else a ceiling says little
    options = BackendOptions(n_threads=2, cache_type_k="f32", cache_type_v="f32")
    ours = Transformer(build_spec(file, ModelOptions()), create_backend(backend, options))
    cache = ours.kv_cache(32)
    for sizes in ([N_TOKENS], [1] * N_TOKENS, [5, 1, 9, 1, 7]):
        at = 0
        for n in sizes:
            logits = ours.forward(Batch.of_sequence(tokens[at : at + n], at, np.arange(n)), cache)
            np.testing.assert_allclose(logits, want[at : at + n], atol=ceiling, rtol=0)
            at += n


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_transformers(backend: str, name: str) -> None:
    architecture, config, extra = CONFIGS[name]
    model = random_model(config)
    check(model, to_gguf(model, architecture, extra), backend)
