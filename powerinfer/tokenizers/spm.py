"""SentencePiece BPE, from the pieces and scores in a GGUF file (`tokenizer.ggml.model` = `llama`)."""

from __future__ import annotations

import math
import re
import struct

from powerinfer.errors import FormatError, shown
from powerinfer.tokenizers.tokenizer import Tokenizer
from powerinfer.tokenizers.vocabulary import Metadata, TokenType, Vocabulary, read_bool, read_list, read_vocabulary

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SpmTokenizer(Tokenizer):
    """Merges the neighbours whose union scores best, until no union is in the vocabulary; unknown text is bytes."""

    def __init__(self, file: Metadata) -> None:
        vocabulary = read_vocabulary(file, {"bos": 1, "eos": 2, "unknown": 0})
        super().__init__(file, vocabulary, add_bos=True)
        self._add_space = read_bool(file, "tokenizer.ggml.add_space_prefix", True)
        # PowerInfer's engine, of late 2023, puts no space before a text in which special tokens are parsed. Files made
        # for it give its tokens, unless they say what they want.
        unsaid = file.get("tokenizer.ggml.add_space_prefix") is None
        self._space_only_if_plain = unsaid and getattr(file, "is_powerinfer", False)
        scores = read_list(file, "tokenizer.ggml.scores", len(vocabulary)) or [0.0] * len(vocabulary)
        for i, score in enumerate(scores):
            if not isinstance(score, (int, float)) or math.isnan(score):
                raise FormatError(f"tokenizer.ggml.scores[{i}] is {shown(score)}: expected a number")
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model_proto(vocabulary, scores))
        except RuntimeError as error:
            raise FormatError(f"sentencepiece refuses the model's vocabulary: {' '.join(str(error).split())}") from None

    def _encode_plain(self, text: str, after_special: bool, parse_special: bool) -> list[int]:
        if self._add_space and after_special and not (self._space_only_if_plain and parse_special):
            text = " " + text
        ids: list[int] = self._processor.EncodeAsIds(text)
        return ids

    def _plain_piece(self, token: int) -> bytes:
        text = self.vocabulary.texts[token]
        if self.vocabulary.types[token] == TokenType.BYTE:
            found = _BYTE.fullmatch(text)
            return bytes([int(found[1], 16)]) if found else b""
        return text.replace(SPACE, " ").encode()


def model_proto(vocabulary: Vocabulary, scores: list[float]) -> bytes:
    """A serialized sentencepiece ModelProto.

    Fields by number, from sentencepiece_model.proto: ModelProto pieces 1, trainer_spec 2, normalizer_spec 3;
    SentencePiece piece 1, score 2, type 3; TrainerSpec model_type 3 (BPE is 2), byte_fallback 35, unk_id 40, bos_id 41,
    eos_id 42, pad_id 43; NormalizerSpec name 1, add_dummy_prefix 3, remove_extra_whitespaces 4, escape_whitespaces 5.
    Its type numbers are GGUF's.
    """
    unknown = [i for i, kind in enumerate(vocabulary.types) if kind == TokenType.UNKNOWN]
    unk_id = unknown[0] if unknown else vocabulary.unk_id or 0
    seen: set[str] = set()
    names_of_bytes = {f"<0x{i:02X}>" for i in range(256)}
    found_bytes: set[str] = set()
    out = bytearray()
    for i, (text, kind, score) in enumerate(zip(vocabulary.texts, vocabulary.types, scores, strict=True)):
        # sentencepiece wants names to be unique and not empty, and one unknown token. A control piece is never found in
        # text; special tokens are cut out before.
        if not text or text in seen or "\x00" in text or (kind == TokenType.BYTE and text not in names_of_bytes):
            text, kind = f"\x01{i}\x01", TokenType.CONTROL
        elif kind not in (TokenType.NORMAL, TokenType.BYTE) and i != unk_id:
            kind = TokenType.CONTROL
        if i == unk_id:
            kind = TokenType.UNKNOWN
        elif kind == TokenType.BYTE:
            found_bytes.add(text)
        seen.add(text)
        out += _message(1, _string(1, text) + _float(2, score) + _number(3, int(kind)))
    byte_fallback = found_bytes == names_of_bytes
    trainer = _number(3, 2) + _number(35, int(byte_fallback)) + _number(40, unk_id)
    trainer += _number(41, -1) + _number(42, -1) + _number(43, -1)
    normalizer = _string(1, "identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    return bytes(out + _message(2, trainer) + _message(3, normalizer))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, contents: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(contents)) + contents


def _string(field: int, text: str) -> bytes:
    return _message(field, text.encode("utf-8", "replace"))
