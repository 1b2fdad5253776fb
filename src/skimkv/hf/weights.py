"""8-bit weights: modules that hold packed blocks (ops/linear.py), and models whose matrices are such modules.

No full-precision copy of a model ever exists: its matrices are quantised one by one as they are read.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import ops
from ..ops import linear
from ..stores import memory as pages

SLAB = 1 << 20  # elements quantised at once: what a matrix costs beside its 8-bit form while it is read


def storage(out: int, inputs: int) -> Tensor:
    """Packed weights, not yet written, on the CPU."""
    return pages.empty(linear.packed_shape(out, inputs), torch.int16)


def fill(packed: Tensor, out: int, blocks: Callable[[int, int], Tensor], step: int = linear.ROWS) -> Tensor:
    """Write packed weights slab by slab: blocks(first, last) gives rows first .. last-1, from multiples of `step`."""
    inputs = packed.shape[1] * linear.BLOCK
    rows = max(step, SLAB // inputs // step * step)
    for first in range(0, out, rows):
        linear.pack(blocks(first, min(out, first + rows)), packed, first)
    return packed


def pack(weight: Tensor) -> Tensor:
    """weight (out,in) -> packed 8-bit weights on the same device, about 0.4% of a block's largest weight off."""
    out, inputs = weight.shape
    packed = storage(out, inputs)
    return fill(packed, out, lambda a, b: linear.quantise(weight[a:b]).cpu()).to(weight.device)


