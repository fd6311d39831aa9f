"""`powerinfer convert`: a Hugging Face model as a GGUF file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powerinfer.cli.console import say

if TYPE_CHECKING:
    from powerinfer.convert import ConvertStep


def convert(
    model: Annotated[
        Path, typer.Argument(metavar="HF_DIR", show_default=False, help="Folder of a Hugging Face model.")
    ],
    predictors: Annotated[
        Path | None,
        typer.Argument(
            metavar="PREDICTOR_DIR",
            show_default=False,
            help="Folder of predictors (model_N.pt): the output is a PowerInfer file, which runs sparsely.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--outfile",
            metavar="OUT",
            help="The file to write.",
            show_default="ggml-model-TYPE.gguf, or .powerinfer.gguf, in HF_DIR",
        ),
    ] = None,
    outtype: Annotated[
        str, typer.Option("--outtype", metavar="TYPE", help="Of matrices: f32, f16, bf16 or q8_0.")
    ] = "f16",
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not compare the result with the source model.")
    ] = False,
) -> None:
    """Convert a Hugging Face model to a GGUF file that llama.cpp runs, too.

    Llama, Mistral, Falcon, Bamboo, OPT, Qwen 2 and 3, and Gemma 3 (text), from safetensors or PyTorch's .bin. The
    result is read back and, if transformers is installed, its logits are compared with the source's.
    """
    from powerinfer.convert import ConvertOptions, convert_folder

    outtype = outtype.lower()
    kind = "gguf" if predictors is None else "powerinfer.gguf"
    target = model / f"ggml-model-{outtype}.{kind}" if output is None else output

    def check(path: Path) -> None:
        from powerinfer.engine.source_check import check_converted

        difference = check_converted(path, model, outtype, say)
        if difference is not None:
            say(f"checked: logits differ from the source's by {difference:.1e} of their variance")

    def unchecked(path: Path) -> None:
        """For --no-check."""

    options = ConvertOptions(outtype, predictors)
    with progress() as on_step:
        summary = convert_folder(
            model, target, options, on_step=on_step, notify=say, check=unchecked if no_check else check
        )
    say(
        f"{summary.path}: {summary.architecture}, {summary.n_tensors} tensors, {summary.nbytes / 2**20:.2f} MB, "
        f"{summary.seconds:.1f} s"
    )


@contextlib.contextmanager
def progress() -> Iterator[Callable[[ConvertStep], None]]:
    """A bar on a terminal, a line a tensor elsewhere: number, name, elements from the innermost dimension, types."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("converting")
            yield lambda step: bar.update(
                task, total=step.total, completed=step.number, description=f"{step.name} -> {step.type}"
            )
        return
    yield lambda step: print(_line(step), file=sys.stderr)


def _line(step: ConvertStep) -> str:
    shape = ", ".join(f"{n:5d}" for n in reversed(step.shape))
    types = f"{step.type_before:>5s} -> {step.type},"
    sizes = f"{step.nbytes_before / 2**20:9.3f} MB -> {step.nbytes / 2**20:9.3f} MB"
    return f"[{step.number:4d}/{step.total:4d}] {step.name:>32s} - [{shape}], {types:15s}{sizes}"
