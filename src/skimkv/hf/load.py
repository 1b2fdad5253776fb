"""Find a model and load it: the builtin one, a folder, a GGUF file, or an id of the Hugging Face hub.

Weights are read from safetensors and GGUF files only. Every failure is a ValueError of one line. Importing this module
imports neither torch nor transformers, and `check_source` needs neither: what is wrong with a name is reported before
anything heavy is imported.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import as_value_error, first_sentence

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    DeviceMap = str | int | torch.device | dict[str, str | int | torch.device]

BUILTIN = Path(__file__).parent.parent / "models" / "tiny"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Names of number formats -> PyTorch's name.
DTYPES = {
    "float32": "float32", "fp32": "float32", "float": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16",
    "float64": "float64", "fp64": "float64", "double": "float64",
}  # fmt: skip
# Names in config.json of the number of layers, each of which has a tensor of its own in the checkpoint.
LAYER_COUNTS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers"}
# Names of other counts of parts, and how many no model has.
MOST_PARTS = {"num_labels": 10**6, "num_experts": 10**4, "num_local_experts": 10**4, "n_routed_experts": 10**4}
DEVICES = "cpu, cuda (cuda:1 is the second GPU) or mps"
PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")  # device_map by a name that is no device
NUMBERS_PER_BYTE = 16  # of a checkpoint, more than any format of quantised weights packs
FREE_NUMBERS = 2**26  # in buffers that are not stored, such as tables of positions
WEIGHTS = ("int8", "int4", "bfloat16", "float32")  # formats that matrices are given while they are read
HUB_TIMEOUT = 4.0  # seconds until the hub counts as out of reach


class Source(NamedTuple):
    """Where a model comes from. kind: "folder", "gguf" (a file) or "hub"; location: the path, or the id."""

    kind: str
    location: str
    only_cached: bool = False  # of the hub: take the files of an earlier download, without a request


def load(
    model: str | Path,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
    device: str | torch.device | None = None,
    device_map: DeviceMap | None = None,
    fast: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a model in eval mode, and its tokenizer.

    model: "builtin", a folder, a GGUF file, or a hub id such as "Qwen/Qwen3-0.6B".
    dtype: of weights, activations and cache, as torch.dtype or as a name: "float32", "bfloat16", "float16", "fp32",
    "bf16", "fp16", "half"; without `weights` and for no GGUF file "float64" too. None: the checkpoint's own, for a GGUF
    file bfloat16.
    weights: "int8" quantises matrices to Q8_0 while they are read, "int4" to Q4_0; no full-precision copy of the model
    exists. "bfloat16" and "float32" keep them as such numbers, whatever `dtype` is. None: the checkpoint's own, which a
    GGUF file always keeps.
    device: where the model runs: "cpu" (the default), "cuda", "cuda:1" or "mps". With `weights` it runs on a CPU only.
    device_map: the transformers library's way to place a model, such as "auto" for all GPUs; it needs accelerate.
    fast: on a CPU, decode steps multiply with kernels of ours, which read the weights at the memory's speed. False:
    with PyTorch's, whose sums have another order; not together with `weights` or a GGUF file.

    Raises ValueError, one line with the name and the reason, if an argument is wrong, if this machine has no such
    device, or if the model cannot be read completely.
    """
    if weights not in (None, *WEIGHTS):
        raise ValueError(f"unknown weights {weights!r}; known: {', '.join(WEIGHTS)}")
    if dtype is not None:
        dtype = check_dtype(str(dtype).removeprefix("torch."))
    if device is not None:
        check_device(device)
    if device_map is not None:
        if device is not None:
            raise ValueError(f"device={str(device)!r} and device_map={device_map!r}: give one of them")
        _check_device_map(device_map)
    source = check_source(model)
    check_formats(model, None if dtype is None else str(dtype), weights)
    if weights or source.kind == "gguf":
        what = source.location if source.kind == "gguf" else f'weights="{weights}"'
        _check_place(what, device, device_map)
        if not fast:
            raise ValueError(
                f"{what}: fast=False is not possible; only our layers multiply with weights of this format"
            )
    import torch

    place = None if device is None else resolve_device(device)
    for name in () if device_map is None else _devices(device_map):
        resolve_device(name)
    number_format: torch.dtype | None = None if dtype is None else getattr(torch, str(dtype))
    if source.kind == "gguf":
        from .gguf_model import load_gguf

        return load_gguf(source.location, number_format)
    if source.kind == "folder":
        check_counts(Path(source.location), _check_weights(Path(source.location)))
    network, tokenizer = _from_pretrained(source, number_format, trust_remote_code, weights, device_map)
    if weights is not None and getattr(torch, weights, None) == network.config.dtype:
        warnings.warn(
            f"weights={weights!r}: the numbers of {model} have this format already, and it is fast without it. Leave "
            "it out; the next release refuses it",
            DeprecationWarning, stacklevel=2,
        )  # fmt: skip
    if place is not None:
        torch.nn.Module.to(network, place)
    from .decode_step import replace_modules
    from .installation import FAST

    if not fast:
        network.__dict__[FAST] = False
    elif network.device.type == "cpu":
        replace_modules(network)
    return network, tokenizer


