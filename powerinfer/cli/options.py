"""Options that several commands share, with llama.cpp's names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from powerinfer.engine import Model

ModelPath = Annotated[
    Path | None, typer.Option("-m", "--model", metavar="FILE", help="GGUF model; without it the embedded one.")
]
Context = Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", help="Context size; 0 is the model's own.")]
BatchSize = Annotated[int, typer.Option("-b", "--batch-size", metavar="N", help="Prompt tokens evaluated at once.")]
Threads = Annotated[int, typer.Option("-t", "--threads", metavar="N", help="Threads; -1 or 0 is all physical cores.")]
ThreadsBatch = Annotated[
    int, typer.Option("-tb", "--threads-batch", metavar="N", help="Threads for prompts; -1 or 0 is as --threads.")
]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend", metavar="NAME", help="auto, native (the CPU), hybrid (a GPU and the CPU) or torch (one)."
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:N; torch-cpu: the CPU stands in for a GPU."),
]
VramBudget = Annotated[
    float | None,
    typer.Option("--vram-budget", metavar="GiB", help="GPU memory to use; -1 (also without it) is all that is free."),
]
ResetGpuIndex = Annotated[
    bool, typer.Option("--reset-gpu-index", help="Place neurons anew, whatever the GPU index file says.")
]
Placement = Annotated[
    str, typer.Option("--placement", metavar="GOAL", help="Of neurons: most activations on the GPU, or least time.")
]
DisableGpuIndex = Annotated[bool, typer.Option("--disable-gpu-index", help="Put no neurons on the GPU.")]
CacheTypeK = Annotated[
    str, typer.Option("-ctk", "--cache-type-k", metavar="TYPE", help="KV cache's keys: f32, f16 or q8_0.")
]
CacheTypeV = Annotated[
    str, typer.Option("-ctv", "--cache-type-v", metavar="TYPE", help="KV cache's values: f32, f16 or q8_0.")
]
Dense = Annotated[bool, typer.Option("--dense", help="Run a sparse model without its predictors.")]
SparseThreshold = Annotated[
    float | None, typer.Option("--sparse-threshold", metavar="X", help="Predictor threshold, in place of the file's.")
]
ActivationName = Annotated[
    str | None,
    typer.Option("--activation", metavar="NAME", help="Activation of the FFN gate, e.g. relu, in place of the file's."),
]
RopeFreqBase = Annotated[
    float | None, typer.Option("--rope-freq-base", metavar="X", help="Rotary base, in place of the model's.")
]
RopeFreqScale = Annotated[
    float | None, typer.Option("--rope-freq-scale", metavar="X", help="Rotary frequencies are multiplied by this.")
]


def all_cores(n: int) -> int:
    """llama.cpp's -1 is the engine's 0."""
    return 0 if n == -1 else n


def load_model(model: Path | None, quiet: bool = False, **options: Any) -> Model:
    """Loads for a command: says on stderr which model, and passes notices on."""
    from powerinfer.cli.console import say
    from powerinfer.engine import load

    tell = (lambda message: None) if quiet else say
    loaded = load(model, notify=tell, **options)
    if model is None:
        tell("no -m given: this is the embedded model, trained on the King James Bible to show the engine at work")
    spec = loaded.spec
    kind = "sparse" if spec.is_sparse else "dense"
    tell(f"model: {loaded.file.path} ({spec.architecture}, {len(spec.layers)} layers, {kind})")
    tell(f"backend: {loaded.transformer.backend.describe()}")
    return loaded
