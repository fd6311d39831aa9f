"""From logits to the next token: penalties, truncations, temperature, and one draw.

The order and the meaning of each setting are llama.cpp's: penalties, top-k, typical-p, top-p, min-p, temperature.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from powerinfer.errors import UsageError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token. Defaults are llama.cpp's.

    seed: -1 draws one at random. temp: 0 or less takes the likeliest token. top_k: 0 or less keeps all.
    repeat_last_n: how many tokens penalties look back on; -1 is the context, 0 none.
    """

    seed: int = -1
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UsageError for a value that makes no sense."""
        numbers = ("temp", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
        for name in numbers:
            value = getattr(self, name)
            if not math.isfinite(value):
                raise UsageError(f"{name} is {value}: expected a finite number")
        for name in ("top_p", "min_p", "typical_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}: expected a number from 0 to 1")
        if self.repeat_penalty <= 0:
            raise UsageError(f"repeat_penalty is {self.repeat_penalty}: expected a number above 0 (1 is off)")
        if self.repeat_last_n < -1:
            raise UsageError(f"repeat_last_n is {self.repeat_last_n}: expected -1 (the context), 0 (off) or more")
        if not -1 <= self.seed < 1 << 64:
            raise UsageError(f"seed is {self.seed}: expected -1 (random) to 2^64 - 1")

    @property
    def penalizes(self) -> bool:
        changed = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return changed and self.repeat_last_n != 0


def draw_seed() -> int:
    """A random seed of 32 bits, as llama.cpp draws one."""
    return secrets.randbelow(1 << 32)


class Sampler:
    """Chooses the tokens of one sequence. `seed` is the one in use."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = draw_seed() if params.seed == -1 else params.seed
        self._random = np.random.default_rng(self.seed)

    def sample(self, logits: Floats, history: Sequence[int]) -> int:
        """The next token after `history` (all tokens so far, prompt included), given logits float32 (n_vocab,)."""
        params = self.params
        if params.logit_bias:
            logits = self._bias(logits)
        if params.penalizes:
            logits = self._penalize(logits, history)
        if params.temp <= 0:
            return int(logits.argmax())
        ids, probs = self._candidates(logits)
        mass = np.cumsum(probs)
        drawn = np.searchsorted(mass, self._random.random() * mass[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])

    def _bias(self, logits: Floats) -> Floats:
        biased = logits.copy()
        for token, bias in self.params.logit_bias.items():
            if not 0 <= token < len(logits):
                raise UsageError(f"the logit bias names token {token}: this model has tokens 0 to {len(logits) - 1}")
            biased[token] += bias
        return biased

    def _penalize(self, logits: Floats, history: Sequence[int]) -> Floats:
        """Keskar et al. 2019 (repeat), and OpenAI's presence and frequency penalties."""
        params = self.params
        last = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
        if not len(last):
            return logits
        tokens, counts = np.unique(np.asarray(last, np.int64), return_counts=True)
        penalized: Floats = logits.copy()
        seen = logits[tokens]
        seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
        penalized[tokens] = seen - counts * params.frequency_penalty - params.presence_penalty
        return penalized

    def _candidates(self, logits: Floats) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Tokens that may be drawn, likeliest first, and their probabilities (which need not sum to 1)."""
        params = self.params
        ids = _likeliest(logits, params.top_k)
        scores = logits[ids].astype(np.float64)
        if params.typical_p < 1:
            keep = _typical(_softmax(scores), params.typical_p)
            ids, scores = ids[keep], scores[keep]
        if params.top_p < 1:
            reached = np.cumsum(_softmax(scores)) >= params.top_p
            n = int(reached.argmax()) + 1 if reached.any() else len(ids)
            ids, scores = ids[:n], scores[:n]
        if params.min_p > 0:
            keep = scores >= scores[0] + math.log(params.min_p)
            ids, scores = ids[keep], scores[keep]
        return ids, _softmax(scores / params.temp)


def _likeliest(logits: Floats, top_k: int) -> Ints:
    """The top_k tokens (all, if top_k is not positive), likeliest first, equals by id."""
    if 0 < top_k < len(logits):
        threshold = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        ids = np.flatnonzero(logits >= threshold)
    else:
        ids = np.arange(len(logits))
    ordered = ids[np.argsort(-logits[ids], kind="stable")]
    return ordered[:top_k] if top_k > 0 else ordered


def _softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exp: npt.NDArray[np.float64] = np.exp(scores - scores.max())
    return np.divide(exp, exp.sum())


def _typical(probs: npt.NDArray[np.float64], typical_p: float) -> npt.NDArray[np.intp]:
    """Indices, ascending, of the tokens whose surprise is nearest the entropy, as many as hold typical_p of the mass.

    Source: Meister et al. 2022, Locally Typical Sampling.
    """
    surprise = -np.log(np.maximum(probs, 1e-300))
    order = np.argsort(np.abs(surprise - (probs * surprise).sum()), kind="stable")
    reached = np.cumsum(probs[order]) > typical_p
    n = int(reached.argmax()) + 1 if reached.any() else len(order)
    return np.sort(order[:n])
