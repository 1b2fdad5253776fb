"""The instruction sets of this machine, to run a test on each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from skimkv import ops
from skimkv.ops.cpu import library as native

NATIVE = ops.select_backend("cpu")[0] == "cpu"
ISAS = [*(native.isas() if NATIVE else []), "ref"]


@contextlib.contextmanager
def on(isa: str) -> Iterator[None]:
    """Everything inside runs on one instruction set, or in the reference."""
    if isa == "ref":
        with ops.backend("ref"):
            yield
        return
    native.force(isa)
    try:
        yield
    finally:
        native.force(None)
