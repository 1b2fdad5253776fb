"""The options that several commands share, and the checks that need neither torch nor transformers.

An option is a type here, so that a command only names it: `model: Model = "builtin"`. Its check runs while the
command line is parsed, before anything heavy is imported, and raises ValueError with one line that says what to do.
The console, the progress bar and `print_json` are in output.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import spec
from ..hf import load

if TYPE_CHECKING:
    import torch

# Headings of the groups of options in a command's --help: rich_help_panel of an option.
MODEL_OPTIONS = "Model options"
OUTPUT_OPTIONS = "Output options"

HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"
FIGURE_FORMATS = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")


def check_dtype(name: str) -> str:
    """Return PyTorch's name of a number format: "bfloat16" for "bf16". Raises ValueError if the name is unknown."""
    full_name = load.check_dtype(name)
    if full_name is None:
        raise ValueError(f"dtype {name!r} is only for a model that has one of its own; write for example bfloat16")
    return full_name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch.dtype of a name or short name. Raises ValueError if the name is unknown."""
    import torch

    dtype: torch.dtype = getattr(torch, check_dtype(name))
    return dtype


@contextlib.contextmanager
def named(prefix: str) -> Iterator[None]:
    """Put these words, the name of an option, in front of the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def resolve_device(device: str) -> torch.device:
    """Return the torch.device of a name. Raises ValueError if this machine has no such device."""
    with named("--"):
        return load.resolve_device(device)


def quiet(model: str) -> None:
    """Switch the Hub's progress bars off for a model on this disk. Call it before transformers is imported.

    A model that is downloaded keeps its bars.
    """
    if model == "builtin" or Path(model).expanduser().exists():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def check_environment() -> None:
    """Raise ValueError if SKIMKV_BACKEND or SKIMKV_ISA names something that this machine does not have.

    A command that decodes calls it before it loads a model. Without these variables nothing is imported.
    """
    if os.environ.get("SKIMKV_BACKEND"):
        from .. import ops

        ops.select_backend()
    if os.environ.get("SKIMKV_ISA"):
        from .. import ops

        if (reason := ops.named_backend("cpu").unavailable()) is not None:
            raise ValueError(reason)


def check_writable(option: str, path: Path, is_folder: bool = False) -> None:
    """Raise ValueError unless a file, or the files of a folder, can be written at `path`.

    option: its name for the message. A folder need not be there, but the one above it must be.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; create it first")
    if path.exists() and path.is_dir() != is_folder:
        found, wanted = ("file", "folder") if is_folder else ("folder", "file")
        raise ValueError(f"{option} {path}: this is a {found}; give the name of a {wanted}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {path}: no permission to write there")


def check_figure(option: str, path: Path) -> None:
    """Raise ValueError unless a figure can be written at `path`: the end of its name decides the format."""
    check_writable(option, path)
    if path.suffix and path.suffix.lower() not in FIGURE_FORMATS:
        raise ValueError(f"{option} {path}: a figure cannot be saved as {path.suffix}; take .png, .pdf or .svg")


def check_folder(option: str, path: Path) -> None:
    """Raise ValueError unless `path` is a folder that can be written to, or such a folder can be made there."""
    check_writable(option, path, is_folder=True)


def check_readable(option: str, path: Path) -> None:
    """Raise ValueError unless `path` is a file that can be read."""
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder; give the name of a file")
    if not path.exists():
        raise ValueError(f"{option} {path}: there is no such file")
    mode = path.stat().st_mode
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and path.resolve() != Path("/dev/null") and not _is_terminal(path)):
        raise ValueError(f"{option} {path}: this is a device, which may have no end; give the name of a file")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{option} {path}: no permission to read it")


def _is_terminal(path: Path) -> bool:
    """Whether a character device is a terminal, on which the user ends the text."""
    with open(path, "rb", buffering=0) as file:
        return file.isatty()


def check_exists(option: str, path: Path) -> None:
    """Raise ValueError unless there is a file or folder at `path`."""
    if not path.exists():
        raise ValueError(f"{option} {path}: there is no such file or folder")


def check_model(model: str, name: str = "--model ") -> None:
    """Raise ValueError if `model` names a file or folder that does not exist or is no model.

    An id of the Hugging Face hub is not looked up; `load` does that. name: begins the message.
    """
    is_local = Path(model).expanduser().exists() or model.endswith(".gguf")
    if is_local or not re.fullmatch(HUB_ID, model):
        with named(name):
            load.check_source(model)


def check_formats(model: str, dtype: str | None, weights: str | None = None) -> None:
    """Raise ValueError if a model cannot be given the formats of --dtype and --weights."""
    with named("--"):
        load.check_formats(model, dtype, weights)


def check_method(text: str) -> None:
    """Raise ValueError if the spec of a method has a mistake. PyTorch is not imported for it.

    Where the methods are imported already, their bounds are checked too, and registered methods are known.
    """
    methods: Any = sys.modules.get("skimkv.methods")
    (spec.check_method if methods is None else methods.parse)(text)


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def number_of_bytes(option: str, text: str) -> int:
    """Return the bytes that a size such as 500M or 1.5G stands for. Raises ValueError if it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    if found is None:
        raise ValueError(f"{option} {text!r} must be a number of bytes such as 500M or 2G")
    return int(float(found[1]) * UNITS[found[2]])


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Make the callback that typer calls with an option's value: it applies the check to it, or to each of several."""

    def callback(value: Any) -> Any:
        """Check every value that was given, and return them."""
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            check(one)
        return value

    return callback


