"""Keys of a store of slots that are turned to other positions in C++ (csrc: skimkv_turn_keys)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import is_

import torch

from ...stores.rotation import KeyRotation
from ...stores.slots import Slots
from . import library
from .memory import StoreMemory, dtype_number, expect, memory_of
from .structs import CTurn


def takes(store: Slots) -> bool:
    """Whether the library turns keys of this store: as they are, of a type and a size that it has, by KeyRotation."""
    form, D = store.row_format, store.shape.D
    has_type = form.bits is None and store.dtype in library.DTYPES and D <= library.MAX_HEAD_SIZE
    return has_type and type(store.rotation) in (KeyRotation, type(None))


class _Turn:
    """The operation of a store's fixed keys, as long as its tensors stay. Raises ValueError if they do not fit it."""

    def __init__(self, store: Slots) -> None:
        B, H, _, D = store.shape
        keys, slots, rotation, n = store.fixed_k, store.k, store.rotation, store.fixed
        assert keys is not None and rotation is not None
        expect("fixed_k", keys, (B, H, n, D), store.dtype)
        expect("k", slots, (B, H, slots.shape[2], D), store.dtype)
        if slots.shape[2] < n:
            raise ValueError(f"k has {slots.shape[2]} slots; must be at least {n}, those of the fixed tokens")
        self.parts, self.rows = (keys, slots, rotation), (ctypes.c_int64 * B)()
        self.op = CTurn(
            keys.data_ptr(), slots.data_ptr(), *keys.stride()[:3], *slots.stride()[:3],
            moves=ctypes.addressof(self.rows), B=B, H=H, n=n, D=D, pairs=len(rotation.frequencies),
            interleaved=rotation.interleaved, dtype=dtype_number("a key", store.dtype),
        )  # fmt: skip
        self.address = ctypes.addressof(self.op)


def move_fixed(stores: Sequence[Slots]) -> None:
    """Turn the fixed keys of stores on, as `Slots.move_fixed` does, on the CPU.

    What layers of a model have in common is computed once. Angles are computed in float64, products in float32. Raises
    ValueError as `Slots.move_fixed`, and if a tensor does not fit its store.
    """
    turn_keys, before = library.library().skimkv_turn_keys, None
    for store in stores:
        rotation = store.rotation
        if before is None or rotation is not before.rotation or not store.moves_as(before):
            moves, before = store.moves(), store
            if moves and rotation is not None:
                cos, sin = rotation.factors(tuple(moves.get(b, 0) for b in range(store.shape.B)), torch.float32)
                at = cos.data_ptr(), sin.data_ptr()
        if not moves:
            continue
        turn = _turn_of(store)
        turn.op.cos, turn.op.sin = at
        turn.rows[:] = [b in moves for b in range(store.shape.B)]
        library.raise_error(turn_keys(turn.address))
        store.count_rows(2 * len(moves) * store.shape.H * store.fixed)


def _turn_of(store: Slots) -> _Turn:
    """The operation that turns the keys of a store, which its memory keeps."""
    memory = memory_of(store)
    assert isinstance(memory, StoreMemory)
    turn: _Turn | None = memory.turn
    if turn is None or not all(map(is_, turn.parts, (store.fixed_k, store.k, store.rotation))):
        turn = memory.turn = _Turn(store)
    return turn
