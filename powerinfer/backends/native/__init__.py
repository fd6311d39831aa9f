"""The CPU engine: C++ kernels over memory-mapped weights. Never imports torch."""

from __future__ import annotations

from powerinfer.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
