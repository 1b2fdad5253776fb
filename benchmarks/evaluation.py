"""Make the tables and the figure of the evaluation: every method at 1/8 to 1/64 of dense attention's bytes.

python benchmarks/evaluation.py DATA [--out FOLDER] [--length N] [--limit N]

DATA is a folder with essays/*.txt, squad.json, hotpotqa.json and a text for the divergence (wikitext-test.txt), see
docs/tasks.md; --without names tasks of RULER whose data are not there. Settings are solved once, on the first document
of the text; then all methods answer RULER's tasks blind and aware, their divergence from dense attention is measured
over the text, and the time of their steps in turns. At the default sizes this is made to take at most three hours on
two cores. When it was interrupted, the same command goes on. FOLDER then holds results.jsonl, settings.json,
times.json, tables.md, readme.md (one table of at most ten rows) and figure.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import skimkv
from skimkv.bench.machine import machine_for
from skimkv.cli import main as run_command
from skimkv.eval import budgets, figures
from skimkv.eval.averages import suite_averages
from skimkv.eval.panels import ScorePanel, label
from skimkv.eval.plan import PlannedExample, Setup, plan_job, supported_methods
from skimkv.eval.results import Row, load, summary
from skimkv.eval.shared_prompt import record_prompt
from skimkv.eval.tasks import Suite, parse, parse_suite
from skimkv.eval.timing import alternating_ms
from skimkv.methods import Dense, SnapKV, SparQ

SHARES = {1 / 8: "1/8", 1 / 16: "1/16", 1 / 32: "1/32", 1 / 64: "1/64"}
README_SHARE = 1 / 16
README_ROWS = 10
REFERENCE = 64  # forced tokens of a document of the divergence
ROUNDS = 15  # in which the methods take turns to be timed
DENSE = "Dense()"

Settings = dict[str, float]  # spec -> the share of dense's bytes that it was solved for


class Results(NamedTuple):
    """What was measured of each method, by its spec. ruler: the averages, by mode. ms: a token's time, of each."""

    settings: Settings
    ruler: dict[str, dict[str, Row]]
    divergence: dict[str, Row]
    ms: dict[str, float]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--out", type=Path, default=Path("evaluation"), metavar="FOLDER")
    parser.add_argument("--text", type=Path, help="the text of the divergence (default: DATA/wikitext-test.txt)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt and its answer")
    parser.add_argument("--limit", type=int, default=10, help="examples of each task, and twice as many documents")
    parser.add_argument("--without", nargs="*", default=[], help="tasks of RULER to leave out")
    parser.add_argument("--model", default="builtin")
    return parser.parse_args(arguments)


def suite_of(arguments: argparse.Namespace) -> Suite:
    """RULER at this length, without the tasks that are left out."""
    left_out = f", leave_out={tuple(arguments.without)!r}" if arguments.without else ""
    suite = parse_suite(f"ruler(length={arguments.length}{left_out})")
    assert suite is not None
    return suite


def divergence_task(arguments: argparse.Namespace) -> str:
    """The spec of the task that measures divergences, as long as RULER's prompts."""
    return f"kl(context={arguments.length - REFERENCE}, reference={REFERENCE})"


def first_document(setup: Setup, arguments: argparse.Namespace) -> PlannedExample:
    """The first document of the text, in tokens."""
    job = plan_job(setup, parse(divergence_task(arguments)), "forced", [], arguments.text, 1)
    return job.groups[0][0]


@torch.inference_mode()
def solve_settings(setup: Setup, document: PlannedExample) -> Settings:
    """Every method at every share of dense's bytes, on this document; SparQ and SnapKV also in the form that fits here.

    SparQ with its mean value, which is off where queries share KV heads, and SnapKV with a wider pool, where a token is
    a character or two.
    """
    prompt = record_prompt(setup.model, torch.tensor([document.prompt]), new_tokens=budgets.MEASURED_STEPS)
    dense, mean_share = prompt.cache(Dense()).stores, budgets.measured_share(prompt, [document.question])
    matched, left_out = budgets.matched_methods(dense, mean_share, list(SHARES))
    settings: Settings = {}
    for method, share in matched:
        forms = [method]
        if isinstance(method, SparQ):
            forms.append(dataclasses.replace(method, mean_value=True))
        if isinstance(method, SnapKV):
            forms.append(dataclasses.replace(method, pool=13))
        supported, misfits = supported_methods(setup, forms)
        left_out += misfits
        settings |= {repr(form): share for form in supported if repr(form) not in settings}
    print("\n".join(f"Left out: {note}." for note in left_out))
    return settings


def measure_times(setup: Setup, document: PlannedExample, settings: Settings) -> dict[str, float]:
    """The median time of a token, in milliseconds, of every setting behind this document; they take turns."""
    prompt = record_prompt(setup.model, torch.tensor([document.prompt]), new_tokens=ROUNDS)
    with torch.inference_mode():
        caches = [prompt.cache(skimkv.parse(spec)) for spec in settings]
    return dict(zip(settings, alternating_ms(setup.model, caches, document.question.feed[0], ROUNDS), strict=True))