def check_dtype(name: str) -> str | None:
    """PyTorch's name of a number format: "bfloat16" for "bf16"; None for "auto". Raises ValueError for other names."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known are float32 (fp32), bfloat16 (bf16) and float16 (fp16, half)")
    return DTYPES[name]


def check_formats(model: str | Path, dtype: str | None, weights: str | None) -> None:
    """Raise ValueError for number formats that a model cannot be given; only its name is looked at.

    dtype: PyTorch's name. The message begins with the argument that is wrong.
    """
    if weights is not None and _is_gguf(model):
        raise ValueError(f"weights={weights!r}: {model} has formats of its own; leave it out")
    if dtype == "float64" and (weights is not None or _is_gguf(model)):
        what = model if weights is None else f"weights={weights!r}"
        raise ValueError(f"dtype={dtype!r} is not possible with {what}; write float32, bfloat16 or float16")


def check_device(device: object) -> None:
    """Raise ValueError unless this is written as a device that can run a model. Whether it is there is not asked."""
    if not re.fullmatch(r"cpu|mps(:0)?|cuda(:\d{1,2})?", str(device)):
        raise ValueError(f"device {str(device)!r} is unknown; write {DEVICES}")


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch.device of a name. Raises ValueError if the name is unknown, or if this machine has no such device."""
    check_device(device)
    import torch

    place = torch.device(device)
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {place}: PyTorch sees no Apple GPU here; write cpu")
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {place}: PyTorch sees no CUDA device here; write cpu")
        if place.index is not None and place.index >= (n := torch.cuda.device_count()):
            raise ValueError(f"device {place}: PyTorch sees only {n} CUDA devices here; write cuda:0 to cuda:{n - 1}")
    return place


def _check_device_map(device_map: object) -> None:
    """Raises ValueError for a device_map that cannot be meant, or where accelerate is missing."""
    for device in _devices(device_map):
        try:
            check_device(device)
        except ValueError:
            raise ValueError(
                f"device_map={device_map!r}: {device!r} is unknown; write {', '.join(PLACEMENTS)}, a device such as "
                "cuda:1 or its number, or a dictionary from the names of modules to devices"
            ) from None
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError(f"device_map={device_map!r} needs accelerate: pip install accelerate; for one GPU give device")


def _devices(device_map: object) -> list[str]:
    """The names of the devices in a device_map; a number is that of a GPU."""
    places: list[object] = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    others = ["disk"] if isinstance(device_map, dict) else PLACEMENTS
    return [f"cuda:{place}" if type(place) is int else str(place) for place in places if place not in others]


def _check_place(what: str, device: object, device_map: object) -> None:
    """Raises ValueError for quantised weights elsewhere than on a CPU, where nothing computes with them but slowly."""
    if device_map is not None:
        raise ValueError(f"{what}: device_map={device_map!r} is not possible; it runs on a CPU only")
    if str(device or "cpu") != "cpu":
        raise ValueError(f"{what}: device {str(device)!r} is not possible; it runs on a CPU only")


