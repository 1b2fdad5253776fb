"""Tasks: their examples are what the papers describe, the same for the same seed; scores by hand."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import types
from itertools import islice
from pathlib import Path

import pytest

from skimkv.eval import tasks
from skimkv.eval.tasks import (
    Example,
    answers,
    bpc,
    conversation,
    kl,
    lines,
    needle,
    passkey,
    record,
    repetition,
    squad,
    summarise,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
WORDS = "the quick brown fox jumps over a lazy dog and runs".split()


def text(n: int) -> str:
    """n characters of which no part repeats."""
    return " ".join(f"{WORDS[i % 11]}{i}" for i in range(n))[:n]


@pytest.fixture
def folder(tmp_path):
    """A small one of everything, in the formats of the data that is public."""
    (tmp_path / "tinyshakespeare.txt").write_text(text(30_000))
    articles = "".join(f" \n = Title {i} = \n \n {text(700)} \n = = Section = = \n {text(300)} \n" for i in range(4))
    (tmp_path / "wikitext-test.txt").write_text(articles)
    (tmp_path / "essays").mkdir()
    for name in "ab":
        (tmp_path / "essays" / f"{name}.txt").write_text(f"It was {name}. " * 300)
    paragraph = [
        {"context": f"Of {i}.", "qas": [
            {"id": f"{i}{j}", "question": f"What {i}{j}?", "answers": [{"text": f"long {i}{j}"}, {"text": f"a{i}{j}"}]}
            for j in range(2)]}
        for i in range(10)
    ]  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"title": "A_B", "paragraphs": paragraph}]}))
    trivia = {"id": "t1", "question": "Who?", "answers": ["Me", "I"], "context": "It was me."}
    (tmp_path / "triviaqa.jsonl").write_text(json.dumps(trivia) + "\n")
    story = {"article": "###\nArticle: A b c.\n\nSummarize the above article in 1 sentence.\n", "summary_gt": "A b."}
    (tmp_path / "xsum.jsonl").write_text(json.dumps(story) + "\n")
    news = [{"id": str(n), "article": "x" * n, "highlights": "y"} for n in (3999, 4000, 8000, 8001)]
    (tmp_path / "cnn.jsonl").write_text("\n".join(map(json.dumps, news)))
    keys = [f"k{i}-x" for i in range(30)]
    body = "".join(f"line {key}: REGISTER_CONTENT is <{1000 + i}>\n" for i, key in enumerate(keys))
    shown = f"Head:\n\n{body}\nNow?"
    rows = [{"random_idx": [keys[i], i], "expected_number": 1000 + i, "prompt": shown} for i in (0, 7, 29)]
    (tmp_path / "lines_30.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.parametrize(
    "spec",
    [
        "lines(lines=1000000000)", "lines(lines=50000)", "lines(lines=None)", "record(lines=1000000000, asked=1)",
        "record(lines=2.5)", "record(lines='x')", "record(asked=None)", "passkey(length=1000000000000)",
        "passkey(length=None)", "needle(lengths=None)", "needle(lengths=())", "needle(lengths='abc')",
        "needle(lengths=(300, 2.5))", "needle(depths=1.5)", "repetition(context=100000000000)",
        "conversation(lines=50000)", "conversation(turns=0)", "conversation(lines=2, turns=3)",
        "repetition(context=None)", "bpc(context=100000000000)", "bpc(reference=1e9)", "squad(confusions=100000000)",
    ],
)  # fmt: skip
def test_sizes_that_no_text_has_are_refused_in_one_line(folder, spec):
    """At once: a task that draws words without end would look for the next new pair for ever."""
    data = None if spec.startswith(("lines", "record", "passkey", "conversation")) else folder
    with pytest.raises(ValueError, match=spec.split("(")[1].split("=")[0].removesuffix("s")) as error:
        next(tasks.parse(spec).examples(data, 0))
    assert "\n" not in str(error.value)


def changed_somewhere(content, draw):
    """The same JSON value with one of its parts replaced by something else, or left out."""
    if isinstance(content, (dict, list)) and content and draw.random() < 0.85:
        copy = content.copy()
        at = draw.choice([*content]) if isinstance(content, dict) else draw.randrange(len(content))
        if draw.random() < 0.15:
            del copy[at]
        else:
            copy[at] = changed_somewhere(content[at], draw)
        return copy
    return draw.choice([None, True, "x", "", -1, 1.5, 10**30, [], {}, [[]], ["x"], {"x": 1}])


@pytest.mark.parametrize(
    ("spec", "name"), [("lines(lines=12)", "lines_30.jsonl"), ("squad(confusions=2)", "squad.json"),
                       ("triviaqa", "triviaqa.jsonl"), ("summarise(corpus='xsum')", "xsum.jsonl")],
)  # fmt: skip
def test_damaged_data_is_read_or_refused_in_one_line(folder, monkeypatch, spec, name):
    monkeypatch.setattr(summarise, "_rouge", lambda: None)
    path, draw, messages = folder / name, random.Random(0), []
    contents = list(map(json.loads, path.read_text().splitlines()))
    for _ in range(60):
        path.write_text("\n".join(json.dumps(changed_somewhere(content, draw)) for content in contents))
        try:
            for example in islice(tasks.parse(spec).examples(folder, 0), 3):
                assert all(isinstance(text, str) for text in (example.id, example.context, example.question))
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 20 and all("\n" not in message and len(message) < 500 for message in messages)


@pytest.mark.parametrize("spec", [None, 7, tasks.Task, b"lines"])
def test_what_is_no_task_is_refused_in_one_line(spec):
    with pytest.raises(ValueError, match=r"is not a task spec|is a class, not a task"):
        tasks.parse(spec)


SPECS = [
    "record(lines=20, asked=4)", "conversation(lines=20, turns=5)", "passkey(length=300)", "lines(lines=12)",
    "needle(lengths=(200, 250), depths=3)",
    "repetition(context=2000, asked=3)", "bpc(context=300, reference=40)", "squad", "triviaqa",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_examples(spec, folder):
    """The same for a seed, others for another, all ids different, and nothing empty."""
    task = tasks.parse(spec)
    data = None if task.is_made_up and task.module is not lines else folder
    found = list(islice(task.examples(data, 0), 25))
    assert found == list(islice(task.examples(data, 0), 25)) and found[:3] == list(islice(task.examples(data, 0), 3))
    if len(found) > 1 and task.module is not lines:
        assert found != list(islice(task.examples(data, 1), 25))
    assert len({example.id for example in found}) == len(found) > 0
    for example in found:
        context, question = task.prompt(example)
        assert context and (question or example.given) and all(example.answers)
        right = example.answers[0]
        assert right in context or example.given or task.spec in ("squad", "triviaqa")
        if not example.given:
            assert [task.module.score(said, example) > 0.9 for said in (right, "no", "")] == [True, False, False]


def test_a_record_longer_than_its_words():
    (short,), (long,) = record.records(1, 191, 3), record.records(1, 400, 3)
    assert len(set(re.findall(r"[a-z]+", short.context))) == 382
    keys = re.findall(r"^([a-z]+-[a-z]+): \d{5}$", long.context, flags=re.MULTILINE)
    assert len(keys) == len(set(keys)) == 400
    for question, answer in long.questions:
        assert f"\n{question}{answer}\n" in f"\n{long.context}"
    with pytest.raises(ValueError, match="asked <= lines <= 36481"):
        record.records(1, 36482, 3)


def test_record():
    """Every part of the lines is asked for, the same for a seed; an answer is a line."""
    (one, two), (again, _) = record.records(2, 100, 10, seed=3), record.records(2, 100, 10, seed=3)
    assert one == again != two and one.context.count("\n") == 100
    keys = [line.split(" ")[0] for line in one.context.splitlines()]
    assert sorted(keys.index(question.strip()) // 10 for question, _ in one.questions) == list(range(10))
    said = {"123\nx: 4": 1, "123": 1, "1234\n": 0, "12": 0, "": 0, "\n123": 0}
    assert {output: record.score(output, example("123")) for output in said} == said
    for asked, says in ((11, "asked = 11, lines = 10: need 1 <= asked <= lines"), (0, "asked = 0 must be")):
        with pytest.raises(ValueError, match=says):
            record.records(1, 10, asked)


def test_specs():
    task = tasks.parse("needle( depths = 3,lengths=(200,))")
    assert task.spec == "needle(lengths=(200,), depths=3)" == tasks.parse(task.spec).spec
    assert tasks.parse("squad()").spec == "squad" and "confusions=7" in tasks.parse("squad").sizes
    for wrong in ("", "lines(", "lines(3)", "needl", "lines(data='x')", "lines(lines=__import__('os'))", "a.b()"):
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            tasks.parse(wrong)
    for wrong in ("lines(lines=0)", "passkey(length=9)", "needle(depths=1)", "record(lines=3, asked=4)"):
        with pytest.raises(ValueError, match=r"must be|need"):
            next(tasks.parse(wrong).examples(None, 0))


def test_every_task_is_listed():
    here = Path(tasks.__file__).parent
    modules = {
        ".".join(path.relative_to(here).with_suffix("").parts)
        for path in here.rglob("*.py")
        if "\ndef examples(" in path.read_text()
    }
    assert modules == {tasks.parse(name).module.__name__.removeprefix(f"{tasks.__name__}.") for name in tasks.TASKS}


def example(*right: str, **more: object) -> Example:
    return Example("0", "", "", right, **more)  # type: ignore[arg-type]


def test_repetition_score():
    """Characters before the first difference; ending early is not perfect, as it is in the authors' code."""
    wanted = example(" abcdef")
    said = {" abcdef": 6, "abcdef and on": 6, "\nabcxef": 3, "abc": 3, "": 0, "xabc": 0}
    assert {output: repetition.score(output, wanted) for output in said} == said


