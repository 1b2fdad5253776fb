"""Compare methods by KL(dense ‖ method) at equal bytes: python benchmarks/divergence.py TEXTS --out FOLDER

TEXTS is a text file or a folder of *.txt, as for the task kl. Every method is run on a grid of its settings, all on the
same documents. On every second document settings are chosen; what is printed and drawn is measured on the others:

- at each budget, a share of dense attention's bytes, the setting with the least mean KL among those that read no more;
- for each mean KL and each 99th percentile, the least share of the bytes that reaches it, and for each budget the mean
  KL and its 99th percentile, between two settings by interpolation.

Bytes are those of the layers that methods decode. Sliding layers and states cost the same whatever the method; the
records count them, the shares do not.

With --both-ways the halves then change places, and every document is judged, with settings chosen on the other half.

With --beside FAMILY, which may be given several times, every setting of the other families is also shown as it stands,
chosen or not, beside what these families reach in as many bytes, between two settings.

Files whose names end in a number, such as code-0.txt, are documents of a kind: every second document of each kind
chooses (of all, where a kind has only one), and the budgets are also shown by kind. benchmarks/divergence_texts.py
writes such files.

FOLDER/results.jsonl (counted.jsonl for --counted) holds the records, so that the same command goes on after an
interruption, or adds methods; FOLDER/divergence.json and FOLDER/divergence.png are written at the end.

With --answer TOKENS the forced tokens are not the text's but an answer of dense attention's to each prompt, sampled
with a seed; the end of the text is never drawn. A small model runs in circles at a low --temperature, and there all
methods agree with it. Shown is the mean KL of every 250 tokens, and whether it grows. There FOLDER/answers.json holds
the answers, answers.jsonl the records, and growth.json what is printed.

Where skimkv is not installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import torch

from skimkv import plotting, spec
from skimkv.cli import output
from skimkv.eval.panels import label
from skimkv.eval.plan import Job, Plan, PlannedExample, Setup, document_groups, plan_job, supported_methods
from skimkv.eval.results import Results, Tail
from skimkv.eval.run import run_evaluation
from skimkv.eval.shared_prompt import forward, record_prompt
from skimkv.eval.statistics import cluster_bootstrap
from skimkv.eval.tasks import parse as parse_task
from skimkv.eval.traffic import sliding_layers, state_traffic
from skimkv.hf import fingerprint
from skimkv.hf.load import load
from skimkv.methods import Dense, parse
from skimkv.methods.base import Method
from skimkv.ops import select_backend

# Each is a line of the figure. An argument that is a list stands for one setting with each of its values.
GRIDS = (
    "Dense()",
    "SparQ(r=[4, 8, 12, 16, 24, 32], k=[8, 16, 32, 64, 128], channels='int4')",
    "SparQ(r=[4, 8, 12, 16, 24, 32], k=[8, 16, 32, 64, 128], channels='int4', mean_value=True)",
    "SparQ(r=[1, 2, 4, 8], k=[8, 16, 32, 64, 128])",
    "Skim(r=[4, 8, 12, 16], k=[16, 32, 64, 128])",
    "TopK(k=[8, 16, 24, 40, 64, 100, 160], oracle=True)",
    "H2O(k=[32, 48, 64, 96, 160, 256])",
)
BASELINE = "SparQ(mean_value=True, channels='int4')"
BUDGETS = (0.02, 0.03, 0.05, 0.08, 0.12)  # shares of dense attention's bytes
TARGETS = (0.1, 0.03, 0.01, 0.004)  # mean KL in nats a token
TAIL_TARGETS = (0.5, 0.15, 0.05, 0.02)  # 99th percentiles of it
ANSWERERS = (
    "Skim(k=[64, 128])",
    "SparQ(r=16, k=128, channels='int4')",
    "H2O(k=256)",
    "StreamingLLM(k=256)",
)
WINDOW = 250  # tokens of an answer whose mean is shown
NUMBERED = re.compile(r"(.+)-\d+:")  # the beginning of a document's id where its file has a number
SLACK = 1.02  # a setting that reads this much more than a budget still counts as within it

Record = Mapping[str, Any]


def settings(template: str) -> Iterator[str]:
    """Yield the specs of a grid: every combination of the values in its lists. Raises ValueError if it is no spec."""
    call = spec.parse_call(template, "method", "SparQ(r=[8, 16], k=64)")
    values = []
    for name, node in [*((None, node) for node in call.positional), *call.keywords]:
        choices = node.elts if isinstance(node, ast.List) else [node]
        values.append([f"{name}={ast.unparse(choice)}" if name else ast.unparse(choice) for choice in choices])
    for arguments in itertools.product(*values):
        yield repr(parse(f"{call.name}({', '.join(arguments)})"))


def family(method: str) -> str:
    """The line on which a setting stands: its method and what it was given besides its budget, as a spec."""
    name, _, changed = label(method).partition(", ")
    return f"{name}({changed})" if changed else name


class Measured(NamedTuple):
    """One setting on some documents. share: of the bytes that dense attention moves in the same steps."""

    method: str
    share: float
    kl_mean: float
    low: float | None
    high: float | None
    tail: Tail

    def json(self) -> dict[str, Any]:
        """The same for the JSON file."""
        fields = {name: value for name, value in self._asdict().items() if name != "tail"}
        return {**fields, **self.tail._asdict()}


def measure(records: Sequence[Record]) -> Measured:
    """Summarise the records of one setting, one for each document."""
    scores, tail = [record["score"] for record in records], Tail.of(records)
    assert tail is not None, "records of the task kl hold divergences"
    low, high = cluster_bootstrap(scores, range(len(scores)), 0, math.inf)
    moved, dense = (sum(record[name] for record in records) for name in ("bytes", "dense_bytes"))
    return Measured(records[0]["method"], moved / dense, fmean(scores), low, high, tail)


class Family(NamedTuple):
    """All settings of one line, on the documents where they are chosen and on those where they are reported.

    records: those of the reported documents, by setting.
    """

    name: str
    chosen_on: list[Measured]
    reported: dict[str, Measured]
    records: dict[str, list[Record]]

    def at_budget(self, budget: float) -> str | None:
        """The setting with the least mean KL on the first documents that reads at most this share of the bytes."""
        within = [setting for setting in self.chosen_on if setting.share <= budget * SLACK]
        return min(within, key=lambda setting: setting.kl_mean).method if within else None

    def front(self) -> list[Measured]:
        """Those settings that were better on the first documents than all cheaper ones, as reported, cheapest first."""
        best, front = math.inf, []
        for setting in sorted(self.chosen_on, key=lambda setting: setting.share):
            if setting.kl_mean < best:
                best = setting.kl_mean
                front.append(self.reported[setting.method])
        return front

    def share_for(self, target: float, tail: bool = False) -> float | None:
        """The least share of the bytes at which the mean KL is `target`, along the front; None beyond its ends.

        tail: the 99th percentile instead of the mean. Between two settings both are interpolated logarithmically.
        """
        points = [(found.tail.kl_p99 if tail else found.kl_mean, found.share) for found in self.front()]
        for cheaper, dearer in itertools.pairwise(points):
            if cheaper[0] >= target >= dearer[0]:
                return between(target, cheaper, dearer)
        return None

    def at_share(self, share: float) -> tuple[float, float] | None:
        """The mean KL and its 99th percentile at this share of the bytes, along the front; None beyond its ends."""
        for cheaper, dearer in itertools.pairwise(self.front()):
            if cheaper.share <= share <= dearer.share:
                mean = between(share, (cheaper.share, cheaper.kl_mean), (dearer.share, dearer.kl_mean))
                ends = (cheaper.share, cheaper.tail.kl_p99), (dearer.share, dearer.tail.kl_p99)
                return mean, between(share, *ends)
        return None


Ways = Sequence[Sequence[Family]]  # all lines, once for each half that chooses


def between(x: float, a: tuple[float, float], b: tuple[float, float]) -> float:
    """The y at x on the line through the points a and b, all on logarithmic axes; a y of 0 stays 0."""
    gap = math.log(b[0] / a[0])
    return a[1] * (b[1] / a[1]) ** (math.log(x / a[0]) / gap) if gap and a[1] else a[1]


def families(records: Sequence[Record], chooses: int = 0) -> list[Family]:
    """Sort records into lines; of every setting, the first, third, ... document of a kind is one that chooses.

    chooses: 1 lets the second, fourth, ... choose instead.
    """
    by_setting: dict[str, list[Record]] = {}
    for record in records:
        by_setting.setdefault(record["method"], []).append(record)
    lines: dict[str, Family] = {}
    for method, own in by_setting.items():
        line = lines.setdefault(family(method), Family(family(method), [], {}, {}))
        kinds = list(by_kind(own).values())
        if min(map(len, kinds)) < 2:  # no kind can choose for itself
            kinds = [own]
        line.chosen_on.append(measure([record for records in kinds for record in records[chooses::2]]))
        line.records[method] = [record for records in kinds for record in records[1 - chooses :: 2]]
        line.reported[method] = measure(line.records[method])
    return list(lines.values())


def by_kind(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Sort records by the kind of their documents, which is "" for those whose file has no number."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        match = NUMBERED.match(record["id"])
        kinds.setdefault(match[1] if match else "", []).append(record)
    return kinds


def budget_rows(ways: Ways, baseline: str, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """What each line reaches at each budget, on the reported documents, and its difference to the baseline's there.

    Where the ways chose different settings, the row names both.
    """
    (base,) = (lines for lines in zip(*ways, strict=True) if lines[0].name == baseline)
    rows = []
    for budget, lines in itertools.product(budgets, zip(*ways, strict=True)):
        own = records_at(lines, budget)
        if own is None:
            continue
        chosen = " or ".join(dict.fromkeys(record["method"] for record in own))
        row = {"family": lines[0].name, "budget": budget, **measure(own).json(), "method": chosen}
        kinds = by_kind(own)
        if len(kinds) > 1:
            row["kinds"] = {kind: measure(of_kind).json() for kind, of_kind in sorted(kinds.items())}
        other = records_at(base, budget)
        if other is not None and lines is not base:
            differences = [mine["score"] - theirs["score"] for mine, theirs in zip(own, other, strict=True)]
            low, high = cluster_bootstrap(differences, range(len(differences)), -math.inf, math.inf)
            row |= {"diff_to_baseline": fmean(differences), "diff_low": low, "diff_high": high}
        rows.append(row)
    return rows


def records_at(lines: Sequence[Family], budget: float) -> list[Record] | None:
    """The reported records of the settings that a line's ways chose for a budget; None where one found none."""
    chosen = [line.at_budget(budget) for line in lines]
    if None in chosen:
        return None
    return [record for line, method in zip(lines, chosen, strict=True) if method for record in line.records[method]]


