"""Devices as plans know them, without torch: how a GPU holds weights, and what stands in for one."""

from __future__ import annotations

from powerinfer.quantization import QuantType

KERNEL_TYPES: frozenset[str] = frozenset({"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q6_K"})
"""Types that GPU kernels read as they are in the file. All others are held as float16."""

STAND_IN = "torch-cpu"
"""The device name under which the CPU takes a GPU's part: weights are held as a GPU holds them."""
GPU_CACHE_TYPES = ("F32", "F16")


def gpu_row_bytes(kind: QuantType, n: int) -> int:
    """Bytes of a row of n elements on a GPU."""
    return kind.row_bytes(n) if kind.name in KERNEL_TYPES else 2 * n
