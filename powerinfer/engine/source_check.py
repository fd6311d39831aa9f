"""A converted file held against the model it is from, as transformers runs that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from powerinfer.backends import BackendOptions, create_backend
from powerinfer.backends.interface import Batch, ModelSpec
from powerinfer.errors import FormatError
from powerinfer.formats import GGUFFile, open_gguf
from powerinfer.models import ModelOptions, Transformer, build_spec
from powerinfer.tokenizers import load_tokenizer

Floats: TypeAlias = npt.NDArray[np.float32]

N_TOKENS = 12
CEILINGS = {"f32": 1e-5, "f16": 1e-3, "bf16": 0.02, "q8_0": 0.02}
"""Mean squared difference of logits over their variance. A wrong order of rows or a lost bias gives 0.1 and more;
rounding 1e-13, 4e-7, 2e-5 and 3e-4 at most in tiny random models of every family."""
BYTES_A_WEIGHT = 9
"""Both models in float32, and some room."""


def check_converted(path: Path, folder: Path, outtype: str, notify: Callable[[str], None]) -> float | None:
    """Reads the file as the engine would, and compares logits of a few tokens; None where that cannot be done.

    folder: of the source model. The comparison is of dense models: predictors are left aside. Without transformers,
    memory, or transformers' knowing the model, notify gets a line that says so. Raises FormatError where logits
    differ by more than rounding to `outtype` explains; the number returned is as CEILINGS.
    """
    with open_gguf(path) as file:
        spec = build_spec(file, ModelOptions(dense=True))
        load_tokenizer(file)
        available = available_memory()
        if available is not None and available < BYTES_A_WEIGHT * file.n_elements:
            need = BYTES_A_WEIGHT * file.n_elements / 2**30
            notify(f"not compared with the source: that takes {need:.1f} GiB, {available / 2**30:.1f} are free")
            return None
        tokens = np.random.default_rng(0).integers(0, spec.n_vocab, min(N_TOKENS, spec.n_ctx_train)).astype(np.int32)
        theirs = source_logits(folder, tokens, notify)
        if theirs is None:
            return None
        difference = nmse(engine_logits(spec, file, tokens), theirs)
    if not difference <= CEILINGS[outtype]:
        raise FormatError(
            f"the converted model is not the source: its logits differ by {difference:.2g} of their variance, expected "
            f"at most {CEILINGS[outtype]:g}; --no-check keeps it all the same"
        )
    return difference


def nmse(ours: Floats, theirs: Floats) -> float:
    """NaN where any number is one."""
    return float(np.square(ours.astype(np.float64) - theirs).mean() / max(float(theirs.var()), 1e-30))


def engine_logits(spec: ModelSpec, file: GGUFFile, tokens: npt.NDArray[np.int32]) -> Floats:
    """float32 (n, n_vocab) of a prompt, by the reference backend."""
    n = len(tokens)
    transformer = Transformer(spec, create_backend("torch", BackendOptions(device="cpu")), on_block=file.release_pages)
    batch = Batch.of_sequence(tokens, 0, np.arange(n, dtype=np.int32))
    return np.asarray(transformer.forward(batch, transformer.kv_cache(n)), np.float32)


def source_logits(folder: Path, tokens: npt.NDArray[np.int32], notify: Callable[[str], None]) -> Floats | None:
    """float32 (n, n_vocab), as transformers has them; None where it is missing or does not know the model."""
    import torch

    try:
        import transformers
    except ImportError:
        notify("not compared with the source: transformers is not installed")
        return None
    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    try:
        model = library.AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, attn_implementation="eager"
        )
        with torch.inference_mode():
            logits = model.float().eval()(torch.from_numpy(tokens).long()[None]).logits[0]
    except Exception as error:  # whatever the code of a model's class raises
        reason = (str(error).split("\n") or [""])[0][:120] or type(error).__name__
        notify(f"not compared with the source: transformers cannot run it ({reason})")
        return None
    return np.asarray(logits.numpy(), np.float32)


def available_memory() -> int | None:
    """Bytes that can be had without swapping, None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except (ValueError, OSError):
            return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
