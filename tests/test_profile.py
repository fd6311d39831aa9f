"""Profiles: true counts, whatever way they are computed, in files that PowerInfer and placement read, resumable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TinyLlama
from typer.testing import CliRunner

import powerinfer
from powerinfer.backends import BackendOptions, create_backend
from powerinfer.backends.interface import Batch
from powerinfer.cli.app import app
from powerinfer.engine import Model, load
from powerinfer.engine import profile as profile_module
from powerinfer.engine.activations import read_activations
from powerinfer.engine.profile import STATE, Profile, profile, windows
from powerinfer.errors import UsageError
from powerinfer.models import ModelOptions, Transformer, build_spec

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void. " * 20


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return Path(shutil.copy(Path(powerinfer.__file__).parent / "data" / "demo.powerinfer.gguf", tmp_path / "m.gguf"))


def loaded(path: Path, **options: Any) -> Model:
    return load(path, **{"backend": "native", "n_ctx": 64, "n_batch": 32, "dense": True, "n_threads": 2, **options})


def tokens_of(model: Model) -> list[int]:
    return model.tokenizer.encode(TEXT, add_special=False)


def run(path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", "-m", str(path), "-c", "64", "-b", "32", *arguments])


def true_counts(model: Model, tokens: list[int]) -> list[np.ndarray]:
    """Neurons whose gate is open, by the reference backend's own modules."""
    bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
    reference = load(model.file.path, backend="torch", device="cpu", n_ctx=64, dense=True)
    counts: list[np.ndarray] = [np.zeros(layer.feed_forward.n_ff, np.int64) for layer in model.spec.layers]
    for _, block, _ in reference.transformer.layers:
        activation = block._activation  # type: ignore[attr-defined]

        def observe(x: torch.Tensor, into: np.ndarray = counts[block.spec.layer], f: Any = activation) -> torch.Tensor:  # type: ignore[attr-defined]
            y = f(x)
            into += (y > 0).sum(dim=0).numpy()
            return y

        block._activation = observe  # type: ignore[attr-defined]
    for window in windows(tokens, 64, bos, 0):
        batch = Batch.of_sequence(np.array(window, np.int32), 0, np.empty(0, np.int32))
        reference.transformer.forward(batch, reference.cache)
    return counts


@pytest.mark.parametrize("n_batch", [4, 32])
def test_counts_are_those_of_the_reference(demo: Path, n_batch: int, tmp_path: Path) -> None:
    model = loaded(demo, n_batch=n_batch)
    tokens = tokens_of(model)
    result = profile(model, [tokens], tmp_path / "out")
    for have, want in zip(result.counts, true_counts(model, tokens), strict=True):
        assert have.sum() == pytest.approx(want.sum(), rel=2e-3)  # gates that rounding opens or closes
        assert np.abs(have - want).max() <= max(3, 0.02 * want.max())


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
def test_neurons_are_counted_however_a_block_is_computed(n_tokens: int) -> None:
    """Rows of neurons, for few tokens and many, and a whole matrix for down."""
    tokens = np.arange(n_tokens, dtype=np.int32)
    counts = []
    for tiny, options in (
        (TinyLlama(extra={"powerinfer.activation": "relu"}), ModelOptions()),
        (TinyLlama(sparse=True), ModelOptions(dense=True)),
    ):
        spec = build_spec(tiny.build(), options)
        model = Transformer(spec, create_backend("native", BackendOptions(n_threads=2)))
        block: Any = model.layers[0][1]
        block.count_neurons()
        model.forward(Batch.of_sequence(tokens, 0, np.empty(0, np.int32)), model.kv_cache(32))
        counts.append(block.neuron_counts())
        assert counts[-1].sum() == block.activity.fired or spec.layers[0].feed_forward.ffn_down is not None
    assert counts[0].shape == counts[1].shape == (100,)
    for row in counts:
        assert 0 < row.sum() < 100 * n_tokens
        assert row.max() <= n_tokens


