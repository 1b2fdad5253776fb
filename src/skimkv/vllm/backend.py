"""The attention backend on CPUs: prompts by vLLM's own kernel, decode rows by skimkv's on the same blocks.

On processors with AMX vLLM would put bfloat16 keys into tiles, which skimkv's kernels do not read. There blocks are as
elsewhere, and skimkv's own attention of prompts takes the place of vLLM's, whose kernel for such blocks has no tiles.
Quantised rows have no page of keys that vLLM could read, so their prompts are read by skimkv's attention too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops, envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from ..ops.cpu.run import CpuBackend, append_slots
from ..ops.prefill import attend_after
from ..stores.blocks import Blocks
from ..stores.memory import request_huge_pages
from .common import DecodeRows, Layer, NamedBackend, decode_rows
from .options import PAGE, TILES, ConfigurationError, Options


class DecodeBlocks(NamedTuple):
    """The rows of a batch that decode: lengths (B,) int64 with the current token · table (B,blocks) int32."""

    rows: DecodeRows
    lengths: Tensor
    table: Tensor


class PromptRows(NamedTuple):
    """The rows from the first one that does not decode, in the form of vLLM's kernel; some may decode all the same."""

    first_token: int
    query_start_loc: Tensor
    lengths: Tensor
    table: Tensor
    schedule: Tensor


class Prompt(NamedTuple):
    """Tokens of one prompt in the batch, how many are cached before them, and the row's blocks."""

    tokens: slice
    cached: int
    blocks: Tensor


@dataclass
class Metadata(CPUAttentionMetadata):
    """The metadata of a batch as vLLM makes it, split in rows that decode and others.

    The others are in `prompt`, for vLLM's kernel, or in `prompts`, for skimkv's.
    """

    decode: DecodeBlocks | None = None
    prompt: PromptRows | None = None
    prompts: tuple[Prompt, ...] = ()


class MetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits every batch."""

    reorder_batch_threshold = 1  # asks vLLM for the rows of one token first
    isa: str  # vLLM's word for how it lays out a block

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Whether skimkv's attention reads prompts, and not vLLM's.
        self.reads_prompts = self.isa == TILES or not Options.of(vllm_config).has_page
        self.isa = PAGE
        self._set_isa_to_layers(layer_names)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The metadata of one batch, for all layers of a group."""
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = Metadata(**{f.name: getattr(base, f.name) for f in fields(base)})
        if base.causal is not True or common_attn_metadata.is_prefilling is None:
            raise ConfigurationError(
                "attention that is not causal is not supported, nor is a runner that hides prompts"
            )
        rows = base.query_start_loc.shape[0] - 1
        lengths, prefilling = base.seq_lens[:rows], common_attn_metadata.is_prefilling[:rows]
        decode, first = decode_rows(base.query_start_loc, lengths, prefilling)
        if decode is not None:
            metadata.decode = DecodeBlocks(decode, lengths[decode.rows].long(), base.block_table[decode.rows])
        if self.reads_prompts:
            metadata.prompts = self._prompts(base, lengths.tolist(), prefilling.tolist())
        elif first < rows:
            metadata.prompt = self._prompt_rows(base, first, rows)
        return metadata

    def _prompts(self, base: CPUAttentionMetadata, lengths: list[int], prefilling: list[bool]) -> tuple[Prompt, ...]:
        """The rows that do not decode: see `decode_rows`."""
        starts, prompts = base.query_start_loc.tolist(), []
        for row, (start, stop) in enumerate(pairwise(starts)):
            if stop - start > 1 or (stop > start and prefilling[row]):
                prompts.append(Prompt(slice(start, stop), lengths[row] - (stop - start), base.block_table[row]))
        return tuple(prompts)

    def _prompt_rows(self, base: CPUAttentionMetadata, first: int, rows: int) -> PromptRows:
        starts, lengths = base.query_start_loc[first:], base.seq_lens[first:rows].contiguous()
        starts = (starts - starts[0]).contiguous()
        schedule = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=rows - first,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        first_token = int(base.query_start_loc[first])
        return PromptRows(first_token, starts, lengths, base.block_table[first:rows].contiguous(), schedule)


