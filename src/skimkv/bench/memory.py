"""`skimkv bench memory`: what one layer's cache holds, has allocated, and adds to the peak of a process's memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..methods import parse
from ..stores.base import Shape
from .caches import empty_store
from .machine import Call, Cpu, nothing

BLOCK = 256  # tokens of a prompt that are read at once


def memory(
    shape: Shape, lengths: Sequence[int], methods: Sequence[str], dtype: torch.dtype, tick: Call = nothing
) -> dict[str, Any]:
    """Return a row for each method and length, each measured in a process of its own; all sizes are in bytes."""
    rows = []
    for method in methods:
        for n in lengths:
            case = json.dumps([method, shape, n, str(dtype).removeprefix("torch.")])
            command = [sys.executable, "-m", "skimkv.bench.memory", case]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ValueError(f"{method}, {n} tokens: {done.stderr.strip().splitlines()[-1]}")
            rows.append({"method": repr(parse(method)), "length": n, **json.loads(done.stdout)})
            tick()
    return {"machine": Cpu().name, "rows": rows}


def measure(method_spec: str, shape: Shape, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Grow a store to `tokens` tokens, as a model does that reads a prompt in blocks and decodes one token.

    peak_rss_growth is by how much the peak of this process's memory grew: a second call in a process sees less.
    """
    method, (B, H, G, D) = parse(method_spec), shape

    def draw(*size: int) -> Tensor:
        """Return normal numbers in the type of the cache."""
        return torch.randn(*size).to(dtype)

    def grow(n: int) -> Any:
        """Return a store that n tokens, in blocks, and one decode step have filled."""
        store = empty_store(method, shape, dtype)
        for start in range(0, n, BLOCK):
            m = min(BLOCK, n - start)
            method.prefill(store, draw(B, H, G, m, D), draw(B, H, m, D), draw(B, H, m, D), scale=D**-0.5)
        method.decode(store, draw(B, H, G, D), draw(B, H, D), draw(B, H, D), scale=D**-0.5)
        return store

    grow(BLOCK + 44)  # so that what every process needs once is there already
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = grow(tokens)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"nbytes": store.nbytes, "allocated": store.allocated, "peak_rss_growth": growth}


def main(case: str) -> None:
    """Measure one case, [method, shape, tokens, dtype] in JSON, and print its sizes as JSON."""
    spec, sizes, tokens, dtype_name = json.loads(case)
    print(json.dumps(measure(spec, Shape(*sizes), tokens, getattr(torch, dtype_name))))


if __name__ == "__main__":
    main(sys.argv[1])