def check_source(model: str | Path) -> Source:
    """Find out what a model's name refers to, without torch and transformers, within about 5 seconds.

    Raises ValueError, one line with the name and what to do, if there is no such file or folder, if it holds no model
    that can be read, or if it is a hub id that is neither cached nor within reach.
    """
    name = str(model)
    if name == "builtin":
        return Source("folder", str(BUILTIN))
    path = Path(model).expanduser()
    if _is_gguf(model):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        return Source("gguf", str(path))
    if name and path.exists():
        _check_folder(path)
        return Source("folder", str(path))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name):
        raise ValueError(f"{name!r}: no such folder")
    return _check_hub(name)


def _is_gguf(model: str | Path) -> bool:
    """Whether the name of a model is that of a GGUF file, which need not be there."""
    return str(model).endswith(".gguf") and not Path(model).expanduser().is_dir()


def _check_folder(folder: Path) -> None:
    """Raises ValueError if the folder lacks a file that every model has; the files are not read."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a model folder; give the folder of a checkpoint, or a file *.gguf")
    if not any(folder.iterdir()):
        raise ValueError(f"{folder}: the folder is empty")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json; give the folder of a Hugging Face checkpoint")
    if not any(folder.glob("*.safetensors")):
        if any(next(folder.glob(pattern), None) for pattern in PICKLES):
            raise ValueError(f"{folder}: a pickle checkpoint, which can run code; only safetensors is read")
        raise ValueError(f"{folder}: no weights (*.safetensors)")


def _check_weights(folder: Path) -> int:
    """How many tensors the safetensors files hold, by their headers. Raises ValueError if a file is damaged."""
    from safetensors import SafetensorError, safe_open

    tensors = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                tensors += len(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: truncated or corrupt: {first_sentence(error)}") from None
    return tensors


def check_counts(folder: Path, tensors: int | None = None) -> None:
    """Raise ValueError if config.json is no JSON object, or has a count of parts that is negative or too large.

    tensors: how many the checkpoint has, and so the most layers that there can be; None where nobody has counted them.
    The library makes a part for each layer before it reads a weight, and would make two thousand million of them.
    """
    path = folder / "config.json"
    with as_value_error(f"{path}: not a configuration"):
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a configuration: it is no JSON object")
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for name, value in part.items():
            if not ((name in LAYER_COUNTS or name in MOST_PARTS) and isinstance(value, int | float)):
                continue
            if value < 0:
                raise ValueError(f"{path}: {name} = {value} must be at least 0")
            if tensors is not None and value > max(tensors, MOST_PARTS.get(name, tensors)):
                raise ValueError(f"{path}: {name} = {value} is too many; the checkpoint has {tensors} tensors")


def _check_size(folder: Path, trust_remote_code: bool) -> None:
    """Raises ValueError if config.json describes a model that is far larger than the folder's weights.

    The library would allocate it, and only then find that the weights do not fit. No memory is allocated here.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with as_value_error(f"{folder / 'config.json'}: not a configuration"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    if getattr(config, "auto_map", None):
        return  # code of the folder's own, which may not be made twice
    with as_value_error(f"{folder}: cannot load its model"), torch.device("meta"):
        auto_model: Any = AutoModelForCausalLM
        model = auto_model.from_config(config)
    numbers = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if numbers > NUMBERS_PER_BYTE * stored + FREE_NUMBERS:
        raise ValueError(
            f"{folder / 'config.json'}: it describes a model of {numbers:,} numbers, the weights have {stored:,} bytes"
        )


def _check_hub(model: str) -> Source:
    """Where the files of a hub id come from: the hub, or the cache of earlier downloads if the hub is out of reach.

    Raises ValueError if they come from nowhere: the transformers library would retry for most of a minute.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    is_cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    if constants.HF_HUB_OFFLINE:
        problem = "HF_HUB_OFFLINE forbids a download"
    else:
        reason = _hub_problem(model)
        if reason is None:
            return Source("hub", model)
        problem = f"{constants.ENDPOINT} cannot be reached ({reason})"
        if is_cached:
            warnings.warn(f"{model} is loaded from the cache of earlier downloads: {problem}", stacklevel=3)
    if is_cached:
        return Source("hub", model, only_cached=True)
    raise ValueError(
        f"{model}: there is no such folder, no cached model of this name, and {problem}; give the folder of a "
        "checkpoint or the name of a cached model, or allow the download (unset HF_HUB_OFFLINE, or set HF_ENDPOINT "
        "to a mirror that can be reached)"
    )


def _hub_problem(model: str) -> str | None:
    """Why the hub cannot be reached within HUB_TIMEOUT seconds; None if it can, and has this model.

    Raises ValueError if the hub answers that it has no such model, or none that can be read.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    answers: list[Any] = []

    def request() -> None:
        """Ask for the model, and keep the answer or the error."""
        try:
            answers.append(HfApi().model_info(model, timeout=HUB_TIMEOUT))
        except Exception as error:  # of whichever HTTP library this version of the hub's client uses
            answers.append(error)

    # a thread, as the look-up of a host name has no timeout of its own
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT + 0.5)
    if not answers:
        return f"no answer within {HUB_TIMEOUT:g} seconds"
    answer = answers[0]
    if isinstance(answer, GatedRepoError):
        raise ValueError(f"{model}: access is restricted; accept its terms on the hub and set HF_TOKEN") from answer
    if isinstance(answer, RepositoryNotFoundError):
        raise ValueError(
            f"{model}: there is no such folder, and the hub has no such model; a private model needs HF_TOKEN"
        ) from answer
    if isinstance(answer, Exception):
        return first_sentence(answer)
    files = [file.rfilename for file in answer.siblings or ()]
    if files and "config.json" not in files:
        raise ValueError(f"{model}: the hub's repository has no config.json; a GGUF file must be downloaded first")
    if files and not any(file.endswith(".safetensors") for file in files):
        raise ValueError(f"{model}: the hub's repository has no weights in safetensors; no other format is read")
    return None


