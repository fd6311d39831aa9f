"""Writing GGUF files: what was written is read back by our reader and by gguf-py, and a failure leaves no trace."""

from __future__ import annotations

import errno
import os
import re
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf_files import SHARED_DATA, U32, RawTensor, build, rich_file, scalar
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer.errors import FormatError, PowerInferError, UnsupportedError, UsageError
from powerinfer.formats import I32, GGUFFile, GGUFWriter, Layout, StringArray, ValueType, layout_of, open_gguf

F32: Layout = layout_of(0)[0]
Q4_0: Layout = layout_of(2)[0]


def copy(source: GGUFFile, target: Path, powerinfer: bool) -> None:
    with GGUFWriter(target, powerinfer=powerinfer) as writer:
        writer.copy_metadata(source.metadata)
        for info in source.tensors.values():
            writer.declare_tensor(info.name, info.layout, info.shape)
        for name in source.tensors:
            writer.write_tensor(name, source.tensor_bytes(name))


def write_values(path: Path, *values: tuple[str, Any, ValueType | None, ValueType | None]) -> GGUFFile:
    with GGUFWriter(path, "llama") as writer:
        for value in values:
            writer.add(*value)
    return open_gguf(path)


def write_vector(path: Path, data: npt.NDArray[Any] | Iterable[npt.NDArray[Any]], n: int) -> None:
    with GGUFWriter(path, "llama") as writer:
        writer.declare_tensor("t", F32, (n,))
        writer.write_tensor("t", data)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def plain(value: Any) -> Any:
    if isinstance(value, StringArray):
        return value.to_list()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("powerinfer", [False, True])
def test_a_copy_keeps_types_values_and_bytes(powerinfer: bool, tmp_path: Path) -> None:
    source_path, target = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    source_path.write_bytes(rich_file())
    with open_gguf(source_path) as source:
        copy(source, target, powerinfer)
        with open_gguf(target) as ours:
            assert ours.is_powerinfer == powerinfer
            assert ours.version == 3
            assert list(ours.metadata) == list(source.metadata)
            for key in source.metadata:
                assert ours.metadata.encoded(key) == source.metadata.encoded(key)
            assert list(ours.tensors) == list(source.tensors)
            for name, info in source.tensors.items():
                copied = ours.tensors[name]
                assert (copied.layout, copied.shape) == (info.layout, info.shape)
                np.testing.assert_array_equal(ours.tensor_bytes(name), source.tensor_bytes(name))
    assert target.read_bytes()[:4] == (b"PWRI" if powerinfer else b"GGUF")
    if not powerinfer:
        assert target.read_bytes() == rich_file()


def test_a_copy_of_a_real_file_is_the_file(tmp_path: Path) -> None:
    for name in ("relu-a-q4_0.powerinfer.gguf", "relu-a.example.gpuidx"):
        path = SHARED_DATA / "relu-a" / name
        if not path.exists():
            pytest.skip("the shared data is not here")
        with open_gguf(path) as source:
            copy(source, tmp_path / name, source.is_powerinfer)
        assert (tmp_path / name).read_bytes() == path.read_bytes()


def test_gguf_py_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    blocks = np.arange(72, dtype=np.uint8)
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    with GGUFWriter(path, "llama") as writer:
        writer.add("tokens", ["a", "é", ""])
        writer.add("scores", np.array([0.5, -1.0], np.float32))
        writer.add("flags", [True, False])
        writer.add("general.alignment", 64)
        writer.declare_tensor("matrix", F32, (3, 4))
        writer.declare_tensor("blocks", Q4_0, (2, 64))
        writer.write_tensor("matrix", matrix)
        writer.write_tensor("blocks", blocks)
    reader = gguf.GGUFReader(path)
    contents = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert contents == {
        "general.architecture": "llama",
        "tokens": ["a", "é", ""],
        "scores": [0.5, -1.0],
        "flags": [True, False],
        "general.alignment": 64,
    }
    assert reader.alignment == 64
    assert [tensor.name for tensor in reader.tensors] == ["matrix", "blocks"]
    np.testing.assert_array_equal(reader.tensors[0].data, matrix)
    np.testing.assert_array_equal(reader.tensors[1].data.reshape(-1), blocks)
    assert [tensor.data_offset % 64 for tensor in reader.tensors] == [0, 0]
    assert path.stat().st_size % 64 == 0


