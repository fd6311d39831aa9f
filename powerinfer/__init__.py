"""PowerInfer: large language models on a machine whose GPU is too small for them.

    from powerinfer import load

    model = load("model.gguf")
    for piece in model.generate("Once upon a time", n_predict=64):
        print(piece, end="", flush=True)

What each folder is for (imports go downwards only):

    cli            the command line
    engine         loading, KV cache, prompt and decode loop, sampling, perplexity, quantizing files
    models         one file an architecture: what is particular to it
    backends       how blocks of a model are computed: `native` (C++ on the CPU), `torch` (reference; CUDA)

    convert        Hugging Face folders to GGUF     } beside the others:
    formats        GGUF files                       } they import none of
    quantization   block formats of weights         } the folders above
    tokenizers     text to token ids and back       }
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powerinfer.errors import FormatError, PowerInferError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from powerinfer.engine import Model, load

__version__ = "0.1.0"
__all__ = ["FormatError", "Model", "PowerInferError", "UnsupportedError", "UsageError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `powerinfer --version` imports neither numpy nor torch.
    if name in ("Model", "load"):
        from powerinfer import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'powerinfer' has no attribute {name!r}")
