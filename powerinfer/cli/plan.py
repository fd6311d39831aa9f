"""`powerinfer plan`: what a memory budget would put on a GPU, and how fast that is predicted to be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerinfer.cli import options as opt
from powerinfer.cli.tables import markdown_table
from powerinfer.errors import UsageError

if TYPE_CHECKING:
    from powerinfer.backends.interface import ModelSpec
    from powerinfer.engine.placement import Speeds
    from powerinfer.engine.plan import Plan

SWEEP_STEPS = 16
GIB = 2**30


def plan(
    model: opt.ModelPath = None,
    vram_budget: Annotated[
        float, typer.Option("--vram-budget", metavar="GiB", help="GPU memory to plan for; -1 is all that is free.")
    ] = -1.0,
    ctx_size: opt.Context = 0,
    batch_size: opt.BatchSize = 512,
    threads: opt.Threads = -1,
    device: opt.Device = "auto",
    gpu_bandwidth: Annotated[
        float | None, typer.Option("--gpu-bandwidth", metavar="GB/s", help="Of the GPU, in place of what is measured.")
    ] = None,
    cpu_bandwidth: Annotated[
        float | None, typer.Option("--cpu-bandwidth", metavar="GB/s", help="Of the CPU, in place of what is measured.")
    ] = None,
    sync_time: Annotated[
        float | None, typer.Option("--sync-time", metavar="µs", help="Of one exchange between them.")
    ] = None,
    cache_type_k: opt.CacheTypeK = "",
    cache_type_v: opt.CacheTypeV = "",
    dense: opt.Dense = False,
    placement: opt.Placement = "activations",
    sweep: Annotated[bool, typer.Option("--sweep", help="Also plan for budgets from nothing to the whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw hot shares and the sweep into a .png or .svg.")
    ] = None,
) -> None:
    """Show what goes where under a memory budget. No GPU is needed, and nothing is loaded or written."""
    from powerinfer.cli.console import write

    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--plot is {str(plot)!r}: expected a file name that ends in .png or .svg")
    planning = Planning.of(
        model,
        vram_budget,
        device,
        opt.all_cores(threads),
        (ctx_size, batch_size, cache_type_k, cache_type_v, dense, placement),
        (gpu_bandwidth, cpu_bandwidth, sync_time),
    )
    chosen = planning.at(planning.budget)
    swept = planning.sweep() if sweep or plot is not None else []
    if as_json:
        report = plan_json(chosen, planning.speeds, planning.source)
        write(json.dumps({**report, "sweep": [sweep_json(p) for p in swept]} if sweep else report, indent=1) + "\n")
    else:
        write(describe_plan(planning.spec, chosen, planning.speeds, planning.source))
        write(sweep_table(swept) if sweep else "")
    if plot is not None:
        draw(plot, chosen, swept)


class Planning:
    """A model and a machine, for plans of any budget."""

    def __init__(self, spec: ModelSpec, planner: Any, budget: int) -> None:
        self.spec, self._planner, self.budget = spec, planner, budget
        self.speeds: Speeds = planner.speeds

    @property
    def source(self) -> str:
        return str(self._planner.activations.source)

    @classmethod
    def of(
        cls,
        model: Path | None,
        gib: float,
        device: str,
        n_threads: int,
        shape: tuple[int, int, str, str, bool, str],
        given: tuple[float | None, float | None, float | None],
    ) -> Planning:
        """Raises UsageError for settings that make no sense."""
        from powerinfer.backends.hybrid.gpu_types import GPU_CACHE_TYPES
        from powerinfer.backends.interface import BackendOptions, cache_row_bytes
        from powerinfer.cli.console import say
        from powerinfer.engine.assemble import check_budget, objective_named
        from powerinfer.engine.devices import budget_bytes, choose_device
        from powerinfer.engine.model import default_context, default_model_path
        from powerinfer.engine.offload import IndexOptions, Planner, device_model
        from powerinfer.engine.plan import Shape
        from powerinfer.formats import open_gguf
        from powerinfer.models import ModelOptions, build_spec

        check_budget(gib)
        n_ctx, n_batch, cache_k, cache_v, dense, placement = shape
        if n_ctx < 0 or n_batch < 1:
            raise UsageError(f"-c is {n_ctx} and -b is {n_batch}: expected 0 and 1, or more")
        file = open_gguf(default_model_path() if model is None else model)
        spec = build_spec(file, ModelOptions(dense=dense))
        types = BackendOptions(cache_type_k=cache_k, cache_type_v=cache_v).cache_types("F16", GPU_CACHE_TYPES)
        position = sum(cache_row_bytes(types, layer.attention) for layer in spec.layers)
        chosen = choose_device(device, say)
        if chosen == "cpu" and gib == -1:
            raise UsageError("there is no GPU whose free memory could be the budget: give one with --vram-budget")
        budget = int(gib * GIB) if chosen == "cpu" else budget_bytes(gib, chosen, say)
        speeds = speeds_of(chosen, n_threads, given)
        shape_ = Shape(n_ctx or default_context(spec, position, say), n_batch, types)
        planner = Planner(
            file,
            spec,
            shape_,
            device_model(chosen),
            speeds,
            budget,
            IndexOptions(objective=objective_named(placement)),
            say,
        )
        return cls(spec, planner, budget)

    def at(self, budget: int) -> Plan:
        """The plan for so many bytes; index files are neither read nor written."""
        plan: Plan = self._planner.best(budget)
        return plan

    def sweep(self) -> list[Plan]:
        """Plans from nothing to all of the model, the asked one's budget among them."""
        whole = self.at(1 << 62).device_bytes
        budgets = sorted({*(whole * i // SWEEP_STEPS for i in range(SWEEP_STEPS + 1)), min(self.budget, whole)})
        return [self.at(budget) for budget in budgets]


def speeds_of(device: str, n_threads: int, given: tuple[float | None, float | None, float | None]) -> Speeds:
    """What the user gave (GB/s, GB/s, µs), what is missing measured."""
    import math

    from powerinfer.cli.console import say
    from powerinfer.engine.machine import machine_speeds
    from powerinfer.engine.placement import Speeds

    names = ("--gpu-bandwidth", "--cpu-bandwidth", "--sync-time")
    for name, value in zip(names, given, strict=True):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} is {value:g}: expected a number above 0")
    gpu, cpu, sync = given
    if gpu is not None and cpu is not None and sync is not None:
        return Speeds(gpu * 1e9, cpu * 1e9, sync * 1e-6)
    known = machine_speeds(device, n_threads, say)
    return Speeds(
        known.gpu_bandwidth if gpu is None else gpu * 1e9,
        known.cpu_bandwidth if cpu is None else cpu * 1e9,
        known.sync if sync is None else sync * 1e-6,
    )


def describe_plan(spec: ModelSpec, plan: Plan, speeds: Speeds, source: str) -> str:
    """Tables of what goes where, and of each layer."""
    parts = device_parts(plan)
    lines = [f"budget {plan.budget / GIB:.2f} GiB, planned {plan.device_bytes / GIB:.2f} GiB on the GPU"]
    lines.append(
        f"GPU {speeds.gpu_bandwidth / 1e9:.0f} GB/s, CPU {speeds.cpu_bandwidth / 1e9:.1f} GB/s, "
        f"{speeds.sync * 1e6:.0f} µs an exchange; how often neurons fire: {source}"
    )
    rows = [[name, f"{nbytes:,}", f"{nbytes / 2**20:.1f}"] for name, nbytes in parts.items()]
    rows.append(["total", f"{plan.device_bytes:,}", f"{plan.device_bytes / 2**20:.1f}"])
    text = "\n".join(lines) + "\n\n" + markdown_table(["on the GPU", "bytes", "MiB"], rows) + "\n"
    header = ["layer", "attention", "hot neurons", "of", "share of activations", "GPU µs", "CPU µs", "bound by"]
    table = [
        [
            str(i),
            "GPU" if side.attention else "CPU",
            f"{layer.hot}",
            f"{layer.n_ff}",
            f"{100 * layer.share:.1f} %",
            f"{layer.gpu_seconds * 1e6:.1f}",
            f"{(layer.cpu_seconds + layer.sync_seconds) * 1e6:.1f}",
            layer.bound,
        ]
        for i, (layer, side) in enumerate(zip(plan.layers, plan.split.layers, strict=True))
    ]
    text += markdown_table(header, table) + "\n"
    ends = "GPU" if plan.split.head else "CPU"
    return text + f"head on the {ends}; predicted {plan.seconds * 1e3:.2f} ms a token, {speed(plan)}\n"


def speed(plan: Plan) -> str:
    gpu = plan.gpu_seconds + sum(layer.seconds for layer in plan.layers if layer.bound == "GPU")
    bound = "GPU" if 2 * gpu > plan.seconds else "CPU"
    return f"{1 / plan.seconds:.1f} tokens a second, bound by the {bound}"


def device_parts(plan: Plan) -> dict[str, int]:
    """Bytes on the device by what they are for."""
    parts = {"attention": 0, "KV cache": 0, "predictors": 0, "norms": 0, "head": 0, "neurons": 0}
    for name, nbytes in plan.tensors.items():
        parts[_part(name)] += nbytes
    if plan.split.uses_device:
        parts |= {"context of the device": plan.context, "workspace": plan.workspace, "exchange": plan.exchange}
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _part(tensor: str) -> str:
    kinds = {
        "cache_": "KV cache",
        "fc1.": "predictors",
        "fc2.": "predictors",
        "ffn_norm": "norms",
        "post_ffw": "norms",
        "ffn_down_t.bias": "norms",
        "ffn_": "neurons",
        "output": "head",
    }
    name = tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor
    if tensor.startswith("blk.") and name.startswith(("attn", "post_attention")):
        return "attention"
    return next(part for start, part in kinds.items() if name.startswith(start))


def sweep_table(plans: Sequence[Plan]) -> str:
    rows = [
        [
            f"{p.budget / GIB:.2f}",
            f"{p.device_bytes / GIB:.2f}",
            f"{100 * hot_share(p):.1f} %",
            f"{100 * carried(p):.1f} %",
            f"{p.seconds * 1e3:.2f}",
            f"{1 / p.seconds:.1f}",
        ]
        for p in plans
    ]
    header = ["budget GiB", "planned GiB", "hot neurons", "share of activations", "ms a token", "tokens a second"]
    return "\n" + markdown_table(header, rows)


def hot_share(plan: Plan) -> float:
    return plan.hot / max(1, sum(layer.n_ff for layer in plan.layers))


def carried(plan: Plan) -> float:
    return sum(layer.share for layer in plan.layers) / max(1, len(plan.layers))


def plan_json(plan: Plan, speeds: Speeds, source: str) -> dict[str, Any]:
    return {
        **sweep_json(plan),
        "gpu_bandwidth": speeds.gpu_bandwidth,
        "cpu_bandwidth": speeds.cpu_bandwidth,
        "sync": speeds.sync,
        "activations": source,
        "parts": device_parts(plan),
        "tensors": plan.tensors,
        "head_on_gpu": plan.split.head,
        "layers": [
            {
                "attention_on_gpu": side.attention,
                "feed_forward_on_gpu": side.feed_forward,
                "hot": layer.hot,
                "n_ff": layer.n_ff,
                "share": layer.share,
                "bytes": layer.device_bytes,
                "gpu_seconds": layer.gpu_seconds,
                "cpu_seconds": layer.cpu_seconds,
                "sync_seconds": layer.sync_seconds,
                "bound": layer.bound,
            }
            for layer, side in zip(plan.layers, plan.split.layers, strict=True)
        ],
    }


def sweep_json(plan: Plan) -> dict[str, Any]:
    return {
        "budget": plan.budget,
        "planned": plan.device_bytes,
        "hot": plan.hot,
        "share": carried(plan),
        "seconds": plan.seconds,
        "tokens_per_second": 1 / plan.seconds,
    }


def draw(path: Path, plan: Plan, swept: Sequence[Plan]) -> None:
    """Hot shares by layer, and predicted speed against budget. Raises UsageError without matplotlib."""
    from powerinfer.cli.pictures import new_figure, save_figure

    figure = new_figure()
    left, right = figure.subplots(1, 2)
    left.bar(range(len(plan.layers)), [100 * layer.hot / layer.n_ff for layer in plan.layers], label="neurons")
    left.plot([100 * layer.share for layer in plan.layers], "o-", color="C1", label="activations")
    left.set(xlabel="layer", ylabel="% on the GPU", ylim=(0, 105), title=f"{plan.budget / GIB:.2f} GiB")
    left.legend()
    right.plot([p.budget / GIB for p in swept], [1 / p.seconds for p in swept], "o-")
    right.axvline(plan.budget / GIB, color="C1", linestyle="--")
    right.set(xlabel="budget (GiB)", ylabel="predicted tokens a second", ylim=(0, None))
    save_figure(figure, path)
