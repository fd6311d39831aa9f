"""Measuring how often each neuron fires: what placement and predictors go by."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer.backends.interface import Batch
from powerinfer.engine.model import Model
from powerinfer.errors import PowerInferError, UsageError
from powerinfer.formats import OutputFile
from powerinfer.formats.gpu_index import fingerprint

Counts = npt.NDArray[np.int64]

STATE = "profile.state.npz"
SUMMARY = "profile.json"
SAVE_SECONDS = 30.0
"""So much work is lost at most when a run is killed."""
HOTTEST = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6)


@dataclass(frozen=True, slots=True)
class Profile:
    """counts: of each layer, for how many of `tokens` each neuron fired, int64 (n_ff,)."""

    counts: tuple[Counts, ...]
    tokens: int

    def active(self) -> list[float]:
        """Of each layer, the part of its neurons that fires for a token."""
        return [float(row.mean()) / max(1, self.tokens) for row in self.counts]

    def share_of_hottest(self, part: float) -> list[float]:
        """Of each layer, the part of its activations that the hottest `part` of its neurons has."""
        shares = []
        for row in self.counts:
            ordered = np.sort(row)[::-1]
            shares.append(float(ordered[: max(1, round(part * len(row)))].sum()) / max(1, int(row.sum())))
        return shares

    def summary(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "active": self.active(),
            "share_of_hottest": {f"{part:g}": self.share_of_hottest(part) for part in HOTTEST},
        }


def windows(tokens: Sequence[int], n_ctx: int, bos: int | None, limit: int) -> list[list[int]]:
    """Cuts a text into windows of n_ctx tokens that begin with BOS, where the model has one; at most `limit` tokens."""
    size = n_ctx - (bos is not None)
    taken = list(tokens)[: limit if limit > 0 else len(tokens)]
    start = [bos] if bos is not None else []
    return [[*start, *taken[i : i + size]] for i in range(0, len(taken), size)]


def profile(
    model: Model,
    texts: Sequence[Sequence[int]],
    folder: Path,
    *,
    limit: int = 0,
    on_window: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Runs texts (token ids) through the model and counts. Where an earlier run was stopped, goes on from there.

    limit: tokens at most, 0 for all. on_window is called with windows done and in all. The state is kept in `folder`
    for as long as the work is not done, also on Ctrl-C. Raises UsageError for no tokens, a model without neurons that
    can be silent, and a state of another model or text.
    """
    bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
    tokens = [token for text in texts for token in text]
    cut = windows(tokens, model.n_ctx, bos, limit)
    if not cut:
        raise UsageError("there is no text to profile with: give a file with -f that has some")
    if not all(layer.feed_forward.activation.is_sparse for layer in model.spec.layers):
        kind = model.spec.layers[0].feed_forward.activation.value
        raise UsageError(
            f"the neurons of this model never are exactly zero (its activation is {kind}): only ReLU models can be "
            "profiled; if the file does not say that this is one, give --activation relu"
        )
    key = hashlib.sha256(f"{fingerprint(model.file)} {model.n_ctx} {model.spec.is_sparse} {cut}".encode()).hexdigest()
    blocks: list[Any] = [block for _, block, _ in model.transformer.layers]
    n_ff = [layer.feed_forward.n_ff for layer in model.spec.layers]
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / STATE
    before, done = _resume(state, key, n_ff)
    for block in blocks:
        block.count_neurons()
    saved = time.monotonic()

    def counts() -> tuple[Counts, ...]:
        return tuple(b + block.neuron_counts() for b, block in zip(before, blocks, strict=True))

    complete = counts()
    try:
        while done < len(cut):
            window = np.array(cut[done], np.int32)
            for start in range(0, len(window), model.n_batch):
                piece = window[start : start + model.n_batch]
                model.transformer.forward(Batch.of_sequence(piece, start, np.empty(0, np.int32)), model.cache)
            done += 1
            complete = counts()
            on_window(done, len(cut))
            if time.monotonic() - saved > SAVE_SECONDS:
                _save(state, key, complete, done)
                saved = time.monotonic()
    except BaseException:  # Ctrl-C too: whole windows are kept
        _save(state, key, complete, done)
        raise
    return Profile(complete, sum(len(window) for window in cut))


def write_profile(result: Profile, folder: Path, model: Model) -> None:
    """`activation_N.pt` of each layer, as PowerInfer reads them, and a summary; the state of the work goes."""
    import torch

    for i, row in enumerate(result.counts):
        data = io.BytesIO()
        torch.save(torch.from_numpy(row), data)
        with OutputFile(str(folder / f"activation_{i}.pt")) as file:
            file.write(data.getvalue())
    summary = {"model": Path(model.file.path).name, "fingerprint": fingerprint(model.file), **result.summary()}
    with OutputFile(str(folder / SUMMARY)) as file:
        file.write((json.dumps(summary, indent=1) + "\n").encode())
    (folder / STATE).unlink(missing_ok=True)


def _save(path: Path, key: str, counts: Sequence[Counts], done: int) -> None:
    data = io.BytesIO()
    arrays: dict[str, Any] = {f"layer{i}": row for i, row in enumerate(counts)}
    np.savez_compressed(data, key=key, done=done, **arrays)
    with OutputFile(str(path)) as file:
        file.write(data.getvalue())


def _resume(path: Path, key: str, n_ff: Sequence[int]) -> tuple[list[Counts], int]:
    """What an earlier run has counted, and how many windows it had done."""
    if not path.exists():
        return [np.zeros(n, np.int64) for n in n_ff], 0
    try:
        with np.load(path, allow_pickle=False) as state:
            if str(state["key"]) != key:
                raise UsageError(
                    f"{path} is of another model, text or context size that is not done: go on with that, or remove it"
                )
            counts = [np.array(state[f"layer{i}"], np.int64) for i in range(len(n_ff))]
            done = int(state["done"])
    except PowerInferError:
        raise
    except Exception as error:  # zip, numpy and OS errors of a damaged file
        raise UsageError(f"cannot read {path} ({error}): remove it to begin anew") from None
    if done < 0 or [len(row) for row in counts] != list(n_ff):
        raise UsageError(f"{path} does not fit this model: remove it to begin anew")
    return counts, done
