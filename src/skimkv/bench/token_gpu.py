"""`skimkv bench token --device cuda`: a whole token of a model on a GPU, as generate() would wait for it.

What a token costs besides its attention is measured as a token after a few: `ms_weights`; the rest is `ms_attention`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from ..hf.attach import attach, detach
from ..methods import Dense, parse
from ..methods.base import Method
from .attention import Call
from .cuda import Cuda, bandwidth
from .token import build, heads, prefilled, step, weight_bytes

FEW = 16  # tokens in the cache of a token that is all weights
WARM = 4  # tokens before the clock: compiled, made room for, captured
BACKEND: bool | str = True  # of attach(compile=...)


def token(
    shape: str,
    layers: int | None,
    weights: str,
    lengths: Sequence[int],
    methods: Sequence[str],
    rounds: int = 9,
    tick: Call = lambda: None,
    machine: Any = None,
    compile: bool = False,
) -> dict[str, Any]:
    """The rows of the JSON contract; `transformers` is the library's own cache and attention, not compiled.

    speedup_dense: over our dense attention, measured; speedup_allowed: what weights and caches, in bytes, allow.
    """
    machine = machine or Cuda()
    if weights == "int8":
        raise ValueError("--weights int8: there is no GPU kernel for them; bfloat16 or float32")
    model = build(shape, layers, weights, max(lengths), machine.device)
    count, read = len(model.model.layers), weight_bytes(model)
    peak, rows = bandwidth(machine), []
    specs = [None, *dict.fromkeys([Dense(), *map(parse, methods)])]

    def timed(method: Method | None, n: int, rounds: int) -> list[float]:
        if method is None:
            detach(model)
        else:
            attach(model, method, compile=compile and BACKEND)
            need, free = method.bound(n, heads(model), model.dtype) * count, machine.free()
            if need > free:
                raise ValueError(f"{method} after {n} tokens: {need / 1e9:.1f} GB of caches, {free / 1e9:.1f} GB free")
        cache, seconds = prefilled(model, method, n), []
        for i in range(WARM + rounds):
            machine.wait()
            start = time.perf_counter()
            step(model, cache)
            machine.wait()
            if i >= WARM:
                seconds.append(time.perf_counter() - start)
            tick()
        return seconds

    for n in lengths:
        found = {spec: (timed(spec, n, rounds), statistics.median(timed(spec, FEW, rounds))) for spec in specs}
        dense = statistics.median(found[Dense()][0])
        for spec, (seconds, few) in found.items():
            after = n + WARM + rounds // 2
            moved, whole = ((m or Dense()).traffic(after, heads(model), model.dtype).bytes for m in (spec, None))
            ms = statistics.median(seconds)
            rows.append(
                {
                    "method": repr(spec) if spec else "transformers", "shape": shape, "layers": count,
                    "weights": weights, "length": n, "compiled": compile and spec is not None, "ms": ms * 1e3,
                    "ms_min": min(seconds) * 1e3, "ms_max": max(seconds) * 1e3, "ms_attention": (ms - few) * 1e3,
                    "ms_weights": few * 1e3, "floor_ms": (moved * count + read) / peak * 1e3,
                    "cache_bytes": moved * count, "weight_bytes": read, "speedup_dense": dense / ms,
                    "speedup_allowed": (whole * count + read) / (moved * count + read),
                    "speedup_transformers": statistics.median(found[None][0]) / ms,
                }
            )  # fmt: skip
    detach(model)
    return {"machine": machine.name, "peak_gb_per_s": peak / 1e9, "peak": "copy", "rows": rows}
