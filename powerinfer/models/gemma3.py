"""gemma3: the text part of Gemma 3.

Embeddings are scaled by sqrt(n_embd). Queries and keys have a norm, head by head; the outputs of attention and
feed-forward have one, too, before they are added. Most layers see a window of positions and turn with a base of their
own; every sixth sees all, with the file's base and scaling. The gate's activation is GELU. Norm weights are used as
they are: files hold 1 + w.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from powerinfer.backends.interface import Activation, Embedding, Layer, ModelSpec, NormKind, Rope, RopeStyle
from powerinfer.errors import FormatError, UnsupportedError, shown
from powerinfer.models.decoder import Decoder
from powerinfer.models.spec import ModelFile, ModelOptions, architecture

LOCAL_FREQ_BASE = 10000.0
GLOBAL_EVERY = 6
LAYERS_OF_27B = 62
"""The one size whose scores are scaled by the model's width a head, not by the head's own; files do not say so."""


@architecture("gemma3")
def gemma3(file: ModelFile, options: ModelOptions) -> ModelSpec:
    decoder = Decoder(file, options, "gemma3", NormKind.RMS)
    if decoder.hparams.number("final_logit_softcapping", 0.0, positive=False):
        raise UnsupportedError("gemma3.final_logit_softcapping is not supported")
    window = decoder.hparams.integer("attention.sliding_window", 0, low=0)
    is_local = _read_pattern(file, decoder.n_layers) if window else lambda i: False
    global_rope = decoder.rope(RopeStyle.NEOX)
    local_base = decoder.hparams.number("rope.freq_base_swa", LOCAL_FREQ_BASE)
    local_rope = Rope(global_rope.n_rot, RopeStyle.NEOX, local_base)
    width = decoder.n_embd // decoder.n_head if decoder.n_layers == LAYERS_OF_27B else decoder.head_dim

    def layer(i: int) -> Layer:
        at, local = f"blk.{i}", is_local(i)
        attention = replace(
            decoder.attention(i, local_rope if local else global_rope),
            scale=float(width**-0.5),
            window=window if local else 0,
            attn_q_norm=decoder.head_norm(f"{at}.attn_q_norm"),
            attn_k_norm=decoder.head_norm(f"{at}.attn_k_norm"),
            post_attention_norm=decoder.norm(f"{at}.post_attention_norm"),
        )
        feed_forward = replace(
            decoder.feed_forward(i, Activation.GELU), post_ffw_norm=decoder.norm(f"{at}.post_ffw_norm")
        )
        return Layer(attention, feed_forward)

    return decoder.model(layer, Embedding(decoder.token_embd, scale=math.sqrt(decoder.n_embd)))


def _read_pattern(file: ModelFile, n_layers: int) -> Callable[[int], bool]:
    """Which layers see the window only: a flag for each, or every how many one sees all."""
    key = "gemma3.attention.sliding_window_pattern"
    value = file.get(key, GLOBAL_EVERY)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        every = value
        return lambda i: (i + 1) % every != 0
    flags = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(flags, list) and len(flags) >= n_layers and all(flag in (0, 1) for flag in flags):
        return lambda i: bool(flags[i])
    raise FormatError(f"{key} is {shown(value)}: expected a number above 0 or a flag for each of {n_layers} layers")
