"""Converting whole files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize as gguf_quantize
from tiny_models import TinyFile, TinyLlama, tensor
from typer.testing import CliRunner

from powerinfer.cli import app
from powerinfer.cli.quantize import parse_arguments
from powerinfer.engine import SamplingParams, load
from powerinfer.engine.quantize import QuantizeOptions, QuantizeStep, parse_file_type, quantize_file
from powerinfer.errors import FormatError, UsageError
from powerinfer.formats import open_gguf

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
        ("q4_1", "Q6_K", "Q5_0", "Q4_1"),
        ("8", "Q6_K", "Q5_0", "Q5_0"),
        ("Q5_1", "Q6_K", "Q5_0", "Q5_1"),
        ("q8_0", "Q8_0", "Q5_0", "Q8_0"),
        ("copy", "F16", "F16", "F16"),
    ],
)
def test_each_target_has_its_mix(source: Path, tmp_path: Path, name: str, head: str, predictor: str, rest: str) -> None:
    quantize_file(source, tmp_path / "out.gguf", name)
    types = types_of(tmp_path / "out.gguf")
    assert types["output.weight"] == head
    assert types["blk.0.fc1.weight"] == types["blk.1.fc2.weight"] == predictor
    assert types["blk.0.ffn_down_t.weight"] == types["token_embd.weight"] == rest


def test_options_change_the_mix(source: Path, tmp_path: Path) -> None:
    quantize_file(source, tmp_path / "pure.gguf", "q4_1", QuantizeOptions(pure=True))
    assert {k for n, k in types_of(tmp_path / "pure.gguf").items() if "norm" not in n} == {"Q4_1"}
    quantize_file(source, tmp_path / "leave.gguf", "q4_0", QuantizeOptions(leave_output_tensor=True))
    assert types_of(tmp_path / "leave.gguf")["output.weight"] == "F16"


def test_rows_that_do_not_divide_fall_back(tmp_path: Path) -> None:
    source = TinyLlama(n_embd=96, n_ff=100, kind="F32").build().write(tmp_path / "odd.gguf")
    summary = quantize_file(source, tmp_path / "out.gguf", "q4_0")
    types = types_of(tmp_path / "out.gguf")
    assert types["output.weight"] == "Q8_0"  # no blocks of 256
    assert types["blk.0.ffn_down.weight"] == "F16"  # rows of 100
    assert summary.fallbacks == {"blk.0.ffn_down.weight": "F16", "blk.1.ffn_down.weight": "F16"}


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


def test_a_converted_model_still_runs(source: Path, tmp_path: Path) -> None:
    quantize_file(source, tmp_path / "out.gguf", "q8_0")
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
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_up\.weight has numbers"):
        quantize_file(source, tmp_path / "out.gguf", "q4_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf"]


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
    with pytest.raises(UsageError, match="unknown type '4'"):
        parse_file_type("4")


def test_the_command_reports_each_tensor_and_the_sum(source: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(source), "q4_0"])
    assert result.exit_code == 0
    assert (source.parent / "ggml-model-Q4_0.gguf").is_file()
    assert "blk.0.fc1.weight" in result.stderr
    assert "bits a weight" in result.stderr


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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "error: cannot write" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "out.gguf").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "source.gguf"]
