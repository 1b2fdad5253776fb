"""Everything that needs a GPU, in stages of a few minutes; each writes benchmarks/STAGE-MACHINE.json.

    python benchmarks/gpu.py check      run the GPU tests
    python benchmarks/gpu.py tune       search for the fastest launch settings of every kernel, and print them
    python benchmarks/gpu.py targets    measure attention against the table of targets
    python benchmarks/gpu.py token      measure a whole compiled token against what the bytes allow
    python benchmarks/gpu.py sweep      measure SparQ on the grid of its paper, and draw the figure
    python benchmarks/gpu.py sanitize   run the kernel tests under compute-sanitizer, where there is one

Without a stage, all of them run in this order. No other program may use the GPU meanwhile. Where skimkv is not
installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skimkv.bench import attention as bench_attention
from skimkv.bench import figures
from skimkv.bench import token as bench_token
from skimkv.bench.machine import Cuda, Machine
from skimkv.methods import parse
from skimkv.ops.gpu.launch import SETTINGS
from skimkv.stores.base import Shape

HERE = Path(__file__).resolve().parent
KERNEL_TESTS = "ops/test_gpu.py"
TESTS = [
    KERNEL_TESTS, "ops/test_gpu_large.py", "ops/test_gpu_graph.py", "ops/test_gpu_launch.py", "hf/test_compile.py",
    "bench/test_attention.py", "bench/test_token.py",
]  # fmt: skip
HEAD_DIM = 128
SPARQ, INT8, INT4 = (f"SparQ(r=32, k=128{channels})" for channels in ("", ", channels='int8'", ", channels='int4'"))


class Case(NamedTuple):
    """A decode step of one layer: sequences, query heads, KV heads and cached tokens."""

    batch: int
    heads: int
    kv_heads: int
    length: int

    @property
    def shape(self) -> Shape:
        """The shape of the layer's cache."""
        return Shape(self.batch, self.kv_heads, self.heads // self.kv_heads, HEAD_DIM)


class Target(NamedTuple):
    """What a column of a method's row must at least be."""

    case: Case
    method: str
    measure: str
    least: float


SHORT, LONG = Case(64, 32, 32, 4096), Case(1, 32, 32, 65536)
MEDIUM, GROUPED = Case(16, 32, 32, 16384), Case(16, 32, 8, 16384)
TARGETS = [
    Target(SHORT, "Dense()", "share_of_peak", 0.9),
    Target(SHORT, "Dense()", "speedup_torch", 1.0),
    Target(SHORT, SPARQ, "speedup_best", 5.2),
    Target(SHORT, INT8, "speedup_best", 7.0),
    Target(MEDIUM, SPARQ, "speedup_best", 6.5),
    Target(LONG, SPARQ, "speedup_best", 4.0),
    Target(GROUPED, SPARQ, "speedup_best", 5.0),
]
TOKEN_SHARE = 0.85  # the target for a whole token: this much of the speed-up that its bytes allow


class Search(NamedTuple):
    """Settings of a kernel to try, on a method and a case where this kernel decides the time."""

    kernel: str
    method: str
    case: Case
    choices: dict[str, tuple[int, ...]]


LOADS: dict[str, tuple[int, ...]] = {"stages": (2, 3, 4), "warps": (4, 8)}
PROGRAMS: dict[str, tuple[int, ...]] = {"programs": (2, 4, 8)}
SEARCHES = [
    Search("dense", "Dense()", SHORT, {"block": (32, 64, 128), **LOADS, **PROGRAMS}),
    Search("channel_scores", SPARQ, SHORT, {"programs": (8, 12, 16, 20, 24, 32)}),
    Search("scores", SPARQ, LONG, {"block": (128, 256, 512), **LOADS, **PROGRAMS}),
    Search("quantised_scores", INT8, LONG, {"block": (128, 256), **LOADS, **PROGRAMS}),
    Search("choose", SPARQ, LONG,
           {"tile": (1024, 2048, 4096, 8192), "block": (32, 64, 128), "warps": (4, 8), **PROGRAMS}),
    Search("slots", "H2O(k=1024)", MEDIUM,
           {"block": (32, 64, 128), "stages": (2, 3), "tile": (512, 1024), **PROGRAMS}),
]  # fmt: skip


def check(machine: Machine) -> dict[str, Any]:
    """Return how many GPU tests passed and failed, and the last lines of the report."""
    return run_tests([sys.executable], TESTS)


def run_tests(python: list[str], tests: list[str], *options: str) -> dict[str, Any]:
    """Run these test files without those marked slow, and return the counts of the report and its last lines."""
    arguments = ["-m", "pytest", "-c", "/dev/null", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow"]
    start = time.time()
    done = subprocess.run(
        [*python, *arguments, *options, *tests], cwd=HERE.parent / "tests", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parent / "src")},
    )  # fmt: skip
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-500:])}
    lines = (done.stdout + done.stderr).splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"ok": done.returncode == 0, **counts, "seconds": time.time() - start, "lines": failed + lines[-30:]}


def descend(
    start: dict[str, int], choices: dict[str, tuple[int, ...]], cost: Callable[[dict[str, int]], float]
) -> tuple[dict[str, int], float, list[dict[str, float]]]:
    """Change one setting at a time until none gets better. Returns the best, its cost, and all that was tried."""
    best = dict(start)
    costs: dict[tuple[tuple[str, int], ...], float] = {}

    def known_cost(setting: dict[str, int]) -> float:
        key = tuple(setting.items())
        if key not in costs:
            costs[key] = cost(setting)
        return costs[key]

    while True:
        before = dict(best)
        for name, values in choices.items():
            best = min((best, *({**best, name: value} for value in values)), key=known_cost)
        if best == before:
            return best, known_cost(best), [{**dict(key), "ms": ms} for key, ms in costs.items()]


