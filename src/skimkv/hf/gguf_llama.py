"""A Llama from a GGUF file of Q8_0 weights. They stay in 8 bits: matrices are read in slabs, and packed at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from ..ops import packed_weights
from .errors import as_value_error
from .gguf import FLOATS, GGUFFile, TensorEntry
from .weights import Embedding8, Linear8, empty_packed, fill_packed

# llama.cpp's names of modules -> names in transformers.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(path: str | Path, dtype: torch.dtype | None = None) -> tuple[LlamaForCausalLM, Any]:
    """Load a model in eval mode, and its tokenizer. dtype: of activations and cache, bfloat16 by default.

    Raises ValueError, one line with the path and the reason, for a file that is damaged, of another architecture
    than llama, or quantised otherwise than in Q8_0.
    """
    path, dtype = Path(path), dtype or torch.bfloat16
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with as_value_error(str(path)), GGUFFile(path) as file:
        _check_supported(file)
        model = _empty_model(_config(file.metadata, file.tensors), dtype)
        _read_weights(model, file)
    with as_value_error(f"{path}: no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    nn.Module.eval(model.requires_grad_(False))
    return model, tokenizer


def read_config(path: str | Path) -> LlamaConfig:
    """The configuration of a GGUF file's model. Raises ValueError where `load_gguf` would for its metadata."""
    with GGUFFile(Path(path)) as file:
        _check_supported(file)
        return _config(file.metadata, file.tensors)


def _check_supported(file: GGUFFile) -> None:
    """Raises ValueError for another architecture than llama, or a tensor of a type that cannot be read."""
    if (architecture := file.metadata.get("general.architecture")) != "llama":
        raise ValueError(f"architecture {architecture!r} is not supported; only llama is")
    for entry in file.tensors.values():
        if entry.quantisation != "Q8_0" and entry.quantisation not in FLOATS:
            raise ValueError(
                f"{entry.name} is quantised as {entry.quantisation}; only Q8_0 (and F32, F16, BF16) is supported"
            )


def _config(metadata: dict[str, Any], tensors: dict[str, TensorEntry]) -> LlamaConfig:
    """The model's configuration. Raises ValueError for metadata that is missing, damaged or not supported."""

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"llama.{key} differs between layers, which is not supported: {value}")
            value = value[0]
        if value is None:
            raise ValueError(f"its metadata lacks llama.{key}")
        return value

    def count(key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"llama.{key} = {value!r} must be a whole number of at least 1")
        return value

    heads, width = count("attention.head_count"), count("embedding_length")
    size = count("attention.key_length", width // heads)
    for key, expected in (("attention.value_length", size), ("rope.dimension_count", size), ("expert_count", 0)):
        if get(key, expected) != expected:
            raise ValueError(f"llama.{key} = {get(key)} is not supported; only {expected} is")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get("rope.freq_base", 10000.0))}
    kind = get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(get("rope.scaling.factor"))}
    elif kind != "none":
        raise ValueError(f"llama.rope.scaling.type = {kind!r} is not supported; only none and linear are")
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in tensors:
            raise ValueError(f"{name} is missing")
    # before a model of that size is made
    layers, stored_layers = count("block_count"), len({n.split(".")[1] for n in tensors if n.startswith("blk.")})
    if layers != stored_layers or tensors["blk.0.attn_q.weight"].shape[0] != heads * size:
        raise ValueError(
            f"the metadata say {layers} layers and {heads} x {size} heads; {stored_layers} layers are there"
        )
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = sorted({end for end in ends if end is not None})
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0], hidden_size=width, head_dim=size,
        intermediate_size=count("feed_forward_length"), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=count("attention.head_count_kv", heads), max_position_embeddings=count("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"), rope_parameters=rope,
        tie_word_embeddings="output.weight" not in tensors, attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors, bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends or None, pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )  # fmt: skip
    _check_sizes(config, tensors)
    return config


