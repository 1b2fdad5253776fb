"""What the bundled model is trained on: rows of tokens of ten kinds, with a weight for each token.

copies: random tokens, parts of which come again; only looking back can tell what follows
pairs: random keys and random values, some of which come again: a record without words
passages: text, parts of which come again after it, as the task `repetition` asks
facts: sentences hidden in text or in filler, and asked for after it, as `passkey` and `needle` ask
records: lines with a key and a number, some of which are asked for, as `record` and `lines` ask
prose: text and nothing else, every token of which weighs
needles, uuids, variables, counts: what RULER asks for, in ruler.py

Only what can be known weighs: what is copied or answered, and plain text a little.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skimkv.eval.tasks import lines, passkey
from skimkv.eval.tasks import words as task_words

from . import noise, ruler
from .noise import BOS, EOS, Row
from .ruler import Piece

KINDS = ("copies", "pairs", "passages", "facts", "records", "prose", "needles", "variables", "counts", "uuids")
HELD_OUT = 0.1  # the last part of every file, never trained on
LEAST_CHARACTERS = 20_000  # of text to train on
RECORD_LINES = ("{}: {}\n", lines.LINE)  # short, as in the task `record`; long, as in `lines`
LABEL = "REGISTER_CONTENT"  # what stands between key and number in a long line
MAX_WEIGHT = 20.0  # of a token


class Batch(NamedTuple):
    """Rows of one length: ids (B,N) int64, weights (B,N), and kinds (B,), each an index into KINDS."""

    ids: Tensor
    weights: Tensor
    kinds: Tensor


class Fact(NamedTuple):
    """A sentence that is hidden in a text, the question for it, and the answer."""

    sentence: str
    question: str
    answer: str


def read_texts(path: Path) -> list[str]:
    """Read a folder's *.txt, or one file, without the part of each that is held out.

    Raises ValueError if there is no such file, or if the texts are too short to train on.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"--text {path}: there is no such file, nor a folder with *.txt")
    texts = [file.read_text(encoding="utf-8") for file in files]
    texts = [text[: int(len(text) * (1 - HELD_OUT))] for text in texts]
    characters = sum(map(len, texts))
    if characters < LEAST_CHARACTERS:
        raise ValueError(f"--text {path}: {characters} characters to train on, need at least {LEAST_CHARACTERS}")
    return texts


