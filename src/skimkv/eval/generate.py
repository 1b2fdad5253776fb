"""Generate text with a method, stream it, and report what it cost."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..hf.attach import attach
from ..hf.cache import Cache
from ..hf.draw import NotDrawable
from ..hf.errors import as_value_error
from ..hf.positions import positions_of
from ..hf.saved_cache import contents
from ..hf.states import KeepsStates, is_state_layer
from ..hf.supported import needed_max_tokens
from ..hf.token_loop import quick_sampling
from ..hf.token_text import TokenText
from ..methods.base import Method
from .traffic import cache_traffic


class Result(NamedTuple):
    """What was generated, and what it cost.

    The last of the new tokens was not fed to the model. bytes_per_step is what a further decode step would move, and
    cache_bytes is what the cache holds at the end. interrupted: Ctrl-C ended the text.
    """

    text: str
    method: Method
    prompt_tokens: int
    new_tokens: int
    ms_per_token: float
    bytes_per_step: int
    cache_bytes: int
    interrupted: bool

    def json(self) -> dict[str, Any]:
        """The result for --json, its method as a spec."""
        out = {k: v for k, v in self._asdict().items() if k != "interrupted"}
        return {**out, "method": repr(self.method)}

    def line(self) -> str:
        """What it cost, in one line for people."""
        return (
            f"{self.method}: {self.new_tokens} tokens after {self.prompt_tokens}, {self.ms_per_token:.1f} ms a token, "
            f"{self.bytes_per_step / 1e6:.2f} MB moved per step, cache {self.cache_bytes / 1e6:.2f} MB"
        )


class _Stream:
    """What generate() calls a streamer: it takes token ids, and writes text as soon as its characters are whole."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._text, self._write, self._has_prompt = TokenText(tokenizer), write, False
        self.times = [time.perf_counter()]  # of the start, and of every token

    @property
    def ids(self) -> list[int]:
        """The tokens so far, without the prompt."""
        return self._text.tokens

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompt, or the next token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.times.append(time.perf_counter())
        for token in ids.flatten().tolist():
            self._write(self._text.add(token))

    def end(self) -> None:
        """Write what is left of the text."""
        self._write(self._text.end())


def encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt; chat: the prompt is a user's turn of a chat.

    Raises ValueError if the prompt is empty, and for a chat as `chat_text` does.
    """
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if chat:
        prompt = chat_text(tokenizer, prompt)
    ids: list[int] = tokenizer(prompt, add_special_tokens=not chat, verbose=False).input_ids
    bos = tokenizer.bos_token_id
    if not chat and bos is not None and ids[:1] != [bos] and getattr(tokenizer, "add_bos_token", None) is not False:
        ids = [bos, *ids]
    return ids


def chat_text(tokenizer: Any, prompt: str) -> str:
    """A user's turn of a chat as text, up to where the answer begins.

    Raises ValueError if the tokenizer has no chat template, or if the template does not take this prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("--chat: this model's tokenizer has no chat template")
    turn = [{"role": "user", "content": prompt}]
    with as_value_error("--chat: the model's chat template does not take this prompt"):  # it is a program of the model
        text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return text


def encode_pieces(tokenizer: Any, text: str, size: int, count: int) -> list[list[int]]:
    """Cut a text into up to `count` pieces of `size` tokens; each begins with the token bos if the whole does.

    No more of the text is read than that many pieces need: a token has fewer than 64 characters on average.
    """
    if not text.strip():
        return []
    ids, bos = encode(tokenizer, text[: 64 * size * count], chat=False), tokenizer.bos_token_id
    first = [bos] if bos is not None and ids[0] == bos else []
    rest, step = ids[len(first) :], size - len(first)
    return [first + rest[start : start + step] for start in range(0, len(rest) - step + 1, step)][:count]


def check_logits(logits: torch.Tensor, number_format: torch.dtype) -> None:
    """Raise ValueError where a logit is no number or infinite: a model can exceed the range of float16.

    number_format: of the model. A logit of minus infinity excludes a token, and is no mistake.
    """
    if (logits.isnan() | (logits == math.inf)).any():
        raise _wrong_logits(number_format)


def _wrong_logits(number_format: torch.dtype) -> ValueError:
    name = str(number_format).removeprefix("torch.")
    advice = ": choose another number format, such as bfloat16" if number_format == torch.float16 else ""
    return ValueError(f"the model's logits exceed the range of {name} or are not numbers{advice}")


