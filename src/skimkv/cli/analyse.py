"""`skimkv analyse`: the papers' analyses of attention, on any model and text."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .eval import place, quiet


def analyse(
    model: Annotated[str, typer.Option(help="builtin, a folder, a GGUF file, or a Hugging Face id.")] = "builtin",
    text: Annotated[Path | None, typer.Option(help="A text file; without it, records that are made up.")] = None,
    tokens: Annotated[int, typer.Option(help="Of each piece of the text.")] = 1024,
    pieces: Annotated[int, typer.Option(min=1, help="At most so many pieces.")] = 4,
    queries: Annotated[int, typer.Option(min=1, help="Of each piece, over its second half.")] = 16,
    clouds: Annotated[int, typer.Option(min=1, help="Layers of which one head's keys and values are drawn.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("skimkv-analysis"),
    seed: Annotated[int, typer.Option(help="Of the heads that are drawn as clouds.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else the checkpoint's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Why skimming works: sparse scores, heavy-tailed queries, heavy hitters, clustered keys, layer by layer."""
    for name in ("sklearn.manifold", "scipy.stats"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"skimkv analyse needs scikit-learn: pip install 'skimkv[analyse]' ({error})") from None
    quiet(model)
    from ..analysis import figures as plots_analysis
    from ..analysis import statistics as analysis
    from ..analysis import survey
    from ..eval.generate import encode
    from ..eval.tasks import record, source
    from ..hf.attach import load

    if tokens < survey.LEAST:
        raise ValueError(f"--tokens {tokens} must be at least {survey.LEAST}")
    if not out.absolute().parent.is_dir() or (out.exists() and not out.is_dir()):
        raise ValueError(f"--out {out}: not a folder, nor can one be made there")
    if text is not None and not text.is_file():
        raise ValueError(f"--text {text}: no such file")
    where = place(device)
    if text is None:
        parts = record.records(pieces * (1 + tokens // 2000), 190, 1, seed)
        words = "".join(part.context for part in parts)
    else:
        words = source.text(text)[: 64 * tokens * pieces]  # no token is so long on average
    network: Any
    network, tokenizer = load(model, dtype=dtype)
    network = network.to(where)
    found = analysis.windows(encode(tokenizer, words, False), tokens, pieces, tokenizer.bos_token_id)
    if not found:
        raise ValueError(f"{text}: it has fewer than --tokens {tokens}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        layers = survey.served(network)
        going = bar.add_task("", total=len(found) * layers + 2 * min(clouds, layers))

        def tick(what: str) -> None:
            bar.update(going, advance=1, description=what)

        findings = survey.survey(network, found, queries, clouds, seed, tick)
    out.mkdir(exist_ok=True)
    figures = [out / f"{name}.png" for name in ("sparq", "h2o", "subgen", "clusters")]
    plots_analysis.sparq(findings, figures[0])
    plots_analysis.h2o(findings, tokenizer, figures[1])
    plots_analysis.subgen(findings, figures[2])
    plots_analysis.clusters(findings, figures[3])
    answer = {"model": model, "tokens": tokens, "pieces": len(found), "queries": queries, **findings.json(tokenizer)}
    if as_json:
        print(json.dumps({**answer, "figures": [str(f) for f in figures]}))
        return
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=max(110, console.width))
    console.print(*_tables(answer), sep="\n")
    for figure in figures:
        console.print(f"Figure: {figure}", soft_wrap=True, markup=False)


def _tables(answer: dict[str, Any]) -> list[Table]:
    """For a person: layers, agreement, and the rest."""
    from ..analysis.survey import DELTAS, HOWS

    tokens, heads = answer["tokens"], len(answer["layers"][0]["top_mass"])
    title = f"{answer['pieces']} pieces of {tokens} tokens; mean over {heads} heads, least … most"
    layers = Table(title=title, title_style="dim", title_justify="left")
    for name in ("layer", "mass of the top 32", "kurtosis of q", "mass of q beyond 3σ", "scores under 1% of the most"):
        layers.add_column(name, justify="right")
    for row in answer["layers"]:
        layers.add_row(
            str(row["layer"]), _range(row["top_mass"], "{:.3f}"), _range(row["kurtosis"], "{:.1f}"),
            _range(row["tail_mass"], "{:.1f} ×"), _range([100 * x for x in row["sparsity"]], "{:.1f}%"),
        )  # fmt: skip
    found = {(x["how"], x["r"], x["k"]): x["mean"] for x in answer["agreement"]}
    rs, hows = sorted({r for _, r, _ in found}), list(dict.fromkeys(how for how, _, _ in found))
    k = min(k for _, _, k in found)
    agreement = Table(title=f"agreement on the top {k}, by channels read", title_style="dim", title_justify="left")
    agreement.add_column("which channels")
    for r in rs:
        agreement.add_column(f"r = {r}", justify="right")
    for how in hows:
        agreement.add_row(HOWS[how], *(f"{found[how, r, k]:.3f}" for r in rs))
    rest = Table(show_header=False, title="and", title_style="dim", title_justify="left")
    alpha, sums, heavy = answer["alpha"], answer["accumulated"], answer["heavy_hitters"]
    rest.add_row(
        f"α off its true {alpha['true']:.3f} by, r = {alpha['r']}, k = {alpha['k']}",
        ", ".join(f"{name} {x:.3f}" for name, x in alpha["off_by"].items()),
    )
    ratio = ", ".join(f"{name} {x:.3f}" for name, x in answer["correlation_ratio"].items())
    rest.add_row("excess correlation ratio of V along", ratio)
    law = f"{sums['exponent']:.2f} (R² {sums['r2']:.2f}); the top 5% of tokens receive {sums['top_5_percent']:.0%}"
    rest.add_row("accumulated score by rank, exponent", law)
    each = f"in all {heavy['spearman']:.2f}, per occurrence {heavy['spearman_per_occurrence']:.2f}"
    rest.add_row("its rank correlation with a token's frequency", each)
    for kind in ("keys", "values"):
        mine = [c for c in answer["clusters"] if c["kind"] == kind]
        size = len({(c["layer"], c["head"]) for c in mine})
        counts = [sum(c["clusters"] for c in mine[i :: len(DELTAS)]) / size for i in range(len(DELTAS))]
        shown = ", ".join(f"{share:g}: {count:.0f}" for share, count in zip(DELTAS, counts, strict=True))
        rest.add_row(f"clusters of {tokens} {kind}, by δ over the median distance", shown)
    return [layers, agreement, rest]


def _range(x: Sequence[float], form: str) -> str:
    return f"{form.format(sum(x) / len(x))}  {form.format(min(x))} … {form.format(max(x))}"
