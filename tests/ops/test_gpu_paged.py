"""The Triton kernels on a serving engine's blocks: in any order of blocks they give what a store in one piece gives."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from skimkv import ops
from skimkv.methods import parse
from skimkv.ops import KernelStep
from skimkv.ops.gpu import run
from skimkv.ops.gpu.run import PagedBackend, append_slots
from skimkv.ops.gpu.tables import LEAST_PAGES, PAGE_TOKENS
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.row_blocks import RowBlockLayout, RowBlocks
from support.gpu import DEVICE, NAN_MEMORY, NEEDS_TRITON, recorded
from support.kernels import TYPES
from support.refusals import refuses

pytestmark = [NEEDS_TRITON, NAN_MEMORY]

D, SIZE, ROOM = 32, 512, LEAST_PAGES * PAGE_TOKENS  # the room of a small store, so that both take as many programs


def engine(lengths, dtype, channels, H=1, G=2, seed=0):
    """A backend, the blocks of a layer in random order, and a store that has the same tokens.

    What no token was written to is NaN, and beyond a row's length the table has numbers of no block.
    """
    layout = RowBlockLayout(SIZE, H, D, dtype, channels)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // SIZE) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    shape = len(order), H, SIZE, layout.bytes_per_token // dtype.itemsize
    blocks = RowBlocks(torch.full(shape, torch.nan, dtype=dtype, device=DEVICE), layout, G)
    backend = PagedBackend(layout, blocks.distance, len(lengths) + 1, ROOM // SIZE, DEVICE)
    table = torch.full((len(lengths), ROOM // SIZE), -7, dtype=torch.int32)
    store = Full(Shape(len(lengths), H, G, D), dtype, DEVICE, channels)
    k, v = torch.randn(2, len(lengths), H, max(lengths), D, generator=generator).to(dtype).to(DEVICE)
    store.append(k, v, [max(lengths) - n for n in lengths])
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        keys, values = (x[row, :, max(lengths) - n :].transpose(0, 1) for x in (k, v))
        write(blocks, keys, values, slots_of(table[row], torch.arange(n)))
    return SimpleNamespace(backend=backend, blocks=blocks, store=store, table=table.to(DEVICE), lengths=ints(lengths))


def write(blocks, k, v, slots):
    """Write tokens to their slots, by PyTorch: k, v (n,H,D)."""
    block, place = slots // SIZE, slots % SIZE
    blocks.k[block, :, place], blocks.v[block, :, place] = k, v
    if blocks.channels is not None:
        blocks.channels[block, :, :, place] = k


def ints(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def slots_of(blocks, at):
    return (blocks[at // SIZE].long() * SIZE + at % SIZE).to(DEVICE)


def query(store):
    return torch.randn(*store.shape, device=DEVICE).to(store.dtype)


def in_one_piece(spec, store, q, **softmax):
    with ops.backend("gpu"):
        return parse(spec).attend(store, q, None, **softmax)


def in_blocks(spec, e, q, **softmax):
    return e.backend.run(parse(spec).kernel(e.blocks), e.blocks, q, None, softmax)


SPARQ = "SparQ(r=8, k=24, mean_value=False)"
QUICK = [(SPARQ, "copy", "float32", [513, 70], 1)]
FORMS = [
    ("Dense()", "none", "float16", [513, 70], 1),
    ("Dense()", "copy", "float32", [1, 256, 513], 2),
    ("Dense()", "none", "bfloat16", [1025], 3),
    (SPARQ, "copy", "bfloat16", [600, 1, 300], 2),
    ("SparQ(r=8, k=24, mean_value=False)", "copy", "float16", [513], 5),  # step 1 on matrix units
    (SPARQ, "none", "float32", [513, 70], 2),
    ("TopK(k=30)", "none", "float32", [513, 70], 2),
    ("TopK(k=30, oracle=True)", "copy", "float16", [700, 20], 3),
]


@pytest.mark.parametrize(
    ("spec", "channels", "dtype", "lengths", "G"),
    [*QUICK, *(pytest.param(*form, marks=pytest.mark.slow) for form in FORMS)],
    ids=str,
)
def test_blocks_in_any_order_equal_a_store_in_one_piece(spec, channels, dtype, lengths, G):
    """Bit for bit: the programs are as many, and each reads the same numbers in the same order."""
    e = engine(lengths, TYPES[dtype], channels, H=2 if G == 2 else 1, G=G)
    q = query(e.store)
    e.backend.begin(e.table, e.lengths)
    options = {"scale": D**-0.5, "softcap": 20.0 if G == 2 else None}
    if G == 3:
        options["sinks"] = torch.randn(e.store.shape.H, G, device=DEVICE)
    y, expected = in_blocks(spec, e, q, **options), in_one_piece(spec, e.store, q, **options)
    assert expected.isfinite().all() and torch.equal(y, expected)
    assert e.backend.room == e.store.view.room


@pytest.mark.parametrize("channels", [pytest.param("none", marks=pytest.mark.slow), "copy"])
def test_tokens_are_written_to_their_slots_and_those_without_one_are_left_out(channels):
    """At the end of a block, at the beginning of another, and as a model gives them: parts of a larger tensor."""
    layout = RowBlockLayout(SIZE, 2, 48, torch.bfloat16, channels)
    memory = torch.zeros(3, 2, SIZE, layout.bytes_per_token // 2, dtype=torch.bfloat16, device=DEVICE)
    one, two = (RowBlocks(memory.clone(), layout, 1) for _ in range(2))
    k, v = torch.randn(9, 4, 48, device=DEVICE).bfloat16().split(2, dim=1)
    slots = torch.tensor([2 * SIZE - 2, 2 * SIZE - 1, 0, 1, -1, 2 * SIZE, 700, -1, 701], device=DEVICE)
    append_slots(one, k, v, slots)
    write(two, k[slots >= 0], v[slots >= 0], slots[slots >= 0])
    assert torch.equal(one.memory, two.memory) and one.memory.any()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["Dense()", SPARQ])
def test_a_replayed_step_is_right_for_the_next_batch(spec):
    """The tables are written in place: rows have changed places, one has grown, and one is without a request."""
    e = engine([513, 70, 20], torch.float32, "copy")
    q = query(e.store)
    expected = in_one_piece(spec, e.store, q, scale=0.2)
    e.backend.begin(e.table[[1, 2, 0]], ints([60, 0, 400]))
    in_blocks(spec, e, q, scale=0.2)  # makes the scratch memory
    y, again = recorded(lambda: in_blocks(spec, e, q, scale=0.2))
    e.backend.begin(e.table, e.lengths)
    again()
    assert torch.equal(y, expected)
    q.copy_(q.flip(0))
    e.backend.begin(e.table[[2, 1, 0], :2], ints([20, 0, 513]))  # a table of the blocks that are in use
    again()
    assert torch.equal(y[[2, 0]], expected[[0, 2]]) and y[1].isnan().all()


@pytest.mark.slow
def test_rows_that_share_their_scratch_memory_in_turns_give_the_same(monkeypatch):
    monkeypatch.setattr(run, "MOST_LOGITS", 2 * 2 * ROOM)  # two rows at a time
    e = engine([300, 20, 513], torch.float32, "copy")
    q = query(e.store)
    e.backend.begin(e.table, e.lengths)
    y = in_blocks(SPARQ, e, q, scale=0.2)
    torch.testing.assert_close(y, in_one_piece(SPARQ, e.store, q, scale=0.2))
    (logits,) = (buffer for name, buffer in e.backend.workspace.buffers.items() if name.endswith("logits"))
    assert logits.numel() < 3 * 2 * ROOM


@pytest.mark.slow
def test_one_table_serves_the_blocks_of_all_layers():
    """Layers differ in where their memory lies, here beside each other in one tensor."""
    e = engine([300], torch.float32, "none")
    both = torch.full((2, *e.blocks.memory.shape), torch.nan, device=DEVICE).transpose(0, 1)
    backend = PagedBackend(e.blocks.layout, both.stride(0) * 4, 1, ROOM // SIZE, DEVICE)
    backend.begin(e.table, e.lengths)
    q = query(e.store)
    for layer in (0, 1):
        both[:, layer] = e.blocks.memory * (layer + 1)
        blocks = RowBlocks(both[:, layer], e.blocks.layout, 2)
        y = backend.run(KernelStep("dense"), blocks, q / (layer + 1), None, {"scale": 0.2})
        torch.testing.assert_close(y, (layer + 1) * in_one_piece("Dense()", e.store, q, scale=0.2))


BAD = {
    "the table of blocks is (1, 17) for 1 rows; at most 2 rows of 16 fit": lambda e: e.backend.begin(
        torch.cat([e.table, e.table[:, :1]], 1), e.lengths
    ),
    "the table of blocks is (3, 16) for 3 rows; at most 2 rows of 16 fit": lambda e: e.backend.begin(
        e.table.expand(3, -1), e.lengths.expand(3)
    ),
    "the table of blocks is (1, 16) for 3 rows": lambda e: e.backend.begin(e.table, e.lengths.expand(3)),
    "lengths is torch.int64": lambda e: e.backend.begin(e.table, e.lengths.long()),
    "q is (2, 1, 2, 32)": lambda e: in_blocks("Dense()", e, torch.zeros(2, 1, 2, D, device=DEVICE), scale=1.0),
    "there is no GPU kernel for KernelStep(operation='sparq', r=8, k=24": lambda e: in_blocks(
        "SparQ(r=8, k=24, mean_value=True)", e, query(e.store), scale=1.0
    ),
    "r = 33 must be from 1 to 32": lambda e: in_blocks("SparQ(r=33, k=4)", e, query(e.store), scale=1.0),
    "k is (2, 1, 32)": lambda e: append_slots(
        e.blocks, *torch.zeros(2, 2, 1, D, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    ),
    "slots is torch.int32 on": lambda e: append_slots(e.blocks, *torch.zeros(2, 1, 1, D, device=DEVICE), ints([0])),
    "are not those of": lambda e: e.backend.run(
        KernelStep("dense"), RowBlocks(e.blocks.memory[::2], e.blocks.layout, 2), query(e.store), None, {"scale": 1.0}
    ),
    "the size must be a multiple of 256": lambda e: RowBlockLayout(300, 1, D, torch.float32).check(),
    "channels = 'int8' must be one of none, copy": lambda e: RowBlockLayout(512, 1, D, torch.float32, "int8").check(),
    "a block must be contiguous and have 1 KV heads, 512 tokens and 256 bytes": lambda e: RowBlocks(
        e.blocks.memory[..., 1:], e.blocks.layout, 2
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused_in_one_line(message):
    e = engine([20], torch.float32, "none")
    e.backend.begin(e.table, e.lengths)
    refuses(lambda: BAD[message](e), re.escape(message))
