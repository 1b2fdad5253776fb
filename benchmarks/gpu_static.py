"""What the GPU kernels can reach, counted in their machine code: no GPU is needed.

    python benchmarks/gpu_static.py [--json FILE] [--steps N]

Every kernel is compiled at the shapes of the table of targets in benchmarks/gpu.py, for an H200. For each launch a line
of a table says how many registers, bytes of stack and bytes of shared memory a program takes, how many programs fit on
a multiprocessor and how many waves of them the launch is, and how many barriers, instructions and bytes it needs for
256 tokens and KV head. From these follow two ceilings for the speed-up over dense attention: one by the bytes that
memory must deliver, one by the instructions that the multiprocessors must issue. The last line is JSON.

A kernel that loads K and V into shared memory needs two buffers there, or it waits for every block that it asks for.

Instructions are counted for one warp of 32 threads. A loop in the machine code is counted as often as the loop of the
source that its lines come from takes a turn; TURNS says how often that is.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default today, which it announces to change

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import GROUPED, HEAD_DIM, INT4, INT8, LONG, MEDIUM, SHORT, SPARQ, TARGETS, Case

from skimkv.methods import Dense, SparQ, parse
from skimkv.ops import Token
from skimkv.ops.gpu import launch, occupancy, tables
from skimkv.ops.gpu.run import GpuBackend
from skimkv.stores.full import Full

CAPABILITY = 90  # H100, H200
LIMITS = occupancy.Limits(multiprocessors=132, registers=65536, shared=228 << 10, warps=64, programs=32)  # of an H200
CLOCK = 1.98e9  # its cycles per second at full clock
BANDWIDTH = 4.3e12  # bytes per second that an H200's memory delivers
BISECTIONS = 11  # rounds of a search for a threshold among 512 to 2,048 logits or weights
GROUP = tables.PAGE_TOKENS
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPE = torch.float16
KERNEL_FILES = "skimkv/ops/gpu/kernels/"

# What a kernel is called in the table.
NAMES = {
    "scores_kernel": "sparq_scores", "channel_scores_kernel": "sparq_scores",
    "choose_channels_kernel": "sparq_channels", "choose_kernel": "sparq_choose", "attend_kernel": "sparq_attend",
    "dense_kernel": "dense", "append_kernel": "append", "slots_kernel": "slots",
}  # fmt: skip


class Launch(NamedTuple):
    """A kernel that was compiled instead of launched."""

    name: str
    case: Case
    arguments: SimpleNamespace  # every parameter of the kernel by its name, and `programs` that share a KV head
    warps: int
    grid: tuple[int, ...]
    compiled: Any


class Instruction(NamedTuple):
    """One instruction of the machine code, and the lines of the source that it comes from, the innermost first."""

    address: int
    text: str
    lines: tuple[tuple[str, int], ...]  # file name, line


class Loop(NamedTuple):
    """A loop of the machine code: the addresses of its first and last instruction."""

    first: int
    last: int


def pages(launch_: Launch) -> float:
    """Return the pages that an average program of a split kernel walks over."""
    return -(-launch_.case.length // GROUP) / launch_.arguments.programs


def tiles(launch_: Launch) -> float:
    """Return the tiles of positions that an average program of the choice walks over."""
    return -(-launch_.case.length // launch_.arguments.TILE) / launch_.arguments.programs


def candidates(launch_: Launch) -> int:
    """Return how many groups of positions the tiles of a KV head leave."""
    a = launch_.arguments
    return int(-(-launch_.case.length // a.TILE) * min(a.candidates.k, a.TILE // a.GROUP))


def attended(launch_: Launch) -> int:
    """Return how many positions are attended to after the choice."""
    return int(launch_.arguments.candidates.k + launch_.arguments.candidates.local + 1)


def slots(launch_: Launch) -> float:
    """Return the slots that an average program walks over, in blocks."""
    a = launch_.arguments
    return float(a.slots.C / a.programs / a.BLOCK)


# How often the loops of the kernels take a turn: by the function and the text of the loop's head.
OVER_POSITIONS: dict[str, Callable[[Launch], float]] = {
    "channel_scores_kernel: for page in range(first, closed)": pages,
    "scores_kernel: for i in tl.range(start, stop, BLOCK, num_stages=STAGES)":
        lambda at: pages(at) * GROUP / at.arguments.BLOCK,
    "scores_kernel: for i in tl.range(start, tl.minimum(stop, closed), BLOCK, num_stages=STAGES)":
        lambda at: pages(at) * GROUP / at.arguments.BLOCK,
    "dense_kernel: for i in tl.range(start, stop, BLOCK, num_stages=STAGES)":
        lambda at: pages(at) * GROUP / at.arguments.BLOCK,
    "slots_kernel: for i in tl.range(start, stop, BLOCK, num_stages=STAGES)": slots,
    "choose_kernel: for i in range(program, tiles, candidates.programs)": tiles,
}  # fmt: skip
TURNS: dict[str, Callable[[Launch], float]] = {
    **OVER_POSITIONS,
    "top_channels: for start in range(0, D, CHANNEL_BLOCK)": lambda at: at.arguments.D / 16,
    # at the lengths of the targets no group of tokens is open
    "scores_kernel: for i in range(tl.maximum(closed, start), stop, BLOCK)": lambda at: 0,
    "ranks: for head in range(0, query.G)": lambda at: at.arguments.query.G,
    "threshold_of_list: for i in range(0, n, TILE)": lambda at: -(-candidates(at) // at.arguments.LIST),
    "threshold_of_tile: while low < high": lambda at: BISECTIONS,
    "threshold_of_list: while low < high": lambda at: BISECTIONS,
    "count_reaching: for i in range(0, n, TILE)": lambda at: -(-candidates(at) // at.arguments.LIST),
    "best_of_long_list: for i in range(0, n, TILE)": lambda at: -(-candidates(at) // at.arguments.LIST),
    "best_of_tile: for j in range(tl.minimum(want, TILE), tl.minimum(most, TILE), TILE // GROUP)": lambda at: 0,
    "attend_as_group: for i in tl.range(0, count, BLOCK, num_stages=STAGES)":
        lambda at: -(-attended(at) // at.arguments.BLOCK),
    "attend_alone: for i in tl.range(0, count, BLOCK, num_stages=STAGES)":
        lambda at: -(-attended(at) // at.arguments.BLOCK),
    "chosen_mass: for head in range(0, query.G)": lambda at: at.arguments.query.G,
    "chosen_mass: for i in range(0, count, MASS_BLOCK)": lambda at: -(-attended(at) // launch.MASS_BLOCK),
    "dense_kernel: for head in range(0, G)": lambda at: at.arguments.query.G,
    "slots_kernel: for head in range(0, G)": lambda at: at.arguments.query.G,
    "add_scores: for i in range(0, filled, TILE)": lambda at: -(-at.arguments.slots.C // at.arguments.TILE),
    "find_victim: for i in range(0, slots.C, TILE)": lambda at: -(-at.arguments.slots.C // at.arguments.TILE),
    # a group is closed by one token in GROUP
    "append_kernel: for channel in range(0, R, CHANNEL_BLOCK)": lambda at: at.arguments.pages.R / 16 / GROUP,
    "append_kernel: for first in range(0, R, APPENDED_CHANNELS)": lambda at: at.arguments.pages.R / 128,
}  # fmt: skip
# Functions that only the program which arrives last at a row and KV head runs.
BY_THE_LAST = {"best_of_groups", "best_of_list", "merge_parts", "find_victim", "add_scores"}
OF_SEVERAL_TILES = {"best_of_list"}


class AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        """Return the number of the device."""
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        """Return the stream of a launch that does not happen."""
        return 0


def can_compile() -> str | None:
    """Return why kernels cannot be compiled and taken apart here, or None if they can."""
    if launch.missing is not None:
        return launch.missing
    absent = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not (TOOLS / name).is_file()]
    return f"this Triton comes without {', '.join(absent)}" if absent else None


def tool(name: str, *arguments: str) -> str:
    """Return what one of the tools in Triton's wheel prints."""
    done = subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@functools.cache
