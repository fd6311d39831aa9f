"""GPU index files: ours, PowerInfer's, and those that fit nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import TinyLlama

from powerinfer.errors import FormatError, UsageError
from powerinfer.formats import open_gguf
from powerinfer.formats.gpu_index import GpuIndex, fingerprint, index_paths, read_gpu_index, write_gpu_index

INDEX = GpuIndex(
    hot=(np.array([1, 2, 4], np.int32), np.array([], np.int32), np.arange(3, dtype=np.int32)),
    n_ff=(5, 4, 3),
    capacity=1 << 40,
    model="abc",
    budget=1 << 41,
    n_ctx=512,
    version=1,
)


def same(a: GpuIndex, b: GpuIndex) -> bool:
    blank = {"hot": (), "n_ff": ()}
    hot = all(np.array_equal(x, y) for x, y in zip(a.hot, b.hot, strict=True))
    return hot and a.n_ff == b.n_ff and replace(a, **blank) == replace(b, **blank)  # type: ignore[arg-type]


def foreign_file(
    path: Path, tensors: dict[str, np.ndarray], count: int = 2, architecture: str = "generic.gpu_index"
) -> Path:
    """A file as PowerInfer's Python tool writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.add_block_count(count)
    writer.add_uint64("split.vram_capacity", 123)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.write(b"PWRI")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_gpu_index(tmp_path / "x.gpuidx", INDEX)
    assert same(read_gpu_index(tmp_path / "x.gpuidx"), INDEX)
    plain = replace(INDEX, model=None, budget=None, n_ctx=None, version=None)
    write_gpu_index(tmp_path / "y.gpuidx", plain)
    assert same(read_gpu_index(tmp_path / "y.gpuidx"), plain)


def test_the_bytes_are_those_that_powerinfer_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.gpuidx"
    write_gpu_index(path, INDEX)
    data = path.read_bytes()
    assert data[:8] == b"PWRI" + struct.pack("<I", 3)
    assert b"split.vram_capacity" + struct.pack("<IQ", 10, 1 << 40) in data  # 10: u64
    assert b"generic.gpu_index.block_count" + struct.pack("<II", 4, 3) in data  # 4: u32
    entries = [b"blk.0.gpu_idx", b"blk.0.gpu_bucket", b"blk.1.gpu_idx", b"blk.1.gpu_bucket", b"blk.2.gpu_idx"]
    places = [data.index(name + struct.pack("<I", 1)) for name in entries]
    assert places == sorted(places)
    assert data[places[0] :].startswith(entries[0] + struct.pack("<IQI", 1, 5, 18))  # one dimension; 18: its I32
    assert np.array([0, 1, 1, 0, 1], "<i4").tobytes() in data


def test_powerinfers_files_are_read(tmp_path: Path) -> None:
    mask, bucket = np.array([0, 1, 1, 0], np.int32), np.array([1, 2], np.int32)
    tensors = {"blk.0.gpu_idx": mask, "blk.0.gpu_bucket": bucket, "blk.1.gpu_idx": mask}
    index = read_gpu_index(foreign_file(tmp_path / "x.gpuidx", tensors))
    assert [hot.tolist() for hot in index.hot] == [[1, 2], [1, 2]]
    assert (index.capacity, index.model, index.n_ff) == (123, None, (4, 4))


MASK = np.array([0, 1, 1, 0], np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"blk.0.gpu_bucket": np.array([2, 1], np.int32)}), "does not list the neurons"),
        (lambda t: t.update({"blk.0.gpu_bucket": np.array([1, 2, 3], np.int32)}), "does not list the neurons"),
        (lambda t: t.update({"blk.0.gpu_bucket": np.array([1, 9], np.int32)}), "does not list the neurons"),
        (lambda t: t.update({"blk.1.gpu_idx": np.array([0, 2, 0, 0], np.int32)}), "other than 0 and 1"),
        (lambda t: t.update({"blk.1.gpu_idx": MASK.astype(np.float32)}), "no list of 32-bit numbers"),
        (lambda t: t.update({"blk.1.gpu_idx": MASK.reshape(2, 2)}), "no list of 32-bit numbers"),
        (lambda t: t.pop("blk.1.gpu_idx"), "lacks blk.1.gpu_idx"),
        (lambda t: t.update({"blk.2.gpu_idx": MASK}), "but 2 layers"),
    ],
)
def test_files_that_contradict_themselves(
    change: Callable[[dict[str, np.ndarray]], None], message: str, tmp_path: Path
) -> None:
    tensors = {"blk.0.gpu_idx": MASK, "blk.0.gpu_bucket": np.array([1, 2], np.int32), "blk.1.gpu_idx": MASK}
    change(tensors)
    with pytest.raises(FormatError, match=message):
        read_gpu_index(foreign_file(tmp_path / "x.gpuidx", tensors))


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is no GPU index"):
        read_gpu_index(foreign_file(tmp_path / "x.gpuidx", {"blk.0.gpu_idx": MASK}, architecture="llama"))
    with pytest.raises(FormatError, match="expected a whole number up to"):
        read_gpu_index(foreign_file(tmp_path / "y.gpuidx", {"blk.0.gpu_idx": MASK}, count=1 << 31))
    with pytest.raises(UsageError, match=r"none\.gpuidx"):
        read_gpu_index(tmp_path / "none.gpuidx")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model", "xyz", "another model"),
        ("budget", 5, "another budget"),
        ("n_ctx", 1024, "another context"),
        ("version", 2, "another version"),
        ("n_ff", (5, 4, 4), "another shape"),
    ],
)
def test_a_stale_index_says_why(field: str, value: object, reason: str) -> None:
    assert INDEX.misfit(INDEX) is None
    assert reason in (INDEX.misfit(replace(INDEX, **{field: value})) or "")  # type: ignore[arg-type]


def test_an_index_of_powerinfers_is_used_where_it_fits() -> None:
    foreign = replace(INDEX, model=None, budget=None, n_ctx=None, version=None)
    assert foreign.misfit(INDEX) is None
    assert "more memory" in (foreign.misfit(replace(INDEX, capacity=(1 << 40) - 1)) or "")


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    marks = set()
    for i, shape in enumerate([TinyLlama(), TinyLlama(seed=1), TinyLlama(n_layers=3), TinyLlama(kind="F16")]):
        path = shape.build().write(tmp_path / f"{i}.gguf")
        with open_gguf(path) as file:
            marks.add(fingerprint(file))
            assert fingerprint(file) == fingerprint(file)
    assert len(marks) == 4


def test_the_index_lies_beside_the_model_or_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    beside, cached = index_paths(tmp_path / "m.gguf")
    assert beside == tmp_path / "m.gguf.generated.gpuidx"
    assert cached.parent == tmp_path / "cache" / "powerinfer"
    assert index_paths(tmp_path / "sub" / "m.gguf")[1] != cached
