"""How many programs of a GPU kernel share a row: from figures that stand in for a device and a compiler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from skimkv.ops.gpu import launch, occupancy
from skimkv.ops.gpu.occupancy import Footprint, Limits, SplitKernel, count_splits, programs_at_once, split_rows
from skimkv.ops.gpu.tables import Batch
from skimkv.stores.base import Shape, Workspace

pytestmark = pytest.mark.skipif(launch.missing is not None, reason=str(launch.missing))
HOPPER = Limits(multiprocessors=132, registers=65536, shared=228 << 10, warps=64, programs=32)


class StandInKernel:
    """Compiles to the figures it is given, and counts how often."""

    def __init__(self, footprint):
        self.footprint, self.compilations = footprint, 0

    def warmup(self, *arguments, grid, **options):
        self.compilations += 1
        return SimpleNamespace(footprint=self.footprint)


def batch(shape):
    return Batch(shape, torch.float32, torch.device("cpu"), Workspace())


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(occupancy, "limits_of", lambda device: HOPPER)
    monkeypatch.setattr(occupancy, "footprint_of", lambda compiled: compiled.footprint)


@pytest.mark.parametrize(
    ("footprint", "programs"),
    [
        (Footprint(64, 0, 1), 32),  # as many as there may be
        (Footprint(111, 0, 1), 16),  # 112 registers of 32 threads: four warps fit into a quarter of the registers
        (Footprint(254, 0, 1), 8),
        (Footprint(168, 38952, 4), 3),
        (Footprint(32, 0, 8), 8),  # 64 warps
        (Footprint(32, 100_000, 4), 2),  # shared memory
        (Footprint(255, 0, 16), 1),  # would not fit; the launch is refused elsewhere
    ],
)
def test_registers_shared_memory_and_warps_bound_the_programs(footprint, programs):
    assert programs_at_once(footprint, HOPPER) == programs


@pytest.mark.parametrize(
    ("rows", "places", "most", "count"),
    [
        (32, 396, 64, 12),  # one wave, as full as it gets
        (2048, 3696, 16, 1),
        (512, 396, 64, 3),  # 1.3 waves become 3.9
        (2048, 396, 16, 2),  # 5.2 waves become 10.3
        (2048, 396, 1, 1),
        (266, 264, 2, 2),  # none fills nine tenths: 1.01 and 2.02 waves
        (8, 4224, 64, 64),
        (3, 9, 0, 1),
    ],
)
def test_rows_are_split_into_whole_waves(rows, places, most, count):
    assert split_rows(rows, places, most) == count


def test_the_compiler_is_asked_once_for_each_variant_of_a_kernel(hopper):
    """128 rows of 254 registers: eight programs of a row fill 1056 places, where a constant of 20 made 2.4 waves."""
    rows = batch(Shape(16, 8, 4, 32))
    kernel, asked = StandInKernel(Footprint(254, 0, 1)), []

    def split(**constants):
        return SplitKernel(kernel, None, constants, lambda count: (asked.append(count),), merges=True)

    assert [count_splits(rows, 256, split(D=32)) for _ in range(2)] == [8, 8]
    assert kernel.compilations == 1 and split(D=32).options(3) == {"D": 32, "SP": 4}
    kernel.footprint = Footprint(64, 0, 1)
    assert count_splits(rows, 256, split(D=64)) == 33 and kernel.compilations == 2


def test_programs_that_are_set_are_not_derived(hopper):
    rows = batch(Shape(1, 4, 1, 32))
    kernel = StandInKernel(Footprint(254, 0, 1))
    assert count_splits(rows, 64, SplitKernel(kernel, 1, {}, lambda count: ())) == 33
    assert kernel.compilations == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_interpreter_compiles_nothing_and_splits_all_the_same():
    rows = batch(Shape(1, 2, 1, 32))
    kernel = StandInKernel(Footprint(254, 0, 1))
    assert [count_splits(rows, most, SplitKernel(kernel, None, {}, lambda count: ())) for most in (1, 9)] == [1, 4]
    assert kernel.compilations == 0
