"""Generate answers to prompts with a method, each starting from the cache of an earlier turn where there is one.

An answer of one row is an `Open` one: its prompt is read in pieces, and then a step gives every open answer its next
token, all rows in one call of the model. Answers of other kinds, such as beams, are made by generate() on their own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from .. import ops
from ..hf.cache import Cache
from ..hf.draw import draw
from ..hf.joint import can_join, joint_requests
from ..hf.next_logits import NextLogits, NextToken, next_logits
from ..hf.nucleus import without_sorting_all
from ..hf.positions import counts_in_cache, positions_of
from ..hf.token_loop import choose_tokens, is_plain, quick_sampling
from ..methods.base import Method
from .conversations import FEW, Conversation, Conversations, can_crop, cut, shared
from .folder import Folder
from .logits import BiasAndPenalties
from .requests import Refused, generation_settings

DEFAULT_NEW_TOKENS = 1024  # where neither the request nor the model says more
# Prompts of a list that have this many tokens in common for each token of the first answer wait for that answer, and
# start from its cache: each of them would read these tokens, one in about a twelfth of the time that a new one takes.
ALIKE = 4
Take = Callable[[Sequence[int]], bool]  # is given new tokens, and says whether the answer is complete
GREEDY_BELOW = 1e-6  # a temperature below this one leaves only the most probable token, and would overflow


@dataclass
class Totals:
    """What was generated so far.

    reused_tokens: those of the prompts that a kept cache stood for. loaded_tokens: those of them from a file.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    loaded_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and how its answer is generated.

    config: settings of the Transformers library. seed: of this answer alone; None goes on with the numbers that were
    drawn before. changes: of the logits, before temperature and sampling. reuses: whether it may start from a kept
    cache; otherwise all of it is read anew. is_alike: whether others start from the same cache, so that it stays.
    loaded: what `Generator.fetch` found, whose cache the answer may change.
    """

    ids: Sequence[int]
    config: Any
    seed: int | None = None
    changes: Sequence[LogitsProcessor] = field(default=())
    reuses: bool = True
    is_alike: bool = False
    loaded: Conversation | None = None


class Answer(NamedTuple):
    """What was generated after a prompt.

    at_end: whether the model ended it. reused: how many tokens of the prompt a kept cache stood for.
    """

    tokens: list[int]
    at_end: bool
    reused: int


class Start(NamedTuple):
    """The cache with which a prompt begins, how many of its tokens that holds, and how many of those from a file.

    time: at which the answer began.
    """

    cache: Cache
    reused: int
    loaded: int
    time: float


class Generator:
    """Answers prompts with one model and one method. One thread uses it.

    alone: why no answers can share steps with this model; None if they can.
    max_tokens: of a prompt and its answer together; None stands for the positions that the model was made for.
    log: is called with one line for each prompt that has been answered.
    folder: keeps conversations in files, once it is set.
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
            raise ValueError(
                f"max_tokens = {max_tokens} must be at most the {most} positions that {positions.name} was made for"
            )
        self.max_tokens = most if max_tokens is None else max_tokens
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.folder: Folder | None = None
        self.alone = _why_alone(model, Cache(model, method, self.max_tokens))
        self._can_crop = True  # whether caches can, as far as answers have shown
        self._joint: Cache | None = None  # of these caches, which took the last step
        self._stepped: list[Cache] = []
        self._next_logits = NextLogits(model)

    def prompt(self, ids: Sequence[int], body: Mapping[str, Any], new_tokens: int | None) -> Prompt:
        """Prepare the answer to the tokens of a prompt, as the checked fields of a request say.

        Raises Refused if the prompt is empty or too long, or if a token is not the model's.
        """
        bias = {int(token): float(value) for token, value in body.get("logit_bias", {}).items()}
        for name, tokens in (("prompt", ids), ("logit_bias", bias)):
            if tokens and max(tokens) >= self.vocabulary:
                raise Refused(f"{name} has token {max(tokens)}; the model has {self.vocabulary} tokens", name)
        config = self._config(body, new_tokens)
        config.max_new_tokens = min(config.max_new_tokens, self._room(len(ids)))
        frequency, presence = body.get("frequency_penalty", 0), body.get("presence_penalty", 0)
        changes = [BiasAndPenalties(len(ids), bias, frequency, presence)] if bias or frequency or presence else []
        return Prompt(ids, config, body.get("seed"), changes, body.get("cache_prompt", True))

    def _room(self, prompt_tokens: int) -> int:
        """How many tokens fit after a prompt. Raises Refused if it is none."""
        if prompt_tokens == 0:
            raise Refused("the prompt is empty")
        if self.max_tokens is None:
            return 2**31
        if prompt_tokens >= self.max_tokens:
            raise Refused(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together have at most {self.max_tokens}: "
                "shorten the prompt",
                code="context_length_exceeded",
            )
        return self.max_tokens - prompt_tokens

    def _config(self, body: Mapping[str, Any], new_tokens: int | None) -> Any:
        """The model's own settings, changed as a request says."""
        config: Any = copy.deepcopy(self.model.generation_config)
        config.max_new_tokens = max(config.max_new_tokens or 0, DEFAULT_NEW_TOKENS)
        config.max_length = config.cache_implementation = None
        config.return_dict_in_generate = False
        own = generation_settings(body.get("generation_config", {}))
        for name, value in own.items():
            setattr(config, name, value)
        config.max_new_tokens = new_tokens or config.max_new_tokens
        temperature, top_p = body.get("temperature"), body.get("top_p")
        if temperature is not None:
            config.temperature, config.do_sample = float(temperature), True
        elif top_p is not None and top_p < 1 and "do_sample" not in own:
            config.do_sample = True
        config.top_p = config.top_p if top_p is None else float(top_p)
        if config.temperature is not None and config.temperature < GREEDY_BELOW:
            config.do_sample = False
        if config.do_sample:
            config.top_k = config.top_k or 0  # the library would choose among 50 tokens where nobody says how many
        else:
            config.temperature = config.top_k = config.top_p = config.min_p = config.typical_p = None
        return config

    def fetch(self, prompt: Prompt) -> Future[Conversation | None] | None:
        """Begin to load the file that holds more of a prompt than memory does; None if there is none, or not wanted."""
        if self.folder is None or not prompt.reuses or not is_plain(prompt.config):
            return None
        ids = torch.tensor(prompt.ids)
        file = self.folder.find(ids, self.conversations.held(ids))
        return None if file is None else self.folder.load(file)

    def begin_alike(self, prompts: Sequence[Prompt]) -> bool:
        """Whether prompts have so many tokens in common that the first is to be answered before the others. See ALIKE.

        False where no kept cache can stand for these tokens.
        """
        if len(prompts) < 2 or not (self._can_crop and self.conversations.count and prompts[0].reuses):
            return False
        first, *others = (torch.tensor(prompt.ids) for prompt in prompts)
        most_new: int = prompts[0].config.max_new_tokens
        return min(shared(first, other) for other in others) >= max(ALIKE * most_new, FEW)

    def generate(self, prompt: Prompt, cancelled: threading.Event, take: Take) -> Answer:
        """Answer a prompt on its own, by the library's loop.

        `take` is given the tokens as they come, and says whether the answer is complete. It ends early when
        `cancelled` is set. Raises ValueError if a setting cannot be combined with the method.
        """
        if cancelled.is_set():
            return Answer([], False, 0)
        ids = torch.tensor(prompt.ids)
        can_go_on = is_plain(prompt.config)
        begun = self._start(prompt, can_go_on)
        cache = begun.cache
        watch = _Watch(cancelled, take, len(ids), cache, self.conversations if can_go_on else None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(quick_sampling())
            if prompt.seed is not None:
                devices = [self.model.device] if self.model.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(prompt.seed)
            output: Tensor = self._call_library(prompt, cache, stopping_criteria=StoppingCriteriaList([watch]))
        tokens: list[int] = output[0, len(ids) :].tolist()
        take(tokens[watch.taken :])
        return self._finish(prompt, begun, cache if can_go_on else None, watch.after_prompt, tokens)

    def begin(self, prompt: Prompt, cancelled: threading.Event, take: Take) -> Open | None:
        """Begin an answer that can share steps with others; None for one that `generate` has to make on its own.

        take, cancelled: as of `generate`. Raises ValueError if a setting cannot be combined with the method.
        """
        return Open(self, prompt, cancelled, take) if self.alone is None and is_plain(prompt.config) else None

    @torch.no_grad()
    def step(self, answers: Sequence[Open]) -> list[NextToken]:
        """Give the last tokens of open answers, whose prompts have been read, to the model, all in one call.

        Returns what the model says of every answer's next token.
        """
        caches = [answer.cache for answer in answers]
        if len(caches) != len(self._stepped) or any(a is not b for a, b in zip(caches, self._stepped, strict=True)):
            self._joint, self._stepped, self._next_logits = joint_requests(caches), caches, NextLogits(self.model)
        ids = torch.cat([answer.ids[:, -1:] for answer in answers])
        positions = torch.tensor([[cache.get_seq_length()] for cache in caches], device=ids.device)
        found = self._next_logits(ids, past_key_values=self._joint, position_ids=positions, **self._options())
        most_likely = [None] * len(ids) if found.most_likely is None else found.most_likely.split(1)
        return list(map(NextToken, found.logits.split(1), most_likely))

    def _options(self) -> dict[str, Any]:
        return {"use_cache": True, **({"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {})}

    def _read(self, cache: Cache, ids: Tensor, positions: Tensor) -> NextToken:
        """What the model says after the tokens ids (1,n) at these positions (1,n)."""
        inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": cache, **self._options()}
        return NextToken(next_logits(self.model(return_dict=True, **inputs)))

    def _start(self, prompt: Prompt, may_be_kept: bool = True) -> Start:
        """Find the cache with which a prompt begins: a kept one, or the loaded one where it holds more."""
        ids, loaded, start = torch.tensor(prompt.ids), prompt.loaded, time.perf_counter()
        tokens = 0 if loaded is None else loaded.usable(ids)
        if loaded is not None and tokens > self.conversations.held(ids):
            return Start(cut(loaded.cache, tokens), tokens, tokens, start)
        kept = self.conversations.take(ids, prompt.is_alike) if may_be_kept and prompt.reuses else None
        if kept is None:
            return Start(Cache(self.model, self.method, self.max_tokens), 0, 0, start)
        return Start(kept, kept.get_seq_length(), 0, start)

    def _call_library(self, prompt: Prompt, cache: Cache, **options: Any) -> Any:
        """The result of the model's generate() for a prompt."""
        inputs = torch.tensor(prompt.ids)[None].to(self.model.device)
        return self.model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=prompt.config,
            past_key_values=cache, logits_processor=LogitsProcessorList(prompt.changes), **options,
        )  # fmt: skip

    def _finish(
        self, prompt: Prompt, begun: Start, cache: Cache | None, after_prompt: Cache | None, tokens: list[int]
    ) -> Answer:
        """Keep the cache of an answer, or its copy after the prompt, count the tokens, and return the answer."""
        # whose memory ends here, unless it is kept
        self._joint, self._stepped, self._next_logits = None, [], NextLogits(self.model)
        ids = torch.tensor(prompt.ids)
        kept = None
        if after_prompt is not None:
            kept = self.conversations.keep(ids, after_prompt, prompt.is_alike)
        elif cache is not None and can_crop(cache):
            kept = self.conversations.keep(ids, cut(cache, len(ids)), prompt.is_alike)
        if cache is not None:
            self._can_crop = can_crop(cache)
        if kept is not None and self.folder is not None:
            self.folder.add(kept)
        self._count(len(ids), begun, len(tokens))
        return Answer(tokens, bool(tokens) and tokens[-1] in _end_tokens(prompt.config), begun.reused)

    def _count(self, prompt: int, begun: Start, new: int) -> None:
        totals, seconds = self.totals, time.perf_counter() - begun.time
        totals.requests += 1
        totals.prompt_tokens += prompt
        totals.reused_tokens += begun.reused
        totals.loaded_tokens += begun.loaded
        totals.new_tokens += new
        from_file = " from a file" if begun.loaded else ""
        self.log(
            f"{prompt} prompt tokens, {begun.reused} of them reused{from_file}; {new} new tokens in {seconds:.1f} s"
        )


class Open:
    """An answer that is being made: its prompt is read in pieces, then each step gives it a token.

    ids (1,n): the tokens so far, those of the prompt first. cache: holds those that have been read.
    """

    def __init__(self, generator: Generator, prompt: Prompt, cancelled: threading.Event, take: Take) -> None:
        self.generator, self.prompt, self.cancelled, self.take = generator, prompt, cancelled, take
        self.is_complete, self._begun = False, generator._start(prompt)
        self.cache, self.read_tokens = self._begun.cache, self._begun.reused
        self._after_prompt: Cache | None = None
        config = copy.copy(prompt.config)
        config.prefill_chunk_size = len(prompt.ids)  # the cache is told where the prompt ends
        call = replace(prompt, config=config)
        self.ids, processors, self._criteria, config = generator._call_library(
            call, self.cache, custom_generate=_prepared
        )
        self._processors = without_sorting_all(processors)
        numbers = None if prompt.seed is None else torch.Generator(generator.model.device).manual_seed(prompt.seed)
        self._draw = partial(draw, generator=numbers) if config.do_sample else None

    @property
    def unread(self) -> int:
        """How many tokens of the prompt have not been read."""
        return len(self.prompt.ids) - self.read_tokens

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt has not been read."""
        return self.unread > 0

    @property
    def is_open(self) -> bool:
        """Whether a token may follow."""
        return not (self.is_complete or self.cancelled.is_set())

    @torch.no_grad()
    def read(self, most: int | None = None) -> None:
        """Read the next tokens of the prompt, at most `most`, and choose the answer's first one after the last."""
        start = self.read_tokens
        end = len(self.prompt.ids) if most is None else min(start + most, len(self.prompt.ids))
        positions = torch.arange(start, end, device=self.ids.device)[None]
        cut = ops.tokens_of_prompt.set(len(self.prompt.ids) - self._begun.reused)
        try:
            found = self.generator._read(self.cache, self.ids[:, start:end], positions)
        finally:
            ops.tokens_of_prompt.reset(cut)
        self.read_tokens = end
        if self.is_reading:
            return
        if not can_crop(self.cache) and self.generator.conversations.can_keep(self.cache):
            self._after_prompt = copy.deepcopy(self.cache)
        self.choose(found)

    @torch.no_grad()
    def choose(self, found: NextToken) -> None:
        """Choose the next token by what the model says of it, and hand it on."""
        token = choose_tokens(self._processors, self.ids, found, self._draw)
        self.ids = torch.cat([self.ids, token], 1)
        is_last = bool(self._criteria(self.ids, None).all())
        self.is_complete = self.take(token[0].tolist()) or is_last

    def end(self) -> Answer:
        """Keep the cache for the next turn, unless the prompt was not read to its end, and return the answer."""
        if self.is_reading:
            self.generator._count(self.read_tokens, self._begun, 0)
            return Answer([], False, self._begun.reused)
        tokens: list[int] = self.ids[0, len(self.prompt.ids) :].tolist()
        return self.generator._finish(self.prompt, self._begun, self.cache, self._after_prompt, tokens)


def _prepared(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> tuple[Tensor, Any, Any, Any]:
    """In the place of the library's loop: what it would choose tokens with."""
    return input_ids, logits_processor, stopping_criteria, generation_config


class _Watch(StoppingCriteria):
    """Hands tokens on, ends a generation that is complete or cancelled, and keeps a copy of the prompt's cache.

    The copy, after_prompt, is made when the prompt has been read, of a cache that cannot go back to the prompt's end.
    conversations: None if the cache is not kept. taken: how many new tokens have been handed on; of several rows, none.
    """

    def __init__(
        self, cancelled: threading.Event, take: Take, prompt: int, cache: Cache, conversations: Conversations | None
    ) -> None:
        self.cancelled, self.take, self.prompt = cancelled, take, prompt
        self.cache, self.conversations = cache, conversations
        self.taken = 0
        self.after_prompt: Cache | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return whether each row of input_ids (B,n) is complete: (B,) bool."""
        if self.conversations is not None:  # the first call: the prompt has been read, and nothing else
            if not can_crop(self.cache) and self.conversations.can_keep(self.cache):
                self.after_prompt = copy.deepcopy(self.cache)
            self.conversations = None
        done = self.cancelled.is_set()
        if len(input_ids) == 1:
            new = input_ids[0, self.prompt + self.taken :].tolist()
            self.taken += len(new)
            done |= self.take(new)
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)


def _why_alone(model: Any, cache: Cache) -> str | None:
    """Why rows of a model cannot share steps, if that is so."""
    if not can_join(cache):
        return "some of its layers keep states, or see a chunk of the text alone"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "it counts positions itself"
    return None


def _end_tokens(config: Any) -> list[int]:
    """The tokens with which the model ends an answer."""
    ends = config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
