"""Block formats of weights. Stands alone: imports no other part of the package but the errors."""

from __future__ import annotations

from powerinfer.quantization import kquants, legacy, others, plain  # noqa: F401  (each registers its types)
from powerinfer.quantization.kernels import why_not
from powerinfer.quantization.tensor import TYPES, QuantTensor, QuantType

__all__ = ["TYPES", "QuantTensor", "QuantType", "why_not"]
