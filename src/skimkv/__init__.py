"""skimkv: decode with a small part of the key-value cache, and know exactly how many bytes it took.

Importing this package imports nothing else: each name below is looked up when it is first used, and only
attach, detach, Cache, load and quick_sampling need transformers. Every method (Dense, SparQ, H2O, ...) is a name
here too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .header import include_dir
    from .hf.attach import attach, detach
    from .hf.cache import Cache
    from .hf.load import load
    from .hf.token_loop import quick_sampling
    from .methods import METHODS, parse, register
    from .methods.base import Method, Traffic
    from .ops import backend
    from .stores.base import Shape

__version__ = "0.2.0"
__all__ = [
    "METHODS", "Cache", "Method", "Shape", "Traffic", "attach", "backend", "detach", "include_dir", "load", "parse",
    "quick_sampling", "register",
]  # fmt: skip

_HOME = {
    "Cache": "hf.cache", "attach": "hf.attach", "detach": "hf.attach", "load": "hf.load",
    "quick_sampling": "hf.token_loop",
    "Method": "methods.base", "Traffic": "methods.base", "parse": "methods", "register": "methods",
    "METHODS": "methods", "backend": "ops", "Shape": "stores.base", "include_dir": "header",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    if name[:1].isupper():
        methods: dict[str, Any] = import_module(".methods", __name__).METHODS
        if name in methods:
            return methods[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *import_module(".methods", __name__).METHODS])
