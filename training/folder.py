"""Folders in Hugging Face's format, as far as training needs them: the shape, the weights and the tokenizer."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .network import Network
from .noise import BOS, EOS

SIZES = (
    "hidden_size", "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def read_config(path: Path) -> SimpleNamespace:
    """Read a config.json. Raises ValueError unless it is that of a Llama which `Network` can be."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no config.json can be read there ({error})") from None
    required = {"model_type": "llama", "tie_word_embeddings": True, "bos_token_id": BOS, "eos_token_id": EOS}
    for name, value in required.items():
        if config.get(name) != value:
            raise ValueError(f"{path}: {name} = {config.get(name)!r}, can train only {value!r}")
    for name in SIZES:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ValueError(f"{path}: {name} = {config.get(name)!r} must be a whole number of at least 1")
    if config["num_attention_heads"] % config["num_key_value_heads"] or config["head_dim"] % 2:
        raise ValueError(f"{path}: need whole groups of heads and an even head_dim")
    if config["vocab_size"] < 260:
        raise ValueError(f"{path}: vocab_size = {config['vocab_size']} must be at least 260: every byte has a token")
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "default" or not isinstance(rope.get("rope_theta"), (int, float)):
        raise ValueError(f"{path}: rope_parameters = {rope} must be of rope_type 'default' with a rope_theta")
    return SimpleNamespace(**config)


def load_weights(network: Network, folder: Path) -> None:
    """Load the weights of a model of the same shape into the network. Raises ValueError if they do not fit."""
    path = folder / "model.safetensors"
    try:
        weights = {name.removeprefix("model."): tensor.float() for name, tensor in load_file(path).items()}
        weights.pop("lm_head.weight", None)  # it is the embedding
        network.load_state_dict(weights)
    except Exception as error:
        raise ValueError(f"{path}: not the weights of this shape ({' '.join(str(error).split())[:200]})") from None


def load_tokenizer(folder: Path, size: int) -> Tokenizer:
    """Load the folder's tokenizer. Raises ValueError if there is none, or if it has more than `size` entries."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        raise ValueError(f"{folder}: no tokenizer.json can be read there ({error})") from None
    if tokenizer.get_vocab_size() > size:
        raise ValueError(f"{folder}: a tokenizer of {tokenizer.get_vocab_size()} entries, vocab_size = {size}")
    return tokenizer


def train_tokenizer(texts: Sequence[str], size: int) -> Tokenizer:
    """Make a byte-level BPE of `size` entries from the texts; it splits numbers into digits."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_model(network: Network, config: SimpleNamespace, tokenizer: Tokenizer, folder: Path) -> None:
    """Save the model in float16. Each file is replaced in one step, so that it is whole at every moment."""
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS, "do_sample": False}
    about_tokenizer = SPECIAL_TOKENS | {
        "pad_token": SPECIAL_TOKENS["eos_token"], "tokenizer_class": "PreTrainedTokenizerFast", "backend": "tokenizers",
        "model_max_length": config.max_position_embeddings, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    contents: dict[str, Any] = {
        "config": vars(config), "generation_config": generation, "tokenizer_config": about_tokenizer,
    }  # fmt: skip
    for name, content in contents.items():
        text = json.dumps(content, indent=2) + "\n"
        replace_file(folder / f"{name}.json", functools.partial(Path.write_text, data=text, encoding="utf-8"))
    replace_file(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    half = {f"model.{name}": p.detach().to("cpu", torch.float16).contiguous() for name, p in network.named_parameters()}
    replace_file(folder / "model.safetensors", lambda path: save_file(half, path, metadata={"format": "pt"}))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a temporary file in the same folder, and put that file in the place of `path`.

    Whoever reads `path` sees the old file or the new one, whole. If `write` fails, the old file stays, the temporary
    one is removed, and the exception is raised.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
