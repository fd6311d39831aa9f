"""One file an architecture, each a function from a model file to a `ModelSpec`; `Transformer` runs any of them."""

from __future__ import annotations

from powerinfer.models import llama  # noqa: F401  (registers its architecture)
from powerinfer.models.spec import ModelFile, ModelOptions, build_spec
from powerinfer.models.transformer import Transformer

__all__ = ["ModelFile", "ModelOptions", "Transformer", "build_spec"]
