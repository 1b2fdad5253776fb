"""RULER's 13 tasks: each template word for word, each score by hand, lengths in tokens, and the average of all."""

from __future__ import annotations

import io
import json
import random
import re
import sys
import types
from itertools import islice
from typing import Any

import pytest
from rich.console import Console

from skimkv.cli import main
from skimkv.cli.eval import _table
from skimkv.eval import averages, tasks
from skimkv.eval.results import Row
from skimkv.eval.tasks import Example, ruler, words
from skimkv.eval.tasks.ruler import cwe, fwe, niah, qa, sample, vt

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WORD, NUMBER = r"[a-z]+-[a-z]+", r"[1-9]\d{6}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
ESSAY = [
    f"{word}{stop}" for i in range(40) for word, stop in ((f"Sentence{i}", ""), ("ends", ".") if i % 2 else ("so", ""))
]
MISSING = {"niah_single_2": "essays", "qa_1": "squad.json", "qa_2": "hotpotqa.json"}


def count_words(text: str) -> int:
    """A tokenizer for tests: words, and as many tokens as a long word has sixes of characters."""
    return sum(-(-len(word) // 6) for word in text.split())


@pytest.fixture
def folder(tmp_path):
    """Small files of every kind: two essays, SQuAD in the form of 2.0, HotpotQA."""
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "a.txt").write_text("It was  late.\nNobody came. ")
    (tmp_path / "essays" / "b.txt").write_text("Then it rained!\n\nAnd so on. " * 40)
    towns = [
        {"title": f"T{a}", "paragraphs": [
            {"context": f"Town {a}{p} is old. It lies by a river.", "qas": [
                {"question": f"What is {a}{p}?", "answers": [{"text": "Old"}, {"text": "very old"}, {"text": "Old"}]},
                {"question": "Why?", "answers": [], "is_impossible": True},
            ]} for p in range(3)]} for a in range(4)
    ]  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps({"data": towns}))
    rows = [
        {"question": f"Who leads {i}?", "answer": f"Mr. {i}", "context": [
            [f"Title {i}{j}", [f"Sentence {j}.", f" Mr. {i} leads."]] for j in range(3)]} for i in range(5)
    ]  # fmt: skip
    (tmp_path / "hotpotqa.json").write_text(json.dumps(rows))
    return tmp_path


def pattern(text: str, **parts: str) -> str:
    """A regular expression for a text, in which {name} stands for a named group at first, then for the same again."""
    made, seen = "", set()
    for piece in re.split(r"(\{\w+\})", text):
        name = piece[1:-1]
        if piece[:1] == "{" and name in parts:
            made += f"(?P={name})" if name in seen else f"(?P<{name}>{parts[name]})"
            seen.add(name)
        else:
            made += re.escape(piece)
    return made


def test_one_needle_in_noise():
    """The template for one answer, whole; the answer is what the needle says of the key that is asked for."""
    made = niah.make(random.Random(1), 2)
    needle, lines = "One of the special magic numbers for {key} is: {value}.", [NOISE, NOISE]
    head = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
    )
    question = (
        "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for "
        "{key} mentioned in the provided text is"
    )
    found = [
        re.fullmatch(
            pattern(head + "\n".join([*lines[:i], needle, *lines[i:]]) + question, key=WORD, value=NUMBER), text
        )
        for text in [made.context + made.question]
        for i in range(3)
    ]
    (match,) = filter(None, found)
    assert made.answers == (match["value"],) and 0 < made.depth < 1
    assert match["key"].split("-")[0] in words.ADJECTIVES and match["key"].split("-")[1] in words.NOUNS


def test_several_values_of_one_key():
    """The template for several answers, whole: four needles of one key, each between other lines."""
    made = niah.make(random.Random(2), 5, values=4)
    key = re.search(rf"for ({WORD}) is:", made.context)[1]
    assert made.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    assert made.question == (
        f"\nWhat are all the special magic numbers for {key} mentioned in the provided text? The special magic numbers "
        f"for {key} mentioned in the provided text are"
    )
    lines = made.context.split("\n")[1:]
    needles = [line for line in lines if line != NOISE]
    assert len(lines) == 9 and lines.count(NOISE) == 5 and len(set(made.answers)) == 4
    assert sorted(needles) == sorted(f"One of the special magic numbers for {key} is: {v}." for v in made.answers)


