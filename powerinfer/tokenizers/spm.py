"""SentencePiece BPE, from the pieces and scores in a GGUF file (`tokenizer.ggml.model` = `llama`)."""

from __future__ import annotations

from powerinfer.errors import FormatError, shown
from powerinfer.tokenizers.protobuf import float32, message, number, string
from powerinfer.tokenizers.tokenizer import Tokenizer
from powerinfer.tokenizers.vocabulary import Metadata, TokenType, Vocabulary, read_bool, read_list, read_vocabulary

SPACE = "\u2581"
MAX_SCORE = 3.4e38  # of a 32-bit float
BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# What tokens are to sentencepiece, where they are not ordinary pieces. It has room for one unknown token only. The type
# numbers are GGUF's.
_PIECE_TYPES: dict[int, TokenType] = {
    TokenType.BYTE: TokenType.BYTE,
    TokenType.CONTROL: TokenType.CONTROL,
    TokenType.UNKNOWN: TokenType.CONTROL,
}


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
            if not isinstance(score, (int, float)) or not abs(score) <= MAX_SCORE:
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
        return self.vocabulary.texts[token].replace(SPACE, " ").encode("utf-8", "replace")


def model_proto(vocabulary: Vocabulary, scores: list[float]) -> bytes:
    """A serialized sentencepiece ModelProto.

    Fields by number, from sentencepiece_model.proto: ModelProto pieces 1, trainer_spec 2, normalizer_spec 3;
    TrainerSpec model_type 3 (BPE is 2), byte_fallback 35, unk_id 40, bos_id 41, eos_id 42, pad_id 43;
    NormalizerSpec name 1, add_dummy_prefix 3, remove_extra_whitespaces 4, escape_whitespaces 5.
    """
    unknown = [i for i, kind in enumerate(vocabulary.types) if kind == TokenType.UNKNOWN]
    unk_id = unknown[0] if unknown else vocabulary.unk_id or 0
    pieces, byte_fallback = piece_protos(vocabulary, scores, unk_id)
    trainer = number(3, 2) + number(35, int(byte_fallback)) + number(40, unk_id)
    trainer += number(41, -1) + number(42, -1) + number(43, -1)
    normalizer = string(1, "identity") + number(3, 0) + number(4, 0) + number(5, 1)
    return b"".join([*pieces, message(2, trainer), message(3, normalizer)])


def piece_protos(vocabulary: Vocabulary, scores: list[float], unk_id: int) -> tuple[list[bytes], bool]:
    """The tokens as fields of a ModelProto, and whether there is one for every byte.

    SentencePiece: piece 1, score 2, type 3. User-defined and unused tokens become ordinary pieces: merging makes them
    in llama.cpp too. There it also makes control tokens where pieces happen to add up to one's name; here it does not,
    so that a text cannot.
    """
    types = {int(kind): number(3, int(kind)) for kind in TokenType}
    seen: set[str] = set()
    protos = []
    n_bytes = 0
    for i, (text, token_type, score) in enumerate(zip(vocabulary.texts, vocabulary.types, scores, strict=True)):
        kind = TokenType.UNKNOWN if i == unk_id else _PIECE_TYPES.get(token_type, TokenType.NORMAL)
        if text in BYTE_NAMES and i != unk_id:  # also in files without types
            kind = TokenType.BYTE
        # sentencepiece wants names to be unique and not empty. A control piece is never found in text; special tokens
        # are cut out before.
        if not text or text in seen or "\x00" in text or (kind == TokenType.BYTE and text not in BYTE_NAMES):
            text = f"\x01{i}\x01"
            kind = kind if i == unk_id else TokenType.CONTROL
        n_bytes += kind == TokenType.BYTE
        seen.add(text)
        # + 0.0 makes 0.0 of -0.0, which sentencepiece 0.2.3 takes for less when it compares scores
        protos.append(message(1, string(1, text) + float32(2, score + 0.0) + types[kind]))
    return protos, n_bytes == len(BYTE_NAMES)
