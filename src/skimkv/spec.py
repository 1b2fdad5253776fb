"""One parser for the specs of methods and tasks: "Skim(k=128)", "lines(lines=200)".

A spec is a name with arguments that are literals, written as Python prints the object. It is parsed with `ast`; nothing
in it is ever run. This module imports nothing heavy, so that a mistake in a spec is reported before PyTorch is loaded.
"""

from __future__ import annotations

import ast
import difflib
import functools
import math
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_LENGTH = 500  # characters of a spec: nothing nests deep enough to exhaust the parser
_CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}


class Call(NamedTuple):
    """A spec taken apart: its name, its positional arguments and its keyword arguments, not yet evaluated."""

    text: str
    name: str
    positional: list[ast.expr]
    keywords: list[tuple[str | None, ast.expr]]


class Parameter(NamedTuple):
    """What a spec may pass: its name, whether it must be given, by keyword only, and whether it may be text.

    least: the least whole number that it may be; None where that is not known before the method is made.
    """

    name: str
    required: bool = False
    keyword_only: bool = False
    takes_text: bool = False
    least: int | None = None


def check_whole(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
    """Raise ValueError unless value is a whole number from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} = {value!r} must be an integer of at least {low}")
    if value > high:
        raise ValueError(f"{name} = {value} must be at most {high}")


def check_positive(name: str, value: Any, below: float) -> None:
    """Raise ValueError unless value is a number above 0 and below the bound."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
        limit = "" if below == math.inf else f" and below {below}"
        raise ValueError(f"{name} = {value!r} must be a number above 0{limit}")


def parse_call(text: object, kind: str, example: str) -> Call:
    """Take a spec apart. A name alone is a call without arguments.

    kind and example are for the message: "method", "Skim(k=128)".
    Raises ValueError if the text is not a name with arguments, is longer than MAX_LENGTH characters, or is no text.
    """
    if isinstance(text, type):
        raise ValueError(f"{text.__name__} is a class, not a {kind}; write for example {example}")
    if not isinstance(text, str):
        raise ValueError(f"{reprlib.repr(text)} is not a {kind} spec; write for example {example}")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a {kind} spec has at most {MAX_LENGTH} characters, this one has {len(text)}")
    source = text.strip()
    problem = f"{text!r} is not a {kind} spec; write for example {example}"
    try:
        node = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        missing = source.count("(") - source.count(")")
        hint = "; a closing parenthesis is missing" if missing == 1 and "(" in source else ""
        raise ValueError(problem + hint) from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise ValueError(problem)
    return Call(source, call.func.id, call.args, [(keyword.arg, keyword.value) for keyword in call.keywords])


def bind(call: Call, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The arguments of a call by name, evaluated as literals.

    Raises ValueError, in one line, for an argument that is unknown, given twice, missing, or not a literal.
    """
    known = {parameter.name: parameter for parameter in parameters}
    places = [parameter.name for parameter in parameters if not parameter.keyword_only]
    if len(call.positional) > len(places):
        listed = f": {', '.join(places)}" if places else ""
        raise ValueError(f"{call.name} takes at most {len(places)} positional arguments{listed}")
    values: dict[str, Any] = {}
    for name, node in [*zip(places, call.positional, strict=False), *call.keywords]:
        if name is None:
            raise ValueError(f"{call.name} has no argument '**'; write every argument as name=value")
        if name not in known:
            raise ValueError(f"{call.name} has no argument {name!r}{suggest(name, known)}")
        if name in values:
            raise ValueError(f"{call.name}: argument {name!r} is given twice")
        values[name] = _literal(call, known[name], node)
    missing = [parameter.name for parameter in parameters if parameter.required and parameter.name not in values]
    if missing:
        raise ValueError(f"{call.name} needs a value for {', '.join(missing)}")
    return values


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them."""
    names = list(known)
    lowered = [name.lower() for name in names]
    near = difflib.get_close_matches(word.lower(), lowered, 1, 0.5)
    if near:
        return f"; did you mean {names[lowered.index(near[0])]}?"
    return f"; known: {', '.join(names)}" if names else "; it takes none"


def _literal(call: Call, parameter: Parameter, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        written = " ".join((ast.get_source_segment(call.text, node) or "").split())
        where = f"{call.name}: {parameter.name} = {written} is not a literal"
    if isinstance(node, ast.Name) and node.id.lower() in _CONSTANTS:
        raise ValueError(f"{where}; write {parameter.name}={_CONSTANTS[node.id.lower()]}") from None
    if isinstance(node, ast.Name) and parameter.takes_text:
        raise ValueError(f"{where}; put quotes around it: {parameter.name}='{node.id}'") from None
    raise ValueError(f"{where}; write a number, a text in quotes, True, False or None") from None


# What people look for under these names, and what skimkv has instead.
ELSEWHERE = {
    "PyramidKV": "skimkv does not have it; SnapKV(k=0.2) also keeps a fixed share of the prompt, alike in all layers",
    "AdaKV": "skimkv does not have it; SnapKV(k=512) also keeps the tokens that the end of the prompt attends to",
    "Scissorhands": "skimkv does not have it; H2O(k=512) also keeps the tokens that attention prefers",
    "SinkCache": "it is StreamingLLM(k=512) here",
    "Local": "it is LMInfinite(k=512, initial=0) here",
    "Window": "it is LMInfinite(k=512, initial=0) here",
    "FlexGen": "its sparse attention is TopK(k=128) here, its quantised cache is Dense(kv='int4')",
    "Twilight": "its pruner is TopP(p=0.95) here",
    "RaBitQCache": "its one-bit index is that of RaBitQ(k=128) here",
    "KIVI": "skimkv does not have it; a quantised cache is Dense(kv='int4') here",
    "DoubleSparsity": "skimkv does not have it; SparQ(r=16, k=128) also scores with a few channels",
    "Loki": "skimkv does not have it; LowRank(r=32, k=128) also scores in a low-rank projection",
    "InfLLM": "skimkv does not have it; Quest(page=16, k=512) also selects blocks of tokens from a whole cache",
    "MInference": "it makes prompts faster; skimkv makes decoding faster, for example with Skim(k=128)",
    "SDPA": "it is Dense() here",
    "FlashAttention": "it is Dense() here",
}


def unknown_method(name: str, known: Iterable[str]) -> ValueError:
    """The error for a method that does not exist: what to use instead, or the nearest name."""
    elsewhere = {key.lower(): (key, text) for key, text in ELSEWHERE.items()}
    plain = name.lower().replace("_", "").replace("-", "")
    if plain in elsewhere:
        title, text = elsewhere[plain]
        return ValueError(f"unknown method {title!r}: {text}")
    return ValueError(f"unknown method {name!r}{suggest(name, known)}")


METHOD_EXAMPLE = "Skim(k=128)"
registered_names: set[str] = set()  # of methods that `skimkv.register` has made known in this process


def check_method(text: str) -> None:
    """Find mistakes in the spec of a method without PyTorch: in syntax, names, arguments, literals and least values.

    Other bounds are checked when the method is made. A name that other packages announce is not checked.
    Raises ValueError in one line.
    """
    call = parse_call(text, "method", METHOD_EXAMPLE)
    signatures = _builtin_signatures()
    if call.name in signatures:
        values = bind(call, signatures[call.name])
        for parameter in signatures[call.name]:
            if parameter.least is not None and parameter.name in values:
                check_whole(parameter.name, values[parameter.name], parameter.least)
    elif call.name not in registered_names and not announced_methods():
        raise unknown_method(call.name, signatures)


def announced_methods() -> list[Any]:
    """The entry points of the group skimkv.methods, by which other packages announce methods."""
    from importlib.metadata import entry_points

    return list(entry_points(group="skimkv.methods"))


@functools.cache
def _builtin_signatures() -> dict[str, list[Parameter]]:
    """The parameters of every method of this package, read from the source: a class with annotated fields each."""
    classes: dict[str, ast.ClassDef] = {}
    for path in sorted((Path(__file__).parent / "methods").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node

    def fields(name: str) -> list[Parameter]:
        """Return the fields of a class, those of its bases first."""
        if name not in classes:
            return []
        own = []
        for base in classes[name].bases:
            base_name = base.value if isinstance(base, ast.Subscript) else base
            own += fields(base_name.id) if isinstance(base_name, ast.Name) else []
        least_values = _least_values(classes[name])
        for item in classes[name].body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            kind = ast.unparse(item.annotation)
            if kind.startswith("ClassVar"):
                continue
            is_field = isinstance(item.value, ast.Call)
            options = {k.arg: k.value for k in item.value.keywords} if isinstance(item.value, ast.Call) else {}
            required = item.value is None or (is_field and "default" not in options)
            least = least_values.get(item.target.id)
            own.append(Parameter(item.target.id, required, "kw_only" in options, "str" in kind, least))
        return own

    exported = next(
        node
        for node in ast.parse((Path(__file__).parent / "methods" / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "METHODS"
    )
    names = [node.id for node in ast.walk(exported) if isinstance(node, ast.Name) and node.id in classes]
    return {name: fields(name) for name in names if name != "Method"}


def _least_values(class_node: ast.ClassDef) -> dict[str, int]:
    """The least values of a method's fields: of every line check_whole("k", self.k, 1) at the top of __post_init__."""
    least = {}
    for function in class_node.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__post_init__":
            for statement in function.body:
                match statement:
                    case ast.Expr(
                        ast.Call(ast.Name("check_whole"), [ast.Constant(str(name)), _, ast.Constant(int(low)), *_])
                    ):
                        least[name] = low
    return least
