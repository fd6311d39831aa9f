"""falcon: Falcon 7B, 11B and 40B; ReluFalcon where the file is sparse.

Attention and feed-forward are parallel: both read the layer's input, through one LayerNorm (7B, one KV head) or through
one each (40B, grouped KV, where `attn_norm_2` is attention's). Queries, keys and values are one matrix; rotary pairs
are (i, i + n/2); no gate. The predictor looks at the layer's input as it is, the feed-forward at what `attn_norm` makes
of it.
"""

from __future__ import annotations

from dataclasses import replace

from powerinfer.backends.interface import Activation, Layer, ModelSpec, NormKind, RopeStyle
from powerinfer.models.decoder import Decoder
from powerinfer.models.spec import ModelFile, ModelOptions, architecture


@architecture("falcon")
def falcon(file: ModelFile, options: ModelOptions) -> ModelSpec:
    decoder = Decoder(file, options, "falcon", NormKind.LAYER)
    rope = decoder.rope(RopeStyle.NEOX)

    def layer(i: int) -> Layer:
        attention = decoder.attention(i, rope, fused=True)
        if f"blk.{i}.attn_norm_2.weight" in decoder.weights:
            attention = replace(attention, attn_norm=decoder.norm(f"blk.{i}.attn_norm_2"))
        feed_forward = decoder.feed_forward(i, Activation.GELU_ERF, gated=False, norm="attn_norm")
        return Layer(attention, feed_forward, parallel=True)

    return decoder.model(layer)
