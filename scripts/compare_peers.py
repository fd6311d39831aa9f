"""Our speed beside that of llama.cpp and PowerInfer, in one run.

    python scripts/compare_peers.py -m model.powerinfer.gguf --dense model.dense.gguf \\
        --llama-bench .../llama-bench --powerinfer .../main -n 64 -p 64,256

Each repetition runs every engine once, one after the other, as a process of its own; ratios are taken within a
repetition and their median is printed, so that a machine whose speed drifts does not favour anyone. Ours and PowerInfer
run MODEL; llama.cpp, which cannot, runs its dense twin (or MODEL itself where there is none).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

WORD = " the"  # one token in every vocabulary that PowerInfer is run with


@dataclass(frozen=True, slots=True)
class Work:
    """n tokens of a prompt, or n tokens made one by one."""

    kind: str  # "pp" or "tg"
    n: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.n}"


@dataclass(slots=True)
class Engine:
    """A peer or ourselves: `measure` gives tokens a second."""

    name: str
    measure: Callable[[Work], float]
    samples: dict[Work, list[float]] = field(default_factory=dict)


def output_of(command: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise SystemExit(f"error: {' '.join(command)} ended with status {result.returncode}: {result.stderr[-300:]}")
    return result


def ours(model: Path, threads: int, more: list[str]) -> Callable[[Work], float]:
    def measure(work: Work) -> float:
        sizes = ["-p", str(work.n), "-n", "0"] if work.kind == "pp" else ["-p", "0", "-n", str(work.n)]
        command = [sys.executable, "-m", "powerinfer", "bench", "-m", str(model), "-t", str(threads), "-r", "1"]
        return float(json.loads(output_of([*command, *sizes, "-o", "json", *more]).stdout)[0]["avg_ts"])

    return measure


def llama_bench(binary: Path, model: Path, threads: int) -> Callable[[Work], float]:
    def measure(work: Work) -> float:
        sizes = ["-p", str(work.n), "-n", "0"] if work.kind == "pp" else ["-p", "0", "-n", str(work.n)]
        command = [str(binary), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]
        return float(json.loads(output_of([*command, *sizes]).stdout)[0]["avg_ts"])

    return measure


def powerinfer_main(binary: Path, model: Path, threads: int) -> Callable[[Work], float]:
    def measure(work: Work) -> float:
        prompt, n = (WORD * (work.n - 1), 1) if work.kind == "pp" else (WORD, work.n + 1)
        command = [str(binary), "-m", str(model), "-t", str(threads), "-p", prompt, "-n", str(n), "--temp", "0"]
        text = output_of([*command, "--ignore-eos"]).stderr
        label = "prompt eval" if work.kind == "pp" else " eval"
        found = re.search(rf"{label} time =.*\(.*, +([\d.]+) tokens per second\)", text)
        if found is None:
            raise SystemExit(f"error: {binary} printed no '{label} time'")
        return float(found[1])

    return measure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, help="GGUF that we run, and PowerInfer")
    parser.add_argument("--dense", type=Path, help="GGUF that llama.cpp runs, if not the same")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench")
    parser.add_argument("--powerinfer", type=Path, help="PowerInfer's main")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--n-gen", default="32", help="tokens to make; several with commas, 0 for none")
    parser.add_argument("-p", "--n-prompt", default="0", help="tokens of a prompt, likewise")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--ours", action="append", default=[], metavar="ARG", help="one more argument of our bench")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    work = [Work("pp", int(n)) for n in options.n_prompt.split(",") if int(n)]
    work += [Work("tg", int(n)) for n in options.n_gen.split(",") if int(n)]
    engines = [Engine("ours", ours(options.model, options.threads, options.ours))]
    if options.llama_bench:
        twin = options.dense or options.model
        engines.append(Engine("llama.cpp", llama_bench(options.llama_bench, twin, options.threads)))
    if options.powerinfer:
        engines.append(Engine("PowerInfer", powerinfer_main(options.powerinfer, options.model, options.threads)))
    for repetition in range(options.repetitions):
        for item in work:
            for engine in engines:
                print(f"{repetition + 1}/{options.repetitions} {item.name} {engine.name}", file=sys.stderr)
                engine.samples.setdefault(item, []).append(engine.measure(item))
    print(table(options, work, engines))


def table(options: argparse.Namespace, work: list[Work], engines: list[Engine]) -> str:
    """Medians in tokens a second, and medians of the ratios of ours to each peer's."""
    us, *peers = engines
    lines = [
        f"{datetime.date.today()}, {platform.machine()}, {options.threads} threads, {options.repetitions} repetitions",
        "",
        "| model | test | "
        + " | ".join(f"{e.name} t/s" for e in engines)
        + "".join(f" | / {p.name}" for p in peers)
        + " |",
        "|" + " --- |" * (2 + len(engines) + len(peers)),
    ]
    for item in work:
        rates = [f"{median(engine.samples[item]):.2f}" for engine in engines]
        pairs = [zip(us.samples[item], peer.samples[item], strict=True) for peer in peers]
        ratios = [f"**{median(a / b for a, b in pair):.2f}**" for pair in pairs]
        lines.append(f"| {options.model.name} | {item.name} | " + " | ".join([*rates, *ratios]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
