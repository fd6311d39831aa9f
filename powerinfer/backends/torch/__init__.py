"""The reference: every block in plain float32 PyTorch, on any device."""

from __future__ import annotations

from powerinfer.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
