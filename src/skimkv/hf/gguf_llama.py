"""Models of the Llama family from GGUF files: Llama, Mistral, Qwen2 and Qwen3.

Weights stay quantised. Q8_0 matrices are read in slabs, and packed at once; matrices of the other types that have
kernels are used as the file holds them, through a mapping. What has no kernel is dequantised in slabs, and packed as
8-bit weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ..ops import block_weights, matrices, packed_weights
from .decode_step import replace_modules
from .errors import as_value_error
from .gguf import FLOATS, GGUFFile, TensorEntry, check_types
from .matrix_modules import MatrixEmbedding, MatrixLinear, MatrixModule
from .weights import empty_packed, fill_packed

BIASES = {"attention": "attn_q", "mlp": "ffn_up"}  # parts that may have biases, and a tensor of each


class Architecture(NamedTuple):
    """What the files of an architecture have: the library's configuration, and whether rows of q and k are reordered.

    names: the architecture whose names of tensors the package gguf knows.
    """

    config: Callable[..., PretrainedConfig]
    is_reordered: bool
    names: gguf.MODEL_ARCH


ARCHITECTURES = {
    "llama": Architecture(LlamaConfig, True, gguf.MODEL_ARCH.LLAMA),
    "mistral": Architecture(MistralConfig, True, gguf.MODEL_ARCH.LLAMA),
    "qwen2": Architecture(Qwen2Config, False, gguf.MODEL_ARCH.QWEN2),
    "qwen3": Architecture(Qwen3Config, False, gguf.MODEL_ARCH.QWEN3),
}


def load_gguf(path: str | Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Any]:
    """Load a model in eval mode, and its tokenizer. dtype: of activations and cache, bfloat16 by default.

    A model in several files is named by its first one. Raises ValueError, one line with the path and the reason, for a
    file that is damaged, of an architecture that is not in ARCHITECTURES, or with a type that the package gguf does not
    dequantise. Blocks of other types than those of block_weights.TYPES become 8-bit weights, and a warning says so.
    """
    path = Path(path)
    model = load_gguf_model(path, dtype)
    with as_value_error(f"{path}: no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    return model, tokenizer


def load_gguf_model(path: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model as `load_gguf` does, without its tokenizer, which the file need not have then."""
    path, dtype = Path(path), dtype or torch.bfloat16
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with as_value_error(str(path)), GGUFFile(path) as file:
        _check_supported(file)
        model = _empty_model(_config(file.metadata, file.tensors), dtype)
        _read_weights(model, file)
        if converted := sorted({entry.quantisation for entry in file.tensors.values() if _becomes_int8(entry)}):
            warnings.warn(
                f"{path}: no kernel reads {', '.join(converted)}: matrices of these types are held in 8 bits",
                stacklevel=2,
            )
    nn.Module.eval(model.requires_grad_(False))
    return model


class Contents(NamedTuple):
    """What a GGUF file holds: the model's configuration, and what a decode step reads of its tensors.

    elements and nbytes: of all tensors, but not of an embedding table that is not the output layer too.
    matrices: the elements of the matrices among them, by type.
    """

    config: PretrainedConfig
    elements: int
    nbytes: int
    matrices: dict[str, int]

    @property
    def weights(self) -> str:
        """The types of the matrices, the most frequent one first, such as "Q4_K, Q6_K"."""
        return ", ".join(sorted(self.matrices, key=lambda name: -self.matrices[name]))


def read_contents(path: str | Path) -> Contents:
    """Read what a GGUF file says of its model, but no weights. Raises ValueError where `load_gguf` would for that."""
    with GGUFFile(Path(path)) as file:
        _check_supported(file)
        config, tied = _config(file.metadata, file.tensors), "output.weight" not in file.tensors
        entries = [entry for name, entry in file.tensors.items() if tied or name != "token_embd.weight"]
    matrices: dict[str, int] = {}
    for entry in entries:
        if len(entry.shape) == 2:
            matrices[entry.quantisation] = matrices.get(entry.quantisation, 0) + math.prod(entry.shape)
    elements, nbytes = sum(math.prod(entry.shape) for entry in entries), sum(entry.nbytes for entry in entries)
    return Contents(config, elements, nbytes, matrices)


def read_config(path: str | Path) -> PretrainedConfig:
    """The configuration of a GGUF file's model. Raises ValueError where `load_gguf` would for its metadata."""
    return read_contents(path).config


