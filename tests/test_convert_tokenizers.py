"""Tokenizers of converted models: the ids that the source's own tokenizer gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import sentencepiece  # noqa: E402
from hf_folders import (  # noqa: E402
    N_VOCAB,
    TEXTS,
    bpe_pipeline,
    damaged,
    edit_json,
    save_bpe,
    save_sentencepiece,
    sentencepiece_like_pipeline,
    train_sentencepiece,
)
from tokenizers import models, normalizers, pre_tokenizers  # noqa: E402

from powerinfer.convert.config import Config  # noqa: E402
from powerinfer.convert.vocabulary import tokenizer_metadata  # noqa: E402
from powerinfer.errors import FormatError, PowerInferError, UnsupportedError, UsageError  # noqa: E402
from powerinfer.tokenizers import load_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def metadata(folder: Path, lines: list[str] | None = None, n_vocab: int = N_VOCAB, **config: Any) -> dict[str, Any]:
    said: list[str] = []
    keys = tokenizer_metadata(folder, Config(config), n_vocab, said.append)
    assert said == [] or lines is not None
    if lines is not None:
        lines += said
    return keys


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "falcon"])
def test_byte_level_bpe(pre: str, bos: bool, tmp_path: Path) -> None:
    theirs = save_bpe(tmp_path, pre, bos)
    keys = metadata(tmp_path)
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == pre
    assert keys["tokenizer.ggml.add_bos_token"] is bos
    assert keys["tokenizer.ggml.add_eos_token"] is False
    ours = load_tokenizer(keys)
    for text in [*TEXTS, "a <tool> between", "x<|endoftext|>y"]:
        want = theirs.encode(text)
        # A text that is empty gets its BOS from both.
        assert ours.encode(text) == want, text
        assert ours.decode(want[bos:], special=True) == text


def test_types_padding_and_special_ids(tmp_path: Path) -> None:
    theirs = save_bpe(tmp_path, unk_token="<|endoftext|>", pad_token="</s>", chat_template="{{ messages }}")
    keys = metadata(tmp_path)
    n = len(theirs)
    texts, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(texts) == len(types) == N_VOCAB
    assert texts[n:] == [f"[PAD{i}]" for i in range(n, N_VOCAB)]
    assert set(types[n:]) == {5}
    by_text = dict(zip(texts, types, strict=True))
    assert (by_text["<|endoftext|>"], by_text["</s>"], by_text["<tool>"], by_text["Ġthe"]) == (3, 3, 4, 1)
    ids = {"bos": "<|endoftext|>", "eos": "</s>", "unknown": "<|endoftext|>", "padding": "</s>"}
    for role, text in ids.items():
        assert keys[f"tokenizer.ggml.{role}_token_id"] == theirs.convert_tokens_to_ids(text)
    assert keys["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("form", ["string", "several", "chat_template.jinja", "chat_template.json"])
def test_where_chat_templates_are(form: str, tmp_path: Path) -> None:
    save_bpe(tmp_path)
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    if form == "string":
        edit_json(tmp_path / "tokenizer_config.json", chat_template="yes")
    elif form == "several":
        edit_json(tmp_path / "tokenizer_config.json", chat_template=several)
    else:
        (tmp_path / form).write_text("yes" if form.endswith("jinja") else json.dumps({"chat_template": "yes"}))
    assert metadata(tmp_path)["tokenizer.chat_template"] == "yes"


def test_ids_of_config_and_the_end_of_a_turn(tmp_path: Path) -> None:
    save_bpe(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", bos_token=None, eos_token=None)
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    edit_json(
        tmp_path / "tokenizer_config.json", added_tokens_decoder={"390": {"content": "<|im_end|>", "special": True}}
    )
    keys = metadata(tmp_path, bos_token_id=7, eos_token_id=[1, 390])
    assert keys["tokenizer.ggml.bos_token_id"] == 7
    assert keys["tokenizer.ggml.eos_token_id"] == 1
    assert keys["tokenizer.ggml.eot_token_id"] == 390


def test_gpt2_files_without_a_tokenizer_json(tmp_path: Path) -> None:
    """OPT's: a BOS that the settings ask for, tokens added by a file of their own."""
    pipeline = bpe_pipeline()
    pipeline.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": True, "bos_token": {"content": "</s>"}, "eos_token": {"content": "</s>"}})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<mark>": 385, "<sep>": 386}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<sep>"]}))
    keys = metadata(tmp_path)
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    ours = load_tokenizer(keys)
    for text in TEXTS[:-1]:
        assert ours.encode(text) == [pipeline.token_to_id("</s>"), *pipeline.encode(text).ids]
    assert ours.encode("<mark><sep>")[1:] == [385, 386]
    assert keys["tokenizer.ggml.token_type"][385:387] == [4, 3]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    decoder = {"390": {"content": "<|im_start|>", "special": True}, "391": {"content": "<tool>", "special": False}}
    folder = save_sentencepiece(tmp_path, {"added_tokens_decoder": decoder}, add_dummy_prefix=prefix)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    keys = metadata(folder)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.pre"] == "default"
    assert keys["tokenizer.ggml.add_space_prefix"] is prefix
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    n = theirs.GetPieceSize()
    assert keys["tokenizer.ggml.scores"][:n] == [theirs.GetScore(i) for i in range(n)]
    assert [keys["tokenizer.ggml.token_type"][i] for i in (390, 391, 392)] == [3, 4, 5]
    ours = load_tokenizer(keys)
    for text in TEXTS[:-1]:
        assert ours.encode(text) == [theirs.bos_id(), *theirs.EncodeAsIds(text)], text
    assert ours.encode("<|im_start|>a<tool>", add_special=False)[::2] == [390, 391]


