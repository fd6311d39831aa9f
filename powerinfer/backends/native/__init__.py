"""The CPU engine: C++ kernels over memory-mapped weights. Never imports torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from powerinfer.errors import PowerInferError


def _find_kernels() -> None:
    """Looks for the compiled module further along the path: a checkout that is the current folder hides the installed
    package, which holds it.

    Raises PowerInferError where there is none.
    """
    name = f"{__name__}._kernels"
    for entry in sys.path:
        if find_spec(name) is not None:
            return
        __path__.append(str(Path(entry or ".").absolute().joinpath(*__name__.split("."))))
    if find_spec(name) is None:
        raise PowerInferError("the C++ kernels are not built: install the package with `pip install .`")


_find_kernels()

from powerinfer.backends.native.backend import NativeBackend  # noqa: E402  (needs the kernels)

__all__ = ["NativeBackend"]
