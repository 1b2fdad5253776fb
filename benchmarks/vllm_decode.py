"""Time the steps of vLLM with skimkv beside those of stock vLLM, step by step in turns, on the same machine.

Both engines live in this process and decode the same batch, of a model and with prompts from a text, or of a Llama with
random weights and with prompts of made-up tokens:

    .venv-vllm/bin/python benchmarks/vllm_decode.py --tokens 8000 --model SmolLM2-135M-Instruct --text wikitext-test.txt
    .venv-vllm/bin/python benchmarks/vllm_decode.py --tokens 16384 --batch 4 --method "SparQ(r=16, k=128)"

Prompts are computed first, which takes much longer than the steps. With --wait the script then waits for a line on its
standard input, so that other programs can be stopped before anything is timed. It prints one line of JSON: the median
milliseconds of a step of each engine, the ratio of the medians, and the bytes that a step of skimkv read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # vLLM would take one thread


def write_model(folder: str, layers: int) -> None:
    """Write a Llama with grouped queries: 16 heads of 64, 4 KV heads, 11 million parameters a layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def prompts(folder: str, text: str | None, tokens: int, batch: int) -> list[list[int]]:
    """The tokens of every request: pieces of a text that follow one another, or made up."""
    if text is None:
        return [[(7 * j * j + 13 * i + j) % 509 for j in range(tokens)] for i in range(batch)]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(encoding="utf-8")).input_ids
    if len(ids) < batch * tokens:
        raise SystemExit(f"{text} has {len(ids)} tokens; {batch} prompts of {tokens} take {batch * tokens}")
    return [ids[i * tokens : (i + 1) * tokens] for i in range(batch)]


def start(folder: str, requests: Sequence[Sequence[int]], method: str | None) -> Any:
    """An engine whose batch has computed its prompts: every step from now on decodes one token of each request."""
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    config, tokens, batch = AutoConfig.from_pretrained(folder), len(requests[0]), len(requests)
    options: dict[str, Any] = {"additional_config": {"skimkv": {"method": method}}} if method else {}
    heads = config.num_hidden_layers * config.num_key_value_heads
    # keys and values in 16 bits, and at most twice that with an index
    bytes_of_token = 2 * 2 * config.head_dim * heads * (2 if method else 1)
    llm = LLM(
        folder, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=min(tokens + 1024, config.max_position_embeddings), max_num_seqs=batch,
        max_num_batched_tokens=4096, enable_prefix_caching=False,
        kv_cache_memory_bytes=(tokens + 4096) * (batch + 1) * bytes_of_token, **options,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
    for i, ids in enumerate(requests):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": list(ids)}, sampling)
    done: set[str] = set()
    while len(done) < batch:
        done |= {answer.request_id for answer in llm.llm_engine.step() if answer.outputs[0].token_ids}
    return llm


def main() -> None:
    """Run the comparison that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="Tokens of each prompt.")
    parser.add_argument("--batch", type=int, default=4, help="Requests that decode together.")
    parser.add_argument("--layers", type=int, default=4, help="Layers of the Llama with random weights.")
    parser.add_argument("--model", help="The folder of a model; none: a Llama with random weights.")
    parser.add_argument("--text", help="A file of text for the prompts; none: tokens are made up.")
    parser.add_argument("--method", action="append", help="The method of skimkv; may be given several times.")
    parser.add_argument("--steps", type=int, default=40, help="Timed steps of each engine.")
    parser.add_argument("--wait", action="store_true", help="Wait for a line on the standard input before timing.")
    args = parser.parse_args()
    if args.text and not args.model:
        parser.error("--text needs --model, whose tokenizer it takes")
    import torch

    methods = [None, *(args.method or ["Dense()", "SparQ(r=16, k=128)"])]
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            write_model(folder, args.layers)
        model = args.model or folder
        requests = prompts(model, args.text, args.tokens, args.batch)
        engines = [start(model, requests, method) for method in methods]
        for engine in engines:
            for _ in range(2):
                engine.llm_engine.step()
        if args.wait:
            print("ready", flush=True)
            sys.stdin.readline()
        times: list[list[float]] = [[] for _ in engines]
        before = [engine.collective_rpc("skimkv_counters")[0]["bytes"] for engine in engines[1:]]
        for _ in range(args.steps):
            for engine, samples in zip(engines, times, strict=True):
                begin = time.perf_counter()
                engine.llm_engine.step()
                samples.append(time.perf_counter() - begin)
        after = [engine.collective_rpc("skimkv_counters")[0]["bytes"] for engine in engines[1:]]
    median = [1e3 * statistics.median(samples) for samples in times]
    for i, method in enumerate(methods[1:], 1):
        row = {
            "model": args.model, "method": method, "tokens": args.tokens, "batch": args.batch,
            "layers": None if args.model else args.layers,
            "threads": torch.get_num_threads(), "stock_ms": round(median[0], 2), "skimkv_ms": round(median[i], 2),
            "ratio": round(median[0] / median[i], 2), "bytes_per_step": (after[i - 1] - before[i - 1]) // args.steps,
        }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
