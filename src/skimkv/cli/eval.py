"""`skimkv eval`: run tasks with several methods, add records to a results file, and show a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from . import options, output
from .errors import fail_interrupted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..eval.results import Record, Row
    from ..eval.tasks import Suite, Task
    from ..eval.timing import StepTimes

MODE_TITLES = {"blind": "question-blind", "aware": "question-aware"}  # a text that is only scored has neither


class Sweep(str, Enum):
    """The sets of methods that --sweep names; their contents are in eval/sweeps.py."""

    paper = "paper"
    matched = "matched"
    ablation = "ablation"
    rivals = "rivals"


class Mode(str, Enum):
    """Whether the question belongs to the prompt."""

    blind = "blind"
    aware = "aware"
    both = "both"


def evaluate(
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="A task, with its arguments in brackets: lines, or 'lines(lines=200)'. May be given several times. "
            "Tasks are record, passkey, lines, conversation, needle, repetition, bpc, kl, squad, triviaqa, summarise, "
            "and RULER's 13: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt, cwe, fwe, "
            "qa_1 and qa_2. ruler runs these 13 and gives their average.",
        ),
    ] = None,
    method: options.Methods = None,
    sweep: Annotated[
        Sweep | None,
        typer.Option(
            help="A set of methods. paper: the settings of the papers' tables. matched: every method at 1/2, 1/4 and "
            "1/8 of dense attention's bytes, in the layers that methods decode. ablation: the variants of SparQ. "
            "rivals: methods of other papers."
        ),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="blind: the question comes only after methods have chosen which tokens of the prompt to keep. aware: "
            "the question is part of the prompt. both: run both.",
        ),
    ] = Mode.blind,
    limit: Annotated[int, typer.Option(min=1, help="Number of examples of each task.")] = 20,
    data: Annotated[
        Path | None,
        options.path_option(
            "--data", options.check_exists,
            "File or folder with the data of tasks that read texts: needle, repetition, bpc, squad, triviaqa, "
            "summarise, and those of RULER that hide needles in essays or ask about documents; for kl any text file "
            "or a folder of *.txt.",
            None, "PATH", "the Hugging Face hub",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put context and question into the model's chat template, for a chat model.")
    ] = False,
    seed: options.Seed = 0,
    model: options.Model = "builtin",
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    batch: options.Batch = 8,
    count: Annotated[
        bool,
        typer.Option(
            "--count", rich_help_panel=options.MODEL_OPTIONS,
            help="Count the bytes that each step reads and writes, on the slow reference backend, instead of "
            "computing them in closed form.",
        ),
    ] = False,
    out: options.Records = Path("skimkv-results.jsonl"),
    resume_anyway: options.ResumeAnyway = False,
    as_json: options.Json = False,
) -> int:  # fmt: skip
    """Compare methods by the quality of their answers, the bytes that a token reads, and the time that it takes.

    The tasks record, passkey, conversation and kl are our own, and ruler runs the 13 tasks of RULER; the others are
    those of the methods' papers. kl measures how far a method moves the distribution of the next token from dense
    attention's, on any text. To continue a run that was interrupted, give the same command again.

    Example:

        skimkv eval --task record --task passkey --sweep matched --limit 40
    """
    from ..eval import tasks

    if not task:
        raise ValueError(f"--task is missing; known tasks are {', '.join((*tasks.TASKS, *tasks.SUITES))}")
    if not method and sweep is None:
        raise ValueError("--method or --sweep is missing, for example --method 'Dense()' --method 'Skim(k=128)'")
    suites: list[tasks.Suite] = []
    parsed_tasks: list[tasks.Task] = []
    for text in task:
        suite = tasks.parse_suite(text)
        suites += [] if suite is None or suite in suites else [suite]
        parsed_tasks += [tasks.parse(text)] if suite is None else suite.tasks
    parsed_tasks = list({parsed_task.spec: parsed_task for parsed_task in parsed_tasks}.values())
    _check_tasks(parsed_tasks, suites, data, seed)
    options.check_formats(model, dtype)
    options.check_environment()
    options.quiet(model)

    from .. import ops
    from ..eval.results import Results, summary
    from ..hf.load import load
    from ..methods import parse

    methods = [parse(text) for text in method or ()]
    place = options.resolve_device(device)
    backend = "ref" if count else ops.select_backend(place.type)[0]
    with Results(out, backend, resume_anyway) as results:
        network, tokenizer = load(model, dtype=dtype, device=place)  # finds mistakes before transformers is imported
        from ..eval.plan import Setup, plan_evaluation
        from ..eval.run import run_evaluation
        from ..hf import fingerprint

        weights = fingerprint.of_model(network, tokenizer, model)
        setup = Setup(network, tokenizer, model, seed, batch, count, weights, chat)

        with output.progress_bar() as bar:
            preparing = bar.add_task("", total=len(parsed_tasks))

            def show_task(done: int, task: str) -> None:
                """Show which task is prepared."""
                bar.update(preparing, completed=done, description=f"prepares {task}")

            plan = plan_evaluation(
                setup, parsed_tasks, methods, sweep and sweep.value, mode.value, data, limit, show_task
            )
        times: StepTimes = {}
        console = output.console(stderr=as_json)
        for note in (*plan.notes, *(_matched_notes(network) if sweep is Sweep.matched else ())):
            console.print(note, style="dim", soft_wrap=True, markup=False)
        with output.progress_bar(keep=True) as bar:
            bar_task = bar.add_task("", total=None)

            def show(done: int, total: int, record: Record | None) -> None:
                """Show how many examples are done, and the one that comes next."""
                what = "" if record is None else f"{record.key.task} {record.key.mode} {record.key.method}"
                bar.update(bar_task, completed=done, total=total, description=what if done < total else "done")

            try:
                records = run_evaluation(setup, plan, results, show, times)
            except KeyboardInterrupt:
                records = None
    if records is None:
        return fail_interrupted(len(results.records), out)
    from ..eval.averages import suite_averages

    rows, machine = summary(records, times), _machine_name(place)
    averages = suite_averages(rows, suites)
    if as_json:
        answer = {"rows": [row.json() for row in rows], "out": str(out), "machine": machine}
        output.print_json({**answer, "averages": [row.json() for row in averages]} if suites else answer)
        return 0
    width = 170 if any(row.tail is not None for row in rows) else 130
    output.print_table(_table(rows, averages, machine), width)
    for line in (*_notes(rows, count), f"{len(records)} records in {out}"):
        output.console().print(line, soft_wrap=True, markup=False)
    return 0


def _matched_notes(model: PreTrainedModel) -> list[str]:
    """Of which layers the shares of the sweep "matched" are, if a method decodes only some of the model's."""
    from ..hf.supported import model_layers

    layers = model_layers(model)
    decoded = sum(layer.supported for layer in layers)
    if decoded in (0, len(layers)):  # where none is, all are in caches that are no longer than their window
        return []
    return [
        f"The sweep matches 1/2, 1/4 and 1/8 of the bytes that dense attention reads in the {decoded} of {len(layers)} "
        "layers that methods decode; the bytes in the table, and the shares of dense, are those of all layers."
    ]


