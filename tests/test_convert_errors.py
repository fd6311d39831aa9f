"""Folders that cannot be converted: one line that names what is wrong, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_folders import DECODER, edit_json, llama_folder, save_predictors  # noqa: E402

from powerinfer.convert import ConvertOptions, convert_folder  # noqa: E402
from powerinfer.convert.safetensors_file import SafetensorsFile  # noqa: E402
from powerinfer.errors import FormatError, PowerInferError, UnsupportedError, UsageError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("whole") / "hf")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("shards") / "hf", max_shard_size="100KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "hf"))


@pytest.fixture
def sharded(shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shards, tmp_path / "hf"))


def refused(error: type[PowerInferError], match: str, folder: Path, **options: Any) -> None:
    """Converting fails with one line, and the target's folder stays empty."""
    out = folder.parent / "out"
    out.mkdir(exist_ok=True)
    with pytest.raises(error, match=match) as raised:
        convert_folder(folder, out / "model.gguf", ConvertOptions(**options))
    assert "\n" not in str(raised.value)
    assert not list(out.iterdir())


def change_settings(folder: Path, changes: dict[str, Any]) -> None:
    """Changes config.json; rotary settings as transformers 4 writes them stand alone."""
    newer = {"rope_parameters": None} if "rope_scaling" in changes else {}
    edit_json(folder / "config.json", **newer, **changes)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], data: bytes | None = None) -> None:
    """Changes a safetensors file's header, and its data if given."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + (raw[8 + length :] if data is None else data))


def test_folders_that_are_none(folder: Path, tmp_path: Path) -> None:
    refused(UsageError, "is no folder: expected one with a Hugging Face model", tmp_path / "missing")
    refused(UsageError, r"unknown type 'q3': choose one of f32, f16, bf16, q8_0", folder, outtype="q3")
    (folder / "tokenizer.json").unlink()
    refused(UsageError, r"hf has no tokenizer: expected tokenizer\.model", folder)
    (folder / "model.safetensors").unlink()
    refused(UsageError, r"hf has no weights: expected model\.safetensors or", folder)
    (folder / "config.json").unlink()
    refused(UsageError, r"hf has no config\.json", folder)


def test_a_target_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a directory"):
        convert_folder(folder, tmp_path)
    with pytest.raises(UsageError, match=r"cannot write .*missing/model\.gguf: No such file"):
        convert_folder(folder, tmp_path / "missing" / "model.gguf")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="is a file of the model itself: choose another output"):
        convert_folder(folder, folder / "model.safetensors")
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architectures": ["BertModel"]}, UnsupportedError, "models of the class 'BertModel' cannot be converted"),
        ({"architectures": None}, FormatError, "architectures is None: expected the name"),
        ({"hidden_size": "64"}, FormatError, "hidden_size is '64': expected an integer from 1"),
        ({"hidden_size": 10**9}, FormatError, "hidden_size is 1000000000: expected an integer from 1"),
        ({"num_hidden_layers": None}, FormatError, "lacks num_hidden_layers: the file is incomplete"),
        ({"num_key_value_heads": 3}, FormatError, "4 attention heads are no multiple of 3"),
        ({"head_dim": 15}, FormatError, "a head has 15 elements: rotary positions need an even number"),
        ({"intermediate_size": 71}, FormatError, "is 72 x 64, expected 71 x 64: the weights do not fit config"),
        ({"num_hidden_layers": 1}, FormatError, r"has the tensor model\.layers\.1\..*, which is unknown in a llama"),
        ({"num_hidden_layers": 3}, FormatError, r"lacks the tensor model\.layers\.2\."),
        ({"hidden_act": "tanh"}, UnsupportedError, "hidden_act is 'tanh': known activations are relu"),
        ({"hidden_act": "fatrelu", "hidden_act_param": -1}, FormatError, "hidden_act_param is -1: expected a number"),
        ({"rms_norm_eps": 0}, FormatError, "rms_norm_eps is 0: expected a number above 0"),
        ({"attention_bias": 1}, FormatError, "attention_bias is 1: expected true or false"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedError, "rotary scaling 'dynamic' of llama is not"),
        ({"rope_scaling": {"type": "linear"}}, FormatError, "rope scaling lacks factor"),
        ({"rope_scaling": 7}, FormatError, "rope_scaling is 7: expected an object"),
        ({"quantization_config": {"bits": 4}}, UnsupportedError, "the model is quantized"),
    ],
)
def test_settings(changes: dict[str, Any], error: type[PowerInferError], match: str, folder: Path) -> None:
    change_settings(folder, changes)
    refused(error, match, folder)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("FalconForCausalLM", {"alibi": True}, "alibi is True: such models are not supported"),
        ("FalconForCausalLM", {"parallel_attn": False}, "parallel_attn is False: such models"),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before is False: such models"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32: such models"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0: such"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar is 100: files of Gemma 3"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "use_sliding_window is true",
        ),
        ("Qwen3ForCausalLM", {"rope_scaling": {"rope_type": "llama3"}}, "rotary scaling 'llama3' of qwen3 is not"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "mscale": 2.0}}, r"mscale is 2\.0: such models"),
    ],
)
def test_what_families_lack(name: str, changes: dict[str, Any], match: str, folder: Path) -> None:
    change_settings(folder, {"architectures": [name]} | changes)
    refused(UnsupportedError, match, folder)


def test_truncated_and_damaged_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-100])
    refused(FormatError, r"ends at byte \d+ of the data, but there are \d+: the file is cut off", folder)
    path.write_bytes(raw[:5])
    refused(FormatError, "the header has .* it is cut off or no safetensors file", folder)
    path.write_bytes(raw[:100])
    refused(FormatError, "it is cut off or no safetensors file", folder)
    path.write_bytes(b"")
    refused(FormatError, "the file is empty", folder)
    path.write_bytes(struct.pack("<Q", 1 << 62) + raw[8:])
    refused(FormatError, "the header has 4611686018427387904 bytes", folder)
    path.write_bytes(struct.pack("<Q", 4) + b"[[[[")
    refused(FormatError, r"the header of .*model\.safetensors is no JSON", folder)
    deep = b'{"a":' + b"[" * 200_000
    path.write_bytes(struct.pack("<Q", len(deep)) + deep)
    refused(FormatError, r"the header of .*model\.safetensors is no JSON", folder)


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]},
        {"dtype": 3, "shape": [4], "data_offsets": [0, 16]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
    ],
)
def test_damaged_entries(entry: Any, tmp_path: Path) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises((FormatError, UnsupportedError), match=r"a\.safetensors: (the tensor 'w'|w is of type Q9)"):
        SafetensorsFile(path)


def test_any_flip_in_a_header_is_an_error_or_a_file(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    raw = struct.pack("<Q", len(header)) + header + bytes(range(16))
    rng = np.random.default_rng(0)
    path = tmp_path / "a.safetensors"
    messages = []
    for _ in range(200):
        damaged = bytearray(raw)
        damaged[rng.integers(len(raw) - 16)] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            file = SafetensorsFile(path)
            for name, shape in file.shapes.items():
                assert file.tensor(name).data.shape == shape
        except PowerInferError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


def test_shards(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    contents = json.loads(index.read_text())
    weight_map = contents["weight_map"]
    files = list(weight_map.values())
    first = next(file for file in files if files.count(file) > 1)
    name = next(name for name, file in weight_map.items() if file == first)

    def with_map(changes: dict[str, Any]) -> None:
        index.write_text(json.dumps({"weight_map": weight_map | changes}))

    with_map({"extra.weight": first})
    refused(FormatError, f"{first} lacks the tensor 'extra.weight', which model.safetensors.index.json", sharded)
    with_map({name: "../../secret"})
    refused(FormatError, r"into '\.\./\.\./secret': expected the name of a file beside it", sharded)
    with_map({name: 3})
    refused(FormatError, "into 3: expected the name of a file beside it", sharded)
    with_map({name: "model-9.safetensors"})
    refused(FormatError, r"the shard .*model-9\.safetensors is missing", sharded)
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if k != name}}))
    refused(FormatError, f"has the tensor '{name}', of which model.safetensors.index.json says nothing", sharded)
    index.write_text("{}")
    refused(FormatError, "has no weight_map", sharded)
    index.write_text(json.dumps(contents))
    raw = (sharded / first).read_bytes()
    (sharded / first).write_bytes(raw[: len(raw) // 2])
    refused(FormatError, f"{first}.*the file is cut off", sharded)
    (sharded / first).unlink()
    refused(FormatError, f"the shard .*{first} is missing: model.safetensors.index.json names it", sharded)


def test_missing_and_unknown_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    rewrite(path, lambda header: header.pop("model.norm.weight"))
    refused(FormatError, r"the model lacks the tensor model\.norm\.weight", folder)
    rewrite(path, lambda header: header.update({"model.norm.weight": header["model.layers.0.input_layernorm.weight"]}))
    rewrite(path, lambda header: header.update({"surplus": header["model.norm.weight"]}))
    refused(FormatError, "the model has the tensor surplus, which is unknown in a llama model", folder)
    rewrite(path, lambda header: header.pop("surplus"))
    # frequencies that older versions saved are left out
    rewrite(
        path, lambda header: header.update({"model.layers.0.self_attn.rotary_emb.inv_freq": header["lm_head.weight"]})
    )
    convert_folder(folder, folder.parent / "out.gguf")


def test_types_that_are_not_converted(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["dtype"] = "I32"

    rewrite(folder / "model.safetensors", change)
    refused(UnsupportedError, r"model\.norm\.weight is of type I32: only F64, F32, F16, BF16", folder)


def set_value(folder: Path, name: str, value: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_numbers_that_a_type_cannot_hold(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    set_value(folder, name, 70000.0)
    refused(FormatError, f"{name} has numbers as large as 70000, too large for F16: choose F32 or BF16", folder)
    set_value(folder, name, 1e7)
    refused(FormatError, f"{name} has numbers as large as .*, too large for Q8_0", folder, outtype="q8_0")
    for outtype in ("f32", "bf16"):
        convert_folder(folder, folder.parent / "out.gguf", ConvertOptions(outtype))
    for bad in (float("nan"), float("inf")):
        set_value(folder, name, bad)
        for outtype in ("f32", "f16", "bf16", "q8_0"):
            refused(FormatError, f"{name} has numbers that are infinite or not numbers", folder, outtype=outtype)
    set_value(folder, name, 0.0)
    set_value(folder, "model.norm.weight", 1e9)  # vectors are F32
    convert_folder(folder, folder.parent / "out.gguf")


def test_an_interrupt_leaves_nothing(folder: Path) -> None:
    out = folder.parent / "out"
    out.mkdir()

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    for how in ({"on_step": stop}, {"check": stop}):
        with pytest.raises(KeyboardInterrupt):
            convert_folder(folder, out / "model.gguf", **how)  # type: ignore[arg-type]
        assert not list(out.iterdir())


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["POWERINFER_TEST_TRAP"],)


def write_malicious(path: Path, monkeypatch: pytest.MonkeyPatch, trap: Path) -> None:
    monkeypatch.setenv("POWERINFER_TEST_TRAP", str(trap))
    torch.save({"fc1.weight": Malicious()}, path)


def test_bin_files_that_are_no_state_dicts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    write_malicious(path, monkeypatch, tmp_path / "trap")
    refused(FormatError, r"cannot read .*pytorch_model\.bin: no state dict that is plain tensors", folder)
    path.write_bytes(pickle.dumps(Malicious()))
    refused(FormatError, r"cannot read .*pytorch_model\.bin", folder)
    assert not (tmp_path / "trap").exists()
    torch.save({"w": torch.zeros(3)}, path)
    path.write_bytes(path.read_bytes()[:-200])
    refused(FormatError, r"cannot read .*pytorch_model\.bin", folder)
    for value in ([1], {"w": 3}, {3: torch.zeros(1)}, {"w": torch.zeros(2, 2).to_sparse()}):
        torch.save(value, path)
        refused(FormatError, r"pytorch_model\.bin.*expected a state dict", folder)
    torch.save({"w": torch.zeros(1).expand(10**9, 10**9)}, path)  # 4 bytes said to be 4e18
    refused(FormatError, r"pytorch_model\.bin: 'w' is not a plain tensor", folder)


@pytest.fixture
def relu(folder: Path) -> Path:
    edit_json(folder / "config.json", hidden_act="relu")
    return folder


def test_predictors_of_another_model(relu: Path, tmp_path: Path) -> None:
    missing = tmp_path / "predictors"
    refused(UsageError, "predictors is no folder", relu, predictors=missing)
    missing.mkdir()
    refused(UsageError, "has no predictors: expected model_0.pt", relu, predictors=missing)
    for shape in ({"n_embd": 60}, {"n_ff": 64}):
        wrong = save_predictors(tmp_path / "wrong", **shape)
        refused(
            FormatError,
            r"model_0\.pt: fc1 and fc2 are .*, expected r x 64 and 72 x r: .* another",
            relu,
            predictors=wrong,
        )
    few = save_predictors(tmp_path / "few", n_layers=1)
    refused(FormatError, "does not fit a model of 2 layers: model_1.pt is missing", relu, predictors=few)
    many = save_predictors(tmp_path / "many", n_layers=3)
    refused(FormatError, "does not fit a model of 2 layers: it has 3 predictors", relu, predictors=many)


def test_damaged_predictors(relu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictors = save_predictors(tmp_path / "predictors")
    path = predictors / "model_1.pt"
    fc1, fc2 = torch.zeros(24, 64), torch.zeros(72, 24)
    for state, match in (
        ({"fc1.weight": fc1}, r"model_1\.pt has the tensors \['fc1\.weight'\]: expected fc1\.weight and fc2"),
        ({"fc1.weight": fc1, "fc2.weight": fc2, "fc2.bias": fc2}, r"model_1\.pt has the tensors"),
        ({"fc1.weight": fc1, "fc2.weight": fc2[:, :20]}, "fc1 and fc2 are 24 x 64 and 72 x 20"),
        ({"fc1.weight": fc1[0], "fc2.weight": fc2}, "fc1 and fc2 are 64 and 72 x 24"),
        ({"fc1.weight": fc1[:0], "fc2.weight": fc2[:, :0]}, "fc1 and fc2 are 0 x 64 and 72 x 0"),
        ({"fc1.weight": fc1 * float("nan"), "fc2.weight": fc2}, r"fc1\.weight has numbers that are infinite or not"),
    ):
        torch.save(state, path)
        refused(FormatError, match, relu, predictors=predictors)
    torch.save({"fc1.weight": fc1.int(), "fc2.weight": fc2}, path)
    refused(UnsupportedError, r"fc1\.weight is of type torch\.int32", relu, predictors=predictors)
    write_malicious(path, monkeypatch, tmp_path / "trap")
    refused(FormatError, r"cannot read .*model_1\.pt: no state dict that is plain tensors", relu, predictors=predictors)
    assert not (tmp_path / "trap").exists()
    save_predictors(predictors)
    (predictors / "config.json").write_text('{"sparse_threshold": "high"}')
    refused(FormatError, "sparse_threshold is 'high': expected a finite number", relu, predictors=predictors)


def test_models_that_take_no_predictors(folder: Path, tmp_path: Path) -> None:
    predictors = save_predictors(tmp_path / "predictors")
    refused(UsageError, "the model's activation is silu: predictors are for ReLU models", folder, predictors=predictors)
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"], hidden_act="relu")
    refused(UnsupportedError, "sparse files of the architecture qwen3 are not supported", folder, predictors=predictors)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    """32 MB of matrices in half a dozen layers, converted in less than half of that."""
    import subprocess

    from hf_folders import save_folder
    from hf_gguf import random_model

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24, "head_dim": 128}
    folder = save_folder(tmp_path / "hf", random_model(transformers.LlamaConfig(**DECODER | sizes)))
    size = (folder / "model.safetensors").stat().st_size
    code = f"""
import re, pathlib
from powerinfer.convert import ConvertOptions, convert_folder
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10
import powerinfer.convert.torch_file, tokenizers
before = peak()
convert_folder({str(folder)!r}, {str(tmp_path / "out.gguf")!r}, ConvertOptions("f32"))
print(peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert size > 200 << 20
    assert int(run.stdout) < size // 4
