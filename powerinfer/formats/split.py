"""Models split over several files: `NAME-00001-of-00003.gguf` and so on.

Every part is a GGUF file of its own. The first one holds the model's metadata; `split.no` (from 0), `split.count` and
`split.tensors.count` say how they belong together.
"""

from __future__ import annotations

import os
import re

from powerinfer.errors import FormatError, UsageError
from powerinfer.formats.part import Part
from powerinfer.formats.value_types import one_line

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"
SPLIT_KEYS = frozenset({SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS})

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_path(path: str, number: int, count: int) -> str:
    """The path of part `number` (from 1) of the `count` that the part at `path` belongs to.

    UsageError where `path` is not named as a part of `count`.
    """
    match = _NAME.fullmatch(path)
    if match is None or int(match["count"]) != count:
        raise UsageError(
            f"{one_line(path, 400)}: one of {count} parts of a model, "
            f"to be found must be named NAME-00001-of-{count:05}.gguf"
        )
    return f"{match['stem']}-{number:05}-of-{count:05}.gguf"


def open_parts(path: str) -> list[Part]:
    """The file at `path`, and the others of its split model where it is the first part of one.

    Raises UsageError where a part is missing or `path` is not the first, FormatError where parts do not fit together,
    and what `Part` raises.
    """
    parts = [Part(path)]
    try:
        count = parts[0].integer(SPLIT_COUNT, 1)
        if count <= 1:  # merging tools leave a 0 behind
            return parts
        _check_first(parts[0], count)
        for number in range(2, count + 1):
            parts.append(_open_later(parts[0], number, count))
        _check_tensors(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts


def _check_first(first: Part, count: int) -> None:
    no = first.integer(SPLIT_NO, 0)
    shown = one_line(first.path, 400)
    if no >= count:
        raise FormatError(f"{shown}: {SPLIT_NO} is {no}, but {SPLIT_COUNT} is {count}")
    name = part_path(first.path, 1, count)
    if no != 0:
        raise UsageError(f"{shown}: part {no + 1} of {count}: open the first, {one_line(os.path.basename(name), 400)}")
    if name != first.path:
        raise UsageError(f"{shown}: the first part of {count}, but its name says another: rename it")


def _open_later(first: Part, number: int, count: int) -> Part:
    path = part_path(first.path, number, count)
    shown = one_line(path, 400)
    if not os.path.exists(path):
        raise UsageError(f"{shown}: no such file: part {number} of {count} of the model is missing")
    part = Part(path, number - 1)
    try:
        if part.is_powerinfer != first.is_powerinfer:
            raise FormatError(f"{shown}: has another magic than the first part: it is of another model")
        for key, want in ((SPLIT_NO, number - 1), (SPLIT_COUNT, count)):
            value = part.integer(key, -1) if key in part.metadata else None
            if value != want:
                raise FormatError(f"{shown}: {key} is {value}, expected {want}: it is of another model")
    except BaseException:
        part.close()
        raise
    return part


def _check_tensors(parts: list[Part]) -> None:
    seen: dict[str, Part] = {}
    for part in parts:
        for info in part.tensors:
            if info.name in seen:
                raise FormatError(
                    f"{one_line(part.path, 400)}: the tensor {one_line(info.name)!r} is in "
                    f"{one_line(os.path.basename(seen[info.name].path))} too"
                )
            seen[info.name] = part
    want = parts[0].integer(SPLIT_TENSORS, len(seen))
    if want != len(seen):
        raise FormatError(
            f"{one_line(parts[0].path, 400)}: {SPLIT_TENSORS} is {want}, but the {len(parts)} parts hold {len(seen)}"
        )
