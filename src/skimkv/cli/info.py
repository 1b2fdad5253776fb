"""`skimkv info`: what this installation is, and which methods it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from . import output
from .options import Json

if TYPE_CHECKING:
    from ..methods.base import Method


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
    from ..methods import METHODS, load_announced_methods
    from ..ops.gpu import backend as gpu

    load_announced_methods()
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    versions = {"skimkv": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    devices = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        devices[f"cuda:{i}"] = torch.cuda.get_device_name(i)
    backends = {}
    for device in dict.fromkeys(name.split(":")[0] for name in devices):
        name, why = ops.select_backend(device)
        backends[device] = {"backend": name, "why": why}
    kernels = gpu.unavailable() or "Triton, wherever a cache is on a CUDA device"
    methods = [describe(name, method) for name, method in METHODS.items()]
    return {
        "versions": versions, "devices": devices, "backends": backends, "gpu_kernels": kernels, "methods": methods,
    }  # fmt: skip


def describe(name: str, method: type[Method]) -> dict[str, Any]:
    """Return what a method class says about itself: its paper, what it reads, its store and kernels."""
    import inspect

    signature = inspect.signature(method)
    defaults = ("" if p.default is p.empty else f"={p.default!r}" for p in signature.parameters.values())
    folder, _, module = method.__module__.rpartition(".")
    store = inspect.signature(method.store).return_annotation
    return {
        "name": name,
        "spec": f"{name}({', '.join(map(str.__add__, signature.parameters, defaults))})",
        "file": f"methods/{module}.py" if folder == "skimkv.methods" else method.__module__,
        "arguments": "".join(c for c in str(signature).split(" -> ")[0] if c not in "'\""),
        "paper": _first_paragraph(inspect.getmodule(method)),
        "store": getattr(store, "__name__", str(store)),
        "reads": _first_paragraph(method),
        "kernels": ["cpu", "gpu"] if method.has_kernel() else [],
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
        runs = f"kernels on {' and '.join(method['kernels'])}" if method["kernels"] else "reference on every device"
        for line in (method["reads"], method["paper"], f"{runs}; store {method['store']}; {method['file']}"):
            console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))
