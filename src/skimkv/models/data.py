"""What the bundled model is trained on: rows of tokens with a weight for each, of five kinds.

copies: random tokens, parts of which come again; nothing but looking back can tell what follows
pairs: random keys of several tokens and random values, some of which are asked for: records without words
passages: text, parts of which come again after it, as the task `repetition` asks
facts: sentences hidden in text or in filler, and asked for after it, as `passkey` and `needle` ask
records: lines with a key and a number, some of which are asked for, as `record` and `lines` ask

Only what can be known weighs: what is copied or answered, and plain text a little.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..eval.tasks import lines, passkey, record
from . import noise
from .noise import BOS, EOS, Row

KINDS = ("copies", "pairs", "passages", "facts", "records")
HELD_OUT = 0.1  # the last share of every file, never trained on
FORMS = ("{}: {}\n", lines.LINE)
LABEL = "REGISTER_CONTENT"
MOST = 20.0  # of a token's weight
Piece = tuple[str, float]  # a text, and what it weighs as an answer; 0: it is none


class Batch(NamedTuple):
    """ids, weights (B,N); kinds (B,) as in KINDS."""

    ids: Tensor
    weights: Tensor
    kinds: Tensor


def read(path: Path) -> list[str]:
    """The texts of a folder's *.txt, or of one file, without what is held out. Raises ValueError if there is none."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"--text {path}: there is no such file, nor a folder with *.txt")
    texts = [file.read_text(encoding="utf-8") for file in files]
    texts = [text[: int(len(text) * (1 - HELD_OUT))] for text in texts]
    if sum(map(len, texts)) < 20_000:
        raise ValueError(f"--text {path}: {sum(map(len, texts))} characters to train on, need at least 20000")
    return texts


