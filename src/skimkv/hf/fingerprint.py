"""A digest of everything about a model that its answers depend on, by which records of another one are told apart."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .load import check_source

READ_AT_ONCE = 1 << 24  # bytes of a file
ENDS = 32  # numbers at each end of a tensor
# Fields of a configuration that change no number.
HARMLESS = {
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "model_type", "_attn_implementation",
    "attn_implementation", "_attn_implementation_autoset", "torch_dtype", "dtype", "use_cache", "auto_map",
}  # fmt: skip


def of_model(model: Any, tokenizer: Any, source: str | Path | None = None) -> str:
    """Return a digest of the model's weights, of what it computes with them, and of its tokenizer: 16 letters.

    Weights are taken byte by byte. source: what `load` was given. Files that it names are read in the place of the
    tensors; the digest of a file is remembered by its size, times and inode, so that it is read once. The number format
    that the weights were loaded in does not count: a record says it itself.
    """
    digest = hashlib.sha256()
    for part in (_weights(model, source), _arithmetic(model), _of_tokenizer(tokenizer)):
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()[:16]


def of_numbers(model: Any) -> str:
    """Return a digest of what a model computes and of the first and the last numbers of each of its weights.

    It takes no time: no file is read. Models of two trainings differ in some of these numbers.
    """
    digest = hashlib.sha256(_arithmetic(model).encode())
    for name, x in model.state_dict().items():
        if isinstance(x, Tensor) and x.numel():
            flat = x.detach().flatten()
            ends: Any = torch.cat([flat[:ENDS], flat[-ENDS:]]).cpu().view(torch.uint8).numpy()
            digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
            digest.update(ends)
    return digest.hexdigest()[:16]


def _weights(model: Any, source: str | Path | None) -> str:
    """The digests of the files of weights; of the tensors themselves where they came from elsewhere."""
    if files := _files(model, source):
        return " ".join(file_digest(file) for file in files)
    digest = hashlib.sha256()
    for name, x in model.state_dict().items():
        if isinstance(x, Tensor):
            digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
            numbers: Any = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(numbers)
    return digest.hexdigest()


def _files(model: Any, source: str | Path | None) -> list[Path]:
    """The files that hold the weights of what `load` was given, sorted; none if they are not known."""
    if source is None:
        return []
    kind, location, _ = check_source(source)
    if kind == "gguf":
        return [Path(location)]
    if kind == "folder":
        return sorted(Path(location).glob("*.safetensors"))
    from huggingface_hub import scan_cache_dir

    commit = getattr(model.config, "_commit_hash", None)
    for repository in scan_cache_dir().repos if commit else ():
        for revision in repository.revisions:
            if repository.repo_id == location and revision.commit_hash == commit:
                return sorted(revision.snapshot_path.glob("*.safetensors"))
    return []


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, which is remembered in the user's cache by the file's size, times and inode."""
    status = path.stat()
    identity = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memory, key, known = _memory(), str(path.resolve()), dict[str, Any]()
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(memory.read_text(encoding="utf-8"))
    remembered = known.get(key) if isinstance(known, dict) else None
    if isinstance(remembered, dict) and remembered.get("identity") == identity:
        return str(remembered["sha256"])
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(READ_AT_ONCE):
            digest.update(block)
    found = digest.hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        memory.parent.mkdir(parents=True, exist_ok=True)
        new = memory.with_name(f"{memory.name}.{os.getpid()}")
        new.write_text(json.dumps({**known, key: {"identity": identity, "sha256": found}}), encoding="utf-8")
        new.replace(memory)
    return found


def _memory() -> Path:
    """The file in which digests are remembered."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skimkv" / "digests.json"


def _arithmetic(model: Any) -> str:
    """What the model computes with its weights, and which tokens end its answers."""
    config = _without_harmless(model.config.to_dict())
    ends = getattr(model.generation_config, "eos_token_id", None)
    return json.dumps([type(model).__name__, config, ends], sort_keys=True, default=str)


def _without_harmless(value: Any) -> Any:
    """The configuration without fields that change no number, at any depth."""
    if isinstance(value, dict):
        return {str(name): _without_harmless(part) for name, part in value.items() if name not in HARMLESS}
    return value


def _of_tokenizer(tokenizer: Any) -> str:
    """Everything by which the tokenizer turns a text into tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    table = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    added = [getattr(tokenizer, name, None) for name in ("add_bos_token", "add_prefix_space", "chat_template")]
    return json.dumps([type(tokenizer).__name__, table, tokenizer.special_tokens_map, added], default=str)
