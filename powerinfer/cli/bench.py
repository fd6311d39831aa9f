"""`powerinfer bench`: tokens a second, as llama-bench reports them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerinfer.cli import options as opt
from powerinfer.cli.tables import markdown_table
from powerinfer.errors import UsageError

if TYPE_CHECKING:
    from powerinfer.engine import Model
    from powerinfer.engine.bench import BenchResult, BenchTest


def bench(
    model: Annotated[
        list[str] | None,
        typer.Option("-m", "--model", metavar="FILE", help="GGUF models; without it the embedded one."),
    ] = None,
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="N", help="Tokens of a prompt; 0 is none.")
    ] = "512",
    n_gen: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N", help="Tokens made one by one; 0 is none.")
    ] = "128",
    n_depth: Annotated[
        str, typer.Option("-d", "--n-depth", metavar="N", help="Tokens that are in the context before each test.")
    ] = "0",
    threads: Annotated[
        str, typer.Option("-t", "--threads", metavar="N", help="Threads; 0 is all physical cores.")
    ] = "0",
    batch_size: Annotated[str, typer.Option("-b", "--batch-size", metavar="N", help="Prompt tokens at once.")] = "512",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", help="Times that each test is run.")
    ] = 5,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FORMAT", help="md, csv, json or jsonl.")] = "md",
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
    check: Annotated[
        bool, typer.Option("--check", help="Also run sparse models densely, for their predictors' recall.")
    ] = False,
) -> None:
    """Measure speed. Lists with commas are multiplied out: `-p 64,256 -t 1,2` is four tests.

    Beside llama-bench's columns: GB/s that decoding reads, its share of the read bandwidth that was measured just
    before, the fraction of neurons computed and, with --check, the recall of the predictors.
    """
    from powerinfer.cli.console import say, write
    from powerinfer.engine import load

    if output not in FORMATS:
        raise UsageError(f"--output is {output!r}: expected one of {', '.join(FORMATS)}")
    tests = _tests(numbers("-p", n_prompt), numbers("-n", n_gen), numbers("-d", n_depth))
    paths: list[Path | None] = [Path(p) for name in model or [] for p in name.split(",")] or [None]
    rows = []
    for path, n_threads in product(paths, numbers("-t", threads)):
        settings: dict[str, Any] = {
            "backend": backend,
            "device": device,
            "vram_budget": vram_budget,
            "reset_gpu_index": reset_gpu_index,
            "disable_gpu_index": disable_gpu_index,
            "placement": placement,
            "cache_type_k": cache_type_k,
            "cache_type_v": cache_type_v,
            "n_threads": n_threads,
            "activation": activation,
        }
        loaded = load(path, **settings, dense=dense, sparse_threshold=sparse_threshold, notify=say)
        compared = load(path, **settings, dense=True) if check and loaded.spec.is_sparse else None
        bandwidth = read_bandwidth(loaded)
        for n_batch, test in product(numbers("-b", batch_size), tests):
            say(f"{loaded.file.path}: {test.name}, {repetitions} repetitions")
            rows.append(measure(loaded, compared, test, n_batch, repetitions, bandwidth))
            if output == "jsonl":
                write(json_lines(rows[-1:]))
    if output != "jsonl":
        write(FORMATS[output](rows))


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers from 0, with commas between them."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise UsageError(f"{name} is {text!r}: expected a number, or several with commas, as 64,256")
    return values


def _tests(n_prompt: list[int], n_gen: list[int], n_depth: list[int]) -> list[BenchTest]:
    from powerinfer.engine.bench import BenchTest

    tests = [BenchTest(n_prompt=n, n_depth=d) for d in n_depth for n in n_prompt if n]
    tests += [BenchTest(n_gen=n, n_depth=d) for d in n_depth for n in n_gen if n]
    if not tests:
        raise UsageError("there is nothing to measure: give -p or -n a number above 0")
    return tests


def read_bandwidth(model: Model) -> float:
    """GB/s of the threads that decode, 0 where the backend does not measure it."""
    measured = getattr(model.transformer.backend, "read_bandwidth", None)
    return measured() if measured else 0.0


def measure(
    model: Model, compared: Model | None, test: BenchTest, n_batch: int, repetitions: int, bandwidth: float
) -> dict[str, Any]:
    """One row: a test of a model."""
    from powerinfer.engine.bench import bench as run
    from powerinfer.engine.bench import predictor_recall

    result: BenchResult = run(model.transformer, test, n_batch=n_batch, repeats=repetitions)
    recall = None
    if compared is not None:
        dense = run(compared.transformer, test, n_batch=n_batch, repeats=1)
        recall = predictor_recall(result.activity, dense.activity)
    infos = model.file.tensors.values()
    threads = getattr(model.transformer.backend, "threads", (0, 0))
    decoding = test.n_gen > 0
    return {
        "model": Path(model.file.path).name,
        "architecture": model.spec.architecture,
        "size": sum(info.nbytes for info in infos),
        "params": sum(info.n_elements for info in infos),
        "backend": model.transformer.backend.describe(),
        "threads": threads[0 if decoding else 1],
        "n_batch": n_batch,
        "test": test.name,
        "avg_ts": round(result.mean, 3),
        "stddev_ts": round(result.deviation, 3),
        "samples_ts": [round(sample, 3) for sample in result.samples],
        "gb_s": round(result.gb_per_second, 3) if decoding else None,
        "bandwidth_gb_s": round(bandwidth, 3) if bandwidth else None,
        "bandwidth_share": round(result.gb_per_second / bandwidth, 3) if bandwidth and decoding else None,
        "active_fraction": round(result.active_fraction, 4),
        "recall": None if recall is None else round(recall, 4),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table as llama-bench prints it, with our columns behind."""
    header = ["model", "size", "params", "backend", "threads", "test", "t/s", "GB/s", "of read", "active", "recall"]
    return markdown_table(header, [list(_cells(row)) for row in rows])


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield row["model"]
    yield f"{row['size'] / 2**20:.2f} MiB" if row["size"] < 2**30 else f"{row['size'] / 2**30:.2f} GiB"
    yield f"{row['params'] / 1e6:.2f} M" if row["params"] < 1e9 else f"{row['params'] / 1e9:.2f} B"
    yield row["backend"].split(",")[0].replace(":", "")
    yield str(row["threads"])
    yield row["test"]
    yield f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
    yield "" if row["gb_s"] is None else f"{row['gb_s']:.1f}"
    yield "" if row["bandwidth_share"] is None else f"{100 * row['bandwidth_share']:.0f} %"
    yield f"{100 * row['active_fraction']:.1f} %"
    yield "" if row["recall"] is None else f"{row['recall']:.3f}"


def comma_separated(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: json.dumps(v) if isinstance(v, list) else v for key, v in row.items()} for row in rows)
    return out.getvalue()


def as_json(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, indent=1) + "\n"


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


FORMATS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "md": markdown,
    "csv": comma_separated,
    "json": as_json,
    "jsonl": json_lines,
}
