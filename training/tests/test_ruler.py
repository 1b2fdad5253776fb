"""The rows in the manner of RULER: every answer follows from what was read, and a row has room for all of it."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from training import ruler
from training.data import RowMaker

LENGTH = 2048  # tokens, of which the tokenizer of the tests needs about one for two characters


def parts(pieces: list[ruler.Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The text that is read first, and (question, answer) for each answer."""
    context, question, asked = "", "", []
    for i, (text, mark) in enumerate(pieces):
        if mark:
            asked.append((question, text))
            question = ""
        elif i == 0:
            context = text
        else:
            question += text
    return context, asked


def listed(text: str) -> list[str]:
    return re.split(r", and |, ", text)


def needles(rng: random.Random, length: int, material: ruler.Material) -> list[ruler.Piece]:
    return ruler.needles(rng, length, material, of_uuids=rng.random() < 0.3)


@pytest.mark.parametrize("kind", [needles, ruler.chains, ruler.variables, ruler.common_words, ruler.frequent_words])
@pytest.mark.parametrize("length", [512, 2 * LENGTH])
def test_a_row_has_room_for_its_answers(maker: RowMaker, kind, length: int) -> None:
    fitting = 0
    for seed in range(10):
        pieces = kind(random.Random(seed), length, maker.material)
        tokens = sum(maker.material.count_tokens([text for text, _ in pieces]))
        fitting += tokens <= length
    assert fitting >= 9


def test_needles_are_answered_with_the_values_of_their_keys(maker: RowMaker) -> None:
    shapes = Counter()
    for seed in range(36):
        context, asked = parts(needles(random.Random(seed), LENGTH, maker.material))
        values: dict[str, set[str]] = {}
        for key, value in re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", context):
            values.setdefault(key, set()).add(value)
        for question, answer in asked:
            keys = listed(
                re.findall(r"for ((?:\S+, )*(?:and )?\S+) mentioned in the provided text (?:is|are)$", question)[0]
            )
            told = listed(answer.strip().rstrip("."))
            assert set(told) == set().union(*(values[key] for key in keys))
            assert len(told) == len(set(told))
            assert (" is" if len(told) == 1 else " are") == question[question.rindex(" ") :]
            shapes[len(keys) > 1, len(told) > len(keys), "-" in told[0]] += 1
    assert len(shapes) >= 6, shapes  # one and several keys, one and several values, numbers and uuids


def test_variables_are_answered_with_their_chain(maker: RowMaker) -> None:
    for seed in range(20):
        context, asked = parts(ruler.chains(random.Random(seed), LENGTH, maker.material))
        given = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", context)
        assert asked
        for question, answer in asked:
            count, value = re.findall(r"above, (\d) variables are assigned the value (\d+), they are: $", question)[0]
            chain = [value]
            for name, source in given:  # each stands after the one that it takes its value from
                if source in chain:
                    chain.append(name)
            assert answer.split() == chain[1:]
            assert int(count) == len(chain) - 1


def test_common_words_come_more_often_than_all_others(maker: RowMaker) -> None:
    for seed in range(20):
        context, ((question, answer),) = parts(ruler.common_words(random.Random(seed), LENGTH, maker.material))
        frequency = Counter(re.findall(r"\d+\. (\w+)", context))
        told = re.findall(r"\d+\. (\w+)", answer)
        assert f"What are the {len(told)} most common words" in question
        others = [n for word, n in frequency.items() if word not in told]
        assert others
        assert min(frequency[word] for word in told) > max(others)


def test_frequent_words_are_told_in_their_order(maker: RowMaker) -> None:
    for seed in range(20):
        context, ((_, answer),) = parts(ruler.frequent_words(random.Random(seed), LENGTH, maker.material))
        (dots, most), *words = Counter(
            re.findall(r"\.\.\.|\b[a-z]{6}\b", context.split("coded words. ")[-1])
        ).most_common()
        assert dots == "..."
        first, second, third, *others = words
        assert [word for word, _ in (first, second, third)] == answer.split()
        assert most > first[1] > second[1] > third[1] > (others[0][1] if others else 0)


def test_lines_are_scattered_in_their_order() -> None:
    mixed = ruler.scattered(random.Random(0), ["1", "2", "3"], ["a"] * 20)
    assert [line for line in mixed if line != "a"] == ["1", "2", "3"]
    assert mixed.count("a") == 20
