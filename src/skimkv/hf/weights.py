"""Weights in another format: models whose matrices are of one of FORMATS.

No full-precision copy of a model ever exists: its matrices are converted one by one while they are read.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..ops import block_weights, matrices, packed_weights
from ..stores import memory
from .decode_step import replace_modules
from .matrix_modules import MatrixEmbedding, MatrixLinear, MatrixModule

SLAB = 1 << 20  # elements quantised at once: what a matrix needs beside its 8-bit form while it is read
HUGE_PAGES_FROM = 2 * memory.HUGE_PAGE  # smaller matrices take memory in which others were read


def empty_packed(out: int, inputs: int) -> Tensor:
    """Packed weights of a matrix (out,inputs), not yet written, on the CPU. inputs must be a multiple of 32."""
    return memory.empty(packed_weights.packed_shape(out, inputs), torch.int16, least=HUGE_PAGES_FROM)


def fill_packed(packed: Tensor, out: int, blocks: Callable[[int, int], Tensor]) -> Tensor:
    """Write packed weights slab by slab, and return them.

    blocks(first, last) returns rows first .. last-1 of the matrix as Q8_0 blocks; first is a multiple of ROWS.
    """
    inputs = packed.shape[1] * packed_weights.BLOCK
    slab = max(1, SLAB // inputs // packed_weights.ROWS) * packed_weights.ROWS
    for first in range(0, out, slab):
        packed_weights.pack(blocks(first, min(out, first + slab)), packed, first)
    return packed


def pack_matrix(weight: Tensor) -> Tensor:
    """Quantise weight (out,in) of any float type to packed 8-bit weights on the same device.

    A weight is off by at most about 0.4% of the largest weight in its block of 32.
    """
    out, inputs = weight.shape
    packed = empty_packed(out, inputs)
    return fill_packed(packed, out, lambda first, last: packed_weights.quantise(weight[first:last]).cpu()).to(
        weight.device
    )


def _release(tensor: Tensor) -> None:
    """Give back the memory of a tensor that was read and is a piece of a mapped checkpoint.

    Otherwise the pages of the whole file would stay resident beside the packed weights. Memory of any other kind
    stays as it is.
    """
    if not sys.platform.startswith("linux") or tensor.is_meta or tensor.device.type != "cpu":
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    with open("/proc/self/maps") as maps:
        for line in (line for line in maps if ".safetensors" in line):
            low, high = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            if low <= first < last <= high:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


class Format(NamedTuple):
    """A way to hold the matrices of a model.

    kind: one of ops/matrices.py. shape(rows, columns): of the tensor that holds a matrix. convert(weight): a matrix of
    any float type as that tensor.
    """

    kind: str
    shape: Callable[[int, int], tuple[int, ...]]
    convert: Callable[[Tensor], Tensor]


def _floats(type: torch.dtype) -> Format:
    """The format of matrices whose elements have this type."""
    return Format(
        matrices.FLOATS,
        lambda rows, columns: (rows, columns),
        lambda weight: memory.empty(tuple(weight.shape), type, least=HUGE_PAGES_FROM).copy_(weight),
    )


FORMATS = {
    "float32": _floats(torch.float32),
    "bfloat16": _floats(torch.bfloat16),
    "int8": Format(matrices.PACKED, packed_weights.packed_shape, pack_matrix),
    "int4": Format(
        "Q4_0",
        lambda rows, columns: (rows, block_weights.row_bytes("Q4_0", columns)),
        block_weights.quantise_int4,
    ),
}


def random_linear(in_features: int, out_features: int, generator: torch.Generator, dtype: torch.dtype) -> MatrixLinear:
    """An 8-bit layer of uniform random weights that keep the size of activations, for benchmarks."""
    packed = empty_packed(out_features, in_features)
    packed.view(torch.int8).random_(-127, 128, generator=generator)
    packed[:, :, 0] = torch.tensor(3**0.5 / 127 / in_features**0.5, dtype=torch.float16).view(torch.int16)
    return MatrixLinear(packed, matrices.PACKED, out_features, in_features, dtype)


class _Replacement(NamedTuple):
    """A matrix of a model that can be quantised, and the empty module that takes its place."""

    name: str
    module: nn.Module
    quantised: Any


def _replacements(model: PreTrainedModel, format: Format) -> Iterator[_Replacement]:
    """Every matrix of the model that can be quantised."""
    tied = {name for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = f"{_name(model, table)}.weight", f"{_name(model, head)}.weight"
    ends_are_tied = set(ends) <= tied and type(table) is nn.Embedding and type(head) is nn.Linear
    for name, module in model.named_modules():
        weight, columns = getattr(module, "weight", None), 0
        if type(module) is nn.Linear:
            columns = module.in_features
        elif type(module) is Conv1D:
            columns = module.nx
        elif module is table and ends_are_tied:  # a table of its own is read row by row: nothing to gain
            columns = table.embedding_dim
        if not columns or columns % packed_weights.BLOCK or weight is None:
            continue
        if f"{name}.weight" in tied and not (ends_are_tied and f"{name}.weight" in ends):
            continue  # shared with something that stays as it is
        rows, dtype = weight.numel() // columns, weight.dtype
        with torch.device("meta"):
            # a float, as older versions of the library turn what they read into this type before we see it
            empty = torch.empty(format.shape(rows, columns), dtype=dtype)
            if module is table:
                ours: MatrixModule = MatrixEmbedding(empty, format.kind, rows, columns, dtype)
            else:
                zeros = None if module.bias is None else nn.Parameter(torch.zeros(rows, dtype=dtype), False)
                ours = MatrixLinear(empty, format.kind, rows, columns, dtype, zeros)
            yield _Replacement(name, module, ours)


def _name(model: nn.Module, module: nn.Module | None) -> str:
    return next((name for name, candidate in model.named_modules() if candidate is module), "")


def quantise(model: PreTrainedModel, weights: str = "int8") -> PreTrainedModel:
    """Replace the model's matrices by ours, in place and one by one, and return the model.

    weights: one of FORMATS. Matrices are linear layers whose inputs come in blocks of 32, and an embedding that is
    tied to such an output layer; what stands between them becomes ours too where it is as Llama has it
    (decode_step.py). On the meta device the new modules are empty.

    Raises ValueError if there is nothing to replace.
    """
    format = FORMATS[weights]
    replacements = list(_replacements(model, format))
    if not replacements:
        raise ValueError(f"{type(model).__name__} has no linear layer with inputs in blocks of {packed_weights.BLOCK}")
    quantised_matrices: dict[int, nn.Parameter] = {}  # by the id of the original: tied weights are quantised once
    for name, module, quantised in replacements:
        weight: Tensor = module.weight  # type: ignore[assignment]
        is_transposed = isinstance(module, Conv1D)
        if not weight.is_meta:
            if id(weight) not in quantised_matrices:
                quantised_weight = format.convert((weight.T if is_transposed else weight).detach())
                quantised_matrices[id(weight)] = nn.Parameter(quantised_weight, requires_grad=False)
            quantised.weight = quantised_matrices[id(weight)]
            if getattr(quantised, "bias", None) is not None:
                quantised.bias = nn.Parameter(module.bias.detach(), requires_grad=False)  # type: ignore[operator]
        quantised.transposed = is_transposed
        model.set_submodule(name, quantised.train(module.training))
    replace_modules(model)
    model.requires_grad_(False)
    return model


class _Config(QuantizationConfigMixin):
    """Names our quantizer, and brings back why a load failed: the library only reports that it did."""

    error: str | None = None

    def __init__(self, weights: str) -> None:
        super().__init__(f"skimkv-{weights}")  # type: ignore[arg-type]
        self.weights = weights

    def __deepcopy__(self, memo: dict[int, Any]) -> _Config:
        return self  # auto classes copy what they are given


class _Quantise(ConversionOps):
    """Stands between the checkpoint and the model, where one matrix in full precision exists at a time."""

    def __init__(self, config: _Config) -> None:
        self.config = config

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Pack one matrix. Raises ValueError if it is no float or has another shape than config.json says."""
        name: str = kwargs["full_layer_name"]
        (value,) = input_dict.values()
        weight: Tensor = value[0] if isinstance(value, list) else value
        module = kwargs["model"].get_submodule(name.rpartition(".")[0])
        expected = module.shape[::-1] if module.transposed else module.shape
        if not weight.is_floating_point():
            raise ValueError(f"{name} is {weight.dtype}, not a float")
        if weight.shape != expected:
            self.config.error = f"{name} is {tuple(weight.shape)}, by config.json it should be {expected}"
            raise ValueError(self.config.error)
        quantised = FORMATS[self.config.weights].convert(weight.T if module.transposed else weight)
        _release(weight)
        return {name: quantised}


class _Quantizer(HfQuantizer):
    """The library's own hook for quantising while a checkpoint is loaded."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether this parameter is the weight of a layer that is packed."""
        module, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(module), MatrixModule)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        assert isinstance(self.quantization_config, _Config)
        return quantise(model, self.quantization_config.weights)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return model.requires_grad_(False)

    def get_quantize_ops(self) -> ConversionOps:
        """What is done to each weight as it is loaded."""
        assert isinstance(self.quantization_config, _Config)
        return _Quantise(self.quantization_config)

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        """Whether the library may save the model: no."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether the library may train the model: no."""
        return False


def quantise_while_loading(weights: str) -> dict[str, Any]:
    """More arguments for from_pretrained: matrices are quantised, to "int8" or "int4", while the checkpoint is read.

    If loading fails, `error` of the configuration may contain the reason.
    """
    config = _Config(weights)
    AUTO_QUANTIZER_MAPPING[str(config.quant_method)] = _Quantizer
    return {"quantization_config": config}
