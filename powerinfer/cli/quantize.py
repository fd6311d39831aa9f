"""`powerinfer quantize`: a GGUF file with its matrices in another type."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from powerinfer.errors import UsageError

if TYPE_CHECKING:
    from powerinfer.engine.quantize import QuantizeStep, QuantizeSummary


def quantize(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="IN [OUT] TYPE [THREADS]", show_default=False, help="Input, output, type and threads."),
    ],
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Also convert tensors that are quantized already.")
    ] = False,
    leave_output_tensor: Annotated[
        bool, typer.Option("--leave-output-tensor", help="Leave output.weight as it is.")
    ] = False,
    pure: Annotated[bool, typer.Option("--pure", help="The same type for every matrix.")] = False,
    output_tensor_type: Annotated[
        str | None, typer.Option("--output-tensor-type", metavar="T", help="Type of output.weight.", show_default=False)
    ] = None,
    token_embedding_type: Annotated[
        str | None,
        typer.Option("--token-embedding-type", metavar="T", help="Type of token_embd.weight.", show_default=False),
    ] = None,
    predictor_type: Annotated[
        str | None,
        typer.Option(
            "--predictor-type",
            metavar="T",
            help="Type of the predictors (fc1, fc2); 'powerinfer': Q4_0 in a Q4_0 file, Q5_0 in others.",
            show_default="Q4_0 or Q8_0 in such a file, Q6_K in others",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what every tensor would become and the sizes, write nothing.")
    ] = False,
) -> None:
    """Convert a model's matrices to TYPE, by name or by the number of general.file_type.

    F32 (0), F16 (1), BF16 (32), COPY; Q4_0 (2), Q4_1 (3), Q5_0 (8), Q5_1 (9), Q8_0 (7); Q2_K (10), Q3_K_S (11), Q3_K_M
    (12), Q3_K_L (13), Q4_K_S (14), Q4_K_M (15), Q5_K_S (16), Q5_K_M (17), Q6_K (18); Q3_K, Q4_K, Q5_K for their _M.

    The output is ggml-model-TYPE.gguf beside the input where none is named. A PowerInfer file stays one.
    """
    from powerinfer.engine.quantization_plan import QuantizeOptions
    from powerinfer.engine.quantize import quantize_file

    source, target, type_name, n_threads = parse_arguments(arguments)
    options = QuantizeOptions(
        allow_requantize=allow_requantize,
        leave_output_tensor=leave_output_tensor,
        pure=pure,
        n_threads=n_threads,
        output_tensor_type=output_tensor_type,
        token_embedding_type=token_embedding_type,
        predictor_type=predictor_type,
        dry_run=dry_run,
    )
    with lines(sys.stdout) if dry_run else progress() as on_step:
        summary = quantize_file(source, target, type_name, options, on_step)
    report(summary, dry_run)


def parse_arguments(arguments: list[str]) -> tuple[Path, Path, str, int]:
    """Input, output, type and threads (0: all) of llama.cpp's positional forms.

    Raises UsageError for another number of them, an unknown type or a senseless number.
    """
    from powerinfer.engine.quantization_plan import parse_file_type

    if not 2 <= len(arguments) <= 4:
        raise UsageError(f"quantize takes IN [OUT] TYPE [THREADS], got {len(arguments)} arguments")
    source, *rest = arguments
    # With three, the last is a number of threads if the second is a type: IN TYPE THREADS, else IN OUT TYPE.
    try:
        type_name, threads, target = parse_file_type(rest[0]), rest[1:], None
    except UsageError:
        if len(rest) < 2:
            raise
        target, type_name, threads = Path(rest[0]), parse_file_type(rest[1]), rest[2:]
    if len(threads) > 1:
        raise UsageError(f"quantize takes IN [OUT] TYPE [THREADS], got {' '.join(arguments)}")
    if threads and (not threads[0].isdecimal() or not 1 <= int(threads[0]) <= 1024):
        raise UsageError(f"the number of threads is {threads[0]!r}: expected 1 to 1024")
    default = Path(source).parent / f"ggml-model-{type_name}.gguf"
    return Path(source), target or default, type_name, int(threads[0]) if threads else 0


@contextlib.contextmanager
def progress() -> Iterator[Callable[[QuantizeStep], None]]:
    """A bar on a terminal, a line a tensor elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("quantizing")
            yield lambda step: bar.update(
                task, total=step.total, completed=step.number, description=f"{step.info.name} -> {step.type}"
            )
        return
    with lines(sys.stderr) as line:
        yield line


@contextlib.contextmanager
def lines(stream: TextIO) -> Iterator[Callable[[QuantizeStep], None]]:
    """A line a tensor: number, name, elements from the innermost dimension, types, sizes."""

    def line(step: QuantizeStep) -> None:
        shape = ", ".join(f"{n:5d}" for n in reversed(step.info.shape))
        sizes = f"{step.info.nbytes / 2**20:9.3f} MB -> {step.nbytes / 2**20:9.3f} MB"
        types = f"{step.info.type_name:>5s} -> {step.type},"
        print(f"[{step.number:4d}/{step.total:4d}] {step.info.name:>32s} - [{shape}], {types:15s}{sizes}", file=stream)

    yield line


def report(summary: QuantizeSummary, dry_run: bool) -> None:
    from powerinfer.cli.console import say

    if summary.fallbacks:
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(summary.fallbacks.values()).items())
        say(
            f"warning: {len(summary.fallbacks)} tensors could not have their type, as its blocks do not divide their "
            f"rows; they are {kinds}: {_some(list(summary.fallbacks))}"
        )
    before, after = summary.bytes_before / 2**20, summary.bytes_after / 2**20
    say(
        f"{summary.path}{' (not written)' if dry_run else ''}: {before:.2f} MB -> {after:.2f} MB, "
        f"{summary.bits_per_weight:.2f} bits a weight, {summary.seconds:.1f} s"
    )


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", .." if len(names) > most else "")
