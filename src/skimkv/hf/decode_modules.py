"""Modules of a model whose decode steps are one operation of the library, where transformers calls many.

The layers inside them stay what they are: a prompt, a hook, an adapter or another device goes through them one by one,
as transformers' own code does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .. import ops
from .norms import code_of, is_norm, replace_norms

Operation = TypeVar("Operation")
SILU = {nn.SiLU, type(ACT2FN["silu"])}
MOST_TOKENS = 15  # more are a prompt, whose products are large enough to be called one by one


class Together(Generic[Operation]):
    """Several layers as one operation, which is prepared once: while nothing changes, it only runs.

    prepare(x, layers): the operation for x and its like, or None where the layers are called one by one. What a step
    looks at is kept here, as each attribute that Python looks up takes long after a model has read other weights.
    """

    def __init__(self, prepare: Callable[[Tensor, Sequence[nn.Module]], Operation | None]) -> None:
        self._prepare = prepare
        self._forget()

    def _forget(self) -> None:
        self._operation: Operation | None = None
        self._layers: Sequence[nn.Module] = ()
        self._inputs: tuple[Any, ...] = ()
        self._hooks: list[dict[int, Any]] = []
        self._attributes: list[dict[str, Any]] = []
        self._tensors: list[tuple[dict[str, Any], str, Tensor | None, int]] = []

    def operation(self, x: Tensor, layers: Sequence[nn.Module]) -> Operation | None:
        """The operation for x (...,in), or None. Layers with a hook, or a forward of their own, are called one by one.

        A gradient that is wanted is left to them, too.
        """
        inputs = (x.shape, x.dtype, x.is_cpu, x.requires_grad and torch.is_grad_enabled(), ops.forced_backend.get())
        if inputs == self._inputs and layers == self._layers and self._is_unchanged():
            return self._operation
        self._forget()
        if x.is_cpu and x.numel() <= MOST_TOKENS * x.shape[-1] and not inputs[3]:
            self._layers, self._inputs = layers, inputs
            self._hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
            self._attributes = [layer.__dict__ for layer in layers]
            self._tensors = [
                (layer._parameters, name, tensor, 0 if tensor is None else tensor.data_ptr())
                for layer in layers
                for name, tensor in layer._parameters.items()
            ]
            self._operation = self._prepare(x, layers) if self._is_unchanged() else None
        return self._operation

    def _is_unchanged(self) -> bool:
        """Whether the layers have the tensors that they had, where they were, and nothing else is to be called."""
        if any(self._hooks):
            return False
        for attributes in self._attributes:
            if "forward" in attributes:
                return False
        for parameters, name, tensor, address in self._tensors:
            if parameters.get(name) is not tensor or (tensor is not None and tensor.data_ptr() != address):
                return False
        return True

    def __getstate__(self) -> dict[str, object]:
        """A copy is of other tensors: it is prepared anew."""
        return {"_prepare": self._prepare}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_prepare"])  # type: ignore[misc]


def _matrix(layer: nn.Module, x: Tensor) -> ops.Matrix | None:
    """The matrix of one of our linear layers for x and its like; None for other layers, and where PyTorch computes."""
    product = layer.__dict__.get("_product")
    if not isinstance(product, ops.Product):
        return None
    bias = layer._parameters["bias"]
    matrix = product.matrix(x, layer._parameters["weight"], bias)
    return matrix if matrix is None or matrix.bias is bias else None  # a converted bias would not follow the bias


def _matrices(x: Tensor, layers: Sequence[nn.Module]) -> list[ops.Matrix] | None:
    matrices = [matrix for layer in layers if (matrix := _matrix(layer, x)) is not None]
    return matrices if len(matrices) == len(layers) else None


def _gated_mlp(x: Tensor, layers: Sequence[nn.Module]) -> ops.GatedMLP | None:
    first = _matrices(x, layers[:2])
    second = first and _matrices(x.new_empty(*x.shape[:-1], first[0].out), layers[2:3])
    return ops.GatedMLP(*first, *second) if first and second and type(layers[3]) in SILU else None


class GatedMLP(LlamaMLP):
    """The feed-forward layer of Llama and its like: down(silu(gate(x)) * up(x))."""

    def __init__(self, mlp: nn.Module) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(mlp.__dict__)
        self._together = Together(_gated_mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x (...,in) -> (...,in). Raises ValueError if a gradient is wanted."""
        modules: Any = self._modules
        layers = modules["gate_proj"], modules["up_proj"], modules["down_proj"], modules["act_fn"]
        operation = self._together.operation(x, layers)
        return super().forward(x) if operation is None else operation(x)  # type: ignore[no-untyped-call]


