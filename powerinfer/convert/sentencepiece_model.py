"""tokenizer.model: pieces, scores and types of a sentencepiece model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from powerinfer.convert.vocabulary import Tokens
from powerinfer.errors import FormatError, UnsupportedError, UsageError
from powerinfer.tokenizers.vocabulary import TokenType

TRAINER_SPEC, NORMALIZER_SPEC = 2, 3  # fields of sentencepiece_model.proto's ModelProto
MODEL_TYPE, CHARSMAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES = 3, 2, 3, 4  # and of these two
BPE = 2
KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


def read_sentencepiece(path: Path, settings: dict[str, Any], notify: Callable[[str], None]) -> Tokens:
    """Raises FormatError for a file that is none, UnsupportedError for a model that is not BPE."""
    from sentencepiece import SentencePieceProcessor

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except RuntimeError:
        raise FormatError(f"{path} is no sentencepiece model: the file is damaged, download it again") from None
    fields = dict(_fields(data, path))
    trainer = dict(_fields(fields.get(TRAINER_SPEC, b""), path))
    normalizer = dict(_fields(fields.get(NORMALIZER_SPEC, b""), path))
    kind = trainer.get(MODEL_TYPE, 1)
    if kind != BPE:
        name = KINDS.get(kind, str(kind))
        raise UnsupportedError(f"{path} is a sentencepiece model of the kind {name}: supported is BPE")
    if normalizer.get(CHARSMAP) or normalizer.get(REMOVE_EXTRA_WHITESPACES, 1):
        notify("the tokenizer changes characters or spaces before it cuts text, which GGUF files cannot say")
    n = processor.GetPieceSize()
    tokens = Tokens("llama", "default", {i: processor.IdToPiece(i) for i in range(n)})
    tokens.types = {i: _type(processor, i) for i in range(n)}
    tokens.scores = {i: processor.GetScore(i) for i in range(n)}
    roles = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unknown": processor.unk_id()}
    tokens.special = {role: i for role, i in roles.items() if i >= 0}
    add_space = settings.get("add_prefix_space")
    tokens.add_space = add_space if isinstance(add_space, bool) else bool(normalizer.get(ADD_DUMMY_PREFIX, 1))
    tokens.add_bos = settings.get("add_bos_token", True) is not False
    tokens.add_eos = settings.get("add_eos_token", False) is True
    return tokens


def _type(processor: Any, i: int) -> TokenType:
    kinds = (
        (processor.IsUnknown, TokenType.UNKNOWN),
        (processor.IsControl, TokenType.CONTROL),
        (processor.IsUnused, TokenType.UNUSED),
        (processor.IsByte, TokenType.BYTE),
    )
    return next((kind for test, kind in kinds if test(i)), TokenType.NORMAL)


def _fields(data: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """Fields of a protocol buffer: numbers, and bytes of what has a length; where one comes again, all of them."""
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            field, wire = key >> 3, key & 7
            if wire == 0:
                value, at = _varint(data, at)
                yield field, value
            elif wire == 2:
                size, at = _varint(data, at)
                yield field, data[at : at + size]
                at += size
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                raise IndexError
    except IndexError:
        raise FormatError(f"{path} is no sentencepiece model: the file is damaged, download it again") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
