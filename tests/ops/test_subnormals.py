"""Results of kernels below the least normal float32 are zero, and the caller's own arithmetic keeps such numbers."""

from __future__ import annotations

import platform

import pytest
import torch

from skimkv import ops
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from support import steps
from support.kernels import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_below_the_least_normal_number_is_none(threads):
    """The second of two positions has exp(-95) = 5.5e-42 of the first one's weight; only its value is not zero."""
    D, far = 16, -95.0
    k, v = torch.zeros(2, 1, 2, D), torch.zeros(2, 1, 2, D)
    k[:, :, 1, 0], v[:, :, 1] = far, 1.0
    store = Full(Shape(2, 1, 1, D), torch.float32, "cpu")
    store.append(k, v)
    q = torch.zeros(2, 1, 1, D)
    q[..., 0] = 1.0
    want = steps.dense(store, q.double(), 1.0, None, reference=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ops.backend("cpu"):
            got = steps.dense(store, q, 1.0, None)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, want.float(), rtol=0, atol=torch.finfo(torch.float32).tiny)
    if platform.machine() in ("x86_64", "AMD64"):
        assert torch.equal(got, torch.zeros_like(got))
    assert 0 < (torch.full((4,), 1e-38) * 0.01).max() < torch.finfo(torch.float32).tiny
