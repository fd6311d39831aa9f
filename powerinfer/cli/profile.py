"""`powerinfer profile`: how often each neuron of a ReLU model fires."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powerinfer.cli import options as opt
from powerinfer.cli.tables import markdown_table
from powerinfer.errors import UsageError

if TYPE_CHECKING:
    from powerinfer.engine.profile import Profile


def profile(
    model: opt.ModelPath = None,
    file: Annotated[
        list[str] | None, typer.Option("-f", "--file", metavar="FILE", help="Text; may be given several times.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder; without it, activation beside -m.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens to run at most; 0 is all.")] = 0,
    ctx_size: opt.Context = 512,
    batch_size: opt.BatchSize = 512,
    threads: opt.Threads = -1,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Run with the predictors: only what they name can fire.")
    ] = False,
    activation: opt.ActivationName = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the shares of the hottest into a .png or .svg.")
    ] = None,
) -> None:
    """Count how often neurons fire on a text, for --vram-budget. A run that is stopped goes on when it is repeated."""
    from powerinfer.cli.console import read_text, say, write
    from powerinfer.cli.group import INTERRUPTED
    from powerinfer.engine.model import default_model_path
    from powerinfer.engine.profile import profile as measure
    from powerinfer.engine.profile import write_profile

    if not file:
        raise UsageError("profile needs a text: give one or more files with -f")
    if tokens < 0:
        raise UsageError(f"--tokens is {tokens}: expected 0 (all) or more")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--plot is {str(plot)!r}: expected a file name that ends in .png or .svg")
    folder = output or (model or default_model_path()).parent / "activation"
    contents = [read_text(Path(name)) for name in file]
    loaded = opt.load_model(
        model,
        backend="native",
        device="cpu",
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_threads=opt.all_cores(threads),
        dense=not predicted,
        activation=activation,
    )
    texts = [loaded.tokenizer.encode(text, add_special=False, parse_special=False) for text in contents]
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent // 5 != shown:
            shown = percent // 5
            say(f"{done} of {total} windows of {loaded.n_ctx} tokens ({percent} %)")

    try:
        result = measure(loaded, texts, folder, limit=tokens, on_window=show)
    except KeyboardInterrupt:
        say(f"stopped: what was counted is kept in {folder}, the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    write_profile(result, folder, loaded)
    write(table(result))
    say(f"{len(result.counts)} files activation_N.pt in {folder}, from {result.tokens} tokens")
    if plot is not None:
        draw(plot, result)


def table(result: Profile) -> str:
    from powerinfer.engine.profile import HOTTEST

    shares = [result.share_of_hottest(part) for part in HOTTEST]
    header = ["layer", "neurons", "fire for a token", *(f"hottest {100 * part:g} % carry" for part in HOTTEST)]
    rows = [
        [str(i), str(len(row)), f"{100 * active:.1f} %", *(f"{100 * share[i]:.1f} %" for share in shares)]
        for i, (row, active) in enumerate(zip(result.counts, result.active(), strict=True))
    ]
    return markdown_table(header, rows)


def draw(path: Path, result: Profile) -> None:
    """Cumulative shares of each layer. Raises UsageError without matplotlib."""
    import numpy as np

    from powerinfer.cli.pictures import new_figure, save_figure

    figure = new_figure()
    axes = figure.subplots()
    for i, row in enumerate(result.counts):
        carried = np.cumsum(np.sort(row)[::-1]) / max(1, int(row.sum()))
        axes.plot(100 * np.arange(1, len(row) + 1) / len(row), 100 * carried, label=f"layer {i}")
    axes.set(xlabel="hottest % of the neurons", ylabel="% of the activations", xlim=(0, 100), ylim=(0, 101))
    if len(result.counts) <= 12:
        axes.legend()
    save_figure(figure, path)
