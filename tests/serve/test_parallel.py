"""Answers that share steps: their tokens are those of each on its own, whoever joins, leaves, fails or goes away."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache

import skimkv
from skimkv import ops
from skimkv.hf.cache import Cache
from skimkv.hf.joint import _JointStep, joint_requests
from skimkv.hf.token_loop import loop_for
from skimkv.serve import worker as worker_module
from skimkv.serve.conversations import Conversations
from skimkv.serve.generation import ALIKE, Generator, Open
from skimkv.serve.worker import Ended, Task, Worker
from support import tiny_models
from support.kernels import NATIVE
from support.serving import answer_alone

pytestmark = pytest.mark.filterwarnings("ignore:.*the method decodes 1 of 2 layers")

METHODS = "Dense()", "SparQ(r=4, k=16)", "Skim(k=16, r=8)", "H2O(k=24)"
OTHER_METHODS = "TopK(k=8)", "Quest(k=16, page=8)", "LMInfinite(k=24)", "SnapKV(k=16)", "TOVA(k=16)", "Dense(kv='int8')"


def generator(method: str, name: str = "llama", count: int = 0) -> Generator:
    return Generator(tiny_models.family(name), skimkv.parse(method), Conversations(count, 10**9))


class Asked(NamedTuple):
    """A prompt of n tokens, the fields of its request, and in which round its answer begins."""

    n: int
    new: int
    begins: int
    fields: dict[str, Any]

    def begin(self, made: Generator, tokens: list[int]) -> Open:
        ids = tiny_models.prompt(n=self.n, seed=self.n)[0].tolist()
        answer = made.begin(made.prompt(ids, self.fields, self.new), threading.Event(), lambda new: tokens.extend(new))
        assert answer is not None
        return answer


SEEDED = {"temperature": 1.2, "seed": 5, "frequency_penalty": 0.5}
# Prompts and answers of different lengths; the third joins as the first is about to leave, and the last finds one.
ASKED = [
    Asked(40, 5, 0, {}), Asked(7, 30, 0, {}), Asked(75, 12, 4, {}), Asked(23, 20, 4, SEEDED),
    Asked(60, 9, 9, {"generation_config": {"repetition_penalty": 1.3}}), Asked(3, 8, 31, {}),
]  # fmt: skip


def together(made: Generator, asked: list[Asked], piece: int) -> list[list[int]]:
    """The tokens of answers that join and leave; prompts are read in pieces between steps, several at a time."""
    tokens: list[list[int]] = [[] for _ in asked]
    ended: dict[int, Any] = {}
    running: dict[int, Open] = {}
    round_number = 0
    while len(ended) < len(asked):
        for i, one in enumerate(asked):
            if one.begins == round_number:
                running[i] = one.begin(made, tokens[i])
        for answer in running.values():
            if answer.is_reading:
                answer.read(piece)
        ready = [i for i, answer in running.items() if answer.is_open and not answer.is_reading]
        if ready:
            for i, logits in zip(ready, made.step([running[i] for i in ready]), strict=True):
                running[i].choose(logits)
        for i in [i for i, answer in running.items() if not answer.is_open]:
            ended[i] = running.pop(i).end()
        round_number += 1
    assert [ended[i].tokens for i in range(len(asked))] == tokens
    return tokens


def alone(made: Generator, one: Asked) -> list[int]:
    """The tokens of generate() with a cache of its own; random ones of steps alone, where the library draws others."""
    if "seed" in one.fields and loop_for(made.model, {}) is None:
        return together(made, [one._replace(begins=0)], piece=1000)[0]
    ids = tiny_models.prompt(n=one.n, seed=one.n)[0].tolist()
    prompt = made.prompt(ids, one.fields, one.new)
    return made.generate(prompt, threading.Event(), lambda new: False).tokens


def check_together(method: str, name: str = "llama", piece: int = 16) -> None:
    made = generator(method, name)
    assert made.alone is None
    assert together(made, ASKED, piece) == [alone(made, one) for one in ASKED]


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER_METHODS)])
def test_answers_that_share_steps_are_those_of_generate(method: str) -> None:
    check_together(method)


@pytest.mark.parametrize("name", tiny_models.with_slow(tiny_models.WITH_FULL_ATTENTION, ("gemma2", "gpt2", "gpt_oss")))
def test_of_every_family(name: str) -> None:
    """Sliding layers of the library, caps on logits, sinks, learned positions, experts."""
    check_together("SparQ(r=4, k=16)", name)
    if name == "gemma2":
        check_together("H2O(k=24)", name, piece=1)


def test_a_model_whose_layers_keep_states_is_not_joined() -> None:
    options = {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2, "head_dim": 16}
    states = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    states |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    model = tiny_models.build("qwen3_next", **options, **states, num_experts=4, num_experts_per_tok=2)
    made = Generator(model, skimkv.parse("Dense()"), Conversations(0, 0))
    assert made.alone == "some of its layers keep states, or see a chunk of the text alone"
    assert made.begin(made.prompt([3, 4, 5], {}, 4), threading.Event(), lambda new: False) is None
    assert len(answer_alone(made, made.prompt([3, 4, 5], {}, 4)).tokens) == 4
    caches = [Cache(model, "Dense()"), Cache(model, "Dense()")]
    with pytest.raises(ValueError, match="layers that keep states"):
        joint_requests(caches)


@torch.no_grad()
def test_a_model_whose_layers_see_chunks_of_the_text_is_not_joined() -> None:
    """The first tokens of a chunk see few others, which the number of cached tokens does not say."""
    options = {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_hidden_layers": 4, "head_dim": 16}
    model = tiny_models.build("llama4_text", **options, num_key_value_heads=2, attention_chunk_size=8)
    caches = [Cache(model, "Dense()"), Cache(model, "Dense()")]
    with pytest.raises(ValueError, match="see a chunk of the text alone"):
        joint_requests(caches)
    made = Generator(model, skimkv.parse("Dense()"), Conversations(0, 0))
    assert made.begin(made.prompt([3, 4, 5], {}, 4), threading.Event(), lambda new: False) is None
    ours, stock, given = caches[0], DynamicCache(config=model.config), tiny_models.prompt(n=13)
    for token in range(12):
        found, expected = (model(given, past_key_values=cache).logits for cache in (ours, stock))
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        given = torch.tensor([[token]])


@torch.no_grad()
@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
def test_sliding_layers_that_share_a_step_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts in one batch, before and after they fill the window, and one of them alone in between."""
    model, steps = tiny_models.family("gemma3"), list[Any]()
    take = _JointStep.take
    monkeypatch.setattr(_JointStep, "take", lambda self, run: steps.append(self) or take(self, run))
    caches, stock = [], []
    for n in (3, 9, 20):
        caches.append(Cache(model, "Dense()"))
        stock.append(DynamicCache(config=model.config))
        for cache in (caches[-1], stock[-1]):
            model(tiny_models.prompt(n=n, seed=n), past_key_values=cache)
    for i in range(12):
        chosen = [1] if i == 5 else [0, 1, 2]
        tokens = torch.tensor([[3 + i + row] for row in chosen])
        positions = torch.tensor([[caches[row].get_seq_length()] for row in chosen])
        joint = joint_requests([caches[row] for row in chosen])
        found = model(tokens, past_key_values=joint, position_ids=positions).logits
        expected = [
            model(token[None], past_key_values=stock[row]).logits for row, token in zip(chosen, tokens, strict=True)
        ]
        assert (found - torch.cat(expected)).abs().max() <= 1e-4 * found.abs().max()
    assert len(steps) == 11 and all(None not in step.addresses for step in steps)


