"""Which figures a results file gives, and what stands in their panels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..methods import SparQ, parse
from ..plotting import ScorePoint
from . import figures
from .figures import Ablation, Cells, LengthPoint
from .results import Row, count_once, summary
from .tasks import Task
from .tasks import parse as parse_task

# Another field makes another method.
BUDGET_FIELDS = {"r", "k", "recent", "page", "top", "p", "epsilon", "delta", "t", "s", "oracle"}
NEAR = 1.3  # a share counts as 1/4 if it is within this factor of it
SHARE_NAMES = ((2, "1/2"), (4, "1/4"), (8, "1/8"))
PUBLISHED = "as published"
MATCHED_CHANGE = "mean_value=True"  # what the sweep "matched" runs beside it, which is no ablation
MOST_LINES = 12  # of a panel; more settings than that are compared at one share of the bytes instead

Records = Sequence[Mapping[str, Any]]
# (title, points, greatest possible score, whether scores are divergences from dense attention)
ScorePanel = tuple[str, list[ScorePoint], float, bool]
# (title, name of the score, lines, greatest possible score, whether scores are divergences from dense attention)
LengthPanel = tuple[str, str, dict[str, list[LengthPoint]], float, bool]


def draw_results(records: Records, out: Path) -> list[Path]:
    """Draw every figure that the records give, and return their files.

    The first, at `out`, shows scores by bytes. Beside it stand NAME-needle-MODE, NAME-length and NAME-ablation where
    the records have needles, several sizes of a task, or changes of SparQ. All records are of one model.
    """
    records = count_once(records)
    rows = summary(records)
    paths = [out]
    ablations = ablation_rows(rows)
    figures.scores(score_panels(rows), out)
    for mode, panels in needle_panels(records).items():
        paths.append(out.with_name(f"{out.stem}-needle-{mode}{out.suffix}"))
        figures.needles(panels, paths[-1])
    if panels_by_length := length_panels(records):
        paths.append(out.with_name(f"{out.stem}-length{out.suffix}"))
        figures.lengths(panels_by_length, paths[-1])
    if ablations:
        paths.append(out.with_name(f"{out.stem}-ablation{out.suffix}"))
        figures.ablation(ablations, paths[-1])
    return paths


def label(spec: str) -> str:
    """The name of a line: the method, and what it was given besides its budget, as in "SparQ, channels='int8'"."""
    method = parse(spec)
    changed = [
        f"{field.name}={getattr(method, field.name)!r}"
        for field in dataclasses.fields(method)
        if field.name not in BUDGET_FIELDS and getattr(method, field.name) != field.default
    ]
    name = "oracle top-k" if getattr(method, "oracle", False) else type(method).__name__
    return ", ".join([name, *changed])


def line_names(rows: Sequence[Row]) -> dict[str, str]:
    """The name of the line on which each method stands: with its k, where one r was swept over several k in a task."""
    swept: dict[tuple[str, str, str, Any], set[Any]] = {}
    for row in rows:
        method = parse(row.method)
        same_r = label(row.method), row.task, row.mode, getattr(method, "r", None)
        swept.setdefault(same_r, set()).add(getattr(method, "k", None))
    grids = {name for (name, _, _, r), ks in swept.items() if r is not None and len(ks) > 1}
    names = {}
    for row in rows:
        name, k = label(row.method), getattr(parse(row.method), "k", None)
        names[row.method] = f"{name}, k={k}" if name in grids else name
    return names


def score_panels(rows: Sequence[Row]) -> list[ScorePanel]:
    """Scores by the share of dense's bytes: a panel for each task and mode.

    A task of divergences has a second panel, for their 99th percentile. Changes of SparQ that an ablation shows
    (`ablation_rows`) are left out.
    """
    names = line_names(rows)
    panels: dict[str, ScorePanel] = {}
    for task_rows in _by_task(rows):
        changed = {row.method for row in _ablated(task_rows) if label(row.method) != "SparQ"}
        others = [row for row in task_rows if row.method not in changed]
        for row in others or task_rows:
            task = parse_task(row.task)
            means = row.mean, row.low, row.high
            what = {score_name(task): means}
            if row.tail is not None:
                tail = row.tail.kl_p99, row.tail.kl_p99_low, row.tail.kl_p99_high
                what = {"mean KL in nats, lower is better": means, "99th percentile of KL, lower is better": tail}
            for name, values in what.items():
                title = f"{row.task}, {row.mode}\n{name}"
                panel = panels.setdefault(title, (title, [], task.greatest, task.is_of_documents))
                panel[1].append((names[row.method], row.share or 1.0, *values))
    return list(panels.values())


def _by_task(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each task and mode."""
    tasks: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        tasks.setdefault((row.task, row.mode), []).append(row)
    return list(tasks.values())


def score_name(task: Task) -> str:
    """What the axis of a task's scores is called, and what a reader must know of it."""
    better = ", lower is better" if task.lower else ""
    if task.is_of_documents:
        return f"KL, {task.unit}{better}"
    return f"{task.unit}{better}{'' if math.isfinite(task.greatest) else '; not from 0'}"


