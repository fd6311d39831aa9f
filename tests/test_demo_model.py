"""The embedded model, and a tiny run of the script that trains it."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from powerinfer.engine import default_model_path, load
from powerinfer.engine.perplexity import perplexity
from powerinfer.formats import open_gguf

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_demo_model.py"


def test_it_is_small_and_powerinfers_engine_can_read_it() -> None:
    path = default_model_path()
    assert path.stat().st_size <= 4_000_000
    with open_gguf(path) as file:
        assert file.is_powerinfer
        assert "output.weight" in file.tensors  # that engine takes no tied head
        assert {info.type_name for info in file.tensors.values()} <= {"F32", "Q4_0", "Q8_0"}


def test_its_predictors_cost_little_and_skip_most(shared_data: Path) -> None:
    """On its training text; the script prints the figures on text that it has not seen."""
    text = (shared_data / "kjv.txt").read_text().replace("\n", " ")
    results = []
    for dense in (False, True):
        model = load(dense=dense)
        tokens = model.tokenizer.encode(text, parse_special=False)
        results.append(perplexity(model.transformer, tokens, model.tokenizer.bos_id, n_ctx=256, chunks=12).ppl)
        activity = [feed_forward.activity for _, feed_forward, _ in model.transformer.layers]
        n_ff = model.spec.layers[0].feed_forward.n_ff
        active = np.mean([a.predicted / a.tokens / n_ff for a in activity])
        assert active == 1 if dense else active < 0.2
    assert abs(results[0] / results[1] - 1) < 0.01


@pytest.mark.slow
def test_the_script_trains_and_writes_a_model_that_runs(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    words = ["".join(random.choice(list("abdegiklmnoprstu"), random.integers(2, 9))) for _ in range(600)]
    lines = (" ".join(random.choice(words, 12)).capitalize() + "." for _ in range(1200))
    text = "\n\n".join("\n".join(islice(lines, 20)) for _ in range(60))
    (tmp_path / "text.txt").write_text(text)
    output = tmp_path / "model.gguf"
    arguments = ["--quick", "--text", tmp_path / "text.txt", "--out-dir", tmp_path / "work", "--output", output]
    result = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    for word in ("dense", "sparse", "recall", "active"):
        assert word in result.stdout.lower() + result.stderr.lower()
    assert "".join(load(output).generate("a", n_predict=4)) != ""
    assert (tmp_path / "work" / "activation" / "activation_0.pt").is_file()
