"""Methods with a budget inside vLLM: one block a request, and the tokens of skimkv's own generate()."""

from __future__ import annotations

import pytest

from support import vllm_engines as engines

pytestmark = pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm")


SPECS = ["H2O(k=508, local=100)", "H2O(k=64, kv='int4')", "LMInfinite(k=64, initial=4)", "SubGen(k=48, recent=16)"]


@pytest.mark.parametrize("spec", SPECS)
def test_the_tokens_of_a_batch_are_those_of_generate(model, spec):
    answer = engines.run(model, spec, block_size=None)
    assert answer["tokens"] == engines.tokens_of_skimkv(model, spec, engines.prompts())
    (counters,) = answer["counters"]
    steps = 2 * 4 * 11  # layers, requests, tokens but the first, which comes from the prompt
    assert (counters["layers"], counters["steps"], counters["rows"]) == (2, steps, 2 * steps)
    assert counters["bytes"] == engines.bytes_of_steps(spec, engines.prompts())


def test_memory_for_two_requests_serves_four_without_prefixes_chunks_or_preemption(model):
    spec, block = "H2O(k=64)", 2 * 2 * 64 * (2 * 64 * 4 + 8)  # layers, heads, slots, K and V, score and position
    answer = engines.run(
        model, spec, 40, rounds=2, block_size=None, kv_cache_memory_bytes=3 * block, max_num_batched_tokens=96
    )  # vLLM keeps one block for itself
    assert answer["tokens"] == engines.tokens_of_skimkv(model, spec, engines.prompts(), 40)
    assert answer["cached"] == [0] * 4
    assert answer["preemptions"] == 0


def test_a_request_that_begins_anew_reads_all_its_tokens_as_a_prompt(model):
    spec, prompts = "H2O(k=64)", engines.prompts(2)

    def work():
        llm = engines.engine(model, spec, block_size=None)
        options = engines.vllm.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
        for i, ids in enumerate(prompts):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, options)
        tokens: dict[str, list[int]] = {}
        for step in range(100):
            if step == 10:
                llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            for answer in llm.llm_engine.step():
                tokens[answer.request_id.split("-")[0]] = list(answer.outputs[0].token_ids)
            if not llm.llm_engine.has_unfinished_requests():
                break
        return [tokens["0"], tokens["1"]]

    answers = engines.in_child(work)
    for ids, tokens in zip(prompts, answers, strict=True):
        first = engines.tokens_of_skimkv(model, spec, [ids], 30)[0]
        both = [
            first[:cut] + engines.tokens_of_skimkv(model, spec, [ids + first[:cut]], 30 - cut)[0]
            for cut in range(8, 12)
        ]
        assert tokens in both and tokens != first
