"""The commands. Each one's module imports what is heavy only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from powerinfer import __version__
from powerinfer.cli.bench import bench
from powerinfer.cli.convert import convert
from powerinfer.cli.group import Command, Group
from powerinfer.cli.inspect import inspect
from powerinfer.cli.perplexity import perplexity
from powerinfer.cli.plan import plan
from powerinfer.cli.profile import profile
from powerinfer.cli.quantize import quantize
from powerinfer.cli.run import run
from powerinfer.cli.tokenize import tokenize

app = typer.Typer(
    name="powerinfer",
    cls=Group,
    invoke_without_command=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"powerinfer {__version__}")
        raise typer.Exit


@app.callback()
def powerinfer(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Run large language models on a machine whose GPU is too small for them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (run, perplexity, convert, quantize, profile, plan, inspect, tokenize, bench):
    app.command(cls=Command)(command)
