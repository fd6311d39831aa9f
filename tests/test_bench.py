"""What `bench` counts and how it prints it; how fast anything is, is no matter for a test."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyLlama
from typer.testing import CliRunner

from powerinfer.backends import create_backend
from powerinfer.backends.interface import Activity, BackendOptions
from powerinfer.cli import app
from powerinfer.engine.bench import BenchTest, bench, bytes_per_token, predictor_recall
from powerinfer.errors import UsageError
from powerinfer.models import ModelOptions, Transformer, build_spec


def test_bytes_of_a_token_are_what_it_reads() -> None:
    shape = TinyLlama(n_embd=96, n_ff=100, rank=24, n_layers=1, sparse=True)
    spec = build_spec(shape.build(), ModelOptions())
    counts = Activity(tokens=10, predicted=500, fired=200)  # half of the neurons, a fifth
    attention = 96 * 96 + 2 * 32 * 96 + 96 * 96
    feed_forward = 100 * 96 * (0.5 + 2 * 0.2) + 24 * 96 + 100 * 24
    cache = 2 * 16 * 5.5
    rest = 61 * 96 + attention + cache
    assert bytes_per_token(spec, [counts], 4 * cache) == pytest.approx(4 * (rest + feed_forward))
    dense = build_spec(TinyLlama(n_embd=96, n_ff=100, n_layers=1).build(), ModelOptions())
    assert bytes_per_token(dense, [counts], 4 * cache) == pytest.approx(4 * (rest + 3 * 100 * 96))


@pytest.mark.parametrize("test", [BenchTest(n_prompt=9), BenchTest(n_gen=5), BenchTest(n_gen=5, n_depth=10)])
def test_repetitions_are_counted_one_by_one(test: BenchTest) -> None:
    spec = build_spec(TinyLlama(sparse=True, truthful=False).build(), ModelOptions())
    model = Transformer(spec, create_backend("native", BackendOptions(n_threads=1)))
    seen: list[int] = []
    result = bench(model, test, n_batch=4, repeats=3, on_repeat=seen.append)
    assert seen == [0, 1, 2]
    assert len(result.samples) == 3
    assert all(np.isfinite(sample) and sample > 0 for sample in result.samples)
    assert all(activity.tokens == test.n_tokens for activity in result.activity)
    assert 0.3 < result.active_fraction < 0.7
    assert (result.bytes_per_token > 0) == (test.n_gen > 0)


def test_recall_is_of_neurons_that_fire() -> None:
    assert predictor_recall([Activity(1, 9, 3), Activity(1, 9, 6)], [Activity(1, 20, 4), Activity(1, 20, 6)]) == 0.9


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(sparse=True).build().write(tmp_path_factory.mktemp("models") / "tiny.gguf")


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_command_prints_tables(tiny: Path) -> None:
    arguments = ["-m", tiny, "-p", "4,8", "-n", "3", "-t", "1,2", "-r", "2", "--check"]
    lines = run(*arguments).splitlines()
    assert len(lines) == 2 + 6
    assert all(line.startswith("| ") and line.count("|") == 12 for line in lines)
    rows = json.loads(run(*arguments, "-o", "json"))
    assert [row["test"] for row in rows] == ["pp4", "pp8", "tg3"] * 2
    assert [row["threads"] for row in rows] == [1, 1, 1, 2, 2, 2]
    assert all(row["recall"] > 0.9 for row in rows)
    assert all((row["gb_s"] is None) == row["test"].startswith("pp") for row in rows)
    assert list(csv.DictReader(io.StringIO(run(*arguments, "-o", "csv"))))[2]["test"] == "tg3"
    assert [json.loads(line)["test"] for line in run(*arguments, "-o", "jsonl").splitlines()][:3] == [
        "pp4",
        "pp8",
        "tg3",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "many"], "-p is 'many'"),
        (["-n", "-5"], "-n is '-5'"),
        (["-o", "xml"], "--output is 'xml'"),
        (["-r", "0"], "number of repetitions is 0"),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *args])
    assert result.exit_code == 1
    assert message in result.stderr
    with pytest.raises(UsageError):
        BenchTest()
