"""The GPU kernels without a GPU: what is refused, and that all compile as they are meant to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skimkv import ops
from skimkv.cli import info
from skimkv.methods import parse
from skimkv.ops import backends
from skimkv.ops.gpu import launch, tables
from skimkv.ops.gpu.run import GpuBackend
from skimkv.stores.base import Shape
from support import steps
from support.gpu import DEVICE, NEEDS_TRITON
from support.refusals import refuses

pytestmark = NEEDS_TRITON


def test_bad_calls_name_what_is_wrong():
    shape = Shape(1, 1, 1, 32)
    store = parse("SparQ(r=4, k=8)").store(shape, torch.float32, DEVICE)
    q, kv = torch.randn(1, 1, 1, 32, device=DEVICE), torch.randn(1, 1, 32, device=DEVICE)
    double = parse("Dense()").store(shape, torch.float64, DEVICE)
    narrow = parse("Dense()").store(shape._replace(D=24), torch.float32, DEVICE)
    coded = parse("Dense(kv='int8')").store(shape, torch.float32, DEVICE)
    slots = parse("H2O(k=4)").store(shape, torch.float32, DEVICE)
    calls = [
        (lambda: steps.append(store, kv.half(), kv), "k is torch.float16; the store holds torch.float32"),
        (lambda: steps.dense(store, q[..., :16], 1.0, None, (kv, kv)), r"q is \(1, 1, 1, 16\) on .*; must be"),
        (lambda: steps.dense(store, q.double(), 1.0, None, (kv, kv)), "no GPU kernel for a query of torch.float64"),
        (lambda: steps.dense(store, q, 1.0, -2.0, (kv, kv)), "softcap = -2.0 must be positive"),
        (lambda: steps.sparq(store, q, 1.0, None, 33, 8, 2, "coverage", True), "r = 33 must be from 1 to 32"),
        (lambda: steps.sparq(store, q, 1.0, None, 4, 8, 2, "warm", True), "temperature = 'warm' must be one of"),
        (lambda: steps.append(double, kv.double(), kv.double()), "no GPU kernel for a cache of torch.float64"),
        (lambda: steps.append(narrow, kv[..., :24], kv[..., :24]), "D = 24; it must be a multiple of 16 up to 256"),
        (lambda: steps.dense(coded, q, 1.0, None, (kv, kv)), "no GPU kernel for K and V in 8 bits; SKIMKV_BACKEND=ref"),
        (lambda: steps.slots(slots, q, kv, kv, 1.0, None, [3, 3]), r"recent = \(3, 3\) must be 1 numbers"),
    ]
    for call, match in calls:
        with ops.backend("gpu"):
            refuses(call, match)
    assert store.lengths == [0]


def test_a_block_that_would_reach_into_the_next_page_is_refused():
    """Step 1 and dense attention address a block by its first page; splits end where pages do."""
    for settings in (launch.SETTINGS.dense, launch.SETTINGS.scores, launch.SETTINGS.quantised_scores):
        for block in (512, 8, 96):
            with pytest.raises(ValueError, match=f"block = {block} must be a power of two from 16 to 256"):
                replace(settings, block=block)


def test_streams_have_scratch_memory_of_their_own(monkeypatch):
    """And a graph, which is captured on another stream, has that of the step before it."""
    batch, stream = tables.Batch.of(parse("Dense()").store(Shape(1, 1, 1, 32), torch.float32, "cpu")), 1
    monkeypatch.setattr(tables, "current_stream", lambda device: stream)
    first = tables.scratch(batch, "counter", 4)
    stream = 2
    second = tables.scratch(batch, "counter", 4)
    assert first.data_ptr() != second.data_ptr()
    stream = 3
    monkeypatch.setattr(tables, "is_capturing", lambda device: True)
    assert tables.scratch(batch, "counter", 4).data_ptr() == second.data_ptr()


def test_a_head_size_above_256_is_for_the_reference_unless_the_backend_was_asked_for(monkeypatch):
    key, forced = (None, torch.device("cuda")), ("gpu", torch.device("cuda"))
    monkeypatch.setattr(backends, "_chosen", {key: GpuBackend(), forced: GpuBackend()})
    monkeypatch.setattr(backends, "_forced_for_process", None)
    backends._warn_of_head_size.cache_clear()
    cuda = torch.device("cuda")
    assert backends.backend_for(cuda, 256) is backends._chosen[key]
    with pytest.warns(UserWarning, match="heads of size 512 .* backend 'gpu' take head sizes up to 256"):
        assert backends.backend_for(cuda, 512) is None
    with ops.backend("gpu"):
        assert backends.backend_for(cuda, 512) is backends._chosen[forced]


@pytest.mark.slow
def test_without_triton_or_a_device_one_line_says_so(monkeypatch):
    code = """
import sys
sys.modules["triton"] = None
from skimkv import ops
try:
    ops.backend("gpu").__enter__()
except ValueError as error:
    print(error)
print(ops.select_backend("cpu")[0] in ("cpu", "ref"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    missing, others = done.stdout.splitlines()
    assert "pip install 'skimkv[gpu]'" in missing and others == "True"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="PyTorch sees no CUDA device"), ops.backend("gpu"):
        pass


def test_a_gpu_takes_its_own_kernels_and_nothing_else_does(monkeypatch):
    """Unless it is asked for, the interpreter is left alone: caches on the CPU have kernels of their own."""
    assert ops.select_backend("cpu")[0] != "gpu"
    monkeypatch.setattr(GpuBackend, "unavailable", lambda self: None)
    assert ops.select_backend("cuda") == ("gpu", "native for cuda tensors")
    monkeypatch.setattr(GpuBackend, "unavailable", lambda self: "no driver")
    assert ops.select_backend("cuda") == ("ref", "backend 'gpu' is unavailable: no driver")
    assert info.collect()["gpu_kernels"] == "no driver"


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_here():
    """What the interpreter does not see: types that change in a loop, narrow loads, registers that spill."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": paths}
    script = tests / "support" / "gpu_compile.py"
    done = subprocess.run([sys.executable, script, "2"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    names = {"append_kernel", "dense_kernel", "scores_kernel", "choose_kernel", "attend_kernel", "slots_kernel"}
    names |= {"choose_channels_kernel", "channel_scores_kernel", "append_slots_kernel"}
    assert {row["kernel"] for row in rows} == names
    for row in rows:
        assert row["stack"] <= 64, row  # bytes: up to 48 with Triton 3.9
        if row["kernel"] not in ("append_kernel", "append_slots_kernel", "choose_channels_kernel"):
            wide = sum(n for kind, n in row["loads"].items() if kind in ("cp.async.cg", "ld.global.v4.b32"))
            assert wide >= 8, row
