"""What an engine asks for, and what is refused: one line each, in the main process, before weights are loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from ..methods import parse
from ..methods.base import Method
from ..methods.slots import SlotMethod
from ..ops import KernelStep
from ..ops.cpu.run import OPERATIONS, CpuBackend
from ..stores.base import Shape, Store, Workspace
from ..stores.blocks import BlockLayout, Blocks
from ..stores.full import Full
from ..stores.quantise import GROUP, round_up
from ..stores.row_blocks import RowBlockLayout, RowBlocks
from ..stores.slot_blocks import SlotBlocks, bytes_of_slot
from ..stores.slots import Slots

KEY = "skimkv"  # of vLLM's additional_config
PAGE = "vec"  # vLLM's word for the layout of keys that skimkv's kernels read: a block channel by channel
TILES = "amx"  # vLLM's word for the layout that it would choose for bfloat16 on CPUs with AMX, which they do not read
SUPPORTED_VERSIONS = "vLLM 0.32"


class ConfigurationError(RuntimeError):
    """What an engine asks for cannot be had; the message is one line.

    It is no ValueError, because vLLM's configuration classes turn those into reports of several lines.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"skimkv in vLLM: {problem} (skimkv supports {SUPPORTED_VERSIONS})")


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Make a ValueError a ConfigurationError."""
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


@functools.cache
def parse_method(text: str) -> Method:
    """Parse the spec of a method once in a process. Raises ConfigurationError if it is wrong."""
    with one_line():
        return parse(text)


@dataclasses.dataclass(frozen=True)
class Options:
    """The method of an engine, and the configuration that it came with."""

    method: Method
    vllm_config: Any

    BLOCK_SIZE: ClassVar[int] = 1024  # tokens of a block on CPUs, unless the user asks for another size
    CUDA_BLOCK_SIZE: ClassVar[int] = GROUP  # the same on CUDA, where kernels walk over pages of this size anyway
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
    def store(self) -> Store:
        """The empty store of one request in one layer. Raises ConfigurationError if there can be none."""
        with one_line():
            store: Store = self.method.store(self._shape(), self.vllm_config.model_config.dtype)
        return store

    @property
    def block_size(self) -> int:
        """Tokens of a block, unless the user asks for another size: the budget where there is one."""
        store = self.store
        if isinstance(store, Slots):
            return round_up(store.capacity, self.SLOTS_TOGETHER)
        return self.CUDA_BLOCK_SIZE if self.on_cuda else self.BLOCK_SIZE

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a block has for each token of one KV head."""
        store, size = self.store, self.vllm_config.cache_config.block_size
        if isinstance(store, Slots):
            return bytes_of_slot(store)
        _, H, _, D = store.shape
        layout = self.row_layout(H, D, size, store.dtype) if self.on_cuda else self.layout(D, size, store.dtype)
        return layout.bytes_per_token

    @property
    def channels(self) -> str:
        """The index of the blocks: the store's where it scores; else none, or on CPUs the copy that vLLM's page is."""
        store = self.store
        if isinstance(store, Full) and self._kernel().r:
            return store.channels
        return "copy" if self.has_page else "none"

    @property
    def has_page(self) -> bool:
        """Whether a block has the page of keys of vLLM's attention on CPUs; with quantised rows there is none."""
        return not self.on_cuda and self.method.kv is None

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
        with one_line():
            layout.check()
        return layout

    def layout(self, D: int, block_size: int, dtype: torch.dtype) -> BlockLayout:
        """The layout of blocks on CPUs. Raises ConfigurationError if there can be none."""
        store = self.store
        means = isinstance(store, Full) and store.group_means
        mean = means or self._kernel().mean_value
        layout = BlockLayout(block_size, D, dtype, self.channels, mean, means, self.method.kv)
        with one_line():
            layout.check()
        return layout

    def _kernel(self) -> KernelStep:
        """The step of the method's kernel. Raises ConfigurationError if it has none."""
        kernel = self.method.kernel(self.store)
        if kernel is None:
            raise ConfigurationError(f"{self.method!r} has no kernel, and only kernels read blocks")
        return kernel

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
        if isa not in (PAGE, TILES):
            raise ConfigurationError(f"vLLM's {isa!r} layout of keys is not supported, only {PAGE!r} is")

    def _check_method(self) -> None:
        store = self.store
        if self.on_cuda:
            self._check_cuda()
        if isinstance(store, Slots):
            self._check_slots(store)
        else:
            self._check_tokens(store)

    def _check_cuda(self) -> None:
        from ..ops.gpu import launch, tables

        if launch.missing is not None:
            raise ConfigurationError(launch.missing)
        if self.has_budget:
            raise ConfigurationError(f"{self.method!r} has a budget, which is supported on CPUs only")
        if getattr(self.store, "group_means", False):
            raise ConfigurationError(f"{self.method!r} is supported in blocks on CPUs only")
        dtype, device = self.vllm_config.model_config.dtype, torch.device("cuda")
        with one_line():
            launch.validate(tables.Batch(self._shape(), dtype, device, Workspace()))

    def _check_slots(self, store: Slots) -> None:
        method = self.method
        if store.grows:
            name = type(method).__name__
            raise ConfigurationError(f"{name} is not supported in blocks: every new token takes a new slot")
        if SlotBlocks not in OPERATIONS[self._kernel().operation].stores:
            raise ConfigurationError(f"{method!r} has no kernel that reads blocks")
        if isinstance(k := getattr(method, "k", None), float):
            raise ConfigurationError(
                f"k = {k} is a share of the prompt, and all requests have blocks of one size: give k in tokens"
            )
        if store.fixed_k is not None:
            raise ConfigurationError(
                f"{method!r} counts positions in the cache, so it turns its first keys by the model's rotation at "
                f"every step, and vLLM's attention layers do not have that rotation: use LMInfinite(k={k})"
            )

    def _check_tokens(self, store: Store) -> None:
        method, kernel = self.method, self._kernel()
        if self.on_cuda and method.kv is not None:
            raise ConfigurationError(f"kv={method.kv!r} is not supported in blocks on CUDA")
        (_, H, G, D), tokens = store.shape, self.block_size
        if self.on_cuda:
            from ..ops.gpu.run import PagedBackend

            layout = self.row_layout(H, D, tokens, store.dtype)
            empty = torch.empty(0, H, tokens, layout.bytes_per_token, dtype=torch.uint8)
            supported = PagedBackend.supports(kernel, RowBlocks(empty, layout, G))
        else:
            of_head = self.layout(D, tokens, store.dtype)
            empty = torch.empty(0, H, tokens, of_head.bytes_per_token, dtype=torch.uint8)
            supported = CpuBackend().supports(kernel, Blocks(empty, of_head, H, G))
        if not supported or type(method).take is not Method.take:
            why = ", which have no mean of the values: add mean_value=False" if kernel.mean_value else ""
            raise ConfigurationError(f"{method!r} is not supported in blocks{' on CUDA' * self.on_cuda}{why}")


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
