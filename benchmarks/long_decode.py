"""Decode a long text, and draw how well it is predicted along the way: python benchmarks/long_decode.py TEXT

TEXT is a text file, such as wikitext-test.txt. The bundled model is fed TEXT in blocks that every layer
decodes token by token: by LMInfinite at positions in the cache, by LMInfinite at positions in the text, and
densely until it breaks. A reference reads every window of the text densely and anew, after the tokens before it, at
positions from 0.

It writes a line of JSON for every window of the text to docs/figures/long_decode.jsonl, and draws long_decode.png
beside it. It takes some minutes on one core; when it was interrupted, the same command goes on with the next method.
Where skimkv is not installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

import skimkv
from skimkv.eval.shared_prompt import forward, record_prompt
from skimkv.hf.load import BUILTIN

OUT = Path(__file__).parents[1] / "docs" / "figures" / "long_decode"
TOKENS, DENSE_TOKENS, WINDOW, BLOCK = 100_000, 16_000, 2_000, 250
CACHE, TEXT, DENSE = "LMInfinite(k=1024, positions='cache')", "LMInfinite(k=1024)", "Dense()"
METHODS = {CACHE: TOKENS, TEXT: TOKENS, DENSE: DENSE_TOKENS}
POSITIONS = AutoConfig.from_pretrained(BUILTIN).max_position_embeddings
REFERENCE, CONTEXT = "read anew", 1024  # tokens before a window that the reference reads with it


def resident_bytes() -> int:
    """The memory of this process that is in RAM."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def record(tokenizer: Any, method: str, start: int, ids: Tensor, nats: float, **more: int) -> dict[str, Any]:
    """One line of the file: the mean loss of the tokens ids, which come from position `start` on."""
    characters = len(tokenizer.decode(ids))
    loss = {"nats_per_token": nats / len(ids), "bits_per_character": nats / characters / math.log(2)}
    return {"method": method, "start": start, "tokens": len(ids), **loss, **more}


@torch.inference_mode()
def streamed(model: Any, tokenizer: Any, ids: Tensor, method: str) -> Iterator[dict[str, Any]]:
    """Decode ids (n+1); a record for every window, with the memory at its end."""
    cache = record_prompt(model, ids[None, :1]).cache(skimkv.parse(method))
    nats, start = 0.0, 1
    for first in range(1, len(ids) - 1, BLOCK):
        block, targets = ids[first : first + BLOCK], ids[first + 1 : first + BLOCK + 1]
        logits = forward(model, cache, block[None, : len(targets)], None)[0].log_softmax(-1)
        nats -= float(logits.gather(-1, targets[:, None]).sum())
        end = first + len(targets)
        if end - start >= WINDOW or end == len(ids) - 1:
            memory = {"cache_bytes": cache.nbytes, "resident_bytes": resident_bytes()}
            yield record(tokenizer, method, start, ids[start + 1 : end + 1], nats, **memory)
            nats, start = 0.0, end


@torch.inference_mode()
def read_anew(model: Any, tokenizer: Any, ids: Tensor) -> Iterator[dict[str, Any]]:
    """Read every window of ids (n+1) densely, after the CONTEXT tokens before it, at positions from 0."""
    for start in range(1, len(ids) - 1, WINDOW):
        first = max(0, start - CONTEXT)
        window = ids[first : start + WINDOW + 1]
        logits = model(window[None, :-1], use_cache=False).logits[0, start - first :].log_softmax(-1)
        nats = -float(logits.gather(-1, ids[start + 1 : start + WINDOW + 1, None]).sum())
        yield record(tokenizer, REFERENCE, start, ids[start + 1 : start + WINDOW + 1], nats)


def measure(text: Path, file: Path) -> None:
    """Add to the file what it lacks: all windows of a method, or none of them."""
    model, tokenizer = skimkv.load("builtin")
    ids = tokenizer(text.read_text(encoding="utf-8")[: 8 * TOKENS], add_special_tokens=False).input_ids
    tokens = torch.tensor([tokenizer.bos_token_id, *ids])[: TOKENS + 2]
    if len(tokens) < TOKENS + 2:
        sys.exit(f"{text} has {len(ids)} tokens; {TOKENS + 1} are needed")
    done = {line["method"] for line in lines(file)}
    for method in [REFERENCE, *METHODS]:
        if method in done:
            continue
        windows = read_anew(model, tokenizer, tokens)
        if method in METHODS:
            windows = streamed(model, tokenizer, tokens[: METHODS[method] + 2], method)
        found = []
        for window in windows:
            found.append(window)
            print(json.dumps(window), flush=True)
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(window) + "\n" for window in found)


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of the file; none where it does not exist."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """The loss along the text, its difference to the reference's, and what the cache holds."""
    from skimkv.plotting import STYLES, label_axes, new_figure

    by_method = defaultdict(list)
    for line in records:
        by_method[line["method"]].append(line)
    reference = [window["nats_per_token"] for window in by_method[REFERENCE]]
    figure = new_figure((13, 4))
    loss, difference, memory = figure.subplots(1, 3, width_ratios=[4, 4, 3])
    for (method, windows), (colour, _) in zip(sorted(by_method.items(), key=order), STYLES, strict=False):
        ends = [window["start"] + window["tokens"] for window in windows]
        nats = [window["nats_per_token"] for window in windows]
        if method == REFERENCE:
            name = f"Dense, every window read anew\nafter {CONTEXT:,} tokens"
            loss.plot(ends, nats, label=name, color="0.7", linewidth=4)
            difference.axhline(0, color="0.7", linewidth=4)
            continue
        style = {"color": colour, "linewidth": 1.5, "label": method}
        loss.plot(ends, nats, **style)
        difference.plot(ends, [a - b for a, b in zip(nats, reference, strict=False)], **style)
        memory.plot([0, *ends], [0, *(window["cache_bytes"] / 1e6 for window in windows)], **style)
    for ax in (loss, difference, memory):
        ax.axvline(POSITIONS, color="0.4", linestyle="--", linewidth=1)
        ax.set_xlim(0, 1.02 * TOKENS)
        ax.set_xticks(
            range(0, TOKENS + 1, TOKENS // 4), [f"{n:,}" for n in range(0, TOKENS + 1, TOKENS // 4)], fontsize=8
        )
    loss.set_ylim(bottom=0)
    memory.set_ylim(bottom=0)
    memory.text(
        POSITIONS + TOKENS / 50,
        memory.get_ylim()[1] / 8,
        f"the model's {POSITIONS:,} positions",
        fontsize=8,
        color="0.3",
    )
    label_axes(loss, "Loss along the text, mean of 2,000 tokens", "tokens", "nats per token")
    label_axes(difference, "Difference to the grey line", "tokens", "nats per token")
    label_axes(memory, "Cache", "tokens", "MB")
    loss.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path)


def order(item: tuple[str, Any]) -> int:
    """The reference lies below the methods."""
    return [REFERENCE, *METHODS].index(item[0])


def main() -> None:
    """Measure what is missing, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="the text file to decode")
    text = parser.parse_args().text
    torch.set_num_threads(1)
    file = OUT.with_suffix(".jsonl")
    measure(text, file)
    draw(lines(file), OUT.with_suffix(".png"))


if __name__ == "__main__":
    main()
