"""Recognises how a tokenizer.json cuts text before merging, for the name in `tokenizer.ggml.pre`."""

from __future__ import annotations

import json
from typing import Any

from powerinfer.errors import UnsupportedError, shown
from powerinfer.tokenizers.pretokenizers import LLAMA3, QWEN2

_FOLDED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPELLED_OUT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_BYTES = ("ByteLevel", False)  # turns bytes into characters only
_GPT2 = ("ByteLevel", True)  # cuts as GPT-2 before that
_KNOWN: dict[tuple[Any, ...], tuple[str, str]] = {
    (_GPT2,): ("gpt-2", "gpt-2"),
    (("Digits", True), _GPT2): ("smollm", "smollm"),
    (("Split", LLAMA3), _BYTES): ("dbrx", "llama-bpe"),
    (("Split", QWEN2), _BYTES): ("qwen2", "qwen2"),
    (("Punctuation", "Contiguous"), _GPT2, ("Digits", False), ("Split", "[0-9][0-9][0-9]")): ("falcon", "falcon"),
}
"""Steps to names: the second where whole words that are tokens are not merged (`ignore_merges`)."""
_NORMALIZERS = (None, "NFC")
"""Those that leave usual text as it is."""


def recognise(contents: dict[str, Any], ignore_merges: bool, where: str) -> str:
    """The name for the contents of a tokenizer.json. Raises UnsupportedError where none fits."""
    normalizer = contents.get("normalizer") or {}
    kind = normalizer.get("type") if isinstance(normalizer, dict) else shown(normalizer)
    if kind not in _NORMALIZERS and normalizer != {"type": "Sequence", "normalizers": []}:
        raise UnsupportedError(f"{where}: the normalizer {shown(kind)} cannot be said in a GGUF file")
    definition = contents.get("pre_tokenizer")
    steps = _steps(definition)
    names = _KNOWN.get(tuple(steps)) if steps is not None else None
    if names is None:
        raise UnsupportedError(
            f"{where}: no name is known for the pre_tokenizer {json.dumps(definition)[:200]}: "
            f"known are those of {', '.join(sorted({name for pair in _KNOWN.values() for name in pair}))}"
        )
    return names[ignore_merges]


def _steps(definition: Any) -> list[tuple[str, Any]] | None:
    """Each step's kind and what tells it apart; None for steps that are not known."""
    if not isinstance(definition, dict):
        return None
    listed = definition.get("pretokenizers") if definition.get("type") == "Sequence" else [definition]
    if not isinstance(listed, list):
        return None
    steps = [_step(step) for step in listed if isinstance(step, dict)]
    return None if None in steps else [step for step in steps if step is not None]


def _step(step: dict[str, Any]) -> tuple[str, Any] | None:
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return "ByteLevel", step.get("use_regex", True) is True
    if kind == "Digits":
        return "Digits", step.get("individual_digits") is True
    if kind == "Punctuation":
        return "Punctuation", str(step.get("behavior"))
    pattern = step.get("pattern")
    if kind == "Split" and isinstance(pattern, dict) and step.get("behavior") == "Isolated":
        regex = pattern.get("Regex")
        is_whole = isinstance(regex, str) and not step.get("invert", False)
        return ("Split", regex.replace(_FOLDED, _SPELLED_OUT)) if is_whole and isinstance(regex, str) else None
    return None
