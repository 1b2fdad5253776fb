"""Time what a saved cache spares: python benchmarks/saved_prompt.py [--shape llama-2-7b] [--layers 2] [--length 8192]

A model of random weights reads a prompt of random tokens with every method, and its cache is saved and loaded again, in
turns. What is printed are medians: the seconds to read the prompt, to save the cache, and to load it while the system
still has the file in memory, and how many times as fast as reading loading is. The last line is the same as JSON. The
layers of a model take equally long in all of this, so that a few of them stand for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

import skimkv
from skimkv.bench.models import random_llama
from skimkv.bench.shapes import MODELS

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """The seconds that the work takes, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


@torch.inference_mode()
def measure(shape: str, layers: int, length: int, methods: Sequence[str], rounds: int) -> list[dict[str, object]]:
    """A row of medians, in seconds, for each method. Raises ValueError if a loaded cache goes on with other logits."""
    model: Any = random_llama(shape, layers, "bfloat16", length + 1)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.safetensors"
        for _ in range(rounds):
            for method in methods:
                cache = skimkv.Cache(model, method)
                read, _ = timed(lambda: model(ids, past_key_values=cache, logits_to_keep=1))  # noqa: B023
                save, _ = timed(lambda: cache.save(path))  # noqa: B023
                load, loaded = timed(lambda: skimkv.Cache.load(path, model))
                sizes[method] = path.stat().st_size
                expected, found = (model(ids[:, :1], past_key_values=one).logits for one in (cache, loaded))
                if not torch.equal(expected, found):
                    raise ValueError(f"{method}: the loaded cache goes on with other logits")
                for name, value in (("read_s", read), ("save_s", save), ("load_s", load)):
                    seconds[method][name].append(value)
    rows = list[dict[str, object]]()
    for method, times in seconds.items():
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append(
            {"method": method, "bytes": sizes[method], **medians, "ratio": medians["read_s"] / medians["load_s"]}
        )
    return rows


def main(command_line: Sequence[str] | None = None) -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=MODELS, default="llama-2-7b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--method", action="append", help="may be given several times (default: Dense(), Skim(k=128))")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(command_line)
    methods = arguments.method or ["Dense()", "Skim(k=128)"]
    rows = measure(arguments.shape, arguments.layers, arguments.length, methods, arguments.rounds)
    table = Table("method", "file", "read", "save", "load", "times as fast")
    for row in rows:
        s = [f"{row[name]:.3f} s" for name in ("read_s", "save_s", "load_s")]
        table.add_row(str(row["method"]), f"{row['bytes'] / 1e6:.0f} MB", *s, f"{row['ratio']:.0f}")  # type: ignore[operator]
    Console(stderr=True).print(table)
    print(json.dumps({"shape": arguments.shape, "layers": arguments.layers, "length": arguments.length, "rows": rows}))


if __name__ == "__main__":
    main()
