"""All families: importing this registers them."""

from __future__ import annotations

from powerinfer.convert import (  # noqa: F401  (each registers its classes)
    bamboo,
    falcon,
    gemma3,
    llama,
    opt,
    qwen2,
    qwen3,
)
from powerinfer.convert.family import build_recipe

__all__ = ["build_recipe"]