def loops_of_source(file: str) -> list[tuple[int, int, str]]:
    """Return the loops of a source file: first and last line, and what TURNS calls the loop; outer ones first."""
    text = (Path(launch.__file__).parent / "kernels" / file).read_text()
    found = []
    for function in ast.parse(text).body:
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            head = ""
            if isinstance(node, ast.For) and "static_range" not in ast.unparse(node.iter):
                head = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            elif isinstance(node, ast.While):
                head = f"while {ast.unparse(node.test)}"
            if head:
                found.append((node.lineno, node.end_lineno or node.lineno, f"{function.name}: {head}"))
    return sorted(found)


@functools.cache
def functions_of_source(file: str) -> list[tuple[int, int, str]]:
    """Return the functions of a source file: first and last line, and the name."""
    text = (Path(launch.__file__).parent / "kernels" / file).read_text()
    return [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    ]


def used_by(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread and the bytes of stack of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = dict(re.findall(r"(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", file.name)))
    return {"registers": int(used["REG"]), "stack": int(used["STACK"])}


def disassemble(cubin: bytes) -> tuple[list[Instruction], list[Loop]]:
    """Return the instructions of a kernel, and its loops, the outer ones first."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = tool("nvdisasm", "-gi", file.name)
    instructions: list[Instruction] = []
    labels, pending, jumps = dict[str, int](), list[str](), list[tuple[int, str]]()
    lines, complete = list[tuple[str, int]](), True
    for row in text[text.index("\n.text.") :].splitlines():
        if match := re.match(r'\s*//## File "(.*?)", line (\d+)', row):
            lines = [*(() if complete else lines), (match[1], int(match[2]))]
            complete = False
        elif match := re.match(r"(\.L_x_\d+):", row):
            pending.append(match[1])
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", row):
            address, code, complete = int(match[1], 16), match[2], True
            labels.update(dict.fromkeys(pending, address))
            pending = []
            if code != "NOP":
                instructions.append(Instruction(address, code, tuple(lines)))
            if jump := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", code):
                jumps.append((address, jump[1]))
    back = [Loop(labels[name], address) for address, name in jumps if 0 <= labels.get(name, -1) < address]
    merged = [Loop(first, max(loop.last for loop in back if loop.first == first)) for first in {b.first for b in back}]
    ordered = sorted(merged, key=lambda loop: loop.first - loop.last)
    return instructions, ordered


def source_frames(instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Iterate over the lines of our kernels that the instruction comes from, the outermost first."""
    for file, line in reversed(instruction.lines):
        if KERNEL_FILES in file:
            yield Path(file).name, line


