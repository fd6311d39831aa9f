"""Memory plans: what they promise is what is allocated, tensor by tensor, and any budget is used as far as it goes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyLlama

from powerinfer.backends import BackendOptions
from powerinfer.backends.hybrid.backend import HybridBackend
from powerinfer.backends.interface import ModelSpec
from powerinfer.engine.offload import ALL_FREE, IndexOptions, Planner, device_model
from powerinfer.engine.placement import Speeds
from powerinfer.engine.plan import DeviceModel, Plan, Shape, make_plan
from powerinfer.formats import open_gguf
from powerinfer.formats.gpu_index import index_paths, read_gpu_index, write_gpu_index
from powerinfer.models import ModelOptions, Transformer, build_spec
from powerinfer.quantization import TYPES

F16 = TYPES.by_name("F16")
SHAPE = Shape(n_ctx=64, n_batch=16, cache_types=(F16, F16))
SPEEDS = Speeds(1e12, 3e10, 3e-5)
STAND_IN = device_model("torch-cpu")
MODELS = {
    "sparse": TinyLlama(sparse=True, n_layers=4),
    "sparse q4_0": TinyLlama(kind="Q4_0", n_ff=352, rank=64, sparse=True, n_layers=4),
    "dense": TinyLlama(kind="Q8_0", n_ff=224, n_layers=4),
    "tied": TinyLlama(tied=True, n_layers=4),
}


def spec_of(name: str, **options: object) -> ModelSpec:
    return build_spec(MODELS[name].build(), ModelOptions(**options))  # type: ignore[arg-type]


def plan_of(spec: ModelSpec, budget: int, device: DeviceModel = STAND_IN, **options: object) -> Plan:
    rng = np.random.default_rng(0)
    frequencies = [rng.random(layer.feed_forward.n_ff) for layer in spec.layers]
    return make_plan(spec, SHAPE, device, budget, frequencies, SPEEDS, **options)  # type: ignore[arg-type]


def everything(spec: ModelSpec) -> int:
    return plan_of(spec, 1 << 40).device_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dense", [False, True])
def test_planned_bytes_are_allocated_bytes_at_any_budget(name: str, dense: bool) -> None:
    spec = spec_of(name, dense=dense)
    total = everything(spec)
    for part in range(21):
        budget = total * part // 20
        plan = plan_of(spec, budget)
        assert plan.device_bytes <= budget
        backend = HybridBackend(BackendOptions(n_threads=1, device="torch-cpu"), plan.split)
        Transformer(spec, backend).kv_cache(SHAPE.n_ctx)
        have = {tensor: nbytes for tensor, nbytes in backend.device_tensors.items() if nbytes}
        assert have == {tensor: nbytes for tensor, nbytes in plan.tensors.items() if nbytes}


@pytest.mark.parametrize("name", MODELS)
def test_the_order_is_attention_predictors_head_neurons(name: str) -> None:
    spec = spec_of(name)
    total = everything(spec)
    stages = []
    for part in range(61):
        plan = plan_of(spec, total * part // 60)
        layers = plan.split.layers
        attention = sum(layer.attention for layer in layers)
        assert [layer.attention for layer in layers] == [True] * attention + [False] * (4 - attention)
        if plan.split.head:
            assert attention == 4
        for layer in layers:
            assert layer.attention or not layer.feed_forward
            assert layer.feed_forward or not len(layer.hot)
        stages.append((attention, plan.split.head, plan.hot))
    assert stages[0] == (0, False, 0)
    assert stages[-1] == (4, True, 4 * spec.layers[0].feed_forward.n_ff)
    assert any(0 < attention < 4 for attention, _, _ in stages)
    assert any(head and hot < stages[-1][2] for _, head, hot in stages)


def test_what_fits_whole_is_not_split() -> None:
    spec = spec_of("sparse")
    plan = plan_of(spec, everything(spec))
    assert all(len(layer.hot) == 100 for layer in plan.split.layers)
    assert all(layer.sync_seconds == 0 for layer in plan.layers)


def test_more_memory_is_never_predicted_slower() -> None:
    spec = spec_of("sparse q4_0")
    total = everything(spec)
    plans = [plan_of(spec, total * part // 80) for part in range(81)]
    seconds = [plan.seconds for plan in plans if plan.split.head]
    assert len(seconds) > 20
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(seconds))


def test_the_context_and_slack_of_a_device_are_counted() -> None:
    spec = spec_of("sparse")
    costly = DeviceModel("gpu", lambda kind, n: kind.row_bytes(n), context=100_000, slack=0.1)
    total = everything(spec)
    assert plan_of(spec, 100_000, costly).device_bytes == 0
    plan = plan_of(spec, total, costly)
    assert 0 < plan.hot < 400
    assert plan.context == 100_000
    assert sum(plan.tensors.values()) * 1.1 <= total - 100_000


def test_a_context_of_billions_of_bytes_is_counted() -> None:
    spec = spec_of("sparse")
    shape = Shape(n_ctx=1 << 30, n_batch=1, cache_types=(F16, F16), n_slots=8)
    frequencies = [np.ones(100)] * 4
    plan = make_plan(spec, shape, STAND_IN, 1 << 50, frequencies, SPEEDS)
    assert plan.tensors["blk.0.cache_k"] == (1 << 33) * 2 * 32
    assert make_plan(spec, shape, STAND_IN, 1 << 34, frequencies, SPEEDS).device_bytes == 0


def planner(path: Path, asked: int, lines: list[str], **index: bool) -> Planner:
    file = open_gguf(path)
    spec = build_spec(file, ModelOptions())
    return Planner(file, spec, SHAPE, STAND_IN, SPEEDS, asked, IndexOptions(**index), lines.append)


@pytest.fixture
def half(tmp_path: Path) -> tuple[Path, int]:
    """A sparse model's file, and a budget that holds about half of its neurons."""
    path = MODELS["sparse"].build().write(tmp_path / "m.gguf")
    spec = spec_of("sparse")
    neurons = sum(n for name, n in plan_of(spec, 1 << 40).tensors.items() if "ffn_" in name and "norm" not in name)
    return path, everything(spec) - neurons // 2