def test_files_that_powerinfer_and_placement_read(demo: Path) -> None:
    text = demo.with_name("text.txt")
    text.write_text(TEXT)
    result = run(demo, "-f", str(text), "-f", str(text))
    assert result.exit_code == 0, result.stderr
    folder = demo.parent / "activation"
    assert sorted(path.name for path in folder.iterdir()) == [*(f"activation_{i}.pt" for i in range(4)), "profile.json"]
    model = loaded(demo)
    found = read_activations(model.file, [1024] * 4, lambda line: pytest.fail(line))
    summary = json.loads((folder / "profile.json").read_text())
    for i in range(4):
        counts = torch.load(folder / f"activation_{i}.pt", weights_only=True)
        assert counts.dtype == torch.int64
        assert counts.shape == (1024,)
        assert summary["active"][i] == pytest.approx(float(counts.double().mean()) / summary["tokens"])
        assert np.argmax(found.frequencies[i]) == int(counts.argmax())
    assert "hottest 20 % carry" in result.stdout


def test_a_run_that_is_stopped_goes_on(demo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tokens = tokens_of(loaded(demo))
    whole = profile(loaded(demo), [tokens], tmp_path / "other")

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(loaded(demo), [tokens], folder, on_window=stop)
    assert (folder / STATE).is_file()
    seen: list[int] = []
    rest = profile(loaded(demo), [tokens], folder, on_window=lambda done, total: seen.append(done))
    assert seen[0] == 4
    assert rest.tokens == whole.tokens
    for a, b in zip(rest.counts, whole.counts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_of_something_else_is_refused(demo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tokens = tokens_of(loaded(demo))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(loaded(demo), [tokens], folder, on_window=stop)
    with pytest.raises(UsageError, match="of another model, text or context size"):
        profile(loaded(demo), [tokens[1:]], folder)
    (folder / STATE).write_bytes(b"damaged")
    with pytest.raises(UsageError, match="remove it to begin anew"):
        profile(loaded(demo), [tokens], folder)


def test_ctrl_c_on_the_command_line(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = demo.with_name("text.txt")
    text.write_text(TEXT)

    def stopped(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_module, "profile", stopped)
    result = run(demo, "-f", str(text))
    assert result.exit_code == 130
    assert "the same command goes on from there" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "profile needs a text"),
        (["-f", "nowhere.txt"], "nowhere.txt"),
        (["-f", "empty.txt"], "there is no text to profile with"),
        (["-f", "text.txt", "--tokens", "-1"], "--tokens is -1"),
        (["-f", "text.txt", "--plot", "x.bmp"], "ends in .png or .svg"),
    ],
)
def test_what_cannot_be_profiled(
    arguments: list[str], message: str, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demo.parent)
    Path("text.txt").write_text(TEXT)
    Path("empty.txt").write_text("")
    result = run(demo, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not list(demo.parent.glob("activation/activation_*"))


def test_only_relu_models(demo: Path, tmp_path: Path) -> None:
    model = loaded(demo, activation="silu")
    with pytest.raises(UsageError, match="its activation is silu"):
        profile(model, [tokens_of(model)], tmp_path)


def test_shares_of_the_hottest() -> None:
    result = Profile((np.array([0, 6, 2, 2], np.int64),), 10)
    assert result.share_of_hottest(0.25) == [0.6]
    assert result.share_of_hottest(1) == [1.0]
    assert result.active() == [0.25]


def test_windows_begin_with_bos() -> None:
    assert windows([5, 6, 7], 3, 1, 0) == [[1, 5, 6], [1, 7]]
    assert windows([5, 6, 7], 3, None, 2) == [[5, 6]]
    assert windows([], 3, 1, 0) == []


def test_a_picture(demo: Path) -> None:
    pytest.importorskip("matplotlib")
    text = demo.with_name("text.txt")
    text.write_text(TEXT)
    path = demo.with_name("curves.png")
    assert run(demo, "-f", str(text), "--tokens", "100", "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
