"""What every task gives: its examples, in raw form."""

from __future__ import annotations

from typing import Any, NamedTuple


class Example(NamedTuple):
    """One question on one context, in raw form: the task's prompt() makes the texts.

    The output is cut at `stop` (after some text), at `chars` characters and at `new` tokens, whichever is first;
    new = 0 is as many tokens as the first answer has. given: the first answer is not generated but fed, and the
    task's score() gets its bits instead of an output. at: where the example stands in a figure.
    enough: "all": no more is generated once the output holds all answers, in any case of letters; "any": once it holds
    one of them. For tasks whose score then cannot change any more.
    tokens: where it is not (0, 0), the context is a document. Its first tokens[0] tokens are the prompt, the next
    tokens[1] are fed, and score() gets the KL divergences from dense attention after each of these.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    new: int = 32
    stop: str = ""
    chars: int = 0
    given: bool = False
    at: tuple[float, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    enough: str = ""


MOST_CHARACTERS = 10**7  # of one text, beyond the positions of any model


def check_whole(name: str, value: Any, low: int, high: int = MOST_CHARACTERS) -> None:
    """Raises ValueError unless value is a whole number from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} = {value!r} must be a whole number of at least {low}")
    if value > high:
        raise ValueError(f"{name} = {value} must be at most {high}")