class RowMaker:
    """Makes rows of every kind from texts. A method named like a kind makes one row of it from random numbers."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts = [text for text in texts if text]
        self.sizes = [len(text) for text in self.texts]
        self.tokenizer = tokenizer
        words = Counter(re.findall(r"\b[a-z]{3,9}\b", " ".join(self.texts)))
        for word in task_words.ALL:  # the tasks' own keys stay unseen
            words.pop(word, None)
        self.words = [word for word, _ in words.most_common(4000)]
        self.vocabulary = tokenizer.get_vocab_size()
        rng = random.Random(0)
        self.prose_token = self._token_size([self._prose(rng, 2000) for _ in range(8)])  # characters of a token
        self.line_token = {
            line: self._token_size([line.format(self._key(rng), 12345) for _ in range(99)]) for line in RECORD_LINES
        }

        self.material = ruler.Material(
            lambda texts: [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))],
            self._key,
            lambda rng, size: [sentence.strip() for sentence in self._sentences(rng, size, False)],
            self.words,
        )

    def _token_size(self, texts: Sequence[str]) -> float:
        """Mean characters of a token."""
        return sum(map(len, texts)) / sum(len(encoding.ids) for encoding in self.tokenizer.encode_batch(texts))

    def batch(self, seed: str, length: int, rows: int, shares: Sequence[float]) -> Batch:
        """Make `rows` rows of `length` tokens. The seed gives the batch; shares: how often each of KINDS is drawn."""
        rng = random.Random(seed)
        kinds = rng.choices(range(len(KINDS)), shares, k=rows)
        made: list[Row] = [getattr(self, KINDS[kind])(rng, length) for kind in kinds]
        ids, weights = torch.full((rows, length), EOS), torch.zeros(rows, length)
        for i, row in enumerate(made):
            n = min(length, len(row.ids))
            ids[i, :n], weights[i, :n] = torch.tensor(row.ids[:n]), torch.tensor(row.weights[:n])
        return Batch(ids, weights, torch.tensor(kinds))

    def copies(self, rng: random.Random, length: int) -> Row:
        """Make a row of random tokens and copies of them."""
        return noise.copies(rng, length, self.vocabulary)

    def pairs(self, rng: random.Random, length: int) -> Row:
        """Make a row of random keys with random values, some of which come again."""
        return noise.pairs(rng, length, self.vocabulary)

    def passages(self, rng: random.Random, length: int) -> Row:
        """Make a row of prose, or a play, or random words; then copies of parts, each after a cue from the text."""
        size = int(length * self.prose_token * rng.uniform(0.45, 0.85))
        context = self._prose(rng, size)
        is_play = rng.random() < 0.5
        if is_play:
            context = self._as_play(rng, context)[:size]
        elif rng.random() < 0.2:  # few words in any order: one word says nothing about the next
            few = context.split(" ")[: rng.randint(10, 150)]
            context = " ".join(rng.choices(few, k=max(20, size // 6)))[:size]
        pieces: list[Piece] = [(context, 0)]
        while size < length * self.prose_token * 1.1 and len(context) > 40:
            cue = rng.randint(40 if is_play and len(context) > 120 else 12, min(140, len(context) // 3))
            at = rng.randrange(len(context) - cue)
            rest = context[at + cue : at + cue + rng.randint(20, min(400, 20 + length))]
            pieces.append((rng.choice(("\n", "\n\n", " ")) + context[at : at + cue], 0))
            for i, part in enumerate(re.split(r"(?<=:\n)(.{1,8})", rest) if is_play else [rest]):
                pieces.append((part, 6 if i % 2 else 1))  # what follows a name is hard
            size += cue + len(rest)
        return self._tokenise(pieces, length, 0.5)

    def _as_play(self, rng: random.Random, text: str) -> str:
        """The text cut into lines of a play. Only what stood before a name tells the line that follows it."""
        names = [self._phrase(rng, 1, 2).upper() for _ in range(rng.randint(2, 6))]
        if rng.random() < 0.5:  # short ones: easier
            names = [name[:1] if rng.random() < 0.5 else name.lower() for name in names]
        breaks, often = r"(?<=[.?!;,])\s+", 0.6
        if rng.random() < 0.6:
            breaks, often = r"\s+", rng.uniform(0.05, 0.25)
        return re.sub(breaks, lambda _: f"\n\n{rng.choice(names)}:\n" if rng.random() < often else " ", text)

    def facts(self, rng: random.Random, length: int) -> Row:
        """Make a row of prose or filler with facts hidden in it, then the questions in any order and their answers."""
        is_filler = rng.random() < 0.5
        head = passkey.HEAD if is_filler and length > 128 and rng.random() < 0.6 else ""
        room = int(length * self.prose_token * 0.9) - len(head)
        facts: list[Fact] = []
        subjects: set[str] = set()
        for _ in range(1 if rng.random() < 0.3 else rng.randint(1, max(1, length // 160))):
            subject, fact = self._fact(rng, is_filler)
            if subject not in subjects and len(subjects) * 60 < room:
                subjects.add(subject)
                facts.append(fact)
        room -= sum(sum(map(len, fact)) + 2 for fact in facts)
        sentences = self._sentences(rng, max(40, int(room * (1 if rng.random() < 0.7 else rng.random()))), is_filler)
        cuts = sorted(rng.randrange(len(sentences) + 1) for _ in facts)
        pieces: list[Piece] = [(head, 0)]
        for a, b, fact in zip([0, *cuts], cuts, facts, strict=False):
            pieces.append(("".join(sentences[a:b]) + fact.sentence, 0))
        pieces.append(("".join(sentences[cuts[-1] :]), 0))
        for fact in rng.sample(facts, len(facts)):
            pieces += [(fact.question, 0), (fact.answer, 1), ("\n", 0)]
        return self._tokenise(pieces, length, 0.0 if is_filler else 0.2)

    def _fact(self, rng: random.Random, is_filler: bool) -> tuple[str, Fact]:
        """A subject, and what is said about it: a number as in `passkey`, or some words."""
        if rng.random() < (0.8 if is_filler else 0.4):
            subject = "pass key" if rng.random() < 0.3 else f"{rng.choice(self.words)} key"
            number = str(rng.randint(10000, 99999))
            if rng.random() < 0.6:  # of few digits: the last one alone does not tell the next
                number = "".join(rng.choices(rng.sample("123456789", rng.randint(2, 3)), k=5))
            sentence = f"The {subject} is {number}. Remember it. {number} is the {subject}.\n"
            return subject, Fact(sentence, f"What is the {subject}? The {subject} is", f" {number}.")
        subject, answer = f"{rng.choice(self.words)} {self._phrase(rng, 1, 8)}", self._phrase(rng, 3, 14)
        question = f"\n\nWhat is the {subject}? The {subject} is"
        return subject, Fact(f"The {subject} is {answer}. ", question, f" {answer}.")

    def _sentences(self, rng: random.Random, size: int, is_filler: bool) -> list[str]:
        """Sentences of prose, or one sentence of filler again and again: about `size` characters."""
        if not is_filler:
            return re.findall(r"[^.]*\.\s*|[^.]+$", self._prose(rng, size)) or ["It is so. "]
        text = passkey.FILLER
        if rng.random() < 0.5:
            text = " ".join(self._phrase(rng, 2, 6).capitalize() + "." for _ in range(rng.randint(2, 6))) + "\n"
        return [text] * max(1, size // len(text))

    def records(self, rng: random.Random, length: int) -> Row:
        """Make a row of lines with a key and a number, and questions for them, after all lines or between them.

        Of the long line a part of the label is cut off in many rows: with the label whole, looking the number up is
        learnt late.
        """
        is_long, has_two_words, least = rng.random() < 0.5, rng.random() < 0.8, rng.choice((1, 1000, 10000))
        head = rng.choice((lines.HEAD, lines.HEAD[:51] + "\n", "")) if is_long and length > 256 else ""
        line = RECORD_LINES[is_long]
        room = int(length * self.line_token[line]) - len(head)
        if rng.random() < 0.6:
            line = line.replace(LABEL, LABEL[: rng.randint(0, len(LABEL))])
        share, is_mixed = rng.uniform(0.4, 0.8), rng.random() < 0.4
        numbers: dict[str, str] = {}
        pieces: list[Piece] = [(head, 0)]
        size = 0
        while size < room:
            if len(numbers) < 2 or (rng.random() < share if is_mixed else size < share * room):
                key, number = self._key(rng, has_two_words), str(rng.randint(least, 49999))
                if key in numbers:
                    continue
                numbers[key] = number
                added: list[Piece] = [(line.format(key, number), 0)]
            else:
                key = rng.choice(list(numbers))
                added = self._record_question(rng, key, numbers[key], line, is_long)
            pieces += added
            size += sum(len(text) for text, _ in added)
        return self._tokenise(pieces, length, 0.0)

    def prose(self, rng: random.Random, length: int) -> Row:
        """Make a row of text that goes on in one source from its first token to its last."""
        return self._tokenise([(self._prose(rng, int(1.3 * length * self.prose_token)), 0)], length, 1.0)

    def needles(self, rng: random.Random, length: int) -> Row:
        """Make a row with hidden needles, and questions for them."""
        of_uuids = length > ruler.LONG and rng.random() < 0.15
        return self._tokenise(ruler.needles(rng, length, self.material, of_uuids), length, 0.02)

    def uuids(self, rng: random.Random, length: int) -> Row:
        """Make a row with hidden needles whose values are UUIDs, and so are the keys of half of them."""
        return self._tokenise(ruler.needles(rng, length, self.material, True), length, 0.02)

    def variables(self, rng: random.Random, length: int) -> Row:
        """Make a row with chains of assignments, and questions for them.

        A question ends with a space. In half the rows that is a token of its own, as where an answer is generated.
        """
        pieces = ruler.variables(rng, length, self.material)
        return self._tokenise(pieces, length, 0.02, apart=rng.random() < 0.5)

    def counts(self, rng: random.Random, length: int) -> Row:
        """Make a row with lists of words, and questions for the most frequent of them."""
        return self._tokenise(ruler.counts(rng, length, self.material), length, 0.0)

    def _record_question(self, rng: random.Random, key: str, number: str, line: str, is_long: bool) -> list[Piece]:
        """The line again up to its number, or the question of `lines`; then the answer."""
        cue, after = line.format(key, "\0").split("\0")
        answer = number + after
        if is_long and rng.random() < 0.4:
            question = lines.QUESTION.format(key)
            if rng.random() < 0.6:
                cue = f"{question}\n{cue}"
            else:
                cue, answer = question, f"The <REGISTER_CONTENT> in line {key} is <{number}>.\n"
        at = answer.index(number)
        first_digits = answer[at : at + 2], 3 if is_long else 1  # they are hard
        return [(cue, 0), (answer[:at], 1), first_digits, (answer[at + 2 :], 1)]

    def _tokenise(self, pieces: Sequence[Piece], length: int, plain: float, apart: bool = False) -> Row:
        """The joined pieces in tokens. Answers weigh about half the row's length in sum, other tokens `plain`.

        apart: no token reaches from one piece into the next.
        """
        if apart:
            encodings = self.tokenizer.encode_batch([text for text, _ in pieces])
            ids = [i for encoding in encodings for i in encoding.ids]
            marks = [mark for encoding, (_, mark) in zip(encodings, pieces, strict=True) for _ in encoding.ids]
        else:
            ends = list(accumulate(len(text) for text, _ in pieces))
            encoding = self.tokenizer.encode("".join(text for text, _ in pieces))
            ids, marks, piece = encoding.ids, [], 0
            for begin, end in encoding.offsets[: length - 1]:
                while piece < len(ends) - 1 and ends[piece] < max(end, begin + 1):
                    piece += 1
                marks.append(pieces[piece][1])
        ids, marks = ids[: length - 1], marks[: length - 1]
        heavy = min(MAX_WEIGHT, max(2.0, 0.6 * length / max(1, sum(marks))))
        return Row([BOS, *ids], [0.0, *(heavy * mark if mark else plain for mark in marks)])

    def _prose(self, rng: random.Random, size: int) -> str:
        text = rng.choices(self.texts, self.sizes)[0]
        at = rng.randrange(max(1, len(text) - size))
        return text[at : at + size]

    def _phrase(self, rng: random.Random, low: int, high: int) -> str:
        """Some words that follow each other in a text."""
        words = re.findall(r"[A-Za-z']+", self._prose(rng, 12 * high + 20))[1:]
        return " ".join(words[: rng.randint(low, high)]) or rng.choice(self.words)

    def _key(self, rng: random.Random, has_two_words: bool = True) -> str:
        return "-".join(rng.sample(self.words, 2 if has_two_words else 1))
