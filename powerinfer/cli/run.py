"""`powerinfer run`: text that follows a prompt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powerinfer.cli import options as opt
from powerinfer.errors import UsageError

if TYPE_CHECKING:
    from powerinfer.engine import GenerateOptions, Model, Sampler


def run(
    model: opt.ModelPath = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Text to go on from.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="File with the prompt; - is stdin.")
    ] = None,
    n_predict: Annotated[
        int,
        typer.Option(
            "-n",
            "--n-predict",
            "--predict",
            metavar="N",
            help="Tokens to make; -1 no limit, -2 until the context is full.",
        ),
    ] = -1,
    ctx_size: opt.Context = 0,
    batch_size: opt.BatchSize = 512,
    threads: opt.Threads = -1,
    threads_batch: opt.ThreadsBatch = -1,
    seed: Annotated[int, typer.Option("-s", "--seed", metavar="N", help="Seed of the sampling; -1 draws one.")] = -1,
    temp: Annotated[
        float, typer.Option("--temp", "--temperature", metavar="X", help="Temperature; 0 takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", metavar="N", help="Sample among the N likeliest; 0 is all.")] = 40,
    top_p: Annotated[
        float,
        typer.Option("--top-p", metavar="X", help="Sample among the likeliest that hold X of the mass; 1 is all."),
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option("--min-p", metavar="X", help="Leave out tokens below X times the likeliest; 0 is none.")
    ] = 0.05,
    typical: Annotated[
        float, typer.Option("--typical-p", "--typical", metavar="X", help="Locally typical sampling; 1 is off.")
    ] = 1.0,
    repeat_penalty: Annotated[
        float, typer.Option("--repeat-penalty", metavar="X", help="Divides scores of recent tokens; 1 is off.")
    ] = 1.0,
    repeat_last_n: Annotated[
        int, typer.Option("--repeat-last-n", metavar="N", help="How many tokens are recent; -1 is the context, 0 off.")
    ] = 64,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", metavar="X", help="Taken from scores of recent tokens; 0 is off.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", metavar="X", help="The same for each time they came; 0 is off.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("-l", "--logit-bias", metavar="ID±X", help="Adds to a token's score, e.g. 15043+1."),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Never take a token that ends the text.")] = False,
    reverse_prompt: Annotated[
        list[str] | None, typer.Option("-r", "--reverse-prompt", metavar="TEXT", help="Stop where this text appears.")
    ] = None,
    escape: Annotated[
        bool,
        typer.Option(
            "--escape/--no-escape",
            "-e/ ",
            help="Read \\n, \\t, \\x41 and the like in the prompt (on by default).",
            show_default=False,
        ),
    ] = True,
    backend: opt.BackendName = "auto",
    device: opt.Device = "auto",
    vram_budget: opt.VramBudget = None,
    reset_gpu_index: opt.ResetGpuIndex = False,
    disable_gpu_index: opt.DisableGpuIndex = False,
    placement: opt.Placement = "activations",
    cache_type_k: opt.CacheTypeK = "",
    cache_type_v: opt.CacheTypeV = "",
    dense: opt.Dense = False,
    sparse_threshold: opt.SparseThreshold = None,
    activation: opt.ActivationName = None,
    rope_freq_base: opt.RopeFreqBase = None,
    rope_freq_scale: opt.RopeFreqScale = None,
    print_placement: Annotated[
        bool, typer.Option("--print-placement", help="Show what is on the GPU, as `powerinfer plan` does.")
    ] = False,
    special: Annotated[bool, typer.Option("--special", help="Show control tokens in the output.")] = False,
    verbose_prompt: Annotated[bool, typer.Option("--verbose-prompt", help="List the prompt's tokens first.")] = False,
    no_display_prompt: Annotated[bool, typer.Option("--no-display-prompt", help="Do not echo the prompt.")] = False,
    log_disable: Annotated[bool, typer.Option("--log-disable", help="Print nothing but the text.")] = False,
) -> None:
    """Generate text that follows a prompt. Text goes to stdout, all else to stderr."""
    from powerinfer.cli.console import say
    from powerinfer.engine import GenerateOptions, Sampler, SamplingParams

    text = read_prompt(prompt, file, escape)
    params = SamplingParams(
        seed=seed,
        temp=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=parse_logit_bias(logit_bias or []),
    )
    generation = GenerateOptions(n_predict, batch_size, ignore_eos, tuple(reverse_prompt or ()), special)
    loaded = opt.load_model(
        model,
        log_disable,
        backend=backend,
        device=device,
        vram_budget=vram_budget,
        reset_gpu_index=reset_gpu_index,
        disable_gpu_index=disable_gpu_index,
        placement=placement,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_threads=opt.all_cores(threads),
        n_threads_batch=opt.all_cores(threads_batch),
        dense=dense,
        sparse_threshold=sparse_threshold,
        activation=activation,
        rope_freq_base=rope_freq_base,
        rope_freq_scale=rope_freq_scale,
    )
    if print_placement:
        show_placement(loaded)
    sampler = Sampler(params)
    if not log_disable:
        say(f"seed: {sampler.seed}")
    if verbose_prompt:
        show_tokens(loaded, text)
    status = stream_text(loaded, text, sampler, generation, echo=not no_display_prompt, timings=not log_disable)
    raise typer.Exit(status)


def stream_text(
    model: Model, prompt: str, sampler: Sampler, options: GenerateOptions, *, echo: bool, timings: bool
) -> int:
    """Prints the text as it is made, then the timings, also after Ctrl-C; the exit status."""
    from powerinfer.cli.console import ignore_interrupts, say, second_interrupt_exits, write
    from powerinfer.cli.group import INTERRUPTED

    chunks = model.stream(prompt, sampler, options)
    status = 0
    with second_interrupt_exits():
        try:
            if echo:
                write(prompt)
            for chunk in chunks:
                write(chunk.text)
            write("\n")
        except KeyboardInterrupt:
            write("\n")
            status = INTERRUPTED
        if timings:
            say("\n" + model.timings.report())
        if status == INTERRUPTED:
            ignore_interrupts()
    return status


def read_prompt(prompt: str | None, file: Path | None, escape: bool) -> str:
    """The prompt from -p or -f. Raises UsageError where both are given or the file cannot be read."""
    from powerinfer.cli.console import read_text

    if prompt is not None and file is not None:
        raise UsageError("both -p and -f give a prompt: leave one out")
    text = prompt or ""
    if file is not None:
        text = read_text(file).removesuffix("\n")
    return unescape(text) if escape else text


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescape(text: str) -> str:
    """Reads \\n, \\r, \\t, \\', \\", \\\\ and \\xHH (a byte of UTF-8); any other backslash stays as it is."""
    out = bytearray()
    i = 0
    while i < len(text):
        following = text[i + 1 : i + 2]
        digits = text[i + 2 : i + 4]
        if text[i] == "\\" and following in _ESCAPES:
            out += _ESCAPES[following].encode()
            i += 2
        elif (
            text[i] == "\\"
            and following == "x"
            and len(digits) == 2
            and all(c in "0123456789abcdefABCDEF" for c in digits)
        ):
            out.append(int(digits, 16))
            i += 4
        else:
            out += text[i].encode("utf-8", "surrogateescape")
            i += 1
    return out.decode("utf-8", "replace")


