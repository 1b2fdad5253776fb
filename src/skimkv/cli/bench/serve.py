"""`skimkv bench serve`: tokens per second of the largest batch whose caches fit into one memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options, output
from . import common
from .table import print_table, progress

# prompts and answers of H2O's table 2, 512 + 32, 512 and 1024 tokens, at a quarter
SERVED_LENGTHS = ["128+8", "128+128", "128+256"]
MEMORY = {"transformers": "5M", "vllm": "20M"}  # by engine; blocks of vLLM are coarser
REQUESTS = 32
# By engine, and by what the rows have in common: the title of the table, and its columns after method and lengths
_TIMES = ["batch", "tokens_per_s", "ratio_dense", "ms_per_step", "prompt_s", "latency_s"]
_OF_VLLM = ["batch", "tokens_per_s", "ratio_stock", "latency_s"]
TABLES = {
    "transformers": {
        "memory": ("caches within {memory:,} bytes", [*_TIMES, "allocated"]),
        "batch": ("dense attention's batch", _TIMES),
    },
    "vllm": {
        "memory": ("{requests} requests, caches of {memory:,} bytes", ["blocks", "block_size", *_OF_VLLM]),
        "batch": ("as many requests as have room in every engine", _OF_VLLM),
    },
}


def serve(
    method: Annotated[
        list[str] | None, options.methods_option("H2O, LMInfinite and SubGen")
    ] = None,
    length: Annotated[list[str] | None, common.lengths_option(SERVED_LENGTHS)] = None,
    memory: Annotated[
        str | None,
        options.size_option(
            "The memory that the caches of each method may take, such as 5M or 2G.",
            default=f"{MEMORY['transformers']}, with vLLM {MEMORY['vllm']}",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who runs the model: transformers, or vllm, which is also measured as it is, without skimkv.",
        ),
    ] = "transformers",
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=f"{REQUESTS}",
            help="Number of requests that every engine gets, with --engine vllm; it decides how many decode at once.",
        ),
    ] = None,
    threads: common.Threads = 0,
    shape: common.ModelShape = "smollm-135m",
    layers: common.ModelLayers = 8,
    weights: common.RandomWeights = "bfloat16",
    device: options.Device = "cpu",
    out: Annotated[
        Path | None,
        options.path_option(
            "--out", options.check_writable,
            "File of records (JSON Lines) to add to; what it holds already is not measured again.",
        ),
    ] = None,
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Measure the tokens per second of the largest batch whose caches fit into the same memory, for every method.

    A smaller cache makes room for more sequences, which share the reading of the weights (H2O, tables 2, 3 and 7). The
    command also measures the latency of every method at the batch size of dense attention. All candidates take turns,
    step by step. Without --method, each method keeps a fifth of all tokens of a sequence, and H2O runs twice: with its
    rows in the model's type, and in 4 bits.

    With --engine vllm all engines get the same requests and the same bytes of cache: vLLM as it is, and vLLM with each
    method. The latency is that of as many requests as have room in every engine.

    Example:

        skimkv bench serve --length 128+256 --memory 5M --out serve.jsonl --plot serve.png
        skimkv bench serve --engine vllm --length 128+256 --requests 16
    """
    from ...bench.served_rows import Comparisons, check_engine

    weights = common.check_weights(shape, weights)
    check_engine(engine, weights)
    if requests is not None and engine != "vllm":
        raise ValueError(f"--requests {requests}: only --engine vllm takes it; transformers decodes one batch")
    lengths = common.pairs_of_tokens(length or SERVED_LENGTHS)
    limit = options.number_of_bytes("--memory", memory or MEMORY[engine])
    methods, machine = common.canonical_methods(method or []), common.machine_to_measure(device, threads)
    from ...bench import figures, serve_vllm
    from ...bench import serve as serve_transformers

    asked = Comparisons(shape, layers or None, weights, lengths, limit, methods, out)
    with progress() as tick:
        if engine == "vllm":
            result = serve_vllm.serve(machine, asked, requests or REQUESTS, tick)
        else:
            result = serve_transformers.serve(machine, asked, tick)
    if plot is not None:
        figures.serve(result["rows"], plot)
    if as_json:
        output.print_json(result)
        return
    for equal, (title, columns) in TABLES[engine].items():
        rows = [row for row in result["rows"] if row["equal"] == equal]
        layers_run = output.number(rows[0]["layers"], "layer")
        title = f"{title.format(**rows[0])}: {shape}, {layers_run}, {weights} weights"
        print_table({**result, "rows": rows}, ["method", "prompt", "new", *columns], title)
