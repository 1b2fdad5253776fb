"""Count lines of code, and the files that a decode step of SparQ passes on its way from Python to its kernel.

    python benchmarks/count.py

The Python files are those whose functions the third step after a prompt enters. The C++ files are those that run.cpp
and kernels/attention_step.h include, without the kernels of other methods and the instruction sets of isa/.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import FrameType

import torch

import skimkv
from skimkv import ops
from skimkv.testing import SHAPE, Sequences, decode, prompt

ROOT = Path(__file__).parents[1]
PACKAGE, CSRC = Path(skimkv.__file__).parent, ROOT / "csrc"
KERNEL = "sparse_attention.h"  # SparQ's; the other kernels/*_attention.h are those of other methods


def lines(pattern: str) -> int:
    """Return how many lines the tracked files of a pattern have."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return sum(len((ROOT / name).read_bytes().splitlines()) for name in listed.stdout.splitlines())


def python_files() -> set[str]:
    """Return the files of the package whose functions a decode step of SparQ enters."""
    method, x, found = skimkv.parse("SparQ(r=8, k=16)"), Sequences.random(SHAPE, 43), set()
    with ops.backend("cpu"):
        store = prompt(method, x.tokens(0, 40))
        decode(method, store, x.tokens(40, 42))

    def note(frame: FrameType, event: str, _: object) -> None:
        """Note the file of a function of the package that is entered."""
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    last, options = x.tokens(42, 43), {"scale": SHAPE.D**-0.5}
    q, k, v = last.q[..., 0, :], last.k[:, :, 0], last.v[:, :, 0]
    sys.setprofile(note)
    with torch.inference_mode(), ops.backend("cpu"):
        method.decode(store, q, k, v, **options)
    sys.setprofile(None)
    return found


def c_files(*names: str) -> set[str]:
    """Return these files of csrc and what they include, directly or not, without the kernels of other methods."""
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        others = name.endswith("_attention.h") and Path(name).name not in (KERNEL, "row_attention.h")
        if name in found or others or name.startswith("isa/"):
            continue
        found.add(name)
        path = CSRC / "include" / name if name == "skimkv.h" else CSRC / name
        waiting += re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    return found


def main() -> None:
    """Print the numbers, and the names of the files."""
    for pattern in ("src/*.py", "csrc/*", "tests/*.py", "training/*.py"):
        print(f"{lines(pattern):6} lines in {pattern}")
    for what, found in (("Python", python_files()), ("C++", c_files("run.cpp", "kernels/attention_step.h"))):
        print(f"{len(found):6} {what} files from a method to its kernel: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()
