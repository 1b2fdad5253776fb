"""`skimkv doctor`: whether this machine and a model will decode fast, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from . import options, output

if TYPE_CHECKING:
    from ..bench.doctor import Finding

MARKS = {"good": ("ok", "green"), "slow": ("slow", "yellow"), "bad": ("bad", "red")}


def doctor(
    model: Annotated[
        str | None,
        options.model_option(
            "Look at this model too; its weights are not read. builtin, a folder, a GGUF file, or a Hugging Face id."
        ),
    ] = None,
    weights: options.Weights = None,
    method: options.Method = "Skim(k=128)",
    length: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Number of tokens in the cache.")] = 8192,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Say in ten lines whether this processor, PyTorch and a model will be fast, and what to change.

    Nothing is compiled, and no weights are read. The speed of memory is measured in a second.

    Example:

        skimkv doctor --model llama.gguf --length 16384
    """
    if weights is not None and model is None:
        raise ValueError(f"--weights {weights} belongs to --model")
    if model is not None:
        options.check_formats(model, None, weights)
        options.quiet(model)
    from ..bench import doctor as checks
    from ..bench.machine import Cpu
    from ..methods import parse

    spec = parse(method)
    subject = None if model is None else checks.subject(model, weights)
    bandwidth = Cpu().best_bandwidth()
    findings = list(checks.machine_findings(bandwidth))
    if subject is not None:
        findings += checks.model_findings(subject, spec, length, bandwidth)
    if as_json:
        output.print_json({"model": model, "bytes_per_s": bandwidth, "checks": [one._asdict() for one in findings]})
    else:
        _print(findings)


def _print(findings: list[Finding]) -> None:
    """Print a line for each finding, and below it what to change."""
    console = output.console(min_width=120)
    for one in findings:
        mark, style = MARKS[one.status]
        line = Text.assemble((f"{mark:5}", style), (f"{one.check}: ", "bold"), one.found)
        if one.advice:
            line.append(f" -> {one.advice}")
        console.print(line)