def tune(machine: Machine) -> dict[str, Any]:
    """Find the best launch settings of every kernel; they stay set for the stages that follow."""
    rows = [search_settings(machine, search) for search in SEARCHES]
    return {"rows": rows, "launch": dataclasses.asdict(SETTINGS)}


def search_settings(machine: Machine, search: Search) -> dict[str, Any]:
    """Find and set the best settings of one kernel."""
    kernel, spec, case, choices = search
    method, before = parse(spec), getattr(SETTINGS, kernel)
    sets = bench_attention.sets_in_turn(machine, [method], case.shape, torch.float16, case.length)
    candidate = bench_attention.candidates(
        machine, case.shape, case.length, [method], torch.float16, max(1, min(sets, 8))
    )[spec]  # fmt: skip

    def cost(setting: dict[str, int]) -> float:
        setattr(SETTINGS, kernel, dataclasses.replace(before, **setting))
        try:
            timings, _ = bench_attention.race(machine, {spec: candidate}, 20)
        except Exception as error:  # more shared memory than there is, a shape that the compiler refuses
            print(f"  {kernel} {setting}: {error}".splitlines()[0], file=sys.stderr)
            candidate.undo()
            return float("inf")
        return timings.ms(spec)

    start = dataclasses.asdict(before)
    best, ms, tried = descend(start, choices, cost)
    setattr(SETTINGS, kernel, dataclasses.replace(before, **best))
    ms_before = next(row["ms"] for row in tried if {name: row[name] for name in start} == start)
    print(f"{kernel:16} {spec}, batch {case.batch}, {case.length}: {ms:.4f} ms, was {ms_before:.4f}: {best}")
    return {"kernel": kernel, "method": spec, **case._asdict(), "best": best, "ms": ms, "ms_before": ms_before,
            "tried": tried}  # fmt: skip


def judge(rows: list[dict[str, Any]], wanted: list[Target]) -> list[dict[str, Any]]:
    """Compare rows of the benchmark with their targets."""
    by_method = {row["method"]: row for row in rows}
    table = []
    for _, name, measure, least in wanted if rows else ():
        row = by_method[name]
        table.append({"method": name, "measure": measure, "target": least, "got": row[measure],
                      "met": row[measure] >= least, "theory": row["speedup_theory"], "ms": row["ms"]})  # fmt: skip
    return table


def targets(machine: Machine) -> dict[str, Any]:
    """Measure attention against the targets; all rows of the benchmark stand beside the table."""
    table, rows = [], []
    for case, group in itertools.groupby(TARGETS, lambda target: target.case):
        result = bench_attention.attention(machine, case.shape, [case.length], [SPARQ, INT8], torch.float16, 31)
        setting = {**case._asdict(), "peak_gb_per_s": result["peak_gb_per_s"]}
        rows += result["rows"]
        judged = judge(result["rows"], list(group)) or [{"skipped": result["skipped"]}]
        table += [{**setting, **row} for row in judged]
    for row in table:
        print(row)
    return {"table": table, "rows": rows}


def token(machine: Machine) -> dict[str, Any]:
    """Measure a whole compiled token of llama-2-7b against what the bytes allow."""
    result = bench_token.token(machine, "llama-2-7b", None, "bfloat16", [65536], [SPARQ], 25, compile=True)
    row = next(row for row in result["rows"] if row["method"] == SPARQ)
    share = row["speedup_dense"] / row["speedup_allowed"]
    print(f"SparQ {row['speedup_dense']:.2f} times dense; the bytes allow {row['speedup_allowed']:.2f}: {share:.0%}")
    return {**result, "share_of_allowed": share, "target": TOKEN_SHARE, "met": share >= TOKEN_SHARE}


def sweep(machine: Machine) -> dict[str, Any]:
    """Measure the paper's grid; the figure lies beside the JSON."""
    result = bench_attention.sweep(machine, Shape(1, 32, 1, HEAD_DIM), torch.float16, 9)
    if result["rows"]:
        figures.sweep(result["rows"], HERE / f"sweep-{slug(machine)}.png")
    return result


def sanitize(machine: Machine) -> dict[str, Any]:
    """Find accesses of the kernels that are out of bounds, with compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"skipped": "there is no compute-sanitizer on this machine"}
    python = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
    return {"tool": tool, **run_tests(python, [KERNEL_TESTS], "-k", "not methods")}


STAGES: dict[str, Callable[[Machine], dict[str, Any]]] = {
    stage.__name__: stage for stage in (check, tune, targets, token, sweep, sanitize)
}


def slug(machine: Machine) -> str:
    """Return the machine's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", machine.name.split(",")[0].lower()).strip("-")


def versions() -> dict[str, str]:
    """Return the versions of everything that decides a time."""
    import triton

    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    smi = shutil.which("nvidia-smi")
    query = [smi or "", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if smi else ""
    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda),
            "driver": driver, "python": sys.version.split()[0], "commit": git.stdout.strip()}  # fmt: skip


def main(names: list[str], folder: Path = HERE) -> int:
    """Run the stages and write their files. The exit status is 2 if there is no GPU, or no stage of that name."""
    try:
        if unknown := [name for name in names if name not in STAGES]:
            raise ValueError(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
        machine = Cuda()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in names or STAGES:
        start = time.time()
        result = {"machine": machine.name, "versions": versions(), **STAGES[name](machine)}
        path = folder / f"{name}-{slug(machine)}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {time.time() - start:.0f} s, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
