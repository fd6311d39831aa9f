"""Samplers against plain definitions of what they do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer.engine.sampling import Sampler, SamplingParams
from powerinfer.errors import UsageError

LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50).map(lambda x: np.array(x, np.float32))


def allowed(logits: np.ndarray, **params: float) -> tuple[list[int], np.ndarray]:
    off: dict[str, float] = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    sampler = Sampler(SamplingParams(**(off | params)))  # type: ignore[arg-type]
    ids, probs = sampler._candidates(logits)
    return ids.tolist(), probs


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits.astype(np.float64) - logits.max())
    return exp / exp.sum()


@given(logits=LOGITS, k=st.integers(1, 60))
def test_top_k_keeps_the_k_likeliest(logits: np.ndarray, k: int) -> None:
    ids, _ = allowed(logits, top_k=k)
    want = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]
    assert ids == want


@given(logits=LOGITS, p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_hold_p(logits: np.ndarray, p: float) -> None:
    ids, _ = allowed(logits, top_p=p)
    probs = softmax(logits)
    assert probs[ids].sum() >= p - 1e-9
    assert probs[ids[:-1]].sum() < p + 1e-9


@given(logits=LOGITS, p=st.floats(0.01, 1.0))
def test_min_p_keeps_those_near_the_likeliest(logits: np.ndarray, p: float) -> None:
    ids, _ = allowed(logits, min_p=p)
    ratio = softmax(logits) / softmax(logits).max()
    assert {i for i in range(len(logits)) if ratio[i] > p * (1 + 1e-9)} <= set(ids)
    assert all(ratio[i] >= p * (1 - 1e-6) for i in ids)


@given(logits=LOGITS, p=st.floats(0.05, 0.95))
def test_typical_keeps_enough_mass(logits: np.ndarray, p: float) -> None:
    ids, _ = allowed(logits, typical_p=p)
    assert softmax(logits)[ids].sum() > p - 1e-9


@given(logits=LOGITS, temp=st.floats(0.1, 5))
def test_temperature_divides_the_logits(logits: np.ndarray, temp: float) -> None:
    ids, probs = allowed(logits, temp=temp)
    np.testing.assert_allclose(probs, softmax(logits / temp)[ids], rtol=1e-4, atol=1e-7)


@settings(max_examples=20)
@given(logits=LOGITS)
def test_greedy_takes_the_likeliest_the_first_of_equals(logits: np.ndarray) -> None:
    assert Sampler(SamplingParams(temp=0)).sample(logits, []) == int(np.argmax(logits))


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(SamplingParams(seed=1, temp=1.0, top_p=1.0, min_p=0.0))
    counts = np.bincount([sampler.sample(logits, []) for _ in range(20000)], minlength=4) / 20000
    np.testing.assert_allclose(counts, np.exp(logits), atol=0.015)


def test_a_seed_reproduces_a_sequence() -> None:
    logits = np.random.default_rng(0).standard_normal((30, 500)).astype(np.float32)
    first, again = Sampler(SamplingParams()), None
    draws = [first.sample(row, []) for row in logits]
    again = Sampler(SamplingParams(seed=first.seed))
    assert draws == [again.sample(row, []) for row in logits]
    other = Sampler(SamplingParams(seed=first.seed + 1))
    assert draws != [other.sample(row, []) for row in logits]


def test_penalties_are_llama_cpps() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    params = SamplingParams(repeat_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, repeat_last_n=3)
    penalized = Sampler(params)._penalize(logits, [3, 0, 0, 1])  # the 3 is too long ago
    np.testing.assert_allclose(penalized, [1.0 - 2 * 0.5 - 0.25, -4.0 - 0.5 - 0.25, 1.0, 0.5])
    assert logits[0] == 2.0
    everything = SamplingParams(repeat_penalty=2.0, repeat_last_n=-1)
    np.testing.assert_allclose(Sampler(everything)._penalize(logits, [3, 0, 0, 1]), [1.0, -4.0, 1.0, 0.25])


def test_logit_bias_is_added() -> None:
    logits = np.zeros(4, np.float32)
    assert Sampler(SamplingParams(temp=0, logit_bias={2: 1.0})).sample(logits, []) == 2
    assert Sampler(SamplingParams(temp=0, logit_bias={0: -math.inf})).sample(logits, []) == 1
    with pytest.raises(UsageError, match="names token 4"):
        Sampler(SamplingParams(logit_bias={4: 1.0})).sample(logits, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", math.nan),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("typical_p", math.inf),
        ("repeat_penalty", 0.0),
        ("repeat_last_n", -2),
        ("seed", -2),
    ],
)
def test_senseless_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
