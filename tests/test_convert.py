"""Every family, saved by transformers and converted by the command, against transformers itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner, Result

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_folders import (  # noqa: E402
    DECODER,
    FALCON,
    N_VOCAB,
    OPT,
    damaged,
    edit_json,
    llama_folder,
    llama_folder_model,
    save_bin,
    save_folder,
    save_predictors,
)
from hf_gguf import make_drelu, make_sparse, random_model, to_gguf  # noqa: E402

from powerinfer import load  # noqa: E402
from powerinfer.backends.interface import Activation, Batch  # noqa: E402
from powerinfer.cli import app  # noqa: E402
from powerinfer.convert.config import read_config  # noqa: E402
from powerinfer.convert.families import build_recipe  # noqa: E402
from powerinfer.engine import source_check  # noqa: E402
from powerinfer.errors import FormatError, PowerInferError  # noqa: E402
from powerinfer.formats import GGUFWriter, open_gguf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

CEILING = 1e-3
N_TOKENS = 17
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 24
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2}
GEMMA3 = DECODER | {
    "num_hidden_layers": 6,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
FEW = {"num_hidden_layers": 4}
LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**DECODER),
    "llama, relu": transformers.LlamaConfig(**DECODER, hidden_act="relu"),
    "llama, tied": transformers.LlamaConfig(**DECODER | {"tie_word_embeddings": True}),
    "llama, biases": transformers.LlamaConfig(**DECODER, attention_bias=True, mlp_bias=True),
    "llama, wide heads": transformers.LlamaConfig(**DECODER | {"head_dim": 32}),
    "llama, linear": transformers.LlamaConfig(**DECODER, rope_scaling=dict(LINEAR)),
    "llama, yarn": transformers.LlamaConfig(**DECODER, rope_scaling=dict(YARN)),
    "llama, yarn with a factor": transformers.LlamaConfig(**DECODER, rope_scaling=YARN | {"attention_factor": 1.3}),
    "llama 3": transformers.LlamaConfig(**DECODER, rope_scaling=dict(LLAMA3), rope_theta=5e5),
    "mistral": transformers.MistralConfig(**DECODER, sliding_window=7),
    "qwen2": transformers.Qwen2Config(**DECODER),
    "qwen2, tied": transformers.Qwen2Config(**DECODER | {"tie_word_embeddings": True}),
    "qwen3": transformers.Qwen3Config(**DECODER | {"head_dim": 32}),
    "qwen3, yarn": transformers.Qwen3Config(**DECODER, rope_scaling=dict(YARN), rope_theta=1e6),
    "gemma3": transformers.Gemma3TextConfig(**GEMMA3),
    "gemma3, linear": transformers.Gemma3TextConfig(**GEMMA3, rope_scaling=dict(LINEAR)),
    "gemma3, other windows": transformers.Gemma3TextConfig(**GEMMA3 | FEW, layer_types=LAYERS),
    "falcon 7B": transformers.FalconConfig(**FALCON),
    "falcon, tied": transformers.FalconConfig(**FALCON | {"tie_word_embeddings": True}),
    "falcon 40B": transformers.FalconConfig(**FALCON, **FALCON_40B),
    "falcon 11B": transformers.FalconConfig(**FALCON, **FALCON_40B, num_ln_in_parallel_attn=1),
    "falcon, biases, relu": transformers.FalconConfig(**FALCON | {"bias": True}, activation="relu"),
    "opt": transformers.OPTConfig(**OPT),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small take longer on several threads, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def converted(folder: Path, *arguments: object) -> Path:
    """The file that the command makes of a folder, as float32."""
    target = folder.parent / "out.gguf"
    result = convert(folder, *arguments, "-o", target, "--outtype", "f32")
    assert result.exit_code == 0, result.output
    return target


def theirs(model: Any, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
    return logits


def check_logits(model: Any, path: Path, ceiling: float = CEILING, **options: Any) -> None:
    """The same logits of a prompt at once, and in pieces on top of the cache."""
    tokens = np.random.default_rng(3).integers(0, N_VOCAB, N_TOKENS).astype(np.int32)
    want = theirs(model, tokens)
    assert want.std() > 0.5  # else a ceiling says little
    ours = load(path, backend="torch", device="cpu", n_ctx=32, **options)
    for sizes in ([N_TOKENS], [9, *[1] * (N_TOKENS - 9)]):
        at = 0
        for n in sizes:
            logits = ours.transformer.forward(Batch.of_sequence(tokens[at : at + n], at, np.arange(n)), ours.cache)
            np.testing.assert_allclose(logits, want[at : at + n], atol=ceiling, rtol=0)
            at += n


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name])
    target = tmp_path / "out.gguf"
    result = convert(save_folder(tmp_path / "hf", model), "-o", target, "--outtype", "f32")
    assert result.exit_code == 0, result.output
    assert "checked: logits differ from the source's by" in result.output
    check_logits(model, target)


def test_shards(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf", max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    check_logits(llama_folder_model(), converted(folder))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("n_shards", [1, 3])
def test_bin_files(n_shards: int, zipped: bool, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    save_bin(folder, n_shards, zipped)
    check_logits(llama_folder_model(), converted(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("safe", [True, False])
def test_source_types(dtype: torch.dtype, safe: bool, tmp_path: Path) -> None:
    model = random_model(transformers.LlamaConfig(**DECODER)).to(dtype)
    folder = save_folder(tmp_path / "hf", model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if not safe:
        save_bin(folder, 1)
    check_logits(loaded.float().eval(), converted(folder))


@pytest.mark.parametrize(
    ("outtype", "file_type", "expected"),
    [("f16", 1, "F16"), ("bf16", 32, "BF16"), ("Q8_0", 7, "Q8_0"), ("f32", 0, "F32")],
)
def test_outtypes(outtype: str, file_type: int, expected: str, tmp_path: Path) -> None:
    result = convert(llama_folder(tmp_path / "hf"), "-o", tmp_path / "out.gguf", "--outtype", outtype)
    assert result.exit_code == 0, result.output
    assert "checked" in result.output
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.get("general.file_type") == file_type
        types = {name: info.type_name for name, info in file.tensors.items()}
    assert {kind for name, kind in types.items() if "norm" in name} == {"F32"}
    fallbacks = {name for name in types if "ffn_down" in name} if outtype == "Q8_0" else set()  # rows of 72
    assert {kind for name, kind in types.items() if "norm" not in name and name not in fallbacks} == {expected}
    assert {types[name] for name in fallbacks} <= {"F16"}


@pytest.mark.parametrize("name", ["llama, yarn", "llama 3", "gemma3, other windows", "qwen2", "falcon 40B", "opt"])
def test_any_damage_of_settings_is_one_line_or_a_recipe(name: str, tmp_path: Path) -> None:
    random_model(CONFIGS[name]).save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    messages = []
    for seed in range(4):
        for value in damaged(contents, seed, most=50):
            (tmp_path / "config.json").write_text(json.dumps(value))
            try:
                build_recipe(read_config(tmp_path))
            except PowerInferError as error:
                messages.append(str(error))
    assert len(messages) > 20
    assert not [message for message in messages if "\n" in message]


def test_names_of_older_opt_files(tmp_path: Path) -> None:
    """Without the prefix, and with a head that is the embedding."""
    model = random_model(CONFIGS["opt"])
    folder = save_folder(tmp_path / "hf", model)
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    assert "lm_head.weight" in state
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    check_logits(model, converted(folder, "--no-check"))


def test_the_default_output_and_progress(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    result = convert(folder, "--no-check")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("[")]
    assert len(lines) == 2 + 1 + 2 * 9
    assert "token_embd.weight - [   64,   416],   F32 -> F16," in lines[0]
    assert (folder / "ggml-model-f16.gguf").is_file()
    assert "checked" not in result.output


def test_metadata_is_llama_cpps(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**DECODER | {"head_dim": 32}, rope_scaling=dict(LLAMA3), rope_theta=5e5)
    path = converted(save_folder(tmp_path / "hf", random_model(config)))
    with open_gguf(path) as file:
        keys = {key: file.get(key) for key in file.metadata if key.startswith(("llama.", "general.", "powerinfer."))}
        factors = file.tensor("rope_freqs.weight")
    assert factors is not None
    assert factors.dequantize().max() == 8
    assert keys == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "hf",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "llama.vocab_size": N_VOCAB,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 72,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-6),
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 5e5,
    }


def test_settings_of_transformers_5(tmp_path: Path) -> None:
    """It keeps rotary settings in one object, by the kind of layer where these differ."""
    model = random_model(transformers.LlamaConfig(**DECODER, rope_scaling=dict(LINEAR), rope_theta=500.0))
    folder = save_folder(tmp_path / "hf", model)
    edit_json(
        folder / "config.json", rope_theta=None, rope_scaling=None, rope_parameters=LINEAR | {"rope_theta": 500.0}
    )
    check_logits(model, converted(folder, "--no-check"))
    model = random_model(transformers.Gemma3TextConfig(**GEMMA3, rope_local_base_freq=77.0, rope_scaling=dict(LINEAR)))
    folder = save_folder(tmp_path / "gemma", model)
    settings = {
        "full_attention": LINEAR | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    }
    edit_json(
        folder / "config.json",
        rope_theta=None,
        rope_scaling=None,
        rope_local_base_freq=None,
        rope_parameters=settings,
    )
    check_logits(model, converted(folder, "--no-check"))


SPARSE = {
    "llama": transformers.LlamaConfig(**DECODER, hidden_act="relu"),
    "bamboo": transformers.MistralConfig(**DECODER, hidden_act="relu", sliding_window=None),
    "falcon": transformers.FalconConfig(**FALCON, activation="relu"),
    "falcon 40B": transformers.FalconConfig(**FALCON, **FALCON_40B, activation="relu"),
    "opt": transformers.OPTConfig(**OPT),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_files(name: str, tmp_path: Path) -> None:
    """Masked as transformers' activations are when the same predictors are hooked into them."""
    architecture = name.split()[0]
    model = random_model(SPARSE[name])
    folder = save_folder(tmp_path / "hf", model)
    if architecture == "bamboo":
        edit_json(folder / "config.json", architectures=["BambooForCausalLM"], model_type="bamboo")
        make_drelu(model)
    predictors = save_predictors(tmp_path / "predictors")
    result = convert(folder, predictors, "-o", tmp_path / "out.gguf", "--outtype", "f32")
    assert result.exit_code == 0, result.output
    assert ("checked: " in result.output) == (architecture != "bamboo")
    assert ("transformers cannot run it" in result.output) == (architecture == "bamboo")
    states = [torch.load(predictors / f"model_{i}.pt", weights_only=True) for i in range(2)]
    sparse = make_sparse(model, to_gguf(model, architecture), architecture, 24, 0.25, states=states)
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.is_powerinfer
        assert file.get("powerinfer.sparse_threshold") == 0.25
        assert set(file.tensors) == set(sparse.tensors)
        for tensor in sparse.tensors:
            ours = file.tensor(tensor)
            assert ours is not None
            np.testing.assert_array_equal(ours.dequantize(), sparse.tensors[tensor].dequantize())
    check_logits(model, tmp_path / "out.gguf")