def _dtype(value: str | None) -> str | None:
    return None if value is None else load.check_dtype(value)


def _check_weights(value: str) -> None:
    if value not in load.WEIGHTS:
        raise ValueError(f"--weights {value!r} is unknown; known are {', '.join(load.WEIGHTS)}")


def _check_device(value: str) -> None:
    with named("--"):
        load.check_device(value)


def _size(param: typer.CallbackParam, value: str | None) -> str | None:
    if value is not None:
        number_of_bytes(max(param.opts, key=len), value)
    return value


def _check_seed(value: int) -> None:
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"--seed {value} does not fit 64 bits; give a number from {-(2**63)} to {2**63 - 1}")


# Options whose help differs between commands. A command writes:
# out: Annotated[Path, path_option("--out", check_writable, "...")] = Path(..).


def path_option(
    option: str,
    check: Callable[[str, Path], None],
    help: str,
    panel: str | None = OUTPUT_OPTIONS,
    metavar: str = "FILE",
    default: str | bool = True,
) -> Any:
    """Make an option for a path; check(option, path) is one of the functions above. default: in words."""
    return typer.Option(
        option, help=help, metavar=metavar, callback=checked(partial(check, option)), rich_help_panel=panel,
        show_default=default,
    )  # fmt: skip


def seed_option(help: str, panel: str | None = None) -> Any:
    """Make the option for a random seed, which PyTorch's generators take as 64 bits."""
    return typer.Option("--seed", help=help, callback=checked(_check_seed), rich_help_panel=panel)


def size_option(help: str, panel: str | None = None, default: str | bool = True) -> Any:
    """Make an option for a number of bytes, which may be written as 500M or 2G; see `number_of_bytes`.

    default: what it is in words, where it depends on other options.
    """
    return typer.Option(metavar="BYTES", callback=_size, help=help, rich_help_panel=panel, show_default=default)


def methods_option(default: str | bool = True) -> Any:
    """Make the option for several methods; `default` says in words which are taken where none is given."""
    return typer.Option(
        "--method", metavar="SPEC", callback=checked(check_method), show_default=default,
        help="A method with its parameters, for example 'Skim(k=128)'. May be given several times.",
    )  # fmt: skip


def model_option(help: str, panel: str | None = MODEL_OPTIONS, default: str | bool = True) -> Any:
    """Make the option for a model; `default` says in words which one is taken where none is given."""
    return typer.Option(
        "--model",
        metavar="MODEL",
        callback=checked(check_model),
        show_default=default,
        help=help,
        rich_help_panel=panel,
    )


Model = Annotated[
    str, model_option("The model: builtin, a folder, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", callback=_dtype, rich_help_panel=MODEL_OPTIONS,
        show_default="the checkpoint's own",
        help="Number format of weights, activations and cache: float32, bfloat16 or float16.",
    ),
]  # fmt: skip
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights", metavar="FORMAT", callback=checked(_check_weights), rich_help_panel=MODEL_OPTIONS,
        help="int8 or int4: quantise the weights while they are loaded. bfloat16 or float32: convert them to this "
        "format. A GGUF file keeps its own formats and does not take this option.",
    ),
]  # fmt: skip
Fast = Annotated[
    bool,
    typer.Option(
        "--fast/--no-fast", rich_help_panel=MODEL_OPTIONS,
        help="On a CPU, compute the matrix products of a decode step with skimkv's kernels (--fast) or with "
        "PyTorch's (--no-fast).",
    ),
]  # fmt: skip
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", callback=checked(_check_device), rich_help_panel=MODEL_OPTIONS,
        help="The device to run on: cpu, cuda (cuda:1 is the second GPU) or mps.",
    ),
]  # fmt: skip
Method = Annotated[
    str,
    typer.Option(
        "--method", metavar="SPEC", callback=checked(check_method),
        help="The method with its parameters, such as 'Skim(k=128)'; `skimkv info` lists all methods.",
    ),
]  # fmt: skip
Methods = Annotated[list[str] | None, methods_option()]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Number of sequences that are decoded together.")]
Seed = Annotated[int, seed_option("Random seed; the same seed gives the same result.")]
Records = Annotated[
    Path,
    path_option(
        "--out", check_writable,
        "File of records (JSON Lines). New records are added; those it already holds are not computed again.",
    ),
]  # fmt: skip
ResumeAnyway = Annotated[
    bool,
    typer.Option(
        "--resume-anyway", rich_help_panel=OUTPUT_OPTIONS,
        help="Add to a file of records even if another version of skimkv, or another backend, has written it.",
    ),
]  # fmt: skip
Plot = Annotated[Path | None, path_option("--plot", check_figure, "Save a figure to this file (.png, .pdf or .svg).")]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object instead of text for people.", rich_help_panel=OUTPUT_OPTIONS),
]
