"""`skimkv bench serve`: tokens per second of the largest batch whose caches fit into one memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .. import output
from ..options import Device, Json, Plot, methods_option, number_of_bytes, output_file, size_option
from .options import (
    ModelLayers,
    ModelShape,
    RandomWeights,
    Threads,
    canonical_methods,
    check_weights,
    lengths_option,
    machine_to_measure,
    pairs_of_tokens,
)
from .table import print_table, progress

# prompts and answers of H2O's table 2, 512 + 32, 512 and 1024 tokens, at a quarter
SERVED_LENGTHS = ["128+8", "128+128", "128+256"]


def serve(
    method: Annotated[
        list[str] | None, methods_option("H2O, LMInfinite and SubGen")
    ] = None,
    length: Annotated[list[str] | None, lengths_option(SERVED_LENGTHS)] = None,
    memory: Annotated[str, size_option("The memory that the caches of each method may take, such as 5M or 2G.")] = "5M",
    threads: Threads = 0,
    shape: ModelShape = "smollm-135m",
    layers: ModelLayers = 8,
    weights: RandomWeights = "bfloat16",
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        output_file("File of records (JSON Lines) to add to; what it holds already is not measured again."),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure the tokens per second of the largest batch whose caches fit into one memory, for every method.

    A cache that is smaller makes room for more sequences, which share the reading of the weights (H2O, tables 2, 3 and
    7). Beside it stands the latency at dense attention's batch. All candidates take turns, step by step. Without
    --method, each method keeps a fifth of all tokens of a sequence, H2O with and without 4-bit rows.

    Example:

        skimkv bench serve --length 128+256 --memory 5M --out serve.jsonl --plot serve.png
    """
    weights = check_weights(shape, weights)
    methods, machine = canonical_methods(method or []), machine_to_measure(device, threads)
    from ...bench import figures
    from ...bench.serve import serve as measure

    lengths = pairs_of_tokens(length or SERVED_LENGTHS)
    limit = number_of_bytes("--memory", memory)
    with progress() as tick:
        result = measure(machine, shape, layers or None, weights, lengths, limit, methods, out, tick)
    if plot is not None:
        figures.serve(result["rows"], plot)
    if as_json:
        output.print_json(result)
        return
    columns = [
        "method",
        "prompt",
        "new",
        "batch",
        "tokens_per_s",
        "ratio_dense",
        "ms_per_step",
        "prompt_s",
        "latency_s",
    ]
    rows, model = result["rows"], f"{shape}, {output.number(result['rows'][0]['layers'], 'layer')}, {weights} weights"
    for equal, title in (("memory", f"caches within {limit:,} bytes"), ("batch", "dense attention's batch")):
        part = {**result, "rows": [row for row in rows if row["equal"] == equal]}
        more = ["allocated"] if equal == "memory" else []
        print_table(part, [*columns, *more], f"{title}: {model}")
