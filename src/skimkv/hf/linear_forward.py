"""The linear layers of PyTorch, whose products of a few tokens are kernels of ours on the weights as they lie."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops import matrices
from .autocast import is_autocast

BLOCK = 32  # of the inputs that a kernel reads at once
# Whether tokens may be of another type than the weights, which PyTorch refuses: to compute in float32 what models do.
mixes_types: ContextVar[bool] = ContextVar("mixes_types", default=False)


class LinearForward:
    """The forward of an nn.Linear on a CPU: a product of ours for a decoded token, PyTorch's own for all else."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear: Any = linear
        self._product = ops.Product(_matrix, _multiply)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x (...,in) -> (...,out), as the module's own forward does, whose errors these are."""
        linear = self.linear
        weight = linear._parameters.get("weight")  # a weight or bias that is no parameter, as of pruning, is missing
        if (
            torch.compiler.is_compiling()
            or type(linear) is not nn.Linear
            or weight is None
            or "bias" not in linear._parameters
            or not x.is_cpu
            or (x.dtype != weight.dtype and not mixes_types.get())
            or torch.is_grad_enabled()
            or is_autocast(x)
        ):
            return type(linear).forward(linear, x)  # type: ignore[no-any-return]
        return self._product(x, weight, linear._parameters["bias"])

    def matrix(self, x: Tensor) -> ops.Matrix | None:
        """What the kernel needs to multiply tokens of x's type, x (B,1,size); None where PyTorch computes."""
        linear = self.linear
        weight = linear._parameters.get("weight")
        if type(linear) is not nn.Linear or weight is None or "bias" not in linear._parameters:
            return None
        if weight.dtype != x.dtype and not mixes_types.get():
            return None
        return self._product.matrix(x.new_empty(*x.shape[:-1], weight.shape[1]), weight, linear._parameters["bias"])

    def __getstate__(self) -> dict[str, object]:
        """A copy is of another module: it looks at that."""
        return {"linear": self.linear}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["linear"])  # type: ignore[misc]


def _matrix(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> ops.Matrix | None:
    """The weights as the kernel needs them; None where PyTorch computes, and for tensors that are no plain ones."""
    if not _are_plain(x, weight, bias) or not {x.dtype, weight.dtype} <= matrices.FLOAT_TYPES.keys():
        return None
    if x.shape[-1] != weight.shape[1]:
        return None
    return ops.matrix(x, weight, matrices.FLOATS, bias=bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as PyTorch's layer does, by the way that is the fastest for a prompt of x's type."""
    has_one_type = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    if has_one_type and _are_plain(x, weight, bias):
        return ops.multiply_floats(x, weight, bias)
    return F.linear(x, weight, bias)


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether these are PyTorch's own tensors on the CPU, or None."""
    return all(x is None or (type(x) in (Tensor, nn.Parameter) and x.is_cpu) for x in tensors)


def replace_linear(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Give every linear layer of PyTorch among these parts without a forward of its own ours, and return these."""
    found: list[nn.Module] = [
        part
        for part in parts
        if "forward" not in vars(part) and type(part) is nn.Linear and part.in_features % BLOCK == 0
    ]
    for part in found:
        part.forward = LinearForward(part)  # type: ignore[arg-type]
    return found
