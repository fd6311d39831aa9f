"""The tokenizer of a model folder as GGUF metadata, whatever the files that it is in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerinfer.convert.config import Config
from powerinfer.convert.json_files import read_optional
from powerinfer.errors import FormatError, UsageError, shown
from powerinfer.tokenizers.vocabulary import TokenType

MAX_BEYOND = 1024
"""Tokens that a tokenizer may have beyond the embedding: Gemma's has one for images, some have reserves."""
UNK, BYTE = TokenType.UNKNOWN, TokenType.BYTE
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endofturn|>", "<end_of_utterance>")


@dataclass(slots=True)
class Tokens:
    """What a tokenizer's file says.

    model, pre: `tokenizer.ggml.model` and `.pre`. texts: by id; ids without one get no token. types, scores: by id.
    merges: pairs, None where scores tell what merges first. special: ids by role (bos, eos, unknown). add_space: None
    where the model has no such setting.
    """

    model: str
    pre: str
    texts: dict[int, str]
    types: dict[int, TokenType] = field(default_factory=dict)
    scores: dict[int, float] | None = None
    merges: list[str] | None = None
    special: dict[str, int] = field(default_factory=dict)
    add_space: bool | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None


@dataclass(frozen=True, slots=True)
class AddedToken:
    id: int
    text: str
    special: bool


def tokenizer_metadata(folder: Path, config: Config, n_vocab: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """All keys of the tokenizer. n_vocab: rows of the embedding; as many tokens are made, the last ones unused.

    Raises UsageError where the folder has no tokenizer, FormatError for one that is damaged or another model's,
    UnsupportedError for a kind that GGUF files cannot say.
    """
    settings = read_optional(folder / "tokenizer_config.json")
    tokens = _read_tokens(folder, settings, notify)
    added = read_added(folder, settings)
    _add(tokens, added, n_vocab, notify)
    _set_special(tokens, folder, settings, config)
    keys: dict[str, Any] = {"model": tokens.model, "pre": tokens.pre}
    keys |= _lists(tokens, n_vocab)
    keys |= {f"{role}_token_id": i for role, i in tokens.special.items() if i < n_vocab}
    for name, value in (("bos", tokens.add_bos), ("eos", tokens.add_eos)):
        if value is not None:
            keys[f"add_{name}_token"] = value
    if tokens.add_space is not None:
        keys["add_space_prefix"] = tokens.add_space
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = chat_template(folder, settings)
    return named | ({} if template is None else {"tokenizer.chat_template": template})


def _read_tokens(folder: Path, settings: dict[str, Any], notify: Callable[[str], None]) -> Tokens:
    from powerinfer.convert.sentencepiece_model import read_sentencepiece
    from powerinfer.convert.tokenizer_json import read_gpt2_files, read_tokenizer_json

    if (folder / "tokenizer.model").is_file():
        return read_sentencepiece(folder / "tokenizer.model", settings, notify)
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer_json(folder / "tokenizer.json", settings, notify)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return read_gpt2_files(folder, settings)
    raise UsageError(
        f"{folder} has no tokenizer: expected tokenizer.model, tokenizer.json, or vocab.json and merges.txt"
    )


def read_added(folder: Path, settings: dict[str, Any]) -> list[AddedToken]:
    """Tokens added to the trained ones, from the three files that can have them; the later ones count."""
    found: dict[int, AddedToken] = {}
    special = special_names(read_optional(folder / "special_tokens_map.json") | settings)
    for text, i in read_optional(folder / "added_tokens.json").items():
        found[_id(i, "added_tokens.json")] = AddedToken(i, text, text in special)
    entries = read_optional(folder / "tokenizer.json").get("added_tokens")
    for entry in entries if isinstance(entries, list) else []:
        _add_entry(found, entry.get("id") if isinstance(entry, dict) else None, entry, "tokenizer.json")
    decoder = settings.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, dict) else []:
        i = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key
        _add_entry(found, i, entry, "tokenizer_config.json")
    return [found[i] for i in sorted(found)]


