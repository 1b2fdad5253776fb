"""`skimkv bench attention | token | generate | serve | memory`: the commands, in the order of the help."""

from __future__ import annotations

from ..help import App
from .attention import attention
from .generate import generate
from .memory import memory
from .serve import serve
from .token import token

app = App(
    help="""Measure speed and memory beside what the machine's memory allows.

    Keys, values and weights are random where no model is given.

        skimkv bench attention --length 16384
    """,
    no_args_is_help=True,
)
for command in (attention, token, generate, serve, memory):
    app.command()(command)
