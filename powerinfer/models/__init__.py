"""One file an architecture, each a function from a model file to a `ModelSpec`; `Transformer` runs any of them.

`decoder` reads the parts that they have in common.
"""

from __future__ import annotations

from powerinfer.models import (  # noqa: F401  (each registers its architecture)
    bamboo,
    falcon,
    gemma3,
    llama,
    opt,
    qwen2,
    qwen3,
)
from powerinfer.models.spec import ModelFile, ModelOptions, build_spec
from powerinfer.models.transformer import Transformer

__all__ = ["ModelFile", "ModelOptions", "Transformer", "build_spec"]
