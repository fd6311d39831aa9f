"""`powerinfer perplexity`: how well a model predicts a text."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from powerinfer.cli import options as opt
from powerinfer.errors import UsageError


def perplexity(
    model: opt.ModelPath = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="The text; - is stdin.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The text itself.")] = None,
    ctx_size: opt.Context = 512,
    batch_size: opt.BatchSize = 512,
    threads: opt.Threads = -1,
    threads_batch: opt.ThreadsBatch = -1,
    chunks: Annotated[int, typer.Option("--chunks", metavar="N", help="Windows to compute; -1 is all.")] = -1,
    ppl_stride: Annotated[
        int, typer.Option("--ppl-stride", metavar="N", help="Windows overlap and start N tokens apart; 0 is off.")
    ] = 0,
    ppl_output_type: Annotated[
        int,
        typer.Option("--ppl-output-type", metavar="N", help="0: running values in a row; 1: a line each, with tokens."),
    ] = 0,
    backend: opt.BackendName = "auto",
    device: opt.Device = "auto",
    vram_budget: opt.VramBudget = None,
    reset_gpu_index: opt.ResetGpuIndex = False,
    disable_gpu_index: opt.DisableGpuIndex = False,
    placement: opt.Placement = "activations",
    cache_type_k: opt.CacheTypeK = "",
    cache_type_v: opt.CacheTypeV = "",
    dense: opt.Dense = False,
    sparse_threshold: opt.SparseThreshold = None,
    activation: opt.ActivationName = None,
    rope_freq_base: opt.RopeFreqBase = None,
    rope_freq_scale: opt.RopeFreqScale = None,
) -> None:
    """Measure perplexity on a text, as llama.cpp does: of the second half of windows of the context size."""
    from powerinfer.cli.console import read_text, say, second_interrupt_exits, write
    from powerinfer.engine.perplexity import Perplexity, count_chunks
    from powerinfer.engine.perplexity import perplexity as measure

    if (file is None) == (prompt is None):
        raise UsageError("perplexity needs a text: give a file with -f (or the text itself with -p)")
    if ppl_output_type not in (0, 1):
        raise UsageError(f"--ppl-output-type is {ppl_output_type}: expected 0 or 1")
    text = read_text(file) if file is not None else prompt or ""
    loaded = opt.load_model(
        model,
        backend=backend,
        device=device,
        vram_budget=vram_budget,
        reset_gpu_index=reset_gpu_index,
        disable_gpu_index=disable_gpu_index,
        placement=placement,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_threads=opt.all_cores(threads),
        n_threads_batch=opt.all_cores(threads_batch),
        dense=dense,
        sparse_threshold=sparse_threshold,
        activation=activation,
        rope_freq_base=rope_freq_base,
        rope_freq_scale=rope_freq_scale,
    )
    tokenizer = loaded.tokenizer
    tokens = tokenizer.encode(text, parse_special=False)
    n_ctx = loaded.n_ctx
    available = count_chunks(len(tokens), n_ctx, ppl_stride)
    n_chunks = min(chunks, available) if chunks >= 0 else available
    say(f"{len(tokens)} tokens: {n_chunks} windows of {n_ctx}, batches of {batch_size}")
    started = time.perf_counter()

    def show(i: int, result: Perplexity) -> None:
        if i == 0:
            each = time.perf_counter() - started
            say(f"{each:.2f} seconds per window: about {math.ceil(each * n_chunks / 60)} min in all")
        if ppl_output_type == 0:
            write(f"[{i + 1}]{result.ppl:.4f},")
        else:
            write(f"{(i + 1) * (ppl_stride or n_ctx):8d}  {result.ppl:.4f}\n")

    bos = tokenizer.bos_id if tokenizer.add_bos else None
    with second_interrupt_exits():
        result = measure(
            loaded.transformer,
            tokens,
            bos,
            n_ctx=n_ctx,
            n_batch=batch_size,
            chunks=chunks,
            stride=ppl_stride,
            on_chunk=show,
        )
    write("\n" if ppl_output_type == 0 else "")
    write(f"Final estimate: PPL = {result.ppl:.4f} +/- {result.stderr:.5f}\n")
