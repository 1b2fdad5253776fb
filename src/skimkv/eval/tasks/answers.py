"""Answers to open questions: which of them count as right."""

from __future__ import annotations

import re

from .base import Example

EDGES = re.compile(r"""^[\s"'_.,]*(the |a |an )?|[\s"'_.,]*$""")


def normal_form(text: str) -> str:
    """Put a text in lower case, without an article in front and without quotes and stops at both ends."""
    return EDGES.sub("", text.lower())


def score_start(output: str, example: Example) -> float:
    """Return 1 if the output begins with one of the answers, both in normal form, else 0."""
    start = normal_form(output)
    return float(any(start.startswith(answer) for answer in map(normal_form, example.answers) if answer))