@pytest.mark.parametrize("count", [1, 3])
def test_the_memory_of_answers_ends_with_them(count: int) -> None:
    made = generator("SparQ(r=4, k=16)")
    answers = [Asked(20 + i, 6, 0, {}).begin(made, []) for i in range(count)]
    for answer in answers:
        answer.read()
    while all(answer.is_open for answer in answers):
        for answer, logits in zip(answers, made.step(answers), strict=True):
            answer.choose(logits)
    caches = [weakref.ref(answer.cache) for answer in answers]
    for answer in answers:
        answer.end()
    del answer, answers
    gc.collect()
    assert [cache() for cache in caches] == [None] * count


@torch.no_grad()
def test_rows_of_different_lengths_need_positions() -> None:
    model, caches = tiny_models.family("llama"), []
    for n in (5, 9):
        caches.append(Cache(model, "Dense()"))
        model(tiny_models.prompt(n=n), past_key_values=caches[-1])
    joint, token = joint_requests(caches), torch.tensor([[3], [4]])
    with pytest.raises(ValueError, match="need position_ids"):
        model(token, past_key_values=joint)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    with pytest.raises(ValueError, match="take no attention mask"):
        model(token, past_key_values=joint, position_ids=torch.tensor([[5], [9]]), attention_mask=mask)