def needle_panels(records: Records) -> dict[str, list[tuple[str, Cells]]]:
    """Give, for each mode, the share of needles that each method found, by length of the prompt and depth."""
    panels = {}
    needles = [record for record in records if record["task"].startswith("needle")]
    for mode in dict.fromkeys(record["mode"] for record in needles):
        own = [record for record in needles if record["mode"] == mode]
        sizes = {record["at"][0] for record in own}
        tokens = {size: fmean(r["prompt_tokens"] for r in own if r["at"][0] == size) for size in sizes}
        scores: dict[str, dict[tuple[float, float], list[float]]] = {}
        for record in own:
            size, depth = record["at"][:2]
            cell = round(tokens[size]), depth
            scores.setdefault(record["method"], {}).setdefault(cell, []).append(record["score"])
        panels[mode] = [(method, {at: fmean(x) for at, x in cells.items()}) for method, cells in scores.items()]
    return panels


def length_panels(records: Records) -> list[LengthPanel]:
    """Scores by the prompt's length, for every task that was run at several sizes.

    Its panels show the methods at 1/2, 1/4 and 1/8 of dense's bytes, and the settings that stay the same.
    """
    tasks: dict[tuple[str, str], dict[tuple[Any, ...], list[Mapping[str, Any]]]] = {}
    for record in records:
        sizes = tasks.setdefault((record["task"].split("(")[0], record["mode"]), {})
        sizes.setdefault((record["task"], *record.get("at", [])[:1]), []).append(record)
    panels = []
    for (task, mode), sizes in tasks.items():
        if len(sizes) < 2:
            continue
        dense: list[LengthPoint] = []
        kinds: dict[str, dict[str, list[LengthPoint]]] = {}  # of panels; each with its lines
        for own in sizes.values():
            tokens = fmean({(r["id"], r["prompt_tokens"]): r["prompt_tokens"] for r in own}.values())
            for kind, name, row in _compared(summary(own)):
                point = tokens, row.mean, row.low, row.high
                if kind == "dense":
                    dense.append(point)
                else:
                    kinds.setdefault(kind, {}).setdefault(name, []).append(point)
        parsed_tasks = [parse_task(spec) for spec, *_ in sizes]
        for kind, lines in kinds.items():
            long = {name: line for name, line in lines.items() if len(line) > 1}
            if 0 < len(long) <= MOST_LINES:
                lines = {**({"Dense": dense} if dense else {}), **long}
                name, greatest = score_name(parsed_tasks[0]), max(parsed.greatest for parsed in parsed_tasks)
                title = f"{task}, {mode}, {kind}"
                panels.append((title, name, lines, greatest, parsed_tasks[0].is_of_documents))
    return panels


def _compared(rows: Sequence[Row]) -> list[tuple[str, str, Row]]:
    """Which rows of one size are compared with those of other sizes: (kind of panel, line, row)."""
    compared = [("dense", "Dense", row) for row in rows if row.method == "Dense()"]
    compared += [("settings kept", row.method, row) for row in rows if row.method != "Dense()"]
    for part, name in SHARE_NAMES:
        near = [row for row in rows if row.share and 1 / NEAR <= row.share * part <= NEAR]
        for line in dict.fromkeys(label(row.method) for row in near):
            nearest = min((r for r in near if label(r.method) == line), key=lambda r: abs((r.share or 1) * part - 1))
            compared.append((f"{name} of the bytes", line, nearest))
    return compared


def ablation_rows(rows: Sequence[Row]) -> list[Ablation]:
    """A row of SparQ fig. 7 for each task and mode in which SparQ was changed at one r and k.

    Divergences have none: all their methods are lines by the bytes that they read (`score_panels`).
    """
    names = line_names(rows)
    ablations = []
    for own in _by_task(rows):
        ablated = _ablated(own)
        if not ablated:
            continue
        finding, counts = [], []
        for row in own:
            name, point = label(row.method), (row.share or 1.0, row.mean, row.low, row.high)
            published = getattr(parse(row.method), "k", None) == 128
            if name in ("Dense", "oracle top-k") or (name in ("SparQ", "LowRank") and published):
                finding.append((name, *point))
            if name in ("Dense", "SparQ"):
                counts.append((names[row.method], *point))
        task, mode = own[0].task, own[0].mode
        changes = [_change(row) for row in ablated]
        ablations.append(Ablation(f"{task}, {mode}", finding, changes, counts, parse_task(task).greatest))
    return ablations


def _ablated(rows: Sequence[Row]) -> list[Row]:
    """Of one task and mode, SparQ's rows at every r and k with which it ran several times; none if it is no ablation.

    It is none where scores are divergences, or where no field was changed but the one that the sweep "matched" changes.
    """
    same_budget: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        method = parse(row.method)
        if isinstance(method, SparQ):
            same_budget.setdefault((method.r, method.k), []).append(row)
    ablated = [row for own in same_budget.values() if len(own) > 1 for row in own]
    if {_change(row)[1] for row in ablated} <= {PUBLISHED, MATCHED_CHANGE} or parse_task(rows[0].task).is_of_documents:
        return []
    return ablated


def _change(row: Row) -> tuple[str, str, float, float | None, float | None]:
    """A row of SparQ in an ablation: (r and k, what is changed, mean, low, high)."""
    method: Any = parse(row.method)
    change = label(row.method).removeprefix("SparQ").lstrip(", ").replace(", ", "\n")
    return f"r = {method.r}, k = {method.k}", change or PUBLISHED, row.mean, row.low, row.high
