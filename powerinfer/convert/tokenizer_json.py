"""tokenizer.json of Hugging Face's tokenizers: byte-level BPE, and sentencepiece's BPE in its spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from powerinfer.convert.json_files import read_object
from powerinfer.convert.pre_tokenizers import recognise
from powerinfer.convert.vocabulary import Tokens
from powerinfer.errors import FormatError, UnsupportedError, UsageError, shown
from powerinfer.tokenizers.spm import BYTE_NAMES, SPACE
from powerinfer.tokenizers.vocabulary import TokenType

MAX_ID = 1 << 24
FLAGS_WIN = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "GemmaTokenizerFast")
"""Classes that rebuild what is put around a text from add_bos_token and add_eos_token, whatever tokenizer.json says."""


def read_tokenizer_json(path: Path, settings: dict[str, Any], notify: Callable[[str], None]) -> Tokens:
    """Raises FormatError for a file that is damaged, UnsupportedError for what GGUF files cannot say."""
    contents = read_object(path)
    model = contents.get("model")
    if not isinstance(model, dict):
        raise FormatError(f"{path}: model is {shown(model)}: expected an object")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise UnsupportedError(f"{path} is a tokenizer of the kind {shown(kind)}: supported is BPE")
    texts = read_vocab(model.get("vocab"), str(path))
    merges = read_merges(model.get("merges"), str(path))
    if model.get("byte_fallback") is True and "ByteLevel" not in _kinds(contents.get("pre_tokenizer")):
        tokens = sentencepiece_like(contents, texts, merges, notify)
    else:
        pre = recognise(contents, model.get("ignore_merges") is True, str(path))
        tokens = Tokens("gpt2", pre, texts, merges=[f"{a} {b}" for a, b in merges])
    _set_surroundings(tokens, contents, settings)
    return tokens


def read_gpt2_files(folder: Path, settings: dict[str, Any]) -> Tokens:
    """vocab.json and merges.txt, as GPT-2's and OPT's tokenizers have them."""
    path = folder / "merges.txt"
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    merges = read_merges([line for line in lines if line and not line.startswith("#version")], str(path))
    texts = read_vocab(read_object(folder / "vocab.json"), str(folder / "vocab.json"))
    tokens = Tokens("gpt2", "gpt-2", texts, merges=[f"{a} {b}" for a, b in merges])
    tokens.add_bos = settings.get("add_bos_token", False) is True
    tokens.add_eos = False
    return tokens


def read_vocab(vocab: Any, where: str) -> dict[int, str]:
    """Texts by id."""
    if not isinstance(vocab, dict) or not vocab:
        raise FormatError(f"{where}: the vocabulary is {shown(vocab)}: expected tokens and their ids")
    for text, i in vocab.items():
        if type(i) is not int or not 0 <= i < MAX_ID:
            raise FormatError(f"{where}: the id of {shown(text)} is {shown(i)}: expected an integer below {MAX_ID}")
    texts = {i: text for text, i in vocab.items()}
    if len(texts) != len(vocab):
        raise FormatError(f"{where}: {len(vocab) - len(texts)} tokens have the id of another one")
    return texts


def read_merges(merges: Any, where: str) -> list[tuple[str, str]]:
    """Pairs, the most urgent first; each is a string with a space, or, since 2024, a list of two."""
    if not isinstance(merges, list):
        raise FormatError(f"{where}: merges are {shown(merges)}: expected a list")
    pairs = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise FormatError(f"{where}: a merge is {shown(merge)}: expected two pieces")
        pairs.append((pair[0], pair[1]))
    if any(" " in part for pair in pairs for part in pair):
        raise UnsupportedError(f"{where}: tokens with spaces are merged, which GGUF files cannot say")
    return pairs


def sentencepiece_like(
    contents: dict[str, Any], texts: dict[int, str], merges: list[tuple[str, str]], notify: Callable[[str], None]
) -> Tokens:
    """Merges become scores: a token scores better, the earlier it is merged.

    sentencepiece merges any two neighbours whose union is a token. Where a merge of such a pair is missing, texts can
    come out otherwise, and a line says so.
    """
    ids = {text: i for i, text in texts.items()}
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    known = set(merges)
    lacking = [text for text in ranks if not all(pair in known for pair in _splits(text, ids))]
    if lacking:
        notify(
            f"{len(lacking)} tokens, like {shown(lacking[0])}, are merged from fewer pairs than sentencepiece would: "
            "rare words may be cut otherwise"
        )
    tokens = Tokens("llama", "default", texts)
    tokens.scores = {i: -float(ranks[text]) if text in ranks else -float(len(merges)) for i, text in texts.items()}
    tokens.types = {i: TokenType.BYTE for i, text in texts.items() if text in BYTE_NAMES}
    unknown = contents["model"].get("unk_token")
    if isinstance(unknown, str) and unknown in ids:
        tokens.types[ids[unknown]] = TokenType.UNKNOWN
        tokens.special["unknown"] = ids[unknown]
    tokens.add_space = _adds_space(contents)
    return tokens


def _splits(text: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of tokens that make up a token."""
    for at in range(1, len(text)):
        if text[:at] in ids and text[at:] in ids:
            yield text[:at], text[at:]


def _adds_space(contents: dict[str, Any]) -> bool:
    """Whether a text gets a space before it: `Prepend` among the normalizers, or `Metaspace` unless it says never."""
    for step in _steps(contents.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            return True
    for step in _steps(contents.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            return bool(scheme != "never")
    return False


def _steps(value: Any, key: str) -> list[dict[str, Any]]:
    """The parts of a `Sequence`, or the one part."""
    if not isinstance(value, dict):
        return []
    steps = value.get(key) if value.get("type") == "Sequence" else [value]
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _kinds(pre_tokenizer: Any) -> list[Any]:
    return [step.get("type") for step in _steps(pre_tokenizer, "pretokenizers")]


def _set_surroundings(tokens: Tokens, contents: dict[str, Any], settings: dict[str, Any]) -> None:
    """Whether a text gets a token before and after it: as the template for one text says, or the settings."""
    flags = [settings.get(f"add_{name}_token") for name in ("bos", "eos")]
    first, last = _template_ends(contents)
    tokens.add_bos, tokens.add_eos = first is not None, last is not None
    if settings.get("tokenizer_class") in FLAGS_WIN:
        bos, eos = flags
        tokens.add_bos = bos if isinstance(bos, bool) else tokens.add_bos
        tokens.add_eos = eos if isinstance(eos, bool) else tokens.add_eos
    ids = {text: i for i, text in tokens.texts.items()}
    for role, text in (("bos", first), ("eos", last)):
        if text in ids:
            tokens.special[role] = ids[text]


def _template_ends(contents: dict[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens before and after a text."""
    for step in _steps(contents.get("post_processor"), "processors"):
        single = step.get("single")
        if step.get("type") != "TemplateProcessing" or not isinstance(single, list) or not single:
            continue
        return _special_token(single[0]), _special_token(single[-1]) if len(single) > 1 else None
    return None, None


def _special_token(part: Any) -> str | None:
    """Of a part of a template; None where it stands for the text."""
    token = part.get("SpecialToken") if isinstance(part, dict) else None
    name = token.get("id") if isinstance(token, dict) else None
    return name if isinstance(name, str) else None
