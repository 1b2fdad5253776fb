"""Evaluation: one prompt serves all methods exactly, runs resume exactly, the table is right."""

from __future__ import annotations

import json
import math

import pytest
import torch

import skimkv
from skimkv.eval import budgets, plan, results, tasks
from skimkv.eval import run as evaluate
from skimkv.eval import shared_prompt as prompts
from skimkv.eval.answer import Ask, answer
from support.tiny_models import family, prompt, tokenizer

METHODS = [
    "Dense()", "SparQ(r=4, k=8)", "SparQ(r=4, k=8, channels='int8')", "TopK(k=8)", "LowRank(r=4, k=8)",
    "LMInfinite(k=8, initial=2)", "H2O(k=8)", "SubGen(k=6, recent=4)", "SubGenStream(delta=1.0, t=2, s=8)",
]  # fmt: skip
TASK = "record(lines=12, asked=3)"
THREE = ("Dense()", "SparQ(r=8, k=16)", "LMInfinite(k=32)")


@pytest.fixture(autouse=True)
def one_thread(_threads_and_seed):
    torch.set_num_threads(1)  # the models are too small for two


@pytest.fixture(scope="module")
def builtin():
    return skimkv.load("builtin")


def make(builtin, task=TASK, mode="blind", methods=THREE, limit=6, **options):
    run = plan.Run(*builtin, "builtin", **{"batch": 2, **options})
    return run, plan.job(run, tasks.parse(task), mode, [skimkv.parse(spec) for spec in methods], None, limit)


