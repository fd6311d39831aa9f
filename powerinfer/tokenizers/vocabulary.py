"""The tokens of a GGUF file, checked, and what they look like as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from powerinfer.errors import FormatError, shown

MAX_TOKENS = 1 << 24

# Tokens that end a turn or a text, as models name them; a file need not say that they do.
END_NAMES = frozenset(
    [
        "</s>",
        "<eos>",
        "[EOS]",
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    ]
)

# Marks of fill-in-the-middle prompts behind which nothing of the answer follows: by the key that names one, and as
# models name it where the file does not. llama.cpp ends generation there too.
FILL_IN_NAMES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


class Metadata(Protocol):
    """The part of a GGUF file that a tokenizer reads; a dict will do."""

    def get(self, key: str, default: Any = None, /) -> Any: ...


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_APART = frozenset([TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN])  # cut out before text is merged
_TYPE_NAMES = {str: "a string", int: "an integer"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """texts, types: one a token. Ids of special tokens, None where the file names none."""

    texts: list[str]
    types: list[int]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]
    special: list[tuple[str, int]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.texts)


def read_list(file: Metadata, key: str, length: int | None = None) -> list[Any] | None:
    """A list in the metadata, None without it; FormatError if it is none or has not `length` entries."""
    value = file.get(key)
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise FormatError(f"{key} is {shown(value)}: expected a list")
    items = (
        value.to_list() if hasattr(value, "to_list") else value.tolist() if hasattr(value, "tolist") else list(value)
    )
    if length is not None and len(items) != length:
        raise FormatError(f"{key} has {len(items)} entries, but there are {length} tokens")
    return items


def check_types(items: list[Any], wanted: type, key: str) -> None:
    """Raises FormatError for the first item that is not of the type."""
    if set(map(type, items)) <= {wanted}:
        return
    for i, item in enumerate(items):
        if type(item) is not wanted:
            raise FormatError(f"{key}[{i}] is {shown(item)}: expected {_TYPE_NAMES[wanted]}")


def read_bool(file: Metadata, key: str, default: bool) -> bool:
    value = file.get(key, default)
    if not isinstance(value, (bool, np.bool_)):
        raise FormatError(f"{key} is {shown(value)}: expected true or false")
    return bool(value)


def read_vocabulary(file: Metadata, default_ids: dict[str, int]) -> Vocabulary:
    """Tokens and special ids. default_ids: of names (bos, eos, unknown) that the file may leave out.

    Raises FormatError for a vocabulary that contradicts itself.
    """
    texts = read_list(file, "tokenizer.ggml.tokens")
    if not texts:
        raise FormatError("the model has no tokenizer: tokenizer.ggml.tokens is missing or empty")
    if len(texts) > MAX_TOKENS:
        raise FormatError(f"tokenizer.ggml.tokens has {len(texts)} entries: at most {MAX_TOKENS} are supported")
    check_types(texts, str, "tokenizer.ggml.tokens")
    types = read_list(file, "tokenizer.ggml.token_type", len(texts)) or [int(TokenType.NORMAL)] * len(texts)
    check_types(types, int, "tokenizer.ggml.token_type")

    def special_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = file.get(key)
        if value is None:
            fallback = default_ids.get(name)
            return fallback if fallback is not None and fallback < len(texts) else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{key} is {shown(value)}: expected a token id")
        if value in (0xFFFFFFFF, -1):  # how some writers say that there is none
            return None
        if not 0 <= value < len(texts):
            raise FormatError(f"{key} is {value}: this model has tokens 0 to {len(texts) - 1}")
        return value

    names = END_NAMES.union(*(usual for name, usual in FILL_IN_NAMES.items() if special_id(name) is None))
    named = {i for i, text in enumerate(texts) if text in names}
    for i in named:  # as llama.cpp does: a file that takes them for ordinary tokens would show them to the user
        types[i] = int(TokenType.CONTROL)
    ends = named | {special_id(name) for name in ("eos", "eot", "eom", *FILL_IN_NAMES)}
    special = [(texts[i], i) for i, kind in enumerate(types) if kind in _APART and texts[i]]
    special.sort(key=lambda item: -len(item[0].encode("utf-8", "replace")))
    return Vocabulary(
        texts=texts,
        types=types,
        bos_id=special_id("bos"),
        eos_id=special_id("eos"),
        unk_id=special_id("unknown"),
        eog_ids=frozenset(i for i in ends if i is not None),
        special=special,
    )


def split_special(text: str, vocabulary: Vocabulary, parse_special: bool) -> list[str | int]:
    """Text cut at tokens that are never made by merging: strings, and ids of the tokens between them.

    User-defined tokens are always found, control tokens only if `parse_special`. The longest, in bytes, comes first.
    """
    parts: list[str | int] = [text] if text else []
    for token, token_id in vocabulary.special:
        if token not in text:
            continue
        if not parse_special and vocabulary.types[token_id] != TokenType.USER_DEFINED:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            first, *rest = part.split(token)
            cut += [first] if first else []
            for piece in rest:
                cut += [token_id, piece] if piece else [token_id]
        parts = cut
    return parts


def without_surrogates(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
