"""A step that is recorded once and replayed: what a CUDA graph does, on a GPU as one, else launch by launch. Stores
that share memory."""

from __future__ import annotations

import pytest
import torch

from skimkv import ops
from skimkv.methods import parse
from skimkv.ops.gpu import device, tables
from skimkv.stores.base import Shape
from support import steps
from support.gpu import DEVICE, NAN_MEMORY, NEEDS_TRITON, filled_on_device, random_token, recorded
from support.kernels import close, exact

pytestmark = [NEEDS_TRITON, NAN_MEMORY]
B, H, G, D = SHAPE = Shape(2, 1, 2, 16)


METHODS = ["Dense()", "SparQ(r=4, k=20)", "H2O(k=24, local=3)"]
SAME_KERNELS = ["SparQ(r=4, k=20, channels='int8', mean_value=True)", "LMInfinite(k=20, initial=3)", "Strided(k=20)"]


@pytest.mark.parametrize("spec", [*METHODS, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SAME_KERNELS)])
def test_a_replayed_step_is_right_as_the_cache_grows(spec):
    """Past the end of a page and of a chunk; the same addresses throughout, and the host's numbers beside."""
    method, n = parse(spec), 253
    k, v = torch.randn(2, B, H, n, D, device=DEVICE)
    stores = []
    for name in ("ref", "gpu"):
        with ops.backend(name):
            store = method.store(SHAPE, torch.float32, DEVICE)
            method.prefill(store, k[:, :, None].expand(-1, -1, G, -1, -1), k, v, scale=0.25, pad=[0, 230])
        stores.append(store)
    one, two = stores
    now = torch.randn(B, H, G, D, device=DEVICE), *torch.randn(2, B, H, D, device=DEVICE)
    y = again = standing = None
    for step in range(8):
        for t in now:
            t.normal_()
        if step == 6:  # rows change places: where a kernel was given an address of the old rows, the footing differs
            one.select(torch.tensor([1, 0])), two.select(torch.tensor([1, 0]))
        with ops.backend("ref"):
            want = method.decode(one, *now, scale=0.25)
        with ops.backend("gpu"):
            device.prepare(two)
            if step == 6 and spec == "Dense()":  # nothing of a row is given to its kernel but tables
                assert device.footing([two]) == standing
            if step == 0:
                y = method.decode(two, *now, scale=0.25)  # makes tables and scratch
            elif step == 1 or (step == 6 and device.footing([two]) != standing):
                standing = device.footing([two])
                y, again = recorded(lambda: method.decode(two, *now, scale=0.25))
            else:
                again()
                device.advance(two)
        assert two.lengths == one.lengths
        assert step == 0 or device.footing([two]) == standing
        torch.testing.assert_close(y, want, rtol=1e-4, atol=2e-5)
    if hasattr(one, "filled"):
        assert two.filled == one.filled


@pytest.mark.parametrize("spec", ["SparQ(r=4, k=20)", "H2O(k=24)"])
def test_a_step_is_taken_back(spec):
    """As a benchmark does before each replay: the same length again, and nothing left for the host to tell."""
    method = parse(spec)
    with ops.backend("gpu"):
        store = method.store(SHAPE, torch.float32, DEVICE)
        k, v = torch.randn(2, B, H, 40, D, device=DEVICE)
        method.prefill(store, torch.randn(B, H, G, 40, D, device=DEVICE), k, v, scale=0.25)
        back = device.rewind(store)
        now = torch.randn(B, H, G, D, device=DEVICE), *torch.randn(2, B, H, D, device=DEVICE)
        for _ in range(2):
            method.decode(store, *now, scale=0.25)
            back()
        y, again = recorded(lambda: method.decode(store, *now, scale=0.25))
        first = y.clone()
        back()
        again()
        assert store.lengths == [40, 40] and y.isfinite().all()
        if spec.startswith("SparQ"):
            assert torch.equal(y, first)
        assert store.view.lengths.tensor.tolist() == [41] * (B * H)


def test_scratch_memory_belongs_to_the_workspace():
    """Stores that share a workspace share buffers, and keep sharing them when rows change places; no others do."""
    now = torch.randn(B, H, G, D, device=DEVICE), *torch.randn(2, B, H, D, device=DEVICE)
    one, two, alone = (parse("SparQ(r=4, k=20)").store(SHAPE, torch.float32, DEVICE) for _ in range(3))
    two.workspace = one.workspace
    with ops.backend("gpu"):
        for store in (one, two, alone):
            parse("SparQ(r=4, k=20)").decode(store, *now, scale=0.25)
        buffers = dict(one.workspace.buffers)
        two.select(torch.tensor([1, 0]))
        parse("SparQ(r=4, k=20)").decode(two, *now, scale=0.25)
    assert two.workspace is one.workspace and one.workspace is not one.fork().workspace
    assert buffers and all(one.workspace.buffers[name] is buffer for name, buffer in buffers.items())
    addresses = {buffer.data_ptr() for buffer in buffers.values()}
    assert addresses.isdisjoint(buffer.data_ptr() for buffer in alone.workspace.buffers.values())


def test_what_would_allocate_is_refused_inside_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    store = parse("Dense()").store(SHAPE, torch.float32, "cpu")
    store.device = torch.device("cuda")
    with pytest.raises(RuntimeError, match="inside a captured step"):
        tables.scratch(tables.Batch.of(store), "logits", 10**9)
    assert not store.workspace.buffers


@pytest.mark.parametrize("channels", ["copy", "int4"])
def test_rows_that_share_memory(channels):
    """Forks of one row read it where it lies until a kernel needs it dense, and write beside it."""
    _, one = filled_on_device(16, [300], torch.float32, 2, channels, H=1)
    q = torch.randn(3, 1, 2, 16, device=DEVICE)
    with ops.backend("gpu"):
        twin, before = one.share([0, 0, 0]), one.uncounted("k").clone()
        for _ in range(3):
            new = random_token(twin)
            want = steps.dense(exact(twin), q.double(), 0.25, None, tuple(x.double() for x in new), reference=True)
            close(steps.dense(twin, q, 0.25, None, new), want, twin, q, 0.25)
    assert torch.equal(one.uncounted("k"), before) and one.lengths == [300] and twin.lengths == [303] * 3
