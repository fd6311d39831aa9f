"""`powerinfer quantize`: a GGUF file with its matrices in another type."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
        bool, typer.Option("--leave-output-tensor", help="Leave the matrix that makes logits as it is.")
    ] = False,
    pure: Annotated[bool, typer.Option("--pure", help="The same type for every matrix.")] = False,
) -> None:
    """Convert a model's matrices to TYPE: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or COPY.

    The output is ggml-model-TYPE.gguf beside the input where none is named. A PowerInfer file stays one.
    """
    from powerinfer.engine.quantize import QuantizeOptions, quantize_file

    source, target, type_name, n_threads = parse_arguments(arguments)
    options = QuantizeOptions(allow_requantize, leave_output_tensor, pure, n_threads)
    with progress() as on_step:
        summary = quantize_file(source, target, type_name, options, on_step)
    report(summary)


def parse_arguments(arguments: list[str]) -> tuple[Path, Path, str, int]:
    """Input, output, type and threads (0: all) of llama.cpp's positional forms.

    Raises UsageError for another number of them, an unknown type or a senseless number.
    """
    from powerinfer.engine.quantize import parse_file_type

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

    def line(step: QuantizeStep) -> None:
        shape = ", ".join(f"{n:5d}" for n in reversed(step.info.shape))
        sizes = f"{step.info.nbytes / 2**20:9.3f} MB -> {step.nbytes / 2**20:9.3f} MB"
        types = f"{step.info.type_name:>5s} -> {step.type:5s}"
        print(
            f"[{step.number:4d}/{step.total:4d}] {step.info.name:>32s} - [{shape}], {types}, {sizes}", file=sys.stderr
        )

    yield line


def report(summary: QuantizeSummary) -> None:
    from powerinfer.cli.console import say

    for name, kind in summary.fallbacks.items():
        say(f"warning: {name} is {kind}: its rows do not divide into blocks of the type asked for")
    before, after = summary.bytes_before / 2**20, summary.bytes_after / 2**20
    say(
        f"{summary.path}: {before:.2f} MB -> {after:.2f} MB, {summary.bits_per_weight:.2f} bits a weight, "
        f"{summary.seconds:.1f} s"
    )
