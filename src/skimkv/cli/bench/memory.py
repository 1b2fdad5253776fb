"""`skimkv bench memory`: what the cache of one layer holds, has allocated, and adds to a process."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import options, output
from . import common
from .table import print_table, progress

MEMORY_METHODS = [*common.METHODS, "H2O(k=512)", "LMInfinite(k=512)", "SubGen(k=448, recent=64)"]
MemoryMethods = Annotated[list[str] | None, options.methods_option("Dense, SparQ, H2O, LMInfinite and SubGen")]


def memory(
    method: MemoryMethods = None,
    length: common.Lengths = None,
    heads: Annotated[int, typer.Option(min=1, rich_help_panel=options.MODEL_OPTIONS, help="Number of KV heads.")] = 8,
    group: Annotated[
        int,
        typer.Option(min=1, rich_help_panel=options.MODEL_OPTIONS, help="Number of query heads that share a KV head."),
    ] = 4,
    head_dim: common.HeadDim = 64,
    dtype: common.CacheDtype = "bfloat16",
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Measure what the cache of one layer holds, has allocated, and adds to the peak memory of a process.

    Each size is measured in a process of its own, which reads a prompt in blocks and decodes one token.

    Example:

        skimkv bench memory --length 32768 --method 'Dense()' --method 'H2O(k=512)'
    """
    from ...bench import figures
    from ...bench.memory import memory as measure
    from ...stores.base import Shape

    methods, shape = common.canonical_methods(method or MEMORY_METHODS), Shape(1, heads, group, head_dim)
    with progress() as tick:
        result = measure(shape, length or common.LENGTHS, methods, options.torch_dtype(dtype), tick)
    setting = f"{heads} KV heads of {head_dim}, {dtype}"
    if plot is not None:
        figures.memory(result["rows"], plot, setting)
    if as_json:
        output.print_json(result)
        return
    columns = ["method", "length", "nbytes", "allocated", "peak_rss_growth"]
    print_table(result, columns, f"memory of a layer: {setting}")
