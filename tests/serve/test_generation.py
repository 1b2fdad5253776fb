"""Answers with a method: the tokens of generate() itself, with and without the cache of an earlier turn."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import skimkv
from skimkv.hf.cache import Cache
from skimkv.serve.conversations import Conversations
from skimkv.serve.generation import Answer, Generator
from skimkv.serve.requests import Refused
from support import tiny_models
from support.serving import answer_alone

NEW = 12


def generator(method: str, count: int = 4, name: str = "llama", **options: Any) -> Generator:
    return Generator(tiny_models.family(name), skimkv.parse(method), Conversations(count, 10**9), **options)


def run(
    made: Generator, ids: torch.Tensor, cancelled: threading.Event | None = None, take: Any = None, **body: Any
) -> Answer:
    """The answer to a prompt, ids (1,n), as the fields of a request say."""
    prompt = made.prompt(ids[0].tolist(), body, NEW)
    return answer_alone(made, prompt, cancelled, take)


def answer(made: Generator, ids: torch.Tensor, **settings: Any) -> list[int]:
    """The new tokens after a prompt, ids (1,n)."""
    return run(made, ids, generation_config=settings).tokens


def directly(method: str, ids: torch.Tensor, name: str = "llama", before: torch.Tensor | None = None) -> list[int]:
    """The new tokens of generate() with a new cache, which may have read an earlier prompt."""
    cache = Cache(tiny_models.family(name), skimkv.parse(method))
    if before is not None:
        with torch.no_grad():
            tiny_models.family(name)(before, past_key_values=cache, use_cache=True)
    tokens = tiny_models.family(name).generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    return tokens[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def next_turn(ids: torch.Tensor, new: list[int], seed: int = 1) -> torch.Tensor:
    """A prompt, its answer and twenty tokens more."""
    return torch.cat([ids, torch.tensor([new]), tiny_models.prompt(n=20, seed=seed)], 1)


OTHERS = "Dense()", "TopK(k=8)", "Quest(k=16, page=8)", "Skim(k=16, r=8)", "SparQ(r=4, k=16, channels='int8')"


@pytest.mark.parametrize(
    "method", ["SparQ(r=4, k=16)", *(pytest.param(method, marks=pytest.mark.slow) for method in OTHERS)]
)
def test_a_kept_cache_changes_no_token(method: str) -> None:
    made, ids = generator(method), tiny_models.prompt(n=60)
    for turn in range(3):
        new = answer(made, ids)
        assert new == directly(method, ids), turn
        ids = next_turn(ids, new, turn)
    assert made.totals.requests == 3
    # the second turn reuses the prompt of the first, and the third that of the second
    assert made.totals.reused_tokens == 60 + 60 + NEW + 20
    assert made.totals.new_tokens == 3 * NEW


@pytest.mark.filterwarnings("ignore:Gemma2ForCausalLM")
@pytest.mark.parametrize(
    ("method", "name"),
    [("H2O(k=24)", "llama"), pytest.param("SparQ(r=4, k=16)", "gemma2", marks=pytest.mark.slow)],
)
def test_a_cache_that_cannot_be_cropped_goes_on_from_the_prompt(method: str, name: str) -> None:
    made, ids = generator(method, name=name), tiny_models.prompt(n=60)
    new = answer(made, ids)
    assert new == directly(method, ids, name)
    later = next_turn(ids, new)
    assert answer(made, later) == directly(method, later, name, before=ids)
    assert made.totals.reused_tokens == 60


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"guidance_scale": 1.5}])
def test_other_ways_to_generate_start_anew(options: dict[str, Any]) -> None:
    made, ids = generator("SparQ(r=4, k=16)"), tiny_models.prompt(n=60)
    first = answer(made, ids, **options)
    assert len(made.conversations) == 0
    answer(made, ids)
    assert answer(made, ids, **options) == first
    assert made.totals.reused_tokens == 0


def test_the_seed_belongs_to_the_request():
    made, ids = generator("Dense()"), tiny_models.prompt(n=60)
    torch.manual_seed(5)
    expected = torch.rand(6)

    def sampled(seed: int) -> list[int]:
        return run(made, ids, temperature=1.5, seed=seed).tokens

    torch.manual_seed(5)
    found = [torch.rand(3)]  # another request before
    assert sampled(1) == sampled(1) != sampled(2)
    found.append(torch.rand(3))  # and one after: it draws as if there had been no seed
    assert torch.equal(torch.cat(found), expected)


def test_temperature_and_top_p_decide_whether_tokens_are_drawn():
    made = generator("Dense()")

    def config(**body: Any) -> Any:
        return made.prompt([3, 4], body, NEW).config

    assert not config().do_sample and not config(temperature=0).do_sample and not config(top_p=1).do_sample
    assert config(temperature=1).do_sample and config(top_p=0.5).do_sample
    assert not config(temperature=1e-9).do_sample  # the scores would overflow
    assert not config(temperature=0, top_p=0.5).do_sample
    assert not config(top_p=0.5, generation_config={"do_sample": False}).do_sample
    assert not config(generation_config={"do_sample": True, "temperature": 1e-30}).do_sample
    assert config(temperature=1).top_k == 0 and config(temperature=1, generation_config={"top_k": 7}).top_k == 7


@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_cancelled_request_ends_early_and_its_prompt_is_kept(calls: int) -> None:
    made, ids, cancelled = generator("SparQ(r=4, k=16)"), tiny_models.prompt(n=60), threading.Event()
    taken: list[int] = []

    def take(tokens: Any) -> bool:
        taken.extend(tokens)
        if len(taken) == calls:
            cancelled.set()
        return False

    tokens = run(made, ids, cancelled, take).tokens
    assert tokens == taken and calls <= len(tokens) <= calls + 1
    assert answer(made, ids) == directly("SparQ(r=4, k=16)", ids)
    assert made.totals.reused_tokens == 58


def test_a_request_that_was_cancelled_before_its_turn_does_nothing():
    made, ids, cancelled = generator("SparQ(r=4, k=16)"), tiny_models.prompt(n=60), threading.Event()
    cancelled.set()
    assert run(made, ids, cancelled).tokens == [] and made.totals.requests == 0


def test_a_request_that_is_complete_ends():
    made, ids = generator("SparQ(r=4, k=16)"), tiny_models.prompt(n=60)
    taken: list[int] = []

    def take(tokens: Any) -> bool:
        taken.extend(tokens)
        return len(taken) >= 3

    assert run(made, ids, take=take).tokens == taken == directly("SparQ(r=4, k=16)", ids)[:3]


@pytest.mark.slow
def test_a_failed_request_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = generator("SparQ(r=4, k=16)"), tiny_models.prompt(n=60)

    def fail(tokens: Any) -> bool:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        run(made, ids, take=fail)
    assert len(made.conversations) == 0
    assert answer(made, ids) == directly("SparQ(r=4, k=16)", ids)


def test_lengths_are_made_to_fit():
    made = generator("Dense()")

    def new_tokens(n: int, made: Generator = made, asked: int | None = NEW) -> int:
        return int(made.prompt([3] * n, {}, asked).config.max_new_tokens)

    assert (new_tokens(100), new_tokens(155), new_tokens(100, asked=None)) == (NEW, 5, 60)
    for n, words in ((160, "the prompt has 160 tokens; prompt and answer together have at most 160"), (0, "is empty")):
        with pytest.raises(Refused, match=words):
            new_tokens(n)
    assert generator("Dense()", max_tokens=90).max_tokens == 90
    with pytest.raises(
        ValueError, match="max_tokens = 161 must be at most the 160 positions that LlamaForCausalLM was made for"
    ):
        generator("Dense()", max_tokens=161)
    unlimited = generator("LMInfinite(k=32, positions='cache')")
    assert unlimited.max_tokens is None and new_tokens(10**6, unlimited, None) == 1024
