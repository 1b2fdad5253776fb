"""Slots in an engine's blocks: each request has one, in any order, and decodes as if it had a store of its own."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import parse
from skimkv.ops import Token
from skimkv.stores.base import Shape
from skimkv.stores.slot_blocks import SlotBlocks, bytes_of_slot
from support.kernels import NATIVE
from support.steps import by_kernel

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

H, G, D = 2, 2, 32
PROMPTS = [1, 7, 20, 57]
ROW = Shape(1, H, G, D)


def blocks_of(method, dtype=torch.float32, more_tokens=3):
    """Nine blocks of somewhat more slots than the method needs; what was not written must not be read."""
    example = method.store(ROW, dtype)
    memory = torch.empty(9, H, example.capacity + more_tokens, bytes_of_slot(example), dtype=torch.uint8).fill_(255)
    return SlotBlocks(memory.view(dtype), lambda: method.store(ROW, dtype))


def tokens(n, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, H, G, n, D, generator=generator).to(dtype)
    k, v = torch.randn(2, 1, H, n, D, generator=generator).to(dtype)
    return q, k, v


SPECS = [
    "H2O(k=20)", "H2O(k=20, local=0)", "H2O(k=20, kv='int4')", "LMInfinite(k=20, initial=4)", "SubGen(k=12, recent=8)",
    "LMInfinite(k=20, initial=4, kv='int8')", "Strided(k=20)",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("threads", [1, 2])
def test_requests_decode_as_with_stores_of_their_own(spec, dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    method, options = parse(spec), {"scale": D**-0.5, "softcap": 20.0}
    blocks = blocks_of(method, dtype)
    numbers, own = [5, 0, 8, 3], []
    for row, n in enumerate(PROMPTS):
        own.append(method.store(ROW, dtype))
        prompt = tokens(n, dtype, row)
        expected = method.prefill(own[row], *prompt, **options)
        assert torch.equal(method.prefill(blocks.new_request(numbers[row]), *prompt, **options), expected)
    for step in range(24):  # rows change their places, and some are left out
        rows = [row for row in (2, 0, 3, 1) if (row + step) % 3]
        blocks.lengths = [own[row].lengths[0] for row in rows]
        blocks.numbers = torch.tensor([numbers[row] for row in rows], dtype=torch.int32)
        new = [tokens(1, dtype, 1000 + 10 * step + row) for row in rows]
        q, k, v = (torch.cat([x[i] for x in new]).squeeze(-2) for i in range(3))
        y = by_kernel(method, blocks, q, Token(k, v), **options)
        for i, row in enumerate(rows):
            at = slice(i, i + 1)
            assert torch.equal(y[at], by_kernel(method, own[row], q[at], Token(k[at], v[at]), **options)), (
                step,
                row,
            )
    for row, store in enumerate(own):
        for part, expected in zip(blocks.parts, (store.k, store.v, store.score, store.pos), strict=True):
            filled = slice(0, store.filled[0])
            assert part is None or torch.equal(part[numbers[row], :, filled], expected[0, :, filled])


def test_a_block_of_a_finished_request_serves_the_next_one():
    method = parse("H2O(k=8, local=2)")
    blocks, options = blocks_of(method), {"scale": 1.0}
    method.prefill(blocks.new_request(2), *tokens(30, torch.float32, 0), **options)
    method.prefill(blocks.new_request(2), *tokens(3, torch.float32, 1), **options)
    own = method.store(ROW, torch.float32)
    method.prefill(own, *tokens(3, torch.float32, 1), **options)
    for step in range(9):
        q, k, v = (x.squeeze(-2) for x in tokens(1, torch.float32, 9 + step))
        blocks.lengths, blocks.numbers = own.lengths, torch.tensor([2], dtype=torch.int32)
        y = by_kernel(method, blocks, q, Token(k, v), **options)
        assert torch.equal(y, by_kernel(method, own, q, Token(k, v), **options))


def test_what_does_not_fit_is_refused():
    method = parse("H2O(k=20)")
    blocks = blocks_of(method)
    q, k, v = (x.squeeze(-2) for x in tokens(1, torch.float32, 0))
    with pytest.raises(ValueError, match="block 9 is not one of 9"):
        blocks.new_request(9)
    blocks.lengths, blocks.numbers = [3], torch.tensor([9], dtype=torch.int32)
    with pytest.raises(ValueError, match="the table names a block that does not exist"):
        by_kernel(method, blocks, q, Token(k, v), scale=1.0)
    blocks.numbers = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k is torch.float16"):
        by_kernel(method, blocks, q, Token(k.half(), v.half()), scale=1.0)
    with pytest.raises(ValueError, match="sinks are not supported"):
        by_kernel(method, blocks, q, Token(k, v), scale=1.0, sinks=torch.zeros(H, G))
    with pytest.raises(ValueError, match="have 20 slots of 264 bytes"):
        SlotBlocks(torch.empty(3, H, 20, 65), lambda: method.store(ROW, torch.float32))
    with pytest.raises(ValueError, match="only an empty store of a fixed number of slots"):
        parse("StreamingLLM(k=20)").store(ROW, torch.float32).use_memory(k, v, None, None)
