"""What the commands print: the console for tables, the progress bar, and the JSON object of --json.

With --json the last line on stdout is one JSON object, and nothing else is printed there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich import progress


def print_json(answer: Mapping[str, Any]) -> None:
    """Print the answer of a command with --json: one object on one line of stdout."""
    print(json.dumps(answer))


def console(min_width: int = 0, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr. One that is not a terminal is at least `min_width` columns wide."""
    terminal = Console(highlight=False, stderr=stderr)
    if terminal.is_terminal or terminal.width >= min_width:
        return terminal
    return Console(highlight=False, stderr=stderr, width=min_width)


def table(title: str, *columns: str) -> Table:
    """Make an empty table: the first column is text that may wrap, the others hold numbers."""
    made = Table(title=title, title_style="dim", title_justify="left")
    for i, name in enumerate(columns):
        made.add_column(name, justify="right" if i else "left", overflow="fold")
    return made


def print_table(rows: Table, min_width: int = 0) -> None:
    """Print a table of `table` on stdout, whose numbers are never wrapped or cut.

    On a terminal that is too narrow for them a row becomes several lines: its first cell, and below it what each column
    says. Where stdout is no terminal, a line is as long as it must be, and at least `min_width` columns.
    """
    names, *columns = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in rows.columns]
    headings = [str(column.header) for column in rows.columns[1:]]
    longest = [
        max(map(len, "\n".join([head, *cells]).split("\n"))) for head, cells in zip(headings, columns, strict=True)
    ]
    words = max((len(word) for name in names for word in name.split()), default=0)
    needed = max(words, rows.columns[0].min_width or 0) + sum(longest) + 3 * len(rows.columns) + 1
    screen = console(min_width)
    for column in rows.columns[1:]:
        column.no_wrap = True
    if needed <= screen.width:
        screen.print(rows)
    elif not screen.is_terminal:
        Console(highlight=False, width=needed).print(rows)
    else:
        screen.print(rows.title, style="dim", markup=False)
        for name, *cells in zip(names, *columns, strict=True):
            screen.print(name, style="bold", markup=False)
            for heading, cell in zip(headings, cells, strict=True):
                if cell:
                    screen.print(f"  {heading.replace('-' + chr(10), '').replace(chr(10), ' ')}: {cell}", markup=False)
        if rows.caption:
            screen.print(rows.caption, style="dim", markup=False)


def number(n: int, what: str) -> str:
    """Write how many of something there are: "1 layer", "2 layers"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def three_digits(x: float) -> str:
    """Write a number in a table with three digits, and no fewer than all before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def progress_bar(*more: progress.ProgressColumn, keep: bool = False) -> progress.Progress:
    """Make the progress bar of every command, on stderr. Use it in a `with` statement, and add a task to it.

    A task without a total shows how much is done and for how long it has run. `more` are columns after the usual
    ones. With `keep` the bar stays on the screen when it has ended. Nothing is shown where stderr is no terminal; what
    is printed on the bar's console is.
    """
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), *more,
    )  # fmt: skip
    terminal = Console(stderr=True)
    return progress.Progress(*columns, console=terminal, transient=not keep, disable=not terminal.is_terminal)
