"""One recorded prompt serves all methods exactly, and several methods decode in one batch as they do alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import skimkv
from skimkv.eval.answer import Question, answer_questions
from skimkv.eval.shared_prompt import RecordedLayer, copy_rows, forward, record_prompt
from skimkv.hf.joint import JointLayer, joint_cache
from support.tiny_models import family, prompt, tokenizer

SPECS = [
    "Dense()", "SparQ(r=4, k=8)", "SparQ(r=4, k=8, channels='int8')", "TopK(k=8)", "LowRank(r=4, k=8)",
    "LMInfinite(k=8, initial=2)", "H2O(k=8)", "SnapKV(k=8)", "TOVA(k=8)",
    "SubGen(k=6, recent=4)", "SubGenStream(delta=1.0, t=2, s=8)", "Quest(page=4, k=8)",
]  # fmt: skip

OF_EVERY_STORE = ["Dense()", "SparQ(r=4, k=8, channels='int8')", "LMInfinite(k=8, initial=2)", "H2O(k=8)", SPECS[-2]]


def generate_alone(model: Any, method: Any, ids: torch.Tensor, feed: Sequence[int], n: int, end: int) -> list[int]:
    """Decode greedily after the method's own prompt, one row, token by token."""
    cache, generated = skimkv.Cache(model, method), []
    logits = model(ids, past_key_values=cache).logits[0, -1]
    for step in range(len(feed) + n):
        token = feed[step] if step < len(feed) else int(logits.argmax())
        if step >= len(feed):
            if token == end:
                break
            generated.append(token)
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return generated


@pytest.fixture(params=["llama", "gemma2", "gpt2", "gemma3"])
def model(request):
    loaded = family(request.param)
    yield loaded
    skimkv.detach(loaded)


@pytest.mark.slow
@torch.inference_mode()
def test_one_prompt_is_as_good_as_one_per_method(model):
    """Padded prompts of two lengths, three rows on them with questions of different length."""
    words, ids = tokenizer(), prompt(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    recorded = record_prompt(model, ids, mask)
    rows, feeds = [0, 0, 1], [[5, 6, 7], [9], []]
    capped = getattr(model.config, "attn_logit_softcapping", None)
    for spec in SPECS if model.config.model_type == "llama" else OF_EVERY_STORE:
        if capped and "Stream" in spec:
            continue  # it cannot cap logits
        method = skimkv.parse(spec)
        cache = recorded.cache(method)
        questions = [Question(feed, new_tokens=9) for feed in feeds]
        (once,), (again,) = (
            answer_questions(model, words, [copy_rows(cache, rows)], recorded.logits[rows], questions, mask[rows])
            for _ in range(2)
        )
        assert once == again, "copied rows leave the cache as it was"
        for row, feed, answer in zip(rows, feeds, once, strict=True):
            prompt_ids = ids[row : row + 1, 7 if row == 0 else 0 :]
            alone = generate_alone(model, method, prompt_ids, feed, 9, words.eos_token_id)
            text = words.decode(alone, skip_special_tokens=True)
            assert (answer.text, answer.tokens) == (text, len(alone)), (spec, row)


@torch.inference_mode()
def test_a_joint_batch_answers_as_each_cache_does_alone(model):
    """Methods side by side, left padded, with a block of several tokens to feed."""
    words, ids = tokenizer(), prompt(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    recorded = record_prompt(model, ids, mask)
    methods = [skimkv.parse(spec) for spec in ("Dense()", "SparQ(r=4, k=8)", "H2O(k=8)")]
    questions = [Question([5, 6, 7, 8], scored=2, new_tokens=5), Question([9, 4, 3], new_tokens=7)]

    def answers(together: Sequence[Any]) -> list[Any]:
        caches = [recorded.cache(method) for method in together]
        return answer_questions(model, words, caches, recorded.logits, questions, mask)

    joint = answers(methods)
    for method, own in zip(methods, joint, strict=True):
        ((*alone,),) = answers([method])
        for a, b in zip(own, alone, strict=True):
            assert a._replace(bits=0.0) == b._replace(bits=0.0) and a.bits == pytest.approx(b.bits, rel=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "shrinks"), [("llama", True), ("gemma3", False)])
def test_answers_that_have_ended_leave_the_batch(monkeypatch, name, shrinks):
    """Three left padded rows that end after 2, 9 and 20 tokens: answers and costs are those of each row alone.

    Where the library's own layers hold rows of all caches the batch stays whole.
    """
    model, words, ids = family(name), tokenizer(), prompt(3, 24)
    monkeypatch.setattr("skimkv.eval.answer.find_end_tokens", lambda model, tokenizer: set())
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    recorded = record_prompt(model, ids, mask)
    methods = [skimkv.parse(spec) for spec in ("Dense()", "SparQ(r=4, k=8)", "H2O(k=8)", "Skim(k=4)")]
    questions = [Question([5, 6], new_tokens=2), Question([9, 4], new_tokens=20), Question([9, 4], new_tokens=9)]
    rows, run = list[int](), forward

    def counted(model: Any, cache: Any, ids: torch.Tensor, mask: Any) -> torch.Tensor:
        rows.append(len(ids))
        return run(model, cache, ids, mask)

    monkeypatch.setattr("skimkv.eval.answer.forward", counted)
    caches = [recorded.cache(method) for method in methods]
    joint = answer_questions(model, words, caches, recorded.logits, questions, mask)
    assert [answer.tokens for answer in joint[0]] == [2, 20, 9]
    assert rows[0] == 12 and rows == sorted(rows, reverse=True) and (rows[-1] == 4) == shrinks
    for method, answers in zip(methods, joint, strict=True):
        for row, answer in enumerate(answers):
            own = [row]
            cache = copy_rows(recorded.cache(method), own)
            ((alone,),) = answer_questions(model, words, [cache], recorded.logits[own], [questions[row]], mask[own])
            assert answer == alone, (method, row)
    skimkv.detach(model)


@torch.inference_mode()
def test_layers_know_what_they_hold():
    """Bytes of a recorded prompt are those of q, k and v; those of a joint layer are its parts'."""
    llama = family("llama")
    recorded = record_prompt(llama, prompt(2, 10))
    layer = recorded.recorded[0]
    assert layer.cached_tokens == [10, 10] and RecordedLayer().nbytes == 0 and RecordedLayer().cached_tokens is None
    assert layer.nbytes == layer.allocated == 2 * 10 * 16 * (4 + 2 + 2) * 4  # 4 query heads on 2, float32
    with pytest.raises(RuntimeError, match="one block"):
        layer.attend_block(layer.q, layer.k, layer.v, scale=1.0, pad=None, softcap=None)
    caches = [recorded.cache(skimkv.parse(spec)) for spec in ("Dense()", "LMInfinite(k=4, initial=1)")]
    joint = joint_cache(caches)
    before = sum(cache.nbytes for cache in caches)
    assert isinstance(joint.layers[0], JointLayer) and joint.nbytes == before
    assert joint.allocated == sum(cache.allocated for cache in caches)
    forward(llama, joint, torch.full((4, 1), 5), None)
    assert joint.get_seq_length() == 11 and [cache.get_seq_length() for cache in caches] == [11, 11]
    assert joint.nbytes == sum(cache.nbytes for cache in caches) > before
    joint.reset()
    assert joint.get_seq_length() == 0 and caches[0].nbytes == 0
    skimkv.detach(llama)