def parse_logit_bias(values: list[str]) -> dict[int, float]:
    """`15043+1` or `15043-inf`: token id and what is added to its score."""
    biases = {}
    for value in values:
        at = max(value.find("+"), value.find("-", 1))
        try:
            biases[int(value[:at])] = float(value[at:])
        except ValueError:
            raise UsageError(
                f"--logit-bias is {value!r}: expected a token id, a sign and a number, as 15043-1"
            ) from None
        if at < 1 or math.isnan(biases[int(value[:at])]):
            raise UsageError(f"--logit-bias is {value!r}: expected a token id, a sign and a number, as 15043-1")
    return biases


def show_placement(model: Model) -> None:
    """On stderr, as `powerinfer plan` has it on stdout."""
    from powerinfer.cli.console import say
    from powerinfer.cli.plan import describe_plan

    plan = model.plan
    if plan is None:
        say("placement: all of the model is on one side, no GPU and CPU share it")
    else:
        say(describe_plan(model.spec, plan, plan.speeds, "as the plan was made"))


def show_tokens(model: Model, prompt: str) -> None:
    from powerinfer.cli.console import say

    tokens = model.encode_prompt(prompt)
    say(f"prompt: {prompt!r}\nnumber of tokens in prompt = {len(tokens)}")
    for token in tokens:
        say(f"{token:6d} -> {model.tokenizer.piece(token).decode('utf-8', 'replace')!r}")