def test_a_placement_is_kept_and_used_again(half: tuple[Path, int]) -> None:
    path, budget = half
    lines: list[str] = []
    first = planner(path, budget, lines).plan(budget)
    assert 0 < first.hot < 400
    index = path.with_name("m.gguf.generated.gpuidx")
    before = index.stat().st_mtime_ns
    stored = read_gpu_index(index)
    assert [hot.tolist() for hot in stored.hot] == [layer.hot.tolist() for layer in first.split.layers]
    assert stored.budget == budget
    second = planner(path, budget, lines).plan(budget)
    assert [layer.hot.tolist() for layer in second.split.layers] == [layer.hot.tolist() for layer in first.split.layers]
    assert index.stat().st_mtime_ns == before
    assert not any("made again" in line for line in lines)


def test_a_stale_index_is_made_again_with_one_line(half: tuple[Path, int]) -> None:
    path, budget = half
    planner(path, budget, []).plan(budget)
    for asked, reason in ((budget + 1, "another budget"), (ALL_FREE, "another budget")):
        lines: list[str] = []
        planner(path, asked, lines).plan(budget)
        assert [reason in line for line in lines if "GPU index" in line] == [True]
    lines = []
    path.with_name("m.gguf.generated.gpuidx").write_bytes(b"damaged")
    assert 0 < planner(path, budget, lines).plan(budget).hot < 400
    assert sum("it is made again" in line for line in lines) == 1
    assert read_gpu_index(path.with_name("m.gguf.generated.gpuidx")).budget == budget


def test_an_index_of_another_model_is_not_used(half: tuple[Path, int], tmp_path: Path) -> None:
    path, budget = half
    planner(path, budget, []).plan(budget)
    other = TinyLlama(sparse=True, n_layers=4, seed=5).build().write(tmp_path / "other.gguf")
    index = path.with_name("m.gguf.generated.gpuidx").rename(tmp_path / "other.gguf.generated.gpuidx")
    lines: list[str] = []
    planner(other, budget, lines).plan(budget)
    assert any("made for another model" in line for line in lines)
    assert read_gpu_index(index).model != read_gpu_index(tmp_path / "other.gguf.generated.gpuidx").budget


def test_reset_and_disable(half: tuple[Path, int]) -> None:
    path, budget = half
    first = planner(path, budget, []).plan(budget)
    index = path.with_name("m.gguf.generated.gpuidx")
    stored = read_gpu_index(index)
    swapped = tuple(np.setdiff1d(np.arange(100), hot)[: len(hot)].astype(np.int32) for hot in stored.hot)
    write_gpu_index(index, type(stored)(swapped, stored.n_ff, 1, stored.model, budget, 64, stored.version))
    used = planner(path, budget, []).plan(budget)
    assert [layer.hot.tolist() for layer in used.split.layers] == [hot.tolist() for hot in swapped]
    anew = planner(path, budget, [], reset=True).plan(budget)
    assert [layer.hot.tolist() for layer in anew.split.layers] == [layer.hot.tolist() for layer in first.split.layers]
    disabled = planner(path, budget, [], disable=True).plan(budget)
    assert disabled.hot == 0
    assert disabled.split.head


def test_a_folder_that_cannot_be_written_to(half: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, budget = half
    beside, cached = index_paths(path)
    beside.mkdir()  # as good as a read-only folder, which a superuser may write to
    lines: list[str] = []
    planner(path, budget, lines).plan(budget)
    assert cached.is_file()
    again = planner(path, budget, lines).plan(budget)
    assert 0 < again.hot < 400
    assert not any("made again" in line for line in lines)


def test_without_statistics_one_line_names_the_command(half: tuple[Path, int]) -> None:
    path, budget = half
    lines: list[str] = []
    planner(path, budget, lines).plan(budget)
    assert [line for line in lines if "powerinfer profile" in line] == lines
    assert len(lines) == 1
