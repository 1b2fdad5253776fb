"""The plugin's backend for CUDA in an engine on CPUs: skimkv's kernels are interpreted, vLLM's kernel is replaced.

What is left to a GPU: vLLM's own kernel of prompts, the compiled kernels, CUDA graphs, and CUDA's worker.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from skimkv.vllm import cuda_backend, plugin
from skimkv.vllm.checked_worker import CheckedWorker
from skimkv.vllm.options import Options


class InterpretedWorker(CheckedWorker, CPUWorker):
    """The worker of vLLM on CPUs, with the backend for CUDA."""


def use_cuda_backend() -> None:
    """Let engines that are made in this process from now on use the backend for CUDA."""
    Options.on_cuda = True
    worker = f"{__name__}.{InterpretedWorker.__name__}"
    plugin.CPU = plugin.CUDA = plugin.CUDA._replace(worker=worker, replaced_worker=plugin.CPU.replaced_worker)
    cuda_backend.unified_attention = attend_prompts


def attend_prompts(
    *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale,
):  # fmt: skip
    """Do what vLLM's unified_attention does with these arguments: k, v (blocks,tokens,H,D)."""
    assert causal and window_size == (-1, -1) and q_descale is k_descale is v_descale is None and softcap == 0
    assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
    for row, (n, blocks) in enumerate(zip(seqused_k.tolist(), block_table.long(), strict=True)):
        at = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        assert at.stop - at.start <= max_seqlen_q and n <= max_seqlen_k
        used = blocks[: -(-n // k.shape[1])]
        keys, values = (x[used].flatten(0, 1)[:n].transpose(0, 1) for x in (k, v))
        queries = q[at].transpose(0, 1)
        visible = torch.arange(n)[None] <= torch.arange(n - queries.shape[1], n)[:, None]
        groups = queries.shape[0] // keys.shape[0]
        y = torch.nn.functional.scaled_dot_product_attention(
            queries, *(x.repeat_interleave(groups, 0) for x in (keys, values)), attn_mask=visible, scale=softmax_scale
        )
        out[at] = y.transpose(0, 1)
