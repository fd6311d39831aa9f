"""Quantization in C++ (csrc/), whose module is loaded when the first tensor is quantized."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from powerinfer.errors import FormatError
from powerinfer.quantization.tensor import Bytes, Floats


def quantizer(name: str, block_bytes: int) -> Callable[[Floats], Bytes]:
    """Of float32 (n_blocks, block_size) to uint8 (n_blocks, block_bytes), without the GIL, alike on every processor.

    It raises FormatError for numbers that are not finite, or too large for the 16-bit scales of the type.
    """

    def quantize(blocks: Floats) -> Bytes:
        from powerinfer.quantization import _quantize

        out = np.empty((len(blocks), block_bytes), np.uint8)
        bad = _quantize.quantize(name, np.ascontiguousarray(blocks, np.float32), out)
        if bad >= 0:
            raise FormatError(why_not(blocks[bad], name))
        return out

    return quantize


def why_not(values: Floats, name: str) -> str:
    """What keeps `values` from being converted to type `name`."""
    if not np.isfinite(values).all():
        return "numbers that are infinite or not numbers: the source is damaged"
    return f"numbers as large as {np.abs(values).max():g}, too large for {name}: choose F32 or BF16"
