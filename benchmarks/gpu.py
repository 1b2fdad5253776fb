"""All that needs a GPU, in stages of a few minutes; each writes benchmarks/STAGE-MACHINE.json.

    python benchmarks/gpu.py check      the GPU tests, as a GPU runs them
    python benchmarks/gpu.py tune       a search over launch.LAUNCH; prints what to put there
    python benchmarks/gpu.py targets    the table of targets: attention
    python benchmarks/gpu.py token      the same: a whole token, compiled
    python benchmarks/gpu.py sweep      the paper's grid, and its figure
    python benchmarks/gpu.py sanitize   the kernel tests under compute-sanitizer, where there is one

Without a stage: all of them, in this order. No other program may use the GPU meanwhile. Where skimkv is not installed:
PYTHONPATH=src.
"""

from __future__ import annotations

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
from typing import Any

import torch

from skimkv.bench import attention_gpu as bench_gpu
from skimkv.bench import token_gpu as bench_gpu_token
from skimkv.bench.cuda import Cuda
from skimkv.methods import parse
from skimkv.ops.gpu import launch
from skimkv.stores.base import Shape

HERE = Path(__file__).resolve().parent
TESTS = [
    "test_gpu.py",
    "test_gpu_large.py",
    "test_gpu_graph.py",
    "test_gpu_launch.py",
    "test_compiled.py",
    "test_bench_gpu.py",
]
SPARQ, INT8 = "SparQ(r=32, k=128)", "SparQ(r=32, k=128, channels='int8')"
# what is measured: batch, query heads, KV heads, length, and (method, column of its row, at least)
TARGETS = [
    (64, 32, 32, 4096, [("Dense()", "share_of_peak", 0.9), ("Dense()", "speedup_torch", 1.0)]),
    (64, 32, 32, 4096, [(SPARQ, "speedup_best", 5.2), (INT8, "speedup_best", 7.0)]),
    (16, 32, 32, 16384, [(SPARQ, "speedup_best", 6.5)]),
    (1, 32, 32, 65536, [(SPARQ, "speedup_best", 4.0)]),
    (16, 32, 8, 16384, [(SPARQ, "speedup_best", 5.0)]),
]
WHOLE = 0.85  # of the speed-up that the bytes allow a whole token
# what is searched for each kernel, on a method and shape where it decides the time
SHORT, LONG = (64, 32, 32, 4096), (1, 32, 32, 65536)
COMMON = {"STAGES": (2, 3, 4), "num_warps": (4, 8)}
FILL = {"fill": (2, 4, 8)}
SEARCH: list[tuple[str, str, tuple[int, int, int, int], dict[str, tuple[int, ...]]]] = [
    ("dense", "Dense()", SHORT, {"BN": (32, 64, 128), **COMMON, **FILL}),
    ("fused", SPARQ, SHORT, {"BN": (64, 128, 256), **COMMON, "TILE": (1024, 2048, 4096), "BK": (16, 32, 64)}),
    ("fused", INT8, SHORT, {"BN": (64, 128, 256), "heads": (2, 10**6)}),
    ("scores", SPARQ, LONG, {"BN": (128, 256, 512), **COMMON, **FILL}),
    ("coded", INT8, LONG, {"BN": (128, 256), **COMMON, **FILL}),
    ("choose", SPARQ, LONG, {"TILE": (1024, 2048, 4096, 8192), "BK": (32, 64, 128), "num_warps": (4, 8), **FILL}),
    ("slots", "H2O(k=1024)", (16, 32, 32, 16384), {"BN": (32, 64, 128), "STAGES": (2, 3), "TILE": (512, 1024), **FILL}),
]


def check(machine: Any) -> dict[str, Any]:
    """Passed and failed tests, and the last lines of the report."""
    return _pytest([sys.executable], TESTS)


def _pytest(python: list[str], tests: list[str], *options: str) -> dict[str, Any]:
    args = ["-m", "pytest", "-c", "/dev/null", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow", *options]
    start = time.time()
    done = subprocess.run([*python, *args, *tests], cwd=HERE.parent / "tests", capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(HERE.parent / "src")})  # fmt: skip
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-500:])}
    lines = (done.stdout + done.stderr).splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"ok": done.returncode == 0, **counts, "seconds": time.time() - start, "lines": failed + lines[-30:]}


def descend(start: dict[str, int], choices: dict[str, tuple[int, ...]], cost: Callable[[dict[str, int]], float]) -> Any:
    """(the best found, its cost, all that was tried): one setting at a time, until a pass changes nothing."""
    best, tried = dict(start), {}

    def of(setting: dict[str, int]) -> float:
        key = tuple(setting.items())
        if key not in tried:
            tried[key] = cost(setting)
        return tried[key]

    while True:
        before = dict(best)
        for name, values in choices.items():
            best = min((best, *({**best, name: value} for value in values)), key=of)
        if best == before:
            return best, of(best), [{**dict(key), "ms": ms} for key, ms in tried.items()]


