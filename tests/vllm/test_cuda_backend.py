"""The plugin's backend for CUDA without a GPU: its kernels are interpreted, vLLM's kernel of prompts is replaced."""

from __future__ import annotations

import pytest
import torch

from support import vllm_engines as engines
from support.gpu import NAN_MEMORY, NEEDS_TRITON

pytestmark = [
    pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU, on which the backend itself can run"),
    NEEDS_TRITON,
    NAN_MEMORY,
]

PROMPTS = [[(7 * i + 3 * j) % 253 for j in range(n)] for i, n in enumerate((30, 260, 7))]
NEW = 4


def tokens(model, method=None, **changes):
    """The greedy tokens after the prompts, and the counters, from a child whose engine has the backend for CUDA."""

    def work():
        if method:
            from support.vllm_cuda import use_cuda_backend

            use_cuda_backend()
        llm = engines.engine(model, method, max_model_len=1024, **changes)
        answer, _ = engines.generate(llm, PROMPTS, NEW)
        return answer, llm.collective_rpc("skimkv_counters") if method else None

    return engines.in_child(work)


@pytest.fixture(scope="module")
def stock(model):
    """The tokens of vLLM without skimkv."""
    return tokens(model)[0]


@pytest.mark.parametrize("spec", ["Dense()", "SparQ(r=64, k=1024)", "TopK(k=1024, oracle=True)"])
def test_the_tokens_of_a_batch_are_those_of_stock(model, stock, spec):
    answer, (counters,) = tokens(model, spec)
    assert answer == stock
    steps = 2 * len(PROMPTS) * (NEW - 1)  # layers, requests, tokens but the first, which comes from the prompt
    assert (counters["layers"], counters["steps"], counters["rows"]) == (2, steps, 2 * steps)
    assert counters["bytes"] == engines.bytes_of_steps(spec, PROMPTS, NEW)


def test_prompts_in_chunks_beside_rows_that_decode_give_the_same_tokens(model, stock):
    assert tokens(model, "SparQ(r=64, k=1024)", max_num_batched_tokens=100)[0] == stock


def test_a_small_budget_gives_the_tokens_of_skimkv_in_transformers(model, stock):
    spec = "SparQ(r=16, k=24)"
    assert tokens(model, spec)[0] == engines.tokens_of_skimkv(model, spec, PROMPTS, NEW) != stock


REFUSED = {
    "H2O(k=64)": "H2O(k=64) has a budget, which is supported on CPUs only",
    "SparQ(r=16, k=64, channels='int8')": "channels = 'int8' must be one of none, copy in blocks",
    "SparQ(r=16, k=64, mean_value=True)": "in blocks on CUDA, which have no mean of the values: add mean_value=False",
    "Dense(kv='int8')": "kv='int8' is not supported in blocks on CUDA",
    "Skim(k=32)": "Skim(k=32) is supported in blocks on CPUs only",
    "Quest(k=64, page=16)": "Quest(page=16, k=64) is not supported in blocks on CUDA",
    "LowRank(r=8, k=64)": "LowRank(r=8, k=64) is not supported in blocks on CUDA",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cuda_has_no_kernels_for_is_refused_in_one_line(model, spec):
    def configure():
        from vllm.engine.arg_utils import EngineArgs

        from support.vllm_cuda import use_cuda_backend

        use_cuda_backend()
        EngineArgs(model, additional_config={"skimkv": {"method": spec}}, max_model_len=1024).create_engine_config()

    with pytest.raises(RuntimeError) as caught:
        engines.in_child(configure)
    line = str(caught.value).splitlines()[-1]
    assert line.startswith("ConfigurationError: skimkv in vLLM: ") and REFUSED[spec] in line