def run(arguments: argparse.Namespace) -> Results:
    """Measure what is not measured yet; exit with status 1 if a command fails."""
    out: Path = arguments.out
    model, tokenizer = skimkv.load(arguments.model, dtype="float32")
    setup = Setup(model, tokenizer, arguments.model)
    document = first_document(setup, arguments)
    settings = _kept(out / "settings.json", lambda: solve_settings(setup, document))
    results, methods = str(out / "results.jsonl"), [part for spec in settings for part in ("--method", spec)]
    options = ["--model", arguments.model, "--dtype", "float32", "--out", results, *methods]
    suite, divergence = suite_of(arguments), divergence_task(arguments)
    ruler = ["--task", suite.spec, "--mode", "both", "--data", str(arguments.data), "--limit", str(arguments.limit)]
    for task in (["--task", divergence, "--data", str(arguments.text), "--limit", str(2 * arguments.limit)], ruler):
        if run_command(["eval", *task, *options]):
            sys.exit(1)
    times = _kept(out / "times.json", lambda: measure_times(setup, document, settings))
    rows = summary(load(out / "results.jsonl"))
    by_mode: dict[str, dict[str, Row]] = {}
    for row in suite_averages(rows, [suite]):
        by_mode.setdefault(row.mode, {})[row.method] = row
    return Results(settings, by_mode, {row.method: row for row in rows if row.task == divergence}, times)


def _kept(path: Path, make: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What the file holds; where there is none, make it and write it."""
    if not path.exists():
        path.write_text(json.dumps(make(), indent=1))
    kept: dict[str, float] = json.loads(path.read_text())
    return kept


def number(x: float) -> str:
    """The number with as many digits as a table needs."""
    return f"{x:.0f}" if abs(x) >= 10 else f"{x:.2f}" if abs(x) >= 0.095 else f"{x:.2g}"


def score(row: Row | None) -> str:
    """The mean and its 95% interval, where there is one."""
    if row is None:
        return "—"
    interval = "" if row.low is None or row.high is None else f" ({number(row.low)} … {number(row.high)})"
    return number(row.mean) + interval


def share_read(results: Results, spec: str) -> float:
    """The share of dense's bytes that the method read, on average over what it answered."""
    shares = [rows[spec].share or 1.0 for rows in (*results.ruler.values(), results.divergence) if spec in rows]
    return sum(shares) / len(shares)


def table(results: Results, specs: Sequence[str]) -> str:
    """A table in Markdown: a row for each of these methods."""
    lines = ["| method | bytes | RULER, blind | RULER, aware | KL in nats | 99th percentile | ms |", "|---" * 7 + "|"]
    for spec in specs:
        divergence = results.divergence.get(spec)
        tail = "—" if divergence is None or divergence.tail is None else number(divergence.tail.kl_p99)
        cells = [score(results.ruler.get(mode, {}).get(spec)) for mode in ("blind", "aware")]
        moved = f"{100 * share_read(results, spec):.1f}%"
        lines.append(
            f"| `{spec}` | {moved} | {' | '.join(cells)} | {score(divergence)} | {tail} | {results.ms[spec]:.2f} |"
        )
    return "\n".join(lines)


def at(results: Results, share: float) -> list[str]:
    """Dense, and the methods that were solved for this share, by their score without the question, the best first."""
    blind = results.ruler.get("blind", {})
    own = [spec for spec, solved in results.settings.items() if solved == share]
    return [DENSE, *sorted(own, key=lambda spec: -blind[spec].mean if spec in blind else 0.0)]


def panels(results: Results) -> list[ScorePanel]:
    """RULER blind and aware, and the divergence, each against the share of dense's bytes."""

    def points(rows: dict[str, Row]) -> list[tuple[str, float, float, float | None, float | None]]:
        """A point of each method that has a row."""
        return [(label(spec), row.share or 1.0, row.mean, row.low, row.high) for spec, row in rows.items()]

    scores: list[ScorePanel] = [
        (f"RULER, {mode}\nshare right", points(rows), 1.0, False) for mode, rows in results.ruler.items()
    ]
    divergence = "divergence from dense attention\nKL in nats a token"
    return [*scores, (divergence, points(results.divergence), math.inf, True)]


def main(command_line: Sequence[str] | None = None) -> None:
    """Run the evaluation, and write its tables and its figure."""
    arguments = parse_arguments(command_line)
    arguments.text = arguments.text or arguments.data / "wikitext-test.txt"
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    results = run(arguments)
    sections = [
        f"## At {name} of dense's bytes\n\n{table(results, at(results, share))}" for share, name in SHARES.items()
    ]
    machine = f"Times are of a whole token, in turns, on {machine_for(torch.device('cpu')).name}."
    (out / "tables.md").write_text("\n\n".join([*sections, machine, ""]))
    (out / "readme.md").write_text(table(results, at(results, README_SHARE)[:README_ROWS]) + "\n")
    figures.scores(panels(results), out / "figure.png")
    print((out / "tables.md").read_text())


if __name__ == "__main__":
    main()
