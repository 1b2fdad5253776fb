"""The C++ backend: decode steps, and tokens that enter a store. All is checked before a pointer is passed."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads

from ...stores.base import Store
from ...stores.blocks import Blocks
from ...stores.full import Full
from ...stores.slot_blocks import SlotBlocks
from ...stores.slots import Slots
from ..blocks import check_query, check_sinks, check_softcap
from ..step import KernelStep, SoftmaxOptions, Token
from . import library
from .memory import BlocksMemory, Memory, StoreMemory, dtype_number, expect, memory_of, placed_memory
from .structs import CTokens

TEMPERATURES = {"coverage": 0, "sqrt_d": 1, "sqrt_r": 2}
OUTSIDE, APPEND, SLOT = range(3)  # what becomes of the current token: nothing, it is appended, it takes a slot
TOKENS, SLOTS = (Full, Blocks), (Slots, SlotBlocks)


class Operation(NamedTuple):
    """A kernel. stores: what it reads. method: its number in skimkv.h for skimkv_step, which has our kernels.

    step: a function in the place of skimkv_step, for a kernel of one's own (library.step_function).
    """

    stores: tuple[type, ...]
    method: int = 0
    step: Callable[..., bytes | None] | None = None


# The operations of a KernelStep. A kernel of one's own is one more line.
OPERATIONS = {
    "dense": Operation(TOKENS, 0),
    "sparq": Operation(TOKENS, 1),
    "low_rank": Operation((Full,), 2),
    "top_k": Operation(TOKENS, 3),
    "oracle": Operation(TOKENS, 4),
    "skim": Operation(TOKENS, 5),
    "quest": Operation((Full,), 6),
    "ring_slots": Operation(SLOTS, 0),
    "scored_slots": Operation(SLOTS, 0),
    "tova": Operation((Slots,), 7),
}


class Prepared(NamedTuple):
    """What an operation was prepared for that somebody else runs."""

    step: KernelStep
    dtype: torch.dtype
    scale: float
    softcap: float | None


class CpuBackend:
    """The operations of C++, for float32, bfloat16 and float16 and D up to 576.

    A store owns its tokens (`Full`, `Slots`), or they are in blocks of a serving engine (`Blocks`, `SlotBlocks`).
    """

    name = "cpu"
    max_head_size = library.MAX_HEAD_SIZE

    def unavailable(self) -> str | None:
        """Why this backend cannot run here, or None if it can."""
        try:
            if library.isa() is None:
                name = os.environ.get("SKIMKV_ISA")
                return f"SKIMKV_ISA={name} is not available; this machine has {', '.join(library.isas())}"
        except ValueError as error:
            return str(error)
        return None

    def supports(self, step: KernelStep, store: Any) -> bool:
        """Whether there is a kernel for this step of this store."""
        operation = OPERATIONS.get(step.operation)
        if operation is None:
            return False
        if type(store) not in operation.stores and not isinstance(store, operation.stores):
            return False
        if not isinstance(store, Blocks):
            return True
        return (store.layout.mean or not step.mean_value) and (store.group_means or step.operation != "skim")

    def run(self, step: KernelStep, store: Any, q: Tensor, token: Token | None, softmax: SoftmaxOptions) -> Tensor:
        """Take the current token, and attend: q (B,H,G,D) -> (B,H,G,D) in q's dtype.

        Shapes and types are checked only if an argument differs from the last step's; numbers and addresses are checked
        at every step. Raises ValueError if anything does not fit.
        """
        memory = self._placed(step, store, 0 if token is None else 1)
        owns_tokens = type(memory) is StoreMemory
        k, v = token or (q, q)
        scale, softcap, sinks = softmax["scale"], softmax.get("softcap"), softmax.get("sinks")
        described = (
            step, token is None, scale, softcap, q.shape, q.stride(), q.dtype, q.is_cpu, k.shape, k.stride(), k.dtype,
            k.is_cpu, v.shape, v.stride(), v.dtype, v.is_cpu,
        )  # fmt: skip
        if described != memory.described:
            memory.described = None
            was = q, k, v
            q, token = _checked(store, q, token)
            k, v = token or (q, q)
            _describe(memory, step, q.stride(), None if token is None else k.stride(), q.dtype, scale, softcap)
            memory.described, memory.copies = described, any(a is not b for a, b in zip(was, (q, k, v), strict=True))
        elif memory.copies:
            q, token = _with_rows(q, token)
            k, v = token or (q, q)
        if sinks is None:
            memory.remove_sinks()
        else:
            if not owns_tokens:
                raise ValueError("attention sinks are not supported on blocks")
            check_sinks(sinks, store.shape.H, store.shape.G, store.device)
            sinks = sinks.contiguous()  # a name for it, so that the memory lives as long as the step
            memory.set_sinks(sinks.data_ptr())
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        new = (None, None) if token is None else (k.data_ptr(), v.data_ptr())
        error = memory.take(memory.address, q.data_ptr(), y.data_ptr(), *new, get_num_threads(), library.thread_pool())
        if error is not None:
            library.raise_error(error)
        if token is not None and owns_tokens:
            store.advance()
        return y

    def prepare(self, step: KernelStep, store: Any, dtype: torch.dtype, scale: float, softcap: float | None) -> int:
        """Make an operation of the next step, whose tensors are contiguous and of one type, and return its address.

        q, y (B,H,G,D) · k, v (B,H,D), whose addresses are set by who runs it, and who calls store.advance() after it.
        Raises ValueError as `run` does. Where the operation has a function of its own, it is not for skimkv_step: see
        `runs_in_library`.
        """
        memory = self._placed(step, store, 1)
        described = Prepared(step, dtype, scale, softcap)
        if described != memory.described:
            _, H, G, D = store.shape
            _describe(memory, step, (H * G * D, G * D, D, 1), (H * D, D, 1), dtype, scale, softcap)
            if dtype != store.dtype:
                raise ValueError(f"queries are {dtype}, and the cache is {store.dtype}")
            memory.described = described
        memory.remove_sinks()
        return memory.address

    def prepare_next(self, step: KernelStep, store: Any) -> bool:
        """Prepare the operation of the last `prepare` for the next token; False where it must be made anew."""
        memory = store.view
        if type(memory) is not StoreMemory or type(memory.described) is not Prepared or not memory.is_current(store):
            return False
        return memory.place(store, step.recent, 1)

    def runs_in_library(self, step: KernelStep) -> bool:
        """Whether skimkv_step has the kernel of this step."""
        return OPERATIONS[step.operation].step is None

    def append(self, store: Store, k: Tensor, v: Tensor) -> None:
        """Append one token per row: k, v (B,H,D). Raises ValueError if shapes or types do not fit."""
        k, v = k[:, :, None], v[:, :, None]
        if appends_blocks(store):
            assert isinstance(store, Full)
            append_block(store, k, v)
        else:
            store.append(k, v)

    def _placed(self, step: KernelStep, store: Any, more: int) -> Memory:
        """The store's memory, which knows where the next token goes."""
        if step.operation == "skim":
            if not store.group_means:
                raise ValueError("Skim needs a store with the means of its groups, and this one has none")
            if store.rows_read is None or (type(store) is not Full and store.rows_read.shape[0] != store.shape.B):
                store.rows_read = torch.zeros(store.shape.B, 2, dtype=torch.int64, device="cpu")
        return placed_memory(store, step.recent, more)


