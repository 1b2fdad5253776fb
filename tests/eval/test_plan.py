"""Plans: both modes feed the same tokens, sweeps fit the model, and matched methods read what they should."""

from __future__ import annotations

import copy

import pytest

import skimkv
from skimkv.eval import budgets, sweeps, tasks
from skimkv.eval.plan import matched_to, plan_evaluation, plan_job, supported_methods
from skimkv.eval.shared_prompt import layer_shapes
from support.evaluation import TASK, builtin, small_job


def test_modes_read_the_same_tokens():
    """Blind: only the record is dense, shared by its questions; aware: all of it is."""
    _, blind = small_job()
    _, aware = small_job(mode="aware")
    assert [len(group) for group in blind.groups] == [3, 3] and [len(group) for group in aware.groups] == [1] * 6
    pairs = zip(*([planned for group in job.groups for planned in group] for job in (blind, aware)), strict=True)
    for after, before in pairs:
        assert after.question.feed and not before.question.feed
        assert after.prompt + after.question.feed == before.prompt
        text = builtin()[1].decode(before.prompt, skip_special_tokens=True)
        assert text == after.example.context + after.example.question


def test_a_chat_is_a_turn_of_the_model_s_template():
    """Blind, the prompt ends with the context, inside the turn; what follows it is the rest of the turn."""
    setup, _ = small_job()
    tokenizer = copy.deepcopy(setup.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}user: {{ m.content | trim }}\nmodel:{% endfor %}"
    chat, task = setup._replace(tokenizer=tokenizer, chat=True), tasks.parse(TASK)
    blind, aware = (plan_job(chat, task, mode, [skimkv.parse("Dense()")], None, 6) for mode in ("blind", "aware"))
    assert len(blind.groups) == 2 and len(aware.groups) == 6
    for after, before in zip(*([p for group in job.groups for p in group] for job in (blind, aware)), strict=True):
        assert after.prompt + after.question.feed == before.prompt and not before.question.feed
        example, text = after.example, tokenizer.decode(before.prompt, skip_special_tokens=True)
        assert text == f"user: {(example.context + example.question).strip()}\nmodel:"
        assert tokenizer.decode(after.prompt, skip_special_tokens=True).strip() == f"user: {example.context}".strip()
    with pytest.raises(ValueError, match="--chat: this model's tokenizer has no chat template"):
        plan_job(setup._replace(chat=True), task, "blind", [skimkv.parse("Dense()")], None, 1)


def test_a_plan_has_every_task_in_every_mode_once():
    setup, job = small_job()
    task, planned_tasks = tasks.parse(TASK), list[object]()
    methods = [skimkv.parse("Dense()")]
    plan = plan_evaluation(
        setup, [task, task], methods, mode="both", limit=6, on_task=lambda *now: planned_tasks.append(now)
    )
    assert planned_tasks == [(0, TASK), (1, TASK)]
    assert [(job.task.spec, job.mode) for job in plan.jobs] == [(TASK, mode) for mode in sweeps.MODES]
    sources = plan.sources(setup)
    assert len(sources) == 12 and {key.method for key in sources} == {"Dense()"}
    assert {key.id for key in sources} == {planned.example.id for group in job.groups for planned in group}
    with pytest.raises(ValueError, match="65"):
        plan_evaluation(setup, [task], [skimkv.parse("SparQ(r=65, k=8)")])


@pytest.mark.slow
def test_matched_methods_read_the_share_they_should():
    setup, job = small_job("record(lines=60, asked=1)", specs=(), limit=1)
    supported, misfits = supported_methods(setup, [skimkv.parse(spec) for spec in sweeps.PAPER])
    assert len(supported) == 39 and misfits == []
    matched, notes = matched_to(setup, job)
    n = len(job.groups[0][0].prompt)
    ((shape, dtype),) = layer_shapes(setup.model)
    dense = matched[0].traffic(n, shape, dtype).bytes
    shares: dict[str, list[float]] = {}
    for method in matched[1:]:
        if not method.store(shape, dtype).traffic_depends_on_data:
            shares.setdefault(type(method).__name__, []).append(method.traffic(n, shape, dtype).bytes / dense)
    assert len(shares["LMInfinite"]) == 3 and max(shares["LMInfinite"]) <= 1 / 2 * budgets.SLACK
    for own in shares.values():
        assert all(min(share / part for part in sweeps.SHARES) <= budgets.SLACK for share in own)
    assert all("1/" in note and job.task.spec in note for note in notes)


