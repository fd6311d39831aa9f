"""Which device a model runs on, found without importing torch, and how much memory it has."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable

from powerinfer.backends.hybrid.gpu_types import STAND_IN
from powerinfer.errors import UsageError, shown

CONTEXT_BYTES = 450 << 20
"""What a CUDA context and the kernels of torch are taken to need before anything is allocated. Not measured yet."""
SLACK = 0.02
"""The share of allocations that torch's allocator is taken to lose to rounding and splitting. Not measured yet."""
MARGIN = 512 << 20
"""Of free memory, what is left to others where the user asks for all of it."""


def count_gpus() -> int:
    """GPUs that a CUDA or ROCm driver reports; 0 without a driver."""
    for library, start, count in (
        ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
        ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
    ):
        try:
            driver = ctypes.CDLL(library)
            n = ctypes.c_int(0)
            if getattr(driver, start)(0) == 0 and getattr(driver, count)(ctypes.byref(n)) == 0 and n.value > 0:
                return n.value
        except (OSError, AttributeError):
            continue
    return 0


def choose_device(name: str, notify: Callable[[str], None]) -> str:
    """`cpu`, `torch-cpu` or `cuda:N`, from those names, `cuda` and `auto`.

    auto takes the first GPU that torch can use, else the CPU, and says which. Raises UsageError for an unknown name and
    a GPU that is not there.
    """
    if name in ("cpu", STAND_IN):
        return name
    if name == "auto":
        if count_gpus() == 0:
            return "cpu"
        reason = _cuda_problem(0)
        if reason:
            notify(f"there is a GPU, but torch cannot use it ({reason}): the model runs on the CPU")
            return "cpu"
        notify(f"device: cuda:0 ({_cuda_name(0)})")
        return "cuda:0"
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if match is None:
        raise UsageError(f"unknown device {shown(name)}: choose auto, cpu, cuda, cuda:N or {STAND_IN}")
    index = int(match[1] or 0)
    reason = _cuda_problem(index) if count_gpus() else "no driver reports a GPU"
    if reason:
        raise UsageError(f"--device {name}: {reason}; choose --device cpu, or auto")
    return f"cuda:{index}"


def _cuda_problem(index: int) -> str | None:
    """Why torch cannot use GPU `index`; None if it can."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA: install one from https://pytorch.org"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use"
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} GPUs, numbered from 0"
    return None


def _cuda_name(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_name(index))


def free_memory(device: str) -> int:
    """Bytes that can be allocated on `device` now, its context among them."""
    if device == STAND_IN:
        return available_ram()
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free) + CONTEXT_BYTES  # asking has made the context already


def available_ram() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def budget_bytes(gib: float, device: str, notify: Callable[[str], None]) -> int:
    """Bytes of a budget in GiB; -1 is all that is free, less a margin. More than is free is cut, with a line."""
    free = free_memory(device)
    if gib == -1:
        return max(0, free - MARGIN)
    wanted = int(gib * 2**30)
    if wanted > free:
        notify(f"--vram-budget {gib:g} is more than the {free / 2**30:.1f} GiB that are free on {device}: using those")
        return free
    return wanted
