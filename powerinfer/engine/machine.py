"""How fast this machine is: measured once, kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from powerinfer.backends import BackendOptions
from powerinfer.backends.native import NativeBackend
from powerinfer.engine.placement import Speeds
from powerinfer.errors import PowerInferError
from powerinfer.formats import OutputFile
from powerinfer.user_cache import user_cache_folder

NOMINAL_GPU = 1.0e12
"""Bytes a second of a GPU that is not there to be measured: an RTX 4090 reads 1008 GB/s."""
NOMINAL_SYNC = 30e-6
"""Seconds of an exchange with it: two copies through page-locked memory and a wait, of 10 to 15 µs each."""
GPU_BYTES = 1 << 29
EXCHANGE_BYTES = 32 << 10  # a hidden state and a mask


def machine_speeds(device: str, n_threads: int, notify: Callable[[str], None]) -> Speeds:
    """Speeds of this machine's CPU with n_threads (0: all cores) and of `device`; a GPU's nominal ones without it.

    Measuring takes about a second, the first time; a cache that cannot be read or written is no error.
    """
    path = user_cache_folder() / "machine.json"
    known = _read(path)
    key = f"{processor()}, {n_threads} threads, {device}"
    with contextlib.suppress(KeyError, TypeError, ValueError):
        speeds = Speeds(**{name: float(known[key][name]) for name in ("gpu_bandwidth", "cpu_bandwidth", "sync")})
        if all(math.isfinite(x) and x > 0 for x in asdict(speeds).values()):
            return speeds
    notify("measuring how fast this machine reads memory (once)")
    cpu_bandwidth = NativeBackend(BackendOptions(n_threads=n_threads)).read_bandwidth() * 1e9
    gpu_bandwidth, sync = measure_gpu(device) if device.startswith("cuda") else (NOMINAL_GPU, NOMINAL_SYNC)
    speeds = Speeds(gpu_bandwidth, cpu_bandwidth, sync)
    _write(path, {**known, key: asdict(speeds)})
    return speeds


def processor() -> str:
    """The processor's name, as far as the system tells."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure_gpu(device: str) -> tuple[float, float]:
    """Bytes a second that a GPU reads, and seconds of one exchange with it."""
    import torch

    where = torch.device(device)
    data = torch.ones(GPU_BYTES // 4, device=where)
    best = math.inf
    for _ in range(5):
        torch.cuda.synchronize(where)
        start = time.perf_counter()
        data.sum()
        torch.cuda.synchronize(where)
        best = min(best, time.perf_counter() - start)
    out = torch.empty(EXCHANGE_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(EXCHANGE_BYTES, dtype=torch.uint8, device=where)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        out.copy_(here, non_blocking=True)
        torch.cuda.synchronize(where)
        here.copy_(out, non_blocking=True)
        torch.cuda.synchronize(where)
        times.append(time.perf_counter() - start)
    return GPU_BYTES / best, sorted(times)[len(times) // 2]


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, PowerInferError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with OutputFile(str(path)) as file:
            file.write(json.dumps(known, indent=1).encode())