def test_repetition_examples(folder):
    source = (folder / "tinyshakespeare.txt").read_text()
    found = list(repetition.examples(data=folder, context=6000, asked=4, skip=0.2))
    assert len(found) == 4 * (24_000 // 6010) and len({e.context for e in found}) == len(found) // 4
    for e in found:
        place = int(e.id)
        assert place >= 0.2 * len(source) and source[place : place + len(e.question)] == e.question
        after = source[place + len(e.question) :]
        assert after[0].isspace() and after.lstrip().startswith(e.answers[0]) and len(e.answers[0]) == 256
        assert 128 <= len(e.question) < 140 and 6000 <= len(e.context) < 6010 and e.question in e.context
        assert e.answers[0] in e.context and not e.question[0].isspace()
    with pytest.raises(ValueError, match="no room"):
        next(repetition.examples(data=folder, context=400))


@pytest.mark.parametrize("space", [" ", "\n\n", "\n \n \n"])
def test_a_right_repetition_has_the_greatest_score(tmp_path, space):
    """The output goes on as the text does, with its white space in front; all of it fits where a token is a letter."""
    source = space.join(text(20_000).split())
    (tmp_path / "tinyshakespeare.txt").write_text(source)
    for spec in ("repetition(context=2000)", "repetition(context=2000, reference=40, asked=2)"):
        task = tasks.parse(spec)
        for e in islice(task.examples(tmp_path, 0), 20):
            goes_on = source[int(e.id) + len(e.question) :]
            assert task.module.score(goes_on[: min(e.new, e.chars)], e) == task.greatest


def test_squad_never_repeats_the_paragraph(folder):
    """Eight different ones, the right one among them; the shot is the other question, with its shorter answer."""
    for e in squad.examples(data=folder):
        shown = e.context.split("\n")
        i = e.id[0]
        assert len(set(shown)) == len(shown) == 8 and f"Title: A B. Background: Of {i}." in shown
        other = f"{i}{1 - int(e.id[1])}"
        _, question = squad.prompt(e)
        assert question == (
            "\nFrom what you've just read about A B, please answer the following questions."
            f"\nQuestion: What {other}?\nAnswer: a{other}\nQuestion: What {e.id}?\nAnswer:"
        )


def test_answers():
    right, wrong = (" 1978", "1978.", '"1978" was it', "The 1978 one"), ("", "in 1978", "197", "8")
    assert all(answers.score_start(output, example("no", "1978")) for output in right)
    assert not any(answers.score_start(output, example("1978", "")) for output in wrong)
    assert answers.score_start("Norman Conquest", example("The norman conquest.")) == 1


def test_bpc(folder):
    found = list(bpc.examples(data=folder, context=300, reference=40))
    assert len(found) == 4 and all(e.context.startswith(" = Title") for e in found)
    for e in found:
        assert e.given and 300 <= len(e.context) < 312 and 40 <= len(e.answers[0]) < 52
        assert e.answers[0][0].isspace() and not e.context[-1].isspace()
    assert bpc.score(100.0, example("x" * 50)) == 2 and bpc.LOWER
    with pytest.raises(ValueError, match="no article"):
        next(bpc.examples(data=folder, context=3000))


def test_kl(folder):
    """Articles are documents, another text is cut between words; of a folder all texts come, in random order."""
    articles = list(kl.examples(data=folder / "wikitext-test.txt", context=30, reference=10))
    assert len(articles) == 4 and all(e.context.startswith(" = Title") and e.tokens == (30, 10) for e in articles)
    pieces = list(kl.examples(data=folder / "tinyshakespeare.txt", context=300, reference=75))
    source = (folder / "tinyshakespeare.txt").read_text()
    in_order = sorted(pieces, key=lambda e: int(e.id.split(":")[1]))
    assert "".join(e.context for e in in_order) == source and in_order != pieces and len(pieces) == 10
    assert all(3000 <= len(e.context) < 3020 for e in in_order[:-1]) and in_order[1].context.startswith(" ")
    both = list(kl.examples(data=folder, context=300, reference=75))
    assert {e.id for e in pieces} < {e.id for e in both} and len(both) == 14
    assert [e.id for e in both] != [e.id for e in kl.examples(data=folder, seed=1, context=300, reference=75)]
    assert kl.score([0.5, 0.25, 0.0], both[0]) == 0.25 and kl.LOWER and tasks.parse("kl").greatest == math.inf
    (folder / "without texts").mkdir()
    with pytest.raises(ValueError, match=r"holds no \*\.txt"):
        next(kl.examples(data=folder / "without texts"))


def test_needle(folder):
    cells = list(islice(needle.examples(data=folder, count_tokens=len, lengths=(400, 800), depths=3), 12))
    assert [e.at for e in cells[:6]] == [(n, d) for n in (400, 800) for d in (0.0, 0.5, 1.0)]
    for e in cells:
        hidden = f"{needle.HEAD} {needle.ANSWER}."
        before, after = e.context.split(hidden)
        length, depth = e.at
        assert len(before + hidden + after + needle.prompt(e)[1]) + len(f" {needle.ANSWER}") == length
        assert len(before) == pytest.approx(depth * (len(before) + len(after)), abs=12)
        assert not before or before.endswith(". ") or depth == 1
    chat = needle.examples(data=folder, count_tokens=lambda text: len(text) + 30, lengths=800)
    for e in islice(chat, 5):
        prompt = "".join(needle.prompt(e))
        assert len(prompt) + 30 + len(f" {needle.ANSWER}") == 800, "30 tokens of a template, once"
    assert needle.score(f" {needle.ANSWER}. And", cells[0]) == 1 and needle.score(" eat a sandwich", cells[0]) == 0


def test_passkey():
    line = len(passkey.FILLER)
    for i, e in enumerate(islice(passkey.examples(count_tokens=len, length=3000), 20)):
        assert e.context.count(e.answers[0]) == 2 and e.at[0] == 3000 and abs(10 * e.at[1] - i % 10 - 0.5) < 1
        assert 3000 - line < len(e.context + e.question) + e.new <= 3000, "in tokens, here characters"
    assert passkey.score(" 123", example("123")) == 1 == passkey.score("123. Remember", example("123"))
    assert passkey.score("1234", example("123")) == 0 == passkey.score("is 123", example("123"))


def test_conversation():
    """Every second question leans on an earlier answer; before a question stand those before it, rightly answered."""
    made = conversation.make(random.Random(0), 12, 6)
    head, body = made.context.split("\n\n")
    leads = dict(re.findall(r"^The road of ([a-z-]+) leads to ([a-z-]+)\.$", body, flags=re.MULTILINE))
    assert head == "Every line says where a road leads." and len(leads) == 12 and set(leads) == set(leads.values())
    place = next(iter(leads))
    for _ in range(11):
        place = leads[place]
        assert place != next(iter(leads)), "all roads are one circle"
    places, given = [], []
    for number, turn in enumerate(made.turns, 1):
        asked, cue = re.fullmatch(
            rf"\nQuestion {number}: Where does the road of (.+) lead\?\nAnswer {number}: (.+)", turn.question
        ).groups()
        leaning = re.fullmatch(r"the answer to question (\d)", asked)
        assert (leaning is not None) == (number % 2 == 0)
        assert cue == ("That road leads to" if leaning else f"The road of {asked} leads to")
        places.append(given[int(leaning[1]) - 1] if leaning else asked)
        given.append(turn.answer)
        assert turn.answer == leads[places[-1]] and turn.depth == list(leads).index(places[-1]) / 12
    assert len(set(places)) == 6
    first, second, third = islice(conversation.examples(lines=12, turns=6), 3)
    assert second.question.startswith(f"{first.question} {first.answers[0]}\nQuestion 2: ")
    assert third.question.startswith(f"{second.question} {second.answers[0]}\nQuestion 3: ")
    assert first.context == third.context and first.context != next(conversation.examples(lines=12, seed=1)).context
    said = {" coal-crow.\nQuestion": 1, "coal-crow": 1, " coal": 0, "the road of coal-crow": 0, "": 0}
    assert {output: conversation.score(output, example("coal-crow")) for output in said} == said


def test_lines(folder):
    """A file's record is cut to a window with the line that is asked for in it, as deep as it was."""
    found = list(lines.examples(data=folder, lines=10))
    assert [e.id for e in found] == ["lines_30-0", "lines_30-1", "lines_30-2"]
    for e, place in zip(found, (0, 3 / 10, 9 / 10), strict=True):
        assert e.context.startswith("Head:\n\nline ") and e.context.count("\n") == 12 and e.at == (10, place)
        assert f"<{e.answers[0]}>" in e.context and e.question.endswith(": REGISTER_CONTENT is <")
    whole = next(lines.examples(data=folder, lines=30, cue=False))
    assert whole.context.count("REGISTER") == 30 and whole.question.endswith("I need the number. ")
    with pytest.raises(ValueError, match="at least 31"):
        next(lines.examples(data=folder, lines=31))
    assert lines.score("2416>", example("2416")) == 1 == lines.score("It is <2416>.", example("2416"))
    assert lines.score("24161", example("2416")) == 0 == lines.score("", example("2416"))


def test_summaries(folder):
    pytest.importorskip("rouge_score")
    (e,) = summarise.examples(data=folder, corpus="xsum")
    assert summarise.prompt(e) == ("Article: A b c.", "\nSummary:") and e.answers == ("A b.",)
    assert sorted(e.id for e in summarise.examples(data=folder)) == ["4000", "8000"]
    assert summarise.score("cats running", example("The cat runs")) == pytest.approx(80)  # P = 1, R = 2/3, stemmed
    assert summarise.score("The cat runs", example("The cat runs")) == 100 and summarise.score("", example("a")) == 0


def test_what_is_missing_is_named(folder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"\Akl .*skimkv\[eval\].*--data a folder that holds \*\.txt\Z"):
        next(kl.examples())
    for name in ("repetition", "bpc", "squad", "triviaqa", "needle"):
        with pytest.raises(ValueError, match=r"skimkv\[eval\].*--data"):
            next(tasks.parse(name).examples(None, 0))
        with pytest.raises(ValueError, match="it holds no"):
            next(tasks.parse(name).examples(tmp_path / "essays", 0))
    (folder / "squad.json").write_text('{"data": [{}]}')
    (folder / "triviaqa.jsonl").write_text("[1]\n")
    (folder / "wikitext-test.txt").write_bytes(b"\xff\xfe")
    (folder / "lines_30.jsonl").write_text('{"prompt": "none"}\n')
    for name, reason in (("squad", "format"), ("triviaqa", "line 1"), ("bpc", "UTF-8"), ("lines(lines=3)", "line 1")):
        with pytest.raises(ValueError, match=reason):
            next(tasks.parse(name).examples(folder, 0))


def test_the_hub(monkeypatch):
    """Rows as the Hub has them; no network."""
    pages = {"wiki_context": ["short", "d" * 5000, "e" * 9000]}
    shelf = {
        "karpathy/tiny_shakespeare": [{"text": text(9000)}],
        "Salesforce/wikitext": [{"text": " = Title = \n"}, {"text": text(7000)}],
        "rajpurkar/squad": [
            {"id": str(i), "title": "T", "context": f"c{i}", "question": "q?", "answers": {"text": ["a", "a"]}}
            for i in range(9)
        ],
        "mandarjoshi/trivia_qa": [
            {"question_id": id_, "question": "Who?", "answer": {"aliases": ["A"]}, "entity_pages": found}
            for id_, found in (("q1", pages), ("q2", {"wiki_context": []}))
        ],
        "Mindofmachine/paul_graham_and_sam_altman_articles": [{"content": "It is. " * 2000}],
    }
    fake = types.SimpleNamespace(load_dataset=lambda name, *config, split: shelf[name])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for name in ("repetition", "bpc", "squad", "triviaqa", "needle"):
        found = list(islice(tasks.parse(name).examples(None, 0), 3))
        assert found and all(e.context and e.answers for e in found)
        if name == "triviaqa":
            assert len(found) == 1 and found[0].context == "d" * 5000
    assert [e.context[:9] for e in kl.examples()] == [" = Title "]
    fake.load_dataset = lambda *a, **k: (_ for _ in ()).throw(ConnectionError("no\nnetwork"))
    with pytest.raises(ValueError, match=r"\Asquad: rajpurkar/squad cannot be had from the Hub \(no network\)"):
        next(squad.examples())


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not here")
@pytest.mark.parametrize(
    ("spec", "least"),
    [
        ("repetition", 700),
        ("bpc", 40),
        ("squad", 826),
        ("needle", 30),
        ("lines(lines=200)", 50),
        ("lines(lines=300)", 50),
    ],
)
def test_shared_data(spec, least):
    task = tasks.parse(spec)
    found = list(islice(task.examples(DATA, 0), 900))
    assert len(found) >= least and len({e.id for e in found}) == len(found)
    assert all(all(task.prompt(e)) or e.given for e in found)


@pytest.mark.parametrize(("task", "greatest"), [
    ("record", 1), ("squad", 1), ("repetition", 256), ("repetition(reference=64)", 64), ("summarise", 100),
    ("bpc(reference=50)", math.inf),
])  # fmt: skip
def test_the_greatest_score(task, greatest):
    assert tasks.parse(task).greatest == greatest
