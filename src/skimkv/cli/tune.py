"""`skimkv tune`: find the cheapest r, k and channels of SparQ that keep a model near dense attention on a text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import output
from .errors import fail_interrupted
from .options import (
    Batch,
    Device,
    Dtype,
    Json,
    Model,
    Plot,
    Records,
    ResumeAnyway,
    check_environment,
    input_file,
    quiet,
    resolve_device,
)

if TYPE_CHECKING:
    from ..eval.tune import DivergenceTrial, Loss, Scorer, Trial

TEXT_OPTIONS = "Text options"
LEAST_SIZES = {"prompt": 32, "scored": 1, "pieces": 2}


class Channels(str, Enum):
    """Where SparQ reads the channels of K: the names of stores/full.py, which imports PyTorch."""

    none = "none"
    copy = "copy"
    int8 = "int8"
    int4 = "int4"


class Pieces(NamedTuple):
    """Two sets of pieces of a text, in tokens: one to choose the method on, one to check it."""

    tuned: list[list[int]]
    checked: list[list[int]]
    digest: str


class Outcome(NamedTuple):
    """What was found: the chosen method, and the same on the pieces on which nothing was chosen."""

    chosen: Trial | DivergenceTrial | None
    checked: Trial | DivergenceTrial | None
    trials: list[Trial | DivergenceTrial]
    dense: Loss


class Target(NamedTuple):
    """What bounds the choice: the increase of the loss as a share, or the mean KL in nats a token."""

    bound: float
    is_kl: bool

    def __str__(self) -> str:
        return f"{self.bound:g} nats" if self.is_kl else f"{100 * self.bound:g}%"

    def write(self, value: float) -> str:
        """A value that the target bounds, for people."""
        return f"{value:.3g} nats" if self.is_kl else f"{value:+.2%}"


def tune(
    text: Annotated[Path, input_file("Text file like those that the model will read.", "--text", TEXT_OPTIONS)],
    target_loss: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", show_default="1%",
            help="The greatest increase of the loss over dense attention's: 1%, or 0.01.",
        ),
    ] = None,
    target_kl: Annotated[
        float | None,
        typer.Option(
            metavar="NATS", show_default=False,
            help="The greatest mean of KL(dense ‖ method) in nats a token, such as 0.01, instead of --target-loss.",
        ),
    ] = None,
    channels: Annotated[
        list[Channels] | None,
        typer.Option(
            metavar="CHANNELS", show_default="int4, int8 and copy",
            help="How SparQ stores the channels of K that it reads: int4, int8, copy or none. May be given several "
            "times.",
        ),
    ] = None,
    prompt: Annotated[
        int, typer.Option(rich_help_panel=TEXT_OPTIONS, help="Number of tokens of each piece that are read at once.")
    ] = 1024,
    scored: Annotated[
        int, typer.Option(rich_help_panel=TEXT_OPTIONS, help="Number of tokens after them that the method decodes.")
    ] = 128,
    pieces: Annotated[
        int,
        typer.Option(
            rich_help_panel=TEXT_OPTIONS,
            help="Number of pieces of the text on which methods are tried; as many again check the chosen one.",
        ),
    ] = 8,
    model: Model = "builtin",
    dtype: Dtype = None,
    device: Device = "cpu",
    batch: Batch = 8,
    out: Records = Path("skimkv-tune.jsonl"),
    resume_anyway: ResumeAnyway = False,
    plot: Plot = None,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Find the SparQ that moves the fewest bytes while the model stays within a target on a text.

    The target bounds the increase of the loss or, with --target-kl, how far the distributions of the next token move.

    The method decodes every token that is scored. A second set of pieces, on which nothing was chosen, checks the
    choice. A run that was interrupted goes on where it was when the same command is given again.

    Example:

        skimkv tune --text book.txt --model Qwen/Qwen3-0.6B --target-loss 1% --plot tune.png
    """
    target = _parse_target(target_loss, target_kl)
    for name, value in (("prompt", prompt), ("scored", scored), ("pieces", pieces)):
        if value < LEAST_SIZES[name]:
            raise ValueError(f"--{name} {value} must be at least {LEAST_SIZES[name]}")
    ways = list(dict.fromkeys(kind.value for kind in channels or (Channels.int4, Channels.int8, Channels.copy)))
    check_environment()
    quiet(model)
    place = resolve_device(device)

    from .. import ops
    from ..eval.results import Results
    from ..hf.load import load

    with Results(out, ops.select_backend(place.type)[0], resume_anyway) as results:
        network, tokenizer = load(model, dtype=dtype, device=place)  # finds mistakes before transformers is imported
        from ..eval.tune import DivergenceScorer, Scorer
        from ..hf import fingerprint
        from ..hf.positions import check_length

        check_length(network, prompt + scored + 1)
        cut = _cut(text, tokenizer, prompt + scored + 1, pieces)
        scorer, spec = Scorer, f"tune(prompt={prompt}, scored={scored})"
        if target.is_kl:
            scorer, spec = DivergenceScorer, f"kl(context={prompt}, reference={scored})"
        source = fingerprint.of_model(network, tokenizer, model)
        key = {"model": model, "dtype": str(network.dtype).removeprefix("torch."), "task": spec, "source": source}
        tuned, checked = (
            scorer(network, tokenizer, part, prompt, results, {**key, "mode": f"{name} {cut.digest}"}, batch)
            for name, part in (("tuned", cut.tuned), ("checked", cut.checked))
        )
        try:
            outcome = _run(tuned, checked, ways, target)
        except KeyboardInterrupt:
            return fail_interrupted(len(results.records), out)
    if plot is not None and outcome.trials:
        _draw(outcome, target, f"{model}, {text.name}, {prompt} tokens and {scored} after them", plot)
    if outcome.chosen is None:
        raise ValueError(_nearest(outcome.trials, target))
    if as_json:
        dense = fmean(outcome.dense.nats)
        output.print_json({
            "model": model, "target": target.bound, "dense_kl" if target.is_kl else "dense_nats": dense,
            "dense_bytes": outcome.dense.bytes, "chosen": outcome.chosen.json(),
            "checked": outcome.checked and outcome.checked.json(), "searched": [t.json() for t in outcome.trials],
            "out": str(out), "figure": None if plot is None else str(plot),
        })  # fmt: skip
        return 0
    _print_table(outcome.chosen, outcome.trials, outcome.dense, target)
    _print_check(outcome.checked, len(cut.checked), target)
    if plot is not None:
        print(f"Figure: {plot}")
    return 0