def _check_sizes(config: Any, tensors: dict[str, TensorEntry]) -> None:
    """Raises ValueError if a size is not that of the tensors: before a model is made, which a wrong size could fill."""
    expected = {
        "token_embd": (config.vocab_size, config.hidden_size),
        "blk.0.attn_k": (config.num_key_value_heads * config.head_dim, config.hidden_size),
        "blk.0.ffn_gate": (config.intermediate_size, config.hidden_size),
    }
    for name, shape in expected.items():
        entry = tensors.get(f"{name}.weight")
        if entry is not None and entry.shape != shape:
            raise ValueError(f"{entry.name} is {entry.shape}; the metadata say {shape}")


def _empty_model(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model without its weights; only the rotary embedding, which no file contains, is made."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        nn.Module.to(model, dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.config.dtype = dtype
    model.generation_config = GenerationConfig.from_model_config(config)
    return model


def _read_weights(model: LlamaForCausalLM, file: GGUFFile) -> None:
    """Read every tensor to its place. Raises ValueError for a tensor too many, too few, or of another shape."""
    config: Any = model.config
    dtype: torch.dtype = config.dtype
    missing = dict(model.named_parameters())
    for entry in file.tensors.values():
        if entry.name == "rope_freqs.weight":  # Llama 3.1 and later: how much slower each pair of channels turns
            rotary: Any = model.model.rotary_emb
            rotary.inv_freq = rotary.original_inv_freq = rotary.inv_freq / file.floats(entry)
            continue
        module, parameter = _place(entry.name)
        if (expected := missing.pop(f"{module}.{parameter}", None)) is None:
            raise ValueError(f"{entry.name} has no place in this model")
        if expected.shape != entry.shape:
            raise ValueError(f"{entry.name} is {entry.shape}; the metadata say {tuple(expected.shape)}")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module.split(".")[-1])
        if entry.quantisation == "Q8_0":
            _read_packed(model, file, entry, module, heads)
        else:
            value = file.floats(entry)
            value = value if heads is None else _unpermuted(value, heads)
            setattr(model.get_submodule(module), parameter, nn.Parameter(value.to(dtype), requires_grad=False))
    if config.tie_word_embeddings:
        table: Any = model.model.embed_tokens
        missing.pop("lm_head.weight", None)
        if isinstance(table, Embedding8):
            head = Linear8(table.embedding_dim, table.num_embeddings, weight=table.weight, dtype=dtype)
            model.set_submodule("lm_head", head)
        model.lm_head.weight = table.weight
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, the first is {next(iter(missing))}")


def _place(name: str) -> tuple[str, str]:
    """The module and the parameter of a tensor of the file; two empty strings for a name that is not llama.cpp's."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        return "", ""
    return NAMES[match[2]] if match[1] is None else f"model.layers.{match[1]}.{NAMES[match[2]]}", match[3]


def _read_packed(model: LlamaForCausalLM, file: GGUFFile, entry: TensorEntry, name: str, heads: int | None) -> None:
    """Read a Q8_0 matrix and put the 8-bit module in the place of the module of that name.

    heads: of a matrix whose rows stand in llama.cpp's order, else None.
    """
    if len(entry.shape) != 2:
        raise ValueError(f"{entry.name} is quantised, and no matrix")
    rows, columns = entry.shape
    read, step = file.blocks(entry), packed_weights.ROWS
    if heads is not None:
        read, step = _reordered(read, rows // heads), math.lcm(packed_weights.ROWS, rows // heads)
    packed = fill_packed(empty_packed(rows, columns), rows, read, step)
    module: Any = model.get_submodule(name)
    dtype: Any = model.config.dtype
    if isinstance(module, nn.Embedding):
        model.set_submodule(name, Embedding8(rows, columns, packed, dtype))
    else:
        new = Linear8(columns, rows, weight=packed, dtype=dtype)
        new.bias = module.bias  # a tensor of its own, which is read before or after
        model.set_submodule(name, new)


def _reordered(read: Callable[[int, int], Tensor], size: int) -> Callable[[int, int], Tensor]:
    """The same rows in transformers' order; slabs are whole heads of `size` rows."""
    return lambda first, last: _unpermuted(read(first, last), (last - first) // size)


def _unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k.

    A rotation turns channels i and i + D/2 of a head together in transformers; in the file these are rows 2i and
    2i + 1 of the head.
    """
    result: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return result
