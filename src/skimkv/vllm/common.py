"""What the backends have in common: which rows of a batch decode, an attention layer, and its counters."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

from ..methods.base import Method
from ..ops import Token
from ..stores.base import Shape
from ..stores.quantise import GROUP
from .options import ConfigurationError, Options, refuse_layer


class DecodeRows(NamedTuple):
    """The rows of a batch that decode.

    rows: their places among the rows, slices where they come first. tokens: those of their tokens in the batch. sizes:
    the tokens that each has in the cache, the current one included.
    """

    rows: slice | Tensor
    tokens: slice | Tensor
    sizes: list[int]


def decode_rows(
    starts: Tensor, lengths: Tensor, prefilling: Tensor, device: torch.device | str = "cpu"
) -> tuple[DecodeRows | None, int]:
    """The rows of a batch that decode, None if there is none; and how many do before the first one that does not.

    A decode row is a row of one token of a request whose prompt is done. A last piece of a prompt that has one token is
    not: it is attended to densely, as every prompt is.

    starts (rows+1,): where the tokens of each row begin in the batch · lengths (rows,) · prefilling (rows,) bool: all
    on the host. device: where the places go.
    """
    places = ((starts.diff() == 1) & ~prefilling).nonzero().flatten()
    first = int((places == torch.arange(len(places))).sum())
    if not len(places):
        return None, first
    if len(places) == first:
        return DecodeRows(slice(0, first), slice(0, first), lengths[:first].tolist()), first
    rows, tokens = (x.to(device, non_blocking=True) for x in (places, starts[places]))
    return DecodeRows(rows, tokens, lengths[places].tolist()), first


@functools.lru_cache(maxsize=1 << 14)
def _bytes_of_step(method: Method, n: int, shape: Shape, dtype: torch.dtype, **read: int) -> int:
    return method.traffic(n, shape, dtype, **read).bytes


def bytes_of_steps(method: Method, sizes: list[int], shape: Shape, dtype: torch.dtype, rows_read: Tensor | None) -> int:
    """The bytes of one step of each row, by Method.traffic.

    sizes: the tokens that each row has, the current one included. shape: of one row. rows_read (rows,2): how many rows
    of K and V each step read, for a method that reads as many as the data ask for.
    """
    if rows_read is None:
        return sum(_bytes_of_step(method, n - 1, shape, dtype) for n in sizes)
    none, one = ({"key_rows": count, "value_rows": 0} for count in (0, 1))
    of_row = _bytes_of_step(method, 1, shape, dtype, **one) - _bytes_of_step(method, 1, shape, dtype, **none)
    without = sum(_bytes_of_step(method, n - 1, shape, dtype, **none) for n in sizes)
    return without + of_row * int(rows_read.sum())


class Layer(AttentionImpl):
    """One attention layer. It comes before vLLM's own class of the platform among the bases of a layer.

    steps, rows and bytes count what its decode rows took: see `CheckedWorker.skimkv_counters`. blocks: its cache.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refuse_layer(locals())
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, sinks,
        )  # fmt: skip
        self.options = Options.of(get_current_vllm_config())
        self.steps = self.rows = self.bytes = 0
        self.blocks: Any = None
        self.memory: tuple[Any, ...] = ()

    @abstractmethod
    def describe(self, kv_cache: Tensor) -> Any:
        """The layer's cache as blocks that the kernels read."""

    @abstractmethod
    def attend(
        self, layer: Any, store: Any, query: Tensor, key: Tensor, value: Tensor, metadata: Any, output: Tensor
    ) -> None:
        """Attention of one batch over the layer's blocks: query (tokens,heads,D) -> output, of the same shape."""

    def blocks_of(self, kv_cache: Tensor) -> Any:
        """The layer's cache as blocks, which are described again when vLLM replaces the memory."""
        memory = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if self.blocks is None or memory != self.memory:
            self.blocks, self.memory = self.describe(kv_cache), memory
        return self.blocks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one batch: query (tokens,heads,D) · key, value (tokens,H,D) -> output, of query's shape."""
        if output_scale is not None or output_block_scale is not None:
            raise ConfigurationError("quantised outputs of attention are not supported")
        if attn_metadata is None:  # a run that only warms up
            return output.fill_(0)
        self.attend(layer, self.blocks_of(kv_cache), query, key, value, attn_metadata, output)
        return output

    def decode(
        self, backend: Any, store: Any, query: Tensor, token: Token | None, rows: DecodeRows, output: Tensor
    ) -> None:
        """The rows that decode, by the method's kernel: query (tokens,heads,D) -> output. token None: it is in a block.

        The step is counted with the bytes of Method.traffic.
        """
        method, one, B = self.options.method, store.shape._replace(B=1), len(rows.sizes)
        q = query[rows.tokens].view(B, *one[1:])
        softmax = {"scale": self.scale, "softcap": self.logits_soft_cap or None}
        output[rows.tokens] = backend.run(method.kernel(store), store, q, token, softmax).flatten(1, 2)
        self.steps += B
        self.rows += B * one.H
        self.bytes += bytes_of_steps(method, rows.sizes, one, query.dtype, getattr(store, "rows_read", None))


class NamedBackend(AttentionBackend):
    """What vLLM asks a backend of skimkv for. It comes before vLLM's own class of the platform among the bases."""

    layer: ClassVar[type[Layer]]
    builder: ClassVar[type]  # of a batch's metadata

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM's registry has it."""
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[Layer]:
        """The class of a layer."""
        return cls.layer

    @classmethod
    def get_builder_cls(cls) -> type:
        """The class that makes a batch's metadata."""
        return cls.builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Blocks of whole groups of tokens."""
        return [MultipleOf(GROUP)]
