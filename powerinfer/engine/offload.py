"""From a budget to a plan: what is known of the model and the machine, and the index file that keeps a placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from powerinfer.backends.hybrid.gpu_types import STAND_IN, gpu_row_bytes
from powerinfer.backends.interface import IntArray, ModelSpec
from powerinfer.engine.activations import FALLBACK, Activations, read_activations
from powerinfer.engine.devices import CONTEXT_BYTES, SLACK
from powerinfer.engine.placement import PLACEMENT_VERSION, Objective, Speeds
from powerinfer.engine.plan import DeviceModel, Floats, Plan, Shape, make_plan
from powerinfer.errors import PowerInferError
from powerinfer.formats import GGUFFile
from powerinfer.formats.gpu_index import GpuIndex, fingerprint, index_paths, read_gpu_index, write_gpu_index

ALL_FREE = (1 << 64) - 1
"""The budget of all that is free, as an index file has it: what that is changes from run to run."""


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """reset: do not use an index file that is there. disable: put no neurons on the device, use and keep no file.
    objective: of the placement.
    """

    reset: bool = False
    disable: bool = False
    objective: Objective = Objective.ACTIVATIONS


def device_model(device: str) -> DeviceModel:
    """What a plan must know of `device`."""
    if device == STAND_IN:
        return DeviceModel(device, lambda kind, n: kind.row_bytes(n))
    return DeviceModel(device, gpu_row_bytes, CONTEXT_BYTES, SLACK)


def neuron_counts(spec: ModelSpec) -> list[int]:
    return [layer.feed_forward.n_ff for layer in spec.layers]


def known_activations(file: GGUFFile, spec: ModelSpec, notify: Callable[[str], None]) -> Activations:
    """How often neurons fire. Of a model that always computes all, nothing needs to be known."""
    if spec.is_sparse:
        return read_activations(file, neuron_counts(spec), notify)
    return Activations(tuple(np.full(n, FALLBACK) for n in neuron_counts(spec)), "none needed")


class Planner:
    """Makes plans for one model on one device.

    asked: the budget that the user asked for, in bytes, ALL_FREE for whatever is free: an index file is made for it.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        shape: Shape,
        device: DeviceModel,
        speeds: Speeds,
        asked: int,
        index: IndexOptions,
        notify: Callable[[str], None],
    ) -> None:
        self.file, self.spec, self.shape, self.device = file, spec, shape, device
        self.speeds, self.asked, self.index, self.notify = speeds, asked, index, notify
        self._activations: Activations | None = None

    @property
    def activations(self) -> Activations:
        """Read when they are first needed."""
        if self._activations is None:
            self._activations = known_activations(self.file, self.spec, self.notify)
        return self._activations

    def best(self, budget: int) -> Plan:
        """The best plan for so many bytes, whatever an index file says."""
        return self._make(budget, self.activations.frequencies)

    def plan(self, budget: int, *, use_index: bool = True) -> Plan:
        """The plan for so many bytes; its placement is from an index file where one fits, and is kept in one else.

        Where all neurons fit, or none, nothing about them is read or kept.
        """
        alike = [np.full(n, FALLBACK) for n in neuron_counts(self.spec)]
        plan = self._make(budget, alike)
        if self.index.disable or not self.spec.is_sparse or plan.hot in (0, sum(neuron_counts(self.spec))):
            return plan
        wanted = self._wanted(plan)
        found = None if self.index.reset or not use_index else self._find(wanted)
        plan = self._make(budget, self.activations.frequencies, None if found is None else found.hot)
        if found is None and plan.hot:
            used = sum(layer.device_bytes for layer in plan.layers)
            self._keep(replace(wanted, hot=tuple(layer.hot for layer in plan.split.layers), capacity=used))
        return plan

    def _make(self, budget: int, frequencies: Sequence[Floats], hot: Sequence[IntArray] | None = None) -> Plan:
        return make_plan(
            self.spec,
            self.shape,
            self.device,
            budget,
            frequencies,
            self.speeds,
            hot=hot,
            no_neurons=self.index.disable,
            objective=self.index.objective,
        )

    def _wanted(self, plan: Plan) -> GpuIndex:
        return GpuIndex(
            hot=(),
            n_ff=tuple(neuron_counts(self.spec)),
            capacity=plan.neuron_room,
            model=fingerprint(self.file),
            budget=self.asked,
            n_ctx=self.shape.n_ctx,
            version=PLACEMENT_VERSION + list(Objective).index(self.index.objective),
        )

    def _find(self, wanted: GpuIndex) -> GpuIndex | None:
        for path in index_paths(self.file.path):
            if not path.is_file():
                continue
            try:
                index = read_gpu_index(path)
                misfit = index.misfit(wanted)
            except PowerInferError as error:
                misfit = str(error)
            if misfit is None:
                return index
            self.notify(f"the GPU index {path} is not used, {misfit}: it is made again")
        return None

    def _keep(self, index: GpuIndex) -> None:
        """Beside the model, or where that cannot be in the user's cache folder; without either nothing is lost."""
        for path in index_paths(self.file.path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_gpu_index(path, index)
                return
            except (PowerInferError, OSError):
                continue
