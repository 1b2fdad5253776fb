"""The normalisation of Llama and its like as one operation, where PyTorch takes seven (ops/rms_norm.py)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .autocast import is_autocast
from .watch import Watch

EPS_NAMES = "variance_epsilon", "eps"  # of the attribute of a normalisation
MOST_ROUNDED = 0.05  # the share of 16-bit values that may be one rounding away, where a sum has another order


class NormForward:
    """The forward of a root-mean-square normalisation, one operation on a CPU where the module computes just that.

    The module's own forward says so, on random numbers, before the first call and after each change of what it reads.
    """

    def __init__(self, norm: nn.Module) -> None:
        self.norm: Any = norm
        self._watch: Watch | None = None
        self._product: ops.Product | None = None

    def __call__(self, x: Tensor, *more: Any) -> Tensor:
        """Normalise x (...,size) -> (...,size). Where a gradient may be wanted, the module itself computes.

        Under autocast, and where x is of another type than the weights, the module itself says of which type the result
        is. more: of modules that compute something else, such as a gate.
        """
        weight = self.norm._parameters.get("weight")
        is_plain = (
            not torch.compiler.is_compiling()
            and weight is not None
            and x.is_cpu
            and not more
            and x.dtype == weight.dtype
            and not torch.is_grad_enabled()
            and not is_autocast(x)
        )
        product = self.product() if is_plain else None
        if product is None:
            return type(self.norm).forward(self.norm, x, *more)  # type: ignore[no-any-return]
        return product(x, weight)

    def product(self) -> ops.Product | None:
        """The operation; None if the module computes something else."""
        if self._watch is None or not self._watch.is_unchanged():
            self._watch, self._product = Watch([self.norm]), _product_of(self.norm)
        return self._product

    def __getstate__(self) -> dict[str, object]:
        """A copy is of another module: it looks at that."""
        return {"norm": self.norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["norm"])  # type: ignore[misc]


def eps_of(norm: nn.Module) -> float | None:
    """The eps of a module that may be a normalisation: with weights (size,) only. None if it is another module."""
    weight, values = norm._parameters.get("weight"), vars(norm)
    eps = next((values[name] for name in EPS_NAMES if name in values), None)
    if weight is None or weight.ndim != 1 or len(norm._parameters) > 1 or norm._modules:
        return None
    return eps if isinstance(eps, float) else None


def _product_of(norm: nn.Module) -> ops.Product | None:
    """The operation that a module computes; None if it computes something else."""
    eps, adds_one = eps_of(norm), adds_one_of(norm)
    if eps is None or adds_one is None:
        return None
    prepare = partial(ops.norm_matrix, eps=eps, adds_one=adds_one)
    return ops.Product(prepare, partial(ops.rms_norm, eps=eps, adds_one=adds_one))


def adds_one_of(norm: nn.Module) -> bool | None:
    """Whether a module is a normalisation with a factor of w (False) or of 1 + w; None if it is something else."""
    eps = eps_of(norm)
    return None if eps is None else next((one for one in (False, True) if _is_rms_norm(norm, eps, one)), None)


def _is_rms_norm(norm: Any, eps: float, adds_one: bool) -> bool:
    """Whether a module computes `ops.rms_norm`, with the same roundings, of numbers so small that eps counts.

    It is asked with weights of ours: with its own, such as ones, w and 1 + w might be of one effect.
    """
    draw = torch.Generator().manual_seed(0)
    numbers = torch.rand(norm.weight.shape, generator=draw, dtype=torch.float32, device="cpu")
    weight = (numbers + 0.5).to(norm.weight.dtype)
    norm = copy.copy(norm)
    norm._parameters = {"weight": weight}
    numbers = torch.randn(4, weight.shape[0], generator=draw, dtype=torch.float32, device="cpu")
    x = (2 * max(eps, 1e-12) ** 0.5 * numbers).to(weight.dtype)
    normalise = partial(ops.rms_norm, eps=eps, adds_one=adds_one)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if not is_close(normalise(x.float(), weight.float()), type(norm).forward(norm, x.float())):
            return False
        ours, own = normalise(x, weight), type(norm).forward(norm, x)
    return x.dtype == torch.float32 or bool(ours.dtype == own.dtype and (ours != own).float().mean() <= MOST_ROUNDED)


def is_close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two results of one formula in float32 agree; numbers that are not finite do not.

    tolerance: of the largest number.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def replace_norms(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Give every normalisation among these parts that has no forward of its own, and no hook, ours; return these."""
    found = [
        part
        for part in parts
        if "forward" not in vars(part)
        and eps_of(part) is not None
        and not (part._forward_hooks or part._forward_pre_hooks)
    ]
    for part in found:
        part.forward = NormForward(part)
    return found