class Ask:
    """Requests to a worker of its own, without HTTP."""

    def __init__(self, method: str, parallel: int, count: int = 0) -> None:
        self.generator, self.tokenizer = generator(method, count=count), tiny_models.tokenizer()
        self.worker = Worker(self.generator, self.tokenizer, parallel)

    def __call__(
        self, n: int, new: int, stop: str = "", leaves_after: int = 0, text: int = 0, **fields: Any
    ) -> tuple[str, Ended | None]:
        """The text of an answer and its end; None if the client left after so many pieces."""
        ids = tiny_models.prompt(n=n, seed=text)[0].tolist()
        task = Task(self.generator.prompt(ids, fields, new), [stop] if stop else [])

        async def ask() -> tuple[str, Ended | None]:
            answer, gone = "", threading.Event()
            async for _, piece in self.worker.answers([task], gone):
                if isinstance(piece, Ended):
                    return answer, piece
                answer += str(piece)
                if 0 < leaves_after <= answer.count("w"):
                    gone.set()
                    break
            return answer, None

        return asyncio.run(ask())

    def end(self) -> None:
        """End the worker's thread when it has nothing to do."""
        self.worker._waiting.put(None)
        self.worker._thread.join(60)
        assert not self.worker._thread.is_alive()


@pytest.mark.parametrize("method", ["SparQ(r=4, k=16)", "H2O(k=24)"])
def test_a_worker_of_many_requests(method: str) -> None:
    """More requests than rows; two stop at a string, two are drawn, one is of beams, and one client leaves."""
    many: list[dict[str, Any]] = [{"n": 20 + 7 * i, "new": 10 + 3 * (i % 4), "text": i} for i in range(10)]
    for i in (3, 8):
        many[i] |= {"temperature": 1.3, "seed": i}
    one = Ask(method, 1)
    many[1]["stop"] = many[6]["stop"] = one(**many[1])[0].split()[6]
    many[5] |= {"generation_config": {"num_beams": 2}}
    expected = [one(**each) for each in many]
    assert expected[1][1] is not None and expected[1][1].new_tokens <= 7 and not expected[1][1].by_length
    several = Ask(method, 4)
    with ThreadPoolExecutor(11) as threads:
        leaving = threads.submit(several, 50, 100, leaves_after=5)
        found = list(threads.map(lambda each: several(**each), many))
    assert leaving.result()[1] is None
    assert found == expected
    deadline = time.monotonic() + 60
    while several.worker.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert several.worker.running == several.worker.waiting == several.worker.cache_bytes == 0
    totals = several.generator.totals
    assert totals.new_tokens >= sum(end.new_tokens for _, end in expected if end is not None) + 5
    assert totals.new_tokens < 10 * 25 + 60  # the one whose client left did not go on to its end
    for asked in (one, several):
        asked.end()


def steps_of(ask: Ask, prompts: list[list[int]], new: int, gone_after: int = 0) -> tuple[list[int], list[Ended]]:
    """How many answers to the prompts of one request shared each step, and how they ended.

    gone_after: the client leaves after so many pieces.
    """
    steps, ended, pieces, step = list[int](), dict[int, Ended](), 0, ask.generator.step
    tasks = [Task(ask.generator.prompt(ids, {}, new)) for ids in prompts]
    ask.generator.step = lambda answers: steps.append(len(answers)) or step(answers)  # type: ignore[method-assign]

    async def answer() -> None:
        nonlocal pieces
        gone = threading.Event()
        async for index, piece in ask.worker.answers(tasks, gone):
            pieces += 1
            if isinstance(piece, Ended):
                ended[index] = piece
            if pieces == gone_after:
                gone.set()
                break

    asyncio.run(answer())
    ask.generator.step = step  # type: ignore[method-assign]
    return steps, [ended[index] for index in sorted(ended)]


