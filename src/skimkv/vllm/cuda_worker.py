"""The worker on CUDA."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from .checked_worker import CheckedWorker


class CudaWorker(CheckedWorker, Worker):
    """The worker of vLLM on CUDA, with skimkv's attention in all layers."""
