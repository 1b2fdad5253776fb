"""Which of the bytes are read: the methods by name. A new one is a new file and one name in METHODS."""

from __future__ import annotations

import dataclasses

from .. import spec
from .base import Method
from .dense import Dense
from .h2o import H2O
from .lm_infinite import LMInfinite
from .lowrank import LowRank
from .quest import Quest
from .rabitq import RaBitQ
from .rocketkv import RocketKV
from .santa import SANTA
from .skim import Skim
from .snapkv import SnapKV
from .sparq import SparQ
from .sparse_transformer import Fixed, Strided
from .streaming_llm import StreamingLLM
from .subgen import SubGen, SubGenStream
from .topk import TopK
from .topp import TopP
from .tova import TOVA
from .vattention import VAttention

METHODS: dict[str, type[Method]] = {
    method.__name__: method
    for method in (
        Dense, SparQ, Skim, Quest, VAttention, TopP, RaBitQ, TopK, SANTA, LowRank, LMInfinite, StreamingLLM, Strided,
        Fixed, H2O, SnapKV, RocketKV, TOVA, SubGen, SubGenStream,
    )
}  # fmt: skip

__all__ = [
    "H2O", "METHODS", "SANTA", "TOVA", "Dense", "Fixed", "LMInfinite", "LowRank", "Quest", "RaBitQ", "RocketKV", "Skim",
    "SnapKV", "SparQ", "StreamingLLM", "Strided", "SubGen", "SubGenStream", "TopK", "TopP", "VAttention", "bind_spec",
    "load_announced_methods", "parse", "register",
]  # fmt: skip


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its class name, so that specs, caches, evaluation and the command line accept it.

    Returns the class, so that it works as a decorator. Registering the same class again does nothing.
    Raises ValueError if it is not a frozen dataclass derived from Method, if it lacks a part that every method has, or
    if the name is taken.
    """
    if not (isinstance(method, type) and issubclass(method, Method)) or method is Method:
        raise ValueError(f"{method!r} cannot be registered: it must be a class derived from skimkv.Method")
    name, parameters = method.__name__, getattr(method, "__dataclass_params__", None)
    if "__dataclass_fields__" not in vars(method) or parameters is None or not parameters.frozen:
        raise ValueError(f"{name} cannot be registered: decorate it with @dataclass(frozen=True, repr=False)")
    if missing := sorted(method.__abstractmethods__):
        raise ValueError(f"{name} cannot be registered: it has no {', '.join(missing)}")
    if METHODS.get(name, method) is not method:
        raise ValueError(f"{name} cannot be registered: {METHODS[name].__module__} has a method of that name")
    METHODS[name] = method
    spec.registered_names.add(name)
    return method


def load_announced_methods() -> None:
    """Register the methods that other packages announce by the entry-point group skimkv.methods.

    Raises ValueError, naming the entry point, if one cannot be imported or registered.
    """
    for announced in spec.announced_methods():
        if announced.name in METHODS:
            continue
        try:
            register(announced.load())
        except Exception as error:
            raise ValueError(f"entry point {announced.name} = {announced.value}: {error}") from error


def parse(text: str | Method) -> Method:
    """A method from its spec, `SparQ(r=32, k=128)`. A spec holds literals only; nothing in it is ever run.

    A method is returned as it is. Methods that other packages announce are found too.
    Raises ValueError, in one line, which names what is wrong and what to write instead; also for None, or for a class
    such as SparQ in the place of SparQ(r=32, k=128).
    """
    if isinstance(text, Method):
        return text
    call = spec.parse_call(text, "method", spec.METHOD_EXAMPLE)
    if call.name not in METHODS:
        load_announced_methods()
    if call.name not in METHODS:
        raise spec.unknown_method(call.name, METHODS)
    return bind_spec(METHODS[call.name], call)


def bind_spec(method: type[Method], call: spec.Call) -> Method:
    """An instance of this class with the arguments of a spec. Raises ValueError, in one line, if they do not fit."""
    parameters = [
        spec.Parameter(f.name, f.default is dataclasses.MISSING, bool(f.kw_only), "str" in str(f.type))
        for f in dataclasses.fields(method)
    ]
    return method(**spec.bind(call, parameters))
