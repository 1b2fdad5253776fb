"""The attention backend of methods with a budget: a request has one block of slots, whatever its length.

vLLM has blocks of that kind for its own ring buffers: each request gets one with its prompt and returns it at its end,
so it is never preempted for want of memory. A prompt is read whole, and the method takes what it keeps of it. So there
are no prompts in chunks, and no prefix cache, because what is kept depends on the whole prompt.
"""

from __future__ import annotations

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
from ..ops.cpu.run import CpuBackend
from ..stores.base import Shape
from ..stores.memory import request_huge_pages
from ..stores.slot_blocks import SlotBlocks, bytes_of_slot
from .common import DecodeRows, Layer, NamedBackend
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


@dataclass
class Metadata:
    """The prompts of a batch and its rows that decode, whose blocks are (B,) int32, for all layers."""

    prompts: list[Prompt]
    decode: DecodeRows | None
    blocks: Tensor


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
        rows, tokens = (torch.tensor(x, dtype=torch.int64) for x in (decodes, [starts[row] for row in decodes]))
        decode = DecodeRows(rows, tokens, [lengths[row] for row in decodes]) if decodes else None
        return Metadata(prompts, decode, blocks[rows])


class Implementation(Layer, CPUAttentionBackendImpl):
    """One attention layer."""

    cpu = CpuBackend()

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
            rows = metadata.decode
            store.lengths, store.numbers = [n - 1 for n in rows.sizes], metadata.blocks
            self.decode(self.cpu, store, query, Token(key[rows.tokens], value[rows.tokens]), rows, output)

    def _read_prompt(
        self, store: SlotBlocks, query: Tensor, key: Tensor, value: Tensor, prompt: Prompt, output: Tensor
    ) -> None:
        _, H, G, D = store.shape
        q = query[prompt.tokens].unflatten(1, (H, G)).permute(1, 2, 0, 3)[None]  # (1,H,G,n,D)
        k, v = (x[prompt.tokens].transpose(0, 1)[None] for x in (key, value))
        request = store.new_request(prompt.block)
        y = self.options.method.prefill(request, q, k, v, scale=self.scale, softcap=self.logits_soft_cap or None)
        output[prompt.tokens] = y[0].permute(2, 0, 1, 3).reshape(-1, H * G, D)


class Backend(NamedBackend, CPUAttentionBackend):
    """The backend of an engine whose additional_config asks for a method with a budget."""

    forward_includes_kv_cache_update = True
    layer, builder = Implementation, MetadataBuilder

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
