"""Loading, KV cache, prompt and decode loop, sampling, perplexity, quantizing files."""

from __future__ import annotations

from powerinfer.engine.generate import Chunk, GenerateOptions, StopReason
from powerinfer.engine.model import Model, default_model_path, load
from powerinfer.engine.sampling import Sampler, SamplingParams

__all__ = [
    "Chunk",
    "GenerateOptions",
    "Model",
    "Sampler",
    "SamplingParams",
    "StopReason",
    "default_model_path",
    "load",
]
