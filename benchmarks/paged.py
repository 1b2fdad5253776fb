"""Time decode steps on a serving engine's blocks beside the same steps on caches in one piece.

    python benchmarks/paged.py --tokens 16384 --out paged.json

The blocks of a row lie in memory in random order. All candidates of one row of the table take turns, step by step, and
what they read before is driven out of the processor's caches. It prints one line of JSON for each method: the median
milliseconds of a step in one piece and in blocks of each size, and the ratios.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skimkv.bench.machine import Cpu
from skimkv.bench.rounds import take_turns
from skimkv.methods import parse
from skimkv.methods.slots import SlotMethod
from skimkv.ops import Token
from skimkv.ops.cpu.run import CpuBackend, append_slots
from skimkv.stores.base import Shape
from skimkv.stores.blocks import BlockLayout, Blocks
from skimkv.stores.memory import request_huge_pages
from skimkv.stores.slot_blocks import SlotBlocks, bytes_of_slot

METHODS = ["Dense()", "SparQ(r=32, k=128)", "SparQ(r=32, k=128, channels='int8')", "TopK(k=128)", "H2O(k=1024)"]


def in_blocks(
    spec: str, shape: Shape, dtype: torch.dtype, size: int, k: torch.Tensor, v: torch.Tensor, huge_pages: bool
) -> Blocks:
    """Blocks of `size` tokens in random order, with the tokens k, v (B,H,n,D)."""
    B, H, G, D = shape
    method, n = parse(spec), k.shape[2]
    layout = BlockLayout(size, D, dtype, getattr(method, "channels", "copy"))
    each = -(-n // size)
    memory = torch.zeros(B * each, H, size, layout.bytes_per_token // dtype.itemsize, dtype=dtype)
    if huge_pages:
        request_huge_pages(memory)
    blocks = Blocks(memory, layout, H, G)
    blocks.table = torch.randperm(B * each, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(B, each)
    blocks.lengths = torch.full((B,), n)
    at = torch.arange(n)
    for b in range(B):
        slots = blocks.table[b, at // size].long() * size + at % size
        append_slots(blocks, k[b].transpose(0, 1), v[b].transpose(0, 1), slots)
    return blocks


def calls(
    spec: str, shape: Shape, dtype: torch.dtype, tokens: int, sizes: list[int]
) -> dict[str, Callable[[], object]]:
    """A step of the method on a cache in one piece, and on blocks of each size; of a budget, on one block a row."""
    B, H, G, D = shape
    method, draw = parse(spec), torch.Generator().manual_seed(1)
    n = method.slots(tokens) if isinstance(method, SlotMethod) else tokens
    q = torch.randn(shape, generator=draw).to(dtype)
    k, v = torch.randn(2, B, H, n, D, generator=draw).to(dtype)
    whole = method.store(shape, dtype)

    def run(store: Any, token: Token | None) -> object:
        kernel = method.kernel(store)
        assert kernel is not None, spec
        return CpuBackend().run(kernel, store, q, token, {"scale": D**-0.5})

    if not isinstance(method, SlotMethod):
        whole.append(k, v)
        found: dict[str, Callable[[], object]] = {"contiguous": lambda: run(whole, None)}
        for size in sizes:
            for huge_pages in (False, True):
                blocks = in_blocks(spec, shape, dtype, size, k, v, huge_pages)
                name = f"blocks of {size}" + (" in huge pages" if huge_pages else "")
                found[name] = lambda blocks=blocks: run(blocks, None)
        return found
    new = Token(*torch.randn(2, B, H, D, generator=draw).to(dtype))
    method.prefill(whole, torch.randn(B, H, G, n, D, generator=draw).to(dtype), k, v, scale=D**-0.5)
    one = shape._replace(B=1)
    width = bytes_of_slot(method.store(one, dtype)) // dtype.itemsize
    slots = SlotBlocks(torch.zeros(B, H, n, width, dtype=dtype), lambda: method.store(one, dtype))
    order = torch.randperm(B, generator=draw)
    for b, number in enumerate(order.tolist()):
        for part, own in zip(slots.parts, (whole.k, whole.v, whole.score, whole.pos), strict=True):
            if part is not None:
                part[number] = own[b]
    slots.numbers, slots.lengths = order.to(torch.int32), [n] * B

    def step() -> object:
        """One step on the blocks, after which every row has a token more."""
        slots.lengths = [length + 1 for length in slots.lengths]
        return run(slots, new)

    return {
        "contiguous": lambda: run(whole, new),
        "one block a row": step,
    }


def main() -> None:
    """Run the comparison that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="Tokens of each row.")
    parser.add_argument("--batch", type=int, default=1, help="Rows of the batch.")
    parser.add_argument("--heads", type=int, default=8, help="KV heads.")
    parser.add_argument("--group", type=int, default=4, help="Query heads that share a KV head.")
    parser.add_argument("--head-dim", type=int, default=128, help="Numbers of a head.")
    parser.add_argument("--block", type=int, action="append", help="Tokens of a block; may be given several times.")
    parser.add_argument("--method", action="append", help="A method; may be given several times.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of a step.")
    parser.add_argument("--rounds", type=int, default=15, help="Timed steps of each candidate.")
    parser.add_argument("--out", type=Path, help="File of JSON Lines to write.")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine, lines = Cpu(), []
    shape = Shape(args.batch, args.heads, args.group, args.head_dim)
    for spec in args.method or METHODS:
        steps = calls(spec, shape, torch.bfloat16, args.tokens, args.block or [256, 1024])
        with torch.inference_mode():
            times = take_turns(
                steps, args.rounds, lambda name, call: machine.wall_seconds(call), lambda name: machine.between_calls()
            )
        row = {
            "method": spec, "tokens": args.tokens, **shape._asdict(), "threads": args.threads,
            "ms": {name: round(times.ms(name), 3) for name in steps},
            "ratio": {name: round(times.ratio(name, "contiguous"), 2) for name in steps},
        }  # fmt: skip
        lines.append(json.dumps(row))
        print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