def test_types_are_inferred(tmp_path: Path) -> None:
    cases: list[tuple[Any, ValueType, ValueType | None]] = [
        (True, ValueType.BOOL, None),
        (7, ValueType.UINT32, None),
        (-7, ValueType.INT32, None),
        (1 << 40, ValueType.UINT64, None),
        (-(1 << 40), ValueType.INT64, None),
        (0.5, ValueType.FLOAT32, None),
        ("text", ValueType.STRING, None),
        (np.int16(5), ValueType.INT16, None),
        (np.float64(0.1), ValueType.FLOAT64, None),
        ([1, 2], ValueType.ARRAY, ValueType.INT32),
        ([1, 4_000_000_000], ValueType.ARRAY, ValueType.UINT32),
        ([1, -4_000_000_000], ValueType.ARRAY, ValueType.INT64),
        ([1, 0.5], ValueType.ARRAY, ValueType.FLOAT32),
        ([True], ValueType.ARRAY, ValueType.BOOL),
        (("a", "b"), ValueType.ARRAY, ValueType.STRING),
        (np.array([1, 2], np.uint8), ValueType.ARRAY, ValueType.UINT8),
        (np.array([1.0, 2.0], ">f8"), ValueType.ARRAY, ValueType.FLOAT64),
        (np.array([True, False]), ValueType.ARRAY, ValueType.BOOL),
        ([[1, 2], ["x"]], ValueType.ARRAY, ValueType.ARRAY),
    ]
    values = [(f"k{i}", value, None, None) for i, (value, _, _) in enumerate(cases)]
    with write_values(tmp_path / "a.gguf", *values) as file:
        for i, (value, kind, element) in enumerate(cases):
            assert file.value_type(f"k{i}") is kind, value
            assert file.metadata.element_type(f"k{i}") is element, value
            expected = value.tolist() if isinstance(value, np.ndarray) else value
            assert plain(file.metadata[f"k{i}"]) == (list(expected) if isinstance(expected, tuple) else expected)


