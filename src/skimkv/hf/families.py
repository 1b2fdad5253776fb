"""Every causal family that transformers has: does a method decode it, and how much of it.

`python benchmarks/models.py` ran each of them as a tiny random model, and wrote families.json and the lists of
docs/models.md.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import NamedTuple

EQUAL, PARTLY, REFUSED, DIFFERS, NOT_RUN = "equal", "partly", "refused", "differs", "not run"


class Family(NamedTuple):
    """What was found about a family.

    status: "equal" if all its layers are decoded, "partly" if some of them are, both with the tokens of the model's
    own attention; "refused" if skimkv does not take the model; "differs" if it takes it and the tokens differ, which
    is a defect; "not run" if the library itself makes no tiny model of it here. decoded: of `layers` layers of the
    tiny model. why: the reason, or what the other layers are. lacks: ways to generate text that are not possible.
    """

    name: str
    model: str
    status: str
    decoded: int
    layers: int
    why: str
    lacks: list[str]


class Record(NamedTuple):
    """What was found about all families of one version of transformers."""

    transformers: str
    families: list[Family]


def recorded() -> Record:
    """Return what was found when this version of skimkv was made."""
    text = resources.files(__package__).joinpath("families.json").read_text()
    kept = json.loads(text)
    return Record(kept["transformers"], [Family(**family) for family in kept["families"]])


def counts(record: Record) -> dict[str, int]:
    """How many families have each status."""
    statuses = [family.status for family in record.families]
    return {status: statuses.count(status) for status in (EQUAL, PARTLY, REFUSED, DIFFERS, NOT_RUN)}


def remarks(family: Family) -> str:
    """What there is to say about a family: the reason, and ways to generate text that the library has not for it."""
    lacks = f"the library itself cannot do this: {', '.join(family.lacks)}" if family.lacks else ""
    return "; ".join(part for part in (family.why, lacks) if part)


HEADINGS = {
    EQUAL: "Supported",
    PARTLY: "Supported in some layers",
    REFUSED: "Refused",
    DIFFERS: "Other tokens (a defect)",
    NOT_RUN: "Not run",
}