def _check_tasks(parsed_tasks: Sequence[Task], suites: Sequence[Suite], data: Path | None, seed: int) -> None:
    """Make the first example of every task whose data is here, before anything heavy is imported.

    Raises ValueError if one cannot be made. Of a suite the message says how to run its other tasks.
    """
    in_suites = {task.spec for suite in suites for task in suite.tasks}
    problems: dict[str, str] = {}
    for task in parsed_tasks:
        if data is None and not task.is_made_up:
            continue
        try:
            next(task.examples(data, seed), None)
        except ValueError as error:
            if task.spec not in in_suites:
                raise
            problems[task.spec.partition("(")[0]] = str(error)
    if problems:
        (name, problem), *_ = problems.items()
        others = "" if len(problems) == len(in_suites) else f"; leave_out={tuple(problems)} runs the other tasks"
        raise ValueError(f"{name}: {problem}{others}")


def _machine_name(place: torch.device) -> str:
    """The machine that the times were taken on, for people."""
    from ..bench.machine import machine_for

    try:
        return machine_for(place).name
    except ValueError:  # a device that the benchmarks do not know: its kind is all there is to say
        return str(place)


def _notes(rows: Sequence[Row], count: bool) -> list[str]:
    """What a reader must know of the numbers, and why cells of the table are empty."""
    from ..eval.statistics import LEAST

    notes = []
    if floors := [row.mean for row in rows if row.tail is not None and row.method == "Dense()"]:
        notes.append(
            f"Rounding alone moves dense attention by {max(floors):.2g} nats a token in this number format: smaller "
            "divergences say nothing."
        )
    elif any(row.tail is not None for row in rows):
        notes.append("Give --method 'Dense()' too: its divergence is what rounding alone does in this number format.")
    if any(row.method.startswith("TopK(") and "oracle=True" not in row.method for row in rows):
        notes.append(
            "TopK(k) adds the k largest weights as they are, and does not renormalise them; with oracle=True it does."
        )
    if any(row.n < LEAST for row in rows):
        notes.append(f"Fewer than {LEAST} examples give no interval: raise --limit.")
    if count:
        notes.append("With --count no time is taken: the backend that counts is slow.")
    elif any(row.ms_per_token is None for row in rows):
        notes.append("Where no time is given, this run had no steps to time: the records were there before.")
    return notes


