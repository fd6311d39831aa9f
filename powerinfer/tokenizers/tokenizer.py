"""What every tokenizer does: special tokens around and inside the text, pieces, and text from ids."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

from powerinfer.errors import FormatError, UsageError
from powerinfer.tokenizers.vocabulary import (
    Metadata,
    TokenType,
    Vocabulary,
    read_bool,
    split_special,
    without_surrogates,
)

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(ABC):
    """Text to token ids and back.

    bos_id, eos_id, unk_id: None where the model has none. add_bos, add_eos: whether `encode` puts them around a text.
    eog_ids: tokens that end a text or a turn. chat_template: Jinja source, or None.
    """

    def __init__(self, file: Metadata, vocabulary: Vocabulary, add_bos: bool) -> None:
        self.vocabulary = vocabulary
        self.bos_id, self.eos_id, self.unk_id = vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id
        self.eog_ids = vocabulary.eog_ids
        self.add_bos = read_bool(file, "tokenizer.ggml.add_bos_token", add_bos) and self.bos_id is not None
        self.add_eos = read_bool(file, "tokenizer.ggml.add_eos_token", False) and self.eos_id is not None
        template = file.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise FormatError("tokenizer.chat_template is not a string")
        self.chat_template: str | None = template

    @property
    def n_vocab(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text. add_special: with tokens that start and end one. parse_special: read `<s>` and the like."""
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        after_special = True
        for part in split_special(without_surrogates(text), self.vocabulary, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part, after_special, parse_special)
            after_special = isinstance(part, int)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def is_control(self, token: int) -> bool:
        return self.vocabulary.types[self._check(token)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Bytes of one token; control tokens give their name if `special`, else nothing. Unused ones give nothing.

        Raises UsageError for an id that the vocabulary lacks.
        """
        kind = self.vocabulary.types[self._check(token)]
        if kind == TokenType.NORMAL:
            return self._plain_piece(token)
        text = self.vocabulary.texts[token]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return text.encode("utf-8", "replace") if special else b""
        if kind == TokenType.USER_DEFINED:
            return text.encode("utf-8", "replace")
        byte = _BYTE.fullmatch(text) if kind == TokenType.BYTE else None
        return bytes([int(byte[1], 16)]) if byte else b""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token, special=special) for token in ids).decode("utf-8", "replace")

    def _check(self, token: int) -> int:
        if not 0 <= token < len(self.vocabulary):
            raise UsageError(f"there is no token {token}: this model has tokens 0 to {len(self.vocabulary) - 1}")
        return token

    @abstractmethod
    def _encode_plain(self, text: str, after_special: bool, parse_special: bool) -> list[int]:
        """Ids of text without special tokens. after_special: it starts the text or follows a special token."""

    @abstractmethod
    def _plain_piece(self, token: int) -> bytes:
        """Bytes of a token of the type NORMAL."""


class StreamDecoder:
    """Text of ids that come one by one: an incomplete character is held back until the token that completes it."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.piece(token, special=self._special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)
