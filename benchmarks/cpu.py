"""Keep the CPU kernels' speed-ups, and see whether a change moved them: python benchmarks/cpu.py [--write]

It measures one decode step of one layer at the settings below, as `skimkv bench attention` does, and prints every
speed-up over our dense attention and over PyTorch's best beside what benchmarks/cpu.json has for this machine. --write
puts the new numbers there. Speed-ups are medians of ratios within a round: on a machine that other programs use, they
move less than times do. Calls that were disturbed are left out, and a number of which more than half the calls were is
neither compared nor written. It takes some minutes. Where skimkv is not installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from skimkv.bench import attention as bench
from skimkv.bench.machine import Cpu, Machine
from skimkv.stores.base import Shape

FILE = Path(__file__).with_suffix(".json")
ROUNDS, LENGTHS = 31, (4096, 16384)
LAYERS = {"32 heads": Shape(1, 32, 1, 128), "32 heads on 8": Shape(1, 8, 4, 128)}
SPARQ = "SparQ(r=32, k=128"
METHODS = [
    f"{SPARQ})", f"{SPARQ}, channels='int8')", f"{SPARQ}, channels='int4')", "Skim(k=128)", "Dense(kv='int8')",
    "Dense(kv='int4')", "H2O(k=512)",
]  # fmt: skip
MOVED = 0.1  # a change of a speed-up that is marked


def measured(machine: Machine, rounds: int, lengths: Sequence[int]) -> Iterator[tuple[str, float]]:
    """The name and the speed-up of every number that is kept, for all layers, lengths and methods."""
    for layer, shape in LAYERS.items():
        rows = bench.attention(machine, shape, lengths, METHODS, torch.bfloat16, rounds)["rows"]
        for row in rows:
            if row["backend"] == "torch" or row["kept"] <= rounds // 2:
                continue
            setting = f"{row['method']}, {layer}, {row['length']} tokens"
            if row["method"] != "Dense()":
                yield f"{setting}, over Dense()", row["speedup_dense"]
            yield f"{setting}, over PyTorch's best", row["speedup_torch"]


def report(now: Mapping[str, float], before: Mapping[str, float]) -> Iterator[str]:
    """A line for each number: what it is now and was before, marked where it moved by more than MOVED."""
    for name, value in now.items():
        line = f"{value:7.2f}  {name}"
        if name in before:
            change = value / before[name] - 1
            line += f": was {before[name]:.2f}, {change:+.0%}{' <--' if abs(change) > MOVED else ''}"
        yield line


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, compare and, if asked, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the new numbers into the file")
    parser.add_argument("--file", type=Path, default=FILE, help="the file to compare with and to write to")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="calls of each candidate")
    parser.add_argument("--length", type=int, action="append", help="cached tokens; may be given several times")
    options = parser.parse_args(arguments)
    machine = Cpu()
    kept: dict[str, Any] = json.loads(options.file.read_text("utf-8")) if options.file.exists() else {}
    before = kept.get(machine.name, {})
    now = dict(measured(machine, options.rounds, options.length or LENGTHS))
    print(f"{machine.name}: " + ("compared with what was kept" if before else "nothing was kept for this machine yet"))
    for line in report(now, before):
        print(line)
    for name in before.keys() - now.keys():
        print(f"not measured, or disturbed in more than half of its calls: {name}")
    if options.write:
        kept[machine.name] = {name: round(value, 3) for name, value in {**before, **now}.items()}
        options.file.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
