"""The prompt and decode loops of one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from powerinfer.backends.interface import Batch, FloatArray, KVCache
from powerinfer.engine.sampling import Sampler
from powerinfer.engine.timings import Timings
from powerinfer.errors import FormatError, UsageError
from powerinfer.models import Transformer
from powerinfer.tokenizers import StreamDecoder, Tokenizer


class StopReason(Enum):
    NONE = "none"
    EOS = "eos"  # the model said that it is done
    LIMIT = "limit"  # n_predict tokens, or the context is full
    WORD = "word"  # a stop string appeared


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step's outcome: the token (None at the end), the text that is now certain, and why it ended, if it did."""

    token: int | None
    text: str
    stop: StopReason = StopReason.NONE


class TokenSequence:
    """Tokens of one conversation, and the slot of the KV cache that holds the first `n_past` of them."""

    def __init__(self, transformer: Transformer, cache: KVCache, slot: int = 0) -> None:
        self.transformer, self.cache, self.slot = transformer, cache, slot
        self.tokens: list[int] = []
        self.n_past = 0

    @property
    def n_left(self) -> int:
        return self.cache.n_ctx - self.n_past

    def feed(self, tokens: Sequence[int], n_batch: int, timings: Timings, prompt: bool) -> FloatArray:
        """Evaluates `tokens` after those before; logits float32 (n_vocab,) after the last. There must be room.

        Raises FormatError where the logits are not finite.
        """
        ids = np.asarray(tokens, np.int32)
        logits: FloatArray | None = None
        for start in range(0, len(ids), n_batch):
            piece = ids[start : start + n_batch]
            last = start + len(piece) == len(ids)
            outputs = np.array([len(piece) - 1] if last else [], np.int32)
            batch = Batch.of_sequence(piece, self.n_past, outputs, self.slot)
            with timings.evaluating(len(piece), prompt):
                logits = self.transformer.forward(batch, self.cache)
            self.n_past += len(piece)
            self.tokens.extend(piece.tolist())
        assert logits is not None, "at least one token is fed"
        last_row: FloatArray = logits[0]
        if not np.isfinite(last_row.max()):
            raise FormatError("the model gives scores that are not numbers: its weights are damaged")
        return last_row


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """n_predict: tokens to make; -1 until the model ends, -2 until the context is full. stop: strings that end it."""

    n_predict: int = -1
    n_batch: int = 512
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    special: bool = False  # show control tokens

    def __post_init__(self) -> None:
        if self.n_predict < -2:
            raise UsageError(f"n_predict is {self.n_predict}: expected -1 (no limit), -2 (fill the context) or more")
        if self.n_batch < 1:
            raise UsageError(f"the batch size is {self.n_batch}: expected 1 or more")


def check_prompt(n_prompt: int, n_ctx: int) -> None:
    """Raises UsageError for a prompt without tokens, or one that leaves no room in the context."""
    if n_prompt == 0:
        raise UsageError("the prompt is empty, and this model has no token that starts a text: give a prompt with -p")
    if n_prompt >= n_ctx:
        raise UsageError(
            f"the prompt is {n_prompt} tokens, but the context holds {n_ctx} with room for at least one more: "
            "shorten the prompt or raise -c"
        )


def generate(
    sequence: TokenSequence,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    sampler: Sampler,
    options: GenerateOptions,
    timings: Timings,
) -> Iterator[Chunk]:
    """Evaluates the prompt, then makes one token a step. The last chunk says why it ended.

    Raises UsageError for a prompt that does not fit.
    """
    check_prompt(sequence.n_past + len(prompt), sequence.cache.n_ctx)
    if options.n_predict == 0:
        yield Chunk(None, "", StopReason.LIMIT)
        return
    logits = sequence.feed(prompt, options.n_batch, timings, prompt=True)
    decoder = StreamDecoder(tokenizer, special=options.special)
    watch = StopWatch(options.stop)
    ends = frozenset[int]() if options.ignore_eos or options.n_predict == -2 else tokenizer.eog_ids
    reason, made = StopReason.NONE, 0
    while reason is StopReason.NONE:
        if options.ignore_eos:
            logits = without(logits, tokenizer.eog_ids)
        with timings.sampling():
            token = sampler.sample(logits, sequence.tokens)
        made += 1
        if token in ends:
            reason = StopReason.EOS
            break
        text = watch.push(decoder.push(token))
        if watch.found:
            reason = StopReason.WORD
        elif made == options.n_predict or sequence.n_left == 0:
            reason = StopReason.LIMIT
        yield Chunk(token, text)
        if reason is StopReason.NONE:
            logits = sequence.feed([token], 1, timings, prompt=False)
    yield Chunk(None, "" if watch.found else watch.push(decoder.flush()) + watch.flush(), reason)


def without(logits: FloatArray, tokens: frozenset[int]) -> FloatArray:
    """`logits` with some tokens ruled out."""
    logits = logits.copy()
    logits[list(tokens)] = -np.inf
    return logits


class StopWatch:
    """Passes text on up to the first stop string, and holds back an end that may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [s for s in stop if s]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What of the text so far is certain to come before any stop string."""
        if not self._stop:
            return text
        text = self._held + text
        at = min((i for i in (text.find(s) for s in self._stop) if i >= 0), default=-1)
        if at >= 0:
            self.found, self._held = True, ""
            return text[:at]
        keep = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