def source_loops(instruction: Instruction) -> list[str]:
    """Return the loops of the source that the instruction's lines lie in, the outermost first."""
    return [
        name
        for file, line in source_frames(instruction)
        for first, last, name in loops_of_source(file)
        if first <= line <= last
    ]


def share_of_runs(instruction: Instruction, programs: int, one_tile: bool) -> float:
    """Return which share of the programs of a KV head runs an instruction.

    one_tile: the choice has all positions in one tile.
    """
    functions = {
        name
        for file, line in source_frames(instruction)
        for first, last, name in functions_of_source(file)
        if first <= line <= last
    }
    if functions & OF_SEVERAL_TILES and one_tile:
        return 0
    return 1 / programs if functions & BY_THE_LAST else 1


def footprint_of(compiled: Any) -> occupancy.Footprint:
    """Return what a program of a kernel that is not loaded takes of a multiprocessor."""
    used = used_by(compiled.asm["cubin"])
    return occupancy.Footprint(used["registers"], compiled.metadata.shared, compiled.metadata.num_warps)


def buffers_of(compiled: Any) -> int:
    """Return for how many blocks a kernel has buffers in shared memory; 0 where it loads into registers only."""
    allocated = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x\w+, ", compiled.asm["ttgir"])
    return min(map(int, allocated), default=0)


class Count(NamedTuple):
    """Instructions of one warp of an average program, and barriers; those in the loop over positions also apart."""

    instructions: float
    instructions_over_positions: float
    barriers_over_positions: float


def count(launch_: Launch, instructions: list[Instruction], loops: list[Loop]) -> Count:
    """Count what one warp issues. Raises ValueError at a loop whose turns are not known."""
    turns, heads = dict[Loop, float](), dict[Loop, str]()
    for loop in loops:
        inside = [i for i in instructions if loop.first <= i.address <= loop.last]
        own = [i for i in inside if not any(
            other != loop and loop.first <= other.first and other.last <= loop.last
            and other.first <= i.address <= other.last for other in loops
        )]  # fmt: skip
        outer = {heads[other] for other in heads if other.first <= loop.first and loop.last <= other.last}
        chains = Counter(
            next((name for name in reversed(source_loops(i)) if name not in outer), "") for i in own or inside
        )
        chains.pop("", None)
        if not chains:
            raise ValueError(f"{launch_.name}: the loop at {loop.first:#x} comes from no loop of the source")
        heads[loop] = chains.most_common(1)[0][0]
        if heads[loop] not in TURNS:
            raise ValueError(f"{launch_.name}: TURNS does not say how often this loop turns: {heads[loop]}")
        turns[loop] = TURNS[heads[loop]](launch_)
    total = over_positions = barriers = 0.0
    one_tile = launch_.case.length <= getattr(launch_.arguments, "TILE", 0)
    for instruction in instructions:
        around = [loop for loop in loops if loop.first <= instruction.address <= loop.last]
        weight = math.prod(turns[loop] for loop in around) * share_of_runs(
            instruction, launch_.arguments.programs, one_tile
        )
        total += weight
        if any(heads[loop] in OVER_POSITIONS for loop in around):
            over_positions += weight
            barriers += weight * ("BAR.SYNC" in instruction.text)
    return Count(total, over_positions, barriers)


