"""The C library behind the cpu backend: where it is, its structures (those of skimkv.h), and the threads it borrows."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch

from ... import __path__ as _package
from ...stores.full import CHANNELS

VERSION = 14
MAX_HEAD_SIZE = 576  # SKIMKV_MAX_HEAD of skimkv.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CHANNEL_NUMBERS = {name: number for number, name in enumerate(CHANNELS)}
DENSE, SPARQ, LOWRANK, TOPK, ORACLE, SKIM = range(6)
OUTSIDE, APPEND, SLOT = range(3)  # what happens to the current token: nothing, it is appended, it takes a slot
TEMPERATURES = {"coverage": 0, "sqrt_d": 1, "sqrt_r": 2}
TAKEN, OTHER_FORM, REFUSED = range(3)  # what skimkv_step_tensors returns


def structure_fields(*groups: tuple[str, Any]) -> list[tuple[str, Any]]:
    """The fields of a C structure: groups of names, separated by spaces, with their type."""
    return [(name, kind) for names, kind in groups for name in names.split()]


class CChunk(Structure):
    """The structure skimkv_chunk of skimkv.h."""

    _fields_ = structure_fields(
        ("start cap", c_int64),
        ("k v index scale", c_void_p),
        ("k_b k_h k_n v_b v_h v_n x_b x_h x_r s_b s_h s_g s_z s_r", c_int64),
        ("means", c_void_p),
        ("e_b e_h e_g", c_int64),
    )


class CCache(Structure):
    """The structure skimkv_cache of skimkv.h."""

    _fields_ = structure_fields(
        ("B H G D R dtype channels n_chunks", c_int32),
        ("chunks lengths tail mean projection", c_void_p),
        ("t_b t_h t_r m_b m_h", c_int64),
        ("bits", c_int32),
    )


class COp(Structure):
    """The structure skimkv_op of skimkv.h."""

    _fields_ = structure_fields(
        ("cache q y", c_void_p),
        ("q_b q_h q_g y_b y_h y_g", c_int64),
        ("dtype method", c_int32),
        ("scale softcap", c_float),
        ("r k local", c_int64),
        ("temperature use_mean", c_int32),
        ("k_new v_new", c_void_p),
        ("n_b n_h", c_int64),
        ("keep", c_int32),
        ("slot score pos", c_void_p),
        ("c_b c_h", c_int64),
        ("now recent rows_read sinks", c_void_p),
    )


class CTensorForm(Structure):
    """The structure skimkv_tensor_form of skimkv.h."""

    _fields_ = structure_fields(("dtype dimensions", c_int32), ("shape strides", c_int64 * 4))


class CTensorStep(Structure):
    """The structure skimkv_tensor_step of skimkv.h."""

    _fields_ = structure_fields(
        ("op", c_void_p),
        ("q k v", CTensorForm),
        ("numbers", c_void_p),
        ("room", c_int64),
        ("count place rows", c_int32),
        ("parallel stage_ns", c_void_p),
        ("error", c_char_p),
        ("describe item_of_list integer release_python take_python clear_error", c_void_p),
    )


class CTokens(Structure):
    """The structure skimkv_tokens of skimkv.h."""

    _fields_ = structure_fields(
        ("cache k v", c_void_p),
        ("n k_b k_h k_n v_b v_h v_n", c_int64),
        ("skip at", c_void_p),
    )


class CBlock(Structure):
    """The structure skimkv_block of skimkv.h."""

    _fields_ = structure_fields(("start cap", c_int64), ("rep samples size", c_void_p))


class CClusters(Structure):
    """The structure skimkv_clusters of skimkv.h."""

    _fields_ = structure_fields(
        ("B H G D t s dtype n_blocks", c_int32),
        ("blocks m k v mu q y", c_void_p),
        ("q_dtype", c_int32),
        ("scale", c_float),
        ("k_new v_new lengths", c_void_p),
        ("delta", c_double),
        ("seed", c_uint32),
        ("sinks", c_void_p),
    )


def _path() -> str | None:
    names = ("libskimkv.so", "libskimkv.dylib", "skimkv.dll")
    paths = (os.path.join(folder, name) for folder in _package for name in names)
    return next((path for path in paths if os.path.exists(path)), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The library, which is loaded once. Raises ValueError if it is missing or of another version."""
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
    lib.skimkv_check.argtypes, lib.skimkv_check.restype = [POINTER(COp)], c_char_p
    lib.skimkv_check_append.argtypes, lib.skimkv_check_append.restype = [POINTER(CTokens)], c_char_p
    lib.skimkv_check_clusters.argtypes, lib.skimkv_check_clusters.restype = [POINTER(CClusters)], c_char_p
    lib.skimkv_run.argtypes = [POINTER(COp), c_int, c_void_p]
    lib.skimkv_append.argtypes = [POINTER(CTokens), c_int, c_void_p]
    lib.skimkv_stream.argtypes = [POINTER(CClusters), c_int, c_void_p]
    lib.skimkv_stream_append.argtypes = [POINTER(CClusters), c_int, c_void_p]
    return lib


