"""The one way a kernel is started."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs `kernel` on the device that its first argument is on: Triton takes the current one, whatever the tensors.

    Multiplications and additions are fused, which was Triton's default up to 3.9 and is half the arithmetic.
    """
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **constants, enable_fp_fusion=True)
