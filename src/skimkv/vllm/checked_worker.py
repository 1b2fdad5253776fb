"""What the workers of all platforms have in common: every layer is checked, and what was read is counted."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.worker_base import WorkerBase

from .common import Layer
from .options import ConfigurationError, Options

_logger = logging.getLogger("vllm.skimkv")


class CheckedWorker(WorkerBase):
    """It comes before vLLM's own class of the platform among the bases of a worker."""

    def load_model(self, *arguments: Any, **keywords: Any) -> None:
        """Load the model and check its layers. Raises ConfigurationError if one does not decode with skimkv."""
        super().load_model(*arguments, **keywords)
        options, layers = Options.of(self.vllm_config), self._layers()
        others = [name for name, layer in layers.items() if not isinstance(layer, Layer)]
        if others or not layers:
            raise ConfigurationError(f"{len(others)} of {len(layers)} attention layers use another backend: {others}")
        cache, one = self.vllm_config.cache_config, next(iter(layers.values()))
        self.check_blocks(options, one)
        if self.rank == 0:
            _logger.info(
                "skimkv: %r decodes in all %d attention layers, from %s of %d tokens, %d bytes a token and head",
                options.method, len(layers), "one block a request" if options.has_budget else "blocks",
                cache.block_size, options.bytes_per_token,
            )  # fmt: skip

    def check_blocks(self, options: Options, layer: Layer) -> None:
        """Raise ConfigurationError if vLLM's kernels of prompts lay out a block in another way than skimkv's."""

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
