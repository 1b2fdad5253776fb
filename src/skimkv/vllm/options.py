"""What an engine asks for, and what is refused: one line each, in the main process, before weights are loaded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch

from ..methods import Dense, SparQ, TopK, parse
from ..methods.base import Method
from ..methods.slots import SlotMethod
from ..stores.base import Shape
from ..stores.blocks import BLOCK_CHANNELS, BlockLayout
from ..stores.quantise import GROUP, round_up
from ..stores.row_blocks import ROW_BLOCK_CHANNELS, RowBlockLayout
from ..stores.slot_blocks import bytes_of_slot
from ..stores.slots import Slots

KEY = "skimkv"  # of vLLM's additional_config
SUPPORTED_VERSIONS = "vLLM 0.32"


class ConfigurationError(RuntimeError):
    """What an engine asks for cannot be had; the message is one line.

    It is no ValueError, because vLLM's configuration classes turn those into reports of several lines.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"skimkv in vLLM: {problem} (skimkv supports {SUPPORTED_VERSIONS})")


@functools.cache
def parse_method(text: str) -> Method:
    """Parse the spec of a method once in a process. Raises ConfigurationError if it is wrong."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Options:
    """The method of an engine, and the configuration that it came with."""

    method: Method
    vllm_config: Any

    BLOCK_SIZE: ClassVar[int] = 1024  # tokens of a block on CPUs, unless the user asks for another size
    CUDA_BLOCK_SIZE: ClassVar[int] = GROUP  # the same on CUDA, where kernels walk over pages of so many tokens anyway
    SLOTS_TOGETHER: ClassVar[int] = 32  # a block of slots has a multiple, as vLLM on CPUs likes it

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """The options in an engine's configuration. Raises ConfigurationError if they are wrong."""
        options = vllm_config.additional_config[KEY]
        example = f'{{"{KEY}": {{"method": "SparQ(r=32, k=128)"}}}}'
        if not isinstance(options, dict) or set(options) != {"method"} or not isinstance(options["method"], str):
            raise ConfigurationError(f"{KEY} = {options!r} must have one text, as in {example}")
        return cls(parse_method(options["method"]), vllm_config)

    @property
    def on_cuda(self) -> bool:
        """Whether the engine runs on CUDA; else it runs on CPUs, or `check` refuses it."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cuda())

    @property
    def has_budget(self) -> bool:
        """Whether the method keeps a budget of tokens, so that a request has one block; else all tokens are kept."""
        return isinstance(self.method, SlotMethod)

    @property
    def block_size(self) -> int:
        """Tokens of a block, unless the user asks for another size: the budget where there is one."""
        if not isinstance(self.method, SlotMethod):
            return self.CUDA_BLOCK_SIZE if self.on_cuda else self.BLOCK_SIZE
        return round_up(self.method.store(self._shape(), torch.float32).capacity, self.SLOTS_TOGETHER)

    def bytes_per_token(self, D: int) -> int:
        """The bytes that a block has for each token of one KV head, whose size is D."""
        dtype: torch.dtype = self.vllm_config.model_config.dtype
        if isinstance(self.method, SlotMethod):
            return bytes_of_slot(self.method.store(Shape(1, 1, 1, D), dtype))
        block_size = self.vllm_config.cache_config.block_size
        layout = self.row_layout(1, D, block_size, dtype) if self.on_cuda else self.layout(D, block_size, dtype)
        return layout.bytes_per_token

    @property
    def channels(self) -> str:
        """The index of the blocks: that of SparQ; for other methods none, or on CPUs the copy that vLLM's page is."""
        return self.method.channels if isinstance(self.method, SparQ) else "none" if self.on_cuda else "copy"

    def check(self) -> None:
        """Raise ConfigurationError unless the engine can decode with the method."""
        self._check_engine()
        self._check_method()
        if self.has_budget:
            self._check_blocks_of_slots()
        else:
            self._check_blocks_of_tokens()

    def row_layout(self, H: int, D: int, block_size: int, dtype: torch.dtype) -> RowBlockLayout:
        """The layout of blocks on CUDA. Raises ConfigurationError if there can be none."""
        layout = RowBlockLayout(block_size, H, D, dtype, self.channels)
        try:
            layout.check()
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return layout

    def layout(self, D: int, block_size: int, dtype: torch.dtype) -> BlockLayout:
        """The layout of blocks on CPUs. Raises ConfigurationError if there can be none."""
        layout = BlockLayout(block_size, D, dtype, self.channels, self._has_mean())
        try:
            layout.check()
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return layout

    def _has_mean(self) -> bool:
        """Whether blocks hold the mean of V: where the method's store would."""
        if not isinstance(self.method, SparQ):
            return False
        store = self.method.store(self._shape()._replace(D=max(self.method.r, 32)), torch.float32)
        return store.v_mean is not None

    def _shape(self) -> Shape:
        """The sizes of one row in one layer of one process."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        H = model.get_num_kv_heads(parallel)
        return Shape(1, H, model.get_num_attention_heads(parallel) // H, model.get_head_size())

    def _check_engine(self) -> None:
        from vllm.platforms import current_platform

        c = self.vllm_config
        model, parallel, cache = c.model_config, c.parallel_config, c.cache_config
        refused = {
            f"device {current_platform.device_type!r} is not supported, only cpu and cuda are": not (
                current_platform.is_cpu() or self.on_cuda
            ),
            "multi-head latent attention (MLA) is not supported": model.use_mla,
            "models with state-space or linear-attention layers are not supported": model.is_hybrid,
            "encoder-decoder models are not supported": model.is_encoder_decoder,
            f"runner {model.runner_type!r} does not decode, only 'generate' does": model.runner_type != "generate",
            f"a cache of {cache.cache_dtype} is not supported: leave out --kv-cache-dtype": cache.cache_dtype
            not in ("auto", str(model.dtype).removeprefix("torch.")),
            "speculative decoding is not supported": c.speculative_config is not None,
            "KV connectors are not supported": c.kv_transfer_config is not None,
            "context parallelism is not supported": parallel.decode_context_parallel_size > 1
            or parallel.prefill_context_parallel_size > 1,
            "sharing a cache between layers (kv_sharing_fast_prefill) is not supported": cache.kv_sharing_fast_prefill,
        }
        for problem, is_so in refused.items():
            if is_so:
                raise ConfigurationError(problem)

    def _check_blocks_of_slots(self) -> None:
        cache, scheduler = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        if cache.user_specified_block_size and cache.block_size != self.block_size:
            raise ConfigurationError(
                f"--block-size {cache.block_size} must be {self.block_size}, the budget of a request: leave it out"
            )
        if scheduler.long_prefill_token_threshold:
            raise ConfigurationError(
                f"--long-prefill-token-threshold {scheduler.long_prefill_token_threshold} is not supported with "
                f"{self.method!r}, which reads prompts whole: leave it out"
            )

    def _check_blocks_of_tokens(self) -> None:
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        if cache.user_specified_block_size and cache.block_size % GROUP:
            raise ConfigurationError(f"--block-size {cache.block_size} must be a multiple of {GROUP}")
        if self.on_cuda:
            return
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(model.dtype, self.BLOCK_SIZE, model.get_head_size(), cache.cache_dtype)
        if isa == "amx":
            raise ConfigurationError(
                "this CPU has AMX, for which vLLM packs bfloat16 keys in tiles: use --dtype float16 or float32"
            )
        if isa != "vec":
            raise ConfigurationError(f"vLLM's {isa!r} layout of keys is not supported, only 'vec' is")

    def _check_method(self) -> None:
        if not self.has_budget:
            self._check_method_of_blocks()
        shape, dtype = self._shape(), self.vllm_config.model_config.dtype
        try:
            store = self.method.store(shape, dtype)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if self.on_cuda:
            self._check_cuda(shape)
        elif isinstance(self.method, SlotMethod):
            self._check_slots(self.method, store)
        else:
            self.layout(shape.D, self.BLOCK_SIZE, dtype)

    def _check_cuda(self, shape: Shape) -> None:
        from ..ops.gpu import launch

        if launch.missing is not None:
            raise ConfigurationError(launch.missing)
        if self.has_budget:
            raise ConfigurationError(f"{self.method!r} has a budget, which is supported on CPUs only")
        if self._has_mean():
            raise ConfigurationError(
                f"{self.method!r} uses the mean of the values, which blocks on CUDA do not have: add mean_value=False"
            )
        if shape.D % launch.TENSOR_CORE or shape.D > launch.LARGEST_HEAD:
            raise ConfigurationError(
                f"no kernel for heads of {shape.D} numbers; it must be a multiple of {launch.TENSOR_CORE} up to "
                f"{launch.LARGEST_HEAD}"
            )

    def _check_slots(self, method: SlotMethod, store: Slots) -> None:
        if store.grows:
            name = type(method).__name__
            raise ConfigurationError(f"{name} is not supported in blocks: every new token takes a new slot")
        if not method.uses_kernel("cpu"):
            raise ConfigurationError(f"{method!r} has no kernel, and only kernels read blocks")
        if isinstance(method.k, float):
            raise ConfigurationError(
                f"k = {method.k} is a share of the prompt, and all requests have blocks of one size: give k in tokens"
            )
        if store.fixed_k is not None:
            raise ConfigurationError(
                f"{method!r} counts positions in the cache, so it turns its first keys by the model's rotation at "
                f"every step, and vLLM's attention layers do not have that rotation: use LMInfinite(k={method.k})"
            )

    def _check_method_of_blocks(self) -> None:
        method, name = self.method, type(self.method).__name__
        if not isinstance(method, Dense | SparQ | TopK):
            raise ConfigurationError(
                f"{name} is not supported in blocks, only Dense, SparQ, TopK and methods with a budget are"
            )
        if method.kv is not None:
            raise ConfigurationError(f"kv={method.kv!r} is not supported: blocks hold keys and values as they are")
        if not method.uses_kernel("gpu" if self.on_cuda else "cpu"):
            raise ConfigurationError(f"{method!r} has no kernel: leave out mean_value=True")
        supported = ROW_BLOCK_CHANNELS if self.on_cuda else BLOCK_CHANNELS
        if self.channels not in supported:
            raise ConfigurationError(f"channels={self.channels!r} is not supported: use {' or '.join(supported)}")


def refuse_layer(layer: dict[str, Any]) -> None:
    """Raise ConfigurationError if an attention layer has something that the kernels on blocks do not take."""
    refused = {
        "attention sinks are not supported": layer["sinks"] is not None,
        "ALiBi is not supported": layer["alibi_slopes"] is not None,
        f"a sliding window of {layer['sliding_window']} tokens is not supported": layer["sliding_window"] is not None,
        f"attention of type {layer['attn_type']!r} is not supported": layer["attn_type"] != "decoder",
        "sharing a cache between layers is not supported": layer["kv_sharing_target_layer_name"] is not None,
    }
    for problem, is_so in refused.items():
        if is_so:
            raise ConfigurationError(problem)
