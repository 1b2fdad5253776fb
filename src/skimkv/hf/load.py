"""Models from folders, the Hub, or the package; safetensors only, and every failure is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

BUILTIN = Path(__file__).parent.parent / "models" / "tiny"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(
    model: str | Path,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode, and its tokenizer: "builtin", a folder, a Hub id, or a GGUF file of Q8_0 weights.

    dtype: of weights, activations and cache; None: the checkpoint's own, for a GGUF file bfloat16.
    weights "int8": matrices are quantised to Q8_0 as they are read, and only these are kept.

    Raises ValueError, one line with the path and the reason, for whatever cannot be read whole.
    """
    name = str(model)
    folder = BUILTIN if name == "builtin" else Path(model).expanduser()
    local = name == "builtin" or (name != "" and folder.exists())
    number = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and not isinstance(number, torch.dtype):
        raise ValueError(f"unknown dtype {dtype!r}; for example float32 or bfloat16")
    if weights not in (None, "int8"):
        raise ValueError(f"unknown weights {weights!r}; known: int8")
    if name.endswith(".gguf") and not folder.is_dir():
        from .gguf_llama import load_gguf

        return load_gguf(folder, number)
    if local:
        _check_folder(folder)
    elif not name or name[0] in "./~" or name.count("/") > 1:
        raise ValueError(f"{name!r}: no such folder")
    source, what = str(folder) if local else name, "tokenizer"
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        what = "model"
        # sizes that differ are reported below by name, where the library would only say that there are some
        options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        if weights:
            from .weights import quantised

            options |= quantised()
        result: Any = AutoModelForCausalLM.from_pretrained(source, dtype=number or "auto", **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        reason = getattr(options.get("quantization_config"), "error", None) or _line(error)
        raise ValueError(f"{source}: cannot load its {what}: {reason}") from error
    loaded, info = result
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{source}: the checkpoint lacks {len(missing)} weights, the first is {missing[0]}")
    for key, held, wanted in sorted(info["mismatched_keys"]):
        raise ValueError(f"{source}: {key} is {tuple(held)}, by config.json it should be {tuple(wanted)}")
    return loaded.eval(), tokenizer


def _check_folder(folder: Path) -> None:
    """What a folder lacks, said before the library says it at length."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a model folder")
    if not any(folder.iterdir()):
        raise ValueError(f"{folder}: the folder is empty")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        if any(next(folder.glob(pattern), None) for pattern in PICKLES):
            raise ValueError(f"{folder}: a pickle checkpoint, which can run code; only safetensors is read")
        raise ValueError(f"{folder}: no weights (*.safetensors)")
    for path in weights:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: truncated or corrupt: {_line(error)}") from None


def _line(error: BaseException) -> str:
    """The first sentence of an error that may be a page long."""
    return " ".join(str(error).split()).split(". ")[0] or type(error).__name__
