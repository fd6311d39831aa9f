"""The user's folder for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powerinfer"
