"""Answers: where they end, and the bits of a text that is given."""

from __future__ import annotations

import math

import pytest
import torch

import skimkv
from skimkv.eval import tasks
from skimkv.eval.answer import Question, answer_questions
from skimkv.eval.shared_prompt import record_prompt
from support.evaluation import builtin
from support.random_models import random_model, tiny_configuration
from support.tiny_models import prompt, tokenizer


def test_given_text_is_scored_by_its_bits():
    """The bits of a text given token by token are those of one forward pass, dense."""
    model, words = builtin()
    ids = words("acorn-actor: 12345\nalbum-alley: 23451\nacorn-actor: 12345\n", return_tensors="pt").input_ids
    with torch.inference_mode():
        recorded = record_prompt(model, ids[:, :9])
        feed = ids[0, 9:].tolist()
        question, cache = Question(feed, len(feed) - 2), recorded.cache(skimkv.Dense())
        ((answer,),) = answer_questions(model, words, [cache], recorded.logits, [question])
        skimkv.detach(model)
        whole = model(ids).logits[0].log_softmax(-1)
    expected = -sum(float(whole[i - 1, ids[0, i]]) for i in range(11, ids.shape[1])) / math.log(2)
    assert answer.bits == pytest.approx(expected, rel=1e-5) and answer.steps == len(feed) - 1
    greedy = all(int(whole[i - 1].argmax()) == ids[0, i] for i in range(11, ids.shape[1]))
    assert answer.likeliest == greedy and (answer.text, answer.tokens) == ("", 0)


def test_states_go_on_where_the_prompt_ended():
    """Jamba begins its states anew in a block of several tokens; the bits are still those of one forward pass."""
    model, ids = random_model(tiny_configuration("jamba")), prompt(1, 30)
    with torch.inference_mode():
        whole = model(ids).logits[0].log_softmax(-1)
        recorded = record_prompt(model, ids[:, :20], new_tokens=10)
        question, cache = Question(ids[0, 20:].tolist(), 10), recorded.cache(skimkv.Dense())
        ((answer,),) = answer_questions(model, tokenizer(), [cache], recorded.logits, [question])
    expected = -sum(float(whole[i - 1, ids[0, i]]) for i in range(20, 30)) / math.log(2)
    assert answer.bits == pytest.approx(expected, rel=1e-4) and answer.steps == 9


def test_where_an_answer_ends():
    assert Question([], stop="\n").cut("\n12\n3") == ("\n12", True)
    assert Question([], stop="\n").cut(" \n") == (" \n", False)
    assert Question([], chars=3).cut("abcd") == ("abc", True)
    assert Question([]).cut("abcd") == ("abcd", False)


class Scripted:
    """Stands in for a tokenizer: whatever the tokens are, the text is as many words of a script."""

    eos_token_id = None

    def __init__(self, words: str) -> None:
        self.words = words.split(" ")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f" {word}" for word in self.words[: len(ids)])


def test_common_words_end_with_the_last_right_one(monkeypatch):
    """The score is that of all 120 tokens; an answer that lacks a word goes on, because a later word still counts."""
    task = tasks.parse("cwe(length=1500)")
    example = next(task.examples(None, 0, lambda text: len(text.split())))
    right = " ".join(f"{i}. {word}" for i, word in enumerate(example.answers, 1))  # 20 words
    lacking, rest = right.replace(example.answers[3], "wrong"), " wrong" * 120
    late = f"{lacking} wrong {example.answers[3]}"
    model, words = builtin()
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    for script, tokens, score in (
        (right, 20, 1.0), (right.upper(), 20, 1.0), (lacking, 120, 0.9), (late, 22, 1.0), ("none", 120, 0.0),
    ):  # fmt: skip
        script += rest
        with torch.inference_mode():
            recorded = record_prompt(model, words("a list of words", return_tensors="pt").input_ids)
            question = Question([5], 0, example.new, example.stop, example.chars, example.enough, example.answers)
            cache = recorded.cache(skimkv.Dense())
            ((answer,),) = answer_questions(model, Scripted(script), [cache], recorded.logits, [question])
        assert (answer.tokens, task.module.score(answer.text, example)) == (tokens, score)
        whole = " ".join(script.split(" ")[: example.new])
        assert task.module.score(whole, example) == score, "of what RULER would have generated"
