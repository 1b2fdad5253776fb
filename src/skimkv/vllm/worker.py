"""The worker: it checks that every layer decodes with skimkv, says so in one line, and counts what was read."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.worker.cpu_worker import CPUWorker

from ..ops.cpu.paged import append_slots
from ..stores.blocks import BlockLayout, Blocks
from .backend import CountingImplementation
from .options import ConfigurationError, Options

_logger = logging.getLogger("vllm.skimkv")


class Worker(CPUWorker):
    """The worker of vLLM on CPUs, with skimkv's attention in all layers."""

    def load_model(self, *arguments: Any, **keywords: Any) -> None:
        """Load the model and check its layers. Raises ConfigurationError if one does not decode with skimkv."""
        super().load_model(*arguments, **keywords)
        options, layers = Options.of(self.vllm_config), self._layers()
        others = [name for name, layer in layers.items() if not isinstance(layer, CountingImplementation)]
        if others or not layers:
            raise ConfigurationError(f"{len(others)} of {len(layers)} attention layers use another backend: {others}")
        cache, one = self.vllm_config.cache_config, next(iter(layers.values()))
        if not options.has_budget:
            layout = options.layout(one.head_size, cache.block_size, self.vllm_config.model_config.dtype)
            check_layout_of_keys(layout, cache.cache_dtype)
        if self.rank == 0:
            _logger.info(
                "skimkv: %r decodes in all %d attention layers, from %s of %d tokens, %d bytes a token and head",
                options.method, len(layers), "one block a request" if options.has_budget else "blocks",
                cache.block_size, options.bytes_per_token(one.head_size),
            )  # fmt: skip

    def get_kv_cache_spec(self) -> Any:
        """What a block of each layer holds; the backend reads the method from the current configuration."""
        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def skimkv_counters(self) -> dict[str, Any]:
        """What this worker's layers decoded since it started: `LLM.collective_rpc("skimkv_counters")`.

        layers: how many there are. steps: rows of a batch that decoded, summed over the layers. rows: the same times
        the KV heads of this worker. bytes: what these steps read and wrote of the cache, by Method.traffic.
        """
        layers = self._layers().values()
        return {
            "method": repr(Options.of(self.vllm_config).method),
            "rank": self.rank,
            "layers": len(layers),
            "steps": sum(layer.steps for layer in layers),
            "rows": sum(layer.rows for layer in layers),
            "bytes": sum(layer.bytes for layer in layers),
        }

    def _layers(self) -> dict[str, Any]:
        """The implementation of every attention layer of this worker, by the layer's name."""
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        return {name: getattr(layer, "impl", None) for name, layer in layers.items()}


def check_layout_of_keys(layout: BlockLayout, cache_dtype: str) -> None:
    """Write tokens as vLLM does and as skimkv does: raise ConfigurationError if a page of keys or values differs."""
    layout, H, n = layout._replace(channels="copy", mean=False), 2, 40  # the pages that both have
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, n, H, layout.D, generator=generator).to(layout.dtype)
    slots = torch.randperm(layout.tokens, generator=generator)[:n].sort().values
    width = layout.bytes_per_token // layout.dtype.itemsize
    theirs, ours = torch.zeros(2, 1, H, layout.tokens, width, dtype=layout.dtype).unbind(0)
    append_slots(Blocks(ours, layout, H, 1), k, v, slots)
    pages = Blocks(theirs, layout, H, 1).parts
    keys = pages.channels.flatten(2).unflatten(-1, (layout.tokens, layout.D))
    isa = _get_attn_isa(layout.dtype, layout.tokens, layout.D, cache_dtype)
    _custom_ops.cpu_attn_reshape_and_cache(
        k, v, keys, pages.v, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype
    )
    mine = Blocks(ours, layout, H, 1).parts
    if not torch.equal(mine.channels, pages.channels) or not torch.equal(mine.v, pages.v):
        raise ConfigurationError(f"vLLM's {isa!r} kernels lay out keys or values in another way than skimkv expects")
