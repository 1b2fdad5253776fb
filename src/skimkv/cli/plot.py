"""`skimkv plot`: draw the figures of a results file, or of what two of the benches printed with --json."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..records import parse_object
from . import options, output

# The fields of a benchmark's rows that each figure shows.
SHAPE = ("batch", "heads", "kv_heads", "head_dim", "dtype")
BENCH_FIELDS = {
    "sweep": ("method", "length", "batch", "speedup_best", "speedup_theory"),
    "attention": ("method", "length", "speedup_dense", "speedup_theory", *SHAPE),
    "token": ("method", "length", "ms", "ms_attention", "floor_ms", "speedup_dense", "shape", "layers", "weights"),
}
BENCH_TEXTS = {"method", "dtype", "shape", "weights"}
GREATEST = 1e15  # no length, time or ratio is near it


def plot(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="The file that skimkv eval or tune wrote, or that holds what skimkv bench attention or bench token "
            "printed with --json.",
        ),
    ],
    out: Annotated[
        Path,
        options.path_option("--out", options.check_figure, "Save the first figure to this file (.png, .pdf or .svg)."),
    ] = Path("skimkv-results.png"),
    as_json: options.Json = False,
) -> None:
    """Draw what an evaluation or a benchmark found.

    An evaluation gives the score of each method against its bytes. Where the file holds them, there are more figures
    beside it: needles found (NAME-needle-MODE), score against length (NAME-length), and the variants of SparQ
    (NAME-ablation). A benchmark gives the speed-up against length.

    Example:

        skimkv plot skimkv-results.jsonl --out results.png
    """
    options.check_readable("RESULTS", results)
    rows = _bench_rows(results)
    paths = _draw_evaluation(results, out) if rows is None else _draw_bench(rows, results, out)
    if as_json:
        output.print_json({"figures": [str(path) for path in paths]})
    else:
        print("\n".join(f"Figure: {path}" for path in paths))


def _bench_rows(path: Path) -> list[dict[str, Any]] | None:
    """The rows of the JSON object in a benchmark's last line; None if the file is something else."""
    last = parse_object(path.read_bytes().strip().split(b"\n")[-1])
    rows = last.get("rows") if last is not None and "machine" in last else None
    return rows if isinstance(rows, list) else None


def _draw_bench(rows: list[dict[str, Any]], path: Path, out: Path) -> list[Path]:
    """Draw the figure of `bench attention` or `bench token`, whichever has rows like these."""
    from ..bench import figures

    kinds = [kind for kind, fields in BENCH_FIELDS.items() if rows and all(_has(row, fields) for row in rows)]
    if not kinds:
        raise ValueError(f"{path}: only what bench attention and bench token print can be drawn")
    for number, row in enumerate(rows, 1):
        for name in (field for kind in kinds for field in BENCH_FIELDS[kind]):
            if not _can_be_drawn(name, row[name]):
                raise ValueError(f"{path}: {name} of row {number} is damaged: {reprlib.repr(row[name])}")
    if "sweep" in kinds and len({row["batch"] for row in rows}) > 1:
        figures.sweep(rows, out)
    elif "attention" in kinds:
        figures.attention(rows, out)
    elif "token" in kinds:
        if not any(row["method"] == "Dense()" for row in rows):
            raise ValueError(f"{path}: Dense() is not among its methods, there is nothing to compare with")
        figures.token(rows, out)
    else:
        raise ValueError(f"{path}: only what bench attention and bench token print can be drawn")
    return [out]


def _has(row: Any, fields: Sequence[str]) -> bool:
    return isinstance(row, dict) and set(fields) <= set(row)


def _can_be_drawn(name: str, value: Any) -> bool:
    """Whether this can be the value of a benchmark's field of that name."""
    if name in BENCH_TEXTS:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < GREATEST if name == "ms_attention" else 0 < value < GREATEST


def _draw_evaluation(path: Path, out: Path) -> list[Path]:
    from ..eval.results import load

    records = load(path)
    if not records:
        raise ValueError(f"{path}: it holds no records")
    if len({(record["model"], record["dtype"]) for record in records}) > 1:
        raise ValueError(f"{path}: it holds several models; one figure is of one")
    from ..eval.panels import draw_results  # after what is wrong with the file is known: it imports PyTorch

    return draw_results(records, out)
