"""Training text: documents of lines, split into training and held-out parts, and the vocabulary made from them."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece as spm
import torch
from torch import Tensor

Document = list[str]  # one chapter: its lines, in order; joined by one space they are the text

BOS, EOS = 1, 2
SPACE = "\u2581"  # stands for a space in pieces
HELD_OUT_EVERY = 20  # one document in this many is never trained on
KJV_RANGE = "gen1:1-rev22:21"
MISSING_TEXT = (
    "no training text: install the Debian packages bible-kjv and bible-kjv-text (apt-get install bible-kjv), "
    "or name plain-text files with --text"
)


class InputError(Exception):
    """A text or model file cannot be used; the message says why and what to do."""


def read_kjv() -> list[Document]:
    """The King James Bible as printed by Debian's `bible`: a document a chapter, a line a verse."""
    program = shutil.which("bible")
    if program is None:
        raise InputError(MISSING_TEXT)
    # -f prints each verse on one line behind its reference: `Ge1:1 In the beginning ...`.
    result = subprocess.run([program, "-f", KJV_RANGE], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    chapters: dict[str, Document] = {}
    for line in result.stdout.splitlines():
        match = re.match(r"(\S+):\d+ (.*\S)", line)
        if match:
            chapters.setdefault(match[1], []).append(match[2])
    if not chapters:
        raise InputError(MISSING_TEXT)
    return list(chapters.values())


def read_files(paths: Sequence[Path]) -> list[Document]:
    """Plain text files: a blank line ends a document, and a document's lines are joined by spaces."""
    documents: list[Document] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the text file {path}: {error}") from error
        for block in re.split(r"\n\s*\n", text):
            lines = [line.strip() for line in block.splitlines() if line.strip()]
            if lines:
                documents.append(lines)
    if len(documents) < 2 * HELD_OUT_EVERY:
        raise InputError(
            f"the text has {len(documents)} documents (blocks between blank lines); at least {2 * HELD_OUT_EVERY} "
            "are needed so that some can be held out"
        )
    return documents


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents; every HELD_OUT_EVERY-th one is held out."""
    train = [document for i, document in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return train, list(documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def train_vocabulary(documents: Sequence[Document], n_vocab: int) -> bytes:
    """A serialized SentencePiece BPE model with byte fallback that keeps the text exactly as it is."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for document in documents for line in document]),
        model_writer=model,
        model_type="bpe",
        vocab_size=n_vocab,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        max_sentence_length=1 << 24,  # by default lines of over 4 kB are left out without a word
        split_digits=True,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


class Vocabulary:
    """Tokenizes with nothing but a file's token texts and scores, so that a file is measured by what is in it."""

    def __init__(self, pieces: Sequence[str], scores: Sequence[float]) -> None:
        self.pieces = list(pieces)
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.scores = scores
        self.words: dict[str, list[int]] = {}  # no piece crosses a space, so a word's tokens never change

    def encode(self, line: str) -> list[int]:
        """Token ids of a line, a space put before its first word."""
        tokens: list[int] = []
        for word in re.findall(SPACE + "[^" + SPACE + "]*", SPACE + line.replace(" ", SPACE)):
            if word not in self.words:
                self.words[word] = self.encode_word(word)
            tokens += self.words[word]
        return tokens

    def encode_word(self, word: str) -> list[int]:
        """Merge the neighbours that make the best-scored piece until none do; spell what is left in bytes."""
        parts = list(word)
        while True:
            merged = [self.ids.get(parts[i] + parts[i + 1], -1) for i in range(len(parts) - 1)]
            ranked = [(self.scores[piece], -i) for i, piece in enumerate(merged) if piece >= 0]
            if not ranked:
                break
            at = -max(ranked)[1]  # the leftmost of equals, as SentencePiece does
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        tokens: list[int] = []
        for part in parts:
            tokens += [self.ids[part]] if part in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, control tokens left out."""
        data = b""
        for token in tokens:
            piece = self.pieces[token]
            if re.fullmatch("<0x[0-9A-F]{2}>", piece):
                data += bytes([int(piece[3:5], 16)])
            elif token > EOS:
                data += piece.replace(SPACE, " ").encode()
        return data.decode("utf-8", errors="replace").removeprefix(" ")


@dataclass(frozen=True)
class TokenStream:
    """Documents end to end: `tokens` (N,) int64, each BOS ... EOS; `starts` indexes each line's first token."""

    tokens: Tensor
    starts: Tensor

    def batch(self, n_sequences: int, length: int, generator: torch.Generator) -> Tensor:
        """Random windows (n_sequences, length + 1), each BOS and then text from the start of a line.

        Every prompt begins with BOS, so every training window does too.
        """
        usable = self.starts[self.starts + length <= len(self.tokens)]
        picks = usable[torch.randint(len(usable), (n_sequences,), generator=generator)]
        windows = self.tokens[picks[:, None] + torch.arange(length)]
        return torch.cat((torch.full((n_sequences, 1), BOS), windows), dim=1)

    def cut(self, length: int) -> Tensor:
        """All of the text as windows (n, length + 1) that each begin with BOS; the ragged tail is dropped."""
        n = len(self.tokens) // length
        windows = self.tokens[: n * length].view(n, length)
        return torch.cat((torch.full((n, 1), BOS), windows), dim=1)


def encode(documents: Sequence[Document], encode_line: Callable[[str], list[int]]) -> TokenStream:
    """Tokenize documents; lines are joined by a space, which the vocabulary carries at the front of a word."""
    tokens: list[int] = []
    starts: list[int] = []
    for document in documents:
        tokens.append(BOS)
        for line in document:
            starts.append(len(tokens))
            tokens.extend(encode_line(line))
        tokens.append(EOS)
    return TokenStream(torch.tensor(tokens), torch.tensor(starts))
