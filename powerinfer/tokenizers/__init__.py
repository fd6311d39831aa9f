"""Text to token ids and back. Stands alone: imports no other part of the package but the errors."""

from __future__ import annotations

from powerinfer.errors import FormatError, UnsupportedError, shown
from powerinfer.tokenizers.tokenizer import StreamDecoder, Tokenizer
from powerinfer.tokenizers.vocabulary import Metadata

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer"]


def load_tokenizer(file: Metadata) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises FormatError for a vocabulary that contradicts itself, UnsupportedError for a kind that is not known here.
    """
    kind = file.get("tokenizer.ggml.model")
    if kind is None:
        raise FormatError("the model has no tokenizer: tokenizer.ggml.model is missing")
    if not isinstance(kind, str):  # an array would not even compare
        raise FormatError(f"tokenizer.ggml.model is {shown(kind)}: expected a string")
    if kind == "llama":
        from powerinfer.tokenizers.spm import SpmTokenizer

        return SpmTokenizer(file)
    if kind == "gpt2":
        from powerinfer.tokenizers.bpe import BpeTokenizer

        return BpeTokenizer(file)
    raise UnsupportedError(f"unknown tokenizer {shown(kind)} (tokenizer.ggml.model): known are llama, gpt2")