def test_several_queries():
    """Four keys are asked for in one sentence; the answers are in the order of the question."""
    made = niah.make(random.Random(3), 6, keys=4, queries=4)
    a, b, c, d = re.search(rf"numbers for ({WORD}), ({WORD}), ({WORD}), and ({WORD}) mentioned", made.question).groups()
    said = dict(re.findall(rf"magic numbers for ({WORD}) is: ({NUMBER})\.", made.context))
    assert made.answers == tuple(said[key] for key in (a, b, c, d)) and len(said) == 4
    one_of_four = niah.make(random.Random(3), 6, keys=4)
    assert len(one_of_four.answers) == 1 and len(re.findall("One of", one_of_four.context)) == 4


def test_needles_among_needles_and_in_essays():
    """The hay of multikey_2 and 3 is needles with other keys; needles in essays stand between sentences."""
    among = niah.make(random.Random(4), 7, "needles", key_kind="uuids", value_kind="uuids")
    said = dict(re.findall(rf"One of the special magic uuids for ({UUID}) is: ({UUID})\.", among.context))
    asked = re.search(rf"special magic uuid for ({UUID}) mentioned", among.question)[1]
    assert len(said) == 8 and among.answers == (said[asked],)
    essay = niah.make(random.Random(4), 100, "essays", essays=ESSAY)
    head, text = essay.context.split("\n")
    needle = re.search(rf"One of the special magic numbers for {WORD} is: {NUMBER}\.", text)[0]
    before, after = text.split(needle)
    assert head.startswith("A special magic number") and (not before or before.endswith(". "))
    rest = " ".join([*before.split(), *after.split()])
    assert rest == " ".join((ESSAY * 2)[:100]), "the words of the essay, again and again"


def test_variable_tracking():
    """One chain of five variables in order among noise, whole; the shot has names of three letters and an answer."""
    made = vt.make(random.Random(5), 6)
    a, b, c, d, e = made.answers
    value = re.search(rf"VAR {a} = (\d{{5}})\n", made.context)[1]
    lines = made.context.split("\n")
    assert "\n".join(lines[:2]) == (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    )
    assert lines.count(NOISE) == 6 and [line for line in lines[2:] if line != NOISE] == [
        f"VAR {a} = {value}", f"VAR {b} = VAR {a} ", f"VAR {c} = VAR {b} ", f"VAR {d} = VAR {c} ",
        f"VAR {e} = VAR {d} ",
    ]  # fmt: skip
    assert made.question == (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
    )
    assert all(re.fullmatch("[A-Z]{5}", name) for name in made.answers) and len({a, b, c, d, e}) == 5
    shot = vt.make_shot(random.Random(5), 5)
    assert re.search(r"they are:  [A-Z]{3}( [A-Z]{3}){4}\n\n\Z", shot)
    assert vt.make(random.Random(5), 6, shot=shot).context == shot + made.context


def test_common_words():
    """Ten words come more often than the others; the list is numbered, and the shot ends with its numbered answer."""
    made = cwe.make(random.Random(6), 14, (4, 2))
    head, text = made.context.split("\n")
    assert head == (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often."
    )
    numbers, listed = zip(*re.findall(r"(\d+)\. (\w+)", text), strict=True)
    assert list(map(int, numbers)) == list(range(1, 49)) and text.startswith("1. ")
    counts = {word: listed.count(word) for word in listed}
    assert len(counts) == 14 and {word for word, n in counts.items() if n == 4} == set(made.answers)
    assert made.question == (
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:"
    )
    shot = cwe.make_shot(random.Random(6), 20, (3, 1))
    assert re.search(r"in the list are: 1\. \w+ 2\. \w+ .* 10\. \w+\n\Z", shot)
    assert "40. " in shot and "41. " not in shot, "ten words three times and ten once"
    assert cwe.make(random.Random(6), 14, (4, 2), shot=shot).context == shot + made.context