def bytes_per_256(launch_: Launch) -> int:
    """Return the bytes that memory delivers for 256 tokens (or slots) and KV head."""
    a, size = launch_.arguments, DTYPE.itemsize
    if launch_.name == "sparq_scores":
        bits = {launch.LAYOUTS["int8"]: 8, launch.LAYOUTS["int4"]: 4}.get(a.LAYOUT, 8 * size)
        return int(a.scores.r * (GROUP * bits // 8 + (8 if bits < 8 * size else 0)))
    if launch_.name == "sparq_choose":
        return int(a.query.G * GROUP * torch.float32.itemsize)
    return 0 if "append" in launch_.name or launch_.name == "sparq_channels" else 2 * GROUP * HEAD_DIM * size


def describe(launch_: Launch, channels: str) -> dict[str, Any]:
    """Return the row of one launch."""
    cubin = launch_.compiled.asm["cubin"]
    (instructions, loops), used = disassemble(cubin), used_by(cubin)
    counted, (batch, heads, kv_heads, length) = count(launch_, instructions, loops), launch_.case
    shared, programs = launch_.compiled.metadata.shared, launch_.grid[0] * (launch_.grid[1:] or (1,))[0]
    groups = batch * kv_heads * length / GROUP
    if launch_.name == "slots":
        groups = batch * kv_heads * launch_.arguments.slots.C / GROUP
    blocks = occupancy.programs_at_once(occupancy.Footprint(used["registers"], shared, launch_.warps), LIMITS)
    issued = counted.instructions * launch_.warps * programs
    return {
        "kernel": launch_.name, "channels": channels, "group": heads // kv_heads, "batch": batch,
        "kv_heads": kv_heads, "length": length, **used, "shared": shared, "buffers": buffers_of(launch_.compiled),
        "warps": launch_.warps, "programs": programs, "blocks_per_multiprocessor": blocks,
        "waves": programs / blocks / LIMITS.multiprocessors,
        "barriers_per_256": counted.barriers_over_positions * programs / groups,
        "instructions_per_256": counted.instructions_over_positions * launch_.warps * programs / groups,
        "bytes_per_256": bytes_per_256(launch_),
        "instructions_per_kv_head": issued / batch / kv_heads,
        "issue_us_at_2": 1e6 * issued / (2 * CLOCK * LIMITS.multiprocessors),
    }  # fmt: skip


class Compiler:
    """Takes the place of a GPU: a launch of a kernel compiles it, and is kept in `launches`."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.case = SHORT

    def __enter__(self) -> Compiler:
        compiler, self.run = self, JITFunction.run
        self.runs, self.limits_of, self.footprint_of = launch.runs, occupancy.limits_of, occupancy.footprint_of

        def instead_of_a_launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
            compiled = compiler.run(kernel, *arguments, grid=grid, warmup=True, **options)
            if warmup:
                return compiled
            names = dict(zip([p.name for p in kernel.params], arguments, strict=False))
            programs = grid[1] if len(grid) > 1 else 1
            facts = SimpleNamespace(**names, **options, programs=programs)
            name = NAMES.get(kernel.fn.__name__, kernel.fn.__name__.removesuffix("_kernel"))
            compiler.launches.append(
                Launch(name, compiler.case, facts, compiled.metadata.num_warps, tuple(grid), compiled)
            )
            return compiled

        driver.set_active(AbsentGpu())
        JITFunction.run = instead_of_a_launch
        launch.runs = lambda device: True
        occupancy.limits_of, occupancy.footprint_of = (lambda device: LIMITS), footprint_of  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        JITFunction.run = self.run
        launch.runs, occupancy.limits_of, occupancy.footprint_of = self.runs, self.limits_of, self.footprint_of

    def step(self, case: Case, spec: str) -> list[Launch]:
        """Return the launches of one step of a method at a shape of the table. No memory is allocated."""
        self.case, method = case, parse(spec)
        before = len(self.launches)
        B, H, G, D = case.shape
        q, k, v = (torch.empty(B, H, *rest, D, dtype=DTYPE, device="meta") for rest in ((G,), (), ()))
        store = method.store(case.shape, DTYPE, "meta")
        if isinstance(store, Full):
            store.lengths = [case.length - 1] * B
            store.reserve()
        kernel = method.kernel(store)
        assert kernel is not None, spec
        GpuBackend().run(kernel, store, q, Token(k, v), {"scale": D**-0.5})
        return self.launches[before:]


STEPS = [
    *((case, spec) for case in (SHORT, MEDIUM, LONG, GROUPED) for spec in ("Dense()", SPARQ, INT8, INT4)),
    (MEDIUM, "H2O(k=1024)"),
]


def ceilings(case: Case, spec: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how much faster than dense attention at the memory's full speed a step can at most be, and by what."""
    dense, method = (parse(text).traffic(case.length, case.shape, DTYPE).bytes for text in ("Dense()", spec))
    whole = 1e6 * dense / BANDWIDTH
    issue = sum(row["issue_us_at_2"] for row in rows)
    wanted = next((t.least for t in TARGETS if (t.case, t.method) == (case, spec)), None)
    return {
        "method": spec, **case._asdict(), "wanted": wanted, "by_bytes": dense / method,
        "by_issue_at_2": whole / issue, "by_issue_at_4": 2 * whole / issue,
    }  # fmt: skip


def print_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print rows as a table in Markdown. columns: the keys that are shown, and their headings."""
    print("| " + " | ".join(columns.values()) + " |\n|" + "---|" * len(columns))
    for row in rows:
        cells = [f"{row[key]:.4g}" if isinstance(row[key], float) else str(row[key]) for key in columns]
        print("| " + " | ".join(cells) + " |")
    print()


COLUMNS = {
    "kernel": "kernel", "channels": "channels", "group": "G", "batch": "batch", "length": "length",
    "registers": "registers", "stack": "stack", "shared": "shared", "buffers": "buffers", "warps": "warps",
    "programs": "programs",
    "blocks_per_multiprocessor": "blocks", "waves": "waves", "barriers_per_256": "barriers / 256",
    "instructions_per_256": "instructions / 256", "bytes_per_256": "bytes / 256",
    "instructions_per_kv_head": "instructions / KV head", "issue_us_at_2": "issue, µs",
}  # fmt: skip
CEILINGS = {
    "method": "method", "batch": "batch", "heads": "heads", "kv_heads": "KV heads", "length": "length",
    "wanted": "wanted", "by_bytes": "by bytes", "by_issue_at_2": "by issue, 2 a cycle",
    "by_issue_at_4": "by issue, 4 a cycle",
}  # fmt: skip


def collect(steps: list[tuple[Case, str]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all launches of these steps, and the ceilings of the steps."""
    rows, limits = list[dict[str, Any]](), list[dict[str, Any]]()
    with Compiler() as compiler:
        for case, spec in steps:
            method = parse(spec)
            channels = method.channels if isinstance(method, SparQ) else "none"
            own = [describe(launch_, channels) for launch_ in compiler.step(case, spec)]
            rows += own
            if isinstance(method, (Dense, SparQ)):
                limits.append(ceilings(case, spec, own))
    return {"kernels": rows, "ceilings": limits}


def main(arguments: list[str]) -> int:
    """Print the tables and the line of JSON. The exit status is 2 where kernels cannot be compiled."""
    parser = argparse.ArgumentParser(description="Count what the GPU kernels need, in their machine code.")
    parser.add_argument(
        "--steps", type=int, default=len(STEPS), metavar="N", help="Take only the first N of the steps."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the JSON to this file.")
    options = parser.parse_args(arguments)
    if why := can_compile():
        print(f"error: {why}", file=sys.stderr)
        return 2
    result = collect(STEPS[: options.steps])
    print_table(result["kernels"], COLUMNS)
    print_table(result["ceilings"], CEILINGS)
    text = json.dumps(result)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
