"""`skimkv bench generate`: a prompt and its answer through generate()."""

from __future__ import annotations

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
    """
    own_weights = None if model is None else check_loaded(context, model, weights, device)
    weights = check_weights(shape, weights) if model is None else weights
    pairs = pairs_of_tokens(length or GENERATED_LENGTHS)
    if min(new for _, new in pairs) < 2:
        raise ValueError("--length P+N: N must be at least 2, because the first new token is timed with the prompt")
    methods, machine = canonical_methods(method or METHODS), machine_to_measure(device, threads)
    from ...bench import figures
    from ...bench import generate as bench

    with progress() as tick:
        if model is None:
            result = bench.generate(machine, shape, layers or None, weights, pairs, methods, rounds, tick)
        else:
            subject = load_subject(model, own_weights, device)
            result = bench.time_generations(machine, subject, pairs, methods, rounds, tick)
            shape, weights = name_for_people(model), subject.weights
    rows = result["rows"]
    if plot is not None:
        figures.generate(rows, plot)
    if as_json:
        output.print_json(result)
        return
    columns = ["method", "prompt", "new", "first_ms", "first_speedup", "ms_later", "speedup_transformers"]
    shown = {**result, "rows": [{**row, "ms_later": row["ms"], "length": row["prompt"]} for row in rows]}
    layers_run = output.number(rows[0]["layers"], "layer")
    title = f"a prompt and its answer: {shape}, {layers_run}, {weights} weights"
    print_table(shown, [*columns, "tokens_per_s", "allocated"], title)
    print_kept({**shown, "peak": machine.peak}, rounds)