def test_frequent_words():
    """Of 100 words rank k has 100 / (k² π² / 6), rounded down: 60 times the dots, then 15, 6 and 3 times."""
    made = fwe.make(random.Random(7), 100, vocabulary=5)
    head = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. "
    )
    assert made.context.startswith(head) and made.question == (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    coded = made.context.removeprefix(head).split(" ")
    first, second, third = made.answers
    counts = [coded.count(word) for word in ("...", first, second, third)]
    assert counts == [60, 15, 6, 3] and len(coded) == 60 + 15 + 6 + 3 + 2
    assert all(re.fullmatch("[a-z]{6}", word) for word in made.answers)


def test_questions_on_documents():
    """Own documents first, then those of the same article, then any; all again and again where more are wanted."""
    documents = ["A a", "B b", "C c", "D d"]
    question = qa.Question("Why?", ("b", "B"), (1,), (2,))
    made = qa.make(random.Random(8), 2, question, documents)
    task = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    texts = [
        f"{task}\n\nThe following are given documents.\n\nDocument 1:\n{x}\n\nDocument 2:\n{y}\n\n{task}"
        "\n\nQuestion: Why? Answer:"
        for x, y in (("B b", "C c"), ("C c", "B b"))
    ]
    assert made.context + made.question in texts and made.answers == ("b", "B")
    three = qa.make(random.Random(8), 3, question, documents).context
    assert "B b" in three and "C c" in three and three.count("Document ") == 3
    six = qa.make(random.Random(8), 6, question, documents).context
    assert sorted(re.findall(r"Document \d+:\n(\w)", six)) == list("AABBCD")


def example(*right: str) -> Example:
    return Example("0", "", "", right)


def test_scores():
    """string_match_all: the share of the answers that the output holds; string_match_part: whether it holds one."""
    four = example("1234567", "7654321", "Abc", "d")
    said = {"": 0, "1234567": 0.25, " 7654321, 12345678; ABC.": 0.75, "x D abc 1234567 7654321": 1}
    assert {output: niah.score(output, four) for output in said} == said
    assert vt.score("AB, CD", example("AB", "CD", "EF", "GH")) == 0.5 == cwe.score("1. a", example("a", "b"))
    assert fwe.score("qqqqqq", example("qqqqqq", "rrrrrr", "ssssss")) == pytest.approx(1 / 3)
    assert [qa.score(output, example("Old", "very new")) for output in ("It is OLD", "very  new", "")] == [1, 0, 0]


@pytest.mark.parametrize("name", ruler.RECIPES)
def test_every_task_has_the_length_that_was_asked_for(folder, name):
    """In tokens with those of the answer, at most by one piece of hay less; the same for a seed, others for another."""
    task = tasks.parse(f"{name}(length=1500)")
    data = None if task.is_made_up else folder
    assert task.is_made_up == (name in ruler.WITHOUT_DATA)
    found = list(islice(task.examples(data, 0, count_words), 3))
    assert found == list(islice(task.examples(data, 0, count_words), 3))
    assert found != list(islice(task.examples(data, 1, count_words), 3))
    for e in found:
        context, question = task.prompt(e)
        assert 1500 - 40 <= count_words(context + question) + e.new <= 1500
        assert all(answer in context for answer in e.answers[:1]) or name.startswith("qa")
        right = ", ".join(e.answers)
        assert [task.module.score(output, e) for output in (right, right.upper(), "no")] == [1, 1, 0]
    for length, shorter in ((600, True), (2400, False)):
        other = next(tasks.parse(f"{name}(length={length})").examples(data, 0, count_words))
        assert (len(other.context) < len(found[0].context)) == shorter


def test_recipes():
    """What makes each of the needle tasks, as published."""
    found = {name: tasks.parse(name).recipe for name in ruler.RECIPES if name.startswith("niah")}
    essays, uuids = {"hay": "essays"}, {"value_kind": "uuids"}
    assert found == {
        "niah_single_1": {"hay": "noise"}, "niah_single_2": essays, "niah_single_3": {**essays, **uuids},
        "niah_multikey_1": {**essays, "keys": 4}, "niah_multikey_2": {"hay": "needles"},
        "niah_multikey_3": {"hay": "needles", "key_kind": "uuids", **uuids}, "niah_multivalue": {**essays, "values": 4},
        "niah_multiquery": {**essays, "keys": 4, "queries": 4},
    }  # fmt: skip
    assert [m.NEW_TOKENS for m in (niah, vt, cwe, fwe, qa)] == [128, 30, 120, 50, 32]


def test_the_largest_sample_that_fits():
    """For every room the search finds the same size as trying all, with few samples made."""
    made: list[int] = []

    def make(size: int) -> sample.Sample:
        made.append(size)
        return sample.Sample("word " * (7 * size), "why", ())

    def tokens(text: str) -> int:
        return len(text.split())

    for room in (22, 28, 29, 30, 500, 7000, 7001, 70000):
        for guess in (1, 40, 5000):
            made.clear()
            found, size = sample.fit(make, room + 5, 5, tokens, 3, guess)
            assert size == (room - 1) // 7 and tokens(found.context) == 7 * size and len(made) < 16, (room, guess)
    assert sample.fit(make, 1000, 0, tokens, 3, 40, most=50)[1] == 50
    with pytest.raises(
        sample.TooShort, match=r"\Alength = 26 is too short: .* has 22 tokens, and 5 are for the answer"
    ):
        sample.fit(make, 26, 5, tokens, 3, 40)


@pytest.mark.parametrize("name", ruler.RECIPES)
def test_mistakes_are_one_line(folder, tmp_path, name):
    data = None if name in ruler.WITHOUT_DATA else folder
    for wrong in ("length=0", "length=10000000000", "length=2.5", "length='x'", "length=512"):
        task, tokens = (
            tasks.parse(f"{name}({wrong})"),
            count_words if wrong != "length=512" else lambda text: 9 * len(text),
        )
        with pytest.raises(ValueError, match=r"\A[^\n]*length = [^\n]+\Z"):
            next(task.examples(data, 0, tokens))
    for wrong in ("keys=2", "lenght=4096", "4096", "corpus='squad'"):
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            tasks.parse(f"{name}({wrong})")


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    """Without a file the message says which; without `datasets` it says what to install, or what --data needs."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name, file in MISSING.items():
        with pytest.raises(ValueError, match=r"\A--data \S+: it holds no (\*\.txt|squad\.json|hotpotqa\.json)\Z"):
            next(tasks.parse(name).examples(empty, 0))
        with pytest.raises(ValueError, match=rf"skimkv\[eval\].*--data a folder that holds .*{file}\Z"):
            next(tasks.parse(name).examples(None, 0))
    (empty / "words.txt").write_text("few words")
    with pytest.raises(ValueError, match=r"2 different words are too few"):
        next(tasks.parse("cwe").examples(empty, 0))
    with pytest.raises(
        ValueError, match=r"cwe: length = 60000 needs more than the \d+ words .* words\.txt, one word a"
    ):
        next(tasks.parse("cwe(length=60000)").examples(None, 0))
    (empty / "words.txt").write_text("\n".join(f"w{i}" for i in range(20000)))
    assert next(tasks.parse("cwe(length=60000)").examples(empty, 0)).answers[0].startswith("w")


def test_damaged_files_are_refused_in_one_line(folder):
    for name, text in (
        ("squad", "[]"), ("squad", '{"data": 3}'), ("squad", '{"data": []}'), ("squad", "{"), ("hotpotqa", "[]"),
        ("hotpotqa", '[{"a": 1}]'), ("hotpotqa", '[{"question": "", "answer": "b", "context": []}]'),
        ("hotpotqa", "{}"),
    ):  # fmt: skip
        (folder / f"{name}.json").write_text(text)
        with pytest.raises(ValueError, match=rf"\A\S+{name}\.json: [^\n]+\Z"):
            next(tasks.parse("qa_1" if name == "squad" else "qa_2").examples(folder, 0, count_words))


def test_sources_of_the_hub(monkeypatch):
    """The data sets that are asked for, and their rows in the Hub's format."""
    shelf: dict[str, Any] = {
        "rajpurkar/squad_v2": [
            {"title": "T", "context": f"Town {i}.", "question": "What?", "answers": {"text": ["x"] if i else []}}
            for i in range(4)
        ],
        "hotpotqa/hotpot_qa": [
            {"question": "Who?", "answer": "Me", "context": {"title": ["A", "B"], "sentences": [["It is", " me."], []]}}
        ],
        "Mindofmachine/paul_graham_and_sam_altman_articles": [{"content": "It is. " * 60}],
    }
    asked = []

    def load_dataset(name: str, *config: str, split: str) -> Any:
        asked.append((name, *config, split))
        return shelf[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    squad = list(tasks.parse("qa_1(length=300)").examples(None, 0, count_words))
    assert len(squad) == 3 and all(e.answers == ("x",) for e in squad)
    (hotpot,) = tasks.parse("qa_2(length=300)").examples(None, 0, count_words)
    assert hotpot.answers == ("Me",) and "A\nIt is me." in hotpot.context and "B\n" in hotpot.context
    assert "It is. It is." in next(tasks.parse("niah_single_2(length=300)").examples(None, 0, count_words)).context
    assert asked[:2] == [("rajpurkar/squad_v2", "validation"), ("hotpotqa/hotpot_qa", "distractor", "validation")]


def test_the_suite():
    """All 13 with one length, or some of them; its mistakes are one line."""
    suite = tasks.parse_suite("ruler(length=8192)")
    assert suite is not None and suite.spec == "ruler(length=8192)" and len(suite.tasks) == 13
    assert [task.spec for task in suite.tasks] == [f"{name}(length=8192)" for name in ruler.RECIPES]
    few = tasks.parse_suite("ruler(leave_out=('qa_1', 'qa_2'))")
    assert few is not None and len(few.tasks) == 11 and few.spec == "ruler(leave_out=('qa_1', 'qa_2'))"
    assert tasks.parse_suite("record") is None
    for wrong in (
        "ruler(leave_out='qa_3')",
        "ruler(leave_out=3)",
        "ruler(keys=1)",
        f"ruler(leave_out={(*ruler.RECIPES,)})",
    ):
        with pytest.raises(ValueError, match=r"\Aruler[^\n]+\Z"):
            tasks.parse_suite(wrong)
    with pytest.raises(ValueError, match="ruler is a suite of 13 tasks"):
        tasks.parse("ruler")


def row(task: str, method: str, mean: float, low: float | None, high: float | None, bytes_per_token: int = 100) -> Row:
    difference = None if method == "Dense()" else mean - 1
    return Row(
        task, "blind", method, 10, mean, low, high, None, difference, low, high, bytes_per_token, None, 0.5
    )  # fmt: skip


def test_the_average_of_a_suite():
    """The mean of means; distances to the ends of intervals add in squares: 0.3 and 0.4 give 0.5, halved 0.25."""
    suite = tasks.parse_suite(f"ruler(leave_out={tuple(name for name in ruler.RECIPES if name not in ('vt', 'fwe'))})")
    assert suite is not None
    rows = [
        row("vt", "Dense()", 1.0, 0.7, 1.0), row("fwe", "Dense()", 0.6, 0.2, 0.6, 300),
        row("vt", "H2O(k=8)", 0.5, None, None), row("fwe", "H2O(k=8)", 0.1, 0.1, 0.3),
        row("vt", "TopK(k=8)", 0.5, 0.1, 0.9),
    ]  # fmt: skip
    dense, h2o = averages.suite_averages(rows, [suite])
    assert (dense.task, dense.mode, dense.method, dense.n) == (suite.spec, "blind", "Dense()", 20)
    assert (dense.mean, dense.low, dense.high) == (0.8, pytest.approx(0.55), pytest.approx(0.8))
    assert dense.bytes_per_token == 200 and dense.share == 0.5 and dense.diff_to_dense is None
    assert h2o.mean == pytest.approx(0.3) and h2o.low is None and h2o.diff_to_dense == pytest.approx(-0.7)


def test_a_suite_without_its_data_is_refused_in_one_line(folder, tmp_path, capsys):
    """Before a model is loaded: what is missing, and how to run the other tasks; alone a task has its own message."""
    (folder / "hotpotqa.json").unlink()
    argv = ["eval", "--method", "Dense()", "--data", str(folder), "--out", str(tmp_path / "r.jsonl"), "--task"]
    for task, message in (
        ("ruler", f"qa_2: --data {folder}: it holds no hotpotqa.json; leave_out=('qa_2',) runs the other tasks"),
        ("qa_2", f"--data {folder}: it holds no hotpotqa.json"),
        ("ruler(length=3)", "niah_single_1: length = 3 must be a whole number of at least 256"),
        ("ruler(length=True)", "niah_single_1: length = True must be a whole number of at least 256"),
    ):
        assert main([*argv, task]) == 2
        assert capsys.readouterr().err == f"skimkv: {message}\n"


def test_a_run_gives_the_average(tmp_path, capsys):
    """Two short tasks through the command: `averages` in JSON, and the last section of the table."""
    left = tuple(name for name in ruler.RECIPES if name not in ("vt", "fwe"))
    argv = ["eval", "--task", f"ruler(length=800, leave_out={left})", "--method", "Dense()", "--limit", "1", "--json"]
    assert main([*argv, "--out", str(tmp_path / "r.jsonl")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [found["task"] for found in answer["rows"]] == ["vt(length=800)", "fwe(length=800)"]
    (average,) = answer["averages"]
    assert average["mean"] == pytest.approx(sum(found["mean"] for found in answer["rows"]) / 2) and average["n"] == 2
    rows = [row("vt", "Dense()", 1.0, 0.7, 1.0), row("fwe", "Dense()", 0.6, 0.2, 0.6)]
    printed = io.StringIO()
    Console(width=160, file=printed).print(_table(rows, [rows[0]._replace(task="ruler", mean=0.8)], "here"))
    sections = [line for line in printed.getvalue().splitlines() if "question-blind" in line]
    assert [line.split("│")[1].strip() for line in sections] == [
        "vt, question-blind", "fwe, question-blind", "ruler, question-blind, average of the tasks",
    ]  # fmt: skip
