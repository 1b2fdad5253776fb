"""RULER's questions on documents: those that hold the answer lie among others, of SQuAD or of HotpotQA."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import source
from ..base import Example, check_whole
from .sample import CountTokens, Sample, TooShort, fit, match_part

TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
HEAD = f"{TASK}\n\nThe following are given documents.\n\n"
DOCUMENT = "Document {number}:\n{text}"
QUESTION = f"\n\n{TASK}\n\nQuestion: {{question}} Answer:"
NEW_TOKENS = 32
FILES = {"squad": "squad.json", "hotpotqa": "hotpotqa.json"}


class Question(NamedTuple):
    """A question with its answers: the documents that hold them, and others on the same subject, as indices."""

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


class Corpus(NamedTuple):
    """Documents, each once and sorted, and the questions on them."""

    documents: list[str]
    questions: list[Question]


def make(rng: random.Random, size: int, question: Question, documents: Sequence[str]) -> Sample:
    """Make one sample: the question among `size` documents in random order.

    Those of its own come first to be taken, then related ones, then any. If more are wanted than there are, all are
    taken again and again.
    """
    if size < len(documents):
        wanted = size - len(question.own)
        chosen = [*question.own, *rng.sample(question.related, min(wanted, len(question.related)))]
        if wanted > len(question.related):
            known = {*question.own, *question.related}
            others = [i for i in range(len(documents)) if i not in known]
            chosen += rng.sample(others, wanted - len(question.related))
    else:
        chosen = [i % len(documents) for i in range(size)]
    rng.shuffle(chosen)
    context = "\n\n".join(DOCUMENT.format(number=n, text=documents[i]) for n, i in enumerate(chosen, 1))
    depth = min(chosen.index(i) for i in question.own) / len(chosen)
    return Sample(HEAD + context, QUESTION.format(question=question.text), question.answers, depth)


def examples(
    *, data: Path | None = None, seed: int = 0, count_tokens: CountTokens, length: int = 4096, corpus: str = "squad"
) -> Iterator[Example]:
    """Give every question in random order, each among as many documents as `length` allows.

    Questions whose own documents are too long are passed over. corpus: "squad", in the format of SQuAD 1.1 or 2.0, or
    "hotpotqa", in that of HotpotQA's distractor setting.
    """
    check_whole("length", length, 256)
    path = source.find_file(data, FILES[corpus])
    documents, questions = _load(path, corpus) if path else _hub(corpus)
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    found_any, reason = False, ""
    for i in order:
        question = questions[i]

        def sample(size: int, key: str = f"{seed} {i}", question: Question = question) -> Sample:
            """Make the sample with this number of documents."""
            return make(random.Random(key), size, question, documents)

        least = len(question.own)
        try:
            found, _ = fit(sample, length, NEW_TOKENS, count_tokens, least, least + length // 200)
        except TooShort as error:
            reason = reason or str(error)
        else:
            found_any = True
            yield found.example(str(i), length, NEW_TOKENS, needs_all=False)
    if not found_any:
        raise ValueError(f"{path or corpus}: no question fits; of the first one tried: {reason}")


def _load(path: Path, corpus: str) -> Corpus:
    """Read a file in the format of its authors. Raises ValueError if it is not in that format, or has no question."""
    try:
        content = json.loads(source.read_text(path))
        found = _squad(content) if corpus == "squad" else _hotpotqa(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{path}: not in the format of {corpus} ({message})") from None
    if not found.questions:
        raise ValueError(f"{path}: it holds no question that can be answered")
    return found


def _squad(content: Any) -> Corpus:
    """The questions of SQuAD 1.1, or those of SQuAD 2.0 that have an answer."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({_text(paragraph["context"]) for article in articles for paragraph in article})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for article in articles:
        subject = sorted({number[paragraph["context"]] for paragraph in article})
        for paragraph in article:
            own = number[paragraph["context"]]
            for q in paragraph["qas"]:
                answers = tuple(dict.fromkeys(_text(answer["text"]) for answer in q["answers"]))
                if answers and not q.get("is_impossible", False):
                    related = tuple(i for i in subject if i != own)
                    questions.append(Question(_text(q["question"]), answers, (own,), related))
    return Corpus(documents, questions)


def _hotpotqa(rows: Iterable[Any]) -> Corpus:
    """The questions of HotpotQA, each with its ten documents; a document is a title and sentences."""
    made = [
        (_text(row["question"]), _text(row["answer"]), [f"{_text(t)}\n{''.join(s)}" for t, s in row["context"]])
        for row in rows
    ]
    documents = sorted({text for _, _, texts in made for text in texts})
    number = {text: i for i, text in enumerate(documents)}
    questions = [
        Question(question, (answer,), tuple(dict.fromkeys(number[text] for text in texts)))
        for question, answer, texts in made
        if texts
    ]
    return Corpus(documents, questions)


def _text(value: Any) -> str:
    """The value, if it is a text that is not empty. Raises TypeError otherwise."""
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{value!r} is not a text")
    return value


def _hub(corpus: str) -> Corpus:
    """Read the same from the Hub."""
    rows: Any
    if corpus == "squad":
        rows = source.load_from_hub("qa_1", FILES[corpus], "rajpurkar/squad_v2", split="validation")
        articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            answers = [{"text": text} for text in row["answers"]["text"]]
            questions = articles.setdefault(row["title"], {}).setdefault(row["context"], [])
            questions.append({"question": row["question"], "answers": answers})
        data = [
            {"paragraphs": [{"context": context, "qas": qas} for context, qas in paragraphs.items()]}
            for paragraphs in articles.values()
        ]
        return _squad({"data": data})
    rows = source.load_from_hub("qa_2", FILES[corpus], "hotpotqa/hotpot_qa", "distractor", split="validation")
    return _hotpotqa(
        {**row, "context": list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))} for row in rows
    )


score = match_part