INTEGERS = {
    ValueType.UINT8: (0, 255),
    ValueType.INT8: (-128, 127),
    ValueType.UINT16: (0, 65535),
    ValueType.INT16: (-(1 << 15), (1 << 15) - 1),
    ValueType.UINT32: (0, (1 << 32) - 1),
    ValueType.INT32: (-(1 << 31), (1 << 31) - 1),
    ValueType.UINT64: (0, (1 << 64) - 1),
    ValueType.INT64: (-(1 << 63), (1 << 63) - 1),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_at_and_beyond_their_limits(kind: ValueType, tmp_path: Path) -> None:
    low, high = INTEGERS[kind]
    scalars = [("low", low, kind, None), ("high", high, kind, None)]
    arrays = [("both", [low, high], ValueType.ARRAY, kind), ("none", [], None, kind)]
    with write_values(tmp_path / "a.gguf", *scalars, *arrays) as file:
        assert (file.get("low"), file.get("high")) == (low, high)
        assert file.get("both").tolist() == [low, high]
        assert len(file.get("none")) == 0
        assert file.metadata.element_type("none") is kind
    for value in (low - 1, high + 1):
        with pytest.raises(UsageError, match="metadata key 'k': cannot store"):
            write_values(tmp_path / "b.gguf", ("k", value, kind, None))
        with pytest.raises(UsageError, match="metadata key 'k': cannot store"):
            write_values(tmp_path / "b.gguf", ("k", [value], None, kind))
    assert leftovers(tmp_path) == ["a.gguf"]


@pytest.mark.parametrize(
    ("value", "kind", "element"),
    [
        (None, None, None),
        ({}, None, None),
        ([], None, None),
        ([None], None, None),
        ("1", ValueType.UINT32, None),
        (True, ValueType.UINT32, None),
        (1.5, ValueType.UINT32, None),
        (1, ValueType.BOOL, None),
        (1, ValueType.STRING, None),
        (1, ValueType.ARRAY, None),
        (1e300, ValueType.FLOAT32, None),
        ([1e300], None, ValueType.FLOAT32),
        ([1.5], None, ValueType.INT32),
        (["a", 1], None, None),
        ([1, "a"], None, None),
        ([[1], 2], None, None),
        ([[[[[1]]]]], None, None),
        (np.zeros((2, 2)), None, None),
        (np.array(["a"]), None, None),
        ("\ud800", None, None),
        (1 << 64, None, None),
    ],
)
def test_values_that_do_not_fit(value: Any, kind: ValueType | None, element: ValueType | None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("metadata key 'some.key': cannot store")) as caught:
        write_values(tmp_path / "a.gguf", ("some.key", value, kind, element))
    assert str(caught.value).isprintable()
    assert leftovers(tmp_path) == []


SCALARS = st.one_of(
    st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(width=32, allow_nan=False), st.text(max_size=20)
)
LISTS = st.one_of(
    st.lists(st.booleans(), min_size=1),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    st.lists(st.text(max_size=9), min_size=1),
)


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(st.text(min_size=1, max_size=30), SCALARS | LISTS | st.lists(LISTS, min_size=1)))
def test_any_values_come_back(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "values.gguf"
    values.pop("general.alignment", None)
    with write_values(path, *((key, value, None, None) for key, value in values.items())) as file:
        assert {key: plain(file.metadata[key]) for key in values} == values


def test_later_values_replace_earlier_ones_in_place(tmp_path: Path) -> None:
    source_path = tmp_path / "a.gguf"
    source_path.write_bytes(rich_file())
    with open_gguf(source_path) as source, GGUFWriter(tmp_path / "b.gguf") as writer:
        writer.copy_metadata(source.metadata, skip=("one.u16", "nested"))
        writer.add("one.u8", "now a string")
    with open_gguf(tmp_path / "b.gguf") as file:
        assert file.get("one.u8") == "now a string"
        assert list(file.metadata)[1] == "one.u8"
        assert "one.u16" not in file.metadata
        assert "nested" not in file.metadata


def test_a_copy_of_a_split_model_is_one_file(tmp_path: Path) -> None:
    keys = [
        ("general.architecture", scalar(8, "x")),
        ("split.count", scalar(2, 0)),
        ("split.vram_capacity", scalar(10, 5)),
    ]
    (tmp_path / "a.gguf").write_bytes(build(keys))
    with open_gguf(tmp_path / "a.gguf") as source:
        copy(source, tmp_path / "b.gguf", powerinfer=False)
    with open_gguf(tmp_path / "b.gguf") as file:
        assert list(file.metadata) == ["general.architecture", "split.vram_capacity"]


def test_bytes_that_are_not_utf8_survive(tmp_path: Path) -> None:
    with write_values(tmp_path / "a.gguf", ("t", [b"\xff", "é", "\udcfe"], None, None)) as file:
        tokens = file.get("t")
        assert tokens.to_bytes_list() == [b"\xff", "é".encode(), b"\xfe"]
        with write_values(tmp_path / "b.gguf", ("t", tokens, None, None)) as again:
            assert again.get("t").to_bytes_list() == tokens.to_bytes_list()


def test_alignment_of_the_source_is_kept(tmp_path: Path) -> None:
    keys = [("general.architecture", scalar(8, "x")), ("general.alignment", scalar(U32, 256))]
    tensors = [RawTensor("a", (3,), 0, bytes(12)), RawTensor("b", (1,), 0, b"abcd")]
    content = build(keys, tensors, alignment=256)
    (tmp_path / "a.gguf").write_bytes(content)
    with open_gguf(tmp_path / "a.gguf") as source:
        copy(source, tmp_path / "b.gguf", powerinfer=False)
    assert (tmp_path / "b.gguf").read_bytes() == content


@pytest.mark.parametrize("value", [0, 4, 48, "32", np.int32(32), np.uint64(32)])
def test_bad_alignment(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("general.alignment must be a u32, a power of two")):
        write_values(tmp_path / "a.gguf", ("general.alignment", value, None, None))


def test_integers_of_powerinfer_files_get_their_old_ids(tmp_path: Path) -> None:
    for powerinfer, type_id in ((True, 18), (False, 26)):
        path = tmp_path / "a.gguf"
        with GGUFWriter(path, "generic.gpu_index", powerinfer=powerinfer) as writer:
            writer.declare_tensor("i", I32, (3,))
            writer.declare_tensor("none", I32, (0,))
            writer.write_tensor("i", np.array([5, 6, 7], np.int32))
            writer.write_tensor("none", np.array([], np.int32))
        assert type_id.to_bytes(4, "little") + bytes(8) in path.read_bytes()
        with open_gguf(path) as file:
            assert plain(file.array("i")) == [5, 6, 7]
            assert plain(file.array("none")) == []
    writer = GGUFWriter(tmp_path / "b.gguf", "llama", powerinfer=True)
    with pytest.raises(UnsupportedError, match="cannot hold tensors of type IQ3_XXS"):
        writer.declare_tensor("t", layout_of(18)[0], (256,))


def test_tensors_in_pieces_and_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    a, b = np.arange(5, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    with GGUFWriter(path, "llama") as writer:
        writer.declare_tensor("a", F32, a.shape)
        writer.declare_tensor("b", F32, b.shape)
        assert writer.nbytes == 44
        writer.write_tensor("b", (row for row in b))
        writer.write_tensor("a", a[::-1][::-1])
    with open_gguf(path) as file:
        np.testing.assert_array_equal(file.array("a"), a)
        np.testing.assert_array_equal(file.array("b"), b)


def test_bad_declarations(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "a.gguf", "llama") as writer:
        with pytest.raises(FormatError, match="rows of 48 elements: Q4_0 needs a multiple of 32"):
            writer.declare_tensor("t", Q4_0, (2, 48))
        for shape in ((), (1, 1, 1, 1, 1), (0, 4), (-1,), (1 << 63,)):
            with pytest.raises(FormatError, match="tensor 't' has the shape"):
                writer.declare_tensor("t", F32, shape)
        for name in ("", "t" * 1025):
            with pytest.raises(UsageError, match="must have 1 to 1024 bytes"):
                writer.declare_tensor(name, F32, (1,))
        for key in ("", "k" * 65536):
            with pytest.raises(UsageError, match="must have 1 to 65535 bytes"):
                writer.add(key, 1)


def test_misuse(tmp_path: Path) -> None:
    one = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=re.escape("general.architecture is missing")), GGUFWriter(tmp_path / "a"):
        pass
    with (
        pytest.raises(ValueError, match="tensors without data: t"),
        GGUFWriter(tmp_path / "a", "llama") as writer,
    ):
        writer.declare_tensor("t", F32, (1,))
    for data in (np.zeros(2, np.float32), one[:0]):
        with pytest.raises(ValueError, match="takes 4 bytes"):
            write_vector(tmp_path / "a", data, 1)
    with GGUFWriter(tmp_path / "good", "llama") as writer:
        writer.declare_tensor("t", F32, (1,))
        with pytest.raises(ValueError, match="declared twice"):
            writer.declare_tensor("t", F32, (1,))
        writer.write_tensor("t", one)
        with pytest.raises(ValueError, match="written twice"):
            writer.write_tensor("t", one)
        with pytest.raises(ValueError, match="the header has been written"):
            writer.add("k", 1)
    assert leftovers(tmp_path) == ["good"]


@pytest.mark.parametrize("failure", [RuntimeError("stop"), KeyboardInterrupt()])
def test_a_failure_leaves_the_target_alone(failure: BaseException, tmp_path: Path) -> None:
    target = tmp_path / "a.gguf"
    target.write_bytes(b"before")

    def pieces() -> Iterator[npt.NDArray[Any]]:
        yield np.zeros(4, np.float32)
        assert len(leftovers(tmp_path)) == 2
        raise failure

    with pytest.raises(type(failure)):
        write_vector(target, pieces(), 8)
    assert target.read_bytes() == b"before"
    assert leftovers(tmp_path) == ["a.gguf"]


class FullDisk:
    """A file that takes no more than `room` bytes."""

    def __init__(self, file: Any, room: int, code: int) -> None:
        self._file, self._room, self._code = file, room, code

    def write(self, data: memoryview) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(self._code, os.strerror(self._code))
        self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 200])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, r"cannot write .*a\.gguf: the disk is full, 4224 bytes are needed and \d+ are free"),
        (errno.EIO, r"cannot write .*a\.gguf: Input/output error"),
    ],
)
def test_a_full_disk(code: int, expected: str, room: int, tmp_path: Path) -> None:
    target = tmp_path / "a.gguf"
    target.write_bytes(b"before")

    def write() -> None:
        with GGUFWriter(target, "llama") as writer:
            output = writer._output
            output._file = FullDisk(output._file, room, code)  # type: ignore[assignment]
            writer.declare_tensor("t", F32, (1024,))
            writer.write_tensor("t", np.zeros(1024, np.float32))

    with pytest.raises(PowerInferError, match=expected):
        write()
    assert target.read_bytes() == b"before"
    assert leftovers(tmp_path) == ["a.gguf"]


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(PowerInferError, match="the disk is full"), GGUFWriter(tmp_path / "a.gguf", "llama"):
        monkeypatch.setattr(os, "replace", refuse)
    assert leftovers(tmp_path) == []


