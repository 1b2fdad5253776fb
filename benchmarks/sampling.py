"""Time the sampling of generate(), as Transformers draws and in quick_sampling(): python benchmarks/sampling.py MODEL

MODEL is a folder, a GGUF file or an id, as `skimkv.load` takes it. The prompt has random tokens, and texts do not end
before their length. For each kind of sampling, the time of a token is that of a text of --new tokens less that of a
text of four, divided by the difference of their lengths. All kinds take turns, --rounds times, and a table has the
medians in milliseconds. Where skimkv is not installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import torch

import skimkv

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "top_k=50": {"do_sample": True, "top_k": 50},
    "top_k=64, top_p=0.95": {"do_sample": True, "top_k": 64, "top_p": 0.95},
    "temperature=0.7, top_p=0.9": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
}
FEW = 4  # tokens of the shorter text


def seconds(model: Any, ids: torch.Tensor, new: int, settings: dict[str, Any], quick: bool) -> float:
    """How long generate() takes to make `new` tokens."""
    with skimkv.quick_sampling() if quick else contextlib.nullcontext():
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, pad_token_id=0, **settings)
        return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("model")
    parser.add_argument("--method", default="Dense()")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=36, help=f"tokens of the longer text; the shorter one has {FEW}")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.new <= FEW:
        parser.error(f"--new {arguments.new} must be more than {FEW}")
    model, _ = skimkv.load(arguments.model)
    vocabulary: int = model.config.get_text_config().vocab_size
    model.generation_config.eos_token_id = None
    torch.manual_seed(0)
    ids = torch.randint(10, vocabulary, (1, arguments.prompt))
    times: dict[tuple[str, bool], list[float]] = {(kind, quick): [] for kind in KINDS for quick in (False, True)}
    with skimkv.attach(model, arguments.method):
        seconds(model, ids, FEW, KINDS["greedy"], False)  # prepares the layers
        for _ in range(arguments.rounds):
            for (kind, quick), found in times.items():
                short, long = (seconds(model, ids, new, KINDS[kind], quick) for new in (FEW, arguments.new))
                found.append(1e3 * (long - short) / (arguments.new - FEW))
    print(f"milliseconds a token, {vocabulary:,} tokens in the vocabulary, {torch.get_num_threads()} threads\n")
    print("| | Transformers' draws | quick_sampling() |\n|---|---|---|")
    for kind in KINDS:
        slow, fast = (statistics.median(times[kind, quick]) for quick in (False, True))
        print(f"| {kind} | {slow:.1f} | {fast:.1f} |")


if __name__ == "__main__":
    main()
