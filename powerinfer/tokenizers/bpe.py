"""Byte-level BPE (`tokenizer.ggml.model` = `gpt2`), over Hugging Face's `tokenizers`."""

from __future__ import annotations

from powerinfer.errors import FormatError, shown
from powerinfer.tokenizers.pretokenizers import find_pretokenizer
from powerinfer.tokenizers.tokenizer import Tokenizer
from powerinfer.tokenizers.vocabulary import Metadata, Vocabulary, check_types, read_list, read_vocabulary


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in GPT-2's vocabularies (Radford et al. 2019): printable ones for themselves,
    the others, in order, for those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class BpeTokenizer(Tokenizer):
    """Cuts text by a regular expression, and merges the bytes of each piece in the order of the merges."""

    def __init__(self, file: Metadata) -> None:
        pre = find_pretokenizer(file.get("tokenizer.ggml.pre", "default"))
        vocabulary = read_vocabulary(file, {})
        super().__init__(file, vocabulary, add_bos=pre.add_bos)
        self._alphabet = byte_alphabet()
        from tokenizers import Regex
        from tokenizers import Tokenizer as Pipeline
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

        ids = {text: i for i, text in enumerate(vocabulary.texts)}
        merges = read_merges(file, vocabulary, ids)
        self._pipeline = Pipeline(BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges))
        splits = [Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
        self._pipeline.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    def _encode_plain(self, text: str, after_special: bool, parse_special: bool) -> list[int]:
        return list(self._pipeline.encode(text, add_special_tokens=False).ids)

    def _plain_piece(self, token: int) -> bytes:
        out = bytearray()
        for character in self.vocabulary.texts[token]:
            byte = self._alphabet.get(character)
            # characters beyond the alphabet stand for themselves
            out += character.encode("utf-8", "replace") if byte is None else bytes([byte])
        return bytes(out)


def read_merges(file: Metadata, vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs to merge, first the most urgent; those that make no token are left out, those that come again too."""
    lines = read_list(file, "tokenizer.ggml.merges")
    if lines is None:
        raise FormatError("the model's tokenizer is incomplete: tokenizer.ggml.merges is missing")
    check_types(lines, str, "tokenizer.ggml.merges")
    merges = []
    for line in dict.fromkeys(lines):
        # the space that separates is not the first character, which can be a space itself
        at = line.find(" ", 1)
        if at < 0:
            key = f"tokenizer.ggml.merges[{lines.index(line)}]"
            raise FormatError(f"{key} is {shown(line)}: expected two pieces and a space between them")
        left, right = line[:at], line[at + 1 :]
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
    return merges
