"""Tokenizers against llama.cpp's ids (kept here, or in the shared reference), round trips, and files that lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer.engine import default_model_path
from powerinfer.errors import FormatError, UnsupportedError, UsageError
from powerinfer.formats import open_gguf
from powerinfer.tokenizers import StreamDecoder, Tokenizer, load_tokenizer
from powerinfer.tokenizers.bpe import byte_alphabet
from powerinfer.tokenizers.pretokenizers import find_pretokenizer

# Words of a small byte-level vocabulary, merged from the left.
WORDS = [" the", "the", " quick", "12", "123", "456", " can", "'t", "!!", "\n\n", "  "]


def bpe_file(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: 256 bytes, WORDS and what they are merged from, and special tokens."""
    of_byte = {byte: character for character, byte in byte_alphabet().items()}
    tokens, merges = list(byte_alphabet()), []
    for word in WORDS:
        spelled = [of_byte[byte] for byte in word.encode()]
        whole = spelled[0]
        for character in spelled[1:]:
            merge = f"{whole} {character}"
            whole += character
            if whole not in tokens:
                tokens.append(whole)
                merges.append(merge)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    types = [1] * len(tokens) + [3, 3, 3, 4]
    tokens += special
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def spm_file(**changes: Any) -> dict[str, Any]:
    words = ["▁", "t", "h", "e", "▁t", "he", "▁the", "th", "a", "▁a", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [4],
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.piece(i).decode("utf-8", "replace") for i in tokenizer.encode(text, **options)]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(open_gguf(default_model_path()))


def test_smollm2_gives_llama_cpps_ids(reference: dict[str, Any], smollm2: Path) -> None:
    tokenizer = load_tokenizer(open_gguf(smollm2))
    for case in reference["smollm2"]["tokens"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], parse_special=False) == case["ids_no_special"]


def test_whole_texts_have_llama_cpps_length(shared_data: Path, reference: dict[str, Any], smollm2: Path) -> None:
    text = (shared_data / "kjv.txt").read_text()
    spm = load_tokenizer(open_gguf(shared_data / "relu-a" / "relu-a-f16.powerinfer.gguf"))
    assert len(spm.encode(text, parse_special=False)) == reference["relu-a"]["tokens"]
    bpe = load_tokenizer(open_gguf(smollm2))
    assert len(bpe.encode(text)) == reference["smollm2"]["perplexity_kjv"]["tokens"]


# What each pre-tokenizer makes of the same text: where it cuts, merges cannot cross.
@pytest.mark.parametrize(
    ("pre", "numbers", "words"),
    [
        ("gpt-2", ["123", "456", "7"], ["'t", " the", "!!"]),
        ("mpt", ["123", "456", "7"], ["'t", " the", "!!"]),
        ("smollm", list("1234567"), ["'t", " the", "!!"]),
        ("starcoder", list("1234567"), ["'t", " the", "!!"]),
        ("refact", list("1234567"), ["'t", " the", "!!"]),
        ("llama-bpe", ["123", "456", "7"], ["'t", " the", "!!"]),
        ("qwen2", list("1234567"), ["'t", " the", "!!"]),
        ("falcon", ["123", "456", "7"], ["'", "t", " the", "!!"]),
        ("default", ["123", "456", "7"], ["'", "t", " the", "!!"]),
    ],
)
def test_pretokenizers_cut_where_theirs_do(pre: str, numbers: list[str], words: list[str]) -> None:
    tokenizer = load_tokenizer(bpe_file(pre))
    assert pieces(tokenizer, "1234567", add_special=False) == numbers
    assert pieces(tokenizer, "'t the!!", add_special=False) == words


def test_an_unknown_pretokenizer_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"unknown pre-tokenizer 'gpt-9'.*known are default, gpt-2"):
        load_tokenizer(bpe_file("gpt-9"))
    assert find_pretokenizer("llama-bpe").ignore_merges


def test_special_tokens_of_bpe() -> None:
    tokenizer = load_tokenizer(bpe_file())
    text = "<|im_start|>the<tool><|im_end|>"
    assert pieces(tokenizer, text) == ["<|im_start|>", "the", "<tool>", "<|im_end|>"]
    unparsed = pieces(tokenizer, text, parse_special=False)
    assert "".join(unparsed) == text
    assert "<tool>" in unparsed  # user-defined tokens are always found
    assert "<|im_start|>" not in unparsed
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "the<tool>"
    assert tokenizer.decode(ids, special=True) == text
    names = {tokenizer.piece(i).decode() for i in tokenizer.eog_ids}
    assert names == {"<|endoftext|>", "<|im_end|>"}
    assert tokenizer.is_control(ids[0])
    assert not tokenizer.is_control(ids[2])


def test_bos_and_eos_are_added_where_the_file_says_so() -> None:
    assert not load_tokenizer(bpe_file()).add_bos
    both = load_tokenizer(bpe_file(add_bos_token=True, add_eos_token=True))
    assert pieces(both, "the") == ["<|endoftext|>", "the", "<|endoftext|>"]
    assert pieces(both, "the", add_special=False) == ["the"]
    assert load_tokenizer(bpe_file("llama-bpe")).add_bos
    assert load_tokenizer(spm_file()).encode("") == [1]
    assert load_tokenizer(spm_file(add_bos_token=False)).encode("") == []


