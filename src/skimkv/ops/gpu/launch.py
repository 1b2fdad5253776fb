"""How the GPU kernels are launched, and what is checked before."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from ...stores.base import Store

try:
    import triton
    import triton.language as tl
except ImportError as error:  # an extra: without it unavailable() says so, and nothing else here is called
    missing: str | None = f"Triton cannot be imported ({error}); pip install 'skimkv[gpu]'"
else:
    missing = None

# BN, BK: positions at a time; TILE: numbers a threshold is sought in; STAGES: loads under way; fill: programs wanted on
# each multiprocessor; heads: KV heads of the batch per multiprocessor from which on step 1 of SparQ is not split.
LAUNCH: dict[str, dict[str, int]] = {
    "dense": {"BN": 64, "STAGES": 3, "num_warps": 4, "fill": 4},
    "scores": {"BN": 256, "STAGES": 3, "num_warps": 4, "fill": 4},
    "coded": {"BN": 128, "STAGES": 3, "num_warps": 4, "fill": 4},
    "choose": {"TILE": 4096, "BK": 64, "num_warps": 8, "fill": 4},
    "fused": {"BN": 128, "STAGES": 4, "TILE": 2048, "BK": 32, "num_warps": 4, "heads": 2},
    "stream": {"BN": 64, "num_warps": 4, "fill": 2},
    "slots": {"BN": 64, "STAGES": 3, "TILE": 1024, "num_warps": 4, "fill": 2},
}


def interpreted() -> bool:
    """True where Triton's interpreter runs the kernels, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs(store: Store) -> bool:
    return store.device.type == "cuda" or interpreted()


def types() -> dict[torch.dtype, Any]:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def check(store: Store, **given: tuple[Tensor, tuple[int, ...]]) -> None:
    """ValueError unless there is a kernel for this store, and these tensors have these shapes."""
    D, known = store.shape.D, "float32, bfloat16 and float16"
    if D % 16 or D > 256:
        raise ValueError(f"no GPU kernel for D = {D}; it must be a multiple of 16 up to 256")
    if store.dtype not in types():
        raise ValueError(f"no GPU kernel for a cache of {store.dtype}; there are some for {known}")
    if store.form.bits:
        raise ValueError(f"no GPU kernel for K and V in {store.form.bits} bits; SKIMKV_BACKEND=ref decodes it")
    if not runs(store):
        raise ValueError(f"the GPU kernels cannot run on {store.device}; TRITON_INTERPRET=1 interprets them there")
    for name, (t, shape) in given.items():
        if t.shape != shape or t.device != store.device:
            raise ValueError(f"{name} is {tuple(t.shape)} on {t.device}; must be {shape} on {store.device}")
        if name == "q" and t.dtype not in types():
            raise ValueError(f"no GPU kernel for a query of {t.dtype}; there are some for {known}")
        if name != "q" and t.dtype != store.dtype:
            raise ValueError(f"{name} is {t.dtype}; the store holds {store.dtype}")


def dot(store: Store, q: Tensor) -> Any:
    """The type that tensor cores multiply in: the cache's if the query has it too, else float32.

    The interpreter has no product of bfloat16.
    """
    half = store.dtype == q.dtype and not (interpreted() and q.dtype == torch.bfloat16)
    return types()[q.dtype] if half else tl.float32


@functools.cache
def units(place: torch.device) -> int:
    """Multiprocessors; a few where the kernels are interpreted."""
    return 3 if place.type == "cpu" else torch.cuda.get_device_properties(place).multi_processor_count


def splits(store: Store, most: int, fill: int) -> int:
    """Programs per row and KV head that fill the card, at most `most`: no length enters, so a graph can hold them."""
    B, H, _, _ = store.shape
    return max(1, min(most, units(store.device) * fill // (B * H), 64))


def block(positions: int, row: int, least: int = 16) -> int:
    """Fewer positions at a time where each takes more than the 256 bytes the numbers above are meant for."""
    return max(least, min(positions, positions * 256 // row))


def pad(n: int, least: int = 16) -> int:
    """The next power of two: tensor cores take 16 rows and more."""
    return max(least, int(triton.next_power_of_2(n)))