def test_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a directory"):
        GGUFWriter(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is not a regular file"):
        GGUFWriter(tmp_path / "pipe")
    with pytest.raises(UsageError, match="No such file or directory"), GGUFWriter(tmp_path / "absent" / "a.gguf"):
        pass
    with pytest.raises(UsageError, match="not a file name"):
        GGUFWriter("a\0b")


def test_the_file_has_the_usual_permissions_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "folder" / "a.gguf")
    with GGUFWriter(tmp_path / "link.gguf", "llama"):
        pass
    assert (tmp_path / "link.gguf").is_symlink()
    assert leftovers(tmp_path / "folder") == ["a.gguf"]
    assert (tmp_path / "folder" / "a.gguf").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_file_can_be_replaced_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(rich_file())
    with open_gguf(path) as source:
        copy(source, path, powerinfer=True)
        assert source.tensor_bytes("matrix").view("<f4").tolist() == list(range(8))
    with open_gguf(path) as file:
        assert file.is_powerinfer


def test_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    rows, columns = 256, 4096
    tracemalloc.start()
    try:
        with GGUFWriter(tmp_path / "a.gguf", "llama") as writer:
            writer.declare_tensor("t", F32, (rows, columns))
            writer.write_tensor("t", (np.full(columns, i, np.float32) for i in range(rows)))
        assert tracemalloc.get_traced_memory()[1] < 8 * 4 * columns
    finally:
        tracemalloc.stop()
    with open_gguf(tmp_path / "a.gguf") as file:
        values = file.array("t")
        assert values is not None
        np.testing.assert_array_equal(values[:, -1], np.arange(rows))
