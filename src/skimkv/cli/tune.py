"""`skimkv tune`: the cheapest r, k and channels that keep a model's loss on a text within a bound."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .eval import place, quiet

if TYPE_CHECKING:
    from ..eval.tune import Loss, Tried


def tune(
    text: Annotated[Path, typer.Option(help="A text file, such as the model will see.")],
    model: Annotated[str, typer.Option(help="builtin, a folder, a GGUF file, or a Hugging Face id.")] = "builtin",
    target_loss: Annotated[str, typer.Option(help="The increase over dense that is allowed: 1%, or 0.01.")] = "1%",
    channels: Annotated[
        list[str] | None, typer.Option(help="Ways to store the channels: int4, int8, copy, none; may be repeated.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a piece that are read at once.")] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens after them that the method decodes.")] = 128,
    pieces: Annotated[int, typer.Option(help="Pieces of the text; as many again check the answer.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Pieces decoded at once.")] = 8,
    out: Annotated[Path, typer.Option(help="JSON Lines; what it holds already is not run again.")] = Path(
        "skimkv-tune.jsonl"
    ),
    plot: Annotated[Path | None, typer.Option(help="Save a figure here.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else the checkpoint's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Find the SparQ that moves the fewest bytes while the loss stays within the target. Ctrl-C and run again to go on.

    Every scored token is decoded by the method; a second set of pieces, on which nothing was chosen, checks it.
    """
    from ..methods.sparq import CHANNELS

    target = _share(target_loss)
    ways = list(dict.fromkeys(channels or ("int4", "int8", "copy")))
    for way in ways:
        if way not in CHANNELS:
            raise ValueError(f"--channels {way!r} is unknown; known: {', '.join(CHANNELS)}")
    for name, value, least in (("prompt", prompt, 32), ("scored", scored, 1), ("pieces", pieces, 2)):
        if value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    for name, path in (("out", out), ("plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name} {path}: there is no folder {path.parent}")
    if not text.is_file():
        raise ValueError(f"--text {text}: no such file")
    where = place(device)
    quiet(model)

    from ..analysis import statistics as analysis
    from ..eval import tune as tuning
    from ..eval.generate import encode
    from ..eval.results import Results
    from ..eval.tasks import source
    from ..hf.attach import check_length, load
    from ..methods import Dense

    words, size = source.text(text), prompt + scored + 1
    with Results(out) as results:
        network: Any
        network, tokenizer = load(model, dtype=dtype)
        network = network.to(where)
        check_length(network, size)
        ids = encode(tokenizer, words[: 64 * size * 2 * pieces], False)
        found = analysis.windows(ids, size, 2 * pieces, tokenizer.bos_token_id)
        if len(found) < pieces:
            raise ValueError(f"{text}: {len(ids)} tokens are too few for --pieces {pieces} of {size}")
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
        spec = f"tune(prompt={prompt}, scored={scored})"
        key = {"model": model, "dtype": str(network.dtype).removeprefix("torch."), "task": spec}
        one, two = (
            tuning.Scorer(network, tokenizer, part, prompt, results, {**key, "mode": f"{name} {digest}"}, batch)
            for name, part in (("tuned", found[:pieces]), ("checked", found[pieces:]))
        )
        console = Console(stderr=True)
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console,
                      transient=True) as bar:  # fmt: skip
            going = bar.add_task("")
            chosen, tried, dense = tuning.tune(one, ways, target, lambda what: bar.update(going, description=what))
            checked = None
            if chosen is not None and found[pieces:]:
                bar.update(going, description="on other pieces")
                checked = tuning.compare(chosen.method, two.loss(chosen.method), two.loss(Dense()))
    figure = None
    if plot is not None and tried:
        from ..eval import figures_tune as plots_tune

        plots_tune.tune([(t.method.channels, t.share, t.increase, t.stderr) for t in tried],  # type: ignore[attr-defined]
                        target, None if chosen is None else (repr(chosen.method), chosen.share, chosen.increase),
                        f"{model}, {text.name}, {prompt} tokens and {scored} after them", plot)  # fmt: skip
        figure = str(plot)
    if chosen is None:
        raise ValueError(_nearest(tried, target))
    if as_json:
        answer = {"model": model, "target": target, "dense_nats": sum(dense.nats) / len(dense.nats),
                  "dense_bytes": dense.bytes, "chosen": chosen.json(), "checked": checked and checked.json(),
                  "searched": [t.json() for t in tried], "out": str(out), "figure": figure}  # fmt: skip
        print(json.dumps(answer))
        return
    _show(chosen, checked, tried, dense, target, len(found) - pieces)
    if figure:
        print(f"Figure: {figure}")


def _share(given: str) -> float:
    try:
        value = float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise ValueError(f"--target-loss {given!r} must be a share from 0 to 1, such as 1% or 0.01")
    return value


def _nearest(tried: list[Tried], target: float) -> str:
    if not tried:
        return "no SparQ moves fewer bytes than dense at this length: give a longer --prompt"
    best = min(tried, key=lambda t: t.increase)
    return (
        f"none of {len(tried)} SparQ stays within {target:.3%} of dense's loss; the nearest is {best.method}, "
        f"{best.increase:+.3%} with {best.share:.1%} of its bytes"
    )


def _show(chosen: Tried, checked: Tried | None, tried: list[Tried], dense: Loss, target: float, others: int) -> None:
    """What was tried, cheapest first, and the answer."""
    from .show import wide

    nats = sum(dense.nats) / len(dense.nats)
    title = f"{len(dense.nats)} pieces; dense: {nats:.4f} nats a token, {dense.bytes:,} bytes a step"
    out = Table(title=title, title_style="dim", title_justify="left")
    out.add_column("method", min_width=40)
    for name in ("of dense's bytes", "loss", "±", f"within {100 * target:g}%"):
        out.add_column(name, justify="right")
    for t in sorted(tried, key=lambda t: t.bytes):
        mark = "chosen" if t.method == chosen.method else "yes" if t.increase <= target else ""
        out.add_row(repr(t.method), f"{t.share:.1%}", f"{t.increase:+.2%}", f"{t.stderr or 0:.2%}", mark)
    console = wide(110)
    console.print(out)
    spread = f" (95%: {chosen.low:+.2%} … {chosen.high:+.2%})" if chosen.low is not None else ""
    console.print(
        f"{chosen.method}: {chosen.share:.1%} of dense's bytes, loss {chosen.increase:+.2%}{spread}.",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    if checked is None:
        console.print("The text has no other pieces to check it on.")
    else:
        verdict = "within the target" if checked.increase <= target else "beyond the target: tune on more pieces"
        console.print(f"On {others} other pieces: {checked.increase:+.2%} ± {checked.stderr or 0:.2%}, {verdict}.")
