"""The normalisation of Llama and its like as one operation, where PyTorch takes seven (ops/rms_norm.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .. import ops


class RMSNorm(LlamaRMSNorm):
    """Llama's normalisation for inference, which is one operation on a CPU. weight: (size,)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.variance_epsilon = weight, eps
        self._product = ops.Product(partial(ops.norm_matrix, eps=eps), partial(ops.rms_norm, eps=eps))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (...,size) -> (...,size). Raises ValueError if a gradient is wanted on a CPU."""
        return self._product(x, self._parameters["weight"]) if x.is_cpu else super().forward(x)


def is_llama_norm(module: nn.Module) -> bool:
    """Whether a module computes what Llama's normalisation does: transformers copies its code into many families."""
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return code_of(type(module)) == code_of(LlamaRMSNorm) and not has_hooks


def is_norm(module: nn.Module) -> bool:
    """Whether a module is ours, or computes what ours does."""
    return isinstance(module, RMSNorm) or is_llama_norm(module)


def code_of(kind: type[nn.Module]) -> tuple[Any, ...]:
    """What the code of a module says, to compare it with another one's; empty if it is not Python's."""
    code = getattr(kind.forward, "__code__", None)
    return (code.co_code, code.co_names, code.co_consts) if code else ()


def norms_of(model: nn.Module) -> dict[str, RMSNorm]:
    """Our module for every one of a model's that is a normalisation as Llama has it, by name; weights are shared."""
    return {
        name: RMSNorm(part.weight, part.variance_epsilon) for name, part in model.named_modules() if is_llama_norm(part)
    }


def replace_norms(model: nn.Module) -> None:
    """Put our modules in the places of a model's normalisations."""
    for name, norm in norms_of(model).items():
        model.set_submodule(name, norm.train(model.get_submodule(name).training))
