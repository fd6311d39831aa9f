"""State dicts as torch.save writes them, read without executing anything in them."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

from powerinfer.convert.source import KINDS, SourceTensor, unsupported_type
from powerinfer.errors import FormatError, shown

_KIND_OF = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class TorchFile:
    """A state dict, mapped where the file is a zip archive (since torch 1.6), in memory where it is older."""

    def __init__(self, path: Path) -> None:
        """Raises FormatError for a file that is damaged, holds more than plain tensors, or would run code."""
        import torch

        self._path = path
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of deprecated storages in old files
                state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # pickle, zip, torch and OS errors of a file that anyone may have made
            reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
            raise FormatError(f"cannot read {path}: no state dict that is plain tensors ({reason})") from None
        if not isinstance(state, dict):
            raise FormatError(f"{path} holds {shown(type(state).__name__)}: expected a state dict")
        for name, value in state.items():
            if not isinstance(name, str) or not _is_plain(value, torch):
                raise FormatError(f"{path}: {shown(name)} is not a plain tensor: expected a state dict")
        self._state: dict[str, Any] = dict(state)
        self.shapes = {name: tuple(value.shape) for name, value in self._state.items()}

    def tensor(self, name: str) -> SourceTensor:
        """Raises UnsupportedError for a type that is not of KINDS."""
        import torch

        value = self._state[name].detach().resolve_neg()
        kind = _KIND_OF.get(str(value.dtype))
        if kind is None:
            raise unsupported_type(self._path, name, str(value.dtype))
        data = value.view(torch.int16).numpy().view("<u2") if kind == "BF16" else value.numpy()
        return SourceTensor(name, KINDS[kind], data)

    def release_pages(self) -> None:
        """Torch keeps the map; the system takes its pages back when memory is short."""


def _is_plain(value: Any, torch: Any) -> bool:
    """A tensor with an element for each of its indices: one of stride 0 could be said to be of any size."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    return bool(value.numel() * value.element_size() <= value.untyped_storage().nbytes())
