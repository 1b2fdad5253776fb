"""skimkv eval: run tasks by methods into a results file, and show the table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..eval.plan import Job, Run
    from ..eval.results import Row

SWEEPS = ("paper", "matched", "ablation")


def evaluate(
    model: Annotated[str, typer.Option(help="builtin, a folder, or a Hugging Face id.")] = "builtin",
    task: Annotated[list[str] | None, typer.Option(help="lines, or lines(lines=200); may be repeated.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="'SparQ(r=32, k=128)'; may be repeated.")] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="paper: the papers' grids; matched: all at 1/2, 1/4, 1/8 of dense; ablation: of SparQ."),
    ] = None,
    mode: Annotated[str, typer.Option(help="blind: no method saw the question; aware: all did; both.")] = "blind",
    data: Annotated[Path | None, typer.Option(help="Folder or file with the tasks' data, else the Hub.")] = None,
    out: Annotated[Path, typer.Option(help="JSON Lines; what it holds already is not run again.")] = Path(
        "skimkv-results.jsonl"
    ),
    limit: Annotated[int, typer.Option(min=1, help="Examples of each task.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Rows that are decoded at once.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 0,
    count: Annotated[
        bool, typer.Option("--count", help="Count the traffic on the reference backend instead of predicting it.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else the checkpoint's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Compare methods on the papers' tasks: quality, and the bytes that it took. Ctrl-C and run again to go on."""
    from ..eval import tasks
    from ..methods import parse

    if not task:
        raise ValueError(f"--task is missing; known: {', '.join(tasks.TASKS)}")
    if sweep is not None and sweep not in SWEEPS:
        raise ValueError(f"--sweep {sweep!r} is unknown; known: {', '.join(SWEEPS)}")
    if not method and sweep is None:
        raise ValueError("--method or --sweep is missing, for example --method 'Dense()' --method 'SparQ(r=32, k=128)'")
    if mode not in ("blind", "aware", "both"):
        raise ValueError(f"--mode {mode!r} must be blind, aware or both")
    chosen = [tasks.parse(spec) for spec in dict.fromkeys(task)]
    named = [parse(spec) for spec in method or ()]
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")

    from ..eval.results import Results, summary

    console = Console(stderr=as_json, highlight=False)
    with Results(out) as results:
        run = _run(model, dtype, device, seed, batch, count)
        jobs, notes = _jobs(run, chosen, named, sweep, mode, data, limit)
        for note in notes:
            console.print(note, style="dim", soft_wrap=True, markup=False)
        mine = _carry_out(run, jobs, results)
    rows = summary(mine)
    if as_json:
        print(json.dumps({"rows": [row.json() for row in rows], "out": str(out)}))
        return
    from .show import wide

    wide(130).print(table(rows))
    console.print(f"{len(mine)} records in {out}", soft_wrap=True, markup=False)


def quiet(model: str) -> None:
    """No progress bars for what is on this disk; a download shows them. Before transformers is imported."""
    if model == "builtin" or Path(model).exists():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def place(device: str) -> Any:
    """A torch.device. Raises ValueError if there is none of that name here."""
    import torch

    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device {device!r} is unknown; for example cpu or cuda") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: PyTorch sees no CUDA device here")
    return found


def _run(model: str, dtype: str | None, device: str, seed: int, batch: int, count: bool) -> Run:
    from ..eval.plan import Run
    from ..eval.run import fingerprint
    from ..hf.attach import load

    where = place(device)
    network: Any
    network, tokenizer = load(model, dtype=dtype)
    return Run(network.to(where), tokenizer, model, seed, batch, count, fingerprint(network))


def _jobs(
    run: Run, chosen: Sequence[Any], named: Sequence[Any], sweep: str | None, mode: str, data: Path | None, limit: int
) -> tuple[list[Job], list[str]]:
    """What to do, and what was left out and why. A method the user named must fit the model; one of a sweep may not."""
    from ..eval import plan
    from ..methods import parse

    _, wrong = plan.servable(run, named)
    if wrong:
        raise ValueError(wrong[0])
    specs = {"paper": plan.PAPER, "ablation": plan.ABLATION}.get(sweep or "", ())
    grid, notes = plan.servable(run, [parse(spec) for spec in specs])
    notes = [f"Left out: {note}" for note in notes]
    jobs: list[Job] = []
    for task in chosen:
        for each in plan.MODES if mode == "both" else (mode,):
            made = plan.job(run, task, each, [*grid, *named], data, limit)
            if any((made.task.spec, made.mode) == (other.task.spec, other.mode) for other in jobs):
                continue  # a task without questions has one mode
            if sweep == "matched":
                found, none = plan.matched(run, made)
                made = made._replace(methods=list(dict.fromkeys([*found, *named])))
                notes += [f"Left out: {note}" for note in none]
            if made.left_out:
                note = f"{made.left_out} examples are longer than the model's {run.positions} positions"
                notes.append(f"Left out of {task.spec}, {made.mode}: {note}")
            jobs.append(made)
    return jobs, notes


def _carry_out(run: Run, jobs: Sequence[Job], results: Any) -> list[dict[str, Any]]:
    """Make the missing records, with a bar; all records of this run, old and new."""
    from ..eval import run as evaluation

    wanted = evaluation.wanted(run, jobs)
    have = {evaluation.key_of(record): record for record in results.records}
    done = {key for key in wanted if key in have}
    for key, source in wanted.items():
        if key in have and have[key].get("source") != source:
            what = ", ".join(map(str, key[4:]))
            raise ValueError(f"{results.path} has {what} of another model or other data; choose another --out")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        going = bar.add_task("", total=len(wanted), completed=len(done))
        for job in jobs:
            for record in evaluation.records(run, job, done):
                results.add(record)
                have[evaluation.key_of(record)] = record
                bar.update(going, advance=1, description=f"{record['task']} {record['mode']} {record['method']}")
        bar.update(going, description="done")
    return [have[key] for key in wanted]


def table(rows: Sequence[Row]) -> Table:
    """For a person: one section per task and mode."""
    from ..eval.tasks import parse

    out = Table(title="mean ± standard error; difference to dense with its 95% interval, paired", title_style="dim")
    out.add_column("method", overflow="fold")
    for name in ("n", "mean", "±", "to dense", "95% interval", "bytes a token", "of dense"):
        out.add_column(name, justify="right")
    last = None
    for row in rows:
        if (row.task, row.mode) != last:
            last = row.task, row.mode
            how = {"blind": "question-blind", "aware": "question-aware"}.get(row.mode, "given token by token")
            better = ", lower is better" if parse(row.task).lower else ""
            out.add_section()
            out.add_row(f"[bold]{row.task}[/], {how}{better}")
        dense = row.method == "Dense()" or row.diff_to_dense is None
        out.add_row(
            row.method, str(row.n), _number(row.mean), _number(row.stderr),
            "" if dense else _number(row.diff_to_dense, sign=True),
            "" if dense or row.diff_low is None else f"{_number(row.diff_low, True)} … {_number(row.diff_high, True)}",
            "" if row.bytes_per_token is None else f"{row.bytes_per_token:,}",
            "" if row.share is None else f"{row.share:.1%}",
        )  # fmt: skip
    return out


def _number(x: float | None, sign: bool = False) -> str:
    """Three digits after the point for scores up to 10, one above."""
    if x is None:
        return ""
    return f"{x:{'+' if sign else ''}.{3 if abs(x) < 10 else 1}f}"
