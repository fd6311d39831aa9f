"""Hugging Face folders of tiny random models, with tokenizers trained on a few lines."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import safetensors.torch
import sentencepiece
import tokenizers
import torch
import transformers
from hf_gguf import random_model
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

N_VOCAB = 416
"""Rows of the embeddings; the tokenizers have some fewer tokens."""
LINES = [
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void; and darkness was upon the face of the deep.",
    "And God said, Let there be light: and there was light. 1234567 times, isn't it?",
    "def main(): return [i ** 2 for i in range(10)]  # fünf Äpfel, naïve, 日本語",
    "She sells sea shells by the sea shore; the shells she sells are sea shells, I'm sure.",
]
TEXTS = [
    *LINES,
    "",
    " ",
    "Hello world, the void was upon the earth",
    "  two spaces  between\n\n\tand a tab, 2023-10-31",
    "emoji 🦙 and Ελληνικά, it's WE'LL",
    "sea</s>shells",
]
DECODER = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FALCON = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 72,
    "bias": False,
    "tie_word_embeddings": False,
}
OPT = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@cache
def llama_folder_model() -> Any:
    return random_model(transformers.LlamaConfig(**DECODER))


def save_folder(folder: Path, model: Any, **settings: Any) -> Path:
    """A model with a byte-level BPE tokenizer; settings: of save_pretrained."""
    model.save_pretrained(folder, **settings)
    save_bpe(folder)
    return folder


def llama_folder(folder: Path, **settings: Any) -> Path:
    return save_folder(folder, llama_folder_model(), **settings)


def save_bin(folder: Path, n_shards: int, zipped: bool = True) -> None:
    """Puts PyTorch's files in place of safetensors. zipped: as torch has written them since 1.6."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-{i + 1}.bin" for i in range(n_shards)] if n_shards > 1 else ["pytorch_model.bin"]
    weight_map = {key: names[i % n_shards] for i, key in enumerate(state)}
    for name in names:
        part = {key: value for key, value in state.items() if weight_map[key] == name}
        torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
    if n_shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def bpe_pipeline(pre: str = "gpt-2") -> Any:
    """A trained byte-level BPE whose text is cut as the name says."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(digits: str) -> Any:
        return pre_tokenizers.Split(Regex(contractions + digits + rest), "isolated")

    steps = {
        "gpt-2": [byte_level],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "llama-bpe": [split(r"\p{N}{1,3}"), bytes_only],
        "dbrx": [split(r"\p{N}{1,3}"), bytes_only],
        "qwen2": [split(r"\p{N}"), bytes_only],
        "falcon": [
            pre_tokenizers.Punctuation("contiguous"),
            byte_level,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ],
    }[pre]
    pipeline = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    pipeline.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        pipeline.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<|endoftext|>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(LINES * 3, trainer)
    pipeline.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return pipeline


def save_bpe(folder: Path, pre: str = "gpt-2", bos: bool = False, **settings: Any) -> Any:
    """Writes the tokenizer's files and gives it as transformers loads them."""
    pipeline = bpe_pipeline(pre)
    if bos:
        special = [("<|endoftext|>", pipeline.token_to_id("<|endoftext|>"))]
        pipeline.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=special),
            ]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token="<|endoftext|>", eos_token="</s>", **settings
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def train_sentencepiece(**settings: Any) -> bytes:
    """A serialized model, like Llama's unless the settings say otherwise."""
    usual = {
        "model_type": "bpe",
        "vocab_size": 384,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.99,
        "minloglevel": 3,
    }
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES * 3), model_writer=writer, **usual | settings)
    return writer.getvalue()


def save_sentencepiece(folder: Path, settings: dict[str, Any] | None = None, **training: Any) -> Path:
    """tokenizer.model and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(**training))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | (settings or {})))
    return folder


def save_predictors(folder: Path, n_embd: int = 64, n_ff: int = 72, n_layers: int = 2, rank: int = 24) -> Path:
    """Random predictors, and a threshold."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    for i in range(n_layers):
        state = {
            "fc1.weight": torch.randn(rank, n_embd, generator=generator),
            "fc2.weight": torch.randn(n_ff, rank, generator=generator),
        }
        torch.save(state, folder / f"model_{i}.pt")
    (folder / "config.json").write_text(json.dumps({"sparse_threshold": 0.25}))
    return folder


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    1.5,
    1e400,
    "x",
    "",
    [],
    [1],
    ["a", "b"],
    {},
    {"a": 1},
    10**30,
    [[]],
    [{}],
    {"content": 3},
]


def damaged(contents: Any, seed: int, most: int = 20) -> Iterator[Any]:
    """The same JSON with one value after the other replaced by another; of a long list or object the first `most`."""
    rng = random.Random(seed)
    for path in _paths(contents, most):
        yield _replaced(contents, path, rng.choice(JUNK))


def _paths(value: Any, most: int, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in islice(items, most):
        yield from _paths(inner, most, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copied


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of an object; None takes one away."""
    contents = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in contents.items() if value is not None}))


def sentencepiece_like_pipeline(proto: bytes) -> Any:
    """The same BPE as Hugging Face's tokenizers have it: each union of two pieces is a merge, the best scores first."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto)
    pieces = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:at], piece[at:])
        for piece in sorted(pieces, key=lambda piece: -processor.GetScore(ids[piece]))
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    pipeline = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    pipeline.add_special_tokens(["<unk>", "<s>", "</s>"])
    return pipeline
