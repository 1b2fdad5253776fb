"""`skimkv bench generate`: a prompt and its answer through generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options, output
from . import common
from .table import print_kept, print_table, progress

GENERATED_LENGTHS = ["4096+64"]


def generate(
    context: typer.Context,
    method: common.Methods = None,
    length: Annotated[list[str] | None, common.lengths_option(GENERATED_LENGTHS)] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times that everything is generated.")] = 3,
    threads: common.Threads = 0,
    model: common.LoadedModel = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="llama.cpp=PATH",
            help="Let a llama-bench read the same prompts of the same GGUF file, in turn with ours.",
        ),
    ] = None,
    shape: common.ModelShape = "smollm-135m",
    layers: common.ModelLayers = 8,
    weights: common.RandomWeights = "bfloat16",
    device: options.Device = "cpu",
    plot: options.Plot = None,
    as_json: options.Json = False,
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
    make_subject = common.subject_maker(context, model, shape, layers, weights, device)
    pairs = common.pairs_of_tokens(length or GENERATED_LENGTHS)
    if min(new for _, new in pairs) < 2:
        raise ValueError("--length P+N: N must be at least 2, because the first new token is timed with the prompt")
    rival = None
    if against is not None:
        common.check_program(against)
        kind, _, path = against.partition("=")
        if kind != "llama.cpp":
            raise ValueError(f"--against {against!r} must be llama.cpp=PATH, the path of a llama-bench")
        rival = Path(path)
    if rival is not None and (model is None or not model.endswith(".gguf")):
        raise ValueError("--against: give --model FILE.gguf as well, which both read")
    methods, machine = common.canonical_methods(method or common.METHODS), common.machine_to_measure(device, threads)
    from ...bench import figures
    from ...bench import generate as bench

    with progress() as tick:
        subject = make_subject(machine, max(map(sum, pairs)))
        result = bench.time_generations(machine, subject, pairs, methods, rounds, tick, rival)
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
    title = f"a prompt and its answer: {common.name_for_people(subject.shape)}, {layers_run}, {subject.weights} weights"
    print_table(shown, [*columns, "tokens_per_s", "allocated"], title)
    print_kept({**shown, "peak": machine.peak}, rounds)
