"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Physical cores among those this process may run on, within its control group's quota; at least 1.

    Two threads of one core share its arithmetic and its path to memory, so a second one gains nothing here.
    """
    allowed = _allowed_cpus()
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def logical_cores() -> int:
    """Processors that this process may run on; at least 1."""
    return max(1, len(_allowed_cpus()))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """A name for the core that `cpu` belongs to."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Whole processors that the control group grants (cgroup v2), or a number beyond any."""
    unlimited = 1 << 20
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return unlimited if quota == "max" else max(1, round(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return unlimited