@pytest.fixture
def two_methods(monkeypatch):
    """Methods that are solved by their closed form alone, which is quick."""
    quick = {name: skimkv.METHODS[name] for name in ("SparQ", "StreamingLLM")}
    monkeypatch.setattr(budgets, "METHODS", quick)


@pytest.mark.parametrize("fails", ["k = 6 must be odd", "got an unexpected keyword argument 'k'"])
def test_a_method_of_others_that_cannot_be_solved_is_left_out(monkeypatch, fails):
    """Its parameters mean something else; what skimkv's own methods raise is an error."""

    def at_share(method, *_):
        if method is skimkv.H2O:
            raise (TypeError if "argument" in fails else ValueError)(fails)
        return skimkv.Dense()

    monkeypatch.setattr(budgets, "at_share", at_share)
    monkeypatch.setattr(budgets, "METHODS", {name: skimkv.METHODS[name] for name in ("H2O", "TOVA")})
    monkeypatch.setattr(skimkv.H2O, "__module__", "elsewhere")
    matched, left_out = budgets.matched_methods([], shares=[0.25])
    assert len(matched) == 2 and left_out == [f"H2O at 1/4 of dense: no parameters were found ({fails})"]
    monkeypatch.undo()
    monkeypatch.setattr(budgets, "at_share", at_share)
    with pytest.raises((TypeError, ValueError), match=fails):
        budgets.matched_methods([], shares=[0.25])


@pytest.mark.usefixtures("two_methods")
def test_the_matched_sweep_runs_sparq_with_and_without_the_mean_value():
    """The bundled model has two query heads for each KV head: SparQ's step 3 is off there unless it is asked for."""
    setup, job = small_job("record(lines=60, asked=1)", specs=(), limit=1)
    matched = matched_to(setup, job)[0]
    sparq = [method for method in matched if isinstance(method, skimkv.SparQ)]
    default, with_mean = ([m for m in sparq if m.mean_value is value] for value in (None, True))
    assert len(default) > 0 and len(sparq) == 2 * len(default)
    assert [(m.r, m.k) for m in default] == [(m.r, m.k) for m in with_mean]
    beside = [matched[matched.index(method) + 1] for method in default]
    assert beside == with_mean, "each form stands beside the other"


@pytest.mark.usefixtures("two_methods")
def test_the_matched_sweep_leaves_out_what_the_model_cannot_do(monkeypatch):
    """A model without rotary embeddings: no method can count positions in the cache."""

    def refuse(model):
        raise ValueError("no rotary embeddings")

    monkeypatch.setattr("skimkv.eval.plan.key_rotations", refuse)
    matched, notes = matched_to(*small_job("record(lines=60, asked=1)", specs=(), limit=1))
    assert not any(isinstance(method, skimkv.StreamingLLM) for method in matched)
    assert sum("StreamingLLM" in note and "no rotary embeddings" in note for note in notes) == 3


def test_examples_longer_than_the_positions_are_for_methods_that_count_them_in_their_cache():
    setup, _ = small_job()
    dense, text, cache = map(skimkv.parse, ("Dense()", "LMInfinite(k=64)", "LMInfinite(k=64, positions='cache')"))
    long, short = tasks.parse("passkey(length=9500)"), tasks.parse("passkey(length=512)")
    with pytest.raises(ValueError, match="no example fits the model's 8192 positions"):
        plan_evaluation(setup, [long], [dense, text], limit=2)
    plan = plan_evaluation(setup, [short, long], [dense, text, cache], limit=2)
    assert [(job.task.spec, job.methods) for job in plan.jobs] == [
        (short.spec, [dense, text, cache]),
        (long.spec, [cache]),
    ]
    assert "LMInfinite(k=64, positions='cache')" in plan.notes[-1]
    for planned in (planned for group in plan.jobs[1].groups for planned in group):
        ids = planned.prompt + planned.question.feed
        assert len(planned.prompt) == 8192 and len(ids) > 9000
        whole = builtin()[1].decode(ids, skip_special_tokens=True)
        assert whole == planned.example.context + planned.example.question
