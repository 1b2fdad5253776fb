"""`skimkv analyse`: the papers' analyses of attention, on any model and text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..analysis import LEAST_TOKENS
from . import options, output

if TYPE_CHECKING:
    from rich.table import Table

TEXT_OPTIONS = "Text options"
ERROR_OPTIONS = "Error of the attention output"
LAYER_FORMS = {
    "top_mass": "{:.3f}", "tokens_of_90_percent": "{:.0f}", "kurtosis": "{:.1f}", "tail_mass": "{:.1f} ×",
    "sparsity": "{:.1%}",
}  # fmt: skip


def analyse(
    model: options.Model = "builtin",
    text: Annotated[
        Path | None,
        options.path_option(
            "--text",
            options.check_readable,
            "The text to read. Without it, the command makes up a record of keys and numbers.",
            TEXT_OPTIONS,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Length of each piece of the text in tokens, 128 or more.", rich_help_panel=TEXT_OPTIONS)
    ] = 1024,
    pieces: Annotated[
        int, typer.Option(min=1, help="The largest number of pieces to read.", rich_help_panel=TEXT_OPTIONS)
    ] = 4,
    queries: Annotated[
        int, typer.Option(min=1, help="Number of queries whose scores are used, in the second half of each piece.")
    ] = 16,
    clouds: Annotated[
        int, typer.Option(min=1, help="Number of layers of which one head's keys and values are drawn as points.")
    ] = 5,
    method: options.Methods = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            rich_help_panel=ERROR_OPTIONS,
            help="Number of tokens at the end of each piece that every --method decodes.",
        ),
    ] = 16,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic",
            rich_help_panel=ERROR_OPTIONS,
            help="Measure every --method on made-up heads of 32768 tokens too, from sharp to diffuse.",
        ),
    ] = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    out: Annotated[
        Path, options.path_option("--out", options.check_folder, "Save the figures in this folder.", metavar="FOLDER")
    ] = Path("skimkv-analysis"),
    as_json: options.Json = False,
) -> None:
    """Measure why reading a part of the cache is enough: scores, queries, heavy hitters and clusters, layer by layer.

    The command repeats the analyses of the SparQ, H2O and SubGen papers on your model and text. It prints three tables
    and saves four figures. It needs scikit-learn: pip install 'skimkv[analyse]'.

    With --method it also measures how far the output of a single attention head is from dense attention's, beside the
    bytes that the method reads, for sharp and for diffuse heads apart; this adds a table and a figure.

    Example:

        skimkv analyse --model Qwen/Qwen3-0.6B --text book.txt --out book-analysis
        skimkv analyse --method 'SparQ(r=16, k=64)' --method 'SparQ(r=16, k=256)' --synthetic
    """
    if synthetic and not method:
        raise ValueError("--synthetic measures methods; give at least one --method")
    if tokens < LEAST_TOKENS:
        raise ValueError(f"--tokens {tokens} must be at least {LEAST_TOKENS}")
    if method and steps >= tokens:
        raise ValueError(f"--steps {steps} must be below --tokens {tokens}")
    options.check_formats(model, dtype)
    if not all(map(importlib.util.find_spec, ("sklearn", "scipy"))):
        raise ValueError("skimkv analyse needs scikit-learn: pip install 'skimkv[analyse]'")
    options.check_environment()
    options.quiet(model)
    from ..analysis import figures, output_error
    from ..analysis.survey import count_layers, survey
    from ..eval.generate import encode_pieces
    from ..hf.load import load
    from ..methods import parse

    methods = [parse(text) for text in method or ()]
    place = options.resolve_device(device)
    words = _text(text, tokens, pieces, seed)
    network, tokenizer = load(model, dtype=dtype, device=place)
    ids = encode_pieces(tokenizer, words, tokens, pieces)
    if not ids:
        raise ValueError(f"{text}: the text has fewer than --tokens {tokens}")
    errors: list[output_error.OutputError] = []
    with output.progress_bar() as bar:
        layers = count_layers(network)
        rounds = len(methods) * (1 + synthetic)
        task = bar.add_task("", total=len(ids) * layers + 2 * min(clouds, layers) + rounds)
        findings = survey(
            network, ids, queries, clouds, seed, lambda what: bar.update(task, advance=1, description=what)
        )
        if methods:
            sources = [list(output_error.captured_heads(network, ids))]
            sources += [[output_error.synthetic_heads(steps, seed=seed)]] if synthetic else []
            for heads in sources:
                for error in output_error.measure(methods, heads, steps):
                    errors.append(error)
                    bar.update(task, advance=1, description="errors")
    out.mkdir(exist_ok=True)
    paths = [out / f"{name}.png" for name in ("sparq", "h2o", "subgen", "clusters")]
    figures.draw_sparq(findings, paths[0])
    figures.draw_h2o(findings, tokenizer, paths[1])
    figures.draw_subgen(findings, paths[2])
    figures.draw_clusters(findings, paths[3])
    if errors:
        paths.append(out / "output_error.png")
        figures.draw_output_error(errors, paths[-1])
    answer = {"model": model, "tokens": tokens, "pieces": len(ids), "queries": queries, **findings.json(tokenizer)}
    answer |= {"steps": steps, "output_error": [error.json() for error in errors]} if errors else {}
    if as_json:
        output.print_json({**answer, "figures": [str(path) for path in paths]})
        return
    console = output.console(110)
    console.print(_layers_table(answer), _agreement_table(answer), _other_table(answer), sep="\n")
    if errors:
        console.print(_error_table(answer))
    for row in answer.get("output_error", ()):
        if ends := row.get("predicted_score_error"):
            console.print(
                f"{row['method']}, {row['heads']} heads: the closed form of the index's score error is "
                f"{ends[1]:.2f} times what was measured (5th to 95th percentile {ends[0]:.2f} to {ends[2]:.2f}).",
                markup=False,
            )
    for path in paths:
        console.print(f"Figure: {path}", soft_wrap=True, markup=False)


def _text(path: Path | None, tokens: int, pieces: int, seed: int) -> str:
    """The file's text, or else made-up records that are enough for all pieces."""
    from ..eval.tasks import record, source

    if path is not None:
        return source.read_text(path)
    return "".join(part.context for part in record.records(pieces * (1 + tokens // 2000), 190, 1, seed))


def _layers_table(answer: dict[str, Any]) -> Table:
    """A line for each layer."""
    heads = len(answer["layers"][0]["top_mass"])
    pieces, of_heads = output.number(answer["pieces"], "piece"), output.number(heads, "head")
    table = output.table(
        f"{pieces} of {answer['tokens']} tokens; mean over {of_heads}, least … most",
        "layer", "mass of the top 32", "tokens with 90%", "kurtosis of q", "mass of q beyond 3σ",
        "scores under 1% of the most",
    )  # fmt: skip
    for row in answer["layers"]:
        table.add_row(str(row["layer"]), *(_mean_and_range(row[name], form) for name, form in LAYER_FORMS.items()))
    return table


def _agreement_table(answer: dict[str, Any]) -> Table:
    """A line for each way to choose channels, a column for each r, at the least k."""
    from ..analysis.survey import CHANNEL_CHOICES

    agreement = {(x["how"], x["r"], x["k"]): x["mean"] for x in answer["agreement"]}
    r, least_k = sorted({r for _, r, _ in agreement}), min(k for _, _, k in agreement)
    title = f"agreement on the top {least_k}, by channels read"
    table = output.table(title, "which channels", *(f"r = {channels}" for channels in r))
    for how in dict.fromkeys(how for how, _, _ in agreement):
        table.add_row(CHANNEL_CHOICES[how], *(f"{agreement[how, channels, least_k]:.3f}" for channels in r))
    return table


def _other_table(answer: dict[str, Any]) -> Table:
    """Alpha, correlation ratios, accumulated scores, and clusters: one line each."""
    from ..analysis.survey import DELTAS

    table = output.table("over all layers", "", "")
    table.show_header, table.columns[1].justify = False, "left"
    alpha, accumulated, heavy = answer["alpha"], answer["accumulated"], answer["heavy_hitters"]
    table.add_row(
        f"error of α by temperature; true α {alpha['true']:.3f}, r = {alpha['r']}, k = {alpha['k']}",
        ", ".join(f"{name} {error:.3f}" for name, error in alpha["off_by"].items()),
    )
    ratios = ", ".join(f"{axis} {ratio:.3f}" for axis, ratio in answer["correlation_ratio"].items())
    table.add_row("excess correlation ratio of V along", ratios)
    table.add_row(
        "exponent of accumulated scores by rank",
        f"{accumulated['exponent']:.2f} (R² {accumulated['r2']:.2f}); "
        f"the top 5% of tokens receive {accumulated['top_5_percent']:.0%}",
    )
    table.add_row(
        "rank correlation of accumulated score and a token's frequency",
        f"in all {heavy['spearman']:.2f}, per occurrence {heavy['spearman_per_occurrence']:.2f}",
    )
    for kind in ("keys", "values"):
        clusters = [cluster for cluster in answer["clusters"] if cluster["kind"] == kind]
        counts = [clusters[i :: len(DELTAS)] for i in range(len(DELTAS))]
        means = [sum(cluster["clusters"] for cluster in part) / len(part) for part in counts]
        shown = ", ".join(f"{share:g}: {mean:.0f}" for share, mean in zip(DELTAS, means, strict=True))
        table.add_row(f"clusters of {answer['tokens']} {kind}, by δ over the median distance", shown)
    return table


def _error_table(answer: dict[str, Any]) -> Table:
    """A line for each method and source of heads."""
    table = output.table(
        f"|y − dense| / mean |v| over the last {answer['steps']} steps: mean, and the 95th percentile",
        "heads", "method", "bytes", "all", "sharp", "diffuse",
    )  # fmt: skip
    table.columns[1].justify = "left"
    for row in answer["output_error"]:
        parts = [
            "–" if part is None else f"{part['mean']:.4f}  {part['p95']:.3f}"
            for part in (row, row["sharp"], row["diffuse"])
        ]
        table.add_row(row["heads"], row["method"], f"{row['share_of_dense']:.2%}", *parts)
    return table


def _mean_and_range(x: Sequence[float], form: str) -> str:
    return f"{form.format(sum(x) / len(x))}  {form.format(min(x))} … {form.format(max(x))}"