def _table(rows: Sequence[Row], averages: Sequence[Row], machine: str) -> Table:
    """The rows for people: a section for each task and mode, then one for each suite and mode."""
    from ..eval.tasks import parse

    title = f"means and paired differences to dense, with 95% intervals; a token's bytes and median time on {machine}"
    columns = ["n", "mean", "95% interval", "to dense", "95% interval", "bytes read", "of dense", "ms a token"]
    has_tails = any(row.tail is not None for row in rows)
    if has_tails:
        columns += ["99th percentile", "maximum", "same top token"]
    table = output.table(title, "method", *columns)
    section = None
    for number_of_row, row in enumerate((*rows, *averages)):
        is_average = number_of_row >= len(rows)
        if (row.task, row.mode) != section:
            section = row.task, row.mode
            mode = MODE_TITLES.get(row.mode, "given token by token")
            note = ", average of the tasks"
            if not is_average:
                task = parse(row.task)
                note = f", {task.unit}, lower is better" if task.lower else ""
            table.add_section()
            table.add_row(f"[bold]{row.task}[/], {mode}{note}")
        compared = row.method != "Dense()" and row.diff_to_dense is not None
        write: Callable[..., str] = _number if row.tail is None else _significant
        signed, tail = partial(write, signed=True), ["", "", ""]
        if row.tail is not None:
            tail = [write(row.tail.kl_p99), write(row.tail.kl_max), f"{row.tail.agreement:.1%}"]
        table.add_row(
            row.method, str(row.n), write(row.mean), _interval(row.low, row.high, write),
            signed(row.diff_to_dense) if compared else "", _interval(row.diff_low, row.diff_high, signed),
            "" if row.bytes_per_token is None else f"{row.bytes_per_token:,}",
            "" if row.share is None else f"{row.share:.1%}",
            "" if row.ms_per_token is None else output.three_digits(row.ms_per_token),
            *(tail if has_tails else ()),
        )  # fmt: skip
    return table


def _interval(low: float | None, high: float | None, write: Callable[[float | None], str]) -> str:
    """Both ends of an interval; nothing where there is none. write: writes one end."""
    return "" if low is None else f"{write(low)} … {write(high)}"


def _number(x: float | None, signed: bool = False) -> str:
    """Three digits after the point for numbers below 10, one for larger ones."""
    if x is None:
        return ""
    return f"{x:{'+' if signed else ''}.{3 if abs(x) < 10 else 1}f}"


def _significant(x: float | None, signed: bool = False) -> str:
    """Three significant digits: divergences that matter differ by powers of ten."""
    return "" if x is None else f"{x:{'+' if signed else ''}.3g}"