def _checked(store: Any, q: Tensor, token: Token | None) -> tuple[Tensor, Token | None]:
    """The query and the token as `_with_rows` gives them. Raises ValueError if they do not fit the store."""
    B, H, G, D = store.shape
    check_query(q, (B, H, G, D), torch.device("cpu"))
    q, token = _with_rows(q, token)
    dtype_number("a query", q.dtype)
    expect("q", q, (B, H, G, D), q.dtype)
    if token is not None:
        dtype = store.dtype if isinstance(store, Store) else store.example.dtype
        expect("k", token.k, (B, H, D), dtype)
        expect("v", token.v, (B, H, D), dtype)
    return q, token


def _with_rows(q: Tensor, token: Token | None) -> tuple[Tensor, Token | None]:
    """The query and the token with contiguous rows, and k and v of one form; copies where they must be."""
    if q.stride(-1) != 1:
        q = q.contiguous()
    if token is not None and (token.k.stride() != token.v.stride() or token.k.stride(-1) != 1):
        token = Token(token.k.contiguous(), token.v.contiguous())
    return q, token


def _describe(
    memory: Memory,
    step: KernelStep,
    q: Sequence[int],
    k: Sequence[int] | None,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
) -> None:
    """Fill in the operation apart from addresses: q, k are strides, and k None means that there is no token."""
    check_softcap(softcap)
    if step.temperature not in TEMPERATURES:
        raise ValueError(f"temperature = {step.temperature!r} must be one of {', '.join(TEMPERATURES)}")
    op, cache, operation = memory.op, memory.cache, OPERATIONS[step.operation]
    op.dtype, op.method, op.scale, op.softcap = dtype_number("a query", dtype), operation.method, scale, softcap or 0
    op.r, op.k, op.local, op.temperature = step.r, step.k, step.local, TEMPERATURES[step.temperature]
    op.use_mean = step.mean_value
    op.q_b, op.q_h, op.q_g, _ = q
    op.y_b, op.y_h, op.y_g = cache.H * cache.G * cache.D, cache.G * cache.D, cache.D
    memory.take = operation.step or library.library().skimkv_step
    op.keep = OUTSIDE
    if k is not None:
        op.n_b, op.n_h, _ = k
        op.keep = SLOT if Slots in operation.stores else APPEND