def alone(model, method, ids, feed, new, end):
    """Greedy after the method's own prompt, one row, token by token."""
    cache, said = skimkv.Cache(model, method), []
    logits = model(ids, past_key_values=cache).logits[0, -1]
    for step in range(len(feed) + new):
        token = feed[step] if step < len(feed) else int(logits.argmax())
        if step >= len(feed):
            if token == end:
                break
            said.append(token)
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return said


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gemma3"])
@torch.inference_mode()
def test_one_prompt_is_as_good_as_one_per_method(name):
    """Padded prompts of two lengths, three rows on them with scripts of different length."""
    model, words, ids = family(name), tokenizer(), prompt(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    held, logits = prompts.read(model, ids, mask)
    rows, feeds = [0, 0, 1], [[5, 6, 7], [9], []]
    for spec in METHODS:
        if name == "gemma2" and "Stream" in spec:
            continue  # it cannot cap logits
        method = skimkv.parse(spec)
        cache = prompts.fill(model, held, method)
        asks = [Ask(feed, new=9) for feed in feeds]
        once, again = (answer(model, words, prompts.fork(cache, rows), logits[rows], asks, mask[rows]) for _ in "12")
        assert once == again, "a fork leaves the cache as it was"
        for row, feed, said in zip(rows, feeds, once, strict=True):
            own = alone(model, method, ids[row : row + 1, 7 if row == 0 else 0 :], feed, 9, words.eos_token_id)
            assert (said.text, said.tokens) == (words.decode(own, skip_special_tokens=True), len(own)), (spec, row)
    skimkv.detach(model)


def test_modes_read_the_same_tokens(builtin):
    """Blind: only the record is dense, shared by its questions; aware: all of it is."""
    _, blind = make(builtin)
    _, aware = make(builtin, mode="aware")
    assert [len(group) for group in blind.groups] == [3, 3] and [len(group) for group in aware.groups] == [1] * 6
    for one, other in zip(*([i for group in job.groups for i in group] for job in (blind, aware)), strict=True):
        assert one.ask.feed and not other.ask.feed and one.prompt + one.ask.feed == other.prompt
        text = builtin[1].decode(other.prompt, skip_special_tokens=True)
        assert text == one.example.context + one.example.question


def test_records(builtin):
    run, job = make(builtin)
    found = list(evaluate.records(run, job, set()))
    assert [evaluate.key_of(record) for record in found] != [] and len(found) == 18
    assert {evaluate.key_of(record) for record in found} == set(evaluate.wanted(run, [job]))
    dense = [record for record in found if record["method"] == "Dense()"]
    assert sum(record["score"] for record in dense) >= 5, "a record of 12 lines is easy for the bundled model"
    for record in found:
        assert record == json.loads(json.dumps(record))
        assert record["mode"] == "blind" and record["seed"] == 0 and record["versions"]["skimkv"] == skimkv.__version__
        assert record["steps"] == record["fed_tokens"] + record["new_tokens"] - (record["output"] == "" or 1)
    for record in dense:
        n, steps = record["prompt_tokens"], record["steps"]
        moved = sum(2 * 4 * 2 * 64 * (n + i + 1) * 4 for i in range(steps))  # k and v, 4 layers, 2 heads of 64
        assert record["bytes"] == record["dense_bytes"] == 4 * record["elements"] == moved


def test_a_batch_of_prompts_says_what_each_says_alone(builtin):
    """Contexts of different length in one batch, question-aware; more rows than examples on a context, blind."""
    for mode in plan.MODES:
        each, many = (make(builtin, mode=mode, batch=batch) for batch in (1, 4))
        one, other = (list(evaluate.records(*made, set())) for made in (each, many))
        short = [[{**r, "batch": 0} for r in sorted(found, key=evaluate.key_of)] for found in (one, other)]
        assert short[0] == short[1]


def test_counted_is_predicted(builtin):
    methods = ["Dense()", "SparQ(r=8, k=16)", "H2O(k=32)"]
    made = (make(builtin, methods=methods, counted=counted, limit=3) for counted in (False, True))
    predicted, counted = (list(evaluate.records(*each, set())) for each in made)
    figures = [[(r["method"], r["id"], r["elements"], r["bytes"]) for r in found] for found in (predicted, counted)]
    assert sorted(figures[0]) == sorted(figures[1])
    assert {r["backend"] for r in counted} == {"ref"} and all(r["counted"] for r in counted)


def test_forced_text_is_scored_by_its_bits(builtin):
    """The bits of a text given token by token are those of one forward pass, dense."""
    model, words = builtin
    ids = words("acorn-actor: 12345\nalbum-alley: 23451\nacorn-actor: 12345\n", return_tensors="pt").input_ids
    with torch.inference_mode():
        held, logits = prompts.read(model, ids[:, :9])
        feed = ids[0, 9:].tolist()
        said = answer(model, words, prompts.fill(model, held, skimkv.Dense()), logits, [Ask(feed, len(feed) - 2)])
        skimkv.detach(model)
        whole = model(ids).logits[0].log_softmax(-1)
    expected = -sum(float(whole[i - 1, ids[0, i]]) for i in range(11, ids.shape[1])) / math.log(2)
    assert said[0].bits == pytest.approx(expected, rel=1e-5) and said[0].steps == len(feed) - 1


def test_where_an_answer_ends():
    assert Ask([], stop="\n").cut("\n12\n3") == ("\n12", True)
    assert Ask([], stop="\n").cut(" \n") == (" \n", False)
    assert Ask([], chars=3).cut("abcd") == ("abc", True) and Ask([]).cut("abcd") == ("abcd", False)


def row(method, id_, score, **more):
    base = {"model": "m", "dtype": "float32", "seed": 0, "counted": False, "task": "lines", "mode": "blind"}
    return {**base, "method": method, "id": id_, "score": score, "steps": 2, "bytes": 10, "dense_bytes": 40, **more}


def test_summary():
    """By hand: differences 0, -1, -1 have mean -2/3, standard error 1/3, and t(2) = 4.303."""
    dense = [row("Dense()", str(i), 1.0) for i in range(4)]
    other = [row("TopK(k=2)", str(i), s) for i, s in enumerate([1.0, 0.0, 0.0])]
    first, second = results.summary([*dense, *other])
    assert (first.n, first.mean, first.stderr, first.diff_to_dense) == (4, 1.0, 0.0, 0.0)
    assert (second.n, second.mean, second.bytes_per_token, second.share) == (3, 1 / 3, 5, 0.25)
    assert second.stderr == pytest.approx(1 / 3) and second.diff_to_dense == pytest.approx(-2 / 3)
    assert second.diff_low == pytest.approx(-2 / 3 - 4.3027 / 3, abs=1e-4)
    assert second.diff_high == pytest.approx(-2 / 3 + 4.3027 / 3, abs=1e-4)
    assert results.summary(other)[0].diff_to_dense is None
    assert results.summary(other[:1])[0].stderr is None
    other[0]["score"] = math.nan  # a model that overflows
    (third,) = results.summary(other)
    assert math.isnan(third.stderr) and json.dumps(third.json(), allow_nan=False)
    assert results.quantile(30) == pytest.approx(2.0423, abs=1e-3)


def test_sweeps(builtin):
    run, job = make(builtin, task="record(lines=60, asked=1)", methods=[], limit=1)
    grid, none = plan.servable(run, [skimkv.parse(spec) for spec in plan.PAPER])
    assert len(grid) == 39 and none == []
    _, (why,) = plan.servable(run, [skimkv.parse("SparQ(r=65, k=8)")])
    assert "65" in why
    found, none = plan.matched(run, job)
    n = len(job.groups[0][0].prompt)
    ((shape, dtype),) = prompts.shapes(run.model)
    dense = found[0].traffic(n, shape, dtype).bytes
    shares = {type(m).__name__: [] for m in found[1:]}
    for method in found[1:]:
        if type(method).__name__ != "SubGenStream":
            shares[type(method).__name__].append(method.traffic(n, shape, dtype).bytes / dense)
    assert len(shares["LMInfinite"]) == 3 and max(shares["LMInfinite"]) <= 1 / 2 * budgets.SLACK
    assert all("1/" in note for note in none)
