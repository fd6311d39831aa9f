"""`powerinfer tokenize`: the tokens of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from powerinfer.cli.options import ModelPath
from powerinfer.errors import UsageError


def tokenize(
    model: ModelPath = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The text.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="File with the text.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read the text from standard input.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, as [1, 2, 3].")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Leave out the token that starts a text.")] = False,
    no_parse_special: Annotated[
        bool, typer.Option("--no-parse-special", help="Take special tokens in the text as ordinary characters.")
    ] = False,
    show_count: Annotated[bool, typer.Option("--show-count", help="Also print how many there are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Ids and pieces as JSON.")] = False,
) -> None:
    """Show the tokens of a text. The text is -p, -f or standard input."""
    from powerinfer.cli.console import read_text, write
    from powerinfer.engine import default_model_path
    from powerinfer.formats import open_gguf
    from powerinfer.tokenizers import load_tokenizer

    if sum([prompt is not None, file is not None, stdin]) > 1:
        raise UsageError("the text is given more than once: use one of -p, -f and --stdin")
    text = prompt if prompt is not None else read_text(file or Path("-"))
    with open_gguf(model or default_model_path()) as opened:
        tokenizer = load_tokenizer(opened)
    tokens = tokenizer.encode(text, parse_special=not no_parse_special)
    if no_bos and tokenizer.add_bos and tokens[:1] == [tokenizer.bos_id]:
        tokens = tokens[1:]
    pieces = [tokenizer.piece(token).decode("utf-8", "replace") for token in tokens]
    if as_json:
        write(json.dumps({"tokens": tokens, "pieces": pieces, "count": len(tokens)}, ensure_ascii=False) + "\n")
    elif ids:
        write(f"{tokens}\n")
    else:
        write("".join(f"{token:6d} -> '{_on_one_line(piece)}'\n" for token, piece in zip(tokens, pieces, strict=True)))
    if show_count and not as_json:
        write(f"Total number of tokens: {len(tokens)}\n")


def _on_one_line(piece: str) -> str:
    """A piece with escapes for what a terminal would not show, or act upon."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in piece)
