"""How every command reads its arguments and ends: llama.cpp's spellings, one line for an error, quiet pipes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer
import typer.core

from powerinfer.cli.console import ignore_interrupts
from powerinfer.errors import PowerInferError, UsageError

INTERRUPTED = 130


def normalize(token: str) -> str:
    """`_` and `-` are the same in long names."""
    return token.replace("_", "-") if token.startswith("--") else token


def _spelled(args: Sequence[str]) -> list[str]:
    """Arguments with long names spelled with dashes; values are left alone."""
    spelled: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return [*spelled, *args[i:]]
        name, equals, value = arg.partition("=")
        spelled.append(normalize(name) + equals + value if arg.startswith("--") else arg)
    return spelled


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


class Command(typer.core.TyperCommand):
    """Warns about a value that looks like a flag: `-r -e` takes `-e` as the value of `-r`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {name: option for option in self.params for name in (*option.opts, *option.secondary_opts)}
        with_value = {name for name, option in names.items() if not getattr(option, "is_flag", True)}
        for name, value in pairwise(args):
            if name in with_value and value in names:
                warn(f"{value!r} is taken as the value of {name}")
        given = list(args)  # parsing takes them away
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            found = _value_of(getattr(error, "param", None), given)
            if found is None:
                raise
            raise UsageError(f"{found[0]} is {found[1]!r}: expected {_expected(error)}") from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # here, since Typer itself ends with status 1 on it
            _discard_output()
            return 0


def _value_of(option: Any, args: Sequence[str]) -> tuple[str, str] | None:
    """The name and the value that an option was last given."""
    found = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name not in getattr(option, "opts", ()):
            continue
        if equals:
            found = name, value
        elif i + 1 < len(args):
            found = name, args[i + 1]
    return found


def _expected(error: Any) -> str:
    """What Typer wanted, in a few words; it says so differently where pydantic is installed."""
    message = error.message.lower()
    if "integer" in message:
        return "a whole number"
    return "a number" if "float" in message or "number" in message else message.rstrip(".")


class Group(typer.core.TyperGroup):
    """Turns what goes wrong into one line on stderr and an exit status."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        args = _spelled(sys.argv[1:] if args is None else args)
        try:
            status = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except (Exception, KeyboardInterrupt) as error:
            status = _report(error)
        if status in (None, 0):
            status = _flush()
        sys.exit(status if isinstance(status, int) else 0)


def _report(error: BaseException) -> int:
    """Prints what a user needs to know; the exit status."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        ignore_interrupts()
        return INTERRUPTED
    if hasattr(error, "format_message"):  # a ClickException, whether Typer uses click or brings its own
        where = getattr(error, "ctx", None)
        hint = f" (see {where.command_path} --help)" if where else ""
        message = error.format_message().rstrip(".") + hint
    elif isinstance(error, PowerInferError):
        message = str(error)
    elif isinstance(error, MemoryError):
        message = "out of memory: choose a smaller model, context (-c) or batch (-b)"
    elif isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    else:
        raise error
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 1


def _flush() -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _discard_output() -> None:
    """Lets the interpreter's last flush of stdout go nowhere: its reader is gone."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
