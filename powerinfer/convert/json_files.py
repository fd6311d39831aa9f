"""JSON files of a model folder, which anyone may have made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from powerinfer.errors import FormatError, UsageError, shown

MAX_BYTES = 1 << 28
"""Above any tokenizer.json; the largest known take 40 MB."""


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The object that `text` holds; FormatError, naming `where`, for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise FormatError(f"{where} is no JSON: {reason}; the file is damaged, download it again") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where} holds {shown(value)}: expected an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; UsageError where it cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise FormatError(f"{path} has {size} bytes: expected at most {MAX_BYTES}")
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def read_optional(path: Path) -> dict[str, Any]:
    """As `read_object`, but empty where there is no file."""
    return read_object(path) if path.is_file() else {}
