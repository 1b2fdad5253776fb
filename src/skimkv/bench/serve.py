"""`skimkv bench serve`: memory that a method frees becomes batch, and batch becomes tokens per second (H2O, table 2).

Every candidate has the same memory for its caches and decodes the largest batch that fits into it; besides, all decode
dense attention's batch, for the latency. The model has the shape of a real one and random weights, prompts are random.
All candidates take turns, step by step: each reads its prompts, then each generates its first token, and so on. Tokens
per second are generated tokens over the time of prompt and generation, as in the paper.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from .. import ops
from ..hf.cache import Cache
from ..methods import Dense, parse
from ..methods.base import Method
from ..stores.base import Shape
from .caches import empty_store
from .machine import Call, Machine, nothing
from .models import allocated_bytes, cache_shape, name_of, random_llama
from .own_layers import sharing_copy
from .served_rows import BATCH, MEMORY, TRANSFORMERS, Comparisons, Records, Setting

WARM_UP = 3  # new tokens before the clock, after the same prompts: libraries prepare themselves for every size
SHARE = 0.2  # of all tokens of a sequence: the budget in the paper's tables


class Candidate(NamedTuple):
    """One way to decode `batch` sequences: by a method, or for None as transformers does."""

    method: Method | None
    batch: int


class Models(NamedTuple):
    """One model twice, over the same weights: with our attention functions, and as transformers has it."""

    ours: LlamaForCausalLM
    plain: LlamaForCausalLM


class Sequences:
    """A batch of sequences that a candidate generates, and the seconds that it took.

    prompts: tokens (B,n).
    """

    def __init__(self, machine: Machine, models: Models, candidate: Candidate, prompts: Tensor) -> None:
        self.machine, self.tokens = machine, prompts
        self.model = models.plain if candidate.method is None else models.ours
        self.cache: Any = DynamicCache(config=self.model.config)
        if candidate.method is not None:
            self.cache = Cache(self.model, candidate.method)
        self.prompt_seconds, self.step_seconds = 0.0, 0.0

    def read_prompts(self) -> None:
        """Read all prompts, and choose the first new token of each."""
        self.prompt_seconds += self._forward()

    def step(self) -> None:
        """Choose the next token of every sequence."""
        self.step_seconds += self._forward()

    def _forward(self) -> float:
        """Run the model on the tokens that it has not read, and return the seconds."""

        def forward() -> None:
            """Take one step of every sequence, and choose its next token."""
            with torch.inference_mode():
                logits = self.model(self.tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
                self.tokens = logits[:, -1].argmax(-1, keepdim=True)

        return self.machine.wall_seconds(forward)

    @property
    def seconds(self) -> float:
        """The seconds of prompts and steps."""
        return self.prompt_seconds + self.step_seconds


def sequence_bytes(method: Method | None, shape: Shape, dtype: torch.dtype, prompt: int, new: int) -> int:
    """Return the bytes that one layer's cache of one sequence holds at the end: it is filled with random tokens.

    For None: the rows of all tokens, which is what transformers keeps.
    """
    _, H, G, D = shape
    if method is None:
        return 2 * H * D * (prompt + new) * dtype.itemsize
    store, draw = empty_store(method, Shape(1, H, G, D), dtype), torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        """Return normal numbers in the type of the cache."""
        return torch.randn(*size, generator=draw).to(dtype)

    with torch.inference_mode():
        method.prefill(store, random(1, H, G, prompt, D), random(1, H, prompt, D), random(1, H, prompt, D), scale=1.0)
        for _ in range(new):
            method.decode(store, random(1, H, G, D), random(1, H, D), random(1, H, D), scale=1.0)
    return store.nbytes


def default_methods(prompt: int, new: int) -> list[str]:
    """Return the specs of the paper's comparison: a fifth of all tokens of a sequence as budget."""
    k = max(8, round(SHARE * (prompt + new)))
    h2o = f"H2O(k={k}, local={k // 2}"
    window = f"LMInfinite(k={k}, initial={min(16, k // 4)})"
    return [f"{h2o})", f"{h2o}, kv='int4')", window, f"SubGen(k={k - k // 4}, recent={k // 4})"]