def target_rows(ways: Ways, baseline: str, targets: Sequence[float], tail: bool = False) -> list[dict[str, Any]]:
    """The share of dense's bytes that each line needs for each mean KL, and how many times fewer than the baseline.

    tail: for each 99th percentile instead. The share is the geometric mean of the ways'.
    """
    (base,) = (lines for lines in zip(*ways, strict=True) if lines[0].name == baseline)
    rows = []
    for target, lines in itertools.product(targets, zip(*ways, strict=True)):
        share, theirs = (middle(line.share_for(target, tail) for line in own) for own in (lines, base))
        fewer = theirs / share if share and theirs else None
        what = "kl_p99" if tail else "kl_mean"
        rows.append({"family": lines[0].name, what: target, "share": share, "times_fewer_than_baseline": fewer})
    return rows


def share_rows(ways: Ways, shares: Sequence[float]) -> list[dict[str, Any]]:
    """The mean KL and its 99th percentile of each line at each share of dense's bytes, between two settings.

    They are the geometric means of the ways'.
    """
    rows = []
    for share, lines in itertools.product(shares, zip(*ways, strict=True)):
        found = [line.at_share(share) or (None, None) for line in lines]
        mean, p99 = (middle(values) for values in zip(*found, strict=True))
        rows.append({"family": lines[0].name, "share": share, "kl_mean": mean, "kl_p99": p99})
    return rows


