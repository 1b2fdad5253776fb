"""Everything that needs a GPU, in steps of a few minutes.

    python benchmarks/gpu.py --out FOLDER [--steps 1,2,5] [--dry-run]

    1 check     compare every method of the table of targets with its reference, at the targets' shapes (2 minutes)
    2 targets   measure attention against the table of targets (3)
    3 tests     run the GPU tests, in several processes (5)
    4 tune      search for the fastest launch settings, one kernel a process; FOLDER/tuned.json keeps them (8)
    5 tuned     measure the table of targets with these settings (3)
    6 rest      a whole compiled token, a small sweep, and the kernel tests under compute-sanitizer (10)

Every step is a process with a time limit, and appends lines of JSON to FOLDER/results.jsonl as it goes: a hang, a crash
or the end of the time loses one step. Steps 4 and 6 have several processes, one for each kernel and for each subject,
which share the time of the step. No other program may use the GPU meanwhile. A dry run takes Triton's interpreter on
the CPU and tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

from skimkv import ops
from skimkv.bench import attention as bench_attention
from skimkv.bench import figures
from skimkv.bench import models as bench_models
from skimkv.bench import token as bench_token
from skimkv.bench.machine import Cpu, Cuda, Machine
from skimkv.methods import parse
from skimkv.ops.gpu import device
from skimkv.ops.gpu.launch import SETTINGS
from skimkv.stores.base import Shape

HERE = Path(__file__).resolve().parent
KERNEL_TESTS = "ops/test_gpu.py"
TESTS = [
    KERNEL_TESTS, "ops/test_gpu_large.py", "ops/test_gpu_graph.py", "ops/test_gpu_launch.py", "hf/test_compile.py",
    "bench/test_attention.py", "bench/test_token.py",
]  # fmt: skip
HEAD_DIM, DRY_HEAD_DIM = 128, 16
MOST_ERROR = 0.01  # of a step by the kernels in float16, relative to the reference's
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
WIDE = Case(16, 64, 8, 16384)  # eight query heads of a KV head: step 1 on matrix units
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


LOADS: dict[str, tuple[int, ...]] = {"stages": (3, 5, 7), "warps": (4, 8)}
PROGRAMS: dict[str, tuple[int, ...]] = {"programs": (2, 4, 8)}
SEARCHES = [
    Search("dense", "Dense()", SHORT, {"block": (32, 64, 128), **LOADS, **PROGRAMS}),
    Search("channel_scores", SPARQ, SHORT, {"programs": (8, 12, 16, 20, 24, 32)}),
    Search("scores", SPARQ, GROUPED, {"block": (64, 128, 256), **LOADS, **PROGRAMS}),
    Search("quantised_scores", INT8, WIDE, {"block": (128, 256), **LOADS, **PROGRAMS}),
    Search("choose", SPARQ, MEDIUM, {"tile": (2048, 4096, 8192), "group": (4, 8), "warps": (1, 2, 4, 8), **PROGRAMS}),
    Search("choose_few", SPARQ, LONG, {"tile": (4096, 8192, 16384), "group": (4, 8), "warps": (4, 8, 16)}),
    Search("attend_alone", SPARQ, SHORT, {"block": (16, 32, 64), "warps": (1, 2, 4), "stages": (1, 3)}),
    Search("attend_few", SPARQ, LONG, {"block": (64, 128), "warps": (8, 16), "stages": (1, 3)}),
    Search("attend", SPARQ, GROUPED, {"block": (16, 32, 64), "warps": (2, 4), "stages": (3, 5, 7)}),
    Search("slots", "H2O(k=1024)", MEDIUM,
           {"block": (32, 64, 128), "stages": (2, 3), "tile": (512, 1024), **PROGRAMS}),
]  # fmt: skip


def run_tests(python: list[str], tests: list[str], *options: str) -> dict[str, Any]:
    """Run these test files without those marked slow, and return the counts of the report and its last lines."""
    arguments = ["-m", "pytest", "-c", "/dev/null", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow"]
    start = time.time()
    paths = os.pathsep.join([str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*python, *arguments, *options, *tests], cwd=HERE.parent / "tests", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
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
        """Return the cost of a setting, which is found once."""
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


class Run(NamedTuple):
    """A step that runs: the machine, where it appends its lines, its name, and whether it is dry."""

    machine: Machine
    folder: Path
    step: str
    dry: bool = False

    def record(self, **row: Any) -> None:
        """Append a line to the results."""
        append_line(self.folder, {"step": self.step, **row})

    def targets(self) -> list[Target]:
        """Return the targets; in a dry run those of the first shape."""
        return [target for target in TARGETS if target.case == SHORT or not self.dry]

    def cases(self, case: Case) -> Case:
        """Return the case; in a dry run a tiny one."""
        return Case(1, 2 * case.heads // case.kv_heads, 2, 300) if self.dry else case

    def spec(self, spec: str) -> str:
        """Return the method; in a dry run one that fits heads of DRY_HEAD_DIM."""
        return spec.replace("r=32, k=128", "r=4, k=20").replace("k=1024", "k=24") if self.dry else spec

    def shape(self, case: Case) -> Shape:
        """Return the shape of a case's cache."""
        shape = self.cases(case).shape
        return shape._replace(D=DRY_HEAD_DIM) if self.dry else shape

    def candidate(self, spec: str, case: Case, most_sets: int) -> bench_attention.Candidate:
        """Return a method's step on `most_sets` sets of caches of a case, or fewer. Raises ValueError if none fits."""
        method, shape, length = parse(self.spec(spec)), self.shape(case), self.cases(case).length
        sets = bench_attention.sets_in_turn(self.machine, [method], shape, torch.float16, length)
        if not sets:
            raise ValueError(f"no room for batch {case.batch} of {length} tokens")
        return bench_attention.candidates(
            self.machine, shape, length, [method], torch.float16, min(sets, most_sets)
        )[repr(method)]  # fmt: skip


