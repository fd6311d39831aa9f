"""Checks and times all that needs a GPU, in one command, and writes JSON.

    python scripts/gpu_check.py [-m MODEL] [--device cuda] [-o FILE]

Weights as the device holds them against float64; tokens against the CPU's at five budgets; planned against measured
memory; speed by budget, with the time of each layer on both sides; rows of a benchmark. With --device torch-cpu the CPU
stands in for the GPU: then the numbers of speed mean nothing, all others do. The exit status is 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powerinfer.backends import BackendOptions
from powerinfer.backends.torch.backend import TorchBackend
from powerinfer.engine import GenerateOptions, Model, Sampler, SamplingParams, load
from powerinfer.engine.bench import BenchTest, bench
from powerinfer.engine.devices import choose_device
from powerinfer.engine.model import default_model_path
from powerinfer.engine.plan import Plan
from powerinfer.quantization import TYPES, QuantTensor

PROMPT = "In the beginning God created the heaven and the earth."
N_PREDICT = 32
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
WEIGHT_TYPES = ("F32", "F16", "Q4_0", "Q8_0", "Q6_K", "Q4_1", "Q4_K")
TOKENS = (1, 2, 7, 33)
CEILING = 2e-3  # float16 products against float64, as a part of the largest result
GIB = 2**30


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def check_weights(device: str) -> list[dict[str, Any]]:
    """Products and rows of random weights, for each type that can be made, against float64."""
    store = TorchBackend(BackendOptions(device=device)).store
    rng = np.random.default_rng(0)
    results = []
    for name in WEIGHT_TYPES:
        kind = TYPES.by_name(name)
        values = rng.standard_normal((255, 512)).astype(np.float32)
        tensor = QuantTensor(kind, values.shape, kind.quantize_rows(values))
        exact = tensor.dequantize().astype(np.float64)
        weight = store.weight(tensor)
        error = 0.0
        for n in TOKENS:
            x = rng.standard_normal((n, 512)).astype(np.float32)
            want = x @ exact.T
            have = weight.linear(torch.from_numpy(x).to(store.device)).cpu().numpy()
            error = max(error, float(np.abs(have - want).max() / np.abs(want).max()))
        planned = store.nbytes(tensor)
        results.append(
            {
                "type": name,
                "error": error,
                "planned": planned,
                "allocated": weight.nbytes,
                "ok": error < CEILING and planned == weight.nbytes,
            }
        )
        say(f"  {name}: error {error:.1e}, {weight.nbytes} bytes planned {planned}")
    return results


def greedy(model: Model) -> list[int]:
    chunks = model.stream(
        PROMPT, Sampler(SamplingParams(temp=0)), GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
    )
    return [chunk.token for chunk in chunks if chunk.token is not None]


@contextmanager
def timed_layers(model: Model) -> Iterator[dict[str, list[float]]]:
    """Seconds of each layer's two blocks while the context lasts."""
    layers = model.transformer.layers
    times: dict[str, list[float]] = {"attention": [0.0] * len(layers), "feed_forward": [0.0] * len(layers)}

    def timed(block: Any, into: list[float], i: int) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            start = time.perf_counter()
            block(*arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            into[i] += time.perf_counter() - start

        return call

    model.transformer.layers = [  # type: ignore[assignment]
        (timed(a, times["attention"], i), timed(f, times["feed_forward"], i), parallel)
        for i, (a, f, parallel) in enumerate(layers)
    ]
    try:
        yield times
    finally:
        model.transformer.layers = layers


def neuron_bytes(plan: Plan) -> int:
    return sum(layer.device_bytes for layer in plan.layers)


def check_budgets(path: Path, device: str, n_ctx: int) -> list[dict[str, Any]]:
    """Tokens, memory and speed at budgets that hold none to all of the feed-forward."""
    settings: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": 64, "reset_gpu_index": True}
    want = greedy(load(path, device="cpu", **settings))
    whole = load(path, device=device, vram_budget=-1, **settings).plan
    if whole is None:
        raise SystemExit(f"nothing of {path} fits on {device}")
    rest = whole.device_bytes - neuron_bytes(whole)
    results = []
    for share in SHARES:
        budget = (rest + share * neuron_bytes(whole) + 4096) / GIB
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = load(path, device=device, vram_budget=budget, **settings)
        plan = model.plan
        assert plan is not None
        tokens = greedy(model)
        measured = torch.cuda.max_memory_reserved() + plan.context if on_gpu else None
        allocated = sum(model.transformer.backend.device_tensors.values())  # type: ignore[attr-defined]
        planned = sum(plan.tensors.values())
        speed = bench(model.transformer, BenchTest(n_gen=N_PREDICT), repeats=3)
        with timed_layers(model) as times:
            greedy(model)
        same = tokens == want
        row = {
            "share": share,
            "budget": int(budget * GIB),
            "planned": plan.device_bytes,
            "planned_tensors": planned,
            "allocated_tensors": allocated,
            "measured_peak": measured,
            "hot": plan.hot,
            "tokens_as_on_the_cpu": same,
            "tokens_per_second": speed.mean,
            "predicted_tokens_per_second": 1 / plan.seconds,
            "layer_seconds": {name: [t / N_PREDICT for t in values] for name, values in times.items()},
            "ok": same and allocated == planned and (measured is None or measured <= budget * GIB),
        }
        results.append(row)
        say(
            f"  {100 * share:.0f} % of the neurons: tokens {'the same' if same else 'DIFFER'}, {speed.mean:.1f} tok/s "
            f"(predicted {1 / plan.seconds:.1f}), planned {plan.device_bytes / GIB:.3f} GiB, measured "
            + (f"{measured / GIB:.3f}" if measured is not None else "nothing: there is no GPU")
        )
    return results


def bench_rows(path: Path, device: str) -> list[dict[str, Any]]:
    rows = []
    for where in ("cpu", device):
        model = load(path, device=where, n_ctx=256, n_batch=64)
        for test in (BenchTest(n_prompt=64), BenchTest(n_gen=32)):
            result = bench(model.transformer, test, n_batch=64, repeats=3)
            rows.append({"device": where, "test": test.name, "tokens_per_second": result.mean})
            say(f"  {where} {test.name}: {result.mean:.1f} tok/s")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="a GGUF; without it the embedded model")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or torch-cpu")
    parser.add_argument("-c", "--ctx-size", type=int, default=256)
    parser.add_argument("-o", "--output", type=Path, help="where the JSON goes; without it to stdout")
    given = parser.parse_args()
    device = choose_device(given.device, say)
    with tempfile.TemporaryDirectory() as folder:
        path = given.model
        if path is None:  # a copy: index files go beside models
            path = Path(folder) / "demo.powerinfer.gguf"
            path.write_bytes(default_model_path().read_bytes())
        say("weights against float64")
        weights = check_weights(device)
        say("budgets")
        budgets = check_budgets(path, device, given.ctx_size)
        say("benchmark")
        rows = bench_rows(path, device)
    on_gpu = device.startswith("cuda")
    report = {
        "device": torch.cuda.get_device_name(torch.device(device)) if on_gpu else device,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "model": str(given.model or "embedded"),
        "weights": weights,
        "budgets": budgets,
        "bench": rows,
        "ok": all(row["ok"] for row in weights + budgets),
    }
    text = json.dumps(report, indent=1) + "\n"
    if given.output is None:
        sys.stdout.write(text)
    else:
        given.output.write_text(text)
    say("all checks pass" if report["ok"] else 'some checks FAIL: see "ok" in the report')
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
