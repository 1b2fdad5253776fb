"""Engines of vLLM for tests: each runs in a child of its own, forked after vLLM was imported, and answers once."""

from __future__ import annotations

import importlib.util
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_found = importlib.util.find_spec("vllm")
INSTALLED = _found is not None and _found.origin is not None  # the folder tests/vllm alone is a spec without origin

if INSTALLED:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in the child itself
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
    )
    import vllm
    import vllm.entrypoints.llm  # once, before the forks


def prompts(count: int = 4) -> list[list[int]]:
    """Token ids of prompts that share their first 400 tokens and then differ, of 500, 530 and more tokens."""
    return [[(j if j < 400 else i * 5 + j) % 253 for j in range(500 + 30 * i)] for i in range(count)]


def write_model(folder: Path, **changes: Any) -> str:
    """Write a Llama of two layers with random weights that are large enough for clear choices of tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
        "initializer_range": 0.2, "tie_word_embeddings": False,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)
    return str(folder)


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a forked process and return its answer. Raises RuntimeError with its traceback if it fails."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        pid = os.fork()
        if pid == 0:
            try:
                answer: Any = (True, function(*arguments))
            except BaseException as error:
                answer = (False, f"{traceback.format_exc()}\n{type(error).__name__}: {error}")
            with open(file.name, "wb") as out:
                pickle.dump(answer, out)
            os._exit(0)
        os.waitpid(pid, 0)
        content = Path(file.name).read_bytes()
    worked, answer = pickle.loads(content) if content else (False, "the child wrote no answer")
    if not worked:
        raise RuntimeError(answer)
    return answer


def engine(model: str, method: str | None = None, **changes: Any) -> Any:
    """An engine for at most 4 requests of 2048 tokens, with 32 MiB of cache in blocks of 256 tokens."""
    arguments = {
        "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20,
        "dtype": "float32", "skip_tokenizer_init": True, "block_size": 256, "disable_log_stats": False,
    }  # fmt: skip
    if method is not None:
        arguments["additional_config"] = {"skimkv": {"method": method}}
    return vllm.LLM(model, **{**arguments, **changes})


def generate(llm: Any, requests: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[int]]:
    """The greedy tokens of every request, and how many tokens of each prompt the engine had cached."""
    options = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in requests], options, use_tqdm=False)
    return [list(a.outputs[0].token_ids) for a in answers], [a.num_cached_tokens or 0 for a in answers]


def logits_of_stock(model: str, new_tokens: int, dtype: str) -> list[list[tuple[int, dict[int, float]]]]:
    """What vLLM without skimkv generates from every prompt: each token, and the logits of all tokens in its place."""
    import torch._dynamo

    torch._dynamo.config.disable = True  # the ranks of tokens would be compiled, for a minute
    llm = engine(model, dtype=dtype, logprobs_mode="raw_logits", max_logprobs=256)
    options = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=256)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], options, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        [
            (token, {i: one.logprob for i, one in step.items()})
            for token, step in zip(o.token_ids, o.logprobs, strict=True)
        ]
        for o in outputs
    ]


def pretend_amx() -> None:
    """Let vLLM choose the tiles of AMX in this process, for every type, and refuse its kernels of attention."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends import cpu_attn

    def refuse(**_: Any) -> None:
        """Stand in the place of vLLM's attention."""
        raise AssertionError("vLLM's attention was called")

    cpu_attn._get_attn_isa = lambda *_: "amx"
    _custom_ops.cpu_attention_with_kv_cache = refuse


def run(
    model: str,
    method: str | None,
    new_tokens: int = 12,
    rounds: int = 1,
    before: Callable[[], None] = lambda: None,
    **changes: Any,
) -> dict[str, Any]:
    """Generate from the prompts in a child: tokens of the last round, cached tokens, preemptions, counters.

    before: called in the child, before the engine is made.
    """

    def work() -> dict[str, Any]:
        before()
        llm = engine(model, method, **changes)
        for _ in range(rounds):
            tokens, cached = generate(llm, prompts(), new_tokens)
        return {
            "tokens": tokens,
            "cached": cached,
            "preemptions": sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"),
            "counters": llm.collective_rpc("skimkv_counters") if method else None,
        }

    return in_child(work)


def tokens_of_skimkv(
    model: str, spec: str, requests: list[list[int]], new_tokens: int = 12, **options: Any
) -> list[list[int]]:
    """The greedy tokens that skimkv gives in transformers, from one batch whose rows are padded on the left.

    options: of generate().
    """
    import torch
    from transformers import AutoModelForCausalLM

    import skimkv

    n = max(map(len, requests))
    ids = torch.tensor([[0] * (n - len(prompt)) + prompt for prompt in requests])
    mask = torch.tensor([[0] * (n - len(prompt)) + [1] * len(prompt) for prompt in requests])
    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with skimkv.attach(llama, spec):
        out = llama.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            **options,
        )  # fmt: skip
    return out[:, n:].tolist()


def bytes_of_steps(spec: str, requests: list[list[int]], new_tokens: int = 12, H: int = 2, G: int = 2) -> int:
    """The bytes that the steps of both layers move by Method.traffic; a request's first token is its prompt's."""
    import torch

    from skimkv.methods import parse
    from skimkv.stores.base import Shape

    method, shape = parse(spec), Shape(1, H, G, 64)
    lengths = [len(ids) + i for ids in requests for i in range(new_tokens - 1)]  # cached besides the current token
    return 2 * sum(method.traffic(n, shape, torch.float32).bytes for n in lengths)