def setting_rows(ways: Ways, beside: Sequence[str]) -> list[dict[str, Any]]:
    """Every setting of the other lines on the reported documents, and the lines `beside` at its share of the bytes.

    These are the geometric means of the ways', None beyond the ends of a line.
    """
    rows = []
    for lines in zip(*ways, strict=True):
        if lines[0].name in ("Dense", *beside):
            continue
        for method in lines[0].records:
            own = measure([record for line in lines for record in line.records[method]])
            others = {row["family"]: row for row in share_rows(ways, [own.share]) if row["family"] in beside}
            found = {name: {key: others[name][key] for key in ("kl_mean", "kl_p99")} for name in beside}
            rows.append({**own.json(), "beside": found})
    return sorted(rows, key=lambda row: row["share"])


def middle(values: Iterable[float | None]) -> float | None:
    """The geometric mean; None where a value is."""
    found = list(values)
    known = [value for value in found if value is not None]
    return geometric_mean(known) if len(known) == len(found) and all(known) else None


def load_setup(args: argparse.Namespace) -> Setup:
    """Load the model, and a second time where another format reads the prompts."""
    model, tokenizer = load(args.model, dtype=args.dtype)
    reader = load(args.model, dtype=args.prompt_dtype)[0] if args.prompt_dtype else None
    weights = fingerprint.of_model(model, tokenizer, args.model)
    return Setup(model, tokenizer, args.model, args.seed, args.batch, False, weights, reader=reader)


