"""Models from GGUF files: how their tensors are held.

Weights stay quantised. Matrices of blocks that a kernel multiplies are used as the file holds them, through a mapping;
Q8_0 is read in slabs and packed at once; blocks of other types become 8-bit weights a slab at a time. What a tensor is,
and what its metadata mean, stands in gguf_names.py and gguf_config.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..ops import block_weights, matrices, packed_weights
from .decode_step import replace_modules
from .errors import as_value_error
from .expert_modules import Experts, combine_of
from .gguf import FLOATS, GGUFFile, TensorEntry, check_types
from .gguf_config import ARCHITECTURES, REFUSED, read_configuration
from .gguf_names import EXPERTS, Conversions, conversions_of
from .gguf_tokenizer import load_tokenizer
from .matrix_modules import MatrixEmbedding, MatrixLinear
from .weights import empty_packed, fill_packed

# Factors of the rotation, which are no parameters. Those of long contexts are part of the configuration.
ROTATION = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def load_gguf(path: str | Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Any]:
    """Load a model in eval mode, and its tokenizer. dtype: of activations and cache, bfloat16 by default.

    A model in several files is named by its first one. Raises ValueError, one line with the path and the reason, for a
    file that is damaged, of an architecture that is not in ARCHITECTURES, or with metadata that are not supported. So
    it does for a tokenizer with more tokens than the model has embeddings.
    """
    path = Path(path)
    model = load_gguf_model(path, dtype)
    tokenizer, rows = load_tokenizer(path), model.config.vocab_size
    if (tokens := len(tokenizer)) > rows:
        raise ValueError(f"{path}: its tokenizer has {tokens} tokens; token_embd.weight has only {rows} rows")
    return model, tokenizer


def load_gguf_model(path: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model as `load_gguf` does, without its tokenizer, which the file need not have then."""
    path, dtype = Path(path), dtype or torch.bfloat16
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with as_value_error(str(path)), GGUFFile(path) as file:
        _check_supported(file)
        model = _empty_model(read_configuration(file), dtype)
        _read_weights(model, file)
        if converted := sorted({entry.quantisation for entry in file.tensors.values() if becomes_int8(entry)}):
            warnings.warn(
                f"{path}: no kernel reads {', '.join(converted)}: matrices of these types are held in 8 bits",
                stacklevel=2,
            )
    nn.Module.eval(model.requires_grad_(False))
    return model


class Contents(NamedTuple):
    """What a GGUF file holds: the model's configuration, and what a decode step of one token reads of its tensors.

    elements and nbytes: of what is read: of experts as many as a token chooses, and nothing of an embedding table that
    is not the output layer too. held_bytes: of all tensors. matrices: the elements of the matrices by type, of all
    experts, but without such a table.
    """

    config: PretrainedConfig
    elements: int
    nbytes: int
    held_bytes: int
    matrices: dict[str, int]

    @property
    def weights(self) -> str:
        """The types of the matrices, the most frequent one first, such as "Q4_K, Q6_K"."""
        return ", ".join(sorted(self.matrices, key=lambda name: -self.matrices[name]))


def read_contents(path: str | Path) -> Contents:
    """Read what a GGUF file says of its model, but no weights. Raises ValueError where `load_gguf` would for that."""
    with GGUFFile(Path(path)) as file:
        _check_supported(file)
        config, tied = read_configuration(file), "output.weight" not in file.tensors
        entries = [entry for name, entry in file.tensors.items() if tied or name != "token_embd.weight"]
        held_bytes = sum(entry.nbytes for entry in file.tensors.values())
    matrices: dict[str, int] = {}
    elements = nbytes = 0
    for entry in entries:
        if len(entry.shape) > 1:
            matrices[entry.quantisation] = matrices.get(entry.quantisation, 0) + math.prod(entry.shape)
        read = entry
        if EXPERTS.fullmatch(entry.name):
            experts = entry.shape[0]
            read = entry.rows(0, min(experts, getattr(config, "num_experts_per_tok", experts)))
        elements, nbytes = elements + math.prod(read.shape), nbytes + read.nbytes
    return Contents(config, elements, nbytes, held_bytes, matrices)


def read_config(path: str | Path) -> PretrainedConfig:
    """The configuration of a GGUF file's model. Raises ValueError where `load_gguf` would for its metadata."""
    return read_contents(path).config


def _check_supported(file: GGUFFile) -> None:
    """Raises ValueError for an architecture that is not supported, or a tensor of a type that cannot be read."""
    if file.metadata.get("split.no", 0):
        raise ValueError(f"it is part {file.metadata['split.no'] + 1} of a model: give the first part")
    architecture = file.metadata.get("general.architecture")
    if architecture in REFUSED:
        raise ValueError(f"architecture {architecture!r} is not supported: {REFUSED[architecture]}")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are")
    check_types(file.tensors.values())