def _layers_left_out(loaded: set[str], unexpected: Sequence[str]) -> str | None:
    """The first weight of a layer beyond the model's last one; None if there is none.

    The library only warns of weights that it does not use. Most are parts that a text model has no place for, such as
    an image encoder; a layer of the text model's own list is not: without it the answers are wrong.
    """
    numbered = re.compile(r"(.*?\.)(\d+)\.")
    layers = {match.groups() for key in loaded if (match := numbered.match(key))}  # (name of the list, number)
    lists = {name for name, _ in layers}
    for key in unexpected:
        match = numbered.match(key)
        if match and match[1] in lists and match.groups() not in layers:
            return key
    return None


def _from_pretrained(
    source: Source,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    weights: str | None,
    device_map: DeviceMap | None,
) -> tuple[PreTrainedModel, Any]:
    """Load with the transformers library, and raise ValueError for everything that it would only warn about."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = source.location
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": source.kind == "folder" or source.only_cached,
    }
    if source.kind == "folder":
        _check_size(Path(name), trust_remote_code)
    with as_value_error(f"{name}: cannot load its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    # sizes that differ are reported below by name, where the library would only say that there are some
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if device_map is not None:
        options["device_map"] = device_map
    if weights:
        from .weights import quantise_while_loading

        options |= quantise_while_loading(weights)
    with as_value_error(
        f"{name}: cannot load its model", lambda: getattr(options.get("quantization_config"), "error", None)
    ):
        result: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", **options)
    model, info = result
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{name}: the checkpoint lacks {len(missing)} weights, the first is {missing[0]}")
    if left_out := _layers_left_out(set(model.state_dict()), sorted(info["unexpected_keys"])):
        raise ValueError(f"{name}: config.json leaves out layers of the checkpoint, the first weight is {left_out}")
    for key, actual, expected in sorted(info["mismatched_keys"]):
        raise ValueError(f"{name}: {key} is {tuple(actual)}, by config.json it should be {tuple(expected)}")
    return model.eval(), tokenizer
