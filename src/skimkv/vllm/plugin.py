"""Where skimkv joins vLLM: the platform's hook that completes an engine's configuration, and its choice of backend.

Both are functions of the object `vllm.platforms.current_platform`, which every process has. The hook runs in the main
process before any worker starts, so a mistake in a spec is reported before weights are loaded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from .options import KEY, SUPPORTED_VERSIONS, ConfigurationError, Options

SLOTS_BACKEND = "skimkv.vllm.slots_backend.Backend"


class Classes(NamedTuple):
    """What skimkv puts into an engine on one platform: its attention backend, and its worker in the place of vLLM's."""

    backend: str
    worker: str
    replaced_worker: str


CPU = Classes("skimkv.vllm.backend.Backend", "skimkv.vllm.worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")
CUDA = Classes(
    "skimkv.vllm.cuda_backend.Backend", "skimkv.vllm.cuda_worker.CudaWorker", "vllm.v1.worker.gpu_worker.Worker"
)
_logger = logging.getLogger("vllm.skimkv")  # a child of vLLM's logger, so that vLLM's settings format it


def install() -> None:
    """Join this process's platform. A second call does nothing."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        classes = CUDA if current_platform.is_cuda() else CPU
        _wrap(current_platform, "check_and_update_config", _configure_after)
        if not current_platform.is_cuda():  # which asks the registry
            _wrap(current_platform, "get_attn_backend_cls", functools.partial(_choose_before, AttentionBackendEnum))
        if AttentionBackendEnum.CUSTOM.is_overridden() and AttentionBackendEnum.CUSTOM.get_path() != classes.backend:
            return  # another plugin's: `configure` refuses
        register_backend(AttentionBackendEnum.CUSTOM, classes.backend)
    except (ImportError, AttributeError) as error:
        _logger.warning("skimkv cannot decode in this version of vLLM (%s): it supports %s", error, SUPPORTED_VERSIONS)


def _wrap(platform: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    function = getattr(platform, name)
    if not hasattr(function, "skimkv_wraps"):
        wrapped = wrapper(function)
        wrapped.skimkv_wraps = function
        setattr(platform, name, wrapped)


def _configure_after(check_and_update_config: Any) -> Any:
    @functools.wraps(check_and_update_config)
    def wrapped(vllm_config: Any) -> None:
        """Let the platform check its settings, and then, if a method is asked for, make them fit it."""
        check_and_update_config(vllm_config)
        if isinstance(vllm_config.additional_config, dict) and KEY in vllm_config.additional_config:
            configure(vllm_config)

    return wrapped


def _choose_before(backends: Any, get_attn_backend_cls: Any) -> Any:
    @functools.wraps(get_attn_backend_cls)
    def wrapped(selected_backend: Any, *arguments: Any, **keywords: Any) -> Any:
        """Name our backend if it was selected: the CPU platform has no choice, and would answer with its own."""
        if selected_backend is backends.CUSTOM and backends.CUSTOM.get_path() == CPU.backend:
            from vllm.config import get_current_vllm_config

            return SLOTS_BACKEND if Options.of(get_current_vllm_config()).has_budget else CPU.backend
        return get_attn_backend_cls(selected_backend, *arguments, **keywords)

    return wrapped


def configure(vllm_config: Any) -> None:
    """Check that this engine can decode with the method that it asks for, and set it up.

    Raises ConfigurationError, in one line, if the spec is wrong or the engine has something that skimkv does not take.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    try:
        options = Options.of(vllm_config)
        options.check()
        classes = CUDA if options.on_cuda else CPU
        attention, parallel, cache = (
            vllm_config.attention_config,
            vllm_config.parallel_config,
            vllm_config.cache_config,
        )
        if attention.backend not in (None, AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
            raise ConfigurationError(f"the attention backend {attention.backend.name} is set: leave it out")
        if attention.backend_per_kind:
            raise ConfigurationError(f"backend_per_kind = {attention.backend_per_kind} is set: leave it out")
        if AttentionBackendEnum.CUSTOM.get_path() != classes.backend:
            raise ConfigurationError(f"another plugin has the CUSTOM backend: {AttentionBackendEnum.CUSTOM.get_path()}")
        if parallel.worker_cls not in (classes.replaced_worker, classes.worker):
            raise ConfigurationError(f"worker_cls = {parallel.worker_cls!r} is set: leave it out")
        attention.backend, parallel.worker_cls = AttentionBackendEnum.CUSTOM, classes.worker
        if not cache.user_specified_block_size:
            cache.block_size = options.block_size
        if options.has_budget:
            _read_prompts_whole(vllm_config)
    except AttributeError as error:
        raise ConfigurationError(f"this version of vLLM differs ({error})") from error


def _read_prompts_whole(vllm_config: Any) -> None:
    """Switch off prompts in chunks and the prefix cache, and make room for the longest prompt beside rows that decode.

    Says so in one line, because the memory of a step grows with it.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    needed = vllm_config.model_config.max_model_len + scheduler.max_num_seqs
    if scheduler.enable_chunked_prefill or cache.enable_prefix_caching or scheduler.max_num_batched_tokens < needed:
        scheduler.enable_chunked_prefill = cache.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, needed)
        _logger.info(
            "skimkv: %s keeps a part of a whole prompt, so prompts are not read in chunks (max_num_batched_tokens = "
            "%d), and there is no prefix cache", vllm_config.additional_config[KEY]["method"],
            scheduler.max_num_batched_tokens,
        )  # fmt: skip
