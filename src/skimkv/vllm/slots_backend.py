"""The attention backend of methods with a budget: a request has one block of slots, whatever its length.

vLLM has blocks of that kind for its own ring buffers: each request gets one with its prompt and returns it at its end,
so it is never preempted for want of memory. A prompt is read whole, and the method takes what it keeps of it. So there
are no prompts in chunks, and no prefix cache, because what is kept depends on the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, replace_as

from ..methods.slots import SlotMethod
from ..ops import Token
from ..ops.cpu.paged import PagedKernels
from ..stores.base import Shape
from ..stores.memory import request_huge_pages
from ..stores.slot_blocks import SlotBlocks, bytes_of_slot
from .layers import CountingLayer
from .options import ConfigurationError, Options


@dataclass(frozen=True, kw_only=True)
class BudgetSpec(CircularBufferSpec):
    """One block a request. vLLM's registry finds the manager of its base class for it."""

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """The numbers that a request has in the table of blocks, of which only the first is one of a block.

        vLLM's runner on CPUs looks up a number for every position, and must not read beyond the table.
        """
        return int(cdiv(max_len, self.block_size))


class Prompt(NamedTuple):
    """A whole prompt: the places of its tokens in the batch, and the number of its block."""

    tokens: slice
    block: int


class DecodeRows(NamedTuple):
    """The rows of a batch that decode: the places of their tokens in the batch, their lengths before it, and their
    blocks (B,) int32."""

    tokens: Tensor
    lengths: list[int]
    blocks: Tensor


@dataclass
class Metadata:
    """The prompts of a batch and its rows that decode, for all layers."""

    prompts: list[Prompt]
    decode: DecodeRows | None


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Splits every batch in prompts and rows that decode."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The metadata of one batch. Raises ConfigurationError if a prompt comes in pieces."""
        common = common_attn_metadata
        if common.causal is not True:
            raise ConfigurationError("attention that is not causal is not supported")
        rows = common.num_reqs
        starts, lengths = common.query_start_loc[: rows + 1].tolist(), common.seq_lens[:rows].tolist()
        blocks, prompts, decodes = common.block_table_tensor[:rows, 0], [], []
        for row, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
            if stop - start == length:
                prompts.append(Prompt(slice(start, stop), int(blocks[row])))
            elif stop - start == 1:
                decodes.append(row)
            else:
                raise ConfigurationError(f"a prompt comes in pieces: {stop - start} of its {length} tokens")
        if not decodes:
            return Metadata(prompts, None)
        places = torch.tensor([starts[row] for row in decodes])
        return Metadata(prompts, DecodeRows(places, [lengths[row] - 1 for row in decodes], blocks[decodes]))


class Implementation(CountingLayer, CPUAttentionBackendImpl):
    """One attention layer."""

    kernels = PagedKernels()

    def describe(self, kv_cache: Tensor) -> SlotBlocks:
        """The layer's cache as blocks of slots."""
        request_huge_pages(kv_cache)
        shape = Shape(1, self.num_kv_heads, self.num_queries_per_kv, self.head_size)
        method: SlotMethod = self.options.method  # type: ignore[assignment]
        return SlotBlocks(kv_cache, lambda: method.store(shape, kv_cache.dtype))

    def attend(
        self,
        layer: Any,
        store: SlotBlocks,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: Metadata,
        output: Tensor,
    ) -> None:
        """Prompts by the method's prefill, rows that decode by its kernel: query (tokens,heads,D) -> output."""
        for prompt in metadata.prompts:
            self._read_prompt(store, query, key, value, prompt, output)
        if metadata.decode is not None:
            self._decode(store, query, key, value, metadata.decode, output)

    def _read_prompt(
        self, store: SlotBlocks, query: Tensor, key: Tensor, value: Tensor, prompt: Prompt, output: Tensor
    ) -> None:
        _, H, G, D = store.shape
        q = query[prompt.tokens].unflatten(1, (H, G)).permute(1, 2, 0, 3)[None]  # (1,H,G,n,D)
        k, v = (x[prompt.tokens].transpose(0, 1)[None] for x in (key, value))
        request = store.new_request(prompt.block)
        y = self.options.method.prefill(request, q, k, v, scale=self.scale, softcap=self.logits_soft_cap or None)
        output[prompt.tokens] = y[0].permute(2, 0, 1, 3).reshape(-1, H * G, D)

    def _decode(
        self, store: SlotBlocks, query: Tensor, key: Tensor, value: Tensor, rows: DecodeRows, output: Tensor
    ) -> None:
        store.lengths, store.numbers = rows.lengths, rows.blocks
        method, shape = self.options.method, store.shape
        q, token = query[rows.tokens].view(shape), Token(key[rows.tokens], value[rows.tokens])
        # A method's kernel form takes what it needs from the store's numbers, so blocks serve it as Slots do.
        fused: Callable[..., Tensor] = method.fused
        y = fused(self.kernels, store, q, token, scale=self.scale, softcap=self.logits_soft_cap or None)
        output[rows.tokens] = y.flatten(1, 2)
        one = shape._replace(B=1)
        self.count(shape, sum(self.bytes_of_step(n, one, store.example.dtype) for n in rows.lengths))


class Backend(CPUAttentionBackend):
    """The backend of an engine whose additional_config asks for a method with a budget."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM's registry has it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        """The class of a layer."""
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """The class that makes a batch's metadata."""
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Blocks of any size: a kernel reads the slots of one."""
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """All sizes: vLLM's own kernels are not used."""
        return []

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """One block a request, with room for its slots."""
        if not isinstance(spec, FullAttentionSpec):
            raise ConfigurationError(f"layers of {type(spec).__name__} are not supported")
        method: SlotMethod = Options.of(get_current_vllm_config()).method  # type: ignore[assignment]
        store = method.store(Shape(1, spec.num_kv_heads, 1, spec.head_size), spec.dtype)
        without = {"sliding_window", "attention_chunk_size", "non_causal"}
        return replace_as(spec, BudgetSpec, drop=without, state_content_bytes=bytes_of_slot(store))
