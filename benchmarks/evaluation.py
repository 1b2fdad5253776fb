"""Make the tables and the figure of the evaluation: every method at 1/8, 1/16 and 1/32 of dense attention's bytes.

python benchmarks/evaluation.py DATA --model MODEL [--dtype DTYPE] [--out FOLDER] [--length N] [--contexts N ...]

DATA is a folder with essays/*.txt, squad.json, tinyshakespeare.txt and wikitext-test.txt for the divergence (see
docs/tasks.md). Settings are solved once for every share, on the first document of the text, and are the same on every
task. Then the divergence of all methods from dense attention is measured over the text at every context, all methods
answer the tasks blind and aware, and their steps are timed in turns. When it was interrupted, the same command goes on.
FOLDER then holds results.jsonl, settings.json, times.json, tables.md, readme.md (one table of at most ten rows) and
figure.png.
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
from skimkv.eval.tasks import Suite, parse
from skimkv.eval.timing import alternating_ms
from skimkv.methods import Dense, SnapKV, SparQ
from skimkv.stores.base import Store

SHARES = {1 / 8: "1/8", 1 / 16: "1/16", 1 / 32: "1/32"}
TASKS = (  # as long as --length says, where a task has a length
    "passkey(length={0})", "niah_single_1(length={0})", "niah_single_2(length={0})", "niah_single_3(length={0})",
    "niah_multikey_1(length={0})", "repetition", "squad",
)  # fmt: skip
README_SHARE = 1 / 16
README_ROWS = 10
REFERENCE = 64  # forced tokens of a document of the divergence
ROUNDS = 15  # in which the methods take turns to be timed
DENSE = "Dense()"

Settings = dict[str, float]  # spec -> the share of dense's bytes that it was solved for


class Results(NamedTuple):
    """What was measured of each method, by its spec.

    answers: the averages over all tasks, by mode. tasks: the rows of every task, blind. divergence: by the task's spec,
    the shortest context first. ms: a token's time.
    """

    settings: Settings
    answers: dict[str, dict[str, Row]]
    tasks: dict[str, dict[str, Row]]
    divergence: dict[str, dict[str, Row]]
    ms: dict[str, float]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--out", type=Path, default=Path("evaluation"), metavar="FOLDER")
    parser.add_argument("--text", type=Path, help="the text of the divergence (default: DATA/wikitext-test.txt)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt and its answer")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 6144], help="tokens before a divergence")
    parser.add_argument("--limit", type=int, default=24, help="examples of each task")
    parser.add_argument("--documents", type=int, default=8, help="documents of each divergence")
    parser.add_argument(
        "--tasks", nargs="*", default=TASKS, help="the tasks, of which {0} becomes the length; none: divergences only"
    )
    parser.add_argument("--shares", type=int, nargs="*", default=[8, 16, 32], help="16: a sixteenth of the bytes")
    parser.add_argument("--without", nargs="*", default=[], metavar="TEXT", help="leave out settings with this text")
    parser.add_argument("--batch", type=int, default=8, help="sequences that are decoded together")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default="float32", help="of weights and cache; a share means other settings in each")
    return parser.parse_args(arguments)


def suite_of(arguments: argparse.Namespace) -> Suite:
    """The tasks, whose scores are averaged."""
    return Suite("answers", [parse(task.format(arguments.length)) for task in arguments.tasks])


def divergence_tasks(arguments: argparse.Namespace) -> list[str]:
    """The specs of the tasks that measure divergences."""
    return [f"kl(context={context}, reference={REFERENCE})" for context in sorted(arguments.contexts)]


def first_document(setup: Setup, arguments: argparse.Namespace) -> PlannedExample:
    """The first document of the text, in tokens."""
    job = plan_job(setup, parse(divergence_tasks(arguments)[0]), "forced", [], arguments.text, 1)
    return job.groups[0][0]


@torch.inference_mode()
def solve_settings(setup: Setup, document: PlannedExample) -> Settings:
    """Every method at every share of dense's bytes, on this document; SparQ and SnapKV also in other forms.

    SparQ with 4-bit channels, and with its mean value, which is off where queries share KV heads; SnapKV with a wider
    pool, where a number is a token for every digit.
    """
    prompt = record_prompt(setup.model, torch.tensor([document.prompt]), new_tokens=budgets.MEASURED_STEPS)
    dense, mean_share = prompt.cache(Dense()).stores, budgets.measured_share(prompt, [document.question])
    matched, left_out = budgets.matched_methods(dense, mean_share, list(SHARES))
    settings: Settings = {}
    for method, share in matched:
        forms = [method]
        if isinstance(method, SparQ):
            forms += [dataclasses.replace(method, mean_value=True), *sparq_with_int4(share, dense)]
        if isinstance(method, SnapKV):
            forms.append(dataclasses.replace(method, pool=13))
        supported, misfits = supported_methods(setup, forms)
        left_out += misfits
        settings |= {repr(form): share for form in supported if repr(form) not in settings}
    print("\n".join(f"Left out: {note}." for note in left_out))
    return settings


def sparq_with_int4(share: float, dense: Sequence[Store]) -> list[SparQ]:
    """SparQ with 4-bit channels at the largest k that reads at most this share of dense's bytes, if any does.

    r is a quarter of the head size, and an eighth below a twelfth of the bytes.
    """
    store = dense[0]
    n, most = max(store.lengths), share * Dense().traffic(max(store.lengths), store.shape, store.dtype).bytes
    r = store.shape.D // (8 if share < 1 / 12 else 4)
    fitting = [
        method
        for method in (SparQ(r=r, k=k, channels="int4") for k in range(1, n))
        if method.traffic(n, store.shape, store.dtype).bytes <= most
    ]
    return fitting[-1:]


def measure_times(setup: Setup, document: PlannedExample, settings: Settings) -> dict[str, float]:
    """The median time of a token, in milliseconds, of every setting behind this document; they take turns."""
    prompt = record_prompt(setup.model, torch.tensor([document.prompt]), new_tokens=ROUNDS)
    with torch.inference_mode():
        caches = [prompt.cache(skimkv.parse(spec)) for spec in settings]
    return dict(zip(settings, alternating_ms(setup.model, caches, document.question.feed[0], ROUNDS), strict=True))


def run(arguments: argparse.Namespace) -> Results:
    """Measure what is not measured yet; exit with status 1 if a command fails."""
    out: Path = arguments.out
    model, tokenizer = skimkv.load(arguments.model, dtype=arguments.dtype)
    setup = Setup(model, tokenizer, arguments.model)
    document = first_document(setup, arguments)
    solved = _kept(out / "settings.json", lambda: solve_settings(setup, document))
    left_out = tuple(arguments.without)
    shares = {1 / one for one in arguments.shares} | {1.0}
    settings = {
        spec: share for spec, share in solved.items() if share in shares and not any(text in spec for text in left_out)
    }
    results, methods = str(out / "results.jsonl"), [part for spec in settings for part in ("--method", spec)]
    options = ["--model", arguments.model, "--dtype", arguments.dtype, "--out", results, *methods]
    options += ["--batch", str(arguments.batch)]
    suite, text = suite_of(arguments), ["--data", str(arguments.text), "--limit", str(arguments.documents)]
    answers = ["--mode", "both", "--data", str(arguments.data), "--limit", str(arguments.limit)]
    commands = [["--task", task, *text] for task in divergence_tasks(arguments)]
    commands += [["--task", task.spec, *answers] for task in suite.tasks]
    for command in commands:
        if run_command(["eval", *command, *options]):
            sys.exit(1)
    times = _kept(out / "times.json", lambda: measure_times(setup, document, settings))
    rows = summary(load(out / "results.jsonl"))
    averages: dict[str, dict[str, Row]] = {}
    for row in suite_averages(rows, [suite] if suite.tasks else []):
        averages.setdefault(row.mode, {})[row.method] = row

    def of_task(spec: str, modes: Sequence[str]) -> dict[str, Row]:
        return {row.method: row for row in rows if row.task == spec and row.mode in modes}

    tasks = {task.spec: of_task(task.spec, ["blind"]) for task in suite.tasks}
    divergence = {task: of_task(task, ["forced"]) for task in divergence_tasks(arguments)}
    return Results(settings, averages, tasks, divergence, times)


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
    measured = results.tasks or results.divergence
    shares = [rows[spec].share or 1.0 for rows in measured.values() if spec in rows]
    return sum(shares) / len(shares)


def table(results: Results, specs: Sequence[str]) -> str:
    """A table in Markdown: a row for each of these methods."""
    contexts = [parse(task).arguments["context"] for task in results.divergence]
    names = [f"KL at {context}, 99th percentile" for context in contexts]
    lines = [f"| method | bytes | right, blind | right, aware | {' | '.join(names)} | ms |"]
    lines.append("|---" * (5 + len(names)) + "|")
    for spec in specs:
        cells = [score(results.answers.get(mode, {}).get(spec)) for mode in ("blind", "aware")]
        for rows in results.divergence.values():
            row = rows.get(spec)
            cells.append(score(row) + ("" if row is None or row.tail is None else f", {number(row.tail.kl_p99)}"))
        lines.append(
            f"| `{spec}` | {100 * share_read(results, spec):.1f}% | {' | '.join(cells)} | {results.ms[spec]:.1f} |"
        )
    return "\n".join(lines)


def table_of_tasks(results: Results, specs: Sequence[str]) -> str:
    """A table in Markdown: what each of these methods answers on every task, blind."""
    names = [f"`{task}`" for task in results.tasks]
    lines = [f"| method | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for spec in specs:
        lines.append(f"| `{spec}` | {' | '.join(score(rows.get(spec)) for rows in results.tasks.values())} |")
    return "\n".join(lines)


def at(results: Results, share: float) -> list[str]:
    """Dense, and the methods that were solved for this share, by their score without the question, the best first."""
    blind = results.answers.get("blind", {})
    own = [spec for spec, solved in results.settings.items() if solved == share]
    return [DENSE, *sorted(own, key=lambda spec: -blind[spec].mean if spec in blind else 0.0)]


def panels(results: Results) -> list[ScorePanel]:
    """The answers blind and aware, and the divergences, each against the share of dense's bytes."""

    def points(rows: dict[str, Row]) -> list[tuple[str, float, float, float | None, float | None]]:
        """A point of each method that has a row."""
        return [(label(spec), row.share or 1.0, row.mean, row.low, row.high) for spec, row in rows.items()]

    scores: list[ScorePanel] = [
        (f"{len(results.tasks)} tasks, {mode}\nshare right", points(rows), 1.0, False)
        for mode, rows in results.answers.items()
    ]
    for task, rows in results.divergence.items():
        title = f"after {parse(task).arguments['context']} tokens\nKL in nats a token"
        scores.append((title, points(rows), math.inf, True))
    return scores


def main(command_line: Sequence[str] | None = None) -> None:
    """Run the evaluation, and write its tables and its figure."""
    arguments = parse_arguments(command_line)
    arguments.text = arguments.text or arguments.data / "wikitext-test.txt"
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    results = run(arguments)
    sections = [
        f"## At {name} of dense's bytes\n\n{table(results, specs)}"
        + (f"\n\n{table_of_tasks(results, specs)}" if results.tasks else "")
        for share, name in SHARES.items()
        if len(specs := at(results, share)) > 1
    ]
    machine = f"Times are of a whole token, in turns, on {machine_for(torch.device('cpu')).name}."
    (out / "tables.md").write_text("\n\n".join([*sections, machine, ""]))
    (out / "readme.md").write_text(table(results, at(results, README_SHARE)[:README_ROWS]) + "\n")
    figures.scores(panels(results), out / "figure.png")
    print((out / "tables.md").read_text())


if __name__ == "__main__":
    main()