def _empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its weights; what no file contains, such as the rotary embedding, is made."""
    auto_model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = auto_model.from_config(config, dtype=dtype)
    for module in list(model.modules()):
        kept = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
        if module._buffers.keys() - kept:
            for name in module._buffers.keys() - kept:
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
            with torch.no_grad():
                model._init_weights(module)
    replace_modules(model)
    model.config.dtype = dtype
    model.generation_config = GenerationConfig.from_model_config(config)
    return model  # type: ignore[no-any-return]


def _read_weights(model: PreTrainedModel, file: GGUFFile) -> None:
    """Read every tensor to its place. Raises ValueError for a tensor too many, too few, or of another shape."""
    missing: dict[str, Any] = model.state_dict(keep_vars=True)
    conversions = conversions_of(file.metadata["general.architecture"], model.config, missing)
    experts: dict[int, dict[str, TensorEntry]] = {}
    for entry in file.tensors.values():
        if entry.name == "rope_freqs.weight":  # Llama 3.1 and later: how much slower each pair of channels turns
            rotary: Any = model.base_model.rotary_emb
            rotary.inv_freq = rotary.original_inv_freq = rotary.inv_freq / file.floats(entry)
        if entry.name in ROTATION:
            continue
        if match := EXPERTS.fullmatch(entry.name):
            experts.setdefault(int(match[1]), {})[f"{match[2]}.{match[3]}"] = entry
            continue
        place = conversions.parameter(entry.name) or ""
        if (expected := missing.pop(place, None)) is None:
            raise ValueError(f"{entry.name} has no place in this model")
        _read_tensor(model, file, entry, place, expected, conversions)
    for layer, tensors in experts.items():
        _read_experts(model, file, layer, tensors, missing)
    if model.config.tie_word_embeddings:
        _tie_head(model, missing)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, the first is {next(iter(missing))}")


def _read_tensor(
    model: PreTrainedModel, file: GGUFFile, entry: TensorEntry, place: str, expected: Tensor, conversions: Conversions
) -> None:
    """Read a tensor into the parameter or buffer at this place, or into a module of ours in its module's place."""
    name, _, parameter = place.rpartition(".")
    module: Any = model.get_submodule(name)
    is_table = isinstance(module, nn.Embedding)
    is_matrix = parameter == "weight" and len(entry.shape) == 2 and (is_table or type(module) in (nn.Linear, Conv1D))
    if not is_matrix or (is_table and entry.quantisation in FLOATS):
        value = conversions.values(entry.name, file.floats(entry))
        _check_shape(entry, value.shape, expected.shape)
        value = value.to(expected.dtype)
        if parameter in module._buffers:
            module._buffers[parameter] = value
        else:
            setattr(module, parameter, nn.Parameter(value, requires_grad=False))
        return
    rows, columns = expected.shape[::-1] if type(module) is Conv1D else expected.shape
    _check_shape(entry, entry.shape, (rows, columns))
    dtype: Any = model.config.dtype
    order, inputs = conversions.row_order(entry.name, rows), conversions.input_order(entry.name)
    if is_table:
        if order is not None:
            raise ValueError(f"{entry.name} has its rows in another order, which is not supported")
        table: nn.Module = MatrixEmbedding(*_held(file, entry), rows, columns, dtype)
        if type(module) is not nn.Embedding:
            table = ScaledEmbedding(table, module.scalar_embed_scale, dtype)
        model.set_submodule(name, table)
        return
    linear: nn.Module = _linear(file, entry, dtype, module.bias, order)
    model.set_submodule(name, linear if inputs is None else ReorderedLinear(linear, inputs))