class Implementation(Layer, CPUAttentionBackendImpl):
    """One attention layer whose cache is all tokens in blocks."""

    cpu = CpuBackend()

    def describe(self, kv_cache: Tensor) -> Blocks:
        """The layer's cache as blocks of tokens."""
        request_huge_pages(kv_cache)
        layout = self.options.layout(self.head_size, kv_cache.shape[2], kv_cache.dtype)
        return Blocks(kv_cache, layout, self.num_kv_heads, self.num_queries_per_kv)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the batch's tokens to their slots: vLLM's own page of keys and what skimkv's kernels read."""
        n = slot_mapping.shape[0]
        append_slots(self.blocks_of(kv_cache), key[:n], value[:n], slot_mapping)

    def attend(
        self,
        layer: Any,
        store: Blocks,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: Metadata,
        output: Tensor,
    ) -> None:
        """Prompts by vLLM's kernel or by ours, rows that decode by ours: query (tokens,heads,D) -> output."""
        if metadata.prompt is not None:
            self._attend_prompts(layer, store, query, metadata, metadata.prompt, output)
        for prompt in metadata.prompts:
            self._attend_prompt(store, query, key, value, prompt, output)
        if metadata.decode is not None:
            self._decode(store, query, metadata.decode, output)

    def _attend_prompts(
        self, layer: Any, store: Blocks, query: Tensor, metadata: Metadata, prompt: PromptRows, output: Tensor
    ) -> None:
        tokens = slice(prompt.first_token, metadata.num_actual_tokens)
        assert store.parts.channels is not None
        # vLLM's kernel takes its own page of keys as (blocks,H,tokens,D), though a "vec" page is [D,tokens].
        keys = store.parts.channels.flatten(2).unflatten(-1, (store.layout.tokens, self.head_size))
        _custom_ops.cpu_attention_with_kv_cache(
            query=query[tokens],
            key_cache=keys,
            value_cache=store.parts.v,
            output=output[tokens],
            query_start_loc=prompt.query_start_loc,
            seq_lens=prompt.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=prompt.table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=prompt.schedule,
            s_aux=None,
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def _attend_prompt(
        self, store: Blocks, query: Tensor, key: Tensor, value: Tensor, prompt: Prompt, output: Tensor
    ) -> None:
        q = query[prompt.tokens].unflatten(1, (store.H, store.G)).permute(1, 2, 0, 3)[None]  # (1,H,G,n,D)
        k, v = (x[prompt.tokens].transpose(0, 1)[None] for x in (key, value))
        if prompt.cached:
            k, v = (torch.cat(pair, 2) for pair in zip(store.rows(prompt.blocks, prompt.cached), (k, v), strict=True))
        softcap = self.logits_soft_cap or None
        y = attend_after(prompt.cached, q, k, v, scale=self.scale, softcap=softcap)
        output[prompt.tokens] = y[0].permute(2, 0, 1, 3).flatten(1, 2)

    def _decode(self, store: Blocks, query: Tensor, blocks: DecodeBlocks, output: Tensor) -> None:
        rows, store.lengths, store.table = blocks
        self.decode(self.cpu, store, query, None, rows, output)
        if store.layout.mean:  # where the method uses the mean of the values, it reads the means of the row's blocks
            self.bytes += sum(-(-n // store.layout.tokens) for n in rows.sizes) * 4 * store.H * store.layout.D


class Backend(NamedBackend, CPUAttentionBackend):
    """The backend that an engine uses whose additional_config asks for a method of skimkv."""

    layer, builder = Implementation, MetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Make room in every block for K in rows and for the index."""
        layout = Options.of(get_current_vllm_config()).layout(spec.head_size, spec.block_size, spec.dtype)
        return replace(spec, state_content_bytes=layout.bytes_per_token)
