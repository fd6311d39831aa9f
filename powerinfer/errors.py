"""The exceptions this package raises for a user's mistakes and for bad files.

Each message is one line that says what is wrong, which value, and what to do. The command line prints it after
`error: ` and exits with status 1; anything that is not a `PowerInferError` is a bug.
"""

from __future__ import annotations


class PowerInferError(Exception):
    """Base of every error that a caller can cause and mend."""


class FormatError(PowerInferError):
    """A file is damaged, or is not of the format it should be."""


class UnsupportedError(PowerInferError):
    """A well-formed file or request needs something that is not implemented."""


class UsageError(PowerInferError):
    """An argument's value does not make sense, alone or with the model at hand."""


def shown(value: object, limit: int = 80) -> str:
    """A value as a message can hold it: on one line, and not longer than `limit` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
