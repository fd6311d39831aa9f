"""Budgets: whatever part of a model is on a device, the tokens are the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import TinyLlama
from typer.testing import CliRunner

import powerinfer
from powerinfer.backends.hybrid.backend import HybridBackend
from powerinfer.backends.interface import Batch, DeviceMemoryError
from powerinfer.cli.app import app
from powerinfer.engine import Model, SamplingParams, load
from powerinfer.engine import devices as devices_module
from powerinfer.errors import UsageError

PROMPT = "In the beginning God created"
GIB = 2**30


def hybrid(path: Path, budget: float, lines: list[str] | None = None, **options: object) -> Model:
    notify = (lines if lines is not None else []).append
    settings = {"n_ctx": 96, "n_batch": 32, "device": "torch-cpu", "vram_budget": budget, "notify": notify, **options}
    return load(path, **settings)  # type: ignore[arg-type]


def text_of(model: Model, n: int = 24) -> str:
    return "".join(model.generate(PROMPT, n_predict=n, sampling=SamplingParams(temp=0)))


def logits_of(model: Model) -> np.ndarray:
    tokens = np.array(model.encode_prompt(PROMPT * 3), np.int32)[:40]
    cache = model.transformer.kv_cache(96)
    n = len(tokens) - 7
    prompt = model.transformer.forward(Batch.of_sequence(tokens[:n], 0, np.arange(n, dtype=np.int32)), cache)
    rest = [
        model.transformer.forward(Batch.of_sequence(tokens[i : i + 1], i, np.zeros(1, np.int32)), cache)
        for i in range(n, len(tokens))
    ]
    return np.concatenate([prompt, *rest])


def budgets(path: Path) -> dict[str, float]:
    """GiB that hold nothing, a part of the attention, and a quarter, half and all of the feed-forward."""
    plan = hybrid(path, 20).plan
    assert plan is not None
    neurons = sum(layer.device_bytes for layer in plan.layers)
    rest = plan.device_bytes - neurons
    parts = {
        "tiny": plan.workspace + plan.exchange + 40_000,
        "quarter": rest + neurons // 4,
        "half": rest + neurons // 2,
    }
    return {name: nbytes / GIB for name, nbytes in {**parts, "all": plan.device_bytes + 4096}.items()}


@pytest.fixture(params=["demo", "relu-a-f16", "relu-a-q4_0"])
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "demo":
        source = Path(powerinfer.__file__).parent / "data" / "demo.powerinfer.gguf"
    else:
        folder = request.getfixturevalue("shared_data") / "relu-a"
        source = folder / f"{request.param}.powerinfer.gguf"
        if (folder / "activation").is_dir():
            shutil.copytree(folder / "activation", tmp_path / "activation")
    return Path(shutil.copy(source, tmp_path / source.name))


def test_the_same_tokens_at_any_budget(model_path: Path) -> None:
    alone = load(model_path, n_ctx=96, n_batch=32)
    want, logits = text_of(alone), logits_of(alone)
    for name, budget in budgets(model_path).items():
        for settings in ({}, {"n_threads": 1, "n_batch": 1}, {"n_threads": 2, "disable_gpu_index": True}):
            model = hybrid(model_path, budget, **settings)
            assert model.plan is not None
            assert model.plan.device_bytes <= budget * GIB + 1
            assert text_of(model) == want, (name, settings)
        errors = np.abs(logits_of(hybrid(model_path, budget)) - logits).max(axis=1) / logits.std()
        assert np.median(errors) < 1e-3, name


def test_budgets_split_as_they_say(model_path: Path) -> None:
    named = budgets(model_path)
    hot = {name: hybrid(model_path, budget).plan.hot for name, budget in named.items()}  # type: ignore[union-attr]
    total = sum(layer.feed_forward.n_ff for layer in load(model_path).spec.layers)
    assert hot["all"] == total
    assert 0.15 * total < hot["quarter"] < 0.35 * total
    assert 0.4 * total < hot["half"] < 0.6 * total
    assert not list(model_path.parent.glob("*.tmp"))


def test_a_budget_of_nothing_runs_on_the_cpu(tmp_path: Path) -> None:
    path = TinyLlama(sparse=True).build().write(tmp_path / "m.gguf")
    for device, budget, line in (("torch-cpu", 0.0, "nothing goes to the GPU"), ("cpu", 4.0, "no GPU is in use")):
        lines: list[str] = []
        model = load_tiny(path, device, budget, lines)
        assert model.plan is None
        assert model.transformer.backend.name == "native"
        assert any(line in said for said in lines)


def load_tiny(path: Path, device: str, budget: float | None, lines: list[str], **options: object) -> Model:
    return load(path, n_ctx=64, device=device, vram_budget=budget, notify=lines.append, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), -2.0, -0.5])
def test_budgets_that_make_no_sense(budget: float) -> None:
    with pytest.raises(UsageError, match="expected GiB of GPU memory"):
        load(vram_budget=budget)


def test_more_than_is_free_is_cut_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "available_ram", lambda: 3 * GIB)
    lines: list[str] = []
    assert devices_module.budget_bytes(1000, "torch-cpu", lines.append) == 3 * GIB
    assert lines == ["--vram-budget 1000 is more than the 3.0 GiB that are free on torch-cpu: using those"]
    assert devices_module.budget_bytes(-1, "torch-cpu", lines.append) == 3 * GIB - devices_module.MARGIN
    assert devices_module.budget_bytes(0.5, "torch-cpu", lines.append) == GIB // 2
    assert len(lines) == 1


def test_out_of_memory_shrinks_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Path(shutil.copy(Path(powerinfer.__file__).parent / "data" / "demo.powerinfer.gguf", tmp_path))
    made: list[int] = []
    original = HybridBackend.head

    def failing(self: HybridBackend, spec: object) -> object:
        made.append(sum(self.device_tensors.values()))
        if len(made) < 4:
            raise (
                torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
                if len(made) % 2
                else (DeviceMemoryError("no memory for a KV cache"))
            )
        return original(self, spec)  # type: ignore[arg-type]

    monkeypatch.setattr(HybridBackend, "head", failing)
    lines: list[str] = []
    model = hybrid(path, 1, lines)
    assert sum("trying again with" in line for line in lines) == 3
    assert made == sorted(made, reverse=True)
    assert made[-1] < made[0]
    assert text_of(model, 8)


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("hybrid", "cpu", "--device torch-cpu lets the CPU stand in"),
        ("auto", "cuda:0", "no driver reports a GPU"),
        ("auto", "cuda", "no driver reports a GPU"),
        ("auto", "rocket", "unknown device 'rocket'"),
        ("native", "torch-cpu", "runs on the CPU, not on 'torch-cpu'"),
        ("gpu", "auto", "unknown backend 'gpu'"),
    ],
)
def test_devices_that_are_missing_or_unknown(
    backend: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "count_gpus", lambda: 0)
    with pytest.raises(UsageError, match=message):
        load(backend=backend, device=device)


def test_a_driver_that_torch_cannot_use_is_no_error_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines: list[str] = []
    assert devices_module.choose_device("auto", lines.append) == "cpu"
    assert len(lines) == 1
    assert "torch cannot use it" in lines[0]
    with pytest.raises(UsageError, match="--device cuda:0"):
        devices_module.choose_device("cuda:0", lines.append)


@pytest.mark.parametrize(
    ("budget", "status", "line"),
    [
        ("0", 0, "nothing goes to the GPU"),
        ("0.1", 0, "backend: hybrid"),
        ("1000", 0, "that are free on torch-cpu: using those"),
        ("-1", 0, "backend: hybrid"),
        ("abc", 1, "error: --vram-budget is 'abc': expected a number"),
        ("nan", 1, "error: --vram-budget is nan"),
    ],
)
def test_budgets_on_the_command_line(budget: str, status: int, line: str, tmp_path: Path) -> None:
    path = TinyLlama(sparse=True, n_vocab=300).build().write(tmp_path / "m.gguf")
    demo = shutil.copy(Path(powerinfer.__file__).parent / "data" / "demo.powerinfer.gguf", tmp_path / "demo.gguf")
    arguments = ["run", "-m", str(demo), "-p", "In", "-n", "2", "--device", "torch-cpu", "--vram-budget", budget]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status
    assert line in result.stderr
    assert path.is_file()
