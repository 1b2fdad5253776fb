"""The C library behind the cpu backend: where it is, its functions (those of skimkv.h), and the threads it borrows."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int64, c_void_p
from typing import Any

import torch

from ... import __path__ as _package
from .structs import CAttend, check_structures

VERSION = 22
MAX_HEAD_SIZE = 576  # SKIMKV_MAX_HEAD of skimkv.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TYPES = {number: dtype for dtype, number in DTYPES.items()}

# Of the operations of layers: the operation, its steps of attention and what calls back; tokens and threads.
_LAYERS, _THREADS = (c_void_p, c_void_p, c_int64, CAttend, c_void_p), (c_int64, c_int, c_void_p)
# What the functions return, and what they take. A text that is returned says what is wrong; None, that nothing is.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "skimkv_isa": (c_char_p,),
    "skimkv_isas": (c_char_p,),
    "skimkv_force": (c_int, c_char_p),
    "skimkv_check": (c_char_p, c_void_p),
    "skimkv_run": (c_int, c_void_p, c_int, c_void_p),
    "skimkv_step": (c_char_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p),
    "skimkv_check_append": (c_char_p, c_void_p),
    "skimkv_append": (c_int, c_void_p, c_int, c_void_p),
    "skimkv_turn_keys": (c_char_p, c_void_p),
    "skimkv_append_paged": (c_char_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p),
    "skimkv_columns_check": (c_char_p, c_void_p),
    "skimkv_columns_run": (c_int, c_void_p, c_int, c_void_p),
    "skimkv_prompt_attention_run": (c_char_p, c_void_p, c_int, c_void_p),
    "skimkv_product_run": (c_char_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p),
    "skimkv_matrix_expand": (c_char_p, c_void_p, c_void_p, c_int, c_void_p),
    "skimkv_rms_norm_run": (c_char_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p),
    "skimkv_argmax": (c_int64, c_void_p, c_int, c_int64),
    "skimkv_layers_run_parts": (c_char_p, *_LAYERS, *[c_void_p] * 4, *_THREADS),
    "skimkv_decoder_run": (c_char_p, *_LAYERS, *[c_void_p] * 6, *_THREADS),
}


def _path() -> str | None:
    names = ("libskimkv.so", "libskimkv.dylib")
    paths = (os.path.join(folder, name) for folder in _package for name in names)
    return next((path for path in paths if os.path.exists(path)), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The library, which is loaded once.

    Raises ValueError if it is missing, of another version, or if its structures are not those of structs.py.
    """
    path = _path()
    if path is None:
        raise ValueError("the native library is not in this installation (built without a C++ compiler?)")
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    if lib.skimkv_version() != VERSION:
        raise ValueError(f"{path} has version {lib.skimkv_version()}, this package needs {VERSION}: install again")
    check_structures(lib)  # first: a library of another installation may lack functions too
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise ValueError(f"{path} has no {name}, which this package calls: install again")
        function.restype, function.argtypes = result, arguments
    return lib


def step_function(path: str, name: str) -> Callable[..., bytes | None]:
    """A function of another library that is called as skimkv_step is: for a kernel of one's own (docs/kernels.md).

    Raises ValueError if there is no such library, or no such function in it.
    """
    try:
        function: Any = getattr(ctypes.CDLL(os.path.abspath(path)), name)
    except (OSError, AttributeError) as error:
        raise ValueError(f"{path} has no step {name!r}: {error}") from error
    function.restype, *function.argtypes = _FUNCTIONS["skimkv_step"]
    return function  # type: ignore[no-any-return]


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


def raise_error(error: bytes | None) -> None:
    """Raise ValueError with what the library says is wrong; None: nothing is."""
    if error is not None:
        raise ValueError(error.decode())


def append(tokens: int) -> None:
    """Check and run an append, given the address of its structure.

    Raises ValueError with the library's reason, MemoryError without scratch memory.
    """
    raise_error(library().skimkv_check_append(tokens))
    if library().skimkv_append(tokens, *threads()):
        raise MemoryError("no memory for the scratch space of a kernel")


@functools.cache
def has_bfloat16_instructions() -> bool:
    """Whether this processor multiplies bfloat16; true where PyTorch does not say what it has."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "avx2" not in known or any(known.get(name) for name in ("avx512_bf16", "amx_bf16"))


@functools.cache
def has_matrix_units() -> bool:
    """Whether this processor multiplies tiles of bfloat16 (Intel AMX)."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
