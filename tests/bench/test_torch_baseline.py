"""PyTorch's dense paths: every one computes dense attention, in the format that its name says."""

from __future__ import annotations

import pytest
import torch

from skimkv.bench.torch_baseline import dense_calls, dtype_of


@pytest.mark.parametrize("G", [1, 4])
def test_every_path_computes_dense_attention(G):
    B, H, N, D = 2, 2, 50, 16
    q, k, v = torch.randn(B, H, G, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    expected = ((q * D**-0.5) @ k.transpose(-1, -2)).softmax(-1) @ v
    calls = dense_calls(q, k, v, [torch.float32, torch.bfloat16], 1 << 30)
    assert {"torch:matmul:float32", "torch:sdpa-math:float32", "torch:sdpa-math:bfloat16"} <= set(calls)
    for name, call in calls.items():
        y = call()
        assert y.dtype == dtype_of(name)
        error = (y.reshape(B, H, G, D).float() - expected).abs().max()
        assert error < (1e-5 if name.endswith("float32") else 0.05), name


def test_the_copies_of_the_math_backend_must_fit():
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 50, 16)
    copies = 4 * 2 * (2 * k.nbytes)  # a quarter of the spare bytes: K and V, for each of two query heads
    names = [set(dense_calls(q, k, k, [torch.float32], spare)) for spare in (copies, copies + 1)]
    assert names[1] - names[0] == {"torch:sdpa-math:float32"}
