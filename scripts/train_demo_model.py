"""Train the demo model that ships with the package, and write it as a PowerInfer GGUF.

The model is a small llama with ReLU feed-forwards and activation predictors, trained from nothing on public-domain
English. The stages: vocabulary, model (dense, then sparse, then quantization-aware; the long one, which --resume
continues), predictors, threshold. The last lines printed are measured on the written file, on held-out text.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import sentencepiece as spm
import torch
from demo_model import gguf_file, predictor
from demo_model.evaluate import CHUNK, Report, evaluate
from demo_model.model import DemoModel, ModelConfig
from demo_model.predictor import PredictorConfig
from demo_model.text import (
    BOS,
    EOS,
    Document,
    InputError,
    TokenStream,
    encode,
    read_files,
    read_kjv,
    split,
    train_vocabulary,
)
from demo_model.training import TrainConfig, Trainer, say

FILE_NAME = "demo.powerinfer.gguf"


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is trained."""

    model: ModelConfig
    training: TrainConfig
    predictor: PredictorConfig


FULL = Settings(ModelConfig(), TrainConfig(), PredictorConfig())
# Large enough to run every stage, too small to learn to write.
QUICK = Settings(
    ModelConfig(n_vocab=512, n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_ctx=128, predictor_ranks=(64, 32)),
    TrainConfig(steps=120, length=128, warmup=10, save_every=60),
    PredictorConfig(steps=60, length=128),
)


@dataclass(frozen=True)
class Corpus:
    """Token streams; the threshold is chosen on `calibration`, the figures are measured on `held_out` (n, T + 1)."""

    train: TokenStream
    calibration: torch.Tensor
    held_out: torch.Tensor


def load_corpus(documents: list[Document], encode_line: Callable[[str], list[int]], length: int) -> Corpus:
    """Tokenize the text; of the documents not trained on, every other one serves for calibration."""
    train, rest = split(documents)
    calibration, held_out = (encode(part, encode_line).cut(length) for part in (rest[0::2], rest[1::2]))
    corpus = Corpus(encode(train, encode_line), calibration, held_out)
    if min(len(calibration), len(held_out)) == 0:
        raise InputError(f"the held-out text is shorter than {length} tokens; give more text")
    return corpus


def make_vocabulary(documents: list[Document], n_vocab: int, path: Path, resume: bool) -> bytes:
    """The SentencePiece model in `path`; trained on the training documents unless an earlier run left it there."""
    if not (resume and path.exists()):
        say(f"training a vocabulary of {n_vocab} tokens")
        path.write_bytes(train_vocabulary(split(documents)[0], n_vocab))
    return path.read_bytes()


def train_model(settings: Settings, corpus: Corpus, out_dir: Path, resume: bool) -> DemoModel:
    """The trained model, its weights not yet rounded."""
    torch.manual_seed(settings.training.seed)
    model = DemoModel(settings.model)
    trainer = Trainer(model, corpus.train, settings.training, out_dir / "checkpoint.pt")
    if resume and trainer.checkpoint.exists():
        trainer.resume()
        say(f"resuming at step {trainer.step}")
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(corpus.train.tokens):,} training tokens")
    trainer.run()
    return model


def train_predictors(settings: Settings, corpus: Corpus, model: DemoModel) -> float:
    """Round the model as the file will, fit its predictors to that, round them too; returns the threshold."""
    gguf_file.store(model)
    generator = torch.Generator().manual_seed(settings.predictor.seed)
    predictor.initialise(model, corpus.train.batch(32, settings.training.length, generator))
    predictor.train(model, corpus.train, settings.predictor)
    gguf_file.store(model, ".fc")
    return predictor.calibrate(model, corpus.calibration, settings.predictor.wanted_recall)