class _Projections:
    """Prepares the projections to heads of size D; with the normalisations of q's and k's heads, if there are any."""

    def __init__(self, D: int) -> None:
        self.D = D

    def __call__(self, x: Tensor, layers: Sequence[nn.Module]) -> ops.Projections | None:
        norms: Any = layers[3:]
        matrices = _matrices(x, layers[:3])
        if not matrices or not all(is_norm(norm) and norm.weight.dtype == x.dtype for norm in norms):
            return None
        pair = [ops.HeadNorm(norm.weight, norm.variance_epsilon) for norm in norms]
        q, k, v = matrices
        return ops.Projections(q, k, v, self.D, (pair[0], pair[1]) if pair else None)


class ProjectedAttention(nn.Module):
    """An attention layer whose decode steps project and rotate in one operation.

    stands_for: transformers' class that it is derived from.
    """

    stands_for: type[nn.Module]
    _layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, attention: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attention.__dict__)
        self._together = Together(_Projections(attention.head_dim))

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as transformers' class does: hidden_states (B,n,in) -> (B,n,in), and no weights."""
        function = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        is_step = past_key_values is not None and function is not None and not self.training
        heads = self.project(hidden_states, position_embeddings) if is_step else None
        if heads is None:
            result: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            return result
        assert function is not None
        q, k, v = heads
        k, v = past_key_values.update(k, v, self.layer_idx)
        kwargs |= self._window()
        y, weights = function(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def project(self: Any, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rotated queries, rotated keys, and values of x (B,n,in), in one operation: (B,heads,n,D).

        angles: their cosines and sines (B,n,D). None where there is no such operation, or an angle is that of several
        tokens, or there are angles for a part of the channels.
        """
        if angles is None:
            return None
        modules = self._modules
        operation = self._together.operation(x, [modules[name] for name in self._layers])
        return None if operation is None else operation(x, *angles)

    def _window(self: Any) -> dict[str, Any]:
        """What the class passes to its attention function besides."""
        return {"sliding_window": self.sliding_window}


class ProjectedLlama(ProjectedAttention, LlamaAttention):  # type: ignore[misc]
    """Llama's attention layer."""

    stands_for = LlamaAttention

    def _window(self) -> dict[str, Any]:
        return {}


class ProjectedMistral(ProjectedAttention, MistralAttention):
    """Mistral's attention layer, which has a window."""

    stands_for = MistralAttention

    def _window(self) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


class ProjectedQwen2(ProjectedAttention, Qwen2Attention):
    """Qwen2's attention layer, which may have a window."""

    stands_for = Qwen2Attention


class ProjectedQwen3(ProjectedAttention, Qwen3Attention):
    """Qwen3's attention layer, which normalises heads and may have a window."""

    stands_for = Qwen3Attention

    _layers = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")


# All names that the code of these classes uses, so that another version of it is noticed and left as it is.
_NAMES = {
    "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout", "config",
    "contiguous", "eager_attention_forward", "get_interface", "head_dim", "k_proj", "layer_idx", "o_proj", "q_proj",
    "reshape", "scaling", "shape", "training", "transpose", "update", "v_proj", "view",
}  # fmt: skip
ATTENTION: dict[type[nn.Module], tuple[type[ProjectedAttention], set[str]]] = {
    LlamaAttention: (ProjectedLlama, _NAMES),
    MistralAttention: (ProjectedMistral, _NAMES | {"getattr"}),
    Qwen2Attention: (ProjectedQwen2, _NAMES | {"sliding_window"}),
    Qwen3Attention: (ProjectedQwen3, _NAMES | {"sliding_window", "q_norm", "k_norm"}),
}


def decode_module(module: nn.Module) -> nn.Module | None:
    """Our module for one of a model's, which shares its layers; None where there is none."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    replacement, names = ATTENTION.get(type(module), (None, set[str]()))
    if replacement and set(inspect.unwrap(type(module).forward).__code__.co_names) == names:
        return replacement(module)
    if code_of(type(module)) == code_of(LlamaMLP) and type(module.act_fn) in SILU:
        return GatedMLP(module)
    return None


def decode_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Our module for every one of a model's that has one, by name."""
    return {name: ours for name, part in model.named_modules() if (ours := decode_module(part)) is not None}


def replace_modules(model: nn.Module) -> None:
    """Put our modules in the places of a model's normalisations, feed-forward and attention layers."""
    replace_norms(model)
    for name, ours in decode_modules(model).items():
        model.set_submodule(name, ours)
