"""Figures by matplotlib, where it is installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from powerinfer.errors import UsageError


def new_figure(width: float = 10, height: float = 4) -> Any:
    """Raises UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: install it with `pip install 'powerinfer[plot]'`") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Into a .png or .svg file, which appears when it is complete."""
    from powerinfer.formats import OutputFile

    data = io.BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower(), dpi=120)
    with OutputFile(str(path)) as file:
        file.write(data.getvalue())