def appends_blocks(store: Store) -> bool:
    """Whether the library appends tokens to this store: one of all tokens, of a type and a head size that it has."""
    return type(store) is Full and store.dtype in library.DTYPES and store.shape.D <= library.MAX_HEAD_SIZE


def append_block(store: Full, k: Tensor, v: Tensor, pad: Sequence[int] | None = None) -> None:
    """Append a block of n tokens as `Store.append` does, without counting traffic: k, v (B,H,n,D).

    Raises ValueError if shapes, types or padding do not fit.
    """
    pads = store.validate(k, v, pad)
    B, n = store.shape.B, k.shape[2]
    new = [n - p for p in pads]
    longest = max(length + count for length, count in zip(store.lengths, new, strict=True))
    store.reserve(longest - max(store.lengths))  # before the memory is described, which it would change
    memory = placed_memory(store, more=longest - max(store.lengths))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    expect("k", k, (B, *k.shape[1:]), store.dtype)
    expect("v", v, (B, *k.shape[1:]), store.dtype)
    skip = (ctypes.c_int64 * B)(*pads)
    tokens = CTokens(memory.op.cache, k.data_ptr(), v.data_ptr(), n, *k.stride()[:3], *v.stride()[:3])
    tokens.skip = ctypes.addressof(skip)
    library.append(ctypes.addressof(tokens))
    store.advance_by(new)


def append_slots(store: Blocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write tokens to their slots in blocks: k, v (n,H,D), slots (n,) int64; a negative slot leaves its token out.

    Raises ValueError if shapes or types do not fit, or if a slot is beyond the blocks.
    """
    memory, n, layout = memory_of(store), slots.shape[0], store.layout
    assert isinstance(memory, BlocksMemory)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    slots = slots.contiguous()
    expect("k", k, (n, store.H, layout.D), layout.dtype)
    expect("v", v, (n, store.H, layout.D), layout.dtype)
    expect("slots", slots, (n,), torch.int64)
    tokens = CTokens(memory.op.cache, k.data_ptr(), v.data_ptr(), n)
    tokens.k_n, tokens.k_h, _ = k.stride()
    tokens.v_n, tokens.v_h, _ = v.stride()
    library.raise_error(
        library.library().skimkv_append_paged(
            ctypes.addressof(tokens), ctypes.addressof(memory.paged), slots.data_ptr(), *library.threads()
        )
    )


# The stages of a step in the order of skimkv.h: the query is loaded and its channels are chosen; positions are scored;
# some are chosen; their rows are requested from memory; they are attended to; the current token is put into the cache.
STAGES = ("prepare", "score", "choose", "fetch", "attend", "append")


@contextlib.contextmanager
def stage_times(store: Store) -> Iterator[dict[str, float]]:
    """Time the stages of the steps that this store takes inside the `with`, after it has taken one before.

    Yields a dictionary, which has the seconds of all threads together in every stage when the `with` ends. Raises
    ValueError if the last step of the store was not taken by an attention kernel of this backend.
    """
    memory = store.view
    if not isinstance(memory, StoreMemory) or memory.op.q is None:  # a prompt makes the memory, and no step
        raise ValueError(f"the stages of a step are known in the C++ attention kernels only; {store} had no step there")
    nanoseconds, seconds = (ctypes.c_int64 * len(STAGES))(), dict.fromkeys(STAGES, 0.0)
    memory.op.stage_ns = ctypes.addressof(nanoseconds)
    try:
        yield seconds
    finally:
        memory.op.stage_ns = None
        seconds.update((stage, ns / 1e9) for stage, ns in zip(STAGES, nanoseconds, strict=True))
