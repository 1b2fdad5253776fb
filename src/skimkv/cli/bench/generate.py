"""`skimkv bench generate`: a prompt and its answer through generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import output
from ..options import Device, Json, Plot
from .options import (
    METHODS,
    LoadedModel,
    Methods,
    ModelLayers,
    ModelShape,
    RandomWeights,
    Threads,
    canonical_methods,
    check_loaded,
    check_weights,
    lengths_option,
    load_subject,
    machine_to_measure,
    name_for_people,
    pairs_of_tokens,
    programs,
)
from .table import print_kept, print_table, progress

GENERATED_LENGTHS = ["4096+64"]


def generate(
    context: typer.Context,
    method: Methods = None,
    length: Annotated[list[str] | None, lengths_option(GENERATED_LENGTHS)] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times that everything is generated.")] = 3,
    threads: Threads = 0,
    model: LoadedModel = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="llama.cpp=PATH",
            help="Let a llama-bench read the same prompts of the same GGUF file, in turn with ours.",
        ),
    ] = None,
    shape: ModelShape = "smollm-135m",
    layers: ModelLayers = 8,
    weights: RandomWeights = "bfloat16",
    device: Device = "cpu",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time a prompt and its answer through generate(), for every method and for transformers alone.

    The model has random weights, or with --model its own, and the prompt is random. Every candidate runs what a user
    runs: `model.generate()`, for ours after `attach(model, method)`. All take turns, generation by generation. The time
    to the first token is that of the prompt; the memory is what the cache has allocated at the end.

    Example:

        skimkv bench generate --shape smollm-135m --layers 0 --length 4096+64 --method 'SparQ(r=16, k=128)'
        skimkv bench generate --model llama.gguf --length 4096+64
        skimkv bench generate --model llama.gguf --length 512+8 --against llama.cpp=bin/llama-bench
    """
    own_weights = None if model is None else check_loaded(context, model, weights, device)
    weights = check_weights(shape, weights) if model is None else weights
    pairs = pairs_of_tokens(length or GENERATED_LENGTHS)
    if min(new for _, new in pairs) < 2:
        raise ValueError("--length P+N: N must be at least 2, because the first new token is timed with the prompt")
    rival = None
    if against is not None:
        programs([against])
        kind, _, path = against.partition("=")
        if kind != "llama.cpp":
            raise ValueError(f"--against {against!r} must be llama.cpp=PATH, the path of a llama-bench")
        rival = Path(path)
    if rival is not None and (model is None or not model.endswith(".gguf")):
        raise ValueError("--against: give --model FILE.gguf as well, which both read")
    methods, machine = canonical_methods(method or METHODS), machine_to_measure(device, threads)
    from ...bench import figures
    from ...bench import generate as bench

    with progress() as tick:
        if model is None:
            result = bench.generate(machine, shape, layers or None, weights, pairs, methods, rounds, tick)
        else:
            subject = load_subject(model, own_weights, device)
            result = bench.time_generations(machine, subject, pairs, methods, rounds, tick, rival)
            shape, weights = name_for_people(model), subject.weights
    rows = result["rows"]
    if plot is not None:
        figures.generate([row for row in rows if row["ms"] is not None], plot)
    if as_json:
        output.print_json(result)
        return
    columns = ["method", "prompt", "new", "first_ms", "first_speedup", "ms_later", "speedup_transformers"]
    if rival is not None:
        columns.insert(5, "first_speedup_rival")
    shown = {**result, "rows": [{**row, "ms_later": row["ms"], "length": row["prompt"]} for row in rows]}
    layers_run = output.number(rows[0]["layers"], "layer")
    title = f"a prompt and its answer: {shape}, {layers_run}, {weights} weights"
    print_table(shown, [*columns, "tokens_per_s", "allocated"], title)
    print_kept({**shown, "peak": machine.peak}, rounds)