def _check_supported(file: GGUFFile) -> None:
    """Raises ValueError for an architecture that is not supported, or a tensor of a type that cannot be read."""
    if file.metadata.get("split.no", 0):
        raise ValueError(f"it is part {file.metadata['split.no'] + 1} of a model: give the first part")
    if (architecture := file.metadata.get("general.architecture")) not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are")
    check_types(file.tensors.values())


def _config(metadata: dict[str, Any], tensors: dict[str, TensorEntry]) -> PretrainedConfig:
    """The model's configuration. Raises ValueError for metadata that is missing, damaged or not supported."""
    name: str = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        """A value of the metadata, which must be the same in all layers."""
        value = metadata.get(f"{name}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{name}.{key} differs between layers, which is not supported: {value}")
            value = value[0]
        if value is None:
            raise ValueError(f"its metadata lacks {name}.{key}")
        return value

    def count(key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}.{key} = {value!r} must be a whole number of at least 1")
        return value

    heads, width = count("attention.head_count"), count("embedding_length")
    size = count("attention.key_length", width // heads)
    for key, expected in (("attention.value_length", size), ("rope.dimension_count", size), ("expert_count", 0)):
        if get(key, expected) != expected:
            raise ValueError(f"{name}.{key} = {get(key)} is not supported; only {expected} is")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get("rope.freq_base", 10000.0))}
    kind = get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(get("rope.scaling.factor"))}
    elif kind != "none":
        raise ValueError(f"{name}.rope.scaling.type = {kind!r} is not supported; only none and linear are")
    for needed in ("token_embd.weight", "blk.0.attn_q.weight"):
        if needed not in tensors:
            raise ValueError(f"{needed} is missing")
    # before a model of that size is made
    layers, stored_layers = count("block_count"), len({n.split(".")[1] for n in tensors if n.startswith("blk.")})
    if layers != stored_layers or tensors["blk.0.attn_q.weight"].shape[0] != heads * size:
        raise ValueError(
            f"the metadata say {layers} layers and {heads} x {size} heads; {stored_layers} layers are there"
        )
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    ends = sorted({end for end in ends if end is not None})
    more: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if name == "mistral":
        more["sliding_window"] = None
    config = ARCHITECTURES[name].config(
        vocab_size=tensors["token_embd.weight"].shape[0], hidden_size=width, head_dim=size,
        intermediate_size=count("feed_forward_length"), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=count("attention.head_count_kv", heads), max_position_embeddings=count("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"), rope_parameters=rope,
        tie_word_embeddings="output.weight" not in tensors, bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        **more, eos_token_id=ends or None, pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
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


def _empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its weights; only the rotary embedding, which no file contains, is made."""
    auto_model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = auto_model.from_config(config)
        nn.Module.to(model, dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    replace_modules(model)
    model.config.dtype = dtype
    model.generation_config = GenerationConfig.from_model_config(config)
    return model  # type: ignore[no-any-return]


def _read_weights(model: PreTrainedModel, file: GGUFFile) -> None:
    """Read every tensor to its place. Raises ValueError for a tensor too many, too few, or of another shape."""
    config: Any = model.config
    dtype: torch.dtype = config.dtype
    architecture = ARCHITECTURES[file.metadata["general.architecture"]]
    missing = dict(model.named_parameters())
    places = _places(missing, architecture, config.num_hidden_layers)
    for entry in file.tensors.values():
        if entry.name == "rope_freqs.weight":  # Llama 3.1 and later: how much slower each pair of channels turns
            rotary: Any = model.base_model.rotary_emb
            rotary.inv_freq = rotary.original_inv_freq = rotary.inv_freq / file.floats(entry)
            continue
        place = places.get(entry.name, "")
        if (expected := missing.pop(place, None)) is None:
            raise ValueError(f"{entry.name} has no place in this model")
        if expected.shape != entry.shape:
            raise ValueError(f"{entry.name} is {entry.shape}; the metadata say {tuple(expected.shape)}")
        module, _, parameter = place.rpartition(".")
        counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        heads = counts.get(module.split(".")[-1]) if architecture.is_reordered else None
        if entry.quantisation in FLOATS and parameter == "weight" and type(model.get_submodule(module)) is nn.Linear:
            _map_floats(model, file, entry, module, heads)
        elif entry.quantisation in FLOATS:
            value = file.floats(entry)
            value = value if heads is None else _unpermuted(value, heads)
            setattr(model.get_submodule(module), parameter, nn.Parameter(value.to(dtype), requires_grad=False))
        elif len(entry.shape) != 2:
            raise ValueError(f"{entry.name} is quantised, and no matrix")
        elif entry.quantisation == packed_weights.TYPE or _becomes_int8(entry):
            _read_packed(model, file, entry, module, heads)
        else:
            _map_blocks(model, file, entry, module, heads)
    if config.tie_word_embeddings:
        _tie_head(model, dtype)
        missing.pop("lm_head.weight", None)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, the first is {next(iter(missing))}")


def _places(parameters: dict[str, Any], architecture: Architecture, layers: int) -> dict[str, str]:
    """The parameter of the model for each name of a tensor in the file, by the package gguf's table of names."""
    names, places = gguf.get_tensor_name_map(architecture.names, layers), {}
    for parameter in parameters:
        module, _, kind = parameter.rpartition(".")
        if (name := names.get_name(module)) is not None:
            places[f"{name}.{kind}"] = parameter
    return places


def _tie_head(model: Any, dtype: torch.dtype) -> None:
    """Let the output layer share the weights of the embedding."""
    table = model.model.embed_tokens
    kind = table.kind if isinstance(table, MatrixModule) else matrices.FLOATS
    head = MatrixLinear(table.weight, kind, table.num_embeddings, table.embedding_dim, dtype)
    model.set_submodule("lm_head", head)
    model.lm_head.weight = table.weight


def _replace(
    model: PreTrainedModel, name: str, weight: Tensor, kind: str, entry: TensorEntry, order: Tensor | None = None
) -> None:
    """Put a module with a matrix of the file in the place of the module of that name, whose bias it keeps."""
    module: Any = model.get_submodule(name)
    dtype: Any = model.config.dtype
    rows, columns = entry.shape
    if isinstance(module, nn.Embedding):
        model.set_submodule(name, MatrixEmbedding(weight, kind, rows, columns, dtype))
    else:  # the bias is a tensor of its own, which is read before or after
        model.set_submodule(name, MatrixLinear(weight, kind, rows, columns, dtype, module.bias, order))


def _read_packed(model: PreTrainedModel, file: GGUFFile, entry: TensorEntry, name: str, heads: int | None) -> None:
    """Read a matrix into the 8-bit module that replaces the module of that name: Q8_0, or blocks without a kernel.

    heads: of a matrix whose rows stand in llama.cpp's order, else None.
    """
    rows, columns = entry.shape
    read, step = file.blocks(entry), packed_weights.ROWS
    if _becomes_int8(entry):
        read = partial(_requantised, file, entry)
    if heads is not None:
        read, step = _reordered(read, rows // heads), math.lcm(packed_weights.ROWS, rows // heads)
    packed = fill_packed(empty_packed(rows, columns), rows, read, step)
    _replace(model, name, packed, matrices.PACKED, entry)


def _map_floats(model: PreTrainedModel, file: GGUFFile, entry: TensorEntry, name: str, heads: int | None) -> None:
    """Map a matrix of floats into the module that replaces the linear layer of that name. heads: as in _read_packed.

    Rows in llama.cpp's order are copied.
    """
    weight = file.mapped_floats(entry)
    _replace(model, name, weight if heads is None else _unpermuted(weight, heads), matrices.FLOATS, entry)


def _map_blocks(model: PreTrainedModel, file: GGUFFile, entry: TensorEntry, name: str, heads: int | None) -> None:
    """Map a matrix of blocks into the module that replaces the module of that name. heads: as in _read_packed."""
    order = None
    if heads is not None:
        order = torch.empty(entry.shape[0], dtype=torch.int32)
        order[_unpermuted(torch.arange(entry.shape[0]), heads)] = torch.arange(entry.shape[0], dtype=torch.int32)
    _replace(model, name, file.rows(entry), entry.quantisation, entry, order)


def _becomes_int8(entry: TensorEntry) -> bool:
    """Whether a matrix is of blocks that no kernel multiplies."""
    return len(entry.shape) > 1 and entry.quantisation not in (*FLOATS, *block_weights.TYPES)


def _requantised(file: GGUFFile, entry: TensorEntry, first: int, last: int) -> Tensor:
    return packed_weights.quantise(file.floats(entry.rows(first, last - first)))


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
