"""Models split over several files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_files import ARCHITECTURE, I32, STRING, U16, Key, RawTensor, build, f32_tensor, scalar

from powerinfer.errors import FormatError, PowerInferError, UsageError
from powerinfer.formats import open_gguf


def split_keys(no: int, count: int = 3, tensors: int | None = 4) -> list[Key]:
    keys: list[Key] = [("split.no", scalar(U16, no)), ("split.count", scalar(U16, count))]
    return keys if tensors is None else [*keys, ("split.tensors.count", scalar(I32, tensors))]


def part_name(number: int, count: int = 3) -> str:
    return f"model-{number:05}-of-{count:05}.gguf"


def write_parts(folder: Path) -> list[Path]:
    """Three parts with one, none and three tensors."""
    tensors: tuple[list[RawTensor], ...] = (
        [f32_tensor("a")],
        [],
        [f32_tensor("b", 3, 4), f32_tensor("c"), f32_tensor("d")],
    )
    paths = []
    for no, own in enumerate(tensors):
        first: list[Key] = [ARCHITECTURE, ("general.name", scalar(STRING, "split"))] if no == 0 else []
        path = folder / part_name(no + 1)
        path.write_bytes(build(first + split_keys(no), own))
        paths.append(path)
    return paths


def one_line_of(path: Path, kind: type[PowerInferError]) -> str:
    with pytest.raises(kind) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_first_part_brings_the_others(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    with open_gguf(paths[0]) as file:
        assert file.paths == tuple(map(str, paths))
        assert file.path == str(paths[0])
        assert list(file.tensors) == ["a", "b", "c", "d"]
        assert [info.part for info in file.tensors.values()] == [0, 2, 2, 2]
        assert file.get("general.name") == "split"
        values = file.array("b")
        assert values is not None
        np.testing.assert_array_equal(values.reshape(-1), np.arange(12))
        assert file.nbytes == 4 * (8 + 12 + 8 + 8)


@pytest.mark.parametrize("number", [2, 3])
def test_a_later_part_says_which_to_open(number: int, tmp_path: Path) -> None:
    message = one_line_of(write_parts(tmp_path)[number - 1], UsageError)
    assert message.endswith(f"part {number} of 3: open the first, model-00001-of-00003.gguf")


@pytest.mark.parametrize("number", [2, 3])
def test_a_missing_part_is_named(number: int, tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[number - 1].unlink()
    message = one_line_of(paths[0], UsageError)
    assert part_name(number) in message
    assert "missing" in message


def test_a_renamed_first_part_says_how_it_must_be_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    assert "NAME-00001-of-00003.gguf" in one_line_of(paths[0].rename(tmp_path / "model.gguf"), UsageError)
    assert "rename it" in one_line_of((tmp_path / "model.gguf").rename(tmp_path / part_name(2)), UsageError)


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_model_is_one_file(count: int, tmp_path: Path) -> None:
    path = tmp_path / "merged.gguf"
    path.write_bytes(build([ARCHITECTURE, *split_keys(0, count, None)], [f32_tensor("a")]))
    with open_gguf(path) as file:
        assert file.paths == (str(path),)


@pytest.mark.parametrize(
    ("keys", "magic", "tensor", "expected"),
    [
        (split_keys(2), b"GGUF", "b", "split.no is 2, expected 1"),
        (split_keys(1, count=4), b"GGUF", "b", "split.count is 4, expected 3"),
        ([], b"GGUF", "b", "split.no is None, expected 1"),
        (split_keys(1), b"PWRI", "b", "another magic"),
        (split_keys(1), b"GGUF", "a", "the tensor 'a' is in model-00001-of-00003.gguf too"),
        (split_keys(1), b"GGUF", "other", "split.tensors.count is 4, but the 3 parts hold 5"),
    ],
)
def test_parts_that_do_not_fit_together(
    keys: list[Key], magic: bytes, tensor: str, expected: str, tmp_path: Path
) -> None:
    paths = write_parts(tmp_path)
    paths[1].write_bytes(build(keys, [f32_tensor(tensor)], magic=magic))
    assert expected in one_line_of(paths[0], FormatError)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (("split.count", scalar(STRING, "3")), "split.count is '3': expected an integer"),
        (("split.count", scalar(I32, -3)), "split.count is -3: expected an integer"),
    ],
)
def test_senseless_split_keys(key: Key, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(build([ARCHITECTURE, key]))
    assert expected in one_line_of(path, FormatError)


def test_a_part_number_beyond_the_count(tmp_path: Path) -> None:
    path = tmp_path / part_name(1)
    path.write_bytes(build([ARCHITECTURE, *split_keys(3)]))
    assert "split.no is 3, but split.count is 3" in one_line_of(path, FormatError)


def test_a_damaged_later_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:40])
    assert part_name(3) in one_line_of(paths[0], FormatError)
