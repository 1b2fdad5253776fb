"""Answers to open questions: what counts as the right one."""

from __future__ import annotations

import re

EDGES = re.compile(r"""^[\s"'_.,]*(the |a |an )?|[\s"'_.,]*$""")


def normal(text: str) -> str:
    """Lower case, without an article in front, and quotes and stops at both ends."""
    return EDGES.sub("", text.lower())


def right(output: str, answers: tuple[str, ...]) -> float:
    """1 if the output begins with one of the answers, both in normal form."""
    said = normal(output)
    return float(any(said.startswith(wanted) for wanted in map(normal, answers) if wanted))