def serve(machine: Machine, asked: Comparisons, tick: Call = nothing) -> dict[str, Any]:
    """Return the rows of the JSON contract: for each (prompt, new), all candidates at one memory, and at one batch.

    Raises ValueError if shape or weights are unknown, or if a candidate has no room for one sequence.
    """
    shape, layers, weights, lengths, memory, methods, records = asked
    rows: list[dict[str, Any]] = []
    with Records(records, ops.select_backend(machine.device.type)[0]) as kept:
        plain = random_llama(shape, layers, weights, max(map(sum, lengths)), machine.device)
        models = Models(sharing_copy(plain), plain)
        for (prompt, new), equal in itertools.product(lengths, (MEMORY, BATCH)):
            specs = [None, Dense(), *map(parse, methods or default_methods(prompt, new))]
            setting = Setting(shape, len(models.plain.model.layers), weights, prompt, new, memory, equal, TRANSFORMERS)
            chosen = _candidates(models.plain, setting, list(dict.fromkeys(specs)))
            fields = setting._asdict() | {"machine": machine.name}
            wanted = [{**fields, "method": name_of(one.method), "batch": one.batch} for one in chosen]
            rows += kept.rows(wanted, partial(_measure, machine, models, setting, chosen, tick))
    return {"machine": machine.name, "rows": rows}


def _candidates(model: LlamaForCausalLM, setting: Setting, specs: Sequence[Method | None]) -> list[Candidate]:
    """The candidates with their batches. Raises ValueError if one sequence takes more than the memory."""
    shape, batches = cache_shape(model), dict[Method | None, int]()
    for method in specs:
        size = setting.layers * sequence_bytes(method, shape, model.dtype, setting.prompt, setting.new)
        batches[method] = setting.memory // size
        if size > setting.memory:
            raise ValueError(
                f"{name_of(method)}: one sequence takes {size:,} bytes, and the limit is {setting.memory:,}"
            )
    dense = batches[Dense()]
    return [Candidate(method, batches[method] if setting.equal == MEMORY else dense) for method in specs]


def _measure(
    machine: Machine, models: Models, setting: Setting, candidates: Sequence[Candidate], tick: Call
) -> list[dict[str, Any]]:
    """The row of each candidate, after all have generated their tokens in turn."""

    def prompts(batch: int) -> Tensor:
        """Return random prompts, the same ones for the same batch."""
        draw, vocabulary = torch.Generator().manual_seed(0), models.plain.config.vocab_size
        return torch.randint(vocabulary, (batch, setting.prompt), generator=draw).to(machine.device)

    def take_turns(new: int) -> list[Sequences]:
        """Return the sequences of all candidates, which have generated their tokens in turn."""
        all_sequences = [Sequences(machine, models, one, prompts(one.batch)) for one in candidates]
        for sequences in all_sequences:
            sequences.read_prompts()
            tick()
        for _ in range(new - 1):
            for sequences in all_sequences:
                sequences.step()
            tick()
        return all_sequences

    take_turns(min(WARM_UP, setting.new))
    rows = [
        {
            "method": name_of(candidate.method), **setting._asdict(), "batch": candidate.batch,
            "tokens_per_s": candidate.batch * setting.new / sequences.seconds,
            "prompt_s": sequences.prompt_seconds, "decode_s": sequences.step_seconds, "latency_s": sequences.seconds,
            "ms_per_step": sequences.step_seconds / max(1, setting.new - 1) * 1e3,
            "allocated": allocated_bytes(sequences.cache), "machine": machine.name,
        }
        for candidate, sequences in zip(candidates, take_turns(setting.new), strict=True)
    ]  # fmt: skip
    dense = next(row["tokens_per_s"] for row in rows if row["method"] == repr(Dense()))
    return [{**row, "ratio_dense": row["tokens_per_s"] / dense} for row in rows]