def _check_shape(entry: TensorEntry, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{entry.name} is {tuple(shape)}; the metadata say {tuple(expected)}")


def _linear(
    file: GGUFFile, entry: TensorEntry, dtype: torch.dtype, bias: nn.Parameter | None, order: Tensor | None = None
) -> MatrixLinear:
    """A linear layer with the matrix of an entry. order: for each row of the model's matrix, its row in the file."""
    weight, kind = _held(file, entry, order)
    outputs = None
    if order is not None and kind in block_weights.TYPES:  # which stay in the file's order
        outputs = torch.empty(len(order), dtype=torch.int32)
        outputs[order] = torch.arange(len(order), dtype=torch.int32)
    rows, columns = entry.shape
    return MatrixLinear(weight, kind, rows, columns, dtype, bias, outputs)


def _held(file: GGUFFile, entry: TensorEntry, order: Tensor | None = None) -> tuple[Tensor, str]:
    """The tensor that holds a matrix, and its kind (ops/matrices.py). Blocks keep the file's order of rows."""
    if entry.quantisation in FLOATS:
        weight = file.mapped_floats(entry)
        return weight if order is None else weight[order], matrices.FLOATS
    if entry.quantisation in block_weights.TYPES and entry.quantisation != packed_weights.TYPE:
        return file.rows(entry), entry.quantisation
    return _packed(file, entry, order), matrices.PACKED


def becomes_int8(entry: TensorEntry) -> bool:
    """Whether a matrix is of blocks that no kernel multiplies."""
    known = (*FLOATS, packed_weights.TYPE, *block_weights.TYPES)
    return len(entry.shape) > 1 and entry.quantisation not in known


def _packed(file: GGUFFile, entry: TensorEntry, order: Tensor | None) -> Tensor:
    """Read a matrix as packed 8-bit weights. order: for each row of the model's matrix, its row in the file."""
    rows, columns = entry.shape
    read: Callable[[int, int], Tensor] = file.blocks(entry)
    if entry.quantisation != packed_weights.TYPE:
        read = partial(_requantised, file, entry)
    if order is None:
        return fill_packed(empty_packed(rows, columns), rows, read)
    wanted = order

    def read_ordered(first: int, last: int) -> Tensor:
        """Rows of the model's matrix, out of the file's rows from the first to the last of them."""
        these = wanted[first:last]
        start = int(these.min())
        return read(start, int(these.max()) + 1)[these - start]

    return fill_packed(empty_packed(rows, columns), rows, read_ordered)


def _requantised(file: GGUFFile, entry: TensorEntry, first: int, last: int) -> Tensor:
    return packed_weights.quantise(file.floats(entry.rows(first, last - first)))


def _read_experts(
    model: PreTrainedModel, file: GGUFFile, layer: int, tensors: dict[str, TensorEntry], missing: dict[str, Any]
) -> None:
    """Put the experts of a layer in the place of transformers' module. Raises ValueError if one has no place."""
    first = min(entry.name for entry in tensors.values())
    ends = (f".{layer}.mlp.experts.down_proj", f".{layer}.block_sparse_moe.experts.down_proj")
    place = next((name.rpartition(".")[0] for name in missing if name.endswith(ends)), None)
    if place is None:
        raise ValueError(f"{first} has no place in this model")
    module: Any = model.get_submodule(place)
    parts = {f"{matrix}.weight" for matrix in ("gate", "up", "down")}
    if "gate_up.weight" in tensors:
        parts = {"gate_up.weight", "down.weight"}
    if hasattr(module, "down_proj_bias"):
        parts |= {f"{matrix}.bias" for matrix in ("gate", "up", "down")}
    for problem, names in (("is missing", parts - tensors.keys()), ("has no place", tensors.keys() - parts)):
        for name in sorted(names):
            raise ValueError(f"blk.{layer}.ffn_{'_exps.'.join(name.split('.'))} {problem}")
    dtype: Any = model.config.dtype
    n, hidden = module.num_experts, model.config.hidden_size
    inner = math.prod(module.down_proj.shape) // n // hidden
    biases = {name: file.floats(entry).to(dtype) for name, entry in tensors.items() if name.endswith(".bias")}

    def layers(matrix: str, rows: int, columns: int, whole: str = "", first: int = 0) -> list[nn.Module]:
        """The layers of all experts with this matrix, or with such rows of a matrix that is larger."""
        entry = tensors[f"{whole or matrix}.weight"]
        _check_shape(entry, entry.shape, (n, 2 * rows if whole else rows, columns))
        result: list[nn.Module] = []
        for i in range(n):
            bias = biases[f"{matrix}.bias"][i] if biases else None
            bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
            result.append(_linear(file, entry.one(i).rows(first, rows), dtype, bias))
        return result

    whole = "gate_up" if "gate_up.weight" in tensors else ""
    products = {
        "gate": layers("gate", inner, hidden, whole),
        "up": layers("up", inner, hidden, whole, inner if whole else 0),
        "down": layers("down", hidden, inner),
    }
    model.set_submodule(place, Experts(**products, combine=combine_of(module)))
    for name in [name for name in missing if name.startswith(f"{place}.")]:
        del missing[name]


def _tie_head(model: Any, missing: dict[str, Any]) -> None:
    """Let the output layer share the weights of the embedding."""
    dtype: torch.dtype = model.config.dtype
    name = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    table: Any = model.get_input_embeddings()
    table = table.table if isinstance(table, ScaledEmbedding) else table
    kind, (rows, columns) = getattr(table, "kind", matrices.FLOATS), (table.num_embeddings, table.embedding_dim)
    head = MatrixLinear(table.weight, kind, rows, columns, dtype)
    head.weight = table.weight
    model.set_submodule(name, head)
    missing.pop(f"{name}.weight", None)


class ScaledEmbedding(nn.Module):
    """An embedding whose rows are multiplied by a number, as Gemma's are. dtype: of the number, which it rounds."""

    def __init__(self, table: nn.Module, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.scale = table, float(torch.tensor(scale, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (...) -> (...,columns)."""
        rows: Tensor = self.table(ids) * self.scale
        return rows


class ReorderedLinear(nn.Module):
    """A linear layer whose matrix has its columns in another order. order: the input of each column (in,) int64."""

    order: Tensor

    def __init__(self, linear: nn.Module, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("order", order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (...,in) -> (...,out)."""
        y: Tensor = self.linear(x[..., self.order])
        return y
