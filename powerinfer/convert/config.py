"""config.json: typed look-ups, with one line for what is missing or makes no sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powerinfer.convert.json_files import read_object
from powerinfer.errors import FormatError, UnsupportedError, UsageError, shown

MAX_SIZE = 1 << 24


class Config:
    """Settings by name. Where a method takes several names, they are spellings of one setting, the first that the file
    has counts; null is as good as missing."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values, self._where = values, where

    def get(self, *names: str) -> Any:
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._value(names, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(names[0], value, f"an integer from {low} to {high}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
            raise self.error(names[0], value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value((name,), default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self._value(names, default)
        if not isinstance(value, str):
            raise self.error(names[0], value, "a string")
        return value

    def section(self, name: str) -> Config:
        """An object in the file, empty without it."""
        value = self._value((name,), {})
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Config(value, f"{self._where}: {name}")

    def refuse(self, name: str, *usual: Any) -> None:
        """Raises UnsupportedError for a setting that is neither missing nor one of `usual`."""
        value = self.get(name)
        if value is not None and value not in usual:
            raise UnsupportedError(f"{self._where}: {name} is {shown(value)}: such models are not supported")

    def error(self, name: str, value: Any, expected: str) -> FormatError:
        return FormatError(f"{self._where}: {name} is {shown(value)}: expected {expected}")

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise FormatError(f"{self._where} lacks {names[0]}: the file is incomplete")
        return value


def read_config(folder: Path) -> Config:
    """The settings of a model folder. UsageError where it is none."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: expected one with a Hugging Face model")
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder} has no config.json: expected a folder with a Hugging Face model")
    config = Config(read_object(path), str(path))
    if config.get("quantization_config") is not None:
        raise UnsupportedError(f"{path}: the model is quantized (quantization_config): convert the original model")
    return config