def test_a_tokenizer_json_like_sentencepiece(tmp_path: Path) -> None:
    pipeline = sentencepiece_like_pipeline(train_sentencepiece())
    pipeline.save(str(tmp_path / "tokenizer.json"))
    keys = metadata(tmp_path)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    ours = load_tokenizer(keys)
    for text in TEXTS[:5] + TEXTS[6:-1]:  # an empty one gets a space there
        assert ours.encode(text) == pipeline.encode(text).ids, text
    pipeline.normalizer = normalizers.Replace(" ", "▁")
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert metadata(tmp_path)["tokenizer.ggml.add_space_prefix"] is False
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert metadata(tmp_path)["tokenizer.ggml.add_space_prefix"] is True
    contents = json.loads((tmp_path / "tokenizer.json").read_text())
    merges = contents["model"]["merges"]
    made = ["".join(merge) for merge in merges]
    merges.pop(next(i for i, text in enumerate(made) if text in made[:i]))
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    lines: list[str] = []
    metadata(tmp_path, lines)
    assert ["merged from fewer pairs than sentencepiece would" in line for line in lines] == [True]


def test_the_classes_whose_flags_count(tmp_path: Path) -> None:
    sentencepiece_like_pipeline(train_sentencepiece()).save(str(tmp_path / "tokenizer.json"))
    for name, expected in (("LlamaTokenizerFast", (False, True)), ("PreTrainedTokenizerFast", (True, False))):
        flags = {"tokenizer_class": name, "add_bos_token": False, "add_eos_token": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(flags))
        keys = metadata(tmp_path)
        assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == expected


def test_added_tokens_beyond_the_embedding_are_left_out(tmp_path: Path) -> None:
    theirs = save_bpe(tmp_path)
    lines: list[str] = []
    keys = metadata(tmp_path, lines, n_vocab=len(theirs) - 1)
    assert lines == ["1 tokens have no row in the embedding and are left out: '<tool>'"]
    assert "<tool>" not in keys["tokenizer.ggml.tokens"]
    with pytest.raises(
        FormatError, match=r"the tokenizer has \d+ tokens, the embedding 300 rows: it is another model's"
    ):
        metadata(tmp_path, [], n_vocab=300)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"has no tokenizer: expected tokenizer\.model, tokenizer\.json, or vocab\.json"
    ):
        metadata(tmp_path)


def test_damaged_and_unsupported_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    save_bpe(tmp_path)
    contents = json.loads(path.read_text())

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        path.write_text(json.dumps(contents | changes))
        with pytest.raises(error, match=match) as raised:
            metadata(tmp_path)
        assert "\n" not in str(raised.value)

    model = contents["model"]
    refused(FormatError, "model is 3: expected an object", model=3)
    refused(UnsupportedError, "of the kind 'Unigram': supported is BPE", model=model | {"type": "Unigram"})
    refused(FormatError, "the id of 'a' is -1: expected an integer", model=model | {"vocab": {"a": -1}})
    refused(FormatError, "1 tokens have the id of another one", model=model | {"vocab": {"a": 1, "b": 1}})
    refused(FormatError, "a merge is 'abc': expected two pieces", model=model | {"merges": ["abc"]})
    refused(FormatError, "merges are None: expected a list", model=model | {"merges": None})
    refused(UnsupportedError, "the normalizer 'Lowercase' cannot be said", normalizer={"type": "Lowercase"})
    refused(UnsupportedError, "no name is known for the pre_tokenizer", pre_tokenizer={"type": "Whitespace"})
    refused(UnsupportedError, "no name is known for the pre_tokenizer null", pre_tokenizer=None)
    refused(FormatError, "an added token is 7: expected its content", added_tokens=[7])
    refused(FormatError, "the id of a token is 1.5", added_tokens=[{"id": 1.5, "content": "x"}])
    path.write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer\.json is no JSON"):
        metadata(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not one")
    with pytest.raises(FormatError, match="is no sentencepiece model"):
        metadata(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("kind", ["falcon", "llama-bpe", "sentencepiece"])
def test_any_damage_is_one_line_or_a_tokenizer(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "sentencepiece":
        sentencepiece_like_pipeline(train_sentencepiece()).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    else:
        save_bpe(tmp_path, kind, bos=True)
    special = {"bos_token": {"content": "<s>"}, "additional_special_tokens": ["a"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    contents = json.loads((tmp_path / name).read_text())
    messages = []
    for seed in range(4):
        for value in damaged(contents, seed, most=12):
            (tmp_path / name).write_text(json.dumps(value))
            try:
                metadata(tmp_path, [])
            except PowerInferError as error:
                messages.append(str(error))
    assert messages
    assert not [message for message in messages if "\n" in message]


def test_unigram_and_normalizing_sentencepiece_models(tmp_path: Path) -> None:
    save_sentencepiece(tmp_path / "unigram", model_type="unigram", vocab_size=340)
    with pytest.raises(UnsupportedError, match="a sentencepiece model of the kind unigram: supported is BPE"):
        metadata(tmp_path / "unigram")
    lines: list[str] = []
    metadata(save_sentencepiece(tmp_path / "nfkc", normalization_rule_name="nmt_nfkc"), lines)
    assert lines == ["the tokenizer changes characters or spaces before it cuts text, which GGUF files cannot say"]


def test_a_tokenizer_without_merges(tmp_path: Path) -> None:
    pipeline = bpe_pipeline()
    alphabet = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pipeline.model = models.BPE(alphabet, [])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert metadata(tmp_path)["tokenizer.ggml.merges"] == []
