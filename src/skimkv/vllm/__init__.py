"""skimkv inside vLLM: the engine schedules requests and owns the blocks, and skimkv's kernels decode from them.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in every process. It changes nothing until
an engine asks for a method: `vllm serve MODEL --additional-config '{"skimkv": {"method": "SparQ(r=32, k=128)"}}'`.
"""

from __future__ import annotations


def register() -> None:
    """Let engines in this process ask for a method of skimkv."""
    from .plugin import install

    install()
