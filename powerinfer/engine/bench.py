"""Tokens a second, and how much of the machine's read bandwidth they use.

Decoding one token reads every dense matrix, the rows of active neurons and the KV cache once: those bytes, over the
bandwidth, are the time that no engine can beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, stdev

import numpy as np

from powerinfer.backends.interface import Activity, Batch, FeedForward, ModelSpec, cache_row_bytes
from powerinfer.errors import UsageError
from powerinfer.models import Transformer


@dataclass(frozen=True, slots=True)
class BenchTest:
    """n_prompt tokens as one prompt, or n_gen one after another; one of the two is 0. n_depth: tokens before them."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError unless one of them is positive."""
        if self.n_depth < 0:
            raise UsageError(f"a test after {self.n_depth} tokens: expected 0 or more")
        if min(self.n_prompt, self.n_gen) < 0 or (self.n_prompt > 0) == (self.n_gen > 0):
            raise UsageError(
                f"a test of {self.n_prompt} prompt and {self.n_gen} generated tokens: expected one above 0"
            )

    @property
    def name(self) -> str:
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def n_tokens(self) -> int:
        return self.n_prompt or self.n_gen


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Tokens a second of each repetition; bytes_per_token: 0 for prompts; activity: of one repetition, by layer."""

    test: BenchTest
    samples: list[float]
    bytes_per_token: float
    activity: list[Activity] = field(repr=False)
    n_ff: list[int] = field(repr=False)

    @property
    def mean(self) -> float:
        return fmean(self.samples)

    @property
    def deviation(self) -> float:
        return stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def gb_per_second(self) -> float:
        return self.bytes_per_token * self.mean / 1e9

    @property
    def active_fraction(self) -> float:
        """Neurons computed, as a part of all."""
        return fmean(a.predicted / max(1, a.tokens * n) for a, n in zip(self.activity, self.n_ff, strict=True))


def bench(
    transformer: Transformer,
    test: BenchTest,
    *,
    n_batch: int = 512,
    repeats: int = 5,
    on_repeat: Callable[[int], None] = lambda i: None,
) -> BenchResult:
    """Times a test `repeats` times after one that does not count. Tokens are random, the same ones each time.

    Neither tokenizing nor sampling is counted. on_repeat is called after each repetition with its number from 0.
    """
    if repeats < 1:
        raise UsageError(f"the number of repetitions is {repeats}: expected 1 or more")
    spec = transformer.spec
    n_ctx = test.n_depth + test.n_tokens
    tokens = np.random.default_rng(0).integers(0, spec.n_vocab, n_ctx).astype(np.int32)
    cache = transformer.kv_cache(n_ctx)
    for start in range(0, test.n_depth, n_batch):
        transformer.forward(_batch(tokens[: test.n_depth], start, n_batch), cache)
    step = n_batch if test.n_prompt else 1
    batches = [_batch(tokens, start, step) for start in range(test.n_depth, n_ctx, step)]

    def run() -> float:
        for _, feed_forward, _ in transformer.layers:
            feed_forward.clear_activity()
        start = time.perf_counter()
        for batch in batches:
            transformer.forward(batch, cache)
        return test.n_tokens / (time.perf_counter() - start)

    run()
    samples = []
    for i in range(repeats):
        samples.append(run())
        on_repeat(i)
    activity = [feed_forward.activity for _, feed_forward, _ in transformer.layers]
    position = [cache_row_bytes(transformer.backend.cache_types, layer.attention) for layer in spec.layers]
    context = test.n_depth + (test.n_gen + 1) / 2
    nbytes = bytes_per_token(spec, activity, sum(position) * context) if test.n_gen else 0.0
    return BenchResult(test, samples, nbytes, activity, [layer.feed_forward.n_ff for layer in spec.layers])


def _batch(tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]], start: int, step: int) -> Batch:
    piece = tokens[start : start + step]
    return Batch.of_sequence(piece, start, np.array([len(piece) - 1], np.int32))


def bytes_per_token(spec: ModelSpec, activity: Iterable[Activity], cache_bytes: float) -> float:
    """Bytes that a token reads on average, cache_bytes of them from the KV cache.

    Gate rows of the neurons that were predicted, up and down rows of those that fired, everything else whole.
    """
    total = spec.head.output.weight.nbytes + cache_bytes
    for layer, counts in zip(spec.layers, activity, strict=True):
        a = layer.attention
        total += sum(w.weight.nbytes for w in (a.attn_q, a.attn_k, a.attn_v, a.attn_output))
        total += _feed_forward_bytes(layer.feed_forward, counts)
    return total


def _feed_forward_bytes(f: FeedForward, counts: Activity) -> float:
    if f.ffn_down_t is None:
        return float(sum(w.weight.nbytes for w in (f.ffn_gate, f.ffn_up, f.ffn_down) if w is not None))
    pairs = max(1, counts.tokens * f.n_ff)
    predicted, fired = counts.predicted / pairs, counts.fired / pairs
    first, rest = (f.ffn_gate, [f.ffn_up, f.ffn_down_t]) if f.ffn_gate else (f.ffn_up, [f.ffn_down_t])
    total = first.weight.nbytes * predicted + sum(w.weight.nbytes for w in rest) * fired
    if f.predictor is not None:
        total += f.predictor.fc1.nbytes + f.predictor.fc2.nbytes
    return total


def predictor_recall(sparse: Iterable[Activity], dense: Iterable[Activity]) -> float:
    """Neurons that fired in a sparse run, as a part of those that fired in a dense one on the same tokens."""
    fired = [(s.fired, d.fired) for s, d in zip(sparse, dense, strict=True)]
    return sum(s for s, _ in fired) / max(1, sum(d for _, d in fired))
