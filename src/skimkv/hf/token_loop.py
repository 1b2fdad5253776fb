"""The loop in which generate() makes a text token by token, where it does no more than that.

The library prepares everything as it always does: settings, cache, logits processors and criteria to stop. Its own loop
then serves every kind of model and of result, which takes a few percent of a token on a CPU. Ours takes its place for
one token after the other, greedily or at random, and returns the same tokens.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .. import ops
from .draw import draw as draw_quickly
from .next_logits import NextLogits, NextToken, next_logits
from .nucleus import without_sorting_all
from .watch import is_of_libraries

PLAIN_MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
# What generate() hands on to no loop that is not its own.
LIBRARY_ARGUMENTS = "custom_generate", "assistant_model", "assistant_tokenizer", "tokenizer", "synced_gpus"
MODEL_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
METHODS = "_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"


def is_plain(config: Any) -> bool:
    """Whether these settings of generate() ask for one token after the other in every row, and for one row each."""
    one_row = config.num_return_sequences in (None, 1) and config.guidance_scale in (None, 1)
    return one_row and config.get_generation_mode() in PLAIN_MODES


def as_the_library_draws(scores: Tensor) -> Tensor:
    """A random token (B,1) of every row by its scores (B,V): that of generate(), after the same torch.manual_seed."""
    return torch.multinomial(scores.softmax(-1), 1)


_samples_quickly: ContextVar[bool] = ContextVar("_samples_quickly", default=False)


@contextlib.contextmanager
def quick_sampling() -> Iterator[None]:
    """Draw random tokens faster inside a `with`, in generate() of attached models: as likely ones, but not the same.

    The library makes a random number for every token of the vocabulary, and sorts all of them for top-p, which can take
    longer than the model. Here one number is drawn from PyTorch's generator for each token of the text, so that
    torch.manual_seed decides as usual. It concerns this thread alone, text that is made token by token on a CPU, and
    models whose inputs the library prepares; those that prepare their own, as Phi-3 does, sample as before.
    """
    before = _samples_quickly.get()
    _samples_quickly.set(True)
    try:
        yield
    finally:
        _samples_quickly.set(before)  # a token of the first set() means nothing in a generator that changes threads


@dataclass(frozen=True)
class Noted:
    """What generate() returns of every new token, where it is asked for more than the text; None: not asked for.

    scores: after the processors. logits: as they are before. Both (B,V), in float32.
    """

    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None

    def add(self, logits: Tensor, scores: Tensor) -> None:
        """Note those of the next token."""
        if self.logits is not None:
            self.logits.append(logits)
        if self.scores is not None:
            self.scores.append(scores)

    @property
    def is_wanted(self) -> bool:
        """Whether anything is noted."""
        return self.scores is not None or self.logits is not None


NOTHING = Noted()


def choose_tokens(
    processors: Any,
    input_ids: Tensor,
    found: NextToken,
    draw: Callable[[Tensor], Tensor] | None = None,
    noted: Noted = NOTHING,
) -> Tensor:
    """The next token (B,1) of every row of input_ids (B,n), by what the model says of it.

    processors: of the library, which take the logits in float32, in memory of their own. draw: makes a random token
    (B,1) of scores (B,V); without it the token is the most likely one.
    """
    logits, most_likely = found
    if not processors and draw is None and not noted.is_wanted:
        return ops.argmax(logits)[:, None] if most_likely is None else most_likely
    logits = logits.to(torch.float32, copy=True)
    scores: Tensor = processors(input_ids, logits)
    noted.add(logits, scores)
    return scores.argmax(-1, keepdim=True) if draw is None else draw(scores)


def loop_for(model: Any, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Our loop as generate() takes one, for a call with these keywords; None where the library's loop is needed."""
    if model.device.type != "cpu" or any(arguments.get(name) is not None for name in LIBRARY_ARGUMENTS):
        return None
    own = [vars(model).get(name, getattr(type(model), name)) for name in METHODS]
    if own != [getattr(GenerationMixin, name) for name in METHODS] or model.is_remote_code():
        return None
    if type(model).generate is not GenerationMixin.generate:
        return None
    for settings in filter(None, (arguments.get("generation_config"), model.generation_config)):  # it merges the two
        if not isinstance(settings, GenerationConfig):
            return None
        config = copy.copy(settings)
        for name in vars(config).keys() & arguments.keys():
            setattr(config, name, arguments[name])
        if config.get_generation_mode() not in PLAIN_MODES:
            return None
    return partial(make_tokens, streamer=arguments.get("streamer"))


