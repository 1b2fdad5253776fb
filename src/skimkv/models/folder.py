"""Folders in Hugging Face form, as far as training needs them: shape, weights, tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .network import Network
from .noise import BOS, EOS

SIZES = ("hidden_size", "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings")
HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def config(path: Path) -> SimpleNamespace:
    """What a config.json says. Raises ValueError unless it is a Llama that `Network` is."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no config.json can be read there ({error})") from None
    wanted = {"model_type": "llama", "tie_word_embeddings": True, "bos_token_id": BOS, "eos_token_id": EOS}
    for name, value in wanted.items():
        if held.get(name) != value:
            raise ValueError(f"{path}: {name} = {held.get(name)!r}, can train only {value!r}")
    for name in SIZES + HEADS:
        if not isinstance(held.get(name), int) or held[name] < 1:
            raise ValueError(f"{path}: {name} = {held.get(name)!r} must be a whole number of at least 1")
    if held["num_attention_heads"] % held["num_key_value_heads"] or held["head_dim"] % 2:
        raise ValueError(f"{path}: need whole groups of heads and an even head_dim")
    if held["vocab_size"] < 260:
        raise ValueError(f"{path}: vocab_size = {held['vocab_size']} must be at least 260, for every byte has a token")
    rope = held.get("rope_parameters") or {}
    if rope.get("rope_type") != "default" or not isinstance(rope.get("rope_theta"), (int, float)):
        raise ValueError(f"{path}: rope_parameters = {rope} must be of rope_type 'default' with a rope_theta")
    return SimpleNamespace(**held)


def fill(network: Network, folder: Path) -> None:
    """Take the weights of a model of the same shape."""
    path = folder / "model.safetensors"
    try:
        held = {name.removeprefix("model."): tensor.float() for name, tensor in load_file(path).items()}
        held.pop("lm_head.weight", None)  # it is the embedding
        network.load_state_dict(held)
    except Exception as error:
        raise ValueError(f"{path}: not the weights of this shape ({' '.join(str(error).split())[:200]})") from None


def tokenizer(texts: Sequence[str], size: int, folder: Path | None) -> Tokenizer:
    """That of the folder, or else a byte-level BPE made of the texts that splits digits one by one."""
    if folder is not None:
        try:
            found = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise ValueError(f"{folder}: no tokenizer.json can be read there ({error})") from None
        if found.get_vocab_size() > size:
            raise ValueError(f"{folder}: a tokenizer of {found.get_vocab_size()} entries, vocab_size = {size}")
        return found
    made = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), letters])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL.values()), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(texts, trainer)
    return made


def write(network: Network, shape: SimpleNamespace, words: Tokenizer, folder: Path) -> None:
    """The model in float16, whole at every moment: each file is replaced at once."""
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS, "do_sample": False}
    about = SPECIAL | {
        "pad_token": SPECIAL["eos_token"], "tokenizer_class": "PreTrainedTokenizerFast", "backend": "tokenizers",
        "model_max_length": shape.max_position_embeddings, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    texts: dict[str, Any] = {"config": vars(shape), "generation_config": ends, "tokenizer_config": about}
    for name, held in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")
    words.save(str(folder / "tokenizer.json"))
    half = {f"model.{name}": p.detach().to("cpu", torch.float16).contiguous() for name, p in network.named_parameters()}
    save_file(half, folder / "model.new", metadata={"format": "pt"})
    os.replace(folder / "model.new", folder / "model.safetensors")
