"""Converting whole files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import quantize as gguf_quantize
from tiny_models import TinyFile, TinyLlama, tensor
from typer.testing import CliRunner

from powerinfer.cli import app
from powerinfer.cli.quantize import parse_arguments
from powerinfer.engine import SamplingParams, load
from powerinfer.engine.quantization_mix import FILE_TYPES
from powerinfer.engine.quantization_plan import Plan, QuantizeOptions, parse_file_type
from powerinfer.engine.quantize import QuantizeStep, quantize_file
from powerinfer.errors import FormatError, UsageError
from powerinfer.formats import TensorInfo, open_gguf
from powerinfer.quantization import TYPES, QuantTensor

SHAPE = TinyLlama(n_embd=256, head_dim=64, n_head=4, n_ff=96, rank=32, kind="F16", sparse=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return SHAPE.build().write(tmp_path / "source.gguf")


def types_of(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: info.type_name for name, info in file.tensors.items()}


def test_q4_0_converts_all_but_the_head_and_vectors(source: Path, tmp_path: Path) -> None:
    steps: list[QuantizeStep] = []
    summary = quantize_file(source, tmp_path / "out.gguf", "q4_0", on_step=steps.append)
    types = types_of(tmp_path / "out.gguf")
    assert types.pop("output.weight") == "Q6_K"
    assert {kind for name, kind in types.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in types.items() if "norm" not in name} == {"Q4_0"}
    with open_gguf(tmp_path / "out.gguf") as out, open_gguf(source) as before:
        assert out.is_powerinfer
        assert out.get("general.file_type") == 2
        assert out.get("general.quantization_version") == 2
        added = {"general.file_type", "general.quantization_version"}
        assert {key: str(value) for key, value in out.metadata.items() if key not in added} == {
            key: str(value) for key, value in before.metadata.items()
        }
        assert list(out.tensors) == list(before.tensors)
        assert summary.bytes_after == sum(info.nbytes for info in out.tensors.values())
        assert summary.bytes_before == sum(info.nbytes for info in before.tensors.values())
    assert [step.number for step in steps] == list(range(1, len(types) + 2))
    assert not summary.fallbacks


@pytest.mark.parametrize(
    ("name", "head", "predictor", "rest"),
    [
        ("f32", "F32", "F32", "F32"),
        ("F16", "F16", "F16", "F16"),
        ("32", "BF16", "BF16", "BF16"),
        ("q4_1", "Q6_K", "Q6_K", "Q4_1"),
        ("8", "Q6_K", "Q6_K", "Q5_0"),
        ("Q5_1", "Q6_K", "Q6_K", "Q5_1"),
        ("q8_0", "Q8_0", "Q8_0", "Q8_0"),
        ("q2_k", "Q6_K", "Q6_K", "Q2_K"),
        ("Q3_K_S", "Q6_K", "Q6_K", "Q3_K"),
        ("14", "Q6_K", "Q6_K", "Q4_K"),
        ("q5_K_s", "Q6_K", "Q6_K", "Q5_K"),
        ("18", "Q6_K", "Q6_K", "Q6_K"),
        ("copy", "F16", "F16", "F16"),
    ],
)
def test_each_target_has_its_mix(source: Path, tmp_path: Path, name: str, head: str, predictor: str, rest: str) -> None:
    quantize_file(source, tmp_path / "out.gguf", name)
    types = types_of(tmp_path / "out.gguf")
    assert types["output.weight"] == head
    assert types["blk.0.fc1.weight"] == predictor
    assert types["blk.1.fc2.weight"] == ("Q8_0" if predictor == "Q6_K" else predictor)  # rows of 32
    assert types["blk.0.ffn_up.weight"] == types["token_embd.weight"] == rest


def test_mixes_are_llama_cpps() -> None:
    """Against what its `quantize --dry-run` (0c1e570) says of llama files: types of each kind of matrix, by layer."""
    cases = json.loads((Path(__file__).parent / "test_quantize_mixes.json").read_text())
    for name, case in cases.items():
        file = llama_of(**case["shape"])
        for target, mixed in case["types"].items():
            plan = Plan(file, target, QuantizeOptions())
            for info in file.tensors.values():
                if info.type_name == "F32":
                    continue
                layer, _, part = info.name.removesuffix(".weight").removeprefix("blk.").rpartition(".")
                runs = [run.split("*") for run in mixed.get(part, f"999*{FILE_TYPES[target].base}").split()]
                want = [kind for n, kind in runs for _ in range(int(n))][int(layer or 0)]
                kind = plan.type_of(info)
                have = kind.name if kind else info.type_name
                # PowerInfer's fallback, which costs a little more and errs less
                assert have == want or (have, want) == ("Q4_1", "Q4_0"), (name, target, info.name, have, want)


def llama_of(layers: int, kv: int, tied: int, embd: int, ff: int, experts: int) -> Any:
    """What a plan sees of a llama file of 8 heads in F16."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (64, embd), "output_norm": (embd,)}
    if not tied:
        shapes["output"] = (64, embd)
    for i in range(layers):
        sizes = {"attn_q": (embd, embd), "attn_k": (embd // 8 * kv, embd), "attn_v": (embd // 8 * kv, embd)}
        sizes |= {"attn_output": (embd, embd), "attn_norm": (embd,), "ffn_norm": (embd,)}
        stack = (experts,) if experts else ()
        suffix = "_exps" if experts else ""
        sizes |= {f"ffn_{name}{suffix}": (*stack, ff, embd) for name in ("gate", "up")}
        sizes |= {f"ffn_down{suffix}": (*stack, embd, ff)}
        if experts:
            sizes["ffn_gate_inp"] = (experts, embd)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in sizes.items()}
    keys = {"block_count": layers, "attention.head_count": 8, "attention.head_count_kv": kv, "expert_count": experts}
    metadata: dict[str, Any] = {f"llama.{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = "llama"
    kinds = [TYPES.by_name("F32"), TYPES.by_name("F16")]
    infos = (
        TensorInfo(f"{name}.weight", kinds[len(shape) > 1], kinds[len(shape) > 1], shape, 0, 0)
        for name, shape in shapes.items()
    )
    return SimpleNamespace(get=metadata.get, tensors={info.name: info for info in infos})


def test_falcon_has_its_own_mix() -> None:
    file = llama_of(layers=16, kv=8, tied=0, embd=256, ff=512, experts=0)
    as_falcon = SimpleNamespace(
        get=lambda key, default=None: {
            "general.architecture": "falcon", "falcon.block_count": 16, "falcon.attention.head_count": 8
        }.get(key, default),
        tensors={name.replace("attn_v", "attn_qkv"): replace(info, name=name.replace("attn_v", "attn_qkv"))
                 for name, info in file.tensors.items()},
    )  # fmt: skip
    types = {}
    for target in ("Q3_K_M", "Q4_K_M", "Q4_0"):
        plan = Plan(as_falcon, target, QuantizeOptions())
        types[target] = {name: plan.type_of(info) for name, info in as_falcon.tensors.items()}
    names = {target: {name: kind.name for name, kind in of.items() if kind} for target, of in types.items()}
    assert {of["output.weight"] for of in names.values()} == {"Q8_0"}
    assert [names["Q3_K_M"][f"blk.{i}.ffn_down.weight"] for i in (0, 1, 2, 4, 15)] == [
        "Q5_K", "Q4_K", "Q3_K", "Q4_K", "Q4_K"
    ]  # fmt: skip
    assert [names["Q4_K_M"][f"blk.{i}.ffn_down.weight"] for i in (0, 1, 2, 4, 15)] == [
        "Q6_K", "Q5_K", "Q4_K", "Q5_K", "Q5_K"
    ]  # fmt: skip
    assert names["Q4_K_M"]["blk.1.attn_qkv.weight"] == "Q6_K"
    assert names["Q3_K_M"]["blk.1.attn_output.weight"] == "Q3_K"


def test_options_change_the_mix(source: Path, tmp_path: Path) -> None:
    quantize_file(source, tmp_path / "pure.gguf", "q4_1", QuantizeOptions(pure=True))
    assert {k for n, k in types_of(tmp_path / "pure.gguf").items() if "norm" not in n} == {"Q4_1"}
    quantize_file(source, tmp_path / "leave.gguf", "q4_0", QuantizeOptions(leave_output_tensor=True))
    assert types_of(tmp_path / "leave.gguf")["output.weight"] == "F16"
    own = QuantizeOptions(output_tensor_type="q5_1", token_embedding_type="bf16")
    quantize_file(source, tmp_path / "own.gguf", "q4_k_m", own)
    types = types_of(tmp_path / "own.gguf")
    assert (types["output.weight"], types["token_embd.weight"]) == ("Q5_1", "BF16")


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    source = TinyLlama(n_embd=256, head_dim=64, n_head=4, n_ff=256, tied=True).build().write(tmp_path / "tied.gguf")
    for options, want in (
        (QuantizeOptions(), "Q6_K"),
        (QuantizeOptions(leave_output_tensor=True), "Q6_K"),
        (QuantizeOptions(output_tensor_type="Q8_0"), "Q8_0"),
        (QuantizeOptions(output_tensor_type="Q8_0", token_embedding_type="F16"), "F16"),
        (QuantizeOptions(pure=True), "Q4_K"),
    ):
        quantize_file(source, tmp_path / "out.gguf", "q4_k", options)
        assert types_of(tmp_path / "out.gguf")["token_embd.weight"] == want


@pytest.mark.parametrize(
    ("target", "asked", "fc1", "fc2"),
    [
        ("q4_0", None, "Q4_0", "Q4_0"),
        ("q4_0", "powerinfer", "Q4_0", "Q4_0"),
        ("q4_k_m", "PowerInfer", "Q5_0", "Q5_0"),
        ("q8_0", "powerinfer", "Q5_0", "Q5_0"),
        ("q4_0", "q8_0", "Q8_0", "Q8_0"),
        ("q4_0", "Q5_K", "Q5_K", "Q5_1"),
        ("f16", "f32", "F32", "F32"),
    ],
)
def test_predictors_have_a_type_of_their_own(
    source: Path, tmp_path: Path, target: str, asked: str | None, fc1: str, fc2: str
) -> None:
    quantize_file(source, tmp_path / "out.gguf", target, QuantizeOptions(predictor_type=asked))
    types = types_of(tmp_path / "out.gguf")
    assert (types["blk.0.fc1.weight"], types["blk.0.fc2.weight"]) == (fc1, fc2)


@pytest.mark.parametrize("option", ["output_tensor_type", "token_embedding_type", "predictor_type"])
def test_unknown_types_are_refused(source: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match=r"unknown tensor type 'q4_k_m': choose one of .*Q6_K.*F32"):
        quantize_file(source, tmp_path / "out.gguf", "q4_0", QuantizeOptions(**{option: "q4_k_m"}))
    assert not (tmp_path / "out.gguf").exists()


def test_rows_that_do_not_divide_fall_back(tmp_path: Path) -> None:
    source = TinyLlama(n_embd=96, n_ff=100, kind="F32").build().write(tmp_path / "odd.gguf")
    summary = quantize_file(source, tmp_path / "out.gguf", "q4_0")
    types = types_of(tmp_path / "out.gguf")
    assert types["output.weight"] == "Q8_0"  # no blocks of 256
    assert types["blk.0.ffn_down.weight"] == "F16"  # rows of 100
    assert summary.fallbacks == {"blk.0.ffn_down.weight": "F16", "blk.1.ffn_down.weight": "F16"}
    for target, want in (("q2_k", "Q4_0"), ("q3_k", "Q4_1"), ("q4_k", "Q5_0"), ("q5_k", "Q5_1"), ("q6_k", "Q8_0")):
        summary = quantize_file(source, tmp_path / "out.gguf", target, QuantizeOptions(pure=True))
        assert types_of(tmp_path / "out.gguf")["blk.0.attn_q.weight"] == want
        assert summary.fallbacks["blk.0.attn_q.weight"] == want
        assert summary.fallbacks["blk.1.ffn_down.weight"] == "F16"


def test_relu_a_is_byte_for_byte_gguf_pys(shared_data: Path, tmp_path: Path) -> None:
    quantize_file(shared_data / "relu-a" / "relu-a-f16.powerinfer.gguf", tmp_path / "out.gguf", "q4_0")
    with (
        open_gguf(shared_data / "relu-a" / "relu-a-f16.powerinfer.gguf") as before,
        open_gguf(tmp_path / "out.gguf") as out,
    ):
        for name, info in out.tensors.items():
            source, have = before.tensor(name), out.tensor(name)
            assert source is not None
            assert have is not None
            if info.type_name == "Q4_0":
                want = gguf_quantize(source.dequantize(), gguf.GGMLQuantizationType.Q4_0)
                np.testing.assert_array_equal(have.data, want)
            elif name == "output.weight":
                assert info.type_name == "Q8_0"  # rows of 128
            else:
                np.testing.assert_array_equal(have.dequantize(), source.dequantize())


@pytest.mark.parametrize("target", ["q8_0", "q6_k"])
def test_a_converted_model_still_runs(source: Path, tmp_path: Path, target: str) -> None:
    quantize_file(source, tmp_path / "out.gguf", target)
    greedy = SamplingParams(temp=0)
    texts = [
        "".join(load(path).generate([1, 7, 9], n_predict=6, sampling=greedy, ignore_eos=True))
        for path in (source, tmp_path / "out.gguf")
    ]
    assert texts[0].split()[0] == texts[1].split()[0]


def test_the_input_is_never_the_output(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    (tmp_path / "symlink.gguf").symlink_to(source)
    (tmp_path / "hardlink.gguf").hardlink_to(source)
    for target in (source, tmp_path / "symlink.gguf", tmp_path / "hardlink.gguf"):
        with pytest.raises(UsageError, match="is the input itself"):
            quantize_file(source, target, "q4_0")
    assert source.read_bytes() == before


def test_quantized_tensors_are_converted_only_if_asked(source: Path, tmp_path: Path) -> None:
    quantize_file(source, tmp_path / "q4.gguf", "q4_0")
    with pytest.raises(UsageError, match="is Q4_0 already"):
        quantize_file(tmp_path / "q4.gguf", tmp_path / "q8.gguf", "q8_0")
    assert not (tmp_path / "q8.gguf").exists()
    quantize_file(tmp_path / "q4.gguf", tmp_path / "q8.gguf", "q8_0", QuantizeOptions(allow_requantize=True))
    quantize_file(tmp_path / "q4.gguf", tmp_path / "again.gguf", "q4_0")  # nothing to convert
    assert types_of(tmp_path / "again.gguf") == types_of(tmp_path / "q4.gguf")


def test_numbers_that_are_not_finite_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    file: TinyFile = SHAPE.build()
    bad = file.tensors["blk.1.ffn_up.weight"].dequantize().copy()
    bad[3, 5] = np.nan
    file.tensors["blk.1.ffn_up.weight"] = tensor(bad)
    source = file.write(tmp_path / "bad.gguf")
    for target in ("q4_0", "q4_k", "f16", "bf16"):
        with pytest.raises(FormatError, match=r"blk\.1\.ffn_up\.weight has numbers that are infinite or not numbers"):
            quantize_file(source, tmp_path / "out.gguf", target, QuantizeOptions(allow_requantize=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf"]


@pytest.mark.parametrize(("target", "size"), [("q4_0", 1e8), ("q4_k", 1e9), ("f16", 65520), ("bf16", 3.4e38)])
def test_numbers_too_large_are_refused(tmp_path: Path, target: str, size: float) -> None:
    file: TinyFile = SHAPE.build()
    large = file.tensors["blk.0.ffn_up.weight"].dequantize().copy()
    large[7, 9] = size
    file.tensors["blk.0.ffn_up.weight"] = tensor(large)
    source = file.write(tmp_path / "large.gguf")
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.weight has numbers as large as .*, too large for"):
        quantize_file(source, tmp_path / "out.gguf", target)
    quantize_file(source, tmp_path / "out.gguf", "f32")


@pytest.mark.parametrize("target", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_the_number_of_threads_changes_nothing(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer.engine.quantize.PIECE", 1000)
    source = TinyLlama(n_embd=512, n_head=8, head_dim=64, n_ff=768, kind="F16").build().write(tmp_path / "source.gguf")
    for n in (1, 3):
        quantize_file(source, tmp_path / f"{n}.gguf", target, QuantizeOptions(n_threads=n))
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_stacked_experts_are_quantized(tmp_path: Path) -> None:
    file = SHAPE.build()
    stack = np.random.default_rng(1).standard_normal((3, 40, 256)).astype(np.float32)
    kind = TYPES.by_name("F32")
    data = kind.quantize_rows(stack.reshape(-1, 256))
    file.tensors["blk.0.ffn_up_exps.weight"] = QuantTensor(kind, (3, 40, 256), data)
    quantize_file(file.write(tmp_path / "source.gguf"), tmp_path / "out.gguf", "q8_0")
    with open_gguf(tmp_path / "out.gguf") as out:
        have = out.tensor("blk.0.ffn_up_exps.weight")
        assert have is not None
        assert (have.type.name, have.shape) == ("Q8_0", (3, 40, 256))
        np.testing.assert_allclose(have.dequantize(), stack, atol=0.02)


def test_a_dry_run_shows_the_plan_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    wet = quantize_file(source, tmp_path / "out.gguf", "q4_k_m")
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["quantize", "--dry-run", str(source), "q4_k_m"])
    assert result.exit_code == 0
    assert sorted(tmp_path.iterdir()) == before
    lines = result.stdout.splitlines()
    kinds = [found.group(1) for line in lines if (found := re.search(r"-> (\w+),", line))]
    assert kinds == list(types_of(tmp_path / "out.gguf").values())
    assert "(not written)" in result.stderr
    assert f"-> {wet.bytes_after / 2**20:.2f} MB" in result.stderr


def test_arguments_are_llama_cpps() -> None:
    assert parse_arguments(["a/in.gguf", "q4_0"]) == (Path("a/in.gguf"), Path("a/ggml-model-Q4_0.gguf"), "Q4_0", 0)
    assert parse_arguments(["in.gguf", "2", "3"]) == (Path("in.gguf"), Path("ggml-model-Q4_0.gguf"), "Q4_0", 3)
    assert parse_arguments(["in.gguf", "out.gguf", "f16"]) == (Path("in.gguf"), Path("out.gguf"), "F16", 0)
    assert parse_arguments(["in.gguf", "out.gguf", "7", "8"]) == (Path("in.gguf"), Path("out.gguf"), "Q8_0", 8)
    for wrong in (
        ["in.gguf"],
        ["in.gguf", "q9"],
        ["in", "q4_0", "x"],
        ["in", "out", "q4_0", "0"],
        ["in", "q4_0", "1", "1"],
    ):
        with pytest.raises(UsageError):
            parse_arguments(wrong)
    assert parse_file_type("bf16") == "BF16"
    assert [parse_file_type(name) for name in ("q3_k", "Q4_K", "q5_K")] == ["Q3_K_M", "Q4_K_M", "Q5_K_M"]
    numbers = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"}
    numbers |= {12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"}
    numbers |= {32: "BF16"}
    assert {n: parse_file_type(str(n)) for n in numbers} == numbers
    with pytest.raises(UsageError, match="unknown type '4'"):
        parse_file_type("4")


def test_the_command_reports_each_tensor_and_the_sum(source: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(source), "q4_0"])
    assert result.exit_code == 0
    assert (source.parent / "ggml-model-Q4_0.gguf").is_file()
    assert "blk.0.fc1.weight" in result.stderr
    assert "bits a weight" in result.stderr
    assert "warning" not in result.stderr


def test_the_command_sums_up_what_could_not_have_its_type(tmp_path: Path) -> None:
    source = TinyLlama(n_embd=96, n_ff=100, kind="F32").build().write(tmp_path / "odd.gguf")
    result = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out.gguf"), "q4_k_s"])
    assert result.exit_code == 0
    assert "warning: 15 tensors could not have their type" in result.stderr
    assert "2 F16" in result.stderr


def test_a_full_disk_leaves_the_target_untouched(source: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk."""
    (tmp_path / "out.gguf").write_text("as it was")
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from powerinfer.cli import run_app\n"
        f"sys.exit(run_app(['quantize', {str(source)!r}, {str(tmp_path / 'out.gguf')!r}, 'q8_0']))\n"
    )
    # elsewhere, as Python looks for packages where it is started, and a checkout has none that are compiled
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source.parent)
    assert result.returncode == 1
    assert "error: cannot write" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "out.gguf").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "source.gguf"]