def _release(read: Tensor) -> None:
    """Give back the memory of a tensor that was read and is a piece of a mapped checkpoint: left alone, the pages of
    the whole file would stay resident beside the packed weights. Does nothing with memory of any other kind."""
    if not sys.platform.startswith("linux") or read.is_meta or read.device.type != "cpu":
        return
    at = read.data_ptr()
    first, last = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, (at + read.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            if low <= first < last <= high and ".safetensors" in line:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


class Packed(nn.Module):
    """A matrix (rows, columns) in 8 bits. `weight` is the packed tensor, so that tied modules share it."""

    def __init__(self, rows: int, columns: int, weight: Tensor | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.shape, shape = (rows, columns), linear.packed_shape(rows, columns)
        if weight is None:
            weight = torch.empty(shape, dtype=torch.int16)
        elif weight.shape != shape or (weight.dtype != torch.int16 and not weight.is_meta):
            raise ValueError(f"packed weights are {weight.dtype} {tuple(weight.shape)}; must be int16 {shape}")
        self.dtype = dtype or torch.get_default_dtype()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Linear8(Packed):
    """nn.Linear with 8-bit weights; activations float32, bfloat16 or float16. For inference only."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        weight: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features, weight, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=self.dtype), requires_grad=False) if bias else None

    @classmethod
    def random(cls, in_features: int, out_features: int, generator: torch.Generator, dtype: torch.dtype) -> Linear8:
        """Uniform weights of the size that keeps activations as they are, for benchmarks."""
        packed = storage(out_features, in_features)
        packed.view(torch.int8).random_(-127, 128, generator=generator)
        packed[:, :, 0] = torch.tensor(3**0.5 / 127 / in_features**0.5).half().view(torch.int16)
        return cls(in_features, out_features, weight=packed, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("8-bit weights have no gradient: use torch.no_grad()")
        return ops.linear8(x, self.weight, self.out_features, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Embedding8(Packed):
    """nn.Embedding with 8-bit rows, dequantised as they are looked up."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, weight: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, weight, dtype)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        index = ids.flatten().long()
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.num_embeddings:
            raise IndexError(f"token ids must be from 0 to {self.num_embeddings - 1}")
        return linear.dequantise(linear.rows(self.weight, index)).view(*ids.shape, -1).to(self.dtype)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, Packed]]:
    """(name, module, what replaces it, still empty) for each matrix of the model that can be 8 bits wide."""
    tied = {name for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    pair = f"{_name(model, table)}.weight", f"{_name(model, head)}.weight"
    together = set(pair) <= tied and type(table) is nn.Embedding and type(head) is nn.Linear
    for name, part in model.named_modules():
        weight, columns = getattr(part, "weight", None), 0
        if type(part) is nn.Linear:
            columns = part.in_features
        elif type(part) is Conv1D:
            columns = part.nx
        elif part is table and together:  # a table of its own is read row by row: nothing to gain
            columns = table.embedding_dim
        if not columns or columns % linear.BLOCK or weight is None:
            continue
        if f"{name}.weight" in tied and not (together and f"{name}.weight" in pair):
            continue  # shared with something that stays as it is
        rows, dtype = weight.numel() // columns, weight.dtype
        with torch.device("meta"):
            # a float, as older versions of the library turn what they read into this type before we see it
            empty = torch.empty(linear.packed_shape(rows, columns), dtype=dtype)
            if part is table:
                yield name, part, Embedding8(rows, columns, empty, dtype)
            else:
                yield name, part, Linear8(columns, rows, part.bias is not None, empty, dtype)


def _name(model: nn.Module, part: nn.Module | None) -> str:
    return next((name for name, module in model.named_modules() if module is part), "")


def quantise(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the model's matrices by 8-bit ones, in place and one by one: linear layers whose inputs come in blocks
    of 32, and an embedding that is tied to such an output layer. On the meta device the new modules are empty.

    Raises ValueError if there is nothing to replace.
    """
    held: dict[int, nn.Parameter] = {}  # tied weights are packed once
    if not (found := list(_matrices(model))):
        raise ValueError(f"{type(model).__name__} has no linear layer with inputs in blocks of {linear.BLOCK}")
    for name, part, new in found:
        weight: Tensor = part.weight  # type: ignore[assignment]
        if not weight.is_meta:
            if id(weight) not in held:
                packed = pack((weight.T if isinstance(part, Conv1D) else weight).detach())
                held[id(weight)] = nn.Parameter(packed, requires_grad=False)
            new.weight = held[id(weight)]
            if isinstance(new, Linear8) and new.bias is not None:
                new.bias = nn.Parameter(part.bias.detach(), requires_grad=False)  # type: ignore[operator]
        new.transposed = isinstance(part, Conv1D)  # type: ignore[assignment]
        model.set_submodule(name, new.train(part.training))
    model.requires_grad_(False)
    return model


class _Config(QuantizationConfigMixin):
    """Names our quantizer, and brings back why a load failed: the library only says that something did."""

    error: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Config:
        return self  # auto classes copy what they are given


class _Quantise(ConversionOps):
    """Between the checkpoint and the model: one matrix in full precision at a time."""

    def __init__(self, config: _Config) -> None:
        self.config = config

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        name: str = kwargs["full_layer_name"]
        (value,) = input_dict.values()
        weight: Tensor = value[0] if isinstance(value, list) else value
        part = kwargs["model"].get_submodule(name.rpartition(".")[0])
        wanted = part.shape[::-1] if part.transposed else part.shape
        if not weight.is_floating_point():
            raise ValueError(f"{name} is {weight.dtype}, not a float")
        if weight.shape != wanted:
            self.config.error = f"{name} is {tuple(weight.shape)}, by config.json it should be {wanted}"
            raise ValueError(self.config.error)
        packed = pack(weight.T if part.transposed else weight)
        _release(weight)
        return {name: packed}


class _Quantizer(HfQuantizer):
    """The library's own hook for quantising while loading."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(module), Packed)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return quantise(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return model.requires_grad_(False)

    def get_quantize_ops(self) -> ConversionOps:
        assert isinstance(self.quantization_config, _Config)
        return _Quantise(self.quantization_config)

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def quantised() -> dict[str, Any]:
    """What from_pretrained takes besides, to quantise while it loads; if it fails, `error` of the configuration may
    say why."""
    AUTO_QUANTIZER_MAPPING["skimkv-int8"] = _Quantizer
    return {"quantization_config": _Config("skimkv-int8")}  # type: ignore[arg-type]
