"""Engines of vLLM that take their steps in turns: a program of its own, which `serve_vllm` starts for one comparison.

The first argument is a `Job` as JSON. On stdout it writes lines of JSON: null for each part that is done, and at the
end one object, {"rows": [...]} or {"error": "one line"}. Whatever vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TextIO

import torch

from ..methods import parse
from ..methods.slots import SlotMethod
from .served_rows import BATCH, MEMORY, VLLM

BLOCK_SIZES = (1024, 512, 256)  # of methods that keep every token; the first one is the plugin's own choice
WARM_UP = 2  # new tokens of the requests that do not count
TOKENS_AT_ONCE = 4096  # of prompts that are read in one step


class Job(NamedTuple):
    """One comparison. methods: specs, or None for vLLM as it is; memory: the bytes of each engine's cache."""

    model: str
    device: str
    dtype: str
    methods: list[str | None]
    prompt: int
    new: int
    memory: int
    requests: int


def block_size(tokens: int) -> int:
    """Return the largest size of blocks in which `tokens` tokens take no more room than in small ones."""
    least = -(-tokens // BLOCK_SIZES[-1]) * BLOCK_SIZES[-1]
    return next(size for size in BLOCK_SIZES if least % size == 0)


class Engine:
    """An engine of vLLM, the requests that it has, and the seconds of its steps."""

    def __init__(self, job: Job, method: str | None) -> None:
        """Start the engine. Raises ValueError, in one line with the method, if vLLM or skimkv refuses it."""
        from vllm import LLM

        self.job, self.name = job, method or VLLM
        self.has_budget = method is not None and isinstance(parse(method), SlotMethod)
        tokens = job.prompt + job.new
        options: dict[str, Any] = {"additional_config": {"skimkv": {"method": method}}} if method else {}
        if method and not self.has_budget:
            options["block_size"] = block_size(tokens)
        try:
            self.llm = LLM(
                job.model, dtype=job.dtype, enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False,
                max_model_len=tokens, max_num_seqs=job.requests, kv_cache_memory_bytes=job.memory,
                max_num_batched_tokens=max(TOKENS_AT_ONCE, tokens), **options,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.name}: {' '.join(str(error).split())}") from error
        config = self.llm.llm_engine.vllm_config
        if method and not config.parallel_config.worker_cls.startswith("skimkv."):
            raise ValueError(f"{method}: vLLM did not load skimkv's plugin, which VLLM_PLUGINS must name")
        self.cache = config.cache_config
        self.seconds, self.most_at_once = 0.0, 0

    @property
    def fits(self) -> int:
        """How many requests have room to their end; vLLM keeps one block for itself."""
        blocks = 1 if self.has_budget else -(-(self.job.prompt + self.job.new) // self.cache.block_size)
        return int(self.cache.num_gpu_blocks - 1) // blocks

    def add_requests(self, prompts: list[list[int]], new: int) -> None:
        """Give the engine these prompts, whose answers have `new` tokens each, and start its clock anew."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for number, ids in enumerate(prompts):
            self.llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        self.seconds, self.most_at_once = 0.0, 0

    def step(self) -> bool:
        """Take one step, and return whether requests are left."""
        start = time.perf_counter()
        answers = self.llm.llm_engine.step()
        self.seconds += time.perf_counter() - start
        self.most_at_once = max(self.most_at_once, len(answers))
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def row(self, equal: str, requests: int) -> dict[str, Any]:
        """Return what was measured since the engine got its requests, whose number is given.

        batch: how many decoded at once at most; at equal batch all of them have room.
        """
        return {
            "method": self.name, "equal": equal, "requests": self.job.requests,
            "batch": self.most_at_once if equal == MEMORY else requests,
            "blocks": self.cache.num_gpu_blocks, "block_size": self.cache.block_size,
            "tokens_per_s": requests * self.job.new / self.seconds, "latency_s": self.seconds,
        }  # fmt: skip


def measure(job: Job, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the rows of all engines: first with all requests, then with as many as have room in each of them.

    Raises ValueError, in one line, if an engine does not start, or if vLLM runs on another device.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type != job.device:
        raise ValueError(f"--device {job.device}: this vLLM runs on {current_platform.device_type}")
    engines = []
    for method in job.methods:
        engines.append(Engine(job, method))
        tick()
    vocabulary = engines[0].llm.llm_engine.vllm_config.model_config.get_vocab_size()
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocabulary, (job.requests, job.prompt), generator=draw).tolist()
    take_turns(engines, prompts, WARM_UP)
    rows = []
    for equal, requests in ((MEMORY, job.requests), (BATCH, min(job.requests, *(engine.fits for engine in engines)))):
        take_turns(engines, prompts[:requests], job.new)
        rows += [engine.row(equal, requests) for engine in engines]
        tick()
    return rows


def take_turns(engines: Iterable[Engine], prompts: list[list[int]], new: int) -> None:
    """Let every engine answer all prompts, one step of each in turn."""
    unfinished = list(engines)
    for engine in unfinished:
        engine.add_requests(prompts, new)
    while unfinished:
        unfinished = [engine for engine in unfinished if engine.step()]


def main(text: str, out: TextIO) -> None:
    """Measure a job and write what comes of it."""

    def write(answer: object) -> None:
        """Write one line."""
        print(json.dumps(answer), file=out, flush=True)

    try:
        write({"rows": measure(Job(**json.loads(text)), lambda: write(None))})
    except ValueError as error:
        write({"error": str(error)})


if __name__ == "__main__":
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to stdout
    main(sys.argv[1], stdout)
