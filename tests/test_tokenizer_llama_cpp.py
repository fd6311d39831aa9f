"""Tokenizers against ids that llama.cpp made of small vocabularies whose merges cross every place to cut at."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer.cli.tokenize import _on_one_line
from powerinfer.errors import FormatError
from powerinfer.tokenizers import Tokenizer, load_tokenizer
from powerinfer.tokenizers.bpe import byte_alphabet
from powerinfer.tokenizers.pretokenizers import find_pretokenizer

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parent / "test_tokenizer_ids.json").read_text())
BPE, SPM = FIXTURE["bpe"], FIXTURE["spm"]
# Names that mean the same as one whose ids are kept.
SAME = {
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais"
    " trillion granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "dbrx": "smaug-bpe chatglm-bpe",
    "glm4": "glm5",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
}


def bpe_file(pre: str) -> dict[str, Any]:
    tokens = [*byte_alphabet(), *BPE["words"], *(text for text, _ in BPE["special"])]
    n_ordinary = len(tokens) - len(BPE["special"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * n_ordinary + [kind for _, kind in BPE["special"]],
        "tokenizer.ggml.merges": list(BPE["merges"]),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|endoftext|>"),
    }


def spm_file(**changes: Any) -> dict[str, Any]:
    pieces = SPM["pieces"]
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(text for text, _, _ in pieces)],
        "scores": [0.0] * 259 + [score for _, score, _ in pieces],
        "token_type": [2, 3, 3] + [6] * 256 + [kind for _, _, kind in pieces],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


def shown_pieces(tokenizer: Tokenizer, special: bool) -> dict[str, bytes]:
    return {text: tokenizer.piece(i, special=special) for i, text in enumerate(tokenizer.vocabulary.texts)}


@pytest.mark.parametrize("pre", BPE["ids"])
def test_each_pretokenizer_gives_llama_cpps_ids(pre: str) -> None:
    tokenizer = load_tokenizer(bpe_file(pre))
    for text, ids in zip(BPE["texts"], BPE["ids"][pre], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_the_texts_tell_all_pretokenizers_apart() -> None:
    for one, other in combinations(BPE["ids"], 2):
        assert BPE["ids"][one] != BPE["ids"][other], (one, other)


@pytest.mark.parametrize(("name", "others"), SAME.items())
def test_names_that_mean_the_same(name: str, others: str) -> None:
    for other in others.split():
        assert find_pretokenizer(other) == find_pretokenizer(name)


def test_spm_gives_llama_cpps_ids() -> None:
    """Among the pieces: equal scores (0.0 and -0.0 too), and user-defined and unused ones that merging makes."""
    tokenizer = load_tokenizer(spm_file())
    for text, ids, plain in zip(SPM["texts"], SPM["ids"], SPM["ids_no_special"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, parse_special=False) == plain, text


def test_generation_ends_where_llama_cpps_does() -> None:
    bpe, spm = load_tokenizer(bpe_file("gpt-2")), load_tokenizer(spm_file())
    assert sorted(bpe.eog_ids) == BPE["ends"]
    assert sorted(spm.eog_ids) == SPM["ends"]
    texts = bpe.vocabulary.texts
    assert {texts[i] for i in bpe.eog_ids} == {"<|endoftext|>", "<|im_end|>", "<reponame>"}
    said = load_tokenizer(bpe_file("gpt-2") | {"tokenizer.ggml.fim_rep_token_id": texts.index("<file>")})
    assert {texts[i] for i in said.eog_ids} == {"<|endoftext|>", "<|im_end|>", "<file>"}


def test_tokens_that_end_a_turn_are_not_shown_whatever_their_type_says() -> None:
    bpe = load_tokenizer(bpe_file("gpt-2"))
    assert shown_pieces(bpe, special=False)["<|im_end|>"] == b""
    assert shown_pieces(bpe, special=True)["<|im_end|>"] == b"<|im_end|>"
    assert len(bpe.encode("<|im_end|>", add_special=False)) == 1
    assert len(bpe.encode("<|im_end|>", add_special=False, parse_special=False)) > 1


def test_unused_tokens_are_not_shown_and_byte_tokens_are_bytes() -> None:
    bpe = load_tokenizer(bpe_file("gpt-2"))
    for special in (False, True):
        assert shown_pieces(bpe, special)["[PAD7]"] == b""
        assert shown_pieces(bpe, special)["<0x0A>"] == b"\n"
        assert shown_pieces(load_tokenizer(spm_file()), special)["at"] == b""


def test_spm_without_types_still_spells_in_bytes() -> None:
    tokenizer = load_tokenizer(spm_file(token_type=None))
    ids = tokenizer.encode("ü", add_special=False)
    assert [tokenizer.vocabulary.texts[i] for i in ids] == ["▁", "<0xC3>", "<0xBC>"]


def test_a_text_cannot_make_control_tokens_without_parse_special() -> None:
    """Not even where pieces add up to one's name."""
    pieces = spm_file()["tokenizer.ggml.tokens"]
    at_once = load_tokenizer(
        spm_file(
            tokens=[*pieces, "s", "s>"],
            scores=[*spm_file()["tokenizer.ggml.scores"], -1.0, -1.0],
            token_type=[*spm_file()["tokenizer.ggml.token_type"], 1, 1],
        )
    )
    assert 1 in at_once.encode("<s>", add_special=False)
    assert 1 not in at_once.encode("<s>", add_special=False, parse_special=False)


def test_the_first_of_equal_merges_counts() -> None:
    file = bpe_file("gpt-2")
    again = file | {
        "tokenizer.ggml.merges": [*file["tokenizer.ggml.merges"], *file["tokenizer.ggml.merges"][:40][::-1]]
    }
    for text, ids in zip(BPE["texts"], BPE["ids"]["gpt-2"], strict=True):
        assert load_tokenizer(again).encode(text) == ids


def test_the_longest_special_token_is_the_one_of_most_bytes() -> None:
    file = bpe_file("gpt-2")
    tokens, types = file["tokenizer.ggml.tokens"], file["tokenizer.ggml.token_type"]
    more = file | {"tokenizer.ggml.tokens": [*tokens, "ab你", "你你"], "tokenizer.ggml.token_type": [*types, 4, 4]}
    assert load_tokenizer(more).encode("ab你你")[-1] == len(tokens) + 1  # 6 bytes go before 5


@pytest.mark.parametrize("score", [1e300, float("inf"), float("nan"), None])
def test_scores_that_are_no_32_bit_floats_are_refused(score: float | None) -> None:
    scores = spm_file()["tokenizer.ggml.scores"]
    with pytest.raises(FormatError, match=r"scores\[3\] is .*: expected a number"):
        load_tokenizer(spm_file(scores=[*scores[:3], score, *scores[4:]]))


def test_pieces_are_listed_in_single_quotes_on_one_line() -> None:
    assert [_on_one_line(piece) for piece in ("'s", '"', "\\", "\n", "\x1b[", "é你")] == [
        "'s", '"', "\\", "\\n", "\\x1b[", "é你",
    ]  # fmt: skip


def test_a_kind_that_is_no_string_is_refused() -> None:
    """Arrays of numbers come as NumPy arrays, which cannot be compared with a string."""
    with pytest.raises(FormatError, match=r"tokenizer.ggml.model is array.*: expected a string"):
        load_tokenizer(spm_file(model=np.array([1, 2])))
