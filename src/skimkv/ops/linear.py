"""Products y = x W^T + bias with matrices of every kind (matrices.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from . import fastest_product, matrices
from .backends import backend_for, forced_backend
from .cpu import library
from .cpu import linear as cpu
from .fastest_product import AT_ONCE, FLOAT32, LIBRARY, PYTORCH
from .packed_weights import ROWS

# Tokens from which on PyTorch multiplies faster: floats, beside our kernels with AVX2 or AVX-512, and beside others; or
# rows that are dequantised, of blocks beside our kernels, and beside others or with matrix units. Its products of
# bfloat16 as they are begin to be faster later than those of float32.
FLOAT_PROMPT, OTHER_FLOAT_PROMPT, BLOCK_PROMPT, PROMPT = 65, 16, 384, 32
BFLOAT16_PROMPT = 113

# Of how many tokens those that are multiplied are a piece; 0 where they are all. Floats are multiplied in the way that
# is faster for all of them, so that no number depends on how a prompt was cut; blocks, where that would take twice the
# time for short pieces, are not.
tokens_of_prompt: ContextVar[int] = ContextVar("tokens_of_prompt", default=0)


class Product:
    """The product of a layer with its inputs, whose kernel is prepared once: while nothing changes, it only runs.

    After a model has read other weights, each function that Python calls costs a microsecond or more.
    prepare(x, weight, bias=): the matrix as the kernel needs it, or None where PyTorch computes. compute, likewise: the
    product in that case.
    """

    def __init__(
        self,
        prepare: Callable[..., cpu.Matrix | None],
        compute: Callable[..., Tensor],
    ) -> None:
        self._prepare, self._compute = prepare, compute
        self._prepared: tuple[tuple[object, ...], cpu.Matrix] | None = None  # one object, as threads may share it

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Compute x W^T + bias: x (...,in) -> (...,out).

        Raises ValueError if a gradient is wanted, and where `compute` does.
        """
        matrix = self.matrix(x, weight, bias)
        if matrix is None:
            assert weight is not None
            return self._compute(x, weight, bias=bias)
        return matrix.multiply(x)

    def matrix(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> cpu.Matrix | None:
        """What the kernel needs to multiply x and its like; None where PyTorch computes. Raises as a call does."""
        assert weight is not None  # a module's parameters are None where it has none
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("weights for inference have no gradient: use torch.no_grad()")
        form = (
            x.shape, x.dtype, x.is_cpu, weight.shape, weight.stride(), weight.dtype, weight.data_ptr(),
            None if bias is None else bias.data_ptr(), forced_backend.get(), tokens_of_prompt.get(),
        )  # fmt: skip
        prepared = self._prepared
        if prepared is not None and prepared[0] == form:
            return prepared[1]
        matrix = self._prepare(x, weight, bias=bias)
        if matrix is not None:
            is_lasting = bias is None or matrix.bias is bias
            self._prepared = (form, matrix) if is_lasting else None
        return matrix

    def __getstate__(self) -> dict[str, object]:
        """A copy is of other tensors: it is prepared anew."""
        return {**self.__dict__, "_prepared": None}


class Rows:
    """Rows of a quantised matrix with this number of columns, as numbers: prepared once, as Product is."""

    def __init__(self, kind: str, columns: int) -> None:
        self._kind, self._columns = kind, columns
        self._prepared: tuple[tuple[object, ...], cpu.Rows | None] | None = None

    def __call__(self, weight: Tensor, index: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The rows of these numbers: (n,columns) in dtype. Raises ValueError or IndexError if one is missing."""
        form, prepared = (weight.shape, weight.stride(), weight.data_ptr(), dtype, forced_backend.get()), self._prepared
        if prepared is None or prepared[0] != form:
            has_kernel = weight.is_contiguous() and dtype in library.DTYPES and is_native(weight)
            rows = cpu.Rows(weight, self._kind, self._columns, dtype) if has_kernel else None
            self._prepared = prepared = form, rows
        # a panel is dequantised as a whole, which is a waste where many of its rows are wanted
        if prepared[1] is not None and (self._kind != matrices.PACKED or len(index) <= ROWS):
            return prepared[1](index)
        return matrices.dequantise(weight, self._kind, torch.tensor(index, device=weight.device)).to(dtype)

    def __getstate__(self) -> dict[str, object]:
        """A copy is of other tensors: it is prepared anew."""
        return {**self.__dict__, "_prepared": None}


def is_native(x: Tensor) -> bool:
    """Whether the C++ library computes with x."""
    backend = backend_for(x.device)
    return backend is not None and backend.name == "cpu"


def matrix(
    x: Tensor,
    weight: Tensor,
    kind: str,
    rows: int | None = None,
    bias: Tensor | None = None,
    order: Tensor | None = None,
) -> cpu.Matrix | None:
    """The weights of `linear` as its kernel needs them for x and its like; None where PyTorch computes."""
    if weight.device != x.device or x.dtype not in matrices.FLOAT_TYPES:
        raise ValueError(
            f"x is {x.dtype} on {x.device}; must be float32, bfloat16 or float16 on {weight.device}, as the weights"
        )
    rows = weight.shape[0] if rows is None else rows
    matrices.check(weight, kind, rows, x.shape[-1])
    if x.shape[-1] == 0 or x.shape[-1] % 32 or not weight.is_contiguous() or not is_native(x):
        return None
    if not library_multiplies(x.shape[:-1].numel(), kind, x.dtype):
        return None
    return cpu.matrix(x, weight, kind, rows, bias, order)


def linear(
    x: Tensor,
    weight: Tensor,
    kind: str,
    rows: int | None = None,
    bias: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Compute x W^T + bias: x (...,in) · weight, a matrix (rows,in) of this kind · bias (rows,) -> (...,rows).

    The result has x's type: float32, bfloat16 or float16. rows: None: those of weight, which must be given for packed
    weights. order: (rows,) int32, the output that each row gives, a permutation; None if row i gives output i; only
    for blocks. In C++ where the backend is cpu, straight from the stored weights; but for a prompt PyTorch multiplies
    floats where it is faster, in x's type or converted to float32, and rows that were dequantised a part at a time:
    where the processor has matrix units, where it has neither AVX2 nor AVX-512, and from BLOCK_PROMPT tokens on where
    products of x's type of 16 bits are the fastest. Raises ValueError if shapes, types or devices do not fit.
    """
    rows = weight.shape[0] if rows is None else rows
    prepared = matrix(x, weight, kind, rows, bias, order)
    if prepared is not None:
        return prepared.multiply(x)
    if kind == matrices.FLOATS and weight.dtype == x.dtype:
        return multiply_floats(x, weight, bias)
    if kind != matrices.FLOATS and is_native(x) and weight.is_contiguous():
        return _multiply_expanded(x, weight, kind, rows, bias, order)
    tokens = x.flatten(0, -2) if kind == matrices.FLOATS else x.flatten(0, -2).float()
    y = tokens.new_empty(tokens.shape[0], rows)
    for first in range(0, rows, size := max(1, AT_ONCE // x.shape[-1])):
        index = torch.arange(first, min(first + size, rows), device=weight.device)
        y[:, first : first + size] = tokens @ matrices.dequantise(weight, kind, index).to(tokens.dtype).T
    if order is not None:
        y = torch.empty_like(y).index_copy_(1, order.long(), y)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).view(*x.shape[:-1], rows)


def _of_prompt(tokens: int) -> int:
    """Return how many tokens these are, or the prompt that they are a piece of.

    A single one counts for itself: it is the last of a prompt, whose logits are wanted.
    """
    return max(tokens, tokens_of_prompt.get()) if tokens > 1 else tokens


def multiply_floats(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias by PyTorch, in x's type or, if that is faster, in float32: x (...,in), weight (rows,in)."""
    is_prompt = _of_prompt(x.shape[:-1].numel()) >= FLOAT_PROMPT and is_native(x)
    is_wide = is_prompt and fastest_product.fastest(x.dtype) == FLOAT32
    return fastest_product.multiply(x, weight, bias, FLOAT32 if is_wide else PYTORCH)


def library_multiplies(tokens: int, kind: str, dtype: torch.dtype) -> bool:
    """Whether the library multiplies so many tokens of this type with a matrix of this kind, and not PyTorch."""
    return not _pytorch_multiplies(_of_prompt(tokens) if kind == matrices.FLOATS else tokens, kind, dtype)


def _pytorch_multiplies(tokens: int, kind: str, dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies so many tokens faster than the library, with rows that are dequantised if need be."""
    has_vectors = (library.isa() or "").startswith("avx")
    if kind == matrices.FLOATS:
        if _multiplies_tiles(dtype) or not has_vectors:
            return tokens >= OTHER_FLOAT_PROMPT
        if tokens < FLOAT_PROMPT or (way := fastest_product.fastest(dtype)) == LIBRARY:
            return False
        return tokens >= BFLOAT16_PROMPT or dtype == torch.float32 or way == FLOAT32
    if _multiplies_tiles(dtype) or not (kind == matrices.PACKED or has_vectors):
        return tokens >= PROMPT
    if kind == matrices.PACKED or dtype == torch.float32 or tokens < BLOCK_PROMPT:
        return False
    return fastest_product.fastest(dtype) == PYTORCH


def _multiplies_tiles(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies numbers of this type with matrix units, faster than our kernels integers of 8 bits."""
    return dtype == torch.bfloat16 and library.has_matrix_units()


def _multiply_expanded(
    x: Tensor, weight: Tensor, kind: str, rows: int, bias: Tensor | None, order: Tensor | None
) -> Tensor:
    """The same as `linear`, by a product of x's type with rows that the library dequantises."""
    step = max(1, AT_ONCE // x.shape[-1] // ROWS) * ROWS
    if rows <= step:  # in their order, and nothing is copied
        return multiply_floats(x, cpu.expand(weight, kind, rows, x.shape[-1], x.dtype, order), bias)
    y = x.new_empty(*x.shape[:-1], rows)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = weight[first // ROWS : -(-last // ROWS)] if kind == matrices.PACKED else weight[first:last]
        y[..., first:last] = multiply_floats(x, cpu.expand(part, kind, last - first, x.shape[-1], x.dtype))
    if order is not None:
        y = torch.empty_like(y).index_copy_(-1, order.long(), y)
    return y if bias is None else y.add_(bias.to(y.dtype))
