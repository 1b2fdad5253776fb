"""The attention backend on CUDA: prompts by vLLM's Triton kernel, decode rows by skimkv's, on the same blocks.

A block has K and V in rows, all KV heads together, so vLLM's kernel reads them through their strides; what SparQ adds
follows in the same block. Attention is computed between CUDA graphs, not in them: vLLM captures the rest of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..ops.gpu.run import PagedBackend, append_slots
from ..stores.quantise import round_up
from ..stores.row_blocks import RowBlocks
from .common import DecodeRows, Layer, NamedBackend, decode_rows
from .options import ConfigurationError, Options


class PromptRows(NamedTuple):
    """The rows from the first one that does not decode, in the form of vLLM's kernel; some may decode all the same."""

    tokens: slice
    query_start_loc: Tensor
    lengths: Tensor
    table: Tensor
    longest_query: int
    longest: int


@dataclass
class Metadata:
    """The rows of a batch that decode and the others, for all layers. gpu: it has begun with the former."""

    gpu: PagedBackend
    decode: DecodeRows | None = None
    prompt: PromptRows | None = None


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Splits every batch. Rows are told apart by numbers that the host has, so that it never waits for the device."""

    reorder_batch_threshold = 1  # asks vLLM for the rows of one token first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec = kv_cache_spec
        layout = Options.of(vllm_config).row_layout(spec.num_kv_heads, spec.head_size, spec.block_size, spec.dtype)
        width = round_up(vllm_config.model_config.max_model_len, spec.block_size) // spec.block_size
        rows = vllm_config.scheduler_config.max_num_seqs
        self.gpu = PagedBackend(layout, spec.page_size_bytes, rows, width, device)
        self.width = width

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The metadata of one batch. Raises ConfigurationError if it is one that skimkv does not take."""
        common = common_attn_metadata
        if common.causal is not True or common.is_prefilling is None or common.seq_lens_cpu_upper_bound is None:
            raise ConfigurationError("attention that is not causal, or a runner that hides prompts, is not supported")
        rows = int((common.query_start_loc_cpu.diff() > 0).sum())  # what follows them is padding
        starts, lengths = common.query_start_loc_cpu[: rows + 1], common.seq_lens_cpu_upper_bound[:rows]
        table = common.block_table_tensor[:rows, : self.width]
        decode, first = decode_rows(starts, lengths, common.is_prefilling[:rows].cpu(), self.device)
        metadata = Metadata(self.gpu, decode)
        if decode is not None:
            self.gpu.begin(table[decode.rows], common.seq_lens[decode.rows])
        if first < rows:
            metadata.prompt = PromptRows(
                slice(first, int(starts[rows])),
                common.query_start_loc[first : rows + 1] - first,
                common.seq_lens[first:rows],
                table[first:],
                common.max_query_len,
                common.max_seq_len,
            )
        return metadata


class Implementation(Layer, TritonAttentionImpl):
    """One attention layer whose cache is all tokens in blocks."""

    def describe(self, kv_cache: Tensor) -> RowBlocks:
        """The layer's cache as blocks of tokens."""
        _, H, tokens, _ = kv_cache.shape
        layout = self.options.row_layout(H, self.head_size, tokens, kv_cache.dtype)
        return RowBlocks(kv_cache, layout, self.num_queries_per_kv)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the batch's tokens to their slots."""
        n = slot_mapping.shape[0]
        append_slots(self.blocks_of(kv_cache), key[:n], value[:n], slot_mapping)

    def attend(
        self,
        layer: Any,
        store: RowBlocks,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: Metadata,
        output: Tensor,
    ) -> None:
        """Prompts by vLLM's kernel, rows that decode by skimkv's: query (tokens,heads,D) -> output."""
        if metadata.prompt is not None:
            self._attend_prompts(store, query, metadata.prompt, output)
        if metadata.decode is not None:
            self.decode(metadata.gpu, store, query, None, metadata.decode, output)

    def _attend_prompts(self, store: RowBlocks, query: Tensor, prompt: PromptRows, output: Tensor) -> None:
        unified_attention(
            q=query[prompt.tokens],
            k=store.k.transpose(1, 2),  # (blocks,tokens,H,D)
            v=store.v.transpose(1, 2),
            out=output[prompt.tokens],
            cu_seqlens_q=prompt.query_start_loc,
            max_seqlen_q=prompt.longest_query,
            seqused_k=prompt.lengths,
            max_seqlen_k=prompt.longest,
            softmax_scale=self.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=prompt.table,
            softcap=self.logits_soft_cap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )


class Backend(NamedBackend):
    """The backend that an engine on CUDA uses whose additional_config asks for a method of skimkv."""

    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    forward_includes_kv_cache_update = False
    layer, builder = Implementation, MetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Each block of a layer in one piece."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Make room in every block for what SparQ reads besides K and V."""
        options = Options.of(get_current_vllm_config())
        layout = options.row_layout(spec.num_kv_heads, spec.head_size, spec.block_size, spec.dtype)
        return replace(spec, state_content_bytes=layout.bytes_per_token)
