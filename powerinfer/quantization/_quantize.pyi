"""C++ kernels that quantize."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


def instruction_sets() -> list[str]:
    """Names of the instruction sets that this processor runs, best first."""

def quantize(type: str, values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], isa: str = '') -> int:
    """
    float32 (n, block size) to uint8 (n, block bytes), without the GIL. isa: '' for the best; all give the same.
    Returns the index of the first block with a number that is not finite or too large for the type's 16-bit
    scales, after which `out` is unfinished; -1 if there is none.
    """