def test_the_prompts_of_one_request_share_steps() -> None:
    ask = Ask("Dense()", 3, count=4)
    prompts = [tiny_models.prompt(n=20 + i, seed=i)[0].tolist() for i in range(5)]
    steps, ended = steps_of(ask, prompts, 12)
    assert [end.prompt_tokens for end in ended] == [20, 21, 22, 23, 24] and max(steps) == 3 and len(steps) < 3 * 12
    steps, ended = steps_of(ask, prompts, 40, gone_after=4)
    assert ended == []
    deadline = time.monotonic() + 60
    while ask.worker.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ask.worker.running == ask.worker.waiting == 0
    ask.end()


@pytest.mark.parametrize(("method", "reused"), [("Dense()", [0, 50, 50, 50]), ("H2O(k=24)", [0, 0, 0, 0])])
def test_prompts_of_one_request_that_begin_alike(method: str, reused: list[int]) -> None:
    """What they have in common is read once, if the method keeps every token, and if the answers are short enough."""
    beginning, *ends = (tiny_models.prompt(n=n, seed=n)[0].tolist() for n in (50, 10, 11, 12, 13))
    prompts, most = [beginning + end for end in ends], 50 // ALIKE
    for new, expected in ((most, reused), (most + 1, [0, 0, 0, reused[-1]])):
        ask = Ask(method, 3, count=4)
        ask(20, 2)  # after which it is known what the method keeps
        steps, ended = steps_of(ask, prompts, new)
        assert [end.reused_tokens for end in ended] == expected and max(steps) == 3
        assert (steps[: new - 1] == [1] * (new - 1)) == any(expected[1:3])
        if any(expected[1:3]):
            assert len(ask.generator.conversations) == 2  # they are one conversation, beside that of 20 tokens
        ask.end()