def error_of(candidate: bench_attention.Candidate) -> float:
    """Return the relative error of a step by the kernels. It is taken on copies of the store, as a step changes it."""
    step = candidate[0]
    assert step.store is not None and isinstance(step.run, functools.partial)
    results = []
    for name in ("ref", "gpu"):
        with ops.backend(name):
            results.append(step.run.func(step.store.fork(), *step.run.args[1:], **step.run.keywords).float())
    want, got = results
    return float((got - want).norm() / want.norm())


def check(run: Run) -> None:
    """Compare the methods of the targets with their references at the targets' shapes. Exits with 1 if one is wrong."""
    wrong = []
    for case, spec in dict.fromkeys((target.case, target.method) for target in run.targets()):
        error = error_of(run.candidate(spec, case, 1))
        run.record(**case._asdict(), method=spec, relative_error=error, ok=error < MOST_ERROR)
        if not error < MOST_ERROR:
            wrong.append(f"{spec} at batch {case.batch} of {case.length} tokens")
        print(f"{spec}, batch {case.batch}, {case.length}: relative error {error:.1e}")
    if wrong:
        sys.exit(f"error: more than {MOST_ERROR} off the reference: {', '.join(wrong)}")


def load_tuned(folder: Path) -> dict[str, dict[str, int]]:
    """Set the launch settings that were found before, and return them by kernel."""
    path = folder / "tuned.json"
    tuned: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
    for kernel, values in tuned.items():
        setattr(SETTINGS, kernel, dataclasses.replace(getattr(SETTINGS, kernel), **values))
    return tuned


def tune(run: Run, search: Search) -> None:
    """Find the best settings of one kernel, and keep the best so far in tuned.json beside those of other kernels."""
    tuned = load_tuned(run.folder)

    def keep(setting: dict[str, int]) -> None:
        """Put the settings into the file at once: a process that is stopped leaves the old file or the new one."""
        unfinished = run.folder / "tuned.json.unfinished"
        unfinished.write_text(json.dumps({**tuned, search.kernel: setting}) + "\n")
        unfinished.replace(run.folder / "tuned.json")

    run.record(**search_settings(run, search, keep))


