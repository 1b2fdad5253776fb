"""`skimkv info`: what this installation is, and which methods it knows."""

from __future__ import annotations

from typing import Any

from rich.padding import Padding
from rich.text import Text

from . import output
from .options import Json


def info(as_json: Json = False) -> None:
    """List versions, devices, the backend of each device, and all methods.

    Example:

        skimkv info --json
    """
    facts = collect()
    if as_json:
        output.print_json(facts)
    else:
        _print(facts)


def collect() -> dict[str, Any]:
    """Collect versions, devices, the backend of each device with the reason, and an entry for every method."""
    import importlib.metadata
    import platform

    import torch

    from .. import __version__, ops
    from ..methods import METHODS
    from ..ops.gpu import backend as gpu

    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    versions = {"skimkv": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    devices = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        devices[f"cuda:{i}"] = torch.cuda.get_device_name(i)
    backends = {}
    for device in dict.fromkeys(name.split(":")[0] for name in devices):
        name, why = ops.chosen(device)
        backends[device] = {"backend": name, "why": why}
    kernels = gpu.unavailable() or "Triton, wherever a cache is on a CUDA device"
    methods = [describe(name, method) for name, method in METHODS.items()]
    return {
        "versions": versions, "devices": devices, "backends": backends, "gpu_kernels": kernels, "methods": methods,
    }  # fmt: skip


def describe(name: str, method: Any) -> dict[str, str]:
    """Return what a method class says about itself: its file, arguments, paper and store, and what it reads."""
    import inspect

    signature = inspect.signature(method)
    defaults = ("" if p.default is p.empty else f"={p.default!r}" for p in signature.parameters.values())
    return {
        "name": name,
        "spec": f"{name}({', '.join(map(str.__add__, signature.parameters, defaults))})",
        "file": f"methods/{method.__module__.rsplit('.', 1)[1]}.py",
        "arguments": "".join(c for c in str(signature).split(" -> ")[0] if c not in "'\""),
        "paper": _first_paragraph(inspect.getmodule(method)),
        "store": str(inspect.signature(method.store).return_annotation),
        "reads": _first_paragraph(method),
    }


def _first_paragraph(documented: Any) -> str:
    import inspect

    return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def _print(facts: dict[str, Any]) -> None:
    """Print the facts for a person."""
    console = output.console()
    console.print("  ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    for name, what in facts["devices"].items():
        console.print(f"device {name}: {what}", markup=False)
    for name, choice in facts["backends"].items():
        console.print(f"backend on {name}: {choice['backend']} ({choice['why']})", markup=False)
    console.print(f"GPU kernels: {facts['gpu_kernels']}", markup=False)
    for method in facts["methods"]:
        console.print()
        console.print(Text(method["spec"], "bold"))
        for line in (method["reads"], method["paper"], f"store {method['store']}, in {method['file']}"):
            console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))
