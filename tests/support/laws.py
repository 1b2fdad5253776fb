"""Specs of every method for the laws, and a run of a method over random sequences."""

from __future__ import annotations

import torch

from skimkv.methods.base import Method
from skimkv.testing import OF_CODES, Sequences, assert_close, decode, prompt

SMALL = [
    "Dense()", "SparQ(r=4, k=16)", "SparQ(r=5, k=9, local=0, mean_value=True, temperature='sqrt_d', channels='none')",
    "SparQ(r=4, k=16, channels='int8', mean_value=True)",
    "SparQ(r=4, k=16, local=16, channels='int4', temperature='sqrt_r')", "Skim(k=12, r=5)", "Skim(k=1)", "TopK(k=12)",
    "TopK(k=12, oracle=True)", "LowRank(r=6, k=12)", "LMInfinite(k=20)", "LMInfinite(k=7, initial=0)",
    "LMInfinite(k=20, initial=5, positions='cache')", "Strided(k=20)", "Strided(k=9, local=8)", "Fixed(k=20, c=2)",
    "Fixed(k=9, l=4)", "Fixed(k=0.2, c=2)", "H2O(k=24)", "H2O(k=0.2)", "H2O(k=24, score='mean')",
    "H2O(k=0.2, pattern='fixed')", "H2O(k=24, pattern='top')", "Quest(page=8, k=24)", "Quest(page=5, k=9)",
    "SnapKV(k=24)", "SnapKV(k=0.2, window=4, pool=3)", "StreamingLLM(k=20)", "StreamingLLM(k=0.2)", "TOVA(k=24)",
    "TOVA(k=0.2)", "TopK(k=12, mean_value=True)", "SubGen(k=10, recent=8)", "SubGenStream(delta=2.0, t=3, s=8)",
    "TopP(p=0.6)", "RaBitQ(k=12)", "SANTA(s=12)", "SANTA(s=12, draws='systematic')",
    "VAttention(epsilon=0.5, k=12, base=8, local=3)",
    "VAttention(epsilon=0.9, k=5, base=20, r=7, verified='output')", "RocketKV(k=40, top=16)",
    "RocketKV(k=0.4, window=4, pool=3, page=5, top=12, r=7)", "Skim(k=3, error=0.3)",
]  # fmt: skip
QUANTISED = [
    "Dense(kv='int4')", "Dense(kv='int8')", "SparQ(r=4, k=16, kv='int4')",
    "SparQ(r=5, k=9, channels='none', kv='int4')", "SparQ(r=5, k=9, channels='none', kv='int8')",
    "SparQ(r=4, k=16, channels='int4', mean_value=True, kv='int8')", "Skim(k=12, kv='int8')",
    "Skim(k=12, r=16, kv='int4')", "TopK(k=12, kv='int4')", "TopK(k=12, oracle=True, kv='int8')",
    "LowRank(r=6, k=12, kv='int4')", "LMInfinite(k=20, kv='int8')", "LMInfinite(k=20, positions='cache', kv='int4')",
    "Strided(k=20, kv='int4')", "Fixed(k=20, c=2, kv='int8')", "H2O(k=24, kv='int4')", "H2O(k=24, kv='int8')",
    "H2O(k=0.2, kv='int4')", "Quest(page=8, k=24, kv='int4')", "SnapKV(k=24, kv='int8')",
    "StreamingLLM(k=20, kv='int8')", "TOVA(k=24, kv='int4')", "SubGen(k=10, recent=8, kv='int4')",
    "TopP(p=0.7, kv='int8')", "RaBitQ(k=12, kv='int4')", "SANTA(s=12, kv='int4')",
    "VAttention(epsilon=0.5, k=12, base=8, kv='int8')",
    "RocketKV(k=40, top=16, kv='int4')", "Skim(k=2, r=7, error=0.5, kv='int8')",
]  # fmt: skip
SMALL += QUANTISED
FULL = [
    "SparQ(r=4, k=5000)", "SparQ(r=4, k=5000, channels='none', mean_value=True)",
    "SparQ(r=4, k=5000, channels='int8')", "SparQ(r=4, k=5000, channels='int4', mean_value=True)", "Skim(k=5000)",
    "TopK(k=5000)", "TopK(k=5000, oracle=True)", "LowRank(r=4, k=5000)", "LMInfinite(k=5000)",
    "LMInfinite(k=5000, positions='cache')", "Strided(k=5000)", "Fixed(k=5000)", "H2O(k=5000)",
    "H2O(k=5000, score='mean')", "Quest(page=16, k=5000)", "SnapKV(k=5000)", "StreamingLLM(k=5000)", "TOVA(k=5000)",
    "TopK(k=5000, mean_value=True)", "SubGen(k=4000, recent=1000)", "SparQ(r=4, k=5000, mean_value=True, kv='int4')",
    "SparQ(r=4, k=5000, channels='none', kv='int8')", "Skim(k=5000, r=1, kv='int8')", "TopK(k=5000, kv='int8')",
    "TopK(k=5000, oracle=True, kv='int4')", "LowRank(r=4, k=5000, kv='int8')", "LMInfinite(k=5000, kv='int4')",
    "Strided(k=5000, kv='int8')", "Fixed(k=5000, kv='int4')", "H2O(k=5000, kv='int4')",
    "Quest(page=16, k=5000, kv='int8')", "SnapKV(k=5000, kv='int4')", "SubGen(k=4000, recent=1000, kv='int8')",
    "TopP(p=1)", "RaBitQ(k=5000)", "SANTA(s=5000)", "VAttention(k=5000)", "RocketKV(k=5000, top=5000)",
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(
    method: Method,
    x: Sequences,
    n: int,
    pad: list[int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
):
    """A prompt of n tokens, then the rest token by token: the store and the decoded outputs (steps,B,H,G,D)."""
    store = prompt(method, x.tokens(0, n), pad, softcap, sinks)
    return store, decode(method, store, x.tokens(n, x.k.shape[2]), softcap, sinks)


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, kv: str | None = None) -> None:
    """Assert that results are equal up to the rounding of dtype, and of kernels for rows that are kept as kv."""
    assert_close(a, b, dtype, "what must be equal", OF_CODES if kv else 0.0)
