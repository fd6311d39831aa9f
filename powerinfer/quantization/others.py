"""Types that are only read, through gguf-py, which is imported when the first tensor of such a type is."""

from __future__ import annotations

from collections.abc import Callable

from powerinfer.quantization.tensor import TYPES, Bytes, Floats, QuantType

# name: (GGML's id, elements a block, bytes a block)
_TYPES = {
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "IQ1_M": (29, 256, 56),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
}


def _through_gguf(type_id: int) -> Callable[[Bytes], Floats]:
    def dequantize(blocks: Bytes) -> Floats:
        import gguf
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):  # absurd scales are the file's, not worth a warning
            values: Floats = gguf.dequantize(blocks, gguf.GGMLQuantizationType(type_id))
        return values

    return dequantize


for _name, (_id, _size, _bytes) in _TYPES.items():
    TYPES.add(QuantType(_name, _id, _size, _bytes, _through_gguf(_id)))
