"""`skimkv bench generate`: a prompt and an answer through generate(), ours beside transformers alone.

The model has the shape of a real one and random weights, or is loaded with its own; the prompt is random. Every
candidate runs what a user runs: `model.generate(...)`, for ours after `attach(model, method)`. A streamer notes when
each token arrives. All candidates take turns, generation by generation, each round in another order; the first round
does not count.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..hf.attach import attach
from ..methods import Dense, parse
from ..methods.base import Method
from .machine import Call, Machine, nothing
from .models import Decoder, Subject, allocated_bytes, check_tokens, layer_count
from .rivals import Rival, prompt_programs
from .rounds import take_turns


class TokenClock(BaseStreamer):
    """A streamer of generate() that notes when the prompt was given to it, and when each new token was chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note the time: of the prompt before it is read, then of every token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token has been noted."""


class Generation:
    """One way to generate, by a method or for None by transformers alone, and what its runs took.

    first: seconds from the call to the first token of every run. following: seconds of a later token, on average.
    allocated: bytes that the cache had allocated at the end.
    """

    def __init__(self, model: Any, method: Method | None, prompt: Tensor, new: int) -> None:
        self.model, self.method, self.prompt, self.new = model, method, prompt, new
        self.first, self.following, self.allocated = list[float](), list[float](), 0

    def run(self) -> None:
        """Generate all tokens once."""
        clock, start = TokenClock(), time.perf_counter()
        with contextlib.nullcontext() if self.method is None else attach(self.model, self.method, fast=True):
            result = self.model.generate(
                self.prompt, max_new_tokens=self.new, do_sample=False, streamer=clock, return_dict_in_generate=True
            )
        _, first, *_, last = clock.times
        self.first.append(first - start)
        self.following.append((last - first) / (self.new - 1))
        self.allocated = allocated_bytes(result.past_key_values)


def time_generations(
    machine: Machine,
    subject: Subject,
    lengths: Sequence[tuple[int, int]],
    methods: Sequence[str],
    rounds: int = 3,
    tick: Call = nothing,
    against: Path | None = None,
) -> dict[str, Any]:
    """Return the rows of the JSON contract, for each (prompt, new) tokens: transformers, our Dense, and the methods.

    first_ms: from the call to the first token. ms: of a later token, in the mean of a run. Both are medians of the runs
    that count (kept, as in `attention`). tokens_per_s: new tokens over the time of prompt and answer. first_speedup and
    speedup_transformers: how many times as fast as transformers' the first token and a later one are.
    against: a llama-bench, which reads a prompt of as many tokens of the same GGUF file, in turn with ours. Its rows
    have that time as first_ms, and no later tokens; that of the better setting has `better`, and `first_speedup_rival`
    of every row says how many times as fast as that it is.
    There are two new tokens or more. Raises ValueError if the model has too few positions, or if a cache does not fit
    in memory.
    """
    model: Any = subject.model
    model.generation_config.eos_token_id = None  # no token ends the text: all are timed
    check_tokens(model, max(map(sum, lengths)))
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if subject.is_loaded:
        vocabulary = max(1, vocabulary * 3 // 4)  # tokens that stand for images and the like are the last ones
    specs = [None, *dict.fromkeys([Dense(), *map(parse, methods)])]
    rows: list[dict[str, Any]] = []
    for prompt, new in lengths:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (1, prompt), generator=draw).to(machine.device)
        for decoder in (Decoder(spec, prompt + new) for spec in specs):
            need, free = decoder.bound(model), machine.free_bytes()
            if need > free:
                of = f"{decoder.name} with {prompt + new} tokens"
                raise ValueError(f"{of}: {need / 1e9:.1f} GB of caches, {free / 1e9:.1f} GB free")
        runs = {Decoder(spec, prompt).name: Generation(model, spec, ids, new) for spec in specs}
        setting = {
            "shape": subject.shape, "layers": layer_count(model), "weights": subject.weights, "prompt": prompt,
            "new": new,
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            rivals = []
            if against is not None:
                assert subject.file is not None
                programs = prompt_programs(subject.file, prompt, machine.threads, rounds + 1)
                rivals = [stack.enter_context(Rival(against, program)) for program in programs]
            rows += [{**row, **setting} for row in _rows(machine, runs, new, rounds, tick, rivals)]
    waits_known = machine.waiting_clock() is not None
    return {"machine": machine.name, "rows": rows, "waits_known": waits_known}


def _rows(
    machine: Machine,
    runs: dict[str, Generation],
    new: int,
    rounds: int,
    tick: Call,
    rivals: Sequence[Rival] = (),
) -> list[dict[str, Any]]:
    """Run all candidates in turn, and return their rows."""
    for rival in rivals:
        rival.start()
    calls: dict[str, Call] = {name: run.run for name, run in runs.items()}
    calls |= {rival.name: cast(Call, rival.take_turn) for rival in rivals}
    clock = machine.waiting_clock()
    whole = take_turns(calls, rounds, lambda _, call: machine.wall_seconds(call), tick=tick, waited=clock)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        kept = whole.kept(name)
        first, later = (
            [1e3 * s for s, keep in zip(seconds[-rounds:], kept, strict=True) if keep]
            for seconds in (run.first, run.following)
        )
        rows.append({
            "method": name, "kept": whole.undelayed(name), "allocated": run.allocated,
            "first_ms": statistics.median(first), "first_ms_min": min(first), "first_ms_max": max(first),
            "ms": statistics.median(later), "ms_min": min(later), "ms_max": max(later),
            "tokens_per_s": new / whole.ms(name) * 1e3,
        })  # fmt: skip
    plain = rows[0]
    for row in rows:
        row["first_speedup"] = plain["first_ms"] / row["first_ms"]
        row["speedup_transformers"] = plain["ms"] / row["ms"]
    return _beside(rows, rivals, rounds) if rivals else rows


def _beside(rows: list[dict[str, Any]], rivals: Sequence[Rival], rounds: int) -> list[dict[str, Any]]:
    """Our rows, and those of programs that read the same prompt in turn with ours."""
    theirs: list[dict[str, Any]] = []
    for rival in rivals:
        first = [1e3 * seconds for seconds in rival.finish()[-rounds:]]
        times = {"first_ms": statistics.median(first), "first_ms_min": min(first), "first_ms_max": max(first)}
        theirs.append({**dict.fromkeys(rows[0]), **times, "method": rival.name, "kept": rounds})
    best = min(theirs, key=lambda row: row["first_ms"])
    plain = rows[0]["first_ms"]
    for row in theirs:
        row["first_speedup"] = plain / row["first_ms"]
    both = [*rows, *theirs]
    return [{**row, "first_speedup_rival": best["first_ms"] / row["first_ms"], "better": row is best} for row in both]