def search_settings(run: Run, search: Search, keep: Callable[[dict[str, int]], None]) -> dict[str, Any]:
    """Find and set the best settings of one kernel. A setting with another result than the reference's is not timed.

    keep: is given every setting that is better than all before it.
    """
    kernel, spec, case, choices = search
    fastest = float("inf")
    before, candidate = getattr(SETTINGS, kernel), run.candidate(spec, case, 8)

    def cost(setting: dict[str, int]) -> float:
        """Return the milliseconds of a step with these settings."""
        nonlocal fastest
        try:
            setattr(SETTINGS, kernel, dataclasses.replace(before, **setting))
            if not (relative := error_of(candidate)) < MOST_ERROR:
                raise ValueError(f"the relative error to the reference is {relative:.2g}")
            timings, _ = bench_attention.race(run.machine, {spec: candidate}, 1 if run.dry else 20)
        except Exception as error:  # a wrong result, more shared memory than there is, a shape the compiler refuses
            print(f"  {kernel} {setting}: {error}".splitlines()[0], file=sys.stderr)
            candidate.undo()
            return float("inf")
        if timings.ms(spec) < fastest:
            fastest = timings.ms(spec)
            keep(setting)
        return timings.ms(spec)

    start = dataclasses.asdict(before)
    tried_choices = {name: values[:2] for name, values in choices.items()} if run.dry else choices
    best, ms, tried = descend(start, tried_choices, cost)
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


def targets(run: Run) -> None:
    """Measure attention against the targets; the rows of the benchmark stand beside the table."""
    for case, group in itertools.groupby(run.targets(), lambda target: target.case):
        wanted = [target._replace(method=run.spec(target.method)) for target in group]
        shape, specs = run.shape(case), [run.spec(SPARQ), run.spec(INT8)]
        rounds, length = 1 if run.dry else 31, run.cases(case).length
        result = bench_attention.attention(run.machine, shape, [length], specs, torch.float16, rounds)
        judged = judge(result["rows"], wanted) or [{"skipped": result["skipped"]}]
        for row in judged:
            print(row)
        setting = {**case._asdict(), "peak_gb_per_s": result["peak_gb_per_s"]}
        run.record(**setting, table=judged, rows=result["rows"])


def tuned(run: Run) -> None:
    """Measure the targets with the settings that were found."""
    run.record(launch=load_tuned(run.folder))
    targets(run)


def tests(run: Run) -> None:
    """Run the GPU tests on several processes, where pytest can. Exits with 1 if one fails."""
    several = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    record_tests(run, [sys.executable], TESTS, *several, *(["--collect-only"] if run.dry else []))


def record_tests(run: Run, python: list[str], tests: list[str], *options: str, **row: str) -> None:
    """Run tests and append what they reported. Exits with 1 if one fails."""
    report = run_tests(python, tests, *options)
    run.record(**row, **report)
    if not report["ok"]:
        sys.exit(f"error: {', '.join(tests)}: {report['lines'][-1] if report['lines'] else 'pytest failed'}")


def sweep(run: Run) -> None:
    """Measure a small sweep of lengths and batches, with a figure."""
    load_tuned(run.folder)
    shape, rounds, grid = Shape(1, 32, 1, HEAD_DIM), 9, {"batch": (1, 16), "r": (32,), "k": (128,)}
    if run.dry:
        shape, rounds = Shape(1, 2, 1, DRY_HEAD_DIM), 1
        grid = {"batch": (1,), "length": (300,), "r": (4,), "k": (20,)}
    result = bench_attention.sweep(run.machine, shape, torch.float16, rounds, **grid)
    run.record(sweep=result)
    if result["rows"]:
        figures.sweep(result["rows"], run.folder / "sweep.png")


