"""The worker on CPUs, which checks besides that vLLM's kernels and skimkv's lay out keys in the same way."""

from __future__ import annotations

import torch
from vllm import _custom_ops
from vllm.v1.worker.cpu_worker import CPUWorker

from ..ops.cpu.run import append_slots
from ..stores.blocks import BlockLayout, Blocks
from .checked_worker import CheckedWorker
from .common import Layer
from .options import PAGE, ConfigurationError, Options


class Worker(CheckedWorker, CPUWorker):
    """The worker of vLLM on CPUs, with skimkv's attention in all layers."""

    def check_blocks(self, options: Options, layer: Layer) -> None:
        """Raise ConfigurationError if vLLM's page of keys is not that of skimkv's blocks."""
        if not options.has_budget and options.has_page:
            cache = self.vllm_config.cache_config
            layout = options.layout(layer.head_size, cache.block_size, self.vllm_config.model_config.dtype)
            check_layout_of_keys(layout, cache.cache_dtype)


def check_layout_of_keys(layout: BlockLayout, cache_dtype: str) -> None:
    """Write tokens as vLLM does and as skimkv does: raise ConfigurationError if a page of keys or values differs."""
    layout, H, n = BlockLayout(layout.tokens, layout.D, layout.dtype, "copy"), 2, 40  # the pages that both have
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, n, H, layout.D, generator=generator).to(layout.dtype)
    slots = torch.randperm(layout.tokens, generator=generator)[:n].sort().values
    width = layout.bytes_per_token // layout.dtype.itemsize
    theirs, ours = torch.zeros(2, 1, H, layout.tokens, width, dtype=layout.dtype).unbind(0)
    append_slots(Blocks(ours, layout, H, 1), k, v, slots)
    pages = Blocks(theirs, layout, H, 1).parts
    assert pages.channels is not None
    keys = pages.channels.flatten(2).unflatten(-1, (layout.tokens, layout.D))
    _custom_ops.cpu_attn_reshape_and_cache(
        k, v, keys, pages.v, slots, PAGE, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype
    )
    mine = Blocks(ours, layout, H, 1).parts
    assert mine.channels is not None
    if not torch.equal(mine.channels, pages.channels) or not torch.equal(mine.v, pages.v):
        raise ConfigurationError(f"vLLM's {PAGE!r} kernels lay out keys or values in another way than skimkv expects")
