"""Which backend runs a model, and the hybrid one made to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.backends import BackendOptions
from powerinfer.backends.hybrid.gpu_types import STAND_IN
from powerinfer.backends.interface import Batch, DeviceMemoryError, ModelSpec
from powerinfer.engine.devices import budget_bytes, choose_device
from powerinfer.errors import UsageError
from powerinfer.formats import GGUFFile
from powerinfer.models import Transformer

if TYPE_CHECKING:  # these take 25 ms, which a model on the CPU alone need not wait for
    from powerinfer.engine.offload import IndexOptions
    from powerinfer.engine.placement import Objective
    from powerinfer.engine.plan import Plan, Shape

BACKENDS = ("auto", "native", "torch", "hybrid")
SHRINK = 0.9
"""What is left of a budget that the device turned out not to have."""
ATTEMPTS = 30  # 0.9 ** 30 is 4 %


def check_budget(gib: float | None) -> None:
    """Raises UsageError for a budget that is no number of GiB, nor -1."""
    if gib is not None and (not math.isfinite(gib) or (gib < 0 and gib != -1)):
        raise UsageError(f"--vram-budget is {gib}: expected GiB of GPU memory, or -1 for all that is free")


def objective_named(name: str) -> Objective:
    """Raises UsageError for a name that is unknown."""
    from powerinfer.engine.placement import Objective

    try:
        return Objective(name)
    except ValueError:
        known = ", ".join(objective.value for objective in Objective)
        raise UsageError(f"--placement is {name!r}: choose one of {known}") from None


def choose_backend(
    backend: str, device: str, vram_budget: float | None, notify: Callable[[str], None]
) -> tuple[str, str]:
    """The names of a backend and of its device, from names that may be `auto`.

    A budget of 0 is the CPU. Raises UsageError for names that are unknown or do not go together.
    """
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "native":
        return "native", "cpu" if device == "auto" else device
    if backend == "torch":
        return "torch", choose_device(device, notify) if device == "auto" else device
    chosen = choose_device(device, notify)
    if chosen != "cpu" and vram_budget != 0:
        return "hybrid", chosen
    if backend == "hybrid" and chosen == "cpu":
        raise UsageError(f"the hybrid backend needs a GPU: --device {STAND_IN} lets the CPU stand in for one")
    if vram_budget is not None:
        why = "no GPU is in use" if chosen == "cpu" else "nothing goes to the GPU"
        notify(f"{why} (--vram-budget {vram_budget:g}): the model runs on the CPU")
    return "native", "cpu"


def assemble(
    file: GGUFFile, spec: ModelSpec, shape: Shape, options: BackendOptions, vram_budget: float, index: IndexOptions
) -> tuple[Transformer, Plan]:
    """The model on options.device and the CPU, and the plan that it was made to.

    Where the device has less memory than was counted on, with a smaller plan, and a line that says so.
    """
    import torch

    from powerinfer.backends.hybrid.backend import HybridBackend
    from powerinfer.engine.machine import machine_speeds
    from powerinfer.engine.offload import ALL_FREE, Planner, device_model

    notify, device = options.notify, options.device
    speeds = machine_speeds(device, options.n_threads, notify)
    asked = ALL_FREE if vram_budget == -1 else int(vram_budget * 2**30)
    planner = Planner(file, spec, shape, device_model(device), speeds, asked, index, notify)
    budget = budget_bytes(vram_budget, device, notify)
    for attempt in range(ATTEMPTS):
        plan = planner.plan(budget, use_index=attempt == 0)
        if not plan.split.uses_device:
            notify(f"{budget / 2**30:.2f} GiB of {device} hold no part of this model: it runs on the CPU")
        transformer = None
        try:
            backend = HybridBackend(options, plan.split)
            transformer = Transformer(spec, backend, on_block=file.release_pages)
            try_out(transformer, shape)
            return transformer, plan
        except (DeviceMemoryError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
            transformer = None  # what it holds is needed
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
            if attempt == ATTEMPTS - 1 or not plan.split.uses_device:
                raise
            budget = int(min(budget, plan.device_bytes) * SHRINK)
            notify(f"{device} has less memory than planned ({reason}): trying again with {budget / 2**30:.2f} GiB")
    raise AssertionError("the last attempt returns or raises")


def try_out(transformer: Transformer, shape: Shape) -> None:
    """Runs a prompt of a batch at the end of a full context, so that memory that is missing is missed now."""
    device = transformer.backend.device  # type: ignore[attr-defined]
    if device.type == "cpu":
        return
    n = min(shape.n_batch, shape.n_ctx)
    cache = transformer.kv_cache(shape.n_ctx)
    tokens = np.zeros(n, np.int32)
    transformer.forward(Batch.of_sequence(tokens, shape.n_ctx - n, np.array([n - 1], np.int32)), cache)
