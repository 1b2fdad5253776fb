"""`skimkv plot`: draw the figures of a results file, or of what `skimkv bench --json` printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import output
from .options import Json, check_readable, output_figure


def plot(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS", help="The file that skimkv eval wrote, or that holds what skimkv bench --json printed."
        ),
    ],
    out: Annotated[Path, output_figure("Save the first figure to this file (.png, .pdf or .svg).", "--out")] = Path(
        "skimkv-results.png"
    ),
    as_json: Json = False,
) -> None:
    """Draw what an evaluation or a benchmark found.

    An evaluation gives the score of each method against its bytes. Where the file holds them, there are more figures
    beside it: needles found (NAME-needle-MODE), score against length (NAME-length), and the variants of SparQ
    (NAME-ablation). A benchmark gives the speed-up against length.

    Example:

        skimkv plot skimkv-results.jsonl --out results.png
    """
    check_readable("RESULTS", results)
    rows = _bench_rows(results)
    paths = _draw_evaluation(results, out) if rows is None else _draw_bench(rows, results, out)
    if as_json:
        output.print_json({"figures": [str(path) for path in paths]})
    else:
        print("\n".join(f"Figure: {path}" for path in paths))


def _bench_rows(path: Path) -> list[dict[str, Any]] | None:
    """The rows of the JSON object in a benchmark's last line; None if the file is something else."""
    lines = path.read_bytes().strip().split(b"\n")
    try:
        last = json.loads(lines[-1])
    except ValueError:
        return None
    rows = last.get("rows") if isinstance(last, dict) and "machine" in last else None
    return rows if isinstance(rows, list) else None


def _draw_bench(rows: list[dict[str, Any]], path: Path, out: Path) -> list[Path]:
    """Draw the figure of `bench attention` or `bench token`, whichever has rows like these."""
    from ..bench import figures

    if len({row.get("batch") for row in rows if "speedup_best" in row}) > 1:
        figures.sweep(rows, out)
    elif rows and all({"speedup_dense", "speedup_theory", "length"} <= set(row) for row in rows):
        figures.attention(rows, out)
    elif rows and all({"ms", "ms_attention", "floor_ms", "length"} <= set(row) for row in rows):
        if not any(row["method"] == "Dense()" for row in rows):
            raise ValueError(f"{path}: Dense() is not among its methods, there is nothing to compare with")
        figures.token(rows, out)
    else:
        raise ValueError(f"{path}: only what bench attention and bench token print can be drawn")
    return [out]


def _draw_evaluation(path: Path, out: Path) -> list[Path]:
    from ..eval.panels import draw_results
    from ..eval.results import load

    records = load(path)
    if not records:
        raise ValueError(f"{path}: it holds no records")
    if len({(record["model"], record["dtype"]) for record in records}) > 1:
        raise ValueError(f"{path}: it holds several models; one figure is of one")
    return draw_results(records, out)
