"""The first keys of a store of slots, turned to other positions: C++ against PyTorch in float64."""

import copy
import ctypes
from typing import Any

import pytest
import torch

import skimkv
from skimkv import ops
from skimkv.ops.cpu import library
from skimkv.ops.cpu.structs import CTurn
from skimkv.stores.base import Shape
from skimkv.stores.rotation import KeyRotation
from skimkv.stores.slots import Slots
from skimkv.stores.text_positions import Run

D = 24
ROTATIONS = {
    "halves": KeyRotation.llama(D),
    "neighbours": KeyRotation([1, 0.1, 0.01], interleaved=True),
    "no positions": KeyRotation([]),
}


def filled(dtype: torch.dtype, rotation: KeyRotation) -> Slots:
    """Three rows: one that has dropped 3 tokens, one that has dropped none, and one that has dropped 9."""
    draw = torch.Generator().manual_seed(0)
    store: Slots = skimkv.parse("LMInfinite(k=8, initial=3, positions='cache')").store(Shape(3, 2, 1, D), dtype)
    store.rotation = rotation
    k, v = (torch.randn(3, 2, 17, D, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    store.append(k, v, pad=[6, 9, 0])
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROTATIONS)
def test_as_in_float64(name: str, dtype: torch.dtype) -> None:
    store, exact = filled(dtype, ROTATIONS[name]), filled(torch.float64, ROTATIONS[name])
    exact.k, exact.fixed_k = store.k.double(), None if store.fixed_k is None else store.fixed_k.double()
    before = store.k.clone()
    with skimkv.backend("cpu"):
        ops.move_fixed([store])
    exact.move_fixed()
    assert store.moves() == {0: 3, 2: 9}
    expected = exact.k.to(dtype)
    torch.testing.assert_close(store.k, expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    assert torch.equal(store.k[1], before[1]) and torch.equal(store.k[:, :, 3:], before[:, :, 3:])
    if name != "no positions":
        assert not torch.equal(store.k[0, :, :3], before[0, :, :3])


def test_several_stores_at_once_are_each_turned_as_alone() -> None:
    """Whether they have dropped as many tokens at the same positions or others, and some have no key to turn."""
    rotation, other = ROTATIONS["halves"], ROTATIONS["neighbours"]
    stores = [filled(torch.float32, rotation) for _ in range(4)] + [filled(torch.float32, other)]
    plain = skimkv.parse("LMInfinite(k=8, initial=3)").store(Shape(3, 2, 1, D), torch.float32)
    k, v = torch.randn(2, 3, 2, 17, D, generator=torch.Generator().manual_seed(1))
    plain.append(k, v)
    token = k[:, :, :1], v[:, :, :1]
    stores[1].append(*token)
    stores[2].places.place(0, 6, [Run(0, 40, 1)], [])
    stores.insert(2, plain)
    alone = copy.deepcopy(stores)
    with skimkv.backend("cpu"):
        ops.move_fixed(stores)
        for store in alone:
            ops.move_fixed([store])
    for store, expected in zip(stores, alone, strict=True):
        assert torch.equal(store.k, expected.k) and store.bytes == expected.bytes
    turned = [store.moves() for store in stores]
    assert turned == [{0: 3, 2: 9}, {0: 4, 1: 1, 2: 10}, {}, {0: 37, 2: 9}, {0: 3, 2: 9}, {0: 3, 2: 9}]
    assert not torch.equal(stores[0].k, stores[3].k) and not torch.equal(stores[0].k, stores[5].k)


def test_the_reference_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ValueError("the native library is not in this installation")

    store, expected = (filled(torch.float32, ROTATIONS["halves"]) for _ in range(2))
    expected.move_fixed()
    monkeypatch.setattr(library, "library", missing)
    with skimkv.backend("ref"):
        ops.move_fixed([store])
    assert torch.equal(store.k, expected.k)


def test_a_gradient_passes_through_turned_keys() -> None:
    store = filled(torch.float32, ROTATIONS["halves"])
    assert store.fixed_k is not None
    store.k, store.fixed_k = store.k.clone(), store.fixed_k.clone().requires_grad_()
    ops.move_fixed([store])
    store.k.sum().backward()
    assert store.fixed_k.grad is not None and store.fixed_k.grad[0].abs().sum() > 0


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"H": 0}, "B, H and n must be at least 1"),
    "head size": ({"D": 577}, "D must be from 1 to 576"),
    "pairs": ({"pairs": 3}, "pairs must be from 0 to D/2"),
    "type": ({"dtype": 7}, "dtype is unknown"),
    "pointer": ({"cos": None}, "source, to, moves, cos or sin is NULL"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_library_refuses(name: str) -> None:
    values, message = MISTAKES[name]
    x, moves = torch.zeros(16), (ctypes.c_int64 * 1)(1)
    op = CTurn(
        source=x.data_ptr(), to=x.data_ptr() + 16, cos=x.data_ptr(), sin=x.data_ptr(), moves=ctypes.addressof(moves),
        B=1, H=1, n=1, D=4, pairs=2, dtype=0,
    )  # fmt: skip
    assert library.library().skimkv_turn_keys(ctypes.addressof(op)) is None
    for field, value in values.items():
        setattr(op, field, value)
    error = library.library().skimkv_turn_keys(ctypes.addressof(op))
    assert error is not None and error.decode() == message