def tune(machine: Any) -> dict[str, Any]:
    """The best setting of every kernel, where each decides the time."""
    rows = []
    for kernel, spec, (batch, heads, kv, n), choices in SEARCH:
        shape, method = Shape(batch, kv, heads // kv, 128), parse(spec)
        times = bench_gpu.sets([method], shape, torch.float16, n, machine.l2, machine.free() - 2 * machine.copy)
        one = bench_gpu.candidates(machine, shape, n, [method], torch.float16, max(1, min(times, 8)))[spec]

        def cost(setting: dict[str, int], kernel: str = kernel, spec: str = spec, one: Any = one) -> float:
            launch.LAUNCH[kernel] = setting
            try:
                return bench_gpu.race(machine, {spec: one}, 20).ms(spec)
            except Exception as error:  # more shared memory than there is, a shape that the compiler refuses
                print(f"  {kernel} {setting}: {error}".splitlines()[0], file=sys.stderr)
                one.back()
                return float("inf")

        was = dict(launch.LAUNCH[kernel])
        launch.LAUNCH[kernel], ms, tried = descend(was, choices, cost)
        first = next(row["ms"] for row in tried if {k: row[k] for k in was} == was)
        print(f"{kernel:8} {spec}, batch {batch}, {n}: {ms:.4f} ms, was {first:.4f}: {launch.LAUNCH[kernel]}")
        rows.append({"kernel": kernel, "method": spec, "batch": batch, "heads": heads, "kv_heads": kv, "length": n,
                     "best": launch.LAUNCH[kernel], "ms": ms, "ms_before": first, "tried": tried})  # fmt: skip
    return {"rows": rows, "launch": launch.LAUNCH}


def judge(rows: list[dict[str, Any]], wanted: list[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """Measured against target, from the rows of a benchmark."""
    found = {row["method"]: row for row in rows}
    table = []
    for name, column, least in wanted if rows else ():
        row = found[name]
        table.append({"method": name, "measure": column, "target": least, "got": row[column],
                      "met": row[column] >= least, "theory": row["speedup_theory"], "ms": row["ms"]})  # fmt: skip
    return table


def targets(machine: Any) -> dict[str, Any]:
    """The table's attention, with all rows of the benchmark behind it."""
    table, behind = [], []
    for (batch, heads, kv, n), group in itertools.groupby(TARGETS, lambda t: t[:4]):
        wanted = [one for *_, some in group for one in some]
        shape = Shape(batch, kv, heads // kv, 128)
        out = bench_gpu.attention(shape, [n], [SPARQ, INT8], torch.float16, 31, machine=machine)
        case = {"batch": batch, "heads": heads, "kv_heads": kv, "length": n, "peak_gb_per_s": out["peak_gb_per_s"]}
        behind += out["rows"]
        table += [{**case, **row} for row in judge(out["rows"], wanted)] or [{**case, "skipped": out["skipped"]}]
    for row in table:
        print(row)
    return {"table": table, "rows": behind}


def token(machine: Any) -> dict[str, Any]:
    """A whole token of llama-2-7b, compiled, against what the bytes allow."""
    out = bench_gpu_token.token("llama-2-7b", None, "bfloat16", [65536], [SPARQ], 25, machine=machine, compile=True)
    row = next(row for row in out["rows"] if row["method"] == SPARQ)
    share = row["speedup_dense"] / row["speedup_allowed"]
    print(f"SparQ {row['speedup_dense']:.2f} times dense; the bytes allow {row['speedup_allowed']:.2f}: {share:.0%}")
    return {**out, "share_of_allowed": share, "target": WHOLE, "met": share >= WHOLE}


def sweep(machine: Any) -> dict[str, Any]:
    """The paper's grid; the figure lies beside the JSON."""
    from skimkv.bench.figures_gpu import sweep as draw

    out = bench_gpu.sweep(Shape(1, 32, 1, 128), torch.float16, 9, machine=machine)
    if out["rows"]:
        draw(out["rows"], HERE / f"sweep-{slug(machine)}.png")
    return out


def sanitize(machine: Any) -> dict[str, Any]:
    """Out-of-bounds accesses of the kernels, by compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"skipped": "there is no compute-sanitizer on this machine"}
    python = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
    return {"tool": tool, **_pytest(python, ["test_gpu.py"], "-k", "not methods")}


STAGES = {stage.__name__: stage for stage in (check, tune, targets, token, sweep, sanitize)}


def slug(machine: Any) -> str:
    return re.sub(r"[^a-z0-9]+", "-", machine.name.split(",")[0].lower()).strip("-")


def versions() -> dict[str, str]:
    """Of all that decides a time."""
    import triton

    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    smi = shutil.which("nvidia-smi")
    asked = [smi or "", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip() if smi else ""
    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda),
            "driver": driver, "python": sys.version.split()[0], "commit": git.stdout.strip()}  # fmt: skip


def main(names: list[str], folder: Path = HERE) -> int:
    """Run the stages; 2: there is no GPU, or no such stage."""
    try:
        if unknown := [name for name in names if name not in STAGES]:
            raise ValueError(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
        machine = Cuda()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in names or STAGES:
        start = time.time()
        found = {"machine": machine.name, "versions": versions(), **STAGES[name](machine)}
        path = folder / f"{name}-{slug(machine)}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {time.time() - start:.0f} s, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
