"""The methods by name; a new one is a new file and one line here."""

import ast
import dataclasses
import difflib
from typing import Any

from .base import Method
from .dense import Dense
from .h2o import H2O
from .lm_infinite import LMInfinite
from .lowrank import LowRank
from .sparq import SparQ
from .sparse_transformer import Fixed, Strided
from .subgen import SubGen, SubGenStream
from .topk import TopK

METHODS: dict[str, type[Method]] = {
    m.__name__: m for m in (Dense, SparQ, TopK, LowRank, LMInfinite, Strided, Fixed, H2O, SubGen, SubGenStream)
}

__all__ = [
    "H2O", "METHODS", "Dense", "Fixed", "LMInfinite", "LowRank", "SparQ", "Strided", "SubGen", "SubGenStream", "TopK",
]  # fmt: skip


LONGEST = 500  # characters of a spec: nothing nests deep enough to exhaust the parser


def _near(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), [k.lower() for k in known], 1, 0.4)
    match = next((k for k in known if close and k.lower() == close[0]), None)
    return f"; did you mean {match}?" if match else f"; known: {', '.join(known)}"


def parse(spec: str | Method) -> Method:
    """A method from its spec, `SparQ(r=32, k=128)`. Literals only: nothing in a spec is ever run.

    Raises ValueError, one line, naming what is unknown and the nearest known name.
    """
    if isinstance(spec, Method):
        return spec
    if len(spec) > LONGEST:
        raise ValueError(f"a method spec has at most {LONGEST} characters, this one has {len(spec)}")
    source = spec.strip()
    try:
        node = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"{spec!r} is no method spec; write for example SparQ(r=32, k=128)") from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise ValueError(f"{spec!r} is no method spec; write for example SparQ(r=32, k=128)")
    if call.func.id not in METHODS:
        raise ValueError(f"unknown method {call.func.id!r}{_near(call.func.id, list(METHODS))}")
    method = METHODS[call.func.id]
    names = [f.name for f in dataclasses.fields(method)]
    places = [f.name for f in dataclasses.fields(method) if not f.kw_only]
    required = [f.name for f in dataclasses.fields(method) if f.default is dataclasses.MISSING]
    if len(call.args) > len(places):
        raise ValueError(f"{method.__name__} takes at most {len(places)} arguments: {', '.join(places)}")
    values: dict[str, Any] = {}
    for name, item in [*zip(places, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]:
        if name not in names:
            raise ValueError(f"{method.__name__} has no argument {name!r}{_near(name or '**', names)}")
        if name in values:
            raise ValueError(f"{method.__name__}: argument {name!r} is given twice")
        try:
            values[name] = ast.literal_eval(item)
        except (ValueError, TypeError):
            text = " ".join((ast.get_source_segment(source, item) or "").split())
            raise ValueError(f"{method.__name__}: {name} = {text} is not a literal") from None
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{method.__name__} needs {', '.join(missing)}")
    return method(**values)
