"""`skimkv plot`: the figures of a results file, or of what `skimkv bench --json` printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..eval.results import Row

SWEPT = {"r", "k", "recent", "delta", "t", "s", "oracle"}  # what sets a budget; anything else names another method
MATCH = 1.3  # a share counts as 1/4 if it is within this factor of it
PARTS = ((2, "1/2"), (4, "1/4"), (8, "1/8"))


def plot(
    results: Annotated[Path, typer.Argument(help="What skimkv eval wrote, or skimkv bench --json printed.")],
    out: Annotated[Path, typer.Option(help="The figure; others of the file are NAME-needle, -length, -ablation.")] = (
        Path("skimkv-results.png")
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Draw score against bytes, needles found, score against length, ablations; or speed-up against length."""
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    bench = _bench(results)
    figures = _speed(bench, results, out) if bench is not None else _quality(results, out)
    print(json.dumps({"figures": [str(f) for f in figures]}) if as_json else "\n".join(f"Figure: {f}" for f in figures))


def _bench(path: Path) -> list[dict[str, Any]] | None:
    """The rows of a benchmark's last line; None if the file is something else."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    lines = path.read_bytes().strip().split(b"\n")
    try:
        last = json.loads(lines[-1])
    except ValueError:
        return None
    rows = last.get("rows") if isinstance(last, dict) and "machine" in last else None
    return rows if isinstance(rows, list) else None


def _speed(rows: list[dict[str, Any]], path: Path, out: Path) -> list[Path]:
    from ..bench import figures_gpu as plots_gpu
    from ..bench import figures_sweeps as plots_sweeps

    if len({row.get("batch") for row in rows if "speedup_best" in row}) > 1:
        plots_gpu.sweep(rows, out)
    elif rows and all({"speedup_dense", "speedup_theory", "length"} <= set(row) for row in rows):
        plots_sweeps.speedup(rows, out)
    elif rows and all({"ms", "ms_attention", "floor_ms", "length"} <= set(row) for row in rows):
        if not any(row["method"] == "Dense()" for row in rows):
            raise ValueError(f"{path}: Dense() is not among its methods, there is nothing to compare with")
        plots_sweeps.token(rows, out)
    else:
        raise ValueError(f"{path}: only what bench attention and bench token print can be drawn")
    return [out]


def label(spec: str) -> str:
    """The method and what it was given besides its budget: SparQ, channels='int8'."""
    from ..methods import parse

    method = parse(spec)
    changed = [
        f"{field.name}={getattr(method, field.name)!r}"
        for field in dataclasses.fields(method)
        if field.name not in SWEPT and getattr(method, field.name) != field.default
    ]
    name = "oracle top-k" if getattr(method, "oracle", False) else type(method).__name__
    return ", ".join([name, *changed])


def _quality(path: Path, out: Path) -> list[Path]:
    from ..bench import figures_sweeps as plots_sweeps
    from ..eval import figures as plots
    from ..eval.results import load, summary
    from ..eval.tasks import parse

    records = load(path)
    if not records:
        raise ValueError(f"{path}: it holds no records")
    if len({(record["model"], record["dtype"]) for record in records}) > 1:
        raise ValueError(f"{path}: it holds several models; one figure is of one")
    rows = summary(records)
    tasks = {row.task: parse(row.task) for row in rows}
    names = _names(rows)
    ablations = [part for key in dict.fromkeys((row.task, row.mode) for row in rows)
                 if (part := _ablation(key, rows, names)) is not None]  # fmt: skip
    panels: dict[str, list[tuple[str, float, float, float | None]]] = {}
    points = [row for row in rows if not ablations or ", " not in label(row.method)]
    for row in points:
        point = names[row.method], row.share or 1.0, row.mean, row.stderr
        better = ", lower is better" if tasks[row.task].lower else ""
        panels.setdefault(f"{row.task}, {row.mode}\n{tasks[row.task].unit}{better}", []).append(point)
    plots.curves(list(panels.items()), out)
    figures = [out, *_needles(records, out)]
    if scaling := _scaling(records):
        figures.append(out.with_name(f"{out.stem}-length{out.suffix}"))
        plots_sweeps.scaling(scaling, figures[-1])
    if ablations:
        figures.append(out.with_name(f"{out.stem}-ablation{out.suffix}"))
        plots_sweeps.ablation(ablations, figures[-1])
    return figures


def _names(rows: Sequence[Row]) -> dict[str, str]:
    """A line's name for each method: its k is part of it where both r and k were swept."""
    from ..methods import parse

    swept: dict[str, set[tuple[Any, Any]]] = {}
    for row in rows:
        method: Any = parse(row.method)
        swept.setdefault(label(row.method), set()).add((getattr(method, "r", None), getattr(method, "k", None)))
    names = {}
    for row in rows:
        name, own = label(row.method), parse(row.method)
        both = all(len({pair[i] for pair in swept[name]}) > 1 for i in (0, 1))
        names[row.method] = f"{name}, k={getattr(own, 'k', None)}" if both else name
    return names


