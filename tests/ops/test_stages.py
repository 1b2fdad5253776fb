"""The times of a step's stages: added up by the kernels where a caller asks, and without a change of the result."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import parse
from skimkv.ops.cpu.run import STAGES, stage_times
from skimkv.stores.base import Shape
from support.kernels import ISAS, NATIVE, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

# the stages of a step that takes a token
REACHED = {
    "Dense()": {"attend", "append"}, "SparQ(r=4, k=12)": set(STAGES), "TopK(k=12)": set(STAGES),
    "Skim(r=4, k=12)": set(STAGES), "H2O(k=12)": {"attend"}, "LMInfinite(k=12, initial=4)": {"attend", "append"},
}  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", REACHED)
def test_every_stage_of_a_step_is_timed(spec, isa):
    """On two threads, whose times are added; outside of the `with`, and in a copy of the store, nothing is."""
    shape, method = Shape(1, 2, 2, 16), parse(spec)
    store = method.store(shape, torch.float32)
    k, v, q = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 2, 40, 16)
    with on(isa, 2), torch.no_grad():
        method.prefill(store, q[..., :30, :], k[:, :, :30], v[:, :, :30], scale=0.25)
        with pytest.raises(ValueError, match="C\\+\\+ attention kernels only"), stage_times(store):
            pass
        twin = store.fork()

        def step(s, i):
            return method.decode(s, q[..., i, :], k[:, :, i], v[:, :, i], scale=0.25)

        assert torch.equal(step(store, 30), step(twin, 30))
        with stage_times(store) as seconds:
            assert torch.equal(step(store, 31), step(twin, 31))
            assert not any(seconds.values())
        timed = {stage for stage in STAGES if seconds[stage] > 0}
        assert "attend" in timed and timed <= REACHED[spec]  # a coarse clock may not see a short stage
        before = dict(seconds)
        assert torch.equal(step(store, 32), step(twin, 32)) and seconds == before