def memory(run: Run) -> None:
    """Run the kernel tests under compute-sanitizer. Exits with 1 if it finds accesses out of bounds."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        run.record(skipped="there is no compute-sanitizer on this machine")
        return
    python = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
    record_tests(run, python, [KERNEL_TESTS], "-k", "not methods", tool=tool)


def token(run: Run) -> None:
    """Measure a whole compiled token of llama-2-7b against what the bytes allow; in a dry run, one of a tiny model."""
    load_tuned(run.folder)
    if run.dry:
        shape, layers, weights, length, rounds = "smollm-135m", 1, "float32", 300, 1
    else:
        shape, layers, weights, length, rounds = "llama-2-7b", None, "bfloat16", 65536, 25
    subject = bench_models.random_subject(shape, layers, weights, length + 1024, run.machine.device)
    result = bench_token.time_tokens(run.machine, subject, [length], [SPARQ], rounds, compile=not run.dry)
    row = next(row for row in result["rows"] if row["method"] == SPARQ)
    share = row["speedup_dense"] / row["speedup_allowed"]
    print(f"SparQ {row['speedup_dense']:.2f} times dense; the bytes allow {row['speedup_allowed']:.2f}: {share:.0%}")
    run.record(**result, share_of_allowed=share, target=TOKEN_SHARE, met=share >= TOKEN_SHARE)


class Step(NamedTuple):
    """A step: its parts, each a process, and the seconds that they may take together."""

    name: str
    parts: list[Callable[[Run], None]]
    limit: float


STEPS = {
    1: Step("check", [check], 120),
    2: Step("targets", [targets], 180),
    3: Step("tests", [tests], 300),
    4: Step("tune", [functools.partial(tune, search=search) for search in SEARCHES], 480),
    5: Step("tuned", [tuned], 180),
    6: Step("rest", [token, sweep, memory], 600),
}


class Dry(Cpu):
    """The CPU with a GPU's kernels in Triton's interpreter, whose clock means nothing."""

    name = "dry run"
    dense_dtypes = ()

    def __init__(self) -> None:
        self.threads = 0

    def bandwidth_calls(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """Return a small copy."""
        source, target = torch.ones(2, 1 << 12)
        return {"copy": (lambda: target.copy_(source), 2 * source.nbytes)}

    def between_calls(self, refresh: Callable[[], Any] = lambda: None) -> None:
        """Refresh the query."""
        refresh()

    def undo(self, store: Any) -> Callable[[], Any]:
        """Return a call that takes the store back, and what the kernels know of it."""
        return device.rewind(store)


def append_line(folder: Path, row: dict[str, Any]) -> None:
    """Append one line of JSON to the results."""
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of everything that decides a time, as far as they are known here."""
    import triton

    tools = {
        "commit": ["git", "describe", "--always", "--dirty"],
        "driver": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
    }
    printed = {
        name: subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
        for name, command in tools.items()
        if shutil.which(command[0])
    }
    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda),
            "python": sys.version.split()[0], **printed}  # fmt: skip


def run_limited(command: list[str], limit: float | None) -> str:
    """Run a process and all that it starts, for at most `limit` seconds. Returns how it ended, "ok" being well."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {limit:.0f} s"
    return "ok" if status == 0 else f"exit status {status}"


def run_in_process(name: str, part: int, folder: Path, dry: bool) -> None:
    """Do one part of a step in this process. In a dry run the kernels are asked for by name."""
    machine = Dry() if dry else Cuda()
    run = Run(machine, folder, name, dry)
    run.record(machine=machine.name, versions=versions())
    step = next(step for step in STEPS.values() if step.name == name)
    with ops.backend("gpu") if dry else contextlib.nullcontext():
        step.parts[part](run)


def run_parts(step: Step, folder: Path, dry: bool) -> bool:
    """Run the parts of a step, each in a process of its own, and return whether all ended well.

    A part may take its share of the time that is left, so one that hangs leaves the others theirs.
    """
    end, well = time.monotonic() + step.limit, True
    for part in range(len(step.parts)):
        start = time.monotonic()
        limit = None if dry else max((end - start) / (len(step.parts) - part), 1)
        command = [sys.executable, __file__, "--out", str(folder), "--inside", step.name, str(part)]
        how = run_limited(command + ["--dry-run"] * dry, limit)
        row = {"step": step.name, "part": part, "ended": how, "seconds": time.monotonic() - start}
        append_line(folder, row)
        print(row, flush=True)
        well &= how == "ok"
    return well


def main(arguments: list[str]) -> int:
    """Run the steps, each in a process of its own. The exit status is 1 if one failed, 2 where none can run."""
    parser = argparse.ArgumentParser(description="Check, measure and tune the GPU kernels.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="The folder of the results.")
    parser.add_argument("--steps", default="1,2,3,4,5,6", metavar="1,2,...", help="The steps to take, in this order.")
    parser.add_argument("--dry-run", action="store_true", help="Interpret the kernels on the CPU, on tiny shapes.")
    parser.add_argument("--inside", nargs=2, metavar=("STEP", "PART"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        run_in_process(options.inside[0], int(options.inside[1]), options.out, options.dry_run)
        return 0
    try:
        numbers = [int(number) if number.isdigit() else number for number in options.steps.split(",")]
        if unknown := [number for number in numbers if number not in STEPS]:
            raise ValueError(f"--steps: there is no step {unknown[0]!r}; there are {', '.join(map(str, STEPS))}")
        if not options.dry_run:
            Cuda()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    ended_well = [run_parts(STEPS[number], options.out, options.dry_run) for number in numbers]
    return 0 if all(ended_well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
