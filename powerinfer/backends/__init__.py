"""How blocks of a model are computed. `interface` is the contract; each backend is one folder."""

from __future__ import annotations

from powerinfer.backends.interface import Backend, BackendOptions
from powerinfer.errors import UsageError

__all__ = ["NAMES", "Backend", "BackendOptions", "create_backend"]

NAMES = ("native", "torch")


def create_backend(name: str, options: BackendOptions) -> Backend:
    """The backend called `name`. A backend's own dependencies are imported only when it is asked for.

    Raises UsageError for an unknown name.
    """
    if name == "native":
        from powerinfer.backends.native import NativeBackend

        return NativeBackend(options)
    if name == "torch":
        from powerinfer.backends.torch import TorchBackend

        return TorchBackend(options)
    raise UsageError(f"unknown backend {name!r}: choose one of {', '.join(NAMES)}")
