"""What the command line prints: the demo's table, and what this installation is."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__, ops
from ..methods import METHODS
from ..ops.gpu import backend as gpu

if TYPE_CHECKING:
    from ..eval.demo import Row


def wide(least: int) -> Console:
    """At least that wide where the output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(least, console.width))


def table(rows: Sequence[Row], missed: Sequence[str]) -> None:
    """The demo's rows; a line under each budget."""
    dense = rows[0].bytes_counted
    out = Table(title="one decode step, all layers", title_justify="left", title_style="dim")
    out.add_column("method", overflow="fold")
    for name in ("right", "of dense", "elements\npredicted", "\ncounted", "bytes\npredicted", "\ncounted"):
        out.add_column(name, justify="right")
    out.add_column("cache\nMB", justify="right")
    out.add_column("ms a\ntoken", justify="right")
    for i, row in enumerate(rows):
        out.add_row(
            repr(row.method), f"{row.correct}/{row.asked}", f"{row.bytes_counted / dense:.1%}",
            *(f"{x:,}" for x in (row.elements_predicted, row.elements_counted, row.bytes_predicted, row.bytes_counted)),
            f"{row.cache_bytes / 1e6:.2f}", f"{row.ms_per_token:.1f}",
            end_section=i + 1 == len(rows) or rows[i + 1].share != row.share,
        )  # fmt: skip
    console = wide(120)
    console.print(out)
    for line in missed:
        console.print(f"Left out: {line}.", style="dim")


def title(rows: Sequence[Row], setting: str) -> tuple[str, str]:
    """Two lines over the figure: what was found, and under which conditions."""
    dense = rows[0]
    below = (
        f"Bundled model; {setting}: no method knew the questions before.\n"
        "Solid: all tokens are held and a part is read. Dotted: the rest was dropped for good."
    )
    best: dict[str, float] = {}
    for row in rows[1:]:
        if row.correct >= 0.9 * dense.correct:
            name = type(row.method).__name__
            best[name] = min(best.get(name, 1.0), row.bytes_counted / dense.bytes_counted)
    if not best:
        return "At these budgets no method keeps dense attention's answers", below
    name = min(best, key=lambda n: best[n])
    return f"{name} keeps at least 90% of dense attention's answers with {best[name]:.0%} of its bytes", below


def facts() -> dict[str, Any]:
    """Versions, devices, backends (the chosen one per device, and why), and a line per method."""
    devices = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        devices[f"cuda:{i}"] = torch.cuda.get_device_name(i)
    backends = {}
    for device in dict.fromkeys(name.split(":")[0] for name in devices):
        name, why = ops.chosen(device)
        backends[device] = {"backend": name, "why": why}
    kernels = gpu.unavailable() or "Triton, wherever a cache is on a CUDA device"
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    versions = {"skimkv": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    methods = []
    for name, method in METHODS.items():
        module = inspect.getmodule(method)
        signature = str(inspect.signature(method)).split(" -> ")[0]
        methods.append({
            "name": name, "file": f"methods/{method.__module__.rsplit('.', 1)[1]}.py",
            "arguments": "".join(c for c in signature if c not in "'\""),
            "paper": (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " "),
            "store": str(inspect.signature(method.store).return_annotation),
            "reads": (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " "),
        })  # fmt: skip
    return {
        "versions": versions, "devices": devices, "backends": backends, "gpu_kernels": kernels, "methods": methods,
    }  # fmt: skip


def info(facts: dict[str, Any]) -> None:
    """The facts, for a person."""
    console = wide(120)
    console.print("  ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    for name, what in facts["devices"].items():
        console.print(f"device {name}: {what}")
    for name, chosen in facts["backends"].items():
        console.print(f"backend on {name}: {chosen['backend']} ({chosen['why']})")
    console.print(f"GPU kernels: {facts['gpu_kernels']}")
    out = Table(show_lines=True)
    for column in ("method", "file", "paper", "what it reads", "store"):
        out.add_column(column, overflow="fold")
    for m in facts["methods"]:
        out.add_row(m["name"] + m["arguments"], m["file"], m["paper"], m["reads"], m["store"])
    console.print(out)
