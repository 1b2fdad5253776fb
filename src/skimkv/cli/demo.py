"""`skimkv demo`: the bundled model answers questions about a long record, with every method at equal budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import Json, Seed, output_figure, quiet

if TYPE_CHECKING:
    from ..eval.demo import Row

KEPT_ANSWERS = 0.9  # a method keeps dense attention's quality if it gives at least this share of its right answers


def demo(
    lines: Annotated[int, typer.Option(min=1, help="Number of lines of the record; a line has about 14 tokens.")] = 500,
    asked: Annotated[int, typer.Option(min=1, help="Number of questions; each asks for one line of the record.")] = 20,
    seed: Seed = 0,
    out: Annotated[Path, output_figure("Save the figure to this file (.png, .pdf or .svg).", "--out")] = Path(
        "skimkv-demo.png"
    ),
    as_json: Json = False,
) -> None:
    """Ask the bundled model about a long record, with every method at equal budgets.

    The demo needs no network and takes a minute or two. It prints right answers, bytes and milliseconds for every
    method beside dense attention, and draws a figure of them.

    Example:

        skimkv demo --lines 100 --asked 10
    """
    if asked > lines:
        raise ValueError(f"--asked {asked} must be at most --lines {lines}")
    quiet("builtin")
    import torch

    from ..eval import demo as demonstration
    from ..eval import figures

    torch.set_num_threads(1)  # the model is too small to gain from more
    run = demonstration.Demo(lines, asked, seed)
    setting = f"a record of {lines} lines, {run.prompt_tokens} tokens; {asked} lines asked for after it"
    output.console(stderr=as_json).print(f"Bundled model, {run.where}: {setting}.", soft_wrap=True, markup=False)
    with output.progress_bar() as bar:
        solving = bar.add_task("choosing settings of equal bytes", total=None)
        plan, left_out = run.plan()
        bar.remove_task(solving)
        asking = bar.add_task("asking", total=len(plan) * asked)
        rows = run.rows(plan, lambda new: bar.advance(asking, new))
    figures.demo([row.point() for row in rows], out, rows[0].bytes_counted, *_figure_title(rows, setting))
    if as_json:
        output.print_json({"rows": [row.json() for row in rows], "figure": str(out)})
        return
    _print_table(rows, left_out)
    print(f"{demonstration.finding(rows)}\nFigure: {out}")


def _print_table(rows: Sequence[Row], left_out: Sequence[str]) -> None:
    """Print the rows, with a line under each budget, and what could not reach a budget."""
    table = output.table(
        "one decode step, all layers", "method", "right", "bytes, of\ndense's",
        "elements\npredicted", "\ncounted", "bytes\npredicted", "\ncounted", "cache\nin MB", "ms per\ntoken",
    )  # fmt: skip
    for i, row in enumerate(rows):
        table.add_row(
            repr(row.method), f"{row.correct}/{row.asked}", f"{row.share_of_dense:.1%}",
            *(f"{x:,}" for x in (row.elements_predicted, row.elements_counted, row.bytes_predicted, row.bytes_counted)),
            f"{row.cache_bytes / 1e6:.2f}", f"{row.ms_per_token:.2f}{'' if row.has_kernel else '*'}",
            end_section=i + 1 == len(rows) or rows[i + 1].budget != row.budget,
        )  # fmt: skip
    console = output.console(120)
    console.print(table)
    notes = (
        "Bytes, of dense's: over all steps of the answers. Elements and bytes: of one step, predicted and counted.",
        "Milliseconds: of a whole token, the median of several steps; the methods take turns.",
        "* This method has no kernel here: its time is that of its reference in PyTorch.",
    )
    for note in notes:
        console.print(note, style="dim", markup=False)
    for line in left_out:
        console.print(f"Left out: {line}.", style="dim", markup=False)


def _figure_title(rows: Sequence[Row], setting: str) -> tuple[str, str]:
    """Two lines over the figure: the finding, and the conditions."""
    dense = rows[0]
    conditions = (
        f"Bundled model; {setting}: no method knew the questions before.\n"
        "Solid: all tokens are kept and a part is read. Dotted: the rest was dropped for good. "
        "Hollow marks: no kernel here, the table has its time.\n"
        "Lines that meet in the left panel are drawn side by side."
    )
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
