"""How byte-level BPE cuts text before it merges: regular expressions by the name in `tokenizer.ggml.pre`."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer.errors import FormatError, UnsupportedError, shown

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_CL100K_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _CL100K_REST
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _CL100K_REST


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Each pattern cuts what the ones before left into its matches and what lies between.

    ignore_merges: a piece that is a token whole is not merged. add_bos: where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizer((GPT2,))
_DIGITS_APART = PreTokenizer((r"\p{N}", GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((QWEN2,))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"))
_NAMES = {
    _DEFAULT: "default",
    _GPT2: "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais"
    " trillion granite-docling",
    _DIGITS_APART: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _LLAMA3: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    PreTokenizer((LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer((LLAMA3,), ignore_merges=True): "glm4 glm5",
    _FALCON: "falcon",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
}
_BY_NAME = {name: pre for pre, names in _NAMES.items() for name in names.split()}


def find_pretokenizer(name: object) -> PreTokenizer:
    """Raises UnsupportedError for a name that is not known here."""
    if not isinstance(name, str):
        raise FormatError(f"tokenizer.ggml.pre is {shown(name)}: expected a string")
    if name not in _BY_NAME:
        raise UnsupportedError(
            f"unknown pre-tokenizer {shown(name)} (tokenizer.ggml.pre): known are {', '.join(_BY_NAME)}"
        )
    return _BY_NAME[name]