def run(args: argparse.Namespace) -> list[Record]:
    """Make the records that the files lack; return those of all settings, document by document in one order."""
    setup = load_setup(args)
    task = parse_task(f"kl(context={args.context}, reference={args.reference})")
    records: list[Record] = []
    for counted, templates in ((False, args.method or GRIDS), (True, args.counted or ())):
        methods = supported_settings(setup, templates)
        if methods:
            setup = setup._replace(counted=counted)
            job = plan_job(setup, task, "blind", methods, args.texts, args.documents)
            if len(job.groups) < 2:
                raise ValueError(f"{args.texts}: one document is not enough: settings are chosen on half of them")
            records += make_records(setup, job, args.out / ("counted.jsonl" if counted else "results.jsonl"))
    return records


def supported_settings(setup: Setup, templates: Sequence[str]) -> list[Method]:
    """The settings of these grids that fit the model; of the others it is told why they do not."""
    specs = [method for template in templates for method in settings(template)]
    methods, misfits = supported_methods(setup, [parse(method) for method in specs])
    for misfit in misfits:
        print(f"Left out: {misfit}", file=sys.stderr)
    return methods


def make_records(setup: Setup, job: Job, file: Path) -> list[Record]:
    """Make the records of a job that the file lacks; return all of them, without the bytes of other layers."""
    backend = "ref" if setup.counted else select_backend("cpu")[0]
    with Results(file, backend) as results, output.progress_bar() as bar:
        shown = bar.add_task(file.name, total=None)
        records = run_evaluation(
            setup, Plan([job], []), results, lambda done, total, _: bar.update(shown, completed=done, total=total)
        )
    others = other_layers_bytes(setup.model, records[0]["prompt_tokens"], records[0]["steps"])
    return [{**r, "bytes": r["bytes"] - others, "dense_bytes": r["dense_bytes"] - others} for r in records]


@torch.inference_mode()
def other_layers_bytes(model: Any, context: int, steps: int) -> int:
    """What the layers that no method decodes move in so many decode steps of one sequence after its context."""
    cache = record_prompt(model, torch.zeros(1, 1, dtype=torch.long, device=model.device)).cache(Dense())
    moved = steps * state_traffic(cache).bytes
    for layer, n in itertools.product(sliding_layers(cache), range(context, context + steps)):
        moved += Dense().traffic(min(n, layer.rows), layer.shape, layer.dtype).bytes
    return moved


@torch.inference_mode()
def sample_answers(
    setup: Setup, documents: Sequence[PlannedExample], tokens: int, temperature: float
) -> list[list[int]]:
    """Answers of dense attention to prompts of one length: so many tokens each, sampled at the temperature.

    Each document has a random generator of its own, which its id and the setup's seed start.
    """
    model, draws = setup.model, [torch.Generator() for _ in documents]
    for draw, planned in zip(draws, documents, strict=True):
        draw.manual_seed(int.from_bytes(sha256(f"{setup.seed} {planned.example.id}".encode()).digest()[:8], "big"))
    ends = model.generation_config.eos_token_id
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
    ids = torch.tensor([planned.prompt for planned in documents], device=model.device)
    prompt = record_prompt(model, ids, new_tokens=tokens, reader=setup.reader)
    cache, logits, answers = prompt.cache(Dense()), prompt.logits, list[torch.Tensor]()
    for _ in range(tokens):
        scores = logits.float() / temperature
        scores[:, ends] = -math.inf
        drawn = [row.softmax(-1).cpu().multinomial(1, generator=draw) for row, draw in zip(scores, draws, strict=True)]
        answers.append(torch.stack(drawn))  # (B,1)
        logits = forward(model, cache, answers[-1].to(model.device), None)[:, -1]
    return torch.cat(answers, 1).tolist()