class Maker:
    """Rows of every kind out of texts, each from its own random numbers."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts = [text for text in texts if text]
        self.sizes = [len(text) for text in self.texts]
        self.tokenizer = tokenizer
        seen = Counter(re.findall(r"\b[a-z]{3,9}\b", " ".join(self.texts)))
        for word in record.WORDS:  # the tasks' own keys stay unseen
            seen.pop(word, None)
        self.words = [word for word, _ in seen.most_common(4000)]
        self.vocabulary = tokenizer.get_vocab_size()
        rng = random.Random(0)
        self.prose = self._per_token([self._prose(rng, 2000) for _ in range(8)])
        self.line = {form: self._per_token([form.format(self._key(rng), 12345) for _ in range(99)]) for form in FORMS}

    def _per_token(self, texts: Sequence[str]) -> float:
        """Characters of a token."""
        return sum(map(len, texts)) / sum(len(made.ids) for made in self.tokenizer.encode_batch(texts))

    def batch(self, seed: str, length: int, rows: int, mix: Sequence[float]) -> Batch:
        """Rows of that length in tokens; mix: the share of each kind."""
        rng = random.Random(seed)
        kinds = rng.choices(range(len(KINDS)), mix, k=rows)
        made = [getattr(self, KINDS[kind])(rng, length) for kind in kinds]
        ids, weights = torch.full((rows, length), EOS), torch.zeros(rows, length)
        for i, row in enumerate(made):
            n = min(length, len(row.ids))
            ids[i, :n], weights[i, :n] = torch.tensor(row.ids[:n]), torch.tensor(row.weights[:n])
        return Batch(ids, weights, torch.tensor(kinds))

    def _row(self, pieces: Sequence[Piece], length: int, plain: float) -> Row:
        """Tokens of the pieces joined; answers weigh in sum about half the row's length; others `plain`."""
        ends, answers, at = [], [], 0
        for text, answer in pieces:
            at += len(text)
            ends.append(at)
            answers.append(answer)
        made = self.tokenizer.encode("".join(text for text, _ in pieces))
        marks, piece = [], 0
        for begin, end in made.offsets[: length - 1]:
            while piece < len(ends) - 1 and ends[piece] < max(end, begin + 1):
                piece += 1
            marks.append(answers[piece])
        heavy = min(MOST, max(2.0, 0.6 * length / max(1, sum(marks))))
        return Row([BOS, *made.ids[: length - 1]], [0.0, *(heavy * mark if mark else plain for mark in marks)])

    def _prose(self, rng: random.Random, size: int) -> str:
        text = rng.choices(self.texts, self.sizes)[0]
        at = rng.randrange(max(1, len(text) - size))
        return text[at : at + size]

    def _phrase(self, rng: random.Random, low: int, high: int) -> str:
        """Some words that follow each other in a text."""
        found = re.findall(r"[A-Za-z']+", self._prose(rng, 12 * high + 20))[1:]
        return " ".join(found[: rng.randint(low, high)]) or rng.choice(self.words)

    def _key(self, rng: random.Random, two: bool = True) -> str:
        return "-".join(rng.sample(self.words, 2 if two else 1))

    def copies(self, rng: random.Random, length: int) -> Row:
        return noise.copies(rng, length, self.vocabulary)

    def pairs(self, rng: random.Random, length: int) -> Row:
        return noise.pairs(rng, length, self.vocabulary)

    def passages(self, rng: random.Random, length: int) -> Row:
        """Prose, then parts of it after cues out of it."""
        size = int(length * self.prose * rng.uniform(0.45, 0.85))
        context = self._prose(rng, size)
        play = rng.random() < 0.5  # lines that come again: only what stood before a name tells what follows it
        if play:
            names = [self._phrase(rng, 1, 2).upper() for _ in range(rng.randint(2, 6))]
            if rng.random() < 0.5:  # short ones: easier
                names = [name[:1] if rng.random() < 0.5 else name.lower() for name in names]
            breaks, often = r"(?<=[.?!;,])\s+", 0.6
            if rng.random() < 0.6:
                breaks, often = r"\s+", rng.uniform(0.05, 0.25)
            context = re.sub(breaks, lambda _: f"\n\n{rng.choice(names)}:\n" if rng.random() < often else " ", context)
            context = context[:size]
        elif rng.random() < 0.2:  # few words in any order: one word says nothing about the next
            some = context.split(" ")[: rng.randint(10, 150)]
            context = " ".join(rng.choices(some, k=max(20, size // 6)))[:size]
        pieces: list[Piece] = [(context, 0)]
        while size < length * self.prose * 1.1 and len(context) > 40:
            cue = rng.randint(40 if play and len(context) > 120 else 12, min(140, len(context) // 3))
            at = rng.randrange(len(context) - cue)
            rest = context[at + cue : at + cue + rng.randint(20, min(400, 20 + length))]
            pieces.append((rng.choice(("\n", "\n\n", " ")) + context[at : at + cue], 0))
            for i, part in enumerate(re.split(r"(?<=:\n)(.{1,8})", rest) if play else [rest]):
                pieces.append((part, 6 if i % 2 else 1))  # what follows a name is what is hard
            size += cue + len(rest)
        return self._row(pieces, length, 0.5)

    def facts(self, rng: random.Random, length: int) -> Row:
        filler = rng.random() < 0.5
        head = passkey.HEAD if filler and length > 128 and rng.random() < 0.6 else ""
        room = int(length * self.prose * 0.9) - len(head)
        said: list[tuple[str, str, str]] = []  # what is hidden, its question, the answer
        known: set[str] = set()
        for _ in range(1 if rng.random() < 0.3 else rng.randint(1, max(1, length // 160))):
            if rng.random() < (0.8 if filler else 0.4):
                about = "pass key" if rng.random() < 0.3 else f"{rng.choice(self.words)} key"
                number = str(rng.randint(10000, 99999))
                if rng.random() < 0.6:  # of few digits: the last one alone does not tell the next
                    number = "".join(rng.choices(rng.sample("123456789", rng.randint(2, 3)), k=5))
                hidden = f"The {about} is {number}. Remember it. {number} is the {about}.\n"
                item = hidden, f"What is the {about}? The {about} is", f" {number}."
            else:
                about, answer = f"{rng.choice(self.words)} {self._phrase(rng, 1, 8)}", self._phrase(rng, 3, 14)
                item = f"The {about} is {answer}. ", f"\n\nWhat is the {about}? The {about} is", f" {answer}."
            if about not in known and len(known) * 60 < room:
                known.add(about)
                said.append(item)
        room -= sum(len(a) + len(b) + len(c) + 2 for a, b, c in said)
        hay = self._hay(rng, max(40, int(room * (1 if rng.random() < 0.7 else rng.random()))), filler)
        cuts = sorted(rng.randrange(len(hay) + 1) for _ in said)
        pieces: list[Piece] = [(head, 0)]
        for a, b, (hidden, _, _) in zip([0, *cuts], cuts, said, strict=False):
            pieces.append(("".join(hay[a:b]) + hidden, 0))
        pieces.append(("".join(hay[cuts[-1] :]), 0))
        for _, question, answer in rng.sample(said, len(said)):
            pieces += [(question, 0), (answer, 1), ("\n", 0)]
        return self._row(pieces, length, 0.0 if filler else 0.2)

    def _hay(self, rng: random.Random, size: int, filler: bool) -> list[str]:
        """Sentences, about that many characters."""
        if not filler:
            return re.findall(r"[^.]*\.\s*|[^.]+$", self._prose(rng, size)) or ["It is so. "]
        text = passkey.FILLER
        if rng.random() < 0.5:
            text = " ".join(self._phrase(rng, 2, 6).capitalize() + "." for _ in range(rng.randint(2, 6))) + "\n"
        return [text] * max(1, size // len(text))

    def records(self, rng: random.Random, length: int) -> Row:
        """Lines first and questions after them, or both mixed; of the long form some are cut, so that it is learnt."""
        long, two, low = rng.random() < 0.5, rng.random() < 0.8, rng.choice((1, 1000, 10000))
        head = rng.choice((lines.HEAD, lines.HEAD[:51] + "\n", "")) if long and length > 256 else ""
        line = FORMS[long]
        room = int(length * self.line[line]) - len(head)
        if rng.random() < 0.6:
            line = line.replace(LABEL, LABEL[: rng.randint(0, len(LABEL))])
        share, mixed = rng.uniform(0.4, 0.8), rng.random() < 0.4
        pairs: dict[str, str] = {}
        pieces: list[Piece] = [(head, 0)]
        size = 0
        while size < room:
            if len(pairs) < 2 or (rng.random() < share if mixed else size < share * room):
                key, number = self._key(rng, two), str(rng.randint(low, 49999))
                if key in pairs:
                    continue
                pairs[key] = number
                text = line.format(key, number)
                pieces.append((text, 0))
                size += len(text)
                continue
            key = rng.choice(list(pairs))
            cue, after = line.format(key, "\0").split("\0")
            answer = pairs[key] + after
            if long and rng.random() < 0.4:
                question = lines.QUESTION.format(key)
                if rng.random() < 0.6:
                    cue = f"{question}\n{cue}"
                else:
                    cue, answer = question, f"The <REGISTER_CONTENT> in line {key} is <{pairs[key]}>.\n"
            at = answer.index(pairs[key])  # its first digits are what is hard
            begin = answer[at : at + 2], 3 if long else 1
            pieces += [(cue, 0), (answer[:at], 1), begin, (answer[at + 2 :], 1)]
            size += len(cue) + len(answer)
        return self._row(pieces, length, 0.0)