@functools.cache
def tensor_descriptions() -> tuple[int | None, ...] | None:
    """The addresses of the functions that a skimkv_tensor_step needs, from `describe` on.

    None where this PyTorch does not describe its tensors in C as version 1 of DLPack does: before PyTorch 2.10.
    """
    capsule, name = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), b"dlpack_exchange_api"
    is_valid = ctypes.PYFUNCTYPE(c_int, ctypes.py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
    pointer_of = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    if not is_valid(capsule, name):
        return None
    table = pointer_of(capsule, name)
    if c_uint32.from_address(table).value != 1:  # the major version
        return None
    # Before it in the table: the version, an older table, and three functions for tensors that own their memory.
    describe = c_void_p.from_address(table + 5 * ctypes.sizeof(c_void_p)).value
    if describe is None:  # a library may leave it out
        return None
    names = ("PyList_GetItem", "PyLong_AsLongLong", "PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_Clear")
    return describe, *(ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p).value for name in names)


@functools.cache
def step_tensors() -> Any:
    """The function skimkv_step_tensors, which is called with Python's lock held."""
    library()  # of the right version
    function = ctypes.PyDLL(_path()).skimkv_step_tensors
    function.argtypes = [c_void_p, *[ctypes.py_object] * 5, c_int]
    return function


def isas() -> list[str]:
    """The instruction sets of this machine that the library can use, the best first."""
    names: bytes = library().skimkv_isas()
    return names.decode().split(",")


def isa() -> str | None:
    """The instruction set in use; None if SKIMKV_ISA names one that this machine does not have."""
    name: bytes | None = library().skimkv_isa()
    return name and name.decode()  # type: ignore[return-value]


def force(name: str | None) -> None:
    """Use this instruction set; None chooses again. Raises ValueError if the machine does not have it."""
    if library().skimkv_force(name and name.encode()):
        raise ValueError(f"instruction set {name!r} is not available; this machine has {', '.join(isas())}")


@functools.cache
def thread_pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that PyTorch loaded, so that both use one pool of threads.

    None where PyTorch does not use such a runtime; a second one is never loaded.
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


def threads() -> tuple[int, int | None]:
    """How many threads an operation may use, and the address of their pool: 1 and None where there is no pool."""
    pool = thread_pool()
    return (torch.get_num_threads() if pool else 1), pool


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())


def append(tokens: CTokens) -> None:
    """Check and run an append. Raises ValueError with the library's reason, MemoryError without scratch memory."""
    _raise(library().skimkv_check_append(tokens))
    _finish(library().skimkv_append(tokens, *threads()))


def append_to_clusters(clusters: CClusters) -> None:
    """Check and run an append to clusters. Raises as `append`."""
    _raise(library().skimkv_check_clusters(clusters))
    _finish(library().skimkv_stream_append(clusters, *threads()))


def attend_clusters(clusters: CClusters) -> None:
    """Check and run SubGen's estimate. Raises as `append`."""
    _raise(library().skimkv_check_clusters(clusters))
    _finish(library().skimkv_stream(clusters, *threads()))


def _finish(status: int) -> None:
    if status:
        raise MemoryError("no memory for the scratch space of a kernel")
