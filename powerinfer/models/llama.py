"""llama: Llama 1-3, Mistral, SmolLM2 and others of that layout; ReluLLaMA and ProSparse where the file is sparse.

RMSNorm, interleaved rotary pairs, grouped KV, gated feed-forward; a sliding window in all layers where the file has one
(Mistral). The predictor looks at the residual stream that `ffn_norm` is applied to.
"""

from __future__ import annotations

from dataclasses import replace

from powerinfer.backends.interface import Layer, ModelSpec, NormKind, RopeStyle
from powerinfer.models.decoder import Decoder
from powerinfer.models.spec import ModelFile, ModelOptions, architecture


@architecture("llama")
def llama(file: ModelFile, options: ModelOptions) -> ModelSpec:
    decoder = Decoder(file, options, "llama", NormKind.RMS)
    rope = decoder.rope(RopeStyle.INTERLEAVED)
    window = decoder.hparams.integer("attention.sliding_window", 0, low=0)

    def layer(i: int) -> Layer:
        return Layer(replace(decoder.attention(i, rope), window=window), decoder.feed_forward(i))

    return decoder.model(layer)
