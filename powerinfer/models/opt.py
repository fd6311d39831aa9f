"""opt: OPT models with LayerNorms before their blocks (all but 350M), in sparse and in ordinary files.

Positions are learned, not turned: a token at position i gets row i + 2 of `position_embd`. LayerNorms and matrices have
biases, the head is the embedding, the feed-forward has ReLU and no gate. The predictor looks at the residual stream
that `ffn_norm` is applied to.
"""

from __future__ import annotations

from powerinfer.backends.interface import Activation, Embedding, Layer, ModelSpec, NormKind, Rope, RopeStyle
from powerinfer.errors import FormatError
from powerinfer.models.decoder import Decoder
from powerinfer.models.spec import ModelFile, ModelOptions, architecture

FIRST_POSITION = 2
"""The row of position 0: those before it were for padding."""


@architecture("opt")
def opt(file: ModelFile, options: ModelOptions) -> ModelSpec:
    decoder = Decoder(file, options, "opt", NormKind.LAYER)
    position_embd = decoder.weights.tensor("position_embd.weight", None, decoder.n_embd)
    n_rows = position_embd.shape[0]
    if n_rows <= FIRST_POSITION:
        raise FormatError(f"position_embd.weight has {n_rows} rows: expected more than {FIRST_POSITION}")
    embedding = Embedding(decoder.token_embd, position_embd=position_embd.rows(FIRST_POSITION, n_rows))
    decoder.n_ctx_train = min(decoder.n_ctx_train, n_rows - FIRST_POSITION)

    def layer(i: int) -> Layer:
        attention = decoder.attention(i, Rope(0, RopeStyle.NONE))
        return Layer(attention, decoder.feed_forward(i, Activation.RELU, gated=False))

    return decoder.model(layer, embedding)
