"""skimkv inside vLLM: the same tokens as stock vLLM where the budget is everything, and what was read is counted.

Run by `make test-vllm`, which has an environment of its own with vLLM's build for CPUs.
"""

from __future__ import annotations

import functools

import pytest
import torch

from support import vllm_engines as engines

pytestmark = pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm")


@pytest.fixture(scope="module")
def stock(model):
    """The tokens of vLLM without skimkv, for some number of new tokens and type."""

    @functools.cache
    def tokens(new_tokens=12, dtype="float32"):
        return engines.run(model, None, new_tokens, dtype=dtype)["tokens"]

    return tokens


EVERYTHING = "SparQ(r=64, k=100000)"


@pytest.mark.parametrize("method", ["Dense()", EVERYTHING, "SparQ(r=64, k=100000, channels='int8')", "TopK(k=100000)"])
def test_the_tokens_of_a_batch_are_those_of_stock(model, stock, method):
    answer = engines.run(model, method)
    assert answer["tokens"] == stock()
    (counters,) = answer["counters"]
    steps = 2 * 4 * 11  # layers, requests, tokens but the first, which comes from the prompt
    assert (counters["layers"], counters["steps"], counters["rows"]) == (2, steps, 2 * steps)
    assert counters["bytes"] == engines.bytes_of_steps(method, engines.prompts())


def test_a_prefix_from_the_cache_gives_the_same_tokens(model, stock):
    answer = engines.run(model, "SparQ(r=64, k=100000, channels='int4')", rounds=2)
    assert min(answer["cached"]) >= 256
    assert answer["tokens"] == stock()


@pytest.mark.parametrize("tokens_at_once", [96, 533])
def test_a_prompt_in_chunks_gives_the_same_tokens(model, stock, tokens_at_once):
    answer = engines.run(model, EVERYTHING, max_num_batched_tokens=tokens_at_once)
    assert answer["tokens"] == stock()


def test_a_request_that_is_preempted_gives_the_same_tokens(model, stock):
    block = 2 * 2 * 256 * 3 * 64 * 4  # layers, heads, tokens, K twice and V, bytes
    answer = engines.run(model, EVERYTHING, 300, kv_cache_memory_bytes=10 * block, max_model_len=1024)
    assert answer["preemptions"] > 0
    assert answer["tokens"] == stock(300)


def test_the_tokens_in_bfloat16_are_those_of_stock(model, stock):
    assert engines.run(model, EVERYTHING, dtype="bfloat16")["tokens"] == stock(dtype="bfloat16")


def test_a_small_budget_gives_the_tokens_of_skimkv_in_transformers(model, stock):
    spec = "SparQ(r=16, k=48, mean_value=False)"
    answer = engines.run(model, spec)["tokens"]
    assert answer == engines.tokens_of_skimkv(model, spec, engines.prompts()) != stock()


def test_a_model_without_grouped_queries_gets_the_mean_of_the_values(tmp_path):
    model, spec = engines.write_model(tmp_path, num_key_value_heads=4), "SparQ(r=16, k=48)"
    answer, requests = engines.run(model, spec, rounds=2), engines.prompts()
    assert min(answer["cached"]) >= 256
    assert answer["tokens"] == engines.tokens_of_skimkv(model, spec, requests)
    (counters,) = answer["counters"]
    # a block's mean for every block that a step reads, in two layers, four heads and float32
    means = 2 * sum((len(ids) + i) // 256 + 1 for ids in requests for i in range(11)) * 4 * 64 * 4
    assert counters["bytes"] == 2 * (engines.bytes_of_steps(spec, requests, H=4, G=1) + means)  # in two rounds


def test_rows_that_a_step_must_not_read_may_hold_nan(model):
    def tokens(spoil):
        llm = engines.engine(model, "SparQ(r=32, k=40, local=40)")  # reads only the rows of the last 41 tokens
        options = engines.vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("0", {"prompt_token_ids": engines.prompts()[3]}, options)
        finished, done = llm.llm_engine.step(), False
        if spoil:
            llm.collective_rpc(spoil_old_rows)
        while not done:
            finished = llm.llm_engine.step()
            done = bool(finished) and finished[0].finished
        return list(finished[0].outputs[0].token_ids)

    assert engines.in_child(tokens, True) == engines.in_child(tokens, False)


def spoil_old_rows(worker):
    """Write NaN to the rows of K and V of every block but the last one of the request, which begins at token 512."""
    for layer in worker._layers().values():
        blocks = layer.blocks
        used = [b for b in range(1, blocks.count) if blocks.parts.v[b].abs().sum() > 0]
        full = [b for b in used if blocks.parts.v[b, 0, -1].abs().sum() > 0]
        assert (len(used), len(full)) == (3, 2)
        with torch.inference_mode():
            blocks.parts.k[full] = blocks.parts.v[full] = torch.nan


def test_without_the_key_nothing_is_changed(model, stock):
    def look():
        llm = engines.engine(model, None)
        return llm.collective_rpc(describe_worker)[0]

    worker, backends = engines.in_child(look)
    assert worker == "CPUWorker"
    assert backends == {"vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"}


def describe_worker(worker):
    """The classes of a worker and of its layers' attention."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    names = {f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}" for layer in layers}
    return type(worker.worker).__name__, names


def test_an_engine_whose_layers_use_another_backend_does_not_start(model):
    def start():
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        current_platform.get_attn_backend_cls = current_platform.get_attn_backend_cls.skimkv_wraps
        engines.engine(model, EVERYTHING)

    with pytest.raises(RuntimeError, match="2 of 2 attention layers use another backend"):
        engines.in_child(start)
