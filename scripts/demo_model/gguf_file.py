"""Writing the model as a PowerInfer GGUF, and reading such a file back into the plain PyTorch model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece as spm
import torch
from gguf import GGMLQuantizationType as QuantType
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor

from .model import DemoModel, ModelConfig
from .text import BOS, EOS, InputError, Vocabulary

MAGIC = b"PWRI"  # in place of GGUF: this model is run sparsely
THRESHOLD_KEY = "powerinfer.sparse_threshold"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # tokenizer.ggml.token_type


def tensor_type(name: str, tensor: Tensor) -> QuantType:
    """How a tensor is stored: Q4_0 for the layers' matrices, Q8_0 for embedding, head and predictors, F32 for norms."""
    if tensor.ndim == 1:
        return QuantType.F32
    if name.startswith(("token_embd.", "output.")) or ".fc" in name:
        return QuantType.Q8_0
    return QuantType.Q4_0


def stored(name: str, tensor: Tensor) -> Tensor:
    """The float32 values a tensor has once it was written to a file and read again."""
    kind = tensor_type(name, tensor)
    values = tensor.detach().numpy().astype(np.float32)
    return torch.from_numpy(dequantize(quantize(values, kind), kind).reshape(values.shape).copy())


def store(model: DemoModel, part: str = "") -> None:
    """Replace the parameters whose name contains `part` by their stored values, and stop rounding on the fly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.copy_(stored(name, parameter))
    model.set_quantized(False)


def add_settings(writer: GGUFWriter, config: ModelConfig, threshold: float) -> None:
    """The `llama.*` and `powerinfer.*` keys."""
    writer.add_name("powerinfer-demo")
    writer.add_description("A small ReLU llama with activation predictors, trained on public-domain English")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_vocab_size(config.n_vocab)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_string("powerinfer.activation", "relu")
    writer.add_float32(THRESHOLD_KEY, threshold)


def add_vocabulary(writer: GGUFWriter, vocabulary: bytes) -> None:
    """The `tokenizer.ggml.*` keys of a SentencePiece model."""
    processor = spm.SentencePieceProcessor(model_proto=vocabulary)
    ids = range(processor.get_piece_size())

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return UNKNOWN
        if processor.is_control(i):
            return CONTROL
        return BYTE if processor.is_byte(i) else NORMAL

    writer.add_tokenizer_model("llama")
    writer.add_token_list([processor.id_to_piece(i) for i in ids])
    writer.add_token_scores([processor.get_score(i) for i in ids])
    writer.add_token_types([kind(i) for i in ids])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)


def write(path: Path, model: DemoModel, vocabulary: bytes, threshold: float) -> None:
    """Write the PowerInfer GGUF; a half-written file never takes the place of a good one."""
    partial = path.with_name(path.name + ".partial")
    writer = GGUFWriter(partial, "llama")
    add_settings(writer, model.config, threshold)
    add_vocabulary(writer, vocabulary)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    # Tied, but written twice: PowerInfer's own engine refuses a llama without `output.weight`.
    tensors["output.weight"] = model.token_embd.weight
    for name, tensor in tensors.items():
        kind = tensor_type(name, tensor)
        values = tensor.detach().numpy().astype(np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with partial.open("r+b") as file:
        file.write(MAGIC)
    partial.replace(path)


def open_reader(path: Path) -> GGUFReader:
    """A reader over a copy of the file that says GGUF, the only magic that gguf-py knows."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.gguf"
        try:
            shutil.copyfile(path, copy)
        except OSError as error:
            raise InputError(f"cannot read the model {path}: {error}") from error
        with copy.open("r+b") as file:
            if file.read(4) != MAGIC:
                raise InputError(f"{path} is not a PowerInfer GGUF: it does not begin with {MAGIC.decode()}")
            file.seek(0)
            file.write(b"GGUF")
        return GGUFReader(copy)  # maps the file, so it may be unlinked now


def field(reader: GGUFReader, key: str) -> Any:
    """The value of a key that must be there."""
    found = reader.get_field(key)
    if found is None:
        raise InputError(f"the file has no key {key}; was it written by this script?")
    return found.contents()


def read(path: Path) -> tuple[DemoModel, Vocabulary, float]:
    """(model with dequantized weights, vocabulary, sparse threshold) of a file this script wrote."""
    reader = open_reader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    n_layer = field(reader, "llama.block_count")
    config = ModelConfig(
        n_vocab=field(reader, "llama.vocab_size"),
        n_embd=field(reader, "llama.embedding_length"),
        n_head=field(reader, "llama.attention.head_count"),
        n_head_kv=field(reader, "llama.attention.head_count_kv"),
        n_ff=field(reader, "llama.feed_forward_length"),
        n_ctx=field(reader, "llama.context_length"),
        # GGUF shapes count columns first.
        predictor_ranks=tuple(int(tensors[f"blk.{i}.fc1.weight"].shape[1]) for i in range(n_layer)),
        rms_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_base=field(reader, "llama.rope.freq_base"),
    )
    model = DemoModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[name]
            values = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values.copy()))
    vocabulary = Vocabulary(field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.scores"))
    return model, vocabulary, float(field(reader, THRESHOLD_KEY))
