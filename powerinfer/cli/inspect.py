"""`powerinfer inspect`: what a GGUF file holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerinfer.errors import UsageError

if TYPE_CHECKING:
    from powerinfer.formats import GGUFFile

SHOWN = 60  # characters of a value in the table


def inspect(
    path: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="GGUF file.", show_default=False)] = None,
    model: Annotated[Path | None, typer.Option("-m", "--model", metavar="FILE", help="The same.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List the tensors.")] = True,
) -> None:
    """Show a GGUF file's metadata, tensors and sizes, and what of it is sparse. Without FILE, the embedded model's."""
    from powerinfer.cli.console import write
    from powerinfer.engine import default_model_path
    from powerinfer.formats import open_gguf

    if path is not None and model is not None:
        raise UsageError("the file is named twice: leave out -m")
    with open_gguf(path or model or default_model_path()) as file:
        contents = describe(file)
        write(json.dumps(contents, ensure_ascii=False, indent=1) + "\n" if as_json else as_text(contents, tensors))


def describe(file: GGUFFile) -> dict[str, Any]:
    """Everything about a file, in plain types."""
    infos = list(file.tensors.values())
    types: dict[str, dict[str, int]] = {}
    for info in infos:
        entry = types.setdefault(info.type_name, {"tensors": 0, "elements": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["elements"] += info.n_elements
        entry["bytes"] += info.nbytes
    elements = sum(info.n_elements for info in infos)
    nbytes = sum(info.nbytes for info in infos)
    return {
        "path": str(file.path),
        "files": [str(path) for path in file.paths],
        "magic": "PWRI" if file.is_powerinfer else "GGUF",
        "version": file.version,
        "alignment": file.alignment,
        "architecture": _plain(file.get("general.architecture")),
        "parameters": elements,
        "tensor_bytes": nbytes,
        "bits_per_weight": round(8 * nbytes / elements, 3) if elements else 0.0,
        "types": types,
        "sparse": describe_sparsity(file),
        "metadata": {key: _plain(value) for key, value in file.metadata.items()},
        "tensors": [
            {"name": i.name, "type": i.type_name, "shape": list(i.shape), "bytes": i.nbytes, "offset": i.offset}
            for i in infos
        ],
    }


def describe_sparsity(file: GGUFFile) -> dict[str, Any] | None:
    """Predictors of a model that is to run sparsely: their sizes, and the threshold."""
    ranks: list[int] = []
    n_ff: list[int] = []
    while (info := file.tensors.get(f"blk.{len(ranks)}.fc1.weight")) is not None:
        fc2 = file.tensors.get(f"blk.{len(ranks)}.fc2.weight")
        ranks.append(info.shape[0])
        n_ff.append(fc2.shape[0] if fc2 else 0)
    if not ranks:
        return None
    predictors = [i for i in file.tensors.values() if i.name.endswith((".fc1.weight", ".fc2.weight"))]
    return {
        "runs_sparsely": file.is_powerinfer,
        "threshold": _plain(file.get("powerinfer.sparse_threshold", 0.0)),
        "activation": _plain(file.get("powerinfer.activation", "relu")),
        "predictor_ranks": ranks,
        "neurons": n_ff,
        "predictor_parameters": sum(i.n_elements for i in predictors),
        "predictor_bytes": sum(i.nbytes for i in predictors),
    }


def _plain(value: Any) -> Any:
    """JSON's own types; NaN and infinities, which it lacks, as text."""
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if hasattr(value, "to_list"):
        return value.to_list()
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(item) for item in value]


def as_text(contents: dict[str, Any], tensors: bool) -> str:
    """The same for people."""
    lines = [f"{contents['path']}: {contents['magic']} version {contents['version']}, {contents['architecture']}"]
    if len(contents["files"]) > 1:
        lines.append(f"split into {len(contents['files'])} files")
    lines += ["", f"metadata ({len(contents['metadata'])} keys)"]
    width = max((len(key) for key in contents["metadata"]), default=0)
    lines += [f"  {key:{width}}  {_short(value)}" for key, value in contents["metadata"].items()]
    if tensors:
        lines += ["", f"tensors ({len(contents['tensors'])}), rows x columns"]
        rows = [
            (t["name"], t["type"], " x ".join(map(str, t["shape"])), f"{t['bytes']:,}") for t in contents["tensors"]
        ]
        lines += _table(rows)
    lines += ["", "sizes"]
    rows = [
        (name, f"{t['tensors']} tensors", f"{t['elements']:,} parameters", f"{t['bytes']:,} bytes")
        for name, t in contents["types"].items()
    ]
    parameters, nbytes = contents["parameters"], contents["tensor_bytes"]
    rows.append(("all", f"{len(contents['tensors'])} tensors", f"{parameters:,} parameters", f"{nbytes:,} bytes"))
    lines += [*_table(rows), f"  {contents['bits_per_weight']:.2f} bits a weight", "", *_sparsity(contents["sparse"])]
    return "\n".join(lines) + "\n"


def _sparsity(sparse: dict[str, Any] | None) -> list[str]:
    if sparse is None:
        return ["dense: no predictors"]
    ranks = Counter(sparse["predictor_ranks"])
    described = ", ".join(f"{rank} ({n} layers)" for rank, n in sorted(ranks.items()))
    how = "runs sparsely" if sparse["runs_sparsely"] else "has predictors, but its magic says to run densely"
    return [
        f"{how}: a layer has {max(sparse['neurons'])} neurons, predictors of rank {described}",
        f"  threshold {_short(sparse['threshold'])}, activation {sparse['activation']}",
        f"  predictors: {sparse['predictor_parameters']:,} parameters, {sparse['predictor_bytes']:,} bytes",
    ]


def _short(value: Any) -> str:
    if isinstance(value, list):
        head = ", ".join(_short(item) for item in value[:4])
        return f"[{head}{', ...' if len(value) > 4 else ''}] ({len(value)})"
    text = f"{value:.7g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other, the last one to the right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            f"{c:>{w}}" if i == len(row) - 1 else f"{c:{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
