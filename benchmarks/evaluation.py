"""The tables and the figure of docs/evaluation.md, from nothing: python benchmarks/evaluation.py DATA [OUT]

DATA is a folder with LongEval's lines_200.jsonl, tinyshakespeare.txt, wikitext-test.txt and essays/. About 40 minutes
on two cores; interrupted, the same command goes on. It writes OUT/results.jsonl (default: evaluation/), OUT/figure.png,
and the tables to stdout. Where skimkv is not installed: PYTHONPATH=src.
"""

from __future__ import annotations

import sys
from pathlib import Path

from skimkv.cli import app as cli
from skimkv.eval.results import Row, load, summary
from skimkv.methods import parse

TASKS = {"record": 40, "passkey(length=10400)": 40, "lines": 30, "repetition(skip=0.9)": 20, "needle": 15, "bpc": 16}
CODED = "Dense(kv='int4')"
SHARES = {1 / 2: "1/2", 1 / 4: "1/4", 1 / 8: "1/8"}
NEAR = 1.35  # a row belongs to a share if it is within this factor of it


def run(data: str, out: Path) -> None:
    for task, limit in TASKS.items():
        arguments = ["--task", task, "--limit", str(limit), "--data", data, "--out", str(out / "results.jsonl")]
        how = ["--sweep", "matched", "--mode", "both", "--dtype", "float32", "--method", CODED]
        if cli.main(["eval", *how, *arguments]):
            sys.exit(1)
    cli.main(["plot", str(out / "results.jsonl"), "--out", str(out / "figure.png")])


def number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 10 else f"{x:.2f}"


def table(rows: list[Row], share: float, modes: tuple[str, ...]) -> str:
    """Methods by tasks, each method's row nearest to that share of dense's bytes."""
    rows = [row for row in rows if row.mode in modes]
    columns = list(dict.fromkeys((row.task, row.mode) for row in rows))
    found: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        name = type(parse(row.method)).__name__ if row.method not in ("Dense()", CODED) else row.method
        held, own = found.setdefault(name, {}), 1.0 if row.method == "Dense()" else row.share or 0
        if name != "Dense()" and not 1 / NEAR < own / share < NEAR:
            continue
        best = held.get((row.task, row.mode))
        if best is None or abs(own - share) < abs((best.share or 1) - share):
            held[row.task, row.mode] = row
    names = [
        task.split("(")[0] + ("" if len(modes) == 2 or mode == "forced" else f", {mode}") for task, mode in columns
    ]
    lines = [f"| method | bytes | {' | '.join(names)} |", "|---" * (2 + len(columns)) + "|"]
    for name, held in found.items():
        if not held:
            continue
        shares = sorted(round(100 * (row.share or 1)) for row in held.values())
        low, high = shares[0], shares[-1]
        cells = [f"{number(held[at].mean)} ± {number(held[at].stderr or 0)}" if at in held else "—" for at in columns]
        share_ = f"{low}%" if low == high else f"{low}–{high}%"
        lines.append(f"| `{name.removesuffix('()')}` | {share_} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
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