def read_answers(setup: Setup, args: argparse.Namespace, documents: Sequence[PlannedExample]) -> dict[str, list[int]]:
    """The answers to documents by their ids: those of the file, and new ones, which are added to it.

    Raises ValueError if the file holds answers of another run.
    """
    file = args.out / "answers.json"
    of = {"weights": setup.weights, "seed": setup.seed, "context": args.context, "tokens": args.answer,
          "temperature": args.temperature}  # fmt: skip
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"of": of, "answers": {}}
    if found["of"] != of:
        raise ValueError(
            f"{file} holds answers of another model, or another --seed, --context, --answer or --temperature; choose "
            "another --out"
        )
    answers: dict[str, list[int]] = found["answers"]
    missing = [planned for planned in documents if planned.example.id not in answers]
    for start in range(0, len(missing), setup.batch):
        batch = missing[start : start + setup.batch]
        sampled = sample_answers(setup, batch, args.answer, args.temperature)
        answers |= {planned.example.id: ids for planned, ids in zip(batch, sampled, strict=True)}
        file.write_text(json.dumps(found), encoding="utf-8")
    return answers


def run_answers(args: argparse.Namespace) -> list[Record]:
    """Force dense attention's own answers; make the records that the file lacks, and return all."""
    setup = load_setup(args)
    methods = supported_settings(setup, args.method or ANSWERERS)
    task = parse_task(f"kl(context={args.context}, reference=1)")
    documents = [group[0] for group in plan_job(setup, task, "blind", methods, args.texts, args.documents).groups]
    answers = read_answers(setup, args, documents)
    task = parse_task(f"kl(context={args.context}, reference={args.answer})")
    pairs = [(planned.example, planned.prompt + answers[planned.example.id]) for planned in documents]
    job = Job(task, "forced", document_groups(pairs, args.context, setup.weights), methods)
    return make_records(setup, job, args.out / "answers.jsonl")


def growth_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The mean KL of each method over every WINDOW tokens of the answers, and how much it grows along them.

    growth: the mean of the last quarter of an answer less that of the first, over the answers, with its 95% interval by
    a bootstrap over them.
    """
    methods: dict[str, list[Record]] = {}
    for record in records:
        methods.setdefault(record["method"], []).append(record)
    rows = []
    for own in methods.values():
        n = len(own[0]["kl"])
        windows = [fmean(x for r in own for x in r["kl"][at : at + WINDOW]) for at in range(0, n, WINDOW)]
        quarter = max(1, n // 4)
        grown = [fmean(r["kl"][-quarter:]) - fmean(r["kl"][:quarter]) for r in own]
        low, high = cluster_bootstrap(grown, range(len(grown)), -math.inf, math.inf)
        growth = {"growth": fmean(grown), "growth_low": low, "growth_high": high}
        rows.append({**measure(own).json(), "answers": len(own), "windows": windows, **growth})
    return rows


def print_growth(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table for people."""
    ends = [str(WINDOW * (i + 1)) for i in range(len(rows[0]["windows"]))]
    table = output.table(
        f"mean KL of {WINDOW} tokens each, along {rows[0]['answers']} answers of dense attention's", "method",
        "of dense", *ends, "99th percentile", "last quarter less first", "95% interval",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["method"], f"{row['share']:.1%}", *(f"{x:.3g}" for x in row["windows"]), f"{row['kl_p99']:.3g}",
            f"{row['growth']:+.2g}", _interval(row["growth_low"], row["growth_high"], "+"),
        )  # fmt: skip
    output.console(170).print(table)


