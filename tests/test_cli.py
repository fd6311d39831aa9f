"""The command line, in this process and as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import TinyLlama
from typer.testing import CliRunner

import powerinfer
from powerinfer.cli import app
from powerinfer.cli.run import parse_logit_bias, unescape
from powerinfer.errors import UsageError

COMMAND = [sys.executable, "-m", "powerinfer"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(sparse=True).build().write(tmp_path_factory.mktemp("models") / "tiny.gguf")


def invoke(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def process(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*COMMAND, *map(str, args)], capture_output=True, text=True, encoding="utf-8", **options
    )


def error_of(*args: object) -> str:
    status, _, stderr = invoke(*args)
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert status == 1
    assert len(lines) == 1
    assert "Traceback" not in stderr
    return lines[0]


def test_version_and_help_import_nothing_heavy() -> None:
    for argument in ("--version", "--help"):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "powerinfer", argument],
            capture_output=True,
            text=True,
            check=True,
        )
        imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
        assert not imported & {"numpy", "torch", "gguf", "tokenizers", "sentencepiece"}
    assert powerinfer.__version__ in process("--version").stdout


def test_help_names_every_command() -> None:
    status, stdout, _ = invoke("--help")
    assert status == 0
    assert all(name in stdout for name in ("run", "perplexity", "quantize", "inspect", "tokenize"))
    assert invoke()[0] == 0
    for command in ("run", "perplexity", "quantize", "inspect", "tokenize"):
        assert invoke(command, "--help")[0] == 0


def test_run_prints_text_on_stdout_and_all_else_on_stderr() -> None:
    status, stdout, stderr = invoke("run", "-p", "In the beginning", "-n", 12, "--temp", 0)
    assert status == 0
    assert re.fullmatch(r"In the beginning [\w ,.;:']+\n", stdout)
    assert "embedded model" in stderr
    assert re.search(r"^seed: \d+$", stderr, re.M)
    timings = stderr[stderr.index("        load time") :].rstrip("\n").split("\n")
    number = r" +\d+\.\d\d"
    each = rf"\({number} ms per token,{number} tokens per second\)"
    patterns = [
        rf"        load time ={number} ms",
        rf"      sample time ={number} ms / +12 runs   {each}",
        rf" prompt eval time ={number} ms / +\d+ tokens {each}",
        rf"        eval time ={number} ms / +11 runs   {each}",
        rf"       total time ={number} ms",
    ]
    assert len(timings) == 5
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, timings, strict=True))


def test_quiet_options(tiny: Path) -> None:
    status, stdout, stderr = invoke("run", "-m", tiny, "-p", "w5", "-n", 3, "--log-disable", "--no-display-prompt")
    assert (status, stderr) == (0, "")
    assert not stdout.startswith("w5")


def test_underscores_and_dashes_are_the_same() -> None:
    for name in ("--n-predict", "--n_predict", "--predict"):
        status, stdout, _ = invoke("run", "-p", "And the", name, 4, "--top_k", 1, "--batch_size=2")
        assert (status, stdout) == (0, "And the LORD said unto Moses\n")


def test_the_seed_that_is_printed_reproduces_the_run() -> None:
    _, stdout, stderr = invoke("run", "-p", "And the king said", "-n", 24)
    found = re.search(r"^seed: (\d+)$", stderr, re.M)
    assert found
    assert invoke("run", "-p", "And the king said", "-n", 24, "-s", found[1])[1] == stdout


def test_prompts_from_files_and_escapes(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("And it came\\x20to pass\n")
    status, stdout, _ = invoke("run", "-f", tmp_path / "prompt.txt", "-n", 2, "--temp", 0)
    assert status == 0
    assert stdout.startswith("And it came to pass")
    assert invoke("run", "-f", tmp_path / "prompt.txt", "-n", 2, "--no-escape")[1].startswith("And it came\\x20to pass")
    assert unescape(r"a\nb\t\\\"\x41\q\x4") == 'a\nb\t\\"A\\q\\x4'
    assert unescape(r"\xc3\xa9") == "é"


def test_verbose_prompt_lists_tokens(tiny: Path) -> None:
    stderr = invoke("run", "-m", tiny, "-p", "w5", "-n", 1, "--verbose-prompt")[2]
    assert "number of tokens in prompt = " in stderr
    assert re.search(r"^     1 -> '<s>'$", stderr, re.M)


@pytest.mark.parametrize("budget", ["8", "0", "0.1", "1000", "-1"])
def test_a_vram_budget_without_a_gpu_says_so_and_goes_on(budget: str) -> None:
    status, stdout, stderr = invoke("run", "-p", "And the", "-n", 2, "--vram-budget", budget)
    assert status == 0
    assert stdout.startswith("And the")
    assert len([line for line in stderr.splitlines() if "no GPU is in use" in line]) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bogus"], "bogus"),
        (["run", "--bogus"], "--bogus"),
        (["run", "-n", "many"], "-n is 'many': expected a whole number"),
        (["run", "--temp=hot"], "--temp is 'hot': expected a number"),
        (["run", "--temp", "nan"], "temp is nan"),
        (["run", "--vram-budget", "abc"], "--vram-budget is 'abc'"),
        (["run", "--vram-budget", "nan"], "--vram-budget is nan"),
        (["run", "--vram-budget", "-2"], "--vram-budget is -2"),
        (["run", "-p", "x", "-f", "y"], "both -p and -f"),
        (["run", "-f", "missing.txt"], "cannot read missing.txt"),
        (["run", "-m", "missing.gguf"], "missing.gguf"),
        (["run", "-p", "And the king said unto him", "-c", "4"], "but the context holds 4"),
        (["run", "-n", "-3"], "n_predict is -3"),
        (["run", "-b", "0"], "batch size is 0"),
        (["run", "-t", "-2"], "number of threads is -2"),
        (["run", "--backend", "quantum"], "unknown backend 'quantum'"),
        (["run", "--activation", "swish"], "unknown activation 'swish'"),
        (["run", "-l", "12"], "--logit-bias is '12'"),
        (["run", "-l", "99999+1", "-p", "x"], "names token 99999"),
        (["perplexity"], "needs a text"),
        (["perplexity", "-p", "And it came to pass"], "needs a text of at least 1024 tokens"),
        (["perplexity", "-p", "x", "--ppl-output-type", "2"], "--ppl-output-type is 2"),
        (["quantize"], "IN [OUT] TYPE [THREADS]"),
        (["quantize", "in.gguf"], "got 1 arguments"),
        (["quantize", "in.gguf", "q9"], "unknown type 'q9'"),
        (["quantize", "in.gguf", "q4_0", "zero"], "the number of threads is 'zero'"),
        (["inspect", "missing.gguf"], "missing.gguf"),
        (["tokenize", "-p", "x", "-f", "y"], "more than once"),
    ],
)
def test_mistakes_are_one_line_and_status_1(args: list[str], message: str) -> None:
    assert message in error_of(*args)


def test_a_value_that_looks_like_a_flag_is_warned_about() -> None:
    stderr = invoke("run", "-r", "-e", "-p", "x", "-n", 1)[2]
    assert "warning: '-e' is taken as the value of -r" in stderr


def test_logit_biases() -> None:
    assert parse_logit_bias(["15+1.5", "7-2", "3-inf"]) == {15: 1.5, 7: -2.0, 3: -float("inf")}
    for text in ("", "+", "5", "5+x", "x+5", "5+nan"):
        with pytest.raises(UsageError):
            parse_logit_bias([text])


def test_perplexity_prints_running_values_and_an_estimate(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("And it came to pass in those days, that the king said unto him. " * 30)
    status, stdout, stderr = invoke("perplexity", "-f", tmp_path / "text.txt", "-c", 64, "--chunks", 3)
    assert status == 0
    assert re.fullmatch(r"(\[\d\]\d+\.\d{4},){3}\nFinal estimate: PPL = \d+\.\d{4} \+/- \d+\.\d{5}\n", stdout)
    assert "windows of 64" in stderr
    lines = invoke("perplexity", "-f", tmp_path / "text.txt", "-c", 64, "--chunks", 2, "--ppl-output-type", 1)[1]
    assert re.fullmatch(r"      64  \d+\.\d{4}\n     128  \d+\.\d{4}\nFinal .*\n", lines)


def test_inspect_shows_and_dumps(tiny: Path, shared_data: Path) -> None:
    text = invoke("inspect", tiny)[1]
    for part in ("PWRI version 3, llama", "llama.block_count", "blk.1.fc2.weight", "100 x 24", "predictors of rank 24"):
        assert part in text
    contents = json.loads(invoke("inspect", "-m", tiny, "--json")[1])
    assert contents["sparse"]["predictor_ranks"] == [24, 24]
    assert contents["metadata"]["llama.embedding_length"] == 96
    assert contents["tensor_bytes"] == sum(t["bytes"] for t in contents["tensors"])
    assert "blk" not in invoke("inspect", tiny, "--no-tensors")[1]
    index = json.loads(invoke("inspect", shared_data / "relu-a" / "relu-a.example.gpuidx", "--json")[1])
    assert index["architecture"] == "generic.gpu_index"
    assert index["types"]["I32"]["tensors"] == 6


def test_tokenize(tiny: Path, tmp_path: Path) -> None:
    listed = invoke("tokenize", "-p", "And the LORD", "--show-count")[1].splitlines()
    assert listed[0] == "     1 -> '<s>'"
    assert listed[-1] == f"Total number of tokens: {len(listed) - 1}"
    contents = json.loads(invoke("tokenize", "-p", "And the LORD", "--json", "--no-bos")[1])
    assert "".join(contents["pieces"]) == " And the LORD"
    (tmp_path / "text").write_text("And the LORD")
    assert json.loads(invoke("tokenize", "-f", tmp_path / "text", "--ids")[1])[1:] == contents["tokens"]
    piped = process("tokenize", "--ids", input="And the LORD")
    assert json.loads(piped.stdout)[1:] == contents["tokens"]


def test_a_closed_pipe_is_no_error() -> None:
    arguments = [*COMMAND, "run", "-p", "In the beginning", "--ignore-eos", "-n", "400"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.read(10) == b"In the beg"
        run.stdout.close()
        stderr = run.stderr.read().decode()
        assert run.wait() == 0
    assert "error" not in stderr
    assert "Traceback" not in stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([*COMMAND, "run", "-p", "x", "-n", "2"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_ends_generation_with_timings(interrupts: int) -> None:
    arguments = [*COMMAND, "run", "-p", "In the beginning", "--ignore-eos", "-c", "200000", "-n", "-2"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.read(30)
        for _ in range(interrupts):
            run.send_signal(signal.SIGINT)
            time.sleep(0.05)
        _, stderr = run.communicate(timeout=30)
    assert run.returncode == 130
    assert b"Traceback" not in stderr
    if interrupts == 1:  # the second may come before the timings are out
        assert b"eval time" in stderr


def test_output_that_the_terminal_cannot_show_is_escaped() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = process("run", "-p", "caf\u00e9", "-n", 1, env=environment)
    assert result.returncode == 0
    assert result.stdout.startswith("caf\\xe9")