def special_names(settings: Mapping[str, Any]) -> set[str]:
    """Texts of the special tokens that a tokenizer's settings name, one by one or in a list."""
    more = settings.get("additional_special_tokens")
    values = [value for key, value in settings.items() if key.endswith("_token")]
    texts = [_content(value) for value in [*values, *(more if isinstance(more, list) else [])]]
    return {text for text in texts if text is not None}


def _add_entry(found: dict[int, AddedToken], i: Any, entry: Any, where: str) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise FormatError(f"{where}: an added token is {shown(entry)}: expected its content and id")
    found[_id(i, where)] = AddedToken(i, entry["content"], entry.get("special", False) is True)


def _id(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 24:
        raise FormatError(f"{where}: the id of a token is {shown(value)}: expected a small integer")
    return value


def _add(tokens: Tokens, added: list[AddedToken], n_vocab: int, notify: Callable[[str], None]) -> None:
    """Puts added tokens among the others; those beyond the embedding are left out."""
    for token in added:
        old = tokens.types.get(token.id)
        text = token.text
        if tokens.model == "llama" and not token.special:
            text = text.replace("\u2581", " ")  # it is looked for in text as it comes
        if old not in (UNK, BYTE):
            tokens.texts[token.id] = text
            tokens.types[token.id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    beyond = sorted(i for i in tokens.texts if i >= n_vocab)
    if len(beyond) > MAX_BEYOND or any(i not in {token.id for token in added} for i in beyond):
        n = max(tokens.texts) + 1
        raise FormatError(f"the tokenizer has {n} tokens, the embedding {n_vocab} rows: it is another model's")
    if beyond:
        notify(f"{len(beyond)} tokens have no row in the embedding and are left out: {shown(tokens.texts[beyond[0]])}")
    for i in beyond:
        del tokens.texts[i]


def _lists(tokens: Tokens, n_vocab: int) -> dict[str, Any]:
    """Texts, types and scores of all ids; what has no token is called [PADn] and unused."""
    texts = [tokens.texts.get(i, f"[PAD{i}]") for i in range(n_vocab)]
    types = [
        int(tokens.types.get(i, TokenType.NORMAL) if i in tokens.texts else TokenType.UNUSED) for i in range(n_vocab)
    ]
    lists: dict[str, Any] = {"tokens": texts, "token_type": types}
    if tokens.scores is not None:
        lists["scores"] = [float(tokens.scores.get(i, -1000.0)) for i in range(n_vocab)]
    if tokens.merges is not None:
        lists["merges"] = tokens.merges
    return lists


def _set_special(tokens: Tokens, folder: Path, settings: dict[str, Any], config: Config) -> None:
    """Ids of special tokens: by the names in the tokenizer's settings, else the model's ids, else the vocabulary's."""
    ids = {text: i for i, text in sorted(tokens.texts.items(), reverse=True)}
    names = read_optional(folder / "special_tokens_map.json") | settings
    generation = read_optional(folder / "generation_config.json")
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        text = _content(names.get(f"{name}_token"))
        stored = _first_id(config.values.get(f"{name}_token_id"))
        if text is not None and text in ids:
            tokens.special[role] = ids[text]
        elif role not in tokens.special and stored is not None and stored in tokens.texts:
            tokens.special[role] = stored
    ends = [generation.get("eos_token_id"), config.values.get("eos_token_id")]
    listed = {i for value in ends if isinstance(value, list) for i in value if type(i) is int}
    turn_ends = [ids[text] for text in TURN_ENDS if text in ids and tokens.types.get(ids[text]) == TokenType.CONTROL]
    eot = next((i for i in turn_ends if i in listed), turn_ends[0] if turn_ends else None)
    if eot is not None:
        tokens.special["eot"] = eot


def _content(value: Any) -> str | None:
    """A special token's text, which stands alone or with its settings."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _first_id(value: Any) -> int | None:
    first = value[0] if isinstance(value, list) and value else value
    return first if type(first) is int else None


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The Jinja source: a file of its own, or the settings' one, the default of several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    template = read_optional(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return template if isinstance(template, str) else None