def test_spm_puts_a_space_first_and_after_special_tokens() -> None:
    tokenizer = load_tokenizer(spm_file())
    assert pieces(tokenizer, "the") == ["<s>", " the"]
    assert pieces(tokenizer, "the</s>the<tool>a") == ["<s>", " the", "</s>", " the", "<tool>", " a"]
    assert pieces(load_tokenizer(spm_file(add_space_prefix=False)), "the") == ["<s>", "t", "he"]
    assert "".join(pieces(tokenizer, "  the", add_special=False)) == "   the"


def test_spm_spells_what_it_does_not_know_in_bytes() -> None:
    tokenizer = load_tokenizer(spm_file())
    ids = tokenizer.encode("é\n", add_special=False)
    assert [tokenizer.vocabulary.texts[i] for i in ids] == ["▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(ids) == " é\n"


def test_powerinfer_files_get_the_spaces_of_its_engine(shared_data: Path) -> None:
    tokenizer = load_tokenizer(open_gguf(shared_data / "relu-a" / "relu-a-f16.powerinfer.gguf"))
    assert tokenizer.encode("In the beginning") == [1, 797, 278, 6763]
    assert tokenizer.encode("In the beginning", parse_special=False) == [1, 512, 278, 6763]
    dense = load_tokenizer(open_gguf(shared_data / "relu-a" / "relu-a-q4_0.dense.gguf"))
    assert dense.encode("In the beginning") == [1, 512, 278, 6763]


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_bpe_gives_any_text_back(text: str) -> None:
    tokenizer = _BPE
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == text.encode("utf-8", "replace").decode()


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁")))
def test_spm_gives_any_text_back_behind_its_space(text: str) -> None:
    ids = _SPM.encode(text, add_special=False, parse_special=False)
    want = text.encode("utf-8", "replace").decode()
    assert _SPM.decode(ids) == (" " + want if want else "")


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 270)), special=st.booleans())
def test_a_stream_gives_the_same_text(ids: list[int], special: bool) -> None:
    decoder = StreamDecoder(_SPM, special)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == _SPM.decode(ids, special=special)


def test_a_stream_holds_incomplete_characters_back(demo: Tokenizer) -> None:
    decoder = StreamDecoder(demo)
    ids = demo.encode("🙂", add_special=False)[1:]
    assert [decoder.push(i) for i in ids] == ["", "", "", "🙂"]
    assert decoder.push(ids[0]) == ""
    assert decoder.flush() == "\ufffd"
    broken = StreamDecoder(demo)
    broken.push(ids[0])
    assert broken.push(demo.encode("and", add_special=False)[0]).startswith("\ufffd")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({}, "no tokenizer: tokenizer.ggml.model is missing"),
        (spm_file(tokens=None), "tokens is missing or empty"),
        (spm_file(tokens=[]), "tokens is missing or empty"),
        (spm_file(tokens="abc"), "tokens is 'abc': expected a list"),
        (spm_file(tokens=["a", 5]), r"tokens\[1\] is 5"),
        (spm_file(scores=[1.0]), "scores has 1 entries, but there are 271 tokens"),
        (spm_file(scores=["x"] * 271), r"scores\[0\] is 'x'"),
        (spm_file(token_type=[1]), "token_type has 1 entries"),
        (spm_file(token_type=["x"] * 271), r"token_type\[0\] is 'x'"),
        (spm_file(bos_token_id=5000), "bos_token_id is 5000"),
        (spm_file(eos_token_id="2"), "eos_token_id is '2'"),
        (spm_file(add_bos_token=1), "add_bos_token is 1"),
        (bpe_file(merges=None), "merges is missing"),
        (bpe_file(merges=["ab"]), r"merges\[0\] is 'ab'"),
        (bpe_file(pre=3), "pre is 3"),
        (bpe_file() | {"tokenizer.chat_template": 5}, "chat_template is not a string"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(file: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        load_tokenizer(file)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(UnsupportedError, match="unknown tokenizer 'bert'"):
        load_tokenizer({"tokenizer.ggml.model": "bert"})


def test_odd_vocabularies_still_work() -> None:
    """Tokens that are empty, come twice or are missing bytes; special ids that say 'none'."""
    tokens = spm_file()["tokenizer.ggml.tokens"]
    doubled = load_tokenizer(
        spm_file(tokens=[*tokens[:-2], "", tokens[5]], token_type=[2, 3, 3] + [6] * 256 + [1] * 12)
    )
    assert pieces(doubled, "the") == ["<s>", " the"]
    no_bytes = load_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "▁", "a", "▁a"],
            "tokenizer.ggml.token_type": [2, 1, 1, 1],
            "tokenizer.ggml.bos_token_id": 0xFFFFFFFF,
        }
    )
    assert no_bytes.encode("a") == [3]
    assert no_bytes.encode("b") == [1, 0]
    assert no_bytes.bos_id is None


def test_ids_out_of_range_are_refused(demo: Tokenizer) -> None:
    for token in (-1, demo.n_vocab):
        with pytest.raises(UsageError, match=f"no token {token}"):
            demo.piece(token)


_BPE = load_tokenizer(bpe_file("llama-bpe"))
_SPM = load_tokenizer(spm_file())