def _parse_share(given: str) -> float:
    """A share from 0 to 1, written as 1% or 0.01."""
    try:
        value = float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise ValueError(f"--target-loss {given!r} must be a share from 0 to 1, such as 1% or 0.01")
    return value


def _parse_target(loss: str | None, kl: float | None) -> Target:
    """The target that the two options give; 1% of the loss without them."""
    if kl is None:
        return Target(_parse_share("1%" if loss is None else loss), is_kl=False)
    if loss is not None:
        raise ValueError(f"--target-kl {kl:g} and --target-loss {loss} bound two things: give one of them")
    if not 0 <= kl < math.inf:
        raise ValueError(f"--target-kl {kl} must be a number of nats from 0, such as 0.01")
    return Target(kl, is_kl=True)


def _cut(path: Path, tokenizer: Any, size: int, pieces: int) -> Pieces:
    """Cut a text into pieces of `size` tokens: `pieces` to choose on, and up to as many to check."""
    from ..eval.generate import encode_pieces
    from ..eval.tasks import source

    cut = encode_pieces(tokenizer, source.read_text(path), size, 2 * pieces)
    if len(cut) < pieces:
        raise ValueError(f"{path}: the text has {len(cut)} pieces of {size} tokens, too few for --pieces {pieces}")
    return Pieces(cut[:pieces], cut[pieces:], hashlib.sha256(json.dumps(cut).encode()).hexdigest()[:16])