def draw(lines: Sequence[Family], title: str, path: Path) -> None:
    """Draw the mean and the 99th percentile of the KL by bytes, a line for the front of each family."""
    from matplotlib.lines import Line2D

    lines = [line for line in lines if line.name != "Dense"]
    points: tuple[list[Any], list[Any]] = ([], [])
    for line in lines:
        for found in line.front():
            points[0].append((line.name, found.share, found.kl_mean, found.low, found.high))
            ends = found.tail.kl_p99_low, found.tail.kl_p99_high
            points[1].append((line.name, found.share, found.tail.kl_p99, *ends))
    styles = plotting.line_styles([line.name for line in lines])
    figure, axes = plotting.panel_grid(2, 2, (5.2, 4.2), (0.4, 1.2))
    for ax, what, panel in zip(axes, ("mean KL", "99th percentile of KL"), points, strict=True):
        plotting.draw_scores(ax, f"{what}, nats a token; lower is better", panel, styles, math.inf, from_dense=True)
        ticks = (0.01, 0.02, 0.03, 0.05, 0.08, 0.125, 0.25, 0.5)
        shares = [share for _, share, *_ in panel]
        shown = [tick for tick in ticks if min(shares) / 1.5 <= tick <= max(shares) * 1.5]
        ax.set_xticks(shown, [f"{tick:.3g}" for tick in shown])
        ax.set_xlim(min(shares) / 1.2, max(shares) * 1.2)
    handles = [Line2D([], [], color=styles[n][0], marker=styles[n][1], label=n) for n in styles]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.supxlabel(f"bytes read per step, as a share of dense attention's (log scale)\n{title}", fontsize=9)
    figure.savefig(path)


def print_tables(
    rows: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]],
    tails: Sequence[Mapping[str, Any]],
    shares: Sequence[Mapping[str, Any]],
) -> None:
    """Print the tables for people."""
    console = output.console(170)
    table = output.table(
        "settings chosen on half of the documents, figures of the other half", "setting", "budget", "of dense",
        "mean KL", "95% interval", "to baseline", "95% interval", "99th percentile", "maximum", "same top token",
    )  # fmt: skip
    for row in rows:
        difference = row.get("diff_to_baseline")
        table.add_row(
            row["method"], f"{row['budget']:.0%}", f"{row['share']:.1%}", f"{row['kl_mean']:.3g}",
            _interval(row["low"], row["high"]), "" if difference is None else f"{difference:+.2g}",
            _interval(row.get("diff_low"), row.get("diff_high"), "+"), f"{row['kl_p99']:.3g}", f"{row['kl_max']:.3g}",
            f"{row['agreement']:.1%}",
        )  # fmt: skip
    console.print(table)
    kinds = sorted({kind for row in rows for kind in row.get("kinds", ())})
    if kinds:
        table = output.table("the same by kind of text: mean KL, 99th percentile, same top token", "setting", *kinds)
        for row in rows:
            found = [row["kinds"][kind] for kind in kinds]
            shown = (f"{x['kl_mean']:.3g}, {x['kl_p99']:.3g}, {x['agreement']:.1%}" for x in found)
            table.add_row(row["method"], *shown)
        console.print(table)
    names = list(dict.fromkeys(row["family"] for row in targets))
    for what, wanted, title in (("kl_mean", targets, "a mean KL"), ("kl_p99", tails, "a 99th percentile")):
        columns = list(dict.fromkeys(row[what] for row in wanted))
        table = output.table(f"share of dense's bytes for {title} of", "family", *(f"{kl:g}" for kl in columns))
        for name in names:
            own = [row["share"] for row in wanted if row["family"] == name]
            table.add_row(name, *("–" if share is None else f"{share:.1%}" for share in own))
        console.print(table)
    columns = list(dict.fromkeys(row["share"] for row in shares))
    title = "mean KL and its 99th percentile at a share of dense's bytes of"
    table = output.table(title, "family", *(f"{share:.0%}" for share in columns))
    for name in names:
        found = [(row["kl_mean"], row["kl_p99"]) for row in shares if row["family"] == name]
        table.add_row(name, *("–" if mean is None else f"{mean:.3g}, {p99:.3g}" for mean, p99 in found))
    console.print(table)


