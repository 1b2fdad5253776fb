"""How long a method's decode step takes.

Times belong to a run and never to a record, since the same run makes the same records again.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..hf.cache import Cache
from .answer import Question
from .shared_prompt import forward

TIMED_STEPS = 9  # of which the first, which allocates what the others use again, does not count

STEPS_OF_A_TURN = 3  # where caches take turns

StepTimes = dict[tuple[str, str, str], float]  # (task, mode, method) -> milliseconds per token


def ms_per_token(
    model: Any, cache: Cache, logits: Tensor, questions: Sequence[Question], mask: Tensor | None = None
) -> float | None:
    """The median time of a decode step of this cache alone, in milliseconds, divided by the sequences in its batch.

    The model goes on greedily after the prompts, one token a step, for no more steps than the answer to any of the
    questions may take; the cache is used up. cache, logits (B,V) and mask (B,n) have a row for every question. Returns
    None if that is fewer than two steps.
    """
    steps = min(TIMED_STEPS, *(len(question.feed) + question.new_tokens for question in questions))
    tokens, times = logits.argmax(-1)[:, None], []
    for _ in range(steps):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        _wait(tokens.device)
        start = time.perf_counter()
        tokens = forward(model, cache, tokens, mask)[:, -1].argmax(-1)[:, None]
        _wait(tokens.device)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:]) / len(questions) if len(times) > 1 else None


@torch.inference_mode()
def alternating_ms(model: Any, caches: Sequence[Cache], token: int, rounds: int) -> list[float]:
    """The median time of a decode step with each cache, in milliseconds: the caches take turns, round after round.

    What slows the machine for a while slows all of them; every round has another order, so that nothing periodic meets
    the same ones each time. A turn has STEPS_OF_A_TURN steps, and the first, for which the processor's caches hold what
    the turn before it read, does not count. Every cache has one row, and goes on greedily from `token`; it is used up.
    """
    times: list[list[float]] = [[] for _ in caches]
    tokens = [torch.tensor([[token]], device=model.device) for _ in caches]
    order, generator = list(range(len(caches))), random.Random(0)
    for _ in range(rounds):
        generator.shuffle(order)
        for i in order:
            for step in range(STEPS_OF_A_TURN):
                _wait(model.device)
                start = time.perf_counter()
                tokens[i] = forward(model, caches[i], tokens[i], None)[:, -1:].argmax(-1)
                _wait(model.device)
                if step:
                    times[i].append(time.perf_counter() - start)
    return [1e3 * statistics.median(own) for own in times]


def _wait(device: torch.device) -> None:
    """Return when a GPU has done all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