def save_activation_counts(model: DemoModel, windows: torch.Tensor, folder: Path) -> None:
    """Write `activation_N.pt`: how often each neuron of layer N fires over `windows` (n, T + 1), int64 (n_ff,)."""
    folder.mkdir(exist_ok=True)
    counts = torch.zeros(model.config.n_layer, model.config.n_ff, dtype=torch.int64)
    with torch.no_grad():
        for chunk in torch.split(windows, CHUNK):
            for layer, trace in enumerate(model(chunk[:, :-1])[1]):
                counts[layer] += (trace.gate > 0).flatten(0, 1).sum(0)
    for layer, count in enumerate(counts):
        torch.save(count.clone(), folder / f"activation_{layer}.pt")


def measure(path: Path, documents: list[Document]) -> Report:
    """Held-out figures of a written file, from its own tensors and vocabulary."""
    model, vocabulary, threshold = gguf_file.read(path)
    return evaluate(model, load_corpus(documents, vocabulary.encode, model.config.n_ctx).held_out, threshold)


def sample(path: Path, prompt: str, n_tokens: int, temperature: float, seed: int) -> str:
    """Text that continues `prompt`, the model run sparsely; ends early at the end of a document."""
    model, vocabulary, threshold = gguf_file.read(path)
    generator = torch.Generator().manual_seed(seed)
    tokens = [BOS, *vocabulary.encode(prompt)]
    with torch.no_grad():
        for _ in range(n_tokens):
            logits, _ = model(torch.tensor([tokens[-model.config.n_ctx :]]), threshold)
            chances = torch.softmax(logits[0, -1] / temperature, dim=0)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
            if tokens[-1] == EOS:
                break
    return vocabulary.decode(tokens)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out-dir", type=Path, default=Path("demo-model"), help="work directory (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help=f"the file to write (default: OUT_DIR/{FILE_NAME})")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="plain text to train on; blank lines separate documents (default: the King James Bible from Debian's "
        "bible-kjv packages)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the work directory")
    parser.add_argument("--quick", action="store_true", help="a tiny model in under a minute, to see that all works")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {FULL.training.steps})")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--prompt", default="In the beginning", help="start of the samples printed at the end")
    parser.add_argument(
        "--eval-only",
        type=Path,
        metavar="GGUF",
        help="measure a file that this script wrote and train nothing",
    )
    return parser.parse_args(arguments)


def settings_for(options: argparse.Namespace) -> Settings:
    """Settings of the run that the command line asks for."""
    settings = QUICK if options.quick else FULL
    if options.steps is None:
        return settings
    return replace(settings, training=replace(settings.training, steps=options.steps))


def train(options: argparse.Namespace, documents: list[Document]) -> Path:
    """Run every stage; returns the written file."""
    settings, out_dir = settings_for(options), options.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    path: Path = options.output or out_dir / FILE_NAME
    proto = make_vocabulary(documents, settings.model.n_vocab, out_dir / "vocabulary.model", options.resume)
    processor = spm.SentencePieceProcessor(model_proto=proto)
    corpus = load_corpus(documents, processor.encode, settings.training.length)
    model = train_model(settings, corpus, out_dir, options.resume)
    threshold = train_predictors(settings, corpus, model)
    gguf_file.write(path, model, proto, threshold)
    save_activation_counts(model, corpus.calibration, out_dir / "activation")
    expected = evaluate(model, corpus.held_out, threshold)
    written = measure(path, documents)
    if not math.isclose(expected.sparse_perplexity, written.sparse_perplexity, rel_tol=1e-4):
        raise RuntimeError(
            f"{path} does not hold the trained model: perplexity {written.sparse_perplexity:.4f} read back, "
            f"{expected.sparse_perplexity:.4f} in memory"
        )
    return path


def main() -> int:
    """Train (unless --eval-only), then print the held-out figures and two samples on stdout."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    try:
        documents = read_files(options.text) if options.text else read_kjv()
        path = options.eval_only or train(options, documents)
        threshold, report = gguf_file.read(path)[2], measure(path, documents)
    except InputError as error:
        say(f"error: {error}")
        return 1
    print(f"{path}: {path.stat().st_size:,} bytes, threshold {threshold:.2f}")
    print("\n".join(report.lines()))
    for seed in (1, 2):
        print(f"sample {seed}: {sample(path, options.prompt, n_tokens=120, temperature=0.8, seed=seed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
