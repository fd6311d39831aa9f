"""Damaged and hostile files: each gives one line that names the field and the value, and nothing else happens."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf  # noqa: F401  (the reader does so for an unusual type: that is not the file's cost)
import pytest
from gguf_files import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    F32,
    I64,
    Q4_0,
    STRING,
    U8,
    U32,
    U64,
    Key,
    RawTensor,
    array,
    array_body,
    build,
    f32_tensor,
    rich_file,
    scalar,
    string,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powerinfer.errors import FormatError, PowerInferError, UnsupportedError, UsageError
from powerinfer.formats import GGUFFile, StringArray, open_gguf

HUGE = (1 << 64) - 1


def message_of(path: Path | str, kind: type[PowerInferError]) -> str:
    with pytest.raises(kind) as caught:
        open_gguf(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.isprintable()
    return message


def message_for(folder: Path, content: bytes, kind: type[PowerInferError] = FormatError) -> str:
    path = folder / "bad.gguf"
    path.write_bytes(content)
    message = message_of(path, kind)
    assert message.startswith(f"{path}: ")
    return message


def nested(depth: int) -> bytes:
    body = array_body(U8, [1])
    for _ in range(depth - 1):
        body = array_body(ARRAY, [body])
    return struct.pack("<I", ARRAY) + body


def key(value: bytes, name: str | bytes = "k") -> bytes:
    return build([ARCHITECTURE, (name, value)])


def tensor(*tensors: RawTensor, keys: tuple[Key, ...] = ()) -> bytes:
    return build([ARCHITECTURE, *keys], tensors)


def raw(dims: tuple[int, ...], type_id: int = F32, name: str | bytes = "t", n_dims: int | None = None) -> RawTensor:
    return RawTensor(name, dims, type_id, bytes(64), n_dims=n_dims)


def at(offset: int, name: str = "t") -> RawTensor:
    return RawTensor(name, (8,), F32, bytes(32), offset)


ALIGNMENT = "general.alignment"

DAMAGED = {
    "empty": (b"", "the file is empty"),
    "two bytes": (b"GG", "starts with b'GG'"),
    "not gguf": (b"\x7fELF" + bytes(60), "not a GGUF file: it starts with b'\\x7fELF', expected GGUF or PWRI"),
    "old ggml": (b"tjgg" + bytes(60), "from before GGUF"),
    "zip": (b"PK\x03\x04" + bytes(60), "convert it to GGUF"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "only the magic": (b"GGUF", "the version takes 4 bytes at byte 4, but 0 are left"),
    "key count": (build(n_keys=HUGE), f"number of metadata keys is {HUGE}"),
    "key count of all that memory can hold": (build([ARCHITECTURE], n_keys=1 << 40), "number of metadata keys is 1099"),
    "key count too high by one": (build([ARCHITECTURE], n_keys=2), "metadata key 1"),
    "key count too high by one before tensors": (
        build([ARCHITECTURE], [f32_tensor()], n_keys=2),
        "length of the name of tensor 0",
    ),
    "tensor count": (build([ARCHITECTURE], n_tensors=HUGE), f"number of tensors is {HUGE}"),
    "tensor count too high by one": (build([ARCHITECTURE], n_tensors=1), "number of tensors is 1"),
    "key name empty": (key(scalar(U8, 1), ""), "length of metadata key 1 is 0: expected 1 to 65535"),
    "key name too long": (key(scalar(U8, 1), "k" * 65536), "length of metadata key 1 is 65536"),
    "key name not utf-8": (key(scalar(U8, 1), b"k\xff"), "metadata key 1 is b'k\\xff': not UTF-8"),
    "key twice": (build([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' appears twice"),
    "key name with control characters": (build([("a\n\x1b[2J", scalar(U8, 1))] * 2), "appears twice"),
    "value type": (key(struct.pack("<IQ", 13, 0)), "type of the value of 'k' is 13: expected 0 to 12"),
    "element type": (key(struct.pack("<IIQ", ARRAY, 99, 0)), "element type of the value of 'k' is 99"),
    "bool": (key(scalar(BOOL, 2)), "value of 'k' is 2: a bool is 0 or 1"),
    "bool in an array": (key(array(BOOL, [0, 1, 7])), "value of 'k' holds 7: a bool is 0 or 1"),
    "string length": (key(struct.pack("<IQ", STRING, HUGE)), f"value of 'k' takes {HUGE} bytes"),
    "string length, signed": (key(struct.pack("<IQ", STRING, 1 << 63)), f"takes {1 << 63} bytes"),
    "array length": (key(array(U32, [1], HUGE)), f"({HUGE} x u32) takes {4 * HUGE} bytes"),
    "array length that wraps around 64 bits": (key(array(U64, [1], 1 << 61)), f"takes {1 << 64} bytes"),
    "string array length": (key(array(STRING, ["a"], HUGE)), f"value of 'k' has {HUGE} strings"),
    "string array too long by one": (
        key(array(STRING, ["a", "b" * 100], 3)).rstrip(b"\0"),
        "length of string 2 in the value of 'k' takes 8 bytes",
    ),
    "string in an array": (
        key(struct.pack("<IIQQ", ARRAY, STRING, 1, 1 << 62) + bytes(50)),
        f"string 0 in the value of 'k' takes {1 << 62} bytes",
    ),
    "string in an array, beyond int64": (
        key(struct.pack("<IIQQ", ARRAY, STRING, 2, HUGE) + bytes(50)),
        f"string 0 in the value of 'k' takes {HUGE} bytes",
    ),
    "nested too deep": (key(nested(5)), "nests arrays more than 4 deep"),
    "nested array length": (key(array(ARRAY, [b""], 1 << 40)), "value of 'k' holds 1099511627776 arrays"),
    "alignment 0": (key(scalar(U32, 0), ALIGNMENT), "general.alignment is 0: expected a power of two"),
    "alignment 48": (key(scalar(U32, 48), ALIGNMENT), "general.alignment is 48"),
    "alignment 4": (key(scalar(U32, 4), ALIGNMENT), "general.alignment is 4"),
    "alignment of another type": (key(scalar(I64, 32), ALIGNMENT), "general.alignment is of type i64: expected u32"),
    "alignment beyond the file": (
        tensor(at(0), keys=((ALIGNMENT, scalar(U32, 1 << 31)),)),
        f"bytes {1 << 31} to {(1 << 31) + 32}, but the file ends",
    ),
    "tensor name empty": (tensor(raw((8,), name="")), "length of the name of tensor 0 is 0"),
    "tensor name too long": (tensor(raw((8,), name="t" * 1025)), "length of the name of tensor 0 is 1025"),
    "tensor name not utf-8": (tensor(raw((8,), name=b"\xc3")), "not UTF-8"),
    "tensor twice": (tensor(f32_tensor("t"), f32_tensor("t")), "the tensor 't' appears twice"),
    "no dimensions": (tensor(raw(())), "tensor 't' has 0 dimensions: expected 1 to 4"),
    "five dimensions": (tensor(raw((1, 1, 1, 1, 8))), "tensor 't' has 5 dimensions"),
    "very many dimensions": (tensor(raw((8,), n_dims=(1 << 32) - 1)), "tensor 't' has 4294967295 dimensions"),
    "dimension 0": (tensor(raw((8, 0))), "dimension 1 of tensor 't' is 0"),
    "dimension -1": (tensor(raw((HUGE,))), f"dimension 0 of tensor 't' is {HUGE}: out of range"),
    "dimensions whose product wraps around to 0": (tensor(raw((1 << 32, 1 << 32))), "but the file ends at"),
    "dimensions whose product wraps around to 8": (tensor(raw((1 << 62, 4, 8))), "but the file ends at"),
    "row of half a block": (tensor(raw((48, 2), Q4_0)), "rows of 48 elements: Q4_0 needs a multiple of 32"),
    "offset beyond the file": (tensor(at(1 << 40)), "but the file ends at"),
    "offset that wraps around": (tensor(at((1 << 64) - 32)), "but the file ends at"),
    "offset not aligned": (tensor(at(8)), "offset of tensor 't' is 8: not a multiple of the alignment, 32"),
    "data cut off by a byte": (tensor(at(0))[:-1], "tensor 't' is bytes 128 to 160, but the file ends at 159"),
    "overlap": (tensor(at(0, "a"), RawTensor("b", (16,), F32, bytes(64), 0)), "'a' and 'b' overlap at byte"),
    "overlap of different starts": (
        tensor(RawTensor("a", (16,), F32, bytes(64), 0), at(32, "b"), at(64, "c")),
        "'a' and 'b' overlap at byte",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    content, expected = DAMAGED[name]
    assert expected in message_for(tmp_path, content)


UNSUPPORTED = {
    "version 1": (build([ARCHITECTURE], version=1), "GGUF version 1 is not supported: supported are 2, 3"),
    "version 4": (build([ARCHITECTURE], version=4), "GGUF version 4"),
    "version 0": (build([ARCHITECTURE], version=0), "GGUF version 0"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "the file is big endian"),
    "tensor type": (tensor(raw((8,), 12345)), "tensor 't': tensor type 12345 is not supported"),
    "tensor type that was withdrawn": (tensor(raw((32,), 4)), "tensor 't': tensor type 4 is not supported"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_files(name: str, tmp_path: Path) -> None:
    content, expected = UNSUPPORTED[name]
    assert expected in message_for(tmp_path, content, UnsupportedError)


def test_what_the_system_refuses(tmp_path: Path) -> None:
    assert "is a directory" in message_of(tmp_path, UsageError)
    assert "no such file" in message_of(tmp_path / "absent.gguf", UsageError)
    assert "not a file name" in message_of("a\0b", UsageError)
    assert "the name is too long" in message_of("x" * 5000, UsageError)
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    assert "is not a regular file" in message_of(fifo, UsageError)
    (tmp_path / "file").write_bytes(b"x")
    assert "no such file" in message_of(tmp_path / "file" / "model.gguf", UsageError)
    assert "no such file" in message_of(tmp_path / "line\nbreak.gguf", UsageError)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(rich_file())
    path.chmod(0)
    if os.access(path, os.R_OK):  # the superuser may read anything

        def refuse(*args: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
    message = message_of(path, UsageError)
    monkeypatch.undo()
    assert "no permission to read it" in message


def test_a_file_cut_off_at_any_byte(tmp_path: Path) -> None:
    content = rich_file()
    path = tmp_path / "cut.gguf"
    for size in range(len(content) - 16):  # the last 16 bytes are padding, which writers may leave out
        path.write_bytes(content[:size])
        with pytest.raises(FormatError) as caught:
            open_gguf(path)
        assert str(caught.value).isprintable()
    path.write_bytes(content[:-16])
    open_gguf(path).close()


def test_many_nested_arrays_are_refused_before_they_cost_memory(tmp_path: Path) -> None:
    empty = array_body(U8, [])
    content = key(array(ARRAY, [empty] * 70_000))
    assert "more than 65536 in a file" in message_for(tmp_path, content)


def touch(file: GGUFFile) -> None:
    """Looks at all that a file offers."""
    for name in file.metadata:
        value = file.metadata[name]
        file.metadata.encoded(name)
        if isinstance(value, StringArray):
            assert len(value.to_list()) == len(value)
    for name, info in file.tensors.items():
        assert file.tensor_bytes(name).nbytes == info.nbytes
        try:
            quantized = file.tensor(name)
        except UnsupportedError:
            continue
        assert quantized is not None
        assert quantized.nbytes == info.nbytes


BASES = (
    rich_file(),
    rich_file(b"PWRI", 2),
    tensor(f32_tensor("a"), f32_tensor("b", 3, 8), raw((64, 1), Q4_0, "q")),
    build([ARCHITECTURE, ("t", array(STRING, [f"token {i}" for i in range(20)])), ("deep", nested(4))]),
)
FIELD_VALUES = st.one_of(
    st.sampled_from([0, 1, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 61, 1 << 62, 1 << 63, HUGE]),
    st.integers(0, HUGE),
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A valid file with some bytes flipped, some 4- and 8-byte integers put in anywhere, and perhaps cut off."""
    content = bytearray(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(content) - 9))
        match draw(st.sampled_from(("flip", "u32", "u64", "cut", "repeat"))):
            case "flip":
                content[position] ^= draw(st.integers(1, 255))
            case "u32":
                content[position : position + 4] = struct.pack("<I", draw(FIELD_VALUES) & 0xFFFFFFFF)
            case "u64":
                content[position : position + 8] = struct.pack("<Q", draw(FIELD_VALUES))
            case "cut":
                del content[max(position, 16) :]
            case _:
                content[position:position] = content[position : position + draw(st.integers(1, 64))]
    return bytes(content)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=mutations())
def test_mutated_files_give_errors_of_ours_or_open(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    message = ""
    try:
        with open_gguf(path) as file:
            touch(file)
    except PowerInferError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert not message or message.isprintable()
    # Objects for keys and tensors weigh more than their bytes in such tiny files; a believed count would weigh GiBs.
    assert peak < 1_000_000 + 50 * len(content)


def test_the_builder_makes_valid_files(tmp_path: Path) -> None:
    for i, content in enumerate(BASES):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(content)
        with open_gguf(path) as file:
            touch(file)
    assert string("a") == b"\1\0\0\0\0\0\0\0a"