def _run(tuned: Scorer, checked: Scorer, channels: Sequence[str], target: Target) -> Outcome:
    """Choose a method on the one scorer's pieces, and check it on the other's."""
    from ..eval.tune import tune as search

    with output.progress_bar() as bar:
        task = bar.add_task("", total=None)
        chosen, trials, dense = search(
            tuned, channels, target.bound, lambda spec: bar.update(task, advance=1, description=spec)
        )  # fmt: skip
        check = None
        if chosen is not None and checked.pieces:
            bar.update(task, description="on other pieces")
            check = checked.trial(chosen.method)
    return Outcome(chosen, check, trials, dense)


def _draw(outcome: Outcome, target: Target, setting: str, path: Path) -> None:
    from ..eval import figures

    points = [(getattr(t.method, "channels", ""), t.share, t.value, t.low, t.high) for t in outcome.trials]
    chosen = outcome.chosen and (repr(outcome.chosen.method), outcome.chosen.share, outcome.chosen.value)
    figures.tuning(points, target.bound, chosen, setting, path, from_dense=target.is_kl)


def _nearest(trials: Sequence[Trial | DivergenceTrial], target: Target) -> str:
    """What to say where nothing stays within the target."""
    if not trials:
        return "no SparQ moves fewer bytes than dense at this length: give a longer --prompt"
    best = min(trials, key=lambda t: t.value)
    bound, nearest = f"{target.bound:.3%} of dense's loss", f"{best.value:+.3%}"
    if target.is_kl:
        bound, nearest = f"{target} of mean KL from dense", target.write(best.value)
    return (
        f"none of {len(trials)} SparQ stays within {bound}; the nearest is {best.method}, {nearest} with "
        f"{best.share:.1%} of its bytes"
    )


def _print_table(
    chosen: Trial | DivergenceTrial, trials: Sequence[Trial | DivergenceTrial], dense: Loss, target: Target
) -> None:
    """Print what was tried, cheapest first, and the chosen method."""
    first = f"{len(dense.nats)} pieces; dense: "
    title = f"{first}{dense.bytes:,} bytes a step"
    columns = ["mean KL, nats", "99th percentile", "maximum", "same top token"]
    if not target.is_kl:
        title = f"{first}{fmean(dense.nats):.4f} nats a token, {dense.bytes:,} bytes a step"
        columns = ["loss", "95% interval"]
    table = output.table(title, "method", "of dense's bytes", *columns, f"within {target}")
    for t in sorted(trials, key=lambda t: t.bytes):
        mark = "chosen" if t.method == chosen.method else "yes" if t.value <= target.bound else ""
        table.add_row(repr(t.method), f"{t.share:.1%}", *_cells(t), mark)
    console = output.console(130 if target.is_kl else 110)
    console.print(table)
    what = "mean KL" if target.is_kl else "loss"
    sentence = f"{chosen.method}: {chosen.share:.1%} of dense's bytes, {what} {_value(chosen, target)}."
    console.print(sentence, soft_wrap=True, markup=False)


def _value(trial: Trial | DivergenceTrial, target: Target) -> str:
    """What the target bounds, with its interval if there is one."""
    ends = ""
    if trial.low is not None and trial.high is not None:
        ends = f" (95%: {target.write(trial.low)} … {target.write(trial.high)})"
    return f"{target.write(trial.value)}{ends}"


def _cells(trial: Trial | DivergenceTrial) -> list[str]:
    """What a trial measured, for the table."""
    from ..eval.tune import Trial

    if isinstance(trial, Trial):
        has_interval = trial.low is not None and trial.high is not None
        return [f"{trial.increase:+.2%}", f"{trial.low:+.2%} … {trial.high:+.2%}" if has_interval else ""]
    return [f"{trial.kl_mean:.3g}", f"{trial.kl_p99:.3g}", f"{trial.kl_max:.3g}", f"{trial.agreement:.1%}"]


def _print_check(checked: Trial | DivergenceTrial | None, pieces: int, target: Target) -> None:
    """Print how the chosen method does on the pieces on which nothing was chosen."""
    console = output.console(110)
    if checked is None:
        console.print("The text has no other pieces to check it on.")
        return
    verdict = "within the target" if checked.value <= target.bound else "beyond the target: tune on more pieces"
    console.print(f"On {pieces} other pieces: {_value(checked, target)}, {verdict}.")
