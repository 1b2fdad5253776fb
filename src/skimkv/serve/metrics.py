"""What the server did and holds, in the text format of Prometheus."""

from __future__ import annotations

from typing import Any

from .generation import Generator
from .worker import Worker

MEDIA_TYPE = "text/plain; version=0.0.4"


def text(generator: Generator, worker: Worker) -> str:
    """Write every number with what it means."""
    totals, kept, folder = generator.totals, generator.conversations, generator.folder
    numbers: list[tuple[str, str, str, Any]] = [
        ("requests_total", "counter", "Prompts that have been answered.", totals.requests),
        ("prompt_tokens_total", "counter", "Tokens of their prompts.", totals.prompt_tokens),
        ("reused_tokens_total", "counter", "Tokens of prompts that a kept cache stood for.", totals.reused_tokens),
        ("loaded_tokens_total", "counter", "Those of them that came from a file.", totals.loaded_tokens),
        ("new_tokens_total", "counter", "Tokens of their answers.", totals.new_tokens),
        ("tokens_per_second", "gauge", "New tokens a second, over the last ten seconds.", worker.meter.per_second()),
        ("requests_running", "gauge", "Requests whose answers are being made.", worker.running),
        ("requests_waiting", "gauge", "Requests that wait for their turn.", worker.waiting),
        ("requests_parallel", "gauge", "How many answers are made together at most.", worker.parallel),
        ("running_cache_bytes", "gauge", "Bytes of the caches of running requests.", worker.cache_bytes),
        ("conversations", "gauge", "Conversations whose caches are kept.", len(kept)),
        ("conversation_cache_bytes", "gauge", "Bytes of the kept caches.", kept.nbytes),
        ("stored_conversations", "gauge", "Conversations whose caches are in files.", folder.count if folder else 0),
        ("stored_bytes", "gauge", "Bytes of the files of caches.", folder.nbytes if folder else 0),
        ("stored_waiting", "gauge", "Conversations that wait to be written.", folder.waiting if folder else 0),
    ]
    lines = [
        f"# HELP skimkv_{name} {meaning}\n# TYPE skimkv_{name} {kind}\nskimkv_{name} {number}\n"
        for name, kind, meaning, number in numbers
    ]
    return "".join(lines)