def make_tokens(
    model: Any,
    input_ids: Tensor,
    /,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **inputs: Any,
) -> Any:
    """Append tokens to input_ids (B,n) until the criteria say stop, and return all, (B,m); the model reads `inputs`.

    With return_dict_in_generate they are part of the library's result, with its cache, scores and logits. Where more is
    asked of the layers, or the model reads something else too, the library's loop returns its result.
    """
    config, rows = generation_config, len(input_ids)
    given = {name: value for name, value in inputs.items() if value is not None and value is not False}
    of_layers = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
    if not given.keys() <= MODEL_ARGUMENTS or not given.get("use_cache") or of_layers:
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, config, streamer=streamer, **inputs
        )
    has_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    others = [one for one in [*logits_processor, *stopping_criteria, streamer] if one is not None]
    say_next = NextLogits(model) if all(map(_is_known, others)) else partial(_by_model, model)
    prefilled = model._prefill(input_ids, config, inputs, is_first_iteration=not config.is_assistant)
    found = NextToken(next_logits(prefilled))
    inputs, n = given, input_ids.shape[1]
    positions = _positions_after(inputs["position_ids"]) if "position_ids" in inputs else None
    unfinished, end, new = [True] * rows, _end(stopping_criteria), list[Tensor]()
    draw, noted = as_the_library_draws if config.do_sample else None, _noted(config)
    if config.do_sample and _samples_quickly.get():
        draw, logits_processor = draw_quickly, without_sorting_all(logits_processor)
    while True:
        tokens = choose_tokens(logits_processor, input_ids, found, draw, noted)
        if has_end and not all(unfinished):
            tokens = tokens.where(torch.tensor(unfinished, device=tokens.device)[:, None], config._pad_token_tensor)
        new.append(tokens)
        n += 1
        if logits_processor or end is None:  # which read the text
            input_ids, new = torch.cat([input_ids, *new], 1), []
        ended = stopping_criteria(input_ids, _tuple(noted.scores)).tolist() if end is None else end.reached(tokens, n)
        unfinished = [is_open and not has_ended for is_open, has_ended in zip(unfinished, ended, strict=True)]
        if streamer is not None:
            streamer.put(tokens[:, 0].clone())  # which may keep it, or write into it
        if not any(unfinished):
            break
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"]
            inputs["attention_mask"] = torch.cat([mask, mask.new_ones(rows, 1)], 1)
        if positions is not None:
            inputs["position_ids"] = next(positions)
        found = say_next(tokens, **inputs)
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([input_ids, *new], 1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences), scores=_tuple(noted.scores), logits=_tuple(noted.logits),
        past_key_values=inputs.get("past_key_values"),
    )  # fmt: skip


def _noted(config: Any) -> Noted:
    """What generate() is asked to return of every new token."""
    if not config.return_dict_in_generate:
        return NOTHING
    return Noted([] if config.output_scores else None, [] if config.output_logits else None)


def _tuple(of_tokens: list[Tensor] | None) -> Any:  # the library's annotations mean tuples of one
    return None if of_tokens is None else tuple(of_tokens)


class _End(NamedTuple):
    """Where texts end whose criteria are the usual ones: at `longest` tokens, or at one of `tokens`."""

    longest: float
    tokens: frozenset[int]

    def reached(self, tokens: Tensor, n: int) -> list[bool]:
        """Whether every row ends with its newest token, of tokens (B,1), which is the n-th."""
        return [n >= self.longest or token in self.tokens for (token,) in tokens.tolist()]


def _end(criteria: Any) -> _End | None:
    """Where texts end by these criteria of the library; None where they must be asked after every token."""
    longest, ends = math.inf, set[int]()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            longest = min(longest, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            ends.update(criterion.eos_token_id.tolist())
        else:
            return None
    return _End(longest, frozenset(ends))


def _positions_after(positions: Tensor) -> Iterator[Tensor]:
    """The positions (...,1) that follow the last of these, one after the other."""
    last = positions[..., -1:]
    while True:
        several = last + torch.arange(1, 65, device=last.device)
        yield from several.split(1, -1)
        last = several[..., -1:]


def _is_known(one: Any) -> bool:
    """Whether a processor, criterion or streamer is the library's or ours, and calls no function of a user."""
    has_methods_of_its_own = any(callable(value) and hasattr(type(one), name) for name, value in vars(one).items())
    is_of_others = has_methods_of_its_own or isinstance(one, PrefixConstrainedLogitsProcessor)
    return is_of_libraries(type(one)) and not is_of_others


def _by_model(model: Any, input_ids: Tensor, **inputs: Any) -> NextToken:
    return NextToken(next_logits(model(input_ids=input_ids, return_dict=True, **inputs)))
