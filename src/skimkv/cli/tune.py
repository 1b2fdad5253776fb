"""`skimkv tune`: find the method with the fewest bytes that keeps a model near dense attention on a text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import options, output
from .errors import fail_interrupted

if TYPE_CHECKING:
    from ..eval.tune import Pieces, Trial
    from ..methods.base import Method

TEXT_OPTIONS = "Text options"
KNOWN = ("Skim", "SparQ", "Quest", "TopK", "LowRank", "H2O", "SnapKV", "TOVA", "StreamingLLM", "LMInfinite", "SubGen")


class Channels(str, Enum):
    """Where SparQ reads the channels of K: the names of stores/full.py, which imports PyTorch."""

    none = "none"
    copy = "copy"
    int8 = "int8"
    int4 = "int4"


class Outcome(NamedTuple):
    """What was found: the chosen method, and the same on the pieces on which nothing was chosen."""

    chosen: Trial | None
    checked: Trial | None
    trials: list[Trial]


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
    text: Annotated[
        Path,
        options.path_option(
            "--text", options.check_readable, "Text file like those that the model will read.", TEXT_OPTIONS
        ),
    ],
    target_loss: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", show_default="1%",
            help="The largest increase of the loss relative to dense attention: 1%, which is the same as 0.01.",
        ),
    ] = None,
    target_kl: Annotated[
        float | None,
        typer.Option(
            metavar="NATS", show_default=False,
            help="The greatest mean of KL(dense ‖ method) in nats a token, such as 0.01, instead of --target-loss.",
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", callback=options.checked(_check_name), show_default="Skim and SparQ",
            help="A method whose settings are searched, such as SnapKV. May be given several times.",
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
        int,
        typer.Option(
            min=32, rich_help_panel=TEXT_OPTIONS,
            help="Number of tokens at the start of each piece that are read as a prompt. Give the length of your own "
            "prompts: longer ones need a larger k.",
        ),
    ] = 1024,
    scored: Annotated[
        int,
        typer.Option(
            min=2, rich_help_panel=TEXT_OPTIONS, help="Number of tokens after the prompt that the method decodes."
        ),
    ] = 128,
    pieces: Annotated[
        int,
        typer.Option(
            min=2, rich_help_panel=TEXT_OPTIONS,
            help="Number of pieces of the text on which methods are tried; as many again check the chosen one.",
        ),
    ] = 8,
    model: options.Model = "builtin",
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    batch: options.Batch = 8,
    out: options.Records = Path("skimkv-tune.jsonl"),
    resume_anyway: options.ResumeAnyway = False,
    plot: options.Plot = None,
    as_json: options.Json = False,
) -> int:  # fmt: skip
    """Find the method that reads the fewest bytes while the model's quality on your text stays within a target.

    The target bounds the increase of the loss or, with --target-kl, how far the distributions of the next token move.

    The method decodes every token that is scored. A second set of pieces, on which nothing was chosen, checks the
    choice. A run that was interrupted goes on where it was when the same command is given again.

    Example:

        skimkv tune --text book.txt --model Qwen/Qwen3-0.6B --target-loss 1% --plot tune.png
    """
    target = _parse_target(target_loss, target_kl)
    ways = list(dict.fromkeys(kind.value for kind in channels or (Channels.int4, Channels.int8, Channels.copy)))
    options.check_formats(model, dtype)
    options.check_environment()
    options.quiet(model)
    place = options.resolve_device(device)

    from .. import ops
    from ..eval.results import Results
    from ..hf.load import load
    from ..methods import Dense

    with Results(out, ops.select_backend(place.type)[0], resume_anyway) as results:
        network, tokenizer = load(model, dtype=dtype, device=place)  # finds mistakes before transformers is imported
        from ..eval.plan import Setup
        from ..eval.tune import SEARCHED, Pieces
        from ..hf import fingerprint
        from ..hf.positions import check_length

        size = prompt + scored
        check_length(network, size)
        cut = _cut(text, tokenizer, size, pieces)
        digest = hashlib.sha256(json.dumps(cut).encode()).hexdigest()[:16]
        setup = Setup(network, tokenizer, model, 0, batch, weights=fingerprint.of_model(network, tokenizer, model))
        tuned, checked = (
            Pieces(setup, results, part, prompt, f"{name} {digest}", target.is_kl)
            for name, part in (("tuned", cut[:pieces]), ("checked", cut[pieces:]))
        )
        try:
            outcome = _run(tuned, checked, search or SEARCHED, ways, target)
        except KeyboardInterrupt:
            return fail_interrupted(len(results.records), out)
        dense = tuned.trial(Dense())
        if outcome.chosen is None:
            raise ValueError(_nearest(outcome.trials, target))
        dense_value = dense.value if target.is_kl else tuned.loss()
    setting = f"{model}, {text.name}, {prompt} tokens and {scored} after them"
    if plot is not None:
        _draw(outcome, target, setting, plot)
    if as_json:
        output.print_json({
            "model": model, "target": target.bound, "dense_kl" if target.is_kl else "dense_nats": dense_value,
            "dense_bytes": dense.bytes, "chosen": outcome.chosen.json(target.is_kl),
            "checked": outcome.checked and outcome.checked.json(target.is_kl),
            "searched": [t.json(target.is_kl) for t in outcome.trials],
            "out": str(out), "figure": None if plot is None else str(plot),
        })  # fmt: skip
        return 0
    title = f"{setting}; {pieces} pieces, dense: {dense.bytes:,} bytes a step"
    _print_table(outcome, title if target.is_kl else f"{title}, {dense_value:.4f} nats a token", target)
    _print_check(outcome.checked, len(checked.pieces), target)
    print(f"Prompts had {prompt} tokens: where yours are longer, give --prompt, since k grows with the length.")
    if plot is not None:
        print(f"Figure: {plot}")
    return 0


def _parse_target(loss: str | None, kl: float | None) -> Target:
    """The target that the two options give; 1% of the loss without them. A share is written as 1% or 0.01."""
    if kl is not None:
        if loss is not None:
            raise ValueError(f"--target-kl {kl:g} and --target-loss {loss} bound two things: give one of them")
        if not 0 <= kl < math.inf:
            raise ValueError(f"--target-kl {kl} must be a number of nats from 0, such as 0.01")
        return Target(kl, is_kl=True)
    loss = "1%" if loss is None else loss
    try:
        share = float(loss.removesuffix("%")) / (100 if loss.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise ValueError(f"--target-loss {loss!r} must be a share from 0 to 1, such as 1% or 0.01")
    return Target(share, is_kl=False)


def _check_name(name: str) -> None:
    if name not in KNOWN:
        raise ValueError(f"--search {name!r} must be one of {', '.join(KNOWN)}; other methods are not searched")


def _cut(path: Path, tokenizer: Any, size: int, pieces: int) -> list[list[int]]:
    """Cut a text into pieces of `size` tokens: `pieces` to choose on, and up to as many to check."""
    from ..eval.generate import encode_pieces
    from ..eval.tasks import source

    cut = encode_pieces(tokenizer, source.read_text(path), size, 2 * pieces)
    if len(cut) < pieces:
        raise ValueError(f"{path}: the text has {len(cut)} pieces of {size} tokens, too few for --pieces {pieces}")
    return cut


def _run(tuned: Pieces, checked: Pieces, names: Sequence[str], channels: Sequence[str], target: Target) -> Outcome:
    """Choose a method on the one set of pieces, and check it on the other; every trial is a line on stderr."""
    from ..eval.tune import tune as search

    with output.progress_bar() as bar:
        task = bar.add_task(f"reads {len(tuned.pieces)} prompts", total=None)

        def show(method: Method, trial: Trial | None) -> None:
            """Show what is tried, and what came of it."""
            if trial is None:
                bar.update(task, description=repr(method))
            else:
                line = f"{method}: {trial.share:.1%} of dense's bytes, {_value(trial, target)}"
                bar.console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)
                bar.advance(task)

        chosen, trials = search(tuned, names, channels, target.bound, show)
        check = None
        if chosen is not None and checked.pieces:
            bar.update(task, description="on other pieces")
            check = checked.trial(chosen.method)
    return Outcome(chosen, check, trials)


def _draw(outcome: Outcome, target: Target, setting: str, path: Path) -> None:
    from ..eval import figures
    from ..eval.panels import label

    points = [(label(repr(t.method)), t.share, t.value, t.low, t.high) for t in outcome.trials]
    chosen = outcome.chosen and (repr(outcome.chosen.method), outcome.chosen.share, outcome.chosen.value)
    figures.tuning(points, target.bound, chosen, setting, path, from_dense=target.is_kl)


def _nearest(trials: Sequence[Trial], target: Target) -> str:
    """What to say where nothing that moves fewer bytes than dense attention stays within the target."""
    cheaper = [t for t in trials if t.share < 1]
    if not cheaper:
        return "no method moves fewer bytes than dense at this length: give a longer --prompt"
    best = min(cheaper, key=lambda t: t.value)
    bound = f"{target} of mean KL from dense" if target.is_kl else f"{target} of dense's loss"
    return (
        f"none of {len(cheaper)} settings stays within {bound}; the nearest is {best.method}, "
        f"{target.write(best.value)} with {best.share:.1%} of its bytes"
    )


def _print_table(outcome: Outcome, title: str, target: Target) -> None:
    """Print what was tried, cheapest first, and the chosen method."""
    columns = ["mean KL, nats", "99th percentile", "maximum", "same top token"]
    if not target.is_kl:
        columns = ["loss", "95% interval"]
    table = output.table(title, "method", "of dense's bytes", *columns, f"within {target}")
    chosen = outcome.chosen
    assert chosen is not None
    for t in sorted(outcome.trials, key=lambda t: t.bytes):
        mark = "chosen" if t.method == chosen.method else "yes" if t.value <= target.bound else ""
        cells = [f"{t.value:+.2%}", "" if t.low is None else f"{t.low:+.2%} … {t.high:+.2%}"]
        if target.is_kl:
            cells = [f"{t.value:.3g}", f"{t.tail.kl_p99:.3g}", f"{t.tail.kl_max:.3g}", f"{t.tail.agreement:.1%}"]
        table.add_row(repr(t.method), f"{t.share:.1%}", *cells, mark)
    output.print_table(table, 130 if target.is_kl else 110)
    console = output.console(110)
    what = "mean KL" if target.is_kl else "loss"
    sentence = f"{chosen.method}: {chosen.share:.1%} of dense's bytes, {what} {_value(chosen, target)}."
    console.print(sentence, soft_wrap=True, markup=False)


def _value(trial: Trial, target: Target) -> str:
    """What the target bounds, with its interval if there is one."""
    ends = ""
    if trial.low is not None and trial.high is not None:
        ends = f" (95%: {target.write(trial.low)} … {target.write(trial.high)})"
    return f"{target.write(trial.value)}{ends}"


def _print_check(checked: Trial | None, pieces: int, target: Target) -> None:
    """Print how the chosen method does on the pieces on which nothing was chosen."""
    console = output.console(110)
    if checked is None:
        console.print("The text has no other pieces to check it on.")
        return
    verdict = "within the target" if checked.value <= target.bound else "beyond the target: tune on more pieces"
    console.print(f"On {pieces} other pieces: {_value(checked, target)}, {verdict}.")
