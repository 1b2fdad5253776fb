"""Answers: where they end, and the bits of a text that is given."""

from __future__ import annotations

import math

import pytest
import torch

import skimkv
from skimkv.eval.answer import Question, answer_questions
from skimkv.eval.shared_prompt import record_prompt
from skimkv.hf.tiny_models import random_model, tiny_configuration
from support.evaluation import builtin
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
