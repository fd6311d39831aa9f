"""qwen2: Qwen 1.5, 2 and 2.5. As llama, but rotary pairs are (i, i + n/2), and queries, keys and values have biases."""

from __future__ import annotations

from powerinfer.backends.interface import Layer, ModelSpec, NormKind, RopeStyle
from powerinfer.models.decoder import Decoder
from powerinfer.models.spec import ModelFile, ModelOptions, architecture


@architecture("qwen2")
def qwen2(file: ModelFile, options: ModelOptions) -> ModelSpec:
    decoder = Decoder(file, options, "qwen2", NormKind.RMS)
    rope = decoder.rope(RopeStyle.NEOX)

    def layer(i: int) -> Layer:
        return Layer(decoder.attention(i, rope), decoder.feed_forward(i))

    return decoder.model(layer)