def print_settings(rows: Sequence[Mapping[str, Any]], beside: Sequence[str]) -> None:
    """Print the table of `setting_rows` for people."""
    others = [f"{name}: mean KL, 99th percentile" for name in beside]
    table = output.table(
        "settings as they stand, beside others at as many bytes", "setting", "of dense", "mean KL", "99th percentile",
        "same top token", *others,
    )  # fmt: skip
    for row in rows:
        found = ((x["kl_mean"], x["kl_p99"]) for x in row["beside"].values())
        table.add_row(
            row["method"], f"{row['share']:.1%}", f"{row['kl_mean']:.3g}", f"{row['kl_p99']:.3g}",
            f"{row['agreement']:.1%}", *("–" if mean is None else f"{mean:.3g}, {p99:.3g}" for mean, p99 in found),
        )  # fmt: skip
    output.console(170).print(table)


def _interval(low: float | None, high: float | None, sign: str = "") -> str:
    """Both ends of an interval; nothing where there is none."""
    return "" if low is None or high is None else f"{low:{sign}.3g} … {high:{sign}.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="text file or folder of *.txt")
    parser.add_argument("--out", type=Path, default=Path("divergence"), help="folder to write into")
    parser.add_argument("--model", default="builtin", help="builtin, a folder, or a Hugging Face id")
    parser.add_argument("--dtype", default="float16", help="number format; bytes are those of a cache in it")
    parser.add_argument("--prompt-dtype", help="number format in which prompts are read, where --dtype is slow")
    parser.add_argument("--method", action="append", help="a grid; may be given several times instead of the default")
    parser.add_argument("--counted", action="append", help="a grid whose bytes are counted on the reference backend")
    parser.add_argument("--baseline", default=BASELINE, help="the family that others are compared with")
    parser.add_argument("--beside", action="append", default=[], help="show all other settings beside this family")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a document's prompt")
    parser.add_argument("--reference", type=int, default=128, help="tokens that are forced after it")
    parser.add_argument("--answer", type=int, help="force dense's own answers of so many tokens, and see what grows")
    parser.add_argument("--temperature", type=float, default=1.0, help="at which answers are sampled")
    parser.add_argument("--documents", type=int, default=48, help="how many documents are used, in two halves")
    parser.add_argument("--batch", type=int, default=8, help="documents that are decoded together")
    parser.add_argument("--both-ways", action="store_true", help="judge either half with settings of the other")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the documents")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.answer is not None:
            return report_answers(args)
        records = run(args)
        ways = [families(records, chooses) for chooses in ((0, 1) if args.both_ways else (0,))]
        lines = ways[0]
        names = [line.name for line in lines]
        for flag, name in (("--baseline", args.baseline), *(("--beside", name) for name in args.beside)):
            if name not in names:
                raise ValueError(f"{flag} {name} is none of the families: {'; '.join(names)}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows, targets = budget_rows(ways, args.baseline, BUDGETS), target_rows(ways, args.baseline, TARGETS)
    tails, shares = target_rows(ways, args.baseline, TAIL_TARGETS, tail=True), share_rows(ways, BUDGETS)
    setting = {name: getattr(args, name) for name in ("model", "dtype", "context", "reference", "seed", "baseline")}
    documents = sum(len(next(iter(way[0].records.values()))) for way in ways)
    settings_beside = setting_rows(ways, args.beside) if args.beside else []
    curves = {line.name: [found.json() for found in line.front()] for line in lines}
    told = {
        **setting,
        "reported_documents": documents,
        "budgets": rows,
        "targets": targets,
        "tail_targets": tails,
        "shares": shares,
        "settings": settings_beside,
        "curves": curves,
    }
    (args.out / "divergence.json").write_text(json.dumps(told, indent=1) + "\n")
    drawn = len(next(iter(lines[0].records.values())))
    title = f"{args.model}, {args.texts.name}, {args.dtype}: {drawn} documents, {args.reference} tokens after "
    draw(lines, f"{title}{args.context}", args.out / "divergence.png")
    print_tables(rows, targets, tails, shares)
    if settings_beside:
        print_settings(settings_beside, args.beside)
    print(f"{args.out}: results.jsonl, divergence.json, divergence.png")
    return 0


def report_answers(args: argparse.Namespace) -> int:
    """Run the comparison on dense attention's own answers; return the exit status."""
    if args.answer < 1:
        raise ValueError(f"--answer {args.answer} must be at least 1 token")
    if not 0 < args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature} must be a number above 0")
    rows = growth_rows(run_answers(args))
    (args.out / "growth.json").write_text(json.dumps(rows, indent=1) + "\n")
    print_growth(rows)
    print(f"{args.out}: answers.json, answers.jsonl, growth.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
