"""skimkv inside vLLM: the same tokens as stock vLLM where the budget is everything, and what was read is counted.

Run by `make test-vllm`, which has an environment of its own with vLLM's build for CPUs.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from support import vllm_engines as engines

pytestmark = pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm")


@pytest.fixture(scope="module")
def stock(model):
    """The tokens of vLLM without skimkv, for some number of new tokens."""

    @functools.cache
    def tokens(new_tokens=12):
        return engines.run(model, None, new_tokens)["tokens"]

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


def assert_tokens_of_stock_in_bfloat16(model, found):
    """Up to the first one that differs, whose logit in stock vLLM is at most one number of bfloat16 below the best."""
    n = len(found[0])
    for ours, steps in zip(found, engines.in_child(engines.logits_of_stock, model, n, "bfloat16"), strict=True):
        for token, (best, logits) in zip(ours, steps, strict=True):
            if token != best:
                spacing = torch.finfo(torch.bfloat16).eps * 2.0 ** math.floor(math.log2(abs(logits[best])))
                assert logits[best] - logits[token] <= spacing
                break


def test_the_tokens_in_bfloat16_are_those_of_stock(model):
    assert_tokens_of_stock_in_bfloat16(model, engines.run(model, EVERYTHING, dtype="bfloat16")["tokens"])


@pytest.mark.parametrize(
    ("method", "dtype", "changes"),
    [
        (EVERYTHING, "float32", {"rounds": 2}),
        ("Skim(k=100000)", "float32", {"max_num_batched_tokens": 96}),
        ("Dense()", "bfloat16", {}),
    ],
)
def test_where_vllm_would_use_amx_the_tokens_are_those_of_stock(model, stock, method, dtype, changes):
    answer = engines.run(model, method, dtype=dtype, before=engines.pretend_amx, **changes)
    if dtype == "bfloat16":
        assert_tokens_of_stock_in_bfloat16(model, answer["tokens"])
    else:
        assert answer["tokens"] == stock()
    assert "rounds" not in changes or min(answer["cached"]) >= 256


def test_skim_gives_the_tokens_of_stock_where_it_reads_all_rows(model, stock):
    spec = "Skim(k=100000)"
    answer, requests = engines.run(model, spec), engines.prompts()
    assert answer["tokens"] == stock()
    (counters,) = answer["counters"]
    assert counters["bytes"] == engines.bytes_of_steps(spec, requests) + bytes_of_means(requests, H=2)


def test_skim_draws_the_same_rows_with_prefixes_in_chunks_and_beside_other_requests(model, stock):
    spec, requests = "Skim(k=12, r=16)", engines.prompts()
    expected = engines.in_child(engines.tokens_of_skimkv, model, spec, requests)
    answer = engines.run(model, spec, rounds=2)
    assert answer["tokens"] == expected != stock() and min(answer["cached"]) >= 256
    assert engines.run(model, spec, max_num_batched_tokens=96)["tokens"] == expected

    def alone():
        llm = engines.engine(model, spec)
        return [engines.generate(llm, [ids], 12)[0][0] for ids in requests]

    assert engines.in_child(alone) == expected


QUANTISED = ["Dense(kv='int8')", "SparQ(r=16, k=48, kv='int8', mean_value=False)", "Skim(k=12, r=16, kv='int8')"]


@pytest.mark.parametrize("spec", QUANTISED)
def test_quantised_rows_give_the_tokens_of_skimkv_in_transformers(model, spec):
    whole = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096}
    answer = engines.run(model, spec, **whole)
    assert answer["tokens"] == engines.tokens_of_skimkv(model, spec, engines.prompts())


def test_a_prompt_in_chunks_is_read_against_quantised_rows(model):
    spec, ids = QUANTISED[0], engines.prompts()[0]

    def work(tokens_at_once):
        llm = engines.engine(model, spec, max_num_batched_tokens=tokens_at_once)
        return [engines.generate(llm, [ids], 12) for _ in range(2)]

    ((in_chunks, _), _), (_, (after_prefix, cached)) = (engines.in_child(work, n) for n in (96, 4096))
    assert in_chunks == engines.tokens_of_skimkv(model, spec, [ids], prefill_chunk_size=96)
    assert cached == [256] and after_prefix == engines.tokens_of_skimkv(model, spec, [ids], prefill_chunk_size=256)


def test_quantised_rows_take_half_the_memory(model):
    def tokens(method):
        llm = engines.engine(model, method, dtype="bfloat16", block_size=1024)
        cache = llm.llm_engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    for quantised, other in (("Dense(kv='int8')", None), ("Skim(k=64, kv='int8')", "Skim(k=64)")):
        assert engines.in_child(tokens, quantised) / engines.in_child(tokens, other) > 1.8


def test_skim_is_preempted_and_gives_the_tokens_of_stock(model, stock):
    memory = 11 * (2 * 2 * 256 * 1000)  # layers, heads, tokens, bytes: 11 of the blocks of about 900 bytes a token
    answer = engines.run(model, "Skim(k=100000)", 300, kv_cache_memory_bytes=memory, max_model_len=1024)
    assert answer["preemptions"] > 0
    assert answer["tokens"] == stock(300)


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
    in_a_round = engines.bytes_of_steps(spec, requests, H=4, G=1) + bytes_of_means(requests, H=4)
    assert counters["bytes"] == 2 * in_a_round


def bytes_of_means(requests, H):
    """A block's mean of the values for every block that a step reads, in two layers, H heads of 64 and float32."""
    return 2 * sum((len(ids) + i) // 256 + 1 for ids in requests for i in range(11)) * H * 64 * 4


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
