"""The steps of `steps`, always by the methods' own algorithms in PyTorch, and the pieces that tests look at."""

from __future__ import annotations

from functools import partial

from skimkv.methods.sparq import inverse_temperature, top_channels
from skimkv.ops.blocks import apply_softcap, attend_rows, choose_positions

from . import steps

dense, sparq, topk, lowrank, slots = (
    partial(step, reference=True) for step in (steps.dense, steps.sparq, steps.topk, steps.lowrank, steps.slots)
)


def append(store, k, v):
    store.append_token(k, v)


__all__ = [
    "append", "apply_softcap", "attend_rows", "choose_positions", "dense", "inverse_temperature", "lowrank", "slots",
    "sparq", "top_channels", "topk",
]  # fmt: skip
