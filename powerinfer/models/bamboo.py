"""bamboo: the layout of llama with dReLU: h = relu(gate · n) * relu(up · n), in sparse and in ordinary files.

Source: TurboSparse (Song et al. 2024). Rotary pairs are interleaved; the predictor looks at the residual stream that
`ffn_norm` is applied to.
"""

from __future__ import annotations

from dataclasses import replace

from powerinfer.backends.interface import Activation, Layer, ModelSpec, NormKind, RopeStyle
from powerinfer.models.decoder import Decoder
from powerinfer.models.spec import ModelFile, ModelOptions, architecture


@architecture("bamboo")
def bamboo(file: ModelFile, options: ModelOptions) -> ModelSpec:
    decoder = Decoder(file, options, "bamboo", NormKind.RMS)
    rope = decoder.rope(RopeStyle.INTERLEAVED)

    def layer(i: int) -> Layer:
        feed_forward = replace(decoder.feed_forward(i, Activation.RELU), up_activation=Activation.RELU)
        return Layer(decoder.attention(i, rope), feed_forward)

    return decoder.model(layer)