def _needles(records: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    from ..eval import figures as plots

    figures = []
    for mode in dict.fromkeys(r["mode"] for r in records if r["task"].startswith("needle")):
        found: dict[str, dict[tuple[float, float], list[float]]] = {}
        mine = [r for r in records if r["task"].startswith("needle") and r["mode"] == mode]
        tokens = {n: fmean(r["prompt_tokens"] for r in mine if r["at"][0] == n) for n in {r["at"][0] for r in mine}}
        for r in mine:
            cell = round(tokens[r["at"][0]]), r["at"][1]
            found.setdefault(r["method"], {}).setdefault(cell, []).append(r["score"])
        path = out.with_name(f"{out.stem}-needle-{mode}{out.suffix}")
        plots.heat([(m, {at: fmean(x) for at, x in cells.items()}) for m, cells in found.items()], path)
        figures.append(path)
    return figures


MOST = 12  # lines of a panel; a grid of settings is compared at one share of the bytes instead


def _scaling(records: Sequence[dict[str, Any]]) -> list[tuple[str, str, dict[str, list[tuple[float, float, Any]]]]]:
    """A panel for each task that was run at several sizes: methods at one share of dense's bytes, or one setting."""
    from ..eval.results import summary
    from ..eval.tasks import parse

    groups: dict[tuple[str, str], dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for r in records:
        sizes = groups.setdefault((r["task"].split("(")[0], r["mode"]), {})
        sizes.setdefault((r["task"], *r.get("at", [])[:1]), []).append(r)
    panels = []
    for (task, mode), sizes in groups.items():
        if len(sizes) < 2:
            continue
        shares: dict[str, dict[str, list[tuple[float, float, Any]]]] = {}
        dense: list[tuple[float, float, Any]] = []
        score = "score (lower is better)" if parse(next(iter(sizes))[0]).lower else "score"
        for mine in sizes.values():
            tokens = fmean({(r["id"], r["prompt_tokens"]): r["prompt_tokens"] for r in mine}.values())
            rows = summary(mine)
            dense += [(tokens, row.mean, row.stderr) for row in rows if row.method == "Dense()"]
            for row in (row for row in rows if row.method != "Dense()"):
                point = tokens, row.mean, row.stderr
                shares.setdefault("settings kept", {}).setdefault(row.method, []).append(point)
            for part, name in PARTS:
                near = [row for row in rows if row.share and 1 / MATCH <= row.share * part <= MATCH]
                for at in dict.fromkeys(label(row.method) for row in near):
                    row = min((r for r in near if label(r.method) == at), key=lambda r: abs((r.share or 1) * part - 1))
                    line = shares.setdefault(f"{name} of the bytes", {}).setdefault(at, [])
                    line.append((tokens, row.mean, row.stderr))
        for how, lines in shares.items():
            long = {name: line for name, line in lines.items() if len(line) > 1}
            if 0 < len(long) <= MOST:
                panels.append((f"{task}, {mode}, {how}", score, {**({"Dense": dense} if dense else {}), **long}))
    return panels


def _ablation(key: tuple[str, str], rows: Sequence[Row], names: dict[str, str]) -> Any:
    """One row of SparQ fig. 7 for that task and mode; None unless SparQ was changed at one r and k."""
    from ..methods import SparQ, parse

    mine = [row for row in rows if (row.task, row.mode) == key]
    changed: dict[tuple[int, int], list[Row]] = {}
    for row in mine:
        if isinstance(method := parse(row.method), SparQ):
            changed.setdefault((method.r, method.k), []).append(row)
    changes = []
    for (r, k), same in changed.items():
        for row in same if len(same) > 1 else ():
            change = label(row.method).removeprefix("SparQ").lstrip(", ").replace(", ", "\n")
            changes.append((f"r = {r}, k = {k}", change or "as published", row.mean, row.stderr))
    if not changes:
        return None
    finding, counts = [], []
    for row in mine:
        name, point = label(row.method), (row.share or 1.0, row.mean, row.stderr)
        published = getattr(parse(row.method), "k", None) == 128
        if name in ("Dense", "oracle top-k") or (name in ("SparQ", "LowRank") and published):
            finding.append((name, *point))
        if name in ("Dense", "SparQ"):
            counts.append((names[row.method], *point))
    return f"{key[0]}, {key[1]}", finding, changes, counts
