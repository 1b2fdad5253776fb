"""How many programs share a row of the batch and a KV head, so that the programs of a launch fill whole waves.

A wave is as many programs as the device runs at once. The registers and the shared memory that the compiler reports for
a kernel decide how many that are, so a kernel is compiled once before its first launch is laid out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .launch import MOST_SPLITS, pad
from .tables import Batch

with contextlib.suppress(ImportError):  # launch.missing says why
    from triton.runtime import driver

FULL_WAVE = 0.9  # a launch of several waves is whole where it fills this share of their places
WARP_SIZE = 32
PARTITIONS = 4  # of a multiprocessor: each has its part of the registers for its own warps
REGISTER_UNIT, SHARED_UNIT = 8, 128  # registers of a thread, and bytes, come in multiples of these
RESERVED_SHARED = 1 << 10  # bytes of shared memory that every program takes besides its own
FEWER_PROGRAMS = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}  # by capability
MOST_PROGRAMS = 32  # of any size on a multiprocessor of another capability
INTERPRETED_MULTIPROCESSORS, INTERPRETED_PROGRAMS = 3, 3  # a launch in the interpreter, which has no waves


class Limits(NamedTuple):
    """What a device runs its programs on."""

    multiprocessors: int
    registers: int  # of 32 bits, of a multiprocessor
    shared: int  # bytes of a multiprocessor
    warps: int  # at once on a multiprocessor
    programs: int  # at once on a multiprocessor


class Footprint(NamedTuple):
    """What a program of a compiled kernel takes of a multiprocessor."""

    registers: int  # of a thread
    shared: int  # bytes
    warps: int


class SplitKernel(NamedTuple):
    """A kernel whose programs share the positions of each row and KV head, and what it is given.

    arguments: those of a launch, by how many programs share a row and KV head. merges: the last of these programs
    merges the parts of all, and is told their number, padded, as SP.
    """

    kernel: Any
    settings_programs: int | None  # wanted on each multiprocessor; None: as many as fit
    constants: dict[str, Any]
    arguments: Callable[[int], tuple[Any, ...]]
    merges: bool = False

    def options(self, count: int) -> dict[str, Any]:
        """Return what the kernel is compiled with."""
        return {**self.constants, "SP": pad(count, 2)} if self.merges else self.constants

    def launch(self, batch: Batch, count: int) -> tuple[Any, ...]:
        """Launch the kernel with `count` programs for each row and KV head, and return its arguments."""
        arguments = self.arguments(count)
        self.kernel[batch.heads, count](*arguments, **self.options(count))
        return arguments

    def compiled(self, count: int) -> Any:
        """Return the compiled kernel, which is not launched."""
        return self.kernel.warmup(*self.arguments(count), grid=(1, count), **self.options(count))


@functools.cache
def limits_of(device: torch.device) -> Limits | None:
    """Return what the device has; None for the CPU, where the kernels are interpreted."""
    if device.type != "cuda":
        return None
    known = torch.cuda.get_device_properties(device)
    facts = driver.active.utils.get_device_properties(device.index or 0)
    return Limits(
        multiprocessors=known.multi_processor_count,
        registers=facts["max_num_regs"],
        shared=facts["max_shared_mem"] + RESERVED_SHARED,
        warps=known.max_threads_per_multi_processor // WARP_SIZE,
        programs=FEWER_PROGRAMS.get((known.major, known.minor), MOST_PROGRAMS),
    )


def footprint_of(compiled: Any) -> Footprint:
    """Return what the compiler reports of a kernel. The driver knows the registers once the kernel is loaded."""
    compiled._init_handles()
    return Footprint(compiled.n_regs, compiled.metadata.shared, compiled.metadata.num_warps)


def programs_at_once(footprint: Footprint, limits: Limits) -> int:
    """Return how many programs of a kernel a multiprocessor runs at once; at least one."""
    registers = -(-footprint.registers // REGISTER_UNIT) * REGISTER_UNIT * WARP_SIZE  # of a warp
    warps = PARTITIONS * (limits.registers // PARTITIONS // registers)
    shared = -(-footprint.shared // SHARED_UNIT) * SHARED_UNIT + RESERVED_SHARED
    return max(1, min(limits.programs, min(limits.warps, warps) // footprint.warps, limits.shared // shared))


def split_rows(rows: int, places: int, most: int) -> int:
    """Return how many programs, at most `most`, share each of the rows, `places` programs running at once.

    Where all rows fit into one wave, as many as still do. Else the fewest that fill FULL_WAVE of the places of their
    waves, or, if none do, those that fill most of them.
    """
    if rows <= places:
        return max(1, min(places // rows, most))

    def share_filled(count: int) -> float:
        """Return which share of the places of all waves the programs fill."""
        return rows * count / (-(-rows * count // places) * places)

    counts = range(1, max(1, most) + 1)
    return next((count for count in counts if share_filled(count) >= FULL_WAVE), max(counts, key=share_filled))


_at_once: dict[tuple[Any, ...], int] = {}  # of a compiled kernel on a device


def count_splits(batch: Batch, most: int, split: SplitKernel) -> int:
    """Return how many programs, at most `most`, share each row and KV head so that the device is full.

    The cache's length is no part of it, so a CUDA graph can hold the launch. The kernel is compiled if it is new here.
    """
    rows, limits = batch.heads, limits_of(batch.device)
    most = max(1, min(most, MOST_SPLITS))
    if limits is None:
        return split_rows(rows, INTERPRETED_MULTIPROCESSORS * (split.settings_programs or INTERPRETED_PROGRAMS), most)
    programs = split.settings_programs
    if programs is None:
        key = (split.kernel, batch.device, *split.constants.items())
        if key not in _at_once:
            _at_once[key] = programs_at_once(footprint_of(split.compiled(min(2, most))), limits)
        programs = _at_once[key]
    return split_rows(rows, limits.multiprocessors * programs, most)
