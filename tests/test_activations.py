"""Activation statistics: PowerInfer's files, our tensors, nothing at all, and files that fit nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import TinyLlama, tensor

from powerinfer.engine.activations import TENSOR, read_activations
from powerinfer.errors import FormatError
from powerinfer.formats import GGUFFile, open_gguf


def model(folder: Path, stored: list[np.ndarray] | None = None) -> GGUFFile:
    file = TinyLlama().build()
    for i, values in enumerate(stored or []):
        file.tensors[TENSOR.format(i)] = tensor(values)
    return open_gguf(file.write(folder / "m.gguf"))


def save(folder: Path, name: str, value: object) -> None:
    (folder / "activation").mkdir(exist_ok=True)
    torch.save(value, folder / "activation" / name)


def test_powerinfers_files_in_numeric_order(tmp_path: Path) -> None:
    for i in range(12):
        save(tmp_path, f"activation_{i}.pt", torch.arange(3) * (i + 1))
    (tmp_path / "activation" / "notes.txt").write_text("not one of them")
    (tmp_path / "activation" / "activation_x.pt").write_text("nor this")
    found = read_activations(model(tmp_path), [3] * 12, lambda line: pytest.fail(line))
    assert found.source.endswith("activation")
    for i, row in enumerate(found.frequencies):
        np.testing.assert_allclose(row, np.arange(3) * (i + 1) / 24)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float16, torch.bfloat16, torch.bool])
def test_counts_of_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    save(tmp_path, "activation_0.pt", torch.tensor([0, 1, 1]).to(dtype))
    found = read_activations(model(tmp_path), [3], lambda line: pytest.fail(line))
    assert found.frequencies[0].tolist() == [0, 1, 1]
    assert found.frequencies[0].dtype == np.float64


def test_the_models_own_tensors(tmp_path: Path) -> None:
    rows = [np.linspace(0, 1, 4), np.linspace(0.5, 0, 4)]
    found = read_activations(model(tmp_path, rows), [4, 4], lambda line: pytest.fail(line))
    np.testing.assert_allclose(np.array(found.frequencies), np.array(rows), atol=1e-6)
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_activation has 4 counts, the layer 5 neurons"):
        read_activations(model(tmp_path, rows), [5, 4], lambda line: pytest.fail(line))


def test_without_statistics_all_are_equal_and_the_user_is_told_how_to_measure(tmp_path: Path) -> None:
    lines: list[str] = []
    found = read_activations(model(tmp_path), [3, 4], lines.append)
    assert [set(row) for row in found.frequencies] == [{0.1}, {0.1}]
    assert len(lines) == 1
    assert f"powerinfer profile -m {tmp_path / 'm.gguf'}" in lines[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4), "has 4 counts, the layer 3 neurons: it is of another model"),
        (torch.zeros(3, 1), "holds no list of numbers"),
        ([1, 2, 3], "holds no list of numbers"),
        (torch.tensor([1.0, -1.0, 0.0]), "negative or no numbers"),
        (torch.tensor([1.0, float("nan"), 0.0]), "negative or no numbers"),
        (torch.tensor([1.0, float("inf"), 0.0]), "negative or no numbers"),
    ],
)
def test_files_that_do_not_fit(value: object, message: str, tmp_path: Path) -> None:
    save(tmp_path, "activation_0.pt", value)
    with pytest.raises(FormatError, match=message):
        read_activations(model(tmp_path), [3], lambda line: None)


def test_missing_and_surplus_layers(tmp_path: Path) -> None:
    for i in (0, 2):
        save(tmp_path, f"activation_{i}.pt", torch.zeros(3))
    with pytest.raises(FormatError, match=r"3 layers: activation_1\.pt is missing"):
        read_activations(model(tmp_path), [3] * 3, lambda line: None)
    save(tmp_path, "activation_1.pt", torch.zeros(3))
    with pytest.raises(FormatError, match="2 layers: it has 3 files"):
        read_activations(model(tmp_path), [3] * 2, lambda line: None)


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (f"{os.environ['MALICIOUS_TARGET']}",)


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALICIOUS_TARGET", str(tmp_path / "executed"))
    save(tmp_path, "activation_0.pt", Malicious())
    with pytest.raises(FormatError, match="no tensor that torch saved"):
        read_activations(model(tmp_path), [3], lambda line: None)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("data", [b"", b"garbage" * 100, b"PK\x03\x04" + b"\0" * 50])
def test_damaged_files(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "activation").mkdir()
    (tmp_path / "activation" / "activation_0.pt").write_bytes(data)
    with pytest.raises(FormatError, match="cannot read"):
        read_activations(model(tmp_path), [3], lambda line: None)
