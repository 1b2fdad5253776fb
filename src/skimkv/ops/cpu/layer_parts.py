"""Several products as one operation in C++ (csrc/layers.cpp: skimkv_gated_mlp_run and its like)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .linear import CMatrix, Matrix, dtype_number


class CGatedMLP(Structure):
    """The structure skimkv_gated_mlp of skimkv.h."""

    _fields_ = library.structure_fields(("gate up down", CMatrix))


class CProjections(Structure):
    """The structure skimkv_projections of skimkv.h."""

    _fields_ = library.structure_fields(
        ("q k v", CMatrix),
        ("D", c_int64),
        ("norm q_norm k_norm", c_void_p),
        ("eps q_eps k_eps", c_float),
    )


class CLayerEnd(Structure):
    """The structure skimkv_layer_end of skimkv.h."""

    _fields_ = library.structure_fields(("o", CMatrix), ("norm", c_void_p), ("eps", c_float), ("mlp", CGatedMLP))


class CLayer(Structure):
    """The structure skimkv_layer of skimkv.h."""

    _fields_ = library.structure_fields(("before after", c_void_p))


class CLayers(Structure):
    """The structure skimkv_layers of skimkv.h."""

    _fields_ = library.structure_fields(("layers", c_void_p), ("count", c_int64), ("norm", c_void_p), ("eps", c_float))


class GatedMLP:
    """A gated feed-forward layer, prepared for tokens of one type: down(silu(gate(x)) * up(x)).

    As a Matrix, it keeps the tensors, is right as long as each stays where it was, and several threads may use it.
    """

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix) -> None:
        self.matrices = gate, up, down
        self.op = CGatedMLP(*(matrix.op for matrix in self.matrices))
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


class Norm(NamedTuple):
    """A root-mean-square normalisation: weight (size,), eps."""

    weight: Tensor
    eps: float

    def check(self, size: int, dtype: int) -> Norm:
        """Return itself. Raises ValueError if it is not one of tokens of that size, and the library's type `dtype`."""
        weight = self.weight
        if weight.shape != (size,) or dtype_number(weight) != dtype or not weight.is_contiguous():
            raise ValueError(
                f"weights of a normalisation are {weight.dtype} {tuple(weight.shape)}; must be contiguous ({size},) of "
                "the tokens' type"
            )
        return self


class LayerEnd:
    """What follows attention in a layer, prepared for tokens of one type: t = residual + o(x), then t + mlp(norm(t)).

    Raises ValueError if the weights of the normalisation do not fit.
    """

    def __init__(self, o: Matrix, norm: Norm, mlp: GatedMLP) -> None:
        self.parts = o, norm.check(o.out, o.op.dtype), mlp
        self.op = CLayerEnd(o.op, norm.weight.data_ptr(), norm.eps, mlp.op)
        self.address, self.run = ctypes.addressof(self.op), _library().skimkv_layer_end_run
        self.inputs, self.pool = o.inputs, library.thread_pool()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute the end of x (...,in) and residual (...,out) -> (...,out), at most 64 tokens of the prepared type.

        Raises ValueError if they do not fit each other, or with the library's reason.
        """
        n, size = x.numel() // self.inputs, self.parts[0].out
        if residual.numel() != n * size or residual.dtype != x.dtype or not residual.is_cpu:
            raise ValueError(
                f"residual is {residual.dtype} {tuple(residual.shape)}; must be {n} times {size} {x.dtype}"
            )
        if not (x.is_contiguous() and residual.is_contiguous()):
            x, residual = x.contiguous(), residual.contiguous()
        y = torch.empty_like(residual)
        threads = torch.get_num_threads() if self.pool else 1
        _raise(self.run(self.address, x.data_ptr(), residual.data_ptr(), y.data_ptr(), n, threads, self.pool))
        return y


class Projections:
    """The projections of an attention layer, prepared for tokens of one type: queries, keys and values.

    D: the head size. head_norms: of the heads of q and of k, or None. norm: of the tokens before, or None.
    Raises ValueError if the weights of a normalisation do not fit.
    """

    def __init__(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        D: int,
        head_norms: tuple[Norm, Norm] | None = None,
        norm: Norm | None = None,
    ) -> None:
        self.matrices, self.norms, self.D = (q, k, v), (head_norms, norm), D
        dtype, nothing = q.op.dtype, (None, 0.0)
        of_q, of_k = (one.check(D, dtype) for one in head_norms) if head_norms else (None, None)
        all_norms = norm and norm.check(q.inputs, dtype), of_q, of_k
        pairs = [(one.weight.data_ptr(), one.eps) if one else nothing for one in all_norms]
        self.op = CProjections(
            *(matrix.op for matrix in self.matrices), D, *(p for p, _ in pairs), *(e for _, e in pairs)
        )
        self.address, self.run = ctypes.addressof(self.op), _library().skimkv_projections_run
        self.heads = tuple(matrix.out // D for matrix in self.matrices)
        self.pool = library.thread_pool()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Project x (B,n,in), and rotate by cos, sin (B,n,D) or (1,n,D) -> q (B,Hq,n,D), k, v (B,H,n,D).

        At most 64 tokens of the type that it was prepared for. None if cos and sin have another shape, type or device.
        Raises ValueError with the library's reason.
        """
        B, n, _ = x.shape
        D, heads, shape = self.D, self.heads, cos.shape
        if shape != sin.shape or not cos.dtype == sin.dtype == x.dtype or not (cos.is_cpu and sin.is_cpu):
            return None
        if shape != (B, n, D):
            if shape != (1, n, D):
                return None
            cos, sin = cos.expand(B, n, D), sin.expand(B, n, D)
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


