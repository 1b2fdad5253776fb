"""Several products as one operation in C++ (csrc: skimkv_gated_mlp_run, skimkv_projections_run)."""

from __future__ import annotations

import ctypes
import functools
from ctypes import Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .linear import CMatrix, Matrix, dtype_number

MOST_TOKENS = 64  # SKIMKV_MAX_FLOAT_TOKENS of skimkv.h


class CGatedMLP(Structure):
    """The structure skimkv_gated_mlp of skimkv.h."""

    _fields_ = library.structure_fields(("gate up down", CMatrix))


class CProjections(Structure):
    """The structure skimkv_projections of skimkv.h."""

    _fields_ = library.structure_fields(
        ("q k v", CMatrix),
        ("D", c_int64),
        ("q_norm k_norm", c_void_p),
        ("q_eps k_eps", c_float),
    )


class GatedMLP:
    """A gated feed-forward layer, prepared for tokens of one type: down(silu(gate(x)) * up(x)).

    As a Matrix, it is right as long as the tensors are where they were, and several threads may use it.
    """

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix) -> None:
        self.matrices = gate, up, down
        self.op = CGatedMLP(*(matrix.part() for matrix in self.matrices))
        self.address, self.run = ctypes.addressof(self.op), _library().skimkv_gated_mlp_run
        self.inputs, self.out, self.pool = gate.inputs, down.out, library.thread_pool()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer of x (...,in) -> (...,out), at most 64 tokens of the type that it was prepared for.

        Raises ValueError with the library's reason.
        """
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out))
        threads = torch.get_num_threads() if self.pool else 1
        _raise(self.run(self.address, x.data_ptr(), y.data_ptr(), x.numel() // self.inputs, threads, self.pool))
        return y


class HeadNorm(NamedTuple):
    """A root-mean-square normalisation of every head: weight (D,), eps."""

    weight: Tensor
    eps: float


class Projections:
    """The projections of an attention layer, prepared for tokens of one type: queries, keys and values.

    D: the head size. norms: of the heads of q and of k, or None. Raises ValueError if their weights do not fit.
    """

    def __init__(self, q: Matrix, k: Matrix, v: Matrix, D: int, norms: tuple[HeadNorm, HeadNorm] | None = None) -> None:
        self.matrices, self.norms, self.D = (q, k, v), norms, D
        numbers: tuple[int | float | None, ...] = (None, None, 0, 0)
        if norms is not None:
            for weight, _ in norms:
                if weight.shape != (D,) or dtype_number(weight) != q.op.dtype or not weight.is_contiguous():
                    raise ValueError(
                        f"weights of a normalisation are {weight.dtype} {tuple(weight.shape)}; must be contiguous "
                        f"({D},) of the tokens' type"
                    )
            numbers = (norms[0].weight.data_ptr(), norms[1].weight.data_ptr(), norms[0].eps, norms[1].eps)
        self.op = CProjections(*(matrix.part() for matrix in self.matrices), D, *numbers)
        self.address, self.run = ctypes.addressof(self.op), _library().skimkv_projections_run
        self.heads = tuple(matrix.out // D for matrix in self.matrices)
        self.pool = library.thread_pool()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Project x (B,n,in), and rotate by cos, sin (B,n,D) -> q (B,Hq,n,D), k, v (B,H,n,D).

        At most 64 tokens of the type that it was prepared for. None if cos and sin have another shape, type or device.
        Raises ValueError with the library's reason.
        """
        B, n, _ = x.shape
        D, heads, shape = self.D, self.heads, cos.shape
        if shape != (B, n, D) or shape != sin.shape or not cos.dtype == sin.dtype == x.dtype:
            return None
        if not (cos.is_cpu and sin.is_cpu):
            return None
        if not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        if n == 1:
            q, k, v = (x.new_empty((B, h, 1, D)) for h in heads)
        else:
            q, k, v = (x.new_empty((B, n, h, D)).transpose(1, 2) for h in heads)
        threads = torch.get_num_threads() if self.pool else 1
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr()
        _raise(self.run(self.address, *pointers, B * n, threads, self.pool))
        return q, k, v


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library.library()
    lib.skimkv_gated_mlp_run.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p]
    lib.skimkv_projections_run.argtypes = [c_void_p] * 7 + [c_int64, c_int, c_void_p]
    lib.skimkv_gated_mlp_run.restype = lib.skimkv_projections_run.restype = c_char_p
    return lib


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())
