"""How well a model predicts a text, as llama.cpp measures it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from powerinfer.backends.interface import Batch, FloatArray, KVCache
from powerinfer.errors import UsageError
from powerinfer.models import Transformer


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of n predicted tokens; `stderr` its standard error."""

    ppl: float
    stderr: float
    n: int


class _Sums:
    """Sum and sum of squares of negative log-likelihoods."""

    def __init__(self) -> None:
        self.n, self.total, self.squares = 0, 0.0, 0.0

    def add(self, losses: npt.NDArray[np.float64]) -> None:
        self.n += len(losses)
        self.total += float(losses.sum())
        self.squares += float(np.square(losses).sum())

    def result(self) -> Perplexity:
        mean = self.total / self.n
        ppl = math.exp(mean) if mean < 700 else math.inf
        variance = self.squares / self.n - mean * mean
        error = math.sqrt(variance / (self.n - 1)) if self.n > 1 and variance > 0 else 0.0
        return Perplexity(ppl, error * ppl, self.n)


def losses_of(logits: FloatArray, targets: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Negative log-likelihoods (n,) of targets (n,) under logits (n, n_vocab)."""
    top = logits.max(axis=1)
    # float32 terms are exact to 1e-7; their sum over a vocabulary is not
    total = np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)
    chosen = logits[np.arange(len(logits)), targets].astype(np.float64)
    losses: npt.NDArray[np.float64] = np.log(total) + top - chosen
    return losses


def count_chunks(n_tokens: int, n_ctx: int, stride: int = 0) -> int:
    """How many windows a text of n_tokens gives. Raises UsageError where it is too short, or a size makes no sense."""
    if n_ctx < 4:
        raise UsageError(f"the context size is {n_ctx}: perplexity needs at least 4")
    if stride < 0 or stride >= n_ctx:
        raise UsageError(f"the stride is {stride}: expected 0 (none) or a number below the context size, {n_ctx}")
    if n_tokens < 2 * n_ctx:
        raise UsageError(
            f"perplexity at a context of {n_ctx} needs a text of at least {2 * n_ctx} tokens: this one has {n_tokens} "
            "(give a longer text or a smaller -c)"
        )
    return (n_tokens - n_ctx) // stride + 1 if stride else n_tokens // n_ctx


def perplexity(
    transformer: Transformer,
    tokens: Sequence[int],
    bos: int | None,
    *,
    n_ctx: int = 512,
    n_batch: int = 512,
    chunks: int = -1,
    stride: int = 0,
    on_chunk: Callable[[int, Perplexity], None] = lambda i, result: None,
) -> Perplexity:
    """Cuts the text into windows of n_ctx tokens and predicts the second half of each.

    The first token of a window is replaced by `bos`, if given. With a stride, windows overlap and each predicts its
    last `stride` tokens. on_chunk is called with each window's number from 0 and the result so far.
    Raises UsageError for a text of fewer than 2 n_ctx tokens.
    """
    ids = np.asarray(tokens, np.int32)
    n_chunks = count_chunks(len(ids), n_ctx, stride)
    n_chunks = min(chunks, n_chunks) if chunks >= 0 else n_chunks
    if n_chunks == 0:
        raise UsageError("no chunks to compute: give --chunks 1 or more")
    cache = transformer.kv_cache(n_ctx)
    sums = _Sums()
    step, first = (stride, n_ctx - stride - 1) if stride else (n_ctx, n_ctx // 2)
    for i in range(n_chunks):
        window = ids[i * step : i * step + n_ctx].copy()
        targets = window[first + 1 :].copy()
        if bos is not None:
            window[0] = bos
        sums.add(_window_losses(transformer, cache, window, targets, first, n_batch))
        on_chunk(i, sums.result())
    return sums.result()


def _window_losses(
    transformer: Transformer,
    cache: KVCache,
    window: npt.NDArray[np.int32],
    targets: npt.NDArray[np.int32],
    first: int,
    n_batch: int,
) -> npt.NDArray[np.float64]:
    """Losses of the predictions made at positions first..n_ctx - 2."""
    losses = []
    last = len(window) - 1
    for start in range(0, last, n_batch):
        piece = window[start : min(start + n_batch, last)]
        begin = max(first - start, 0)
        outputs = np.arange(begin, max(begin, len(piece)), dtype=np.int32)
        logits = transformer.forward(Batch.of_sequence(piece, start, outputs), cache)
        if len(outputs):
            at = start + begin - first
            losses.append(losses_of(logits, targets[at : at + len(outputs)]))
    return np.concatenate(losses)
