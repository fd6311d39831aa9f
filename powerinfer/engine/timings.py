"""How long each stage of a run took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """Seconds and counts: of loading, of choosing tokens, of the prompt's tokens and of those after it."""

    load_s: float = 0.0
    sample_s: float = 0.0
    n_sample: int = 0
    prompt_s: float = 0.0
    n_prompt: int = 0
    eval_s: float = 0.0
    n_eval: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def total_s(self) -> float:
        return self.load_s + time.perf_counter() - self.started

    @contextmanager
    def sampling(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.sample_s += time.perf_counter() - start
        self.n_sample += 1

    @contextmanager
    def evaluating(self, n_tokens: int, prompt: bool) -> Iterator[None]:
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
        if prompt:
            self.prompt_s += elapsed
            self.n_prompt += n_tokens
        else:
            self.eval_s += elapsed
            self.n_eval += n_tokens

    def report(self) -> str:
        """llama.cpp's five lines."""

        def line(label: str, seconds: float, n: int, unit: str) -> str:
            each = 1e3 * seconds / n if n else 0.0
            rate = n / seconds if seconds > 0 else 0.0
            counted = f"{1e3 * seconds:10.2f} ms / {n:5d} {unit} "
            return f"{label} = {counted}({each:8.2f} ms per token, {rate:8.2f} tokens per second)"

        return "\n".join(
            [
                f"        load time = {1e3 * self.load_s:10.2f} ms",
                line("      sample time", self.sample_s, self.n_sample, "runs  "),
                line(" prompt eval time", self.prompt_s, self.n_prompt, "tokens"),
                line("        eval time", self.eval_s, self.n_eval, "runs  "),
                f"       total time = {1e3 * self.total_s:10.2f} ms",
            ]
        )
