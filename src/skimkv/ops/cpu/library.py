"""The C library behind the cpu backend: where it is, its structures (csrc/skimkv.h), and the threads it borrows."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch

from ... import __path__ as _package

VERSION = 3
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CHANNELS = {"none": 0, "copy": 1, "int8": 2, "int4": 3}
DENSE, SPARQ, LOWRANK, TOPK, ORACLE = range(5)
OUTSIDE, APPEND, SLOT = range(3)
TEMPERATURES = {"coverage": 0, "sqrt_d": 1, "sqrt_r": 2}


def _fields(**groups: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for names, kind in groups.values() for name in names.split()]


class CChunk(Structure):
    _fields_ = _fields(
        a=("start cap", c_int64),
        b=("k v index scale", c_void_p),
        c=("k_b k_h k_n v_b v_h v_n x_b x_h x_r s_b s_h s_g s_z s_r", c_int64),
    )


class CCache(Structure):
    _fields_ = _fields(
        a=("B H G D R dtype channels n_chunks", c_int32),
        b=("chunks lengths tail mean projection", c_void_p),
        c=("t_b t_h t_r m_b m_h", c_int64),
        d=("bits", c_int32),
    )


class COp(Structure):
    _fields_ = _fields(
        a=("cache q y", c_void_p),
        b=("q_b q_h q_g y_b y_h y_g", c_int64),
        c=("dtype method", c_int32),
        d=("scale softcap", c_float),
        e=("r k local", c_int64),
        f=("temperature use_mean", c_int32),
        g=("k_new v_new", c_void_p),
        h=("n_b n_h", c_int64),
        i=("keep", c_int32),
        j=("slot score pos", c_void_p),
        k=("c_b c_h", c_int64),
        l=("now recent", c_void_p),
    )


class CTokens(Structure):
    _fields_ = _fields(
        a=("cache k v", c_void_p),
        b=("n k_b k_h k_n v_b v_h v_n", c_int64),
        c=("skip at", c_void_p),
    )


class CBlock(Structure):
    _fields_ = _fields(a=("start cap", c_int64), b=("rep samples size", c_void_p))


class CClusters(Structure):
    _fields_ = _fields(
        a=("B H G D t s dtype n_blocks", c_int32),
        b=("blocks m k v mu q y", c_void_p),
        c=("q_dtype", c_int32),
        d=("scale", c_float),
        e=("k_new v_new lengths", c_void_p),
        f=("delta", c_double),
        g=("seed", c_uint32),
    )


def _path() -> str | None:
    names = ("libskimkv.so", "libskimkv.dylib", "skimkv.dll")
    found = (os.path.join(folder, name) for folder in _package for name in names)
    return next((path for path in found if os.path.exists(path)), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once. Raises ValueError if it is missing or of another version."""
    path = _path()
    if path is None:
        raise ValueError("the native library is not in this installation (built without a C++ compiler?)")
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    lib.skimkv_version.restype = c_int
    if lib.skimkv_version() != VERSION:
        raise ValueError(f"{path} has version {lib.skimkv_version()}, this package needs {VERSION}: install again")
    lib.skimkv_isa.restype = lib.skimkv_isas.restype = c_char_p
    lib.skimkv_force.argtypes = [c_char_p]
    lib.skimkv_step.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p]
    lib.skimkv_step.restype = c_char_p
    for check, calls, kind in (
        ("skimkv_check", ("skimkv_run",), COp),
        ("skimkv_check_append", ("skimkv_append",), CTokens),
        ("skimkv_check_clusters", ("skimkv_stream", "skimkv_stream_append"), CClusters),
    ):
        getattr(lib, check).argtypes, getattr(lib, check).restype = [POINTER(kind)], c_char_p
        for call in calls:
            getattr(lib, call).argtypes = [POINTER(kind), c_int, c_void_p]
    return lib


def isas() -> list[str]:
    """Instruction sets of this machine that the library can use, best first."""
    names: bytes = library().skimkv_isas()
    return names.decode().split(",")


def isa() -> str | None:
    """The instruction set in use; None if SKIMKV_ISA names none of this machine."""
    name: bytes | None = library().skimkv_isa()
    return name and name.decode()  # type: ignore[return-value]


def force(name: str | None) -> None:
    """Use this instruction set; None chooses again. Raises ValueError if the machine does not have it."""
    if library().skimkv_force(name and name.encode()):
        raise ValueError(f"instruction set {name!r} is not available; this machine has {', '.join(isas())}")


@functools.cache
def parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that PyTorch loaded: one pool of threads for both.

    None (and then one thread) where PyTorch does not use such a runtime; a second one is never loaded.
    """
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/lib" in line}
    runtimes = [p for p in sorted(paths) if os.path.basename(p).startswith(("libgomp", "libiomp5", "libomp"))]
    runtimes.sort(key=lambda p: "torch" not in p)
    for path in runtimes:
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def run(call: str, check: str, argument: Structure) -> None:
    """Check and run one operation. Raises ValueError with the library's reason."""
    lib = library()
    error: bytes | None = getattr(lib, check)(argument)
    if error is not None:
        raise ValueError(error.decode())
    team = parallel()
    if getattr(lib, call)(argument, torch.get_num_threads() if team else 1, team):
        raise MemoryError("no memory for the kernels' scratch space")


def step(op: Any, q: int, y: int, k: int | None, v: int | None) -> None:
    """The same for one decode step, in one call: op is a reference to a COp, the others are addresses."""
    team = parallel()
    error: bytes | None = library().skimkv_step(op, q, y, k, v, torch.get_num_threads() if team else 1, team)
    if error is not None:
        raise ValueError(error.decode())
