"""Make the tables and the figure of docs/evaluation.md from nothing: python benchmarks/evaluation.py DATA [OUT]

DATA is a folder with LongEval's lines_200.jsonl, tinyshakespeare.txt, wikitext-test.txt and essays/. This takes about
40 minutes on two cores; when it was interrupted, the same command goes on. It writes OUT/results.jsonl and
OUT/figure.png (OUT is `evaluation` by default) and prints the tables: means with their 95% intervals. Where skimkv is
not installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import sys
from pathlib import Path

from skimkv.cli import main as skimkv
from skimkv.eval.panels import label
from skimkv.eval.results import Row, load, summary

TASKS = {"record": 40, "passkey(length=10400)": 40, "lines": 30, "repetition(skip=0.9)": 20, "needle": 15, "bpc": 16}
DENSE, QUANTISED = "Dense()", "Dense(kv='int4')"
SHARES = {1 / 2: "1/2", 1 / 4: "1/4", 1 / 8: "1/8"}
NEAR = 1.35  # a row belongs to a share of dense's bytes if it is within this factor of it


def run(data: str, out: Path) -> None:
    """Evaluate every task into OUT/results.jsonl and draw OUT/figure.png; exit with status 1 if a command fails."""
    results = str(out / "results.jsonl")
    for task, limit in TASKS.items():
        sweep = ["--sweep", "matched", "--mode", "both", "--dtype", "float32", "--method", QUANTISED]
        if skimkv(["eval", *sweep, "--task", task, "--limit", str(limit), "--data", data, "--out", results]):
            sys.exit(1)
    if skimkv(["plot", results, "--out", str(out / "figure.png")]):
        sys.exit(1)


def number(x: float) -> str:
    """Return the number with as many digits as a table needs."""
    return f"{x:.0f}" if abs(x) >= 10 else f"{x:.2f}"


def score(row: Row) -> str:
    """Return the mean and its 95% interval, where there is one."""
    interval = "" if row.low is None or row.high is None else f" ({number(row.low)} … {number(row.high)})"
    return number(row.mean) + interval


def method_name(spec: str) -> str:
    """Return the name of a method with what it was given besides its budget, as in SparQ(mean_value=True)."""
    name, _, changed = label(spec).partition(", ")
    return f"{name}({changed})" if changed else name


def table(rows: list[Row], share: float, modes: tuple[str, ...]) -> str:
    """Return a table of methods by tasks in Markdown; a method's cell is its row nearest to that share of the bytes."""
    rows = [row for row in rows if row.mode in modes]
    columns = list(dict.fromkeys((row.task, row.mode) for row in rows))
    nearest: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        name = row.method if row.method in (DENSE, QUANTISED) else method_name(row.method)
        cells = nearest.setdefault(name, {})
        row_share = 1.0 if row.method == DENSE else row.share or 0
        if name != DENSE and not 1 / NEAR < row_share / share < NEAR:
            continue
        best = cells.get((row.task, row.mode))
        if best is None or abs(row_share - share) < abs((best.share or 1) - share):
            cells[row.task, row.mode] = row
    headings = [
        task.split("(")[0] + ("" if len(modes) == 2 or mode == "forced" else f", {mode}") for task, mode in columns
    ]
    lines = [f"| method | bytes | {' | '.join(headings)} |", "|---" * (2 + len(columns)) + "|"]
    for name, cells in nearest.items():
        if cells:
            shares = [round(100 * (row.share or 1)) for row in cells.values()]
            low, high = min(shares), max(shares)
            scores = [score(cells[at]) if at in cells else "—" for at in columns]
            percent = f"{low}%" if low == high else f"{low}–{high}%"
            lines.append(f"| `{name.removesuffix('()')}` | {percent} | {' | '.join(scores)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the evaluation and print its tables."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    out = Path(sys.argv[2] if len(sys.argv) == 3 else "evaluation")
    out.mkdir(exist_ok=True)
    run(sys.argv[1], out)
    rows = summary(load(out / "results.jsonl"))
    for share, name in SHARES.items():
        print(f"\n### At {name} of dense's bytes\n\n{table(rows, share, ('blind', 'aware', 'forced'))}")
    print(f"\nQuestion-blind, at 1/8:\n\n{table(rows, 1 / 8, ('blind', 'forced'))}")


if __name__ == "__main__":
    main()