def test_a_dense_bamboo(tmp_path: Path) -> None:
    model = random_model(SPARSE["bamboo"])
    folder = save_folder(tmp_path / "hf", model)
    edit_json(folder / "config.json", architectures=["BambooForCausalLM"], model_type="bamboo")
    make_drelu(model)
    check_logits(model, converted(folder))


def test_prosparse_has_a_threshold(tmp_path: Path) -> None:
    model = random_model(SPARSE["llama"])
    folder = save_folder(tmp_path / "hf", model)
    edit_json(
        folder / "config.json", architectures=["SparseLlamaForCausalLM"], hidden_act="fatrelu", hidden_act_param=0.3
    )
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda _, args, y: torch.where(y > 0.3, y, 0.0))
    path = converted(folder)
    feed_forward = load(path).spec.layers[0].feed_forward
    assert feed_forward.activation is Activation.RELU
    assert feed_forward.activation_threshold == pytest.approx(0.3)
    check_logits(model, path)


def test_the_check_finds_a_wrong_file(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    path = converted(folder)
    with GGUFWriter(tmp_path / "wrong.gguf") as writer, open_gguf(path) as file:
        writer.copy_metadata(file.metadata)
        for info in file.tensors.values():
            writer.declare_tensor(info.name, info.layout, info.shape)
        for name in file.tensors:
            other = {"blk.0.attn_k.weight": "blk.0.attn_v.weight", "blk.0.attn_v.weight": "blk.0.attn_k.weight"}
            writer.write_tensor(name, file.tensor_bytes(other.get(name, name)))
    lines: list[str] = []
    assert (source_check.check_converted(path, folder, "f32", lines.append) or 1) < 1e-8
    for outtype in ("f32", "q8_0"):
        with pytest.raises(FormatError, match="the converted model is not the source: its logits differ by"):
            source_check.check_converted(tmp_path / "wrong.gguf", folder, outtype, lines.append)
    assert not lines


def test_a_failed_check_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama_folder(tmp_path / "hf")
    monkeypatch.setattr(source_check, "nmse", lambda ours, theirs: float("nan"))
    (tmp_path / "out").mkdir()
    result = convert(folder, "-o", tmp_path / "out" / "model.gguf")
    assert result.exit_code == 1
    assert "error: the converted model is not the source" in result.output
    assert not list((tmp_path / "out").iterdir())


def test_the_check_is_left_out_without_transformers_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama_folder(tmp_path / "hf")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "transformers", None)
        result = convert(folder, "-o", tmp_path / "out.gguf")
    assert result.exit_code == 0, result.output
    assert "not compared with the source: transformers is not installed" in result.output
    monkeypatch.setattr(source_check, "available_memory", lambda: 1000)
    result = convert(folder, "-o", tmp_path / "out.gguf")
    assert result.exit_code == 0, result.output
    assert "not compared with the source: that takes 0.0 GiB, 0.0 are free" in result.output
