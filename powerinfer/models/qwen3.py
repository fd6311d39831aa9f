"""qwen3: as qwen2 without biases; queries and keys go through an RMSNorm, head by head, before they are turned."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.backends.interface import Layer, ModelSpec, NormKind, RopeStyle
from powerinfer.models.decoder import Decoder
from powerinfer.models.spec import ModelFile, ModelOptions, architecture


@architecture("qwen3")
def qwen3(file: ModelFile, options: ModelOptions) -> ModelSpec:
    decoder = Decoder(file, options, "qwen3", NormKind.RMS)
    rope = decoder.rope(RopeStyle.NEOX)

    def layer(i: int) -> Layer:
        attention = replace(
            decoder.attention(i, rope),
            attn_q_norm=decoder.head_norm(f"blk.{i}.attn_q_norm"),
            attn_k_norm=decoder.head_norm(f"blk.{i}.attn_k_norm"),
        )
        return Layer(attention, decoder.feed_forward(i))

    return decoder.model(layer)
