"""The command line: all commands, in the groups in which `skimkv --help` shows them."""

from __future__ import annotations

from typing import Annotated

import typer

from .analyse import analyse
from .bench.app import app as bench
from .demo import demo
from .doctor import doctor
from .eval import evaluate
from .generate import generate
from .help import App
from .info import info
from .plot import plot
from .roofline import roofline
from .serve import serve
from .tune import tune

START = "Get started"
QUALITY = "Measure quality"
SPEED = "Measure speed and memory"
EXPLAIN = "Understand a model's attention"

app = App(
    help="""Decode with a small part of the key-value cache, and know exactly how many bytes it took.

    `skimkv COMMAND --help` explains a command. Start with:

        skimkv demo
    """,
    no_args_is_help=True,
)
app.command("demo", rich_help_panel=START)(demo)
app.command("generate", rich_help_panel=START)(generate)
app.command("info", rich_help_panel=START)(info)
app.command("doctor", rich_help_panel=START)(doctor)
app.command("serve", rich_help_panel=START)(serve)
app.command("eval", rich_help_panel=QUALITY)(evaluate)
app.command("tune", rich_help_panel=QUALITY)(tune)
app.add_typer(bench, name="bench", rich_help_panel=SPEED)
app.command("roofline", rich_help_panel=SPEED)(roofline)
app.command("analyse", rich_help_panel=EXPLAIN)(analyse)
app.command("plot", rich_help_panel=QUALITY)(plot)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from .. import __version__

        print(f"skimkv {__version__}")
        raise typer.Exit
