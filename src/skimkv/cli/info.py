"""`skimkv info`: what this installation is, which methods it knows, and which models it decodes."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from . import options, output

if TYPE_CHECKING:
    from ..methods.base import Method


def info(
    models: Annotated[
        bool, typer.Option("--models", help="List the model families that are supported, and why others are refused.")
    ] = False,
    model: Annotated[
        str | None,
        options.model_option(
            "Say how many layers of this model a method decodes; its weights are not read. builtin, a folder, a "
            "GGUF file, or a Hugging Face id.",
            panel=None,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """List versions, devices, the backend of each device, and all methods; or model families; or look at one model.

    Example:

        skimkv info --model Qwen/Qwen3-0.6B
    """
    if models and model is not None:
        raise ValueError("give --models or --model, not both")
    if models:
        _list_families(as_json)
    elif model is not None:
        _describe_model(model, as_json)
    elif as_json:
        output.print_json(collect())
    else:
        _print(collect())


def _list_families(as_json: bool) -> None:
    """Print which model families are supported."""
    from ..hf import families

    installed = importlib.metadata.version("transformers")
    record = families.recorded()
    if as_json:
        kept = [family._asdict() for family in record.families]
        output.print_json({
            "transformers": record.transformers, "installed": installed, "counts": families.counts(record),
            "families": kept,
        })  # fmt: skip
        return
    console = output.console(min_width=160)
    for status, number in families.counts(record).items():
        if not number:
            continue
        console.print(Text(f"{families.HEADINGS[status]}: {number}", "bold"))
        for family in record.families:
            if family.status != status:
                continue
            share = f"{family.decoded} of {family.layers} layers" if status == families.PARTLY else ""
            remark = "; ".join(part for part in (share, families.remarks(family)) if part)
            console.print(
                Padding(Text(f"{family.name}: {remark}" if remark else family.name), (0, 0, 0, 4), expand=False)
            )
    print(f"Found with transformers {record.transformers}, on tiny random models.")
    if installed != record.transformers:
        print(f"This installation has transformers {installed}, whose models `skimkv info --model MODEL` looks at.")


def _describe_model(model: str, as_json: bool) -> None:
    """Print how many layers of a model a method decodes. Raises ValueError if the model is not supported."""
    options.quiet(model)
    from ..hf.structure import empty_model
    from ..hf.supported import describe_layers, model_layers

    network = empty_model(model)
    layers = model_layers(network)
    decoded, sentence = sum(layer.supported for layer in layers), describe_layers(layers)
    windows = [layer.window for layer in layers if layer.window is not None and not layer.supported]
    if windows and not decoded:  # where layers of both kinds are mixed, the same ones are decoded at any length
        sentence += f"; up to {min(windows)} tokens it decodes those that slide as well"
    if as_json:
        output.print_json({
            "model": model, "architecture": type(network).__name__, "layers": len(layers), "decoded": decoded,
            "window": min(windows, default=None), "summary": sentence,
        })  # fmt: skip
    else:
        print(f"{model} ({type(network).__name__}): {sentence}.")


def collect() -> dict[str, Any]:
    """Collect versions, devices, the backend of each device with the reason, and an entry for every method."""
    import torch

    from .. import __version__, ops
    from ..methods import METHODS, load_announced_methods

    load_announced_methods()
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    versions = {"skimkv": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    devices = {"cpu": f"{platform.machine()}, {output.number(torch.get_num_threads(), 'thread')}"}
    for i in range(torch.cuda.device_count()):
        devices[f"cuda:{i}"] = torch.cuda.get_device_name(i)
    backends = {}
    for device in dict.fromkeys(name.split(":")[0] for name in devices):
        name, why = ops.select_backend(device)
        backends[device] = {"backend": name, "why": why}
    kernels = ops.named_backend("gpu").unavailable() or "Triton, wherever a cache is on a CUDA device"
    methods = [describe(name, method) for name, method in METHODS.items()]
    return {
        "versions": versions, "devices": devices, "backends": backends, "gpu_kernels": kernels, "methods": methods,
    }  # fmt: skip


def describe(name: str, method: type[Method]) -> dict[str, Any]:
    """Return what a method class says about itself: its paper, what it reads, its store and kernels."""
    signature = inspect.signature(method)
    defaults = ("" if p.default is p.empty else f"={p.default!r}" for p in signature.parameters.values())
    arguments = map(str.__add__, signature.parameters, defaults)
    folder, _, module = method.__module__.rpartition(".")
    store = inspect.signature(method.store).return_annotation
    return {
        "name": name,
        "spec": f"{name}({', '.join(argument for argument in arguments if _takes(method, argument))})",
        "file": f"methods/{module}.py" if folder == "skimkv.methods" else method.__module__,
        "arguments": "".join(c for c in str(signature).split(" -> ")[0] if c not in "'\""),
        "paper": _first_paragraph(inspect.getmodule(method)),
        "store": getattr(store, "__name__", str(store)),
        "reads": _first_paragraph(method),
        "kernels": [kind for kind in ("cpu", "gpu") if _example(method).has_kernel(kind)],
    }


def _takes(method: type[Method], argument: str) -> bool:
    """Whether a method takes an argument that all have the field of: kv, which SubGenStream refuses."""
    try:
        return not argument.startswith("kv=") or bool(replace(_example(method), kv="int8"))
    except ValueError:
        return False


def _example(method: type[Method]) -> Method:
    """The method with 64 for every number that has no default."""
    parameters = inspect.signature(method).parameters.values()
    numbers: dict[str, Any] = {p.name: 64 for p in parameters if p.default is p.empty}
    return method(**numbers)


def _first_paragraph(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def _print(facts: dict[str, Any]) -> None:
    """Print the facts for a person."""
    console = output.console()
    versions = "  ".join(f"{name}\N{NO-BREAK SPACE}{version}" for name, version in facts["versions"].items())
    print(*textwrap.wrap(versions, console.width), sep="\n")
    for name, what in facts["devices"].items():
        console.print(f"device {name}: {what}", markup=False)
    for name, choice in facts["backends"].items():
        console.print(f"backend on {name}: {choice['backend']} ({choice['why']})", markup=False)
    console.print(f"GPU kernels: {facts['gpu_kernels']}", markup=False)
    for method in facts["methods"]:
        console.print()
        console.print(Text(method["spec"], "bold"))
        runs = f"kernels on {' and '.join(method['kernels'])}" if method["kernels"] else "reference on every device"
        for line in (method["reads"], method["paper"], f"{runs}; store {method['store']}; {method['file']}"):
            console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))
