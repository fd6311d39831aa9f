"""The command line. `app` is the Typer application, `run_app` what the console script calls."""

from __future__ import annotations

from collections.abc import Sequence

from powerinfer.cli.app import app

__all__ = ["app", "run_app"]


def run_app(argv: Sequence[str]) -> int:
    """Runs one command; its exit status. Errors of users are printed as one line, exit status 1."""
    import typer

    command = typer.main.get_command(app)
    try:
        command.main(args=list(argv), prog_name="powerinfer")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
