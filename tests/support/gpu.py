"""Stores for the tests of the GPU kernels: on a GPU where there is one, else on the CPU, for Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from skimkv import ops
from skimkv.ops.gpu import launch, tables
from skimkv.stores.base import map_tensors
from support import steps
from support.kernels import close, exact, filled

DEVICE = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device  # with its number
NEEDS_TRITON = pytest.mark.skipif(launch.missing is not None, reason=str(launch.missing))
NAN_MEMORY = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter: unused memory is NaN


def on_device(store):
    """The same store on the device of the kernels."""
    twin = map_tensors(store, lambda t: t.to(DEVICE))
    twin.device = DEVICE
    if getattr(twin, "projection", None) is not None:
        vars(twin.index)["projection"] = twin.projection.to(DEVICE)
    return twin


def filled_on_device(*args, **options):
    """A query and a store, as support.kernels.filled makes them."""
    q, store = filled(*args, **options)
    return q.to(DEVICE), on_device(store)


def compare(name, q, store, *args):
    """Assert that a step of the GPU kernels equals the reference in float64 over the same rounded cache."""
    want = getattr(steps, name)(exact(store), q.double(), *args, reference=True)
    assert not want.isnan().any()
    with ops.backend("gpu"):
        got = getattr(steps, name)(store, q, *args)
    assert got.dtype == q.dtype and got.shape == q.shape
    close(got, want, store, q, args[0], 512.0 if store.bits else 16.0)


def random_token(store):
    """A key and a value for every row of the batch, strided: (B,H,D) each."""
    B, H, _, D = store.shape
    return tuple(torch.randn(2, D, H, B, device=DEVICE).to(store.dtype).permute(0, 3, 2, 1))


def recorded(step):
    """(what step() returned, a function that runs it again): the launches of it are kept, nothing else."""
    if DEVICE.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        graph.replay()
        return y, graph.replay
    from triton.runtime.interpreter import InterpretedFunction

    launches, run = [], InterpretedFunction.run

    def keep(self, *args, **kwargs):
        launches.append((self, args, kwargs))
        return run(self, *args, **kwargs)

    def touched(place):
        raise AssertionError("the host writes inside a captured step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", keep)
        patch.setattr(tables, "require_no_capture", touched)
        y = step()
    return y, lambda: [run(kernel, *args, **kwargs) for kernel, args, kwargs in launches]
