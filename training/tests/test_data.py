"""The rows that the bundled model learns from: what is asked was there, what weighs can be known."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from skimkv.eval.tasks import words
from training import folder
from training.data import RowMaker, read_texts
from training.tests.micro_model import ALL_KINDS


def marked(maker: RowMaker, kind: str, seed: int, length: int = 1024) -> tuple[str, list[str]]:
    """A row in text, and its answers."""
    row = getattr(maker, kind)(random.Random(seed), length)
    answers, last = [], False
    for i, weight in zip(row.ids, row.weights, strict=True):
        if weight >= 2 and not last:
            answers.append([])
        if weight >= 2:
            answers[-1].append(i)
        last = weight >= 2
    return maker.tokenizer.decode(row.ids), [maker.tokenizer.decode(answer) for answer in answers]


@pytest.mark.parametrize("kind", ["passages", "facts", "records"])
def test_an_answer_stands_in_what_was_read(maker: RowMaker, kind: str) -> None:
    found = 0
    for seed in range(20):
        text, answers = marked(maker, kind, seed)
        for answer in answers[:-1]:  # the last may be cut
            key = answer.strip().rstrip(".>\n").rsplit("<", 1)[-1]
            assert text.count(key) >= 2
            found += 1
    assert found > 12


def test_in_some_passages_a_name_tells_nothing(maker: RowMaker) -> None:
    after: dict[str, set[str]] = {}
    for seed in range(20):
        text = maker.tokenizer.decode(maker.passages(random.Random(seed), 1024).ids)
        for name, line in re.findall(r"\n\n([A-Z' ]+):\n(.{8})", text):
            after.setdefault(f"{seed} {name}", set()).add(line)
    assert len(after) > 10
    assert sum(len(lines) > 2 for lines in after.values()) > len(after) / 2


def test_what_follows_a_name_weighs_most(maker: RowMaker) -> None:
    found = 0
    for seed in range(20):
        row = maker.passages(random.Random(seed), 1024)
        most = max(row.weights)
        if most > 2 * min(weight for weight in row.weights if weight >= 2):  # a row with names
            first = row.weights.index(most)
            assert ":\n" in maker.tokenizer.decode(row.ids[first - 4 : first + 1])
            found += 1
    assert found > 3


def test_a_number_stands_nearer_or_farther_from_its_key(maker: RowMaker) -> None:
    far = set()
    for seed in range(30):
        text = maker.tokenizer.decode(maker.records(random.Random(seed), 1024).ids)
        told = re.findall(r"line (\S+): (\w*) is <(\d+)>", text)
        keys = {key for key, *_ in told}
        assert len({(key, number) for key, _, number in told}) == len(keys)
        far |= {label for _, label, _ in told}
    assert len(far) > 5
    assert "REGISTER_CONTENT" in far


def test_copies_are_of_what_came_before(maker: RowMaker) -> None:
    for seed in range(20):
        row = maker.copies(random.Random(seed), 256)
        for i, weight in enumerate(row.weights[:256]):
            if weight:
                assert row.ids[i] in row.ids[:i]


def test_short_rows_are_copied_whole(maker: RowMaker) -> None:
    row = maker.copies(random.Random(0), 64)
    n = row.weights.index(1.0) - 1
    assert row.ids[1 + n : 64] == row.ids[1 : 64 - n]
    assert set(row.weights[1 + n : 64]) == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 512])
def test_a_random_key_tells_its_value(maker: RowMaker, length: int) -> None:
    """An answer followed the tokens before it earlier too, and seldom did another: only where a key is in a value."""
    found, sure, by_one = 0, 0, 0
    for seed in range(40):
        row = maker.pairs(random.Random(seed), length)
        starts = [i for i in range(1, length - 5) if row.weights[i] and not row.weights[i - 1]]
        assert starts
        for i in starts:
            w = row.weights[i:].index(0.0) if 0.0 in row.weights[i:] else len(row.weights) - i
            answer = row.ids[i : i + w]
            after = [
                [row.ids[j : j + w] for j in range(m, i) if row.ids[j - m : j] == row.ids[i - m : i]]
                for m in range(1, 8 if length == 128 else 22)
            ]
            assert answer in after[0]
            told = [bool(each) and all(one == answer for one in each) for each in after]
            found, sure, by_one = found + 1, sure + any(told), by_one + told[0]
    assert sure > 0.98 * found
    assert by_one < 0.5 * found


@pytest.mark.parametrize("kind", ["needles", "variables", "counts"])
def test_rows_of_ruler_end_with_answers(maker: RowMaker, kind: str) -> None:
    answered = 0
    for seed in range(8):
        row = getattr(maker, kind)(random.Random(seed), 1536)
        assert len(row.ids) == len(row.weights)
        answered += max(row.weights[-200:]) >= 2
    assert answered >= 6


def test_a_space_before_an_answer_is_a_token_of_its_own_or_a_part_of_the_next(text: str) -> None:
    letters = " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    maker = RowMaker([text], folder.train_tokenizer([text, f" {letters}" * 2000], 330))
    space = maker.tokenizer.encode(" ").ids
    assert len(space) == 1
    assert len(maker.tokenizer.encode(" A").ids) == 1
    before = set()
    for seed in range(20):
        row = maker.variables(random.Random(seed), 1024)
        starts = [i for i in range(1, len(row.ids)) if row.weights[i] >= 2 > row.weights[i - 1]]
        before |= {row.ids[i - 1] == space[0] for i in starts}
    assert before == {True, False}


def test_prose_is_a_part_of_a_text_and_all_of_it_weighs(maker: RowMaker, text: str) -> None:
    row = maker.prose(random.Random(0), 512)
    assert len(row.ids) == 512
    assert row.weights == [0.0] + [1.0] * 511
    assert maker.tokenizer.decode(row.ids[1:]) in text


def test_batches_are_functions_of_their_seed(maker: RowMaker) -> None:
    one, same, other = (maker.batch(seed, 128, 4, ALL_KINDS) for seed in ("a", "a", "b"))
    assert torch.equal(one.ids, same.ids)
    assert torch.equal(one.weights, same.weights)
    assert not torch.equal(one.ids, other.ids)
    assert one.ids.shape == one.weights.shape == (4, 128)
    assert (one.ids[:, 0] == 0).all()
    assert (one.weights[:, 0] == 0).all()


def test_no_row_has_a_key_of_the_tasks(text: str) -> None:
    texts = [text + " " + " ".join(words.ALL)]
    assert not set(words.ALL) & set(RowMaker(texts, folder.train_tokenizer(texts, 300)).words)


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 27_000 + "b" * 3000)
    assert read_texts(tmp_path) == ["a" * 27_000]


def test_a_text_that_is_too_short_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="need at least 20000"):
        read_texts(tmp_path)
    with pytest.raises(ValueError, match="there is no such file"):
        read_texts(tmp_path / "b.txt")
