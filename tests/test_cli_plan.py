"""`powerinfer plan` and `run --print-placement`: without a GPU, without loading or writing anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyLlama
from typer.testing import CliRunner

from powerinfer.cli.app import app
from powerinfer.engine import devices as devices_module

SPEEDS = ["--gpu-bandwidth", "1000", "--cpu-bandwidth", "30", "--sync-time", "30"]
WHOLE = 1 << 20  # more than any of these models takes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return TinyLlama(sparse=True, n_layers=3, kind="F16").build().write(tmp_path / "m.gguf")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", "-c", "64", "-b", "16", "--device", "torch-cpu", *SPEEDS, *arguments])


def plan(model: Path, budget: int, *arguments: str) -> dict[str, Any]:
    result = invoke("-m", str(model), "--vram-budget", str(budget / 2**30), "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_parts_and_tensors_add_up_to_what_is_planned(model: Path) -> None:
    whole = plan(model, WHOLE)
    for part in range(11):
        budget = whole["planned"] * part // 10
        report = plan(model, budget)
        assert report["planned"] == sum(report["parts"].values()) <= budget
        weights = sum(size for name, size in report["parts"].items() if name not in ("workspace", "exchange"))
        assert weights == sum(report["tensors"].values())
        assert report["hot"] == sum(layer["hot"] for layer in report["layers"])
        assert report["tokens_per_second"] == pytest.approx(1 / report["seconds"])
    assert whole["hot"] == 300
    assert whole["head_on_gpu"] is True
    assert [path.name for path in model.parent.iterdir()] == ["m.gguf"]


def test_a_table_for_people(model: Path) -> None:
    half = plan(model, WHOLE)["planned"] - 60_000
    result = invoke("-m", str(model), "--vram-budget", str(half / 2**30), "--sweep")
    assert result.exit_code == 0
    for text in ("KV cache", "predictors", "share of activations", "tokens a second", "bound by the", "hot neurons"):
        assert text in result.stdout
    assert "powerinfer profile" in result.stderr
    sweep = result.stdout.split("| budget GiB")[1].splitlines()[2:]
    speeds = [float(line.split("|")[-2]) for line in sweep]
    assert len(speeds) >= 17
    assert min(speeds) > 0


def test_a_sweep_in_json(model: Path) -> None:
    whole = plan(model, WHOLE)["planned"]
    report = plan(model, whole // 2, "--sweep")
    budgets = [entry["budget"] for entry in report["sweep"]]
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (0, whole)
    assert any(abs(budget - whole // 2) <= 1 for budget in budgets)
    assert report["sweep"][0]["planned"] == 0


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture(model: Path, suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = model.with_name("plan" + suffix)
    result = invoke("-m", str(model), "--vram-budget", "0.0003", "--plot", str(path))
    assert result.exit_code == 0, result.stderr
    assert path.read_bytes().startswith(start)


def test_a_picture_needs_matplotlib(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = model.with_name("plan.png")
    result = invoke("-m", str(model), "--vram-budget", "1", "--plot", str(path))
    assert result.exit_code == 1
    assert "powerinfer[plot]" in result.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vram-budget", "nan"], "--vram-budget is nan"),
        (["--vram-budget", "1", "--plot", "x.gif"], "ends in .png or .svg"),
        (["--vram-budget", "1", "--gpu-bandwidth", "0"], "--gpu-bandwidth is 0"),
        (["--vram-budget", "1", "--sync-time", "-1"], "--sync-time is -1"),
        (["--vram-budget", "1", "-b", "0"], "-b is 0"),
        (["--vram-budget", "1", "-ctk", "q8_0"], "-ctk"),
    ],
)
def test_settings_that_make_no_sense(arguments: list[str], message: str, model: Path) -> None:
    result = invoke("-m", str(model), *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("error:") == 1


def test_without_a_gpu_the_budget_has_to_be_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "count_gpus", lambda: 0)
    result = CliRunner().invoke(app, ["plan", "-m", str(model), *SPEEDS])
    assert result.exit_code == 1
    assert "give one with --vram-budget" in result.stderr
    result = CliRunner().invoke(app, ["plan", "-m", str(model), *SPEEDS, "--vram-budget", "1", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["parts"]["context of the device"] > 1 << 28


def test_a_run_shows_its_placement() -> None:
    base = ["run", "-p", "In", "-n", "1", "-c", "64", "-b", "16", "--print-placement"]
    result = CliRunner().invoke(app, [*base, "--device", "torch-cpu", "--vram-budget", "0.01"])
    assert result.exit_code == 0, result.stderr
    assert "| neurons" in result.stderr
    assert "share of activations" in result.stderr
    result = CliRunner().invoke(app, [*base, "--device", "cpu"])
    assert "placement: all of the model is on one side" in result.stderr
