"""What the attention layers of all backends have in common: their cache as blocks, and counters of what was decoded."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ..methods.base import Method
from ..stores.base import Shape
from .options import ConfigurationError, Options, refuse_layer


@functools.lru_cache(maxsize=1 << 14)
def _bytes_of_step(method: Method, n: int, shape: Shape, dtype: torch.dtype) -> int:
    return method.traffic(n, shape, dtype).bytes


class CountingLayer(AttentionImpl):
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

    def bytes_of_step(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of a step of one row with n cached tokens besides the current one: those of Method.traffic."""
        return _bytes_of_step(self.options.method, n, shape, dtype)

    def count(self, shape: Shape, bytes_of_batch: int) -> None:
        """Add the step of a batch."""
        self.steps += shape.B
        self.rows += shape.B * shape.H
        self.bytes += bytes_of_batch