class Layers:
    """All layers of a model, with attention inside, prepared for one token of one type in every row of a batch.

    layers: what comes before attention, and what after it, in each. norm: of the last layer's tokens.
    Raises ValueError if the weights of the normalisation do not fit.
    """

    def __init__(self, layers: Sequence[tuple[Projections, LayerEnd]], norm: Norm) -> None:
        first = layers[0][0].matrices[0]
        self.parts, self.norm, self.count = layers, norm.check(first.inputs, first.op.dtype), len(layers)
        self.list = (CLayer * self.count)(*(CLayer(before.address, after.address) for before, after in layers))
        self.op = CLayers(ctypes.addressof(self.list), self.count, norm.weight.data_ptr(), norm.eps)
        self.address, self.run = ctypes.addressof(self.op), _library().skimkv_layers_run
        self.D, self.pool = layers[0][0].D, library.thread_pool()

    def fits(self, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether cos and sin are (B,1,D) or (1,1,D) for x (B,1,in), and of its type on its device."""
        shape = cos.shape
        if shape != sin.shape or not cos.dtype == sin.dtype == x.dtype or not (cos.is_cpu and sin.is_cpu):
            return False
        return shape in ((x.shape[0], 1, self.D), (1, 1, self.D))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, steps: Sequence[int] | None) -> Tensor:
        """Compute all layers of x (B,1,in), which `fits` cos and sin, -> (B,1,in).

        steps: the address of each layer's step of attention; None: attention gives zeros, so that the rest can be
        timed. Raises ValueError with the library's reason: before the first layer runs, unless memory ran out.
        """
        B = x.shape[0]
        if cos.shape[0] != B:
            cos, sin = cos.expand(B, 1, self.D), sin.expand(B, 1, self.D)
        if not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        if steps is not None and len(steps) != self.count:
            raise ValueError(f"there are {len(steps)} steps of attention for {self.count} layers")
        y = torch.empty_like(x)
        addresses = None if steps is None else (c_void_p * self.count)(*steps)
        threads = torch.get_num_threads() if self.pool else 1
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
        _raise(self.run(self.address, addresses, *pointers, B, threads, self.pool))
        return y


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library.library()
    lib.skimkv_gated_mlp_run.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p]
    lib.skimkv_layer_end_run.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p]
    lib.skimkv_layer_end_run.restype = c_char_p
    lib.skimkv_layers_run.argtypes = [c_void_p] * 6 + [c_int64, c_int, c_void_p]
    lib.skimkv_layers_run.restype = c_char_p
    lib.skimkv_projections_run.argtypes = [c_void_p] * 7 + [c_int64, c_int, c_void_p]
    lib.skimkv_gated_mlp_run.restype = lib.skimkv_projections_run.restype = c_char_p
    return lib


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())
