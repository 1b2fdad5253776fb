"""Generate the answer to one request with a method, starting from the cache of an earlier turn where there is one."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from ..hf.attach import Cache
from ..hf.positions import counts_in_cache, positions_of
from ..methods.base import Method
from .conversations import Conversations, can_crop

DEFAULT_NEW_TOKENS = 1024  # where neither the request nor the model says how many


@dataclass
class Totals:
    """What was generated so far. reused_tokens: those of the prompts that a kept cache stood for."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0


class Generator:
    """Answers requests with one model and one method, one after the other.

    max_tokens: of a prompt and its answer together; None stands for the positions that the model was made for.
    log: is called with one line for each request that has ended.
    Raises ValueError if max_tokens are more than these positions, or if the model is not supported.
    """

    def __init__(
        self,
        model: Any,
        method: Method,
        conversations: Conversations,
        max_tokens: int | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.method, self.conversations, self.log = model, method, conversations, log
        positions, self.totals = positions_of(model), Totals()
        most = positions.table if counts_in_cache(method) else positions.limit
        if max_tokens is not None and most is not None and max_tokens > most:
            raise ValueError(f"max_tokens = {max_tokens}: {positions.name} was made for {most} positions")
        self.max_tokens = most if max_tokens is None else max_tokens
        Cache(model, method, self.max_tokens)

    def fit(self, prompt_tokens: int, generation_config: Any) -> None:
        """Lower the number of new tokens to what fits after a prompt. Raises ValueError if nothing fits after it."""
        if generation_config.max_new_tokens is None:
            generation_config.max_new_tokens = DEFAULT_NEW_TOKENS
        if prompt_tokens == 0:
            raise ValueError("the prompt is empty")
        if self.max_tokens is None:
            return
        if prompt_tokens >= self.max_tokens:
            raise ValueError(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together have at most {self.max_tokens}: "
                "shorten the prompt"
            )
        room = self.max_tokens - prompt_tokens
        generation_config.max_new_tokens = min(generation_config.max_new_tokens, room)

    def generate(self, cancelled: threading.Event, **options: Any) -> Tensor:
        """Call generate() of the model with these options, and return what it returns: tokens (1,n).

        It ends early when `cancelled` is set. Raises ValueError if an option cannot be combined with the method.
        """
        ids: Tensor = options["input_ids"]
        if cancelled.is_set():
            if options.get("streamer") is not None:
                options["streamer"].end()
            return ids
        start, config = time.perf_counter(), options["generation_config"]
        seed = vars(config).pop("seed", None)
        if seed is not None:
            torch.manual_seed(seed)
        prompt, is_plain = ids[0].cpu(), _is_plain(config)
        cache = self.conversations.take(prompt) if is_plain else None
        reused = 0 if cache is None else cache.get_seq_length()
        cache = Cache(self.model, self.method, self.max_tokens) if cache is None else cache
        watch = _Watch(cancelled, cache, self.conversations if is_plain else None)
        tokens: Tensor = self.model.generate(
            past_key_values=cache, stopping_criteria=StoppingCriteriaList([watch]), **options
        )
        if watch.after_prompt is not None:
            self.conversations.keep(prompt, watch.after_prompt)
        elif is_plain and can_crop(cache):
            cache.crop(len(prompt) - cache.get_seq_length())
            self.conversations.keep(prompt, cache)
        self._count(len(prompt), reused, tokens.shape[1] - len(prompt), time.perf_counter() - start)
        return tokens

    def _count(self, prompt: int, reused: int, new: int, seconds: float) -> None:
        totals = self.totals
        totals.requests += 1
        totals.prompt_tokens += prompt
        totals.reused_tokens += reused
        totals.new_tokens += new
        self.log(f"{prompt} prompt tokens, {reused} of them reused; {new} new tokens in {seconds:.1f} s")


class _Watch(StoppingCriteria):
    """Ends a generation that was cancelled, and keeps a copy of a cache that cannot go back to the prompt's end.

    conversations: None if the cache is not kept. after_prompt: that copy, made when the prompt has been read.
    """

    def __init__(self, cancelled: threading.Event, cache: Cache, conversations: Conversations | None) -> None:
        self.cancelled, self.cache, self.conversations = cancelled, cache, conversations
        self.after_prompt: Cache | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return whether each row of input_ids (B,n) is complete: (B,) bool."""
        if self.conversations is not None:  # the first call: the prompt has been read, and nothing else
            if not can_crop(self.cache) and self.conversations.can_keep(self.cache):
                self.after_prompt = copy.deepcopy(self.cache)
            self.conversations = None
        return torch.full((input_ids.shape[0],), self.cancelled.is_set(), dtype=torch.bool, device=input_ids.device)


def _is_plain(config: Any) -> bool:
    """Whether one token follows another in one row, so that a kept cache can go on, and can be kept again."""
    one_row = config.num_return_sequences in (None, 1) and config.guidance_scale in (None, 1)
    return one_row and config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
