"""The kernels on a serving engine's blocks: in any order of blocks they give what they give on a cache in one piece."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import Dense, parse
from skimkv.ops.cpu.run import append_slots
from skimkv.stores.base import Shape
from skimkv.stores.blocks import BlockLayout, Blocks
from skimkv.stores.full import Full
from support.kernels import NATIVE
from support.steps import by_kernel

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

H, G, D = 2, 2, 32
LENGTHS = [1, 256, 511, 512, 513, 1100]


def tokens(n, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, H, D, generator=generator).to(dtype)


def engine(dtype, channels, lengths, size=512, seed=0, pieces=(1000, 700, 1), mean=False, group_means=False, kv=None):
    """Blocks in random order, filled piece by piece as prompts in chunks are, and the tokens of every row."""
    layout = BlockLayout(size, D, dtype, channels, mean, group_means, kv)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    memory = torch.full(
        (len(order), H, size, layout.bytes_per_token // dtype.itemsize), torch.nan, dtype=dtype
    )  # what no token was written to must not be read
    blocks = Blocks(memory, layout, H, G)
    blocks.table = torch.full((len(lengths), max(counts) + 1), -7, dtype=torch.int32)
    rows = []
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks.table[row, :count], order = order[:count], order[count:]
        k, v = tokens(n, dtype, 100 + row)
        start = 0
        for piece in [*pieces, n]:
            write(blocks, row, k, v, start, min(start + piece, n))
            start += piece
        rows.append((k, v))
    blocks.lengths = torch.tensor(lengths)
    return blocks, rows


def write(blocks, row, k, v, start, stop):
    """Write the tokens start .. stop-1 of a row to its blocks."""
    size, at = blocks.layout.tokens, torch.arange(start, max(start, stop))
    append_slots(blocks, k[start:stop], v[start:stop], blocks.table[row, at // size].long() * size + at % size)


def in_one_piece(dtype, channels, k, v, **parts):
    store = Full(Shape(1, H, G, D), dtype, channels=channels, **parts)
    store.append(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    return store


SPECS = ("Dense()", "SparQ(r=8, k=24, mean_value=False)", "TopK(k=30)", "TopK(k=30, oracle=True)")
FORMS = [(s, "copy", torch.float32, threads) for s in SPECS for threads in (1, 2)] + [
    (SPECS[0], "copy", torch.bfloat16, 1),
    (SPECS[1], "copy", torch.float16, 1),
    (SPECS[1], "int8", torch.float32, 2),
    (SPECS[1], "int4", torch.bfloat16, 1),
    ("SparQ(r=8, k=24, mean_value=True)", "copy", torch.float32, 2),
    ("SparQ(r=8, k=24, mean_value=True)", "int8", torch.bfloat16, 1),
    *((f"Skim(k={k}, r=8)", "int4", torch.float32, threads) for k in (4, 40) for threads in (1, 2)),
    ("Skim(k=12, r=8)", "int4", torch.bfloat16, 2),
    ("Skim(k=12, r=8)", "int4", torch.float16, 1),
    ("Dense(kv='int8')", "none", torch.bfloat16, 2),
    ("TopK(k=30, kv='int4')", "none", torch.float32, 1),
    ("SparQ(r=8, k=24, kv='int8', mean_value=False)", "copy", torch.float32, 1),
    ("SparQ(r=8, k=24, kv='int4', mean_value=True)", "int4", torch.float32, 2),
    ("Skim(k=12, r=8, kv='int4')", "int4", torch.float32, 2),
]


@pytest.mark.parametrize(("spec", "channels", "dtype", "threads"), FORMS, ids=str)
def test_blocks_in_any_order_equal_a_cache_in_one_piece(spec, channels, dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    method, skim = parse(spec), spec.startswith("Skim")
    parts = {"mean": skim or "mean_value=True" in spec, "group_means": skim, "kv": method.kv}
    blocks, rows = engine(dtype, channels, LENGTHS, **parts)
    q = torch.randn(len(LENGTHS), H, G, D).to(dtype)
    y = by_kernel(method, blocks, q, scale=D**-0.5, softcap=20.0)
    for row, (k, v) in enumerate(rows):
        store = in_one_piece(dtype, channels, k, v, **parts)
        expected = by_kernel(method, store, q[row : row + 1], scale=D**-0.5, softcap=20.0)
        if skim:
            assert torch.equal(blocks.rows_read[row], store.rows_read[0])
        torch.testing.assert_close(y[row : row + 1], expected, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("channels", ["copy", "int8", "int4"])
def test_the_parts_of_a_block_are_those_of_a_store(channels):
    blocks, rows = engine(torch.float32, channels, [1100], pieces=(1, 300, 256))
    store = in_one_piece(torch.float32, channels, *rows[0])
    table, parts = blocks.table[0, :3].long(), blocks.parts
    for name, part in (("k", parts.k), ("v", parts.v)):
        expected = getattr(store.chunks[0], name)[0, :, :1100]
        assert torch.equal(part[table].transpose(0, 1).flatten(1, 2)[:, :1100], expected)
    channel_major = parts.channels[table].permute(1, 2, 0, 3).flatten(2)[..., :1100]
    assert torch.equal(channel_major, rows[0][0].permute(1, 2, 0))
    if channels != "copy":
        codes = parts.codes[table].permute(1, 2, 0, 3).flatten(2)
        full = 1024 * store.bits // 8
        assert torch.equal(codes[..., :full], store.chunks[0].index[0, ..., :full])
        scales = parts.scales[table].permute(1, 0, 4, 3, 2).flatten(1, 2)  # (H,groups,2,D)
        assert torch.equal(scales[:, :4], store.chunks[0].scale[0, :, :4])


@pytest.mark.parametrize("kv", [None, "int8", "int4"])
def test_the_rows_of_a_sequence_are_those_of_a_store(kv):
    blocks, rows = engine(torch.bfloat16, "int4", [700, 1100], kv=kv)
    for row, n in ((1, 1100), (1, 513), (0, 512)):
        store = in_one_piece(torch.bfloat16, "int4", *(x[:n] for x in rows[row]), kv=kv)
        for mine, theirs in zip(blocks.rows(blocks.table[row], n), store.history(slice(0, 1)), strict=True):
            assert torch.equal(mine, theirs)


def test_only_the_chosen_rows_and_channels_are_read():
    blocks, _ = engine(torch.float32, "copy", [1100, 300])
    r, k = 4, 20
    q = torch.zeros(2, H, G, D)
    q[..., 8 : 8 + r] = torch.randn(2, H, G, r)
    method = parse(f"SparQ(r={r}, k={k}, local=5, mean_value=False)")
    before = by_kernel(method, blocks, q, scale=D**-0.5)
    blocks.parts.channels[:, :, :8] = torch.nan
    blocks.parts.channels[:, :, 8 + r :] = torch.nan
    logits = q[:, :, 0, 8 : 8 + r]
    for row, n in enumerate(blocks.lengths.tolist()):  # rows of K and V that no query of the group may choose
        at = torch.arange(n - 1 - 5)
        number, place = blocks.table[row, at // 512].long(), at % 512
        for h in range(H):
            keys = blocks.parts.channels[number, h, 8 : 8 + r, place]
            scores = (q[row, h, :, 8 : 8 + r] @ keys.T * D**-0.5).softmax(-1).sum(0)
            left_out = scores.argsort()[: n // 4]
            blocks.parts.k[number[left_out], h, place[left_out]] = torch.nan
            blocks.parts.v[number[left_out], h, place[left_out]] = torch.nan
    assert torch.isfinite(logits).all()
    assert torch.equal(by_kernel(method, blocks, q, scale=D**-0.5), before)


def test_a_token_without_a_slot_is_left_out_and_a_block_may_be_written_again():
    blocks, rows = engine(torch.float32, "int8", [700])
    q = torch.randn(1, H, G, D)
    method = parse("SparQ(r=8, k=24, channels='int8', mean_value=False)")
    before = by_kernel(method, blocks, q, scale=1.0)
    k, v = rows[0]
    at = torch.arange(512, 700)
    slots = blocks.table[0, at // 512].long() * 512 + at % 512
    append_slots(
        blocks, torch.cat([k[512:], k[:9]]), torch.cat([v[512:], v[:9]]), torch.cat([slots, -torch.ones(9).long()])
    )
    assert torch.equal(by_kernel(method, blocks, q, scale=1.0), before)


def test_a_mean_grows_token_by_token_and_begins_anew_with_its_block():
    blocks, ((k, v),) = engine(torch.float32, "copy", [700], mean=True)
    method, q = parse("SparQ(r=8, k=24, mean_value=True)"), torch.randn(1, H, G, D)
    before = by_kernel(method, blocks, q, scale=1.0)
    at = torch.arange(700)
    slots = blocks.table[0, at // 512].long() * 512 + at % 512
    with pytest.raises(ValueError, match="a token does not follow the last one of its block"):
        append_slots(blocks, k[600:], v[600:], slots[600:])
    append_slots(blocks, k[512:], v[512:], slots[512:])  # the block again from its beginning, as after a preemption
    assert torch.equal(by_kernel(method, blocks, q, scale=1.0), before)
    blocks.lengths = torch.tensor([699])
    with pytest.raises(ValueError, match="not of the tokens that the row has"):
        by_kernel(method, blocks, q, scale=1.0)


@pytest.mark.parametrize("kv", [None, "int8"])
def test_skim_reads_the_same_rows_whenever_the_tokens_of_a_block_came(kv):
    """The first group of a block has codes by the last scale of another one: they are made step by step, and anew."""
    parts, method, q = {"mean": True, "group_means": True, "kv": kv}, parse("Skim(k=6, r=8)"), torch.randn(2, H, G, D)
    blocks, _ = engine(torch.float32, "int4", [700, 900], **parts)

    def check(n, k, v):
        blocks.lengths[0] = n
        y = by_kernel(method, blocks, q, scale=D**-0.5)
        store = in_one_piece(torch.float32, "int4", k[:n], v[:n], **parts)
        torch.testing.assert_close(y[:1], by_kernel(method, store, q[:1], scale=D**-0.5), rtol=1e-5, atol=1e-6)
        assert torch.equal(blocks.rows_read[0], store.rows_read[0]) and store.rows_read[0, 0] < H * n
        codes = blocks.parts.codes[blocks.table[0, : -(-n // 512)].long()].permute(1, 2, 0, 3).flatten(2)
        used = n // 128 * 64  # whole parts of 128 tokens
        assert torch.equal(codes[..., :used], store.chunks[0].index[0, ..., :used])

    for seed in (5, 6):  # two requests after each other in the same blocks
        k, v = tokens(900, torch.float32, seed)
        start = 0
        for n in (512, 513, 514, 600, 601, 767, 768, 769, 900):
            write(blocks, 0, k, v, start, n)
            check(n, k, v)
            start = n
    k, v = (torch.cat([x[:520], x.flip(0)]) for x in (k, v))  # a block that is filled again without a step between
    write(blocks, 0, k, v, 512, 650)
    check(650, k, v)


BAD = {
    "a block that does not exist": (lambda b: b.table.fill_(99), "names a block that does not exist"),
    "a row without tokens": (lambda b: b.lengths.zero_(), "a row has no token"),
    "more tokens than blocks": (lambda b: b.lengths.fill_(9999), "more tokens than its part of the table"),
    "more tokens than a narrow table": (
        lambda b: (b.lengths.fill_(600), setattr(b, "table", b.table.repeat(1, 4)[:, :1])),
        "more tokens than its part of the table",
    ),
    "lengths of another type": (lambda b: setattr(b, "lengths", b.lengths.int()), "lengths is torch.int32"),
    "a table of another type": (lambda b: setattr(b, "table", b.table.long()), "table is torch.int64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_are_refused(name):
    blocks, _ = engine(torch.float32, "copy", [300])
    change, message = BAD[name]
    change(blocks)
    with pytest.raises(ValueError, match=message):
        by_kernel(Dense(), blocks, torch.zeros(1, H, G, D), scale=1.0)


def test_bad_slots_and_layouts_are_refused():
    blocks, (row,) = engine(torch.float32, "copy", [300])
    with pytest.raises(ValueError, match="a slot is beyond the blocks"):
        append_slots(blocks, row[0][:1], row[1][:1], torch.tensor([512 * 99]))
    with pytest.raises(ValueError, match="use_mean needs blocks with a mean"):
        by_kernel(parse("SparQ(r=8, k=24, mean_value=True)"), blocks, torch.zeros(1, H, G, D), scale=1.0)
    for layout, message in (
        (BlockLayout(300, D, torch.float32, "copy"), "multiple of 256"),
        (BlockLayout(512, 40, torch.float32, "copy"), "multiples of 32"),
        (BlockLayout(512, D, torch.float32, "none"), "channels = 'none'"),
        (BlockLayout(512, D, torch.float32, "int8"), "bytes for each token"),
        (BlockLayout(512, D, torch.float32, "int8", True, True), "an index of 4 bits and a mean"),
    ):
        with pytest.raises(ValueError, match=message):
            Blocks(torch.zeros(2, H, 512, 3 * D), layout, H, G)


def test_many_rows_share_the_scratch_memory_in_turns(monkeypatch):
    """Rows whose scratch memory together is larger than what is taken at once give what each gives alone."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    blocks, _ = engine(torch.bfloat16, "copy", [5000] * 16, size=1024)
    q = torch.randn(16, H, G, D).bfloat16()
    method = parse("TopK(k=50)")
    y = by_kernel(method, blocks, q, scale=0.3)
    table = blocks.table
    for row in (0, 9, 15):
        blocks.lengths, blocks.table = torch.tensor([5000]), table[row : row + 1].contiguous()
        alone = by_kernel(method, blocks, q[row : row + 1], scale=0.3)
        assert torch.equal(alone, y[row : row + 1])