def test_clients_that_have_gone_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an answer is made, three others wait; one of their clients leaves."""
    ask, begun, go_on = Ask("Dense()", 1), threading.Event(), threading.Event()
    begin = ask.generator.begin

    def wait(*args: Any) -> Open | None:
        begun.set()
        assert go_on.wait(60)
        return begin(*args)

    monkeypatch.setattr(ask.generator, "begin", wait)
    task, gone = Task(ask.generator.prompt([3, 4, 5], {}, 2)), threading.Event()
    ended: list[Ended] = []

    async def answer(cancelled: threading.Event) -> None:
        ended.extend([piece async for _, piece in ask.worker.answers([task], cancelled) if isinstance(piece, Ended)])

    async def several() -> None:
        asked = [asyncio.create_task(answer(threading.Event()))]
        assert await asyncio.to_thread(begun.wait, 60)
        asked += [asyncio.create_task(answer(cancelled)) for cancelled in (threading.Event(), threading.Event())]
        leaving = asyncio.create_task(answer(gone))
        await asyncio.sleep(0)
        assert ask.worker.waiting == 3
        gone.set()
        assert ask.worker.waiting == 2
        go_on.set()
        await asyncio.gather(*asked)
        leaving.cancel()

    asyncio.run(several())
    assert len(ended) == 3 and ask.worker.waiting == 0
    ask.end()


def test_products_know_of_how_many_tokens_a_piece_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that no kept cache holds, also after a piece that failed."""
    made, seen = generator("Dense()", count=2), []
    read, ids = made._read, tiny_models.prompt(n=50)[0].tolist()
    answer_alone(made, made.prompt(ids, {}, 2))

    def noted(cache: Cache, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((tokens.shape[1], ops.tokens_of_prompt.get()))
        if len(seen) == 3:
            raise RuntimeError("no memory")
        return read(cache, tokens, positions)

    monkeypatch.setattr(made, "_read", noted)
    answer = made.begin(made.prompt([*ids, *ids[:40]], {}, 3), threading.Event(), lambda new: False)
    assert answer is not None and answer.cache.get_seq_length() == 50
    answer.read(24)
    answer.read()
    assert seen == [(24, 40), (16, 40)] and ops.tokens_of_prompt.get() == 0
    other = made.begin(made.prompt(ids[:30][::-1], {}, 3), threading.Event(), lambda new: False)
    assert other is not None
    with pytest.raises(RuntimeError, match="no memory"):
        other.read(16)
    assert seen[2] == (16, 30) and ops.tokens_of_prompt.get() == 0


def test_a_long_prompt_beside_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in pieces, between which the others get their tokens; a short one that comes later is read first."""
    ask, events, read, choose = Ask("SparQ(r=4, k=16)", 4), [], Open.read, Open.choose
    reading = threading.Event()

    def noted_read(answer: Open, most: int | None = None) -> None:
        if len(answer.prompt.ids) == 120:
            reading.set()
        read(answer, most)
        events.append(("read", len(answer.prompt.ids)))

    def noted_choose(answer: Open, logits: Any) -> None:
        choose(answer, logits)
        events.append(("token", len(answer.prompt.ids)))

    monkeypatch.setattr(Open, "read", noted_read)
    monkeypatch.setattr(Open, "choose", noted_choose)
    monkeypatch.setattr(worker_module.PieceLength, "within", lambda pace, seconds: 8)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(ask, 10, 90)
        while ("token", 10) not in events:
            time.sleep(0.001)
        long = threads.submit(ask, 120, 4)
        assert reading.wait(60)
        short = threads.submit(ask, 9, 4)
        texts = [each.result()[0] for each in (first, long, short)]
    monkeypatch.undo()
    lone = Ask("SparQ(r=4, k=16)", 1)
    assert texts == [lone(10, 90)[0], lone(120, 4)[0], lone(9, 4)[0]]
    of_long = [i for i, event in enumerate(events) if event == ("read", 120)]
    assert len(of_long) == 14
    for before, after in itertools.pairwise(of_long):
        between = events[before:after]
        assert between.count(("token", 10)) >= 1  # and never two pieces without a token in between
    assert events.index(("token", 9)) < of_long[-1]
    for asked in (ask, lone):
        asked.end()


def test_an_error_in_one_answer_leaves_the_others() -> None:
    ask = Ask("Dense()", 3)

    class Bad:
        """Fails at the third token."""

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] == 33:
                raise ValueError("no such token")
            return scores

    prompt = ask.generator.prompt(tiny_models.prompt(n=30)[0].tolist(), {}, 10)
    bad = Task(prompt.__class__(prompt.ids, prompt.config, None, [Bad()]))

    async def fail() -> None:
        async for _ in ask.worker.answers([bad], threading.Event()):
            pass

    with ThreadPoolExecutor(3) as threads:
        good = [threads.submit(ask, n, 40) for n in (25, 35)]
        with pytest.raises(ValueError, match="no such token"):
            asyncio.run(fail())
        texts = [each.result()[0] for each in good]
    lone = Ask("Dense()", 1)
    assert texts == [lone(25, 40)[0], lone(35, 40)[0]]
    for asked in (ask, lone):
        asked.end()


def test_conversations_that_go_on_together() -> None:
    """Two conversations of which each starts from its own kept cache, and their answers are those without."""
    ask, lone = Ask("SparQ(r=4, k=16)", 2, count=4), Ask("SparQ(r=4, k=16)", 1)
    with ThreadPoolExecutor(2) as threads:
        first = list(threads.map(lambda text: ask(60, 10, text=text), (1, 2)))
        again = list(threads.map(lambda text: ask(60, 20, text=text), (1, 2)))
    assert [answer for answer, _ in first] == [lone(60, 10, text=text)[0] for text in (1, 2)]
    assert [answer for answer, _ in again] == [lone(60, 20, text=text)[0] for text in (1, 2)]
    assert [end.reused_tokens for _, end in again if end is not None] == [58, 58]
    for asked in (ask, lone):
        asked.end()
