"""llama against transformers, and what it says of files that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import TinyFile, TinyLlama, tensor

from powerinfer.backends import create_backend
from powerinfer.backends.interface import Activation, BackendOptions, Batch
from powerinfer.errors import FormatError, PowerInferError, UnsupportedError, UsageError
from powerinfer.models import ModelOptions, Transformer, build_spec
from powerinfer.quantization import QuantTensor


def as_transformers(file: TinyFile, shape: TinyLlama) -> Any:
    """The same model in transformers: its rotary pairs are (i, i + n / 2), so rows of q and k change places."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.LlamaConfig(
        vocab_size=shape.n_vocab,
        hidden_size=shape.n_embd,
        intermediate_size=shape.n_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_head,
        num_key_value_heads=shape.n_head_kv,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        hidden_act=file.get("powerinfer.activation", "silu"),
        tie_word_embeddings=shape.tied,
        max_position_embeddings=128,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    state |= {"lm_head.weight": "token_embd.weight" if shape.tied else "output.weight"}
    for i in range(shape.n_layers):
        state |= {f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight" for ours, theirs in names.items()}
    weights = {}
    for theirs, ours in state.items():
        values = file.tensors[ours].dequantize()
        if ".attn_q." in ours or ".attn_k." in ours:
            pairs = values.reshape(-1, shape.head_dim // 2, 2, shape.n_embd)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[theirs] = torch.from_numpy(np.ascontiguousarray(values))
    model.load_state_dict(weights)
    return model


SHAPES = {
    "grouped KV": TinyLlama(),
    "tied, wide heads": TinyLlama(tied=True, head_dim=32, n_vocab=37, n_ff=77, seed=1),
    "one KV head, relu": TinyLlama(n_head_kv=1, extra={"powerinfer.activation": "relu"}, seed=2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_transformers(backend: str, name: str) -> None:
    shape = SHAPES[name]
    file = shape.build()
    reference = as_transformers(file, shape)
    import torch

    tokens = np.random.default_rng(3).integers(0, shape.n_vocab, 23).astype(np.int32)
    with torch.inference_mode():
        want = reference(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
    spec = build_spec(file, ModelOptions())
    model = Transformer(spec, create_backend(backend, BackendOptions(n_threads=1)))
    cache = model.kv_cache(32)
    ceiling = {"torch": 1e-4, "native": 1e-2}[backend]
    np.testing.assert_allclose(model.forward(Batch.of_sequence(tokens, 0, np.arange(23)), cache), want, atol=ceiling)
    cached = [model.forward(Batch.of_sequence(tokens[i : i + 1], i, np.array([0])), cache)[0] for i in range(23)]
    np.testing.assert_allclose(cached, want, atol=ceiling)


def broken(change: dict[str, Any] | None = None, without: str = "", **tensors: QuantTensor) -> TinyFile:
    file = TinyLlama(sparse=True).build()
    file.metadata |= change or {}
    file.metadata = {key: value for key, value in file.metadata.items() if value is not None}
    file.tensors |= {name.replace("__", "."): value for name, value in tensors.items()}
    file.tensors.pop(without, None)
    return file


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (broken({"general.architecture": "mamba"}), "unsupported model architecture 'mamba': supported are bamboo, "),
        (broken({"general.architecture": None}), "general.architecture is None"),
        (broken({"llama.block_count": None}), "lacks the key llama.block_count"),
        (broken({"llama.block_count": 3}), "lacks the tensor blk.2"),
        (broken({"llama.block_count": -1}), "llama.block_count is -1"),
        (broken({"llama.embedding_length": "96"}), "llama.embedding_length is '96'"),
        (broken({"llama.embedding_length": np.arange(5000)}), "llama.embedding_length is array([ 0, 1, 2,"),
        (broken({"llama.embedding_length": 97}), "token_embd.weight has the shape 61 x 96, expected any x 97"),
        (broken({"llama.attention.head_count": True}), "head_count is True"),
        (broken({"llama.attention.head_count_kv": 4}), "not a multiple of head_count_kv, 4"),
        (broken({"llama.attention.layer_norm_rms_epsilon": float("nan")}), "epsilon is nan"),
        (broken({"llama.rope.dimension_count": 18}), "rope.dimension_count is 18"),
        (broken({"llama.rope.scaling.type": "longrope"}), "rotary scaling 'longrope' is not supported"),
        (broken({"llama.rope.scaling.factor": 0.0}), "rope.scaling.factor is 0.0"),
        (broken({"powerinfer.activation": "swish"}), "powerinfer.activation is 'swish'"),
        (broken({"powerinfer.sparse_threshold": "high"}), "sparse_threshold is 'high'"),
        (broken(without="blk.1.fc2.weight"), "lacks the tensor blk.1.fc2.weight"),
        (
            broken(blk__0__fc1__weight=tensor(np.zeros((24, 95)))),
            "blk.0.fc1.weight has the shape 24 x 95, expected any x 96",
        ),
        (
            broken(blk__0__fc2__weight=tensor(np.zeros((100, 23)))),
            "blk.0.fc2.weight has the shape 100 x 23, expected 100 x 24",
        ),
        (broken(blk__0__ffn_gate__weight=tensor(np.zeros((99, 96)))), "blk.0.ffn_gate.weight has the shape 99 x 96"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(file: TinyFile, message: str) -> None:
    with pytest.raises(PowerInferError) as caught:
        build_spec(file, ModelOptions())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, (FormatError, UnsupportedError))


def test_the_threshold_comes_from_option_then_environment_then_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def threshold(**options: float) -> float:
        predictor = build_spec(file, ModelOptions(**options)).layers[0].feed_forward.predictor  # type: ignore[arg-type]
        assert predictor is not None
        return predictor.threshold

    file = broken()
    monkeypatch.delenv("LLAMA_SPARSE_PRED_THRESHOLD", raising=False)
    assert threshold() == 0.0
    file.metadata["powerinfer.sparse_threshold"] = 0.5
    assert threshold() == 0.5
    monkeypatch.setenv("LLAMA_SPARSE_PRED_THRESHOLD", "0.25")
    assert threshold() == 0.25
    assert threshold(sparse_threshold=-1.0) == -1.0
    monkeypatch.setenv("LLAMA_SPARSE_PRED_THRESHOLD", "much")
    with pytest.raises(UsageError, match="LLAMA_SPARSE_PRED_THRESHOLD is 'much'"):
        threshold()


def test_options_change_activation_and_rotary_settings() -> None:
    options = ModelOptions(activation=Activation.GELU, rope_freq_base=5e5, rope_freq_scale=0.5, dense=True)
    layer = build_spec(broken(), options).layers[0]
    assert layer.feed_forward.activation is Activation.GELU
    assert layer.feed_forward.predictor is None
    assert (layer.attention.rope.freq_base, layer.attention.rope.freq_scale) == (5e5, 0.5)


def test_a_bias_beside_a_matrix_is_used() -> None:
    file = TinyLlama().build()
    plain = build_spec(file, ModelOptions())
    file.tensors["blk.0.attn_v.bias"] = tensor(np.ones(32))
    assert plain.layers[0].attention.attn_v.bias is None
    tokens = np.arange(5, dtype=np.int32)
    outs = []
    for backend in ("torch", "native"):
        model = Transformer(build_spec(file, ModelOptions()), create_backend(backend, BackendOptions(n_threads=1)))
        outs.append(model.forward(Batch.of_sequence(tokens, 0, np.arange(5)), model.kv_cache(8)))
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-2)
    model = Transformer(plain, create_backend("torch", BackendOptions(n_threads=1)))
    without = model.forward(Batch.of_sequence(tokens, 0, np.arange(5)), model.kv_cache(8))
    assert np.abs(outs[0] - without).max() > 0.1
