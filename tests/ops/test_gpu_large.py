"""The GPU kernels at the sizes they are for: several splits, tiles and waves of programs. Only where there is a GPU."""

from __future__ import annotations

import pytest
import torch

import skimkv
from skimkv import ops
from skimkv.methods import parse
from skimkv.stores.base import Shape
from support import steps
from support.gpu import DEVICE, compare, filled_on_device
from support.tiny_models import build, prompt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("channels", ["copy", "int8", "int4", "none"])
@pytest.mark.parametrize(
    ("lengths", "H", "G", "D"), [([30000], 4, 1, 128), ([9000, 20, 4097], 8, 4, 128), ([5000] * 80, 4, 1, 64)]
)
def test_sparq_and_dense(channels, lengths, H, G, D):
    r, k, local = 32, 200, 50
    q, store = filled_on_device(D, lengths, torch.bfloat16, G, channels, r, k, local, H=H)
    compare("dense", q, store, D**-0.5, None)
    compare("sparq", q, store, D**-0.5, None, r, k, local, "coverage", G == 1)


@pytest.mark.parametrize("spec", ["H2O(k=3000)", "LMInfinite(k=3000)"])
def test_methods_that_drop(spec):
    """Thousands of slots, split; a hundred steps."""
    method, shape = parse(spec), Shape(2, 4, 4, 64)
    k, v = torch.randn(2, 2, 4, 4000, 64, device=DEVICE).half()
    stores, outputs = [], []
    for name in ("ref", "gpu"):
        torch.manual_seed(1)
        with ops.backend(name):
            store, y = method.store(shape, torch.float16, DEVICE), []
            method.prefill(store, k[:, :, None].expand(-1, -1, 4, -1, -1), k, v, scale=0.125)
            for _ in range(100):
                q, kv = torch.randn(2, 4, 4, 64, device=DEVICE).half(), torch.randn(2, 2, 4, 64, device=DEVICE).half()
                y.append(method.decode(store, q, *kv, scale=0.125))
            stores.append(store), outputs.append(torch.stack(y).float())
    # two scores may be so close that the order of a sum decides which token goes: few of its outputs can differ
    far = (outputs[0] - outputs[1]).abs().amax((2, 3, 4)) > 4e-3
    assert far.float().mean() < 0.05 and stores[0].lengths == stores[1].lengths


def test_many_steps_of_a_captured_graph():
    """Over several chunks, where tables are replaced and the graph is captured again."""
    model = build("llama", num_key_value_heads=2, head_dim=16, max_position_embeddings=4096).to(DEVICE)
    options = {"max_new_tokens": 1500, "do_sample": False}
    for spec in ("Dense()", "SparQ(r=4, k=64, channels='int8')", "H2O(k=128)"):
        expected = model.generate(prompt(2, 300).to(DEVICE), past_key_values=skimkv.Cache(model, spec), **options)
        with skimkv.attach(model, spec, compile="eager"):
            got = model.generate(prompt(2, 300).to(DEVICE), **options)
        assert got.tolist() == expected.tolist(), spec
    skimkv.detach(model)


def test_the_reference_runs_there_too():
    q, store = filled_on_device(64, [500], torch.float16, 2, "copy", H=2)
    with ops.backend("ref"):
        assert steps.dense(store, q, 0.125, None).device.type == DEVICE.type
    assert steps.dense(store, q, 0.125, None, reference=True).isfinite().all()
