"""Loading and generating through the Python API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TinyLlama

import powerinfer
from powerinfer import FormatError, PowerInferError, UnsupportedError, UsageError, load
from powerinfer.backends.interface import Batch
from powerinfer.engine import GenerateOptions, Sampler, SamplingParams, StopReason
from powerinfer.engine.generate import StopWatch

GREEDY = SamplingParams(temp=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return TinyLlama(sparse=True).build().write(folder / "tiny.gguf")


def tokens_of(model: powerinfer.Model, prompt: list[int], **options: Any) -> tuple[list[int], StopReason]:
    chunks = list(model.stream(prompt, Sampler(GREEDY), GenerateOptions(**options)))
    assert all(chunk.stop is StopReason.NONE for chunk in chunks[:-1])
    return [chunk.token for chunk in chunks if chunk.token is not None], chunks[-1].stop


def test_the_embedded_model_writes_english() -> None:
    text = "".join(load().generate("In the beginning", n_predict=48, sampling=GREEDY))
    words = text.split()
    assert len(words) > 20
    common = {"the", "and", "of", "that", "they", "he", "unto", "in", "lord", "was", "had", "were", "have", "said"}
    assert sum(word.strip(",.;:").lower() in common for word in words) > len(words) / 4


def test_backends_and_batch_sizes_make_the_same_tokens(tiny: Path) -> None:
    results = [
        tokens_of(
            load(tiny, backend=backend, n_batch=n_batch),
            [1, 5, 9, 23, 44],
            n_predict=20,
            n_batch=n_batch,
            ignore_eos=True,
        )
        for backend in ("native", "torch")
        for n_batch in (1, 3, 32)
    ]
    assert results[0][1] is StopReason.LIMIT
    assert len(results[0][0]) == 20
    assert all(result == results[0] for result in results)


def test_generation_stops_at_n_predict_and_when_the_context_is_full(tiny: Path) -> None:
    model = load(tiny, n_ctx=16)
    assert len(tokens_of(model, [1, 5], n_predict=3, ignore_eos=True)[0]) == 3
    assert tokens_of(model, [1, 5], n_predict=0) == ([], StopReason.LIMIT)
    for n_predict in (-1, -2, 1000):
        tokens, stop = tokens_of(model, [1, 5, 7], n_predict=n_predict, ignore_eos=True)
        assert (len(tokens), stop) == (16 - 3 + 1, StopReason.LIMIT)


def test_a_token_that_ends_the_text_ends_it(tiny: Path) -> None:
    model = load(tiny, n_ctx=64)
    tokens, _ = tokens_of(model, [1, 5], n_predict=8, ignore_eos=True)
    model.tokenizer.eog_ids = frozenset([tokens[4]])
    before, stop = tokens_of(model, [1, 5], n_predict=8)
    assert (before, stop) == (tokens[: tokens.index(tokens[4])], StopReason.EOS)
    ignored, stop = tokens_of(model, [1, 5], n_predict=8, ignore_eos=True)
    assert tokens[4] not in ignored
    assert len(ignored) == 8


def test_stop_strings_are_not_shown(tiny: Path) -> None:
    model = load(tiny, n_ctx=64)
    text = "".join(model.generate([1, 5], n_predict=12, sampling=GREEDY, ignore_eos=True))
    stop = text[7:11]
    assert (
        "".join(model.generate([1, 5], n_predict=12, sampling=GREEDY, ignore_eos=True, stop=[stop]))
        == text[: text.index(stop)]
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_can_come_in_pieces(size: int) -> None:
    watch = StopWatch(["STOP", "HALT"])
    text = "a ST b STO HALF STOP never"
    shown = ""
    for start in range(0, len(text), size):
        shown += watch.push(text[start : start + size])
        if watch.found:
            break
    assert shown == "a ST b STO HALF "
    calm = StopWatch(["STOP"])
    assert calm.push("wait, STO") + calm.flush() == "wait, STO"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 16, "the prompt is 16 tokens, but the context holds 16"),
        ([5] * 99, "the prompt is 99 tokens, but the context holds 16"),
        ([61], "the prompt has token 61"),
        ([-1], "the prompt has token -1"),
    ],
)
def test_prompts_that_do_not_fit(tiny: Path, prompt: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(tiny, n_ctx=16).generate(prompt)


def test_an_empty_prompt_starts_from_bos_or_is_refused(tmp_path: Path, tiny: Path) -> None:
    assert load(tiny).encode_prompt("") == [1]
    file = TinyLlama(extra={"tokenizer.ggml.add_bos_token": False}).build().write(tmp_path / "no_bos.gguf")
    with pytest.raises(UsageError, match="the prompt is empty"):
        load(file).generate("")


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": -1},
        {"n_batch": 0},
        {"n_threads": -2},
        {"backend": "quantum"},
        {"activation": "swish"},
        {"n_ctx": 1 << 40},
    ],
)
def test_settings_that_make_no_sense(tiny: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load(tiny, **options).generate([1, 5])


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough for a header")
    whole = TinyLlama().build().write(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    other = TinyLlama(extra={"general.architecture": "bert"}).build().write(tmp_path / "bert.gguf")
    with pytest.raises(PowerInferError, match=r"missing\.gguf"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(PowerInferError, match="directory"):
        load(tmp_path)
    for name in ("empty", "text", "half"):
        with pytest.raises(FormatError, match=f"{name}.gguf"):
            load(tmp_path / f"{name}.gguf")
    with pytest.raises(UnsupportedError, match="'bert'"):
        load(other)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_damaged_weights_are_an_error_not_nonsense(tmp_path: Path, backend: str) -> None:
    file = TinyLlama(sparse=True, kind="F16").build()
    file.tensors["blk.1.attn_v.weight"].data[5, :2] = [0xFF, 0x7F]  # not a number
    model = load(file.write(tmp_path / "nan.gguf"), backend=backend)
    with pytest.raises(FormatError, match="its weights are damaged"):
        list(model.generate([1, 5, 7], n_predict=4))


def test_the_native_path_imports_no_torch() -> None:
    code = (
        "import sys, powerinfer; list(powerinfer.load().generate('And', n_predict=2)); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_smollm2_agrees_with_llama_cpp(reference: dict[str, Any], smollm2: Path) -> None:
    """Given llama.cpp's own tokens: its five likeliest have its scores, and its choice is ours where it is clear.

    It rounds activations to 8 bits, which moves scores by 0.15 on average and 0.6 at most (another build of it differs
    as much from these), so clear is more than twice that.
    """
    model = load(smollm2)
    for case in reference["smollm2"]["greedy"]:
        prompt, want = case["prompt_ids"], case["gen_ids"]
        assert model.tokenizer.encode(case["prompt"]) == prompt
        ids = np.array(prompt + want, np.int32)
        outputs = np.arange(len(prompt) - 1, len(ids) - 1)
        logits = model.transformer.forward(Batch.of_sequence(ids, 0, outputs), model.transformer.kv_cache(len(ids)))
        differences = []
        for row, token, top in zip(logits, want, case["top5_logits_per_step"], strict=True):
            differences += [abs(row[i] - score) for i, score in top]
            if top[0][1] - top[1][1] > 1.2:
                assert row.argmax() == token
        assert np.mean(differences) < 0.2
        assert np.max(differences) < 0.7
    text = "".join(model.generate("The capital of France is", n_predict=8, sampling=GREEDY))
    assert text.startswith(" Paris")


def test_relu_a_continues_as_the_reference_engine_does(shared_data: Path, reference: dict[str, Any]) -> None:
    case = reference["relu-a"]["greedy_f16"]
    model = load(shared_data / "relu-a" / "relu-a-f16.powerinfer.gguf")
    text = "".join(model.generate(case["prompt"], n_predict=case["n"], sampling=GREEDY))
    assert text.replace("\x04", "") == case["reference_engine"]  # its record leaves control characters out
