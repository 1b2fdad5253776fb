"""Tokens per second of vLLM with the same bytes of cache: stock beside skimkv's methods, in turns on the same machine.

All engines live in this process, get the same requests, and have the same memory for their caches; each decodes as many
requests at once as find blocks. A block of skimkv is not one of stock, so both are told: bytes and blocks.

    .venv-vllm/bin/python benchmarks/vllm_serve.py --prompt 512 --new 512 --requests 40 --memory 25M

It prints one line of JSON for each engine: tokens per second (generated tokens over the time of prompts and answers),
the ratio to stock, the bytes of the cache, its blocks, the tokens of a block, and how many requests decoded at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # vLLM would take one thread


def write_model(folder: str, layers: int, positions: int) -> None:
    """Write a Llama of SmolLM-135M's shape with random weights: 9 heads of 64, 3 KV heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=positions,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Engine:
    """An engine that has all requests, and the seconds of its steps."""

    def __init__(self, folder: str, method: str | None, args: argparse.Namespace) -> None:
        from vllm import LLM

        from skimkv.methods import parse
        from skimkv.methods.slots import SlotMethod

        options: dict[str, Any] = {"additional_config": {"skimkv": {"method": method}}} if method else {}
        if method and not isinstance(parse(method), SlotMethod):
            options["block_size"] = args.block
        self.method, self.args = method or "stock", args
        self.llm = LLM(
            folder, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False,
            max_model_len=args.prompt + args.new, max_num_seqs=args.requests, kv_cache_memory_bytes=args.memory,
            max_num_batched_tokens=max(4096, args.prompt + args.new), **options,
        )  # fmt: skip
        self.seconds, self.most_at_once = 0.0, 0

    def add_requests(self, new_tokens: int) -> None:
        """Give the engine all requests, whose answers have so many tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        for i in range(self.args.requests):
            ids = [(7 * j * j + 13 * i + j) % 49000 for j in range(self.args.prompt)]
            self.llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, sampling)
        self.seconds = 0.0

    def step(self) -> bool:
        """Take one step, and return whether requests are left."""
        start = time.perf_counter()
        answers = self.llm.llm_engine.step()
        self.seconds += time.perf_counter() - start
        self.most_at_once = max(self.most_at_once, len(answers))
        unfinished: bool = self.llm.llm_engine.has_unfinished_requests()
        return unfinished

    def row(self) -> dict[str, Any]:
        """What was measured, apart from the ratio."""
        cache, args = self.llm.llm_engine.vllm_config.cache_config, self.args
        return {
            "method": self.method, "prompt": args.prompt, "new": args.new, "requests": args.requests,
            "layers": args.layers, "cache_bytes": args.memory, "blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size, "most_at_once": self.most_at_once,
            "tokens_per_s": round(args.requests * args.new / self.seconds, 1),
        }  # fmt: skip


def number_of_bytes(text: str) -> int:
    """Read a size such as 25M or 2G."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 25M or 2G")
    return int(match[1]) << " KMG".index(match[2] or " ") * 10


def main() -> None:
    """Run the comparison that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="Tokens of each prompt.")
    parser.add_argument("--new", type=int, default=512, help="Tokens of each answer.")
    parser.add_argument("--requests", type=int, default=40, help="Requests that all engines get.")
    parser.add_argument("--memory", type=number_of_bytes, default="25M", help="Bytes of the cache, such as 25M.")
    parser.add_argument("--block", type=int, default=256, help="Tokens of a block, for methods that keep every token.")
    parser.add_argument("--layers", type=int, default=8, help="Layers of the model.")
    parser.add_argument("--method", action="append", help="A method of skimkv; may be given several times.")
    parser.add_argument("--out", type=Path, help="File of JSON Lines to write.")
    args = parser.parse_args()
    k = round(0.2 * (args.prompt + args.new))
    methods = args.method or ["Dense()", f"H2O(k={k}, local={k // 2})", f"LMInfinite(k={k}, initial={min(16, k // 4)})"]
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args.layers, args.prompt + args.new)
        engines = [Engine(folder, method, args) for method in (None, *methods)]
        for new_tokens in (2, args.new):  # the first answers are short, and do not count
            for engine in engines:
                engine.add_requests(new_tokens)
            unfinished = engines
            while unfinished:
                unfinished = [engine for engine in unfinished if engine.step()]
        rows = [engine.row() for engine in engines]
    lines = [json.dumps({**row, "ratio": round(row["tokens_per_s"] / rows[0]["tokens_per_s"], 2)}) for row in rows]
    print("\n".join(lines), flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
