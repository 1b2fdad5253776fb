"""The options that several benchmarks share, and what they make of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...hf.load import DTYPES, WEIGHTS
from .. import options

if TYPE_CHECKING:
    from ...bench.machine import Machine
    from ...bench.models import Subject

METHODS = ["Dense()", "Skim(k=128)", "SparQ(r=16, k=256, channels='int4')", "SparQ(r=16, k=128)"]
LENGTHS = [4096, 16384]

Methods = Annotated[list[str] | None, options.methods_option("Dense, Skim and two kinds of SparQ")]
Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        min=1,
        metavar="TOKENS",
        show_default=" and ".join(map(str, LENGTHS)),
        help="Number of tokens in the cache. May be given several times.",
    ),
]
CacheDtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        callback=options.check_dtype,
        rich_help_panel=options.MODEL_OPTIONS,
        help="Number format of queries, keys and values: float32, bfloat16 or float16.",
    ),
]
HeadDim = Annotated[
    int, typer.Option("--head-dim", min=1, rich_help_panel=options.MODEL_OPTIONS, help="Number of channels of a head.")
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, help="How often everything is measured; the median of all rounds is shown.")
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        min=0,
        show_default="as PyTorch is set",
        help="Number of CPU threads; 0 leaves PyTorch's number as it is.",
    ),
]

ModelShape = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="NAME",
        rich_help_panel=options.MODEL_OPTIONS,
        help="The model whose shape is taken, such as llama-3-8b, qwen3-4b or smollm-135m.",
    ),
]
ModelLayers = Annotated[
    int,
    typer.Option(
        "--layers",
        min=0,
        rich_help_panel=options.MODEL_OPTIONS,
        help="Number of the model's layers to run; 0 runs all.",
    ),
]
RandomWeights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="FORMAT",
        rich_help_panel=options.MODEL_OPTIONS,
        help="Number format of the weights: int8 (on a CPU only), bfloat16 or float32.",
    ),
]


LoadedModel = Annotated[
    str | None,
    options.model_option(
        "A model with its own weights instead of random ones: builtin, a folder, a GGUF file, or a Hugging Face id. "
        "With it, --weights takes the same formats as in `skimkv generate`.",
        default="random weights",
    ),
]


def check_loaded(context: typer.Context, model: str, weights: str, device: str) -> str | None:
    """Return the format of weights that `load` is given; None: the model's own, where the option was not given.

    Raises ValueError if an option was given that belongs to random weights, or if it does not go with this model.
    """
    given = {
        option: getattr(context.get_parameter_source(option), "name", None) != "DEFAULT"
        for option in ("shape", "layers", "weights")
    }
    is_gguf = model.endswith(".gguf")
    what = "a GGUF file" if is_gguf else "a model that is loaded"
    for option in ("shape", "layers"):
        if given[option]:
            raise ValueError(f"--{option}: {what} has its own; give either --model or --{option}")
    options.check_formats(model, None, weights if given["weights"] else None)
    if is_gguf and not device.startswith("cpu"):
        raise ValueError(f"--model {model}: quantised weights run on a CPU only, not on --device {device}")
    formats = DTYPES.get(weights, weights) if given["weights"] else None
    if formats not in (None, *WEIGHTS):
        raise ValueError(f"--weights {weights!r} is unknown; with --model known are {', '.join(WEIGHTS)}")
    return formats


def subject_maker(
    context: typer.Context, model: str | None, shape: str, layers: int, weights: str, device: str
) -> Callable[[Machine, int], Subject]:
    """Check the options of the model that is timed, loaded or random; return what makes it, for so many positions."""
    own = check_weights(shape, weights) if model is None else check_loaded(context, model, weights, device)

    def make(machine: Machine, positions: int) -> Subject:
        """Make the subject that the options name, with room for this number of positions."""
        from ...bench.models import loaded_subject, random_subject

        if model is not None:
            options.quiet(model)
            return loaded_subject(model, own, machine.device)
        return random_subject(shape, layers or None, own or weights, positions, machine.device)

    return make


def name_for_people(model: str) -> str:
    """The name of a model in a title: of a file or a folder the last part of its path."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _check_length(text: str) -> None:
    prompt, _, new = text.partition("+")
    if not (prompt.isdecimal() and new.isdecimal() and int(prompt) and int(new)):
        raise ValueError(f"--length {text!r} must be tokens of a prompt + new tokens, such as 512+1024")


def pairs_of_tokens(lengths: Sequence[str]) -> list[tuple[int, int]]:
    """The tokens of a prompt and the new tokens, for each of these texts."""
    return [(int(prompt), int(new)) for prompt, _, new in (text.partition("+") for text in lengths)]


def lengths_option(default: Sequence[str]) -> Any:
    """Make the option for prompts and answers of several lengths."""
    return typer.Option(
        "--length", metavar="P+N", callback=options.checked(_check_length), show_default=" and ".join(default),
        help="Tokens of a prompt, and new tokens after it. May be given several times.",
    )  # fmt: skip


def check_weights(shape: str, weights: str) -> str:
    """Return PyTorch's name of a format of weights. Raises ValueError if it is unknown, or the model's shape is."""
    from ...bench.shapes import check_model

    weights = DTYPES.get(weights, weights)
    check_model(shape, weights)
    return weights


def canonical_methods(specs: Sequence[str]) -> list[str]:
    """Return the specs as methods print themselves. Raises ValueError if one is wrong."""
    from ...methods import parse

    return [repr(parse(spec)) for spec in specs]


def machine_to_measure(device: str, threads: int) -> Machine:
    """Set PyTorch's threads, and return the machine to measure. Raises ValueError if it is not there."""
    import torch

    from ...bench.machine import machine_for

    if threads:
        torch.set_num_threads(threads)
    if device.startswith("mps"):
        return machine_for(torch.device(device))  # which says what benchmarks run on
    return machine_for(options.resolve_device(device))


RIVALS = ("llama.cpp", "fork")


def check_program(text: str) -> None:
    """Check a program of --against, KIND=PATH. Raises ValueError for another kind, or a path that cannot be run."""
    kind, _, path = text.partition("=")
    if kind not in RIVALS or not path:
        raise ValueError(f"--against {text!r} must be llama.cpp=PATH or fork=PATH, the path of a llama-bench")
    if not Path(path).is_file() or not os.access(path, os.X_OK):
        raise ValueError(f"--against {text}: {path} is no program that can be run")