@contextlib.contextmanager
def checked_logits(model: Any) -> Iterator[None]:
    """Check what the model says after the first tokens that it reads in the `with`, and nothing that follows.

    Raises ValueError as `check_logits` does, and where tokens that follow cannot be sampled for the same reason.
    """

    def check(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Check the logits after the prompt, once: a hook on every step would slow down decoding."""
        hook.remove()
        check_logits(output.logits[:, -1], model.dtype)

    hook = model.register_forward_hook(check)
    try:
        yield
    except RuntimeError as error:
        of_library = "probability tensor contains" in str(error)  # how torch.multinomial refuses them
        if not (of_library or isinstance(error, NotDrawable)):
            raise
        raise _wrong_logits(model.dtype) from error
    finally:
        hook.remove()


LEAST_READ = 2  # tokens of a prompt after what a file holds: a single one would be decoded with the method


def read_once(path: Path, model: Any, ids: list[int], method: Method, max_tokens: int | None) -> Cache:
    """A cache with the beginning of a prompt from a file; where there is none, it is read now, and written there.

    The prompt's last LEAST_READ tokens are left to be read; one where a model keeps states, of which some begin anew in
    a block. Raises ValueError if the file is of another use, if its tokens are not the beginning of this prompt, or if
    the model's logits after them are not numbers.
    """
    if path.exists():
        _, count = contents(path)
        if count >= len(ids):
            raise ValueError(f"{path}: it holds {count} tokens, which is no beginning of a prompt of {len(ids)}")
        return Cache.load(path, model, method, ids[:count])
    cache = Cache(model, method, max_tokens)
    has_states = any(is_state_layer(layer) or isinstance(layer, KeepsStates) for layer in cache.layers)
    beginning = ids[: -1 if has_states else -LEAST_READ]
    if beginning:
        prompt = torch.tensor([beginning], device=model.device)
        with torch.inference_mode(), checked_logits(model):  # the one token that it generates is not fed
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=1, do_sample=False
            )
        cache.save(path, beginning)
    return cache


def run(
    model: Any, tokenizer: Any, ids: list[int], method: Method, limit: int, temperature: float = 0.0, seed: int = 0,
    write: Callable[[str], None] = lambda text: None, compile: bool | str = False, prompt_cache: Path | None = None,
) -> Result:  # fmt: skip
    """Generate at most `limit` tokens after `ids`; a warning says so where the model's positions end before.

    temperature = 0 is greedy. write is called with each new piece of the text. compile is that of `attach`. Ctrl-C ends
    the text early. prompt_cache: the file of `read_once`. Raises ValueError as that does, if `ids` exceed a learned
    table of positions, if the model cannot be compiled, or if its logits after the prompt are not numbers.
    """
    positions = positions_of(model)
    positions.check_table(len(ids), None)
    positions.check(len(ids), len(ids))
    if positions.table is not None and limit > (room := positions.table - len(ids) + 1):  # the last token is not fed
        warnings.warn(f"{positions.name} has {positions.table} positions: at most {room} tokens follow", stacklevel=2)
        limit = room
    most = needed_max_tokens(model, len(ids) + limit - 1)
    cache = Cache(model, method, most) if prompt_cache is None else read_once(prompt_cache, model, ids, method, most)
    stream = _Stream(tokenizer, write)
    prompt = torch.tensor([ids], device=model.device)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    interrupted = False
    try:
        attached = attach(model, method, compile) if compile else contextlib.nullcontext()
        with torch.inference_mode(), attached, checked_logits(model), quick_sampling():
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, streamer=stream,
                max_new_tokens=limit, pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0, **sampling,
            )  # fmt: skip
    except KeyboardInterrupt:
        interrupted = True
        stream.end()
    times = stream.times
    seconds = times[-1] - times[0]  # with the prompt's, where no second token says more
    if len(times) > 2:  # the median, since the first step may have compiled the model
        seconds = statistics.median(after - before for before, after in pairwise(times[1:]))
    return Result(
        tokenizer.decode(stream.ids, skip_special_tokens=True), method, len(ids), len(stream.ids), 1e3 * seconds,
        cache_traffic(cache).bytes, cache.nbytes, interrupted,
    )  # fmt: skip


def first_difference(a: str, b: str) -> int | None:
    """The position of the first character at which two texts differ; None if they are equal."""
    return None if a == b else common_start(a, b)


def common_start(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items at the beginning of both are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
