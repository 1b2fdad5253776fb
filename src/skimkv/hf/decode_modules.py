"""Modules of a model whose decode steps are one operation of the library, where transformers calls many.

The layers inside them stay what they are: a prompt, a hook, an adapter or another device goes through them one by one,
as transformers' own code does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from .. import ops
from .joint_operation import JointOperation
from .norms import code_of, is_norm

SILU = {nn.SiLU, type(ACT2FN["silu"])}


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


def norm_of(layer: nn.Module, x: Tensor) -> ops.Norm | None:
    """The normalisation that a layer is, for x and its like; None if it is another layer, or of another type."""
    norm: Any = layer
    return ops.Norm(norm.weight, norm.variance_epsilon) if is_norm(norm) and norm.weight.dtype == x.dtype else None


def _gated_mlp(x: Tensor, layers: Sequence[nn.Module]) -> ops.GatedMLP | None:
    first = _matrices(x, layers[:2])
    second = first and _matrices(x.new_empty(*x.shape[:-1], first[0].out), layers[2:3])
    return ops.GatedMLP(*first, *second) if first and second and type(layers[3]) in SILU else None


class GatedMLP(LlamaMLP):
    """The feed-forward layer of Llama and its like: down(silu(gate(x)) * up(x))."""

    def __init__(self, mlp: nn.Module) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(mlp.__dict__)
        self._joint = JointOperation(_gated_mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x (...,in) -> (...,in). Raises ValueError if a gradient is wanted."""
        operation = self._joint.operation(x, self.layers())
        return super().forward(x) if operation is None else operation(x)  # type: ignore[no-untyped-call]

    def layers(self) -> list[nn.Module]:
        """Its layers, as an operation needs them."""
        modules: Any = self._modules
        return [modules["gate_proj"], modules["up_proj"], modules["down_proj"], modules["act_fn"]]


def _projections(x: Tensor, layers: Sequence[nn.Module], norm: ops.Norm | None = None) -> ops.Projections | None:
    """layers: the attention layer, its three projections, and the normalisations of q's and k's heads, if any."""
    attention: Any = layers[0]
    matrices, head_norms = _matrices(x, layers[1:4]), [norm_of(layer, x) for layer in layers[4:]]
    if not matrices or None in head_norms:
        return None
    q, k, v = matrices
    pair: Any = tuple(head_norms) or None
    return ops.Projections(q, k, v, attention.head_dim, pair, norm)


class ProjectedAttention(nn.Module):
    """An attention layer whose decode steps project and rotate in one operation.

    stands_for: transformers' class that it is derived from.
    """

    stands_for: type[nn.Module]
    _projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, attention: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attention.__dict__)
        self._joint = JointOperation(_projections)

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as transformers' class does: hidden_states (B,n,in) -> (B,n,in), and no weights."""
        heads = None
        if past_key_values is not None and self.takes_steps():
            heads = self.project(hidden_states, position_embeddings)
        if heads is None:
            result: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            return result
        y, weights = self.attend(heads, attention_mask, past_key_values, **kwargs)
        return self.o_proj(y), weights

    def takes_steps(self: Any) -> bool:
        """Whether a step with a cache may go through the library: not in training, nor with a model's own function."""
        return not self.training and self.config._attn_implementation in ALL_ATTENTION_FUNCTIONS

    def project(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rotated queries, rotated keys, and values of x (B,n,in), in one operation: (B,heads,n,D).

        angles: their cosines and sines (B,n,D) or (1,n,D). None where there is no such operation, or angles are for a
        part of the channels.
        """
        operation = None if angles is None else self._joint.operation(x, self.layers())
        return None if operation is None or angles is None else operation(x, *angles)

    def layers(self) -> list[nn.Module]:
        """Itself and its layers up to attention, as their operation needs them."""
        modules: Any = self._modules
        return [self, *[modules[name] for name in self._projections]]

    def attend(
        self: Any, heads: tuple[Tensor, Tensor, Tensor], attention_mask: Any, past_key_values: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with projected heads (B,heads,n,D) -> (B,n,heads*D), and no weights."""
        q, k, v = heads
        k, v = past_key_values.update(k, v, self.layer_idx)
        kwargs |= self._window()
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        y, weights = function(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return y.reshape(y.shape[0], y.shape[1], -1).contiguous(), weights

    def window(self: Any) -> int | None:
        """How many tokens it sees; None: all."""
        size: int | None = self._window().get("sliding_window")
        return size

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
    _projections = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")


def _beginning(x: Tensor, layers: Sequence[nn.Module]) -> ops.Projections | None:
    norm = norm_of(layers[0], x)
    return None if norm is None else _projections(x, layers[1:], norm)


def _ending(x: Tensor, layers: Sequence[nn.Module]) -> ops.LayerEnd | None:
    mlp, o, last, norm = _gated_mlp(x, layers[3:7]), None, layers[0], norm_of(layers[1], x)
    if isinstance(inputs := getattr(last, "in_features", None), int):
        o = _matrix(last, x.new_empty(*x.shape[:-1], inputs))
    return ops.LayerEnd(o, norm, mlp) if o and norm and mlp else None


class DecoderLayer(nn.Module):
    """A layer of a model whose decode steps are two operations, before and after attention.

    stands_for: transformers' class that it is derived from.
    """

    stands_for: type[nn.Module]

    def __init__(self, layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._before, self._after = JointOperation(_beginning), JointOperation(_ending)

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the layer as transformers' class does: hidden_states (B,n,in) -> (B,n,in)."""
        attention, heads = self._modules["self_attn"], None
        operations: Any = None
        if past_key_values is not None and position_embeddings is not None:
            operations = self.operations(hidden_states)
            heads = operations and operations[0](hidden_states, *position_embeddings)
        kwargs |= {"position_ids": position_ids, "use_cache": use_cache}
        if heads is None:
            result: Tensor = super().forward(
                hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return result
        y, _ = attention.attend(heads, attention_mask, past_key_values, **kwargs)
        after: ops.LayerEnd = operations[1]
        return after(y, hidden_states)

    def operations(self, x: Tensor) -> tuple[ops.Projections, ops.LayerEnd] | None:
        """What comes before attention, and what after it, for x (B,n,in) and its like; None if it goes one by one."""
        modules: Any = self._modules
        if not self.is_ours() or not modules["self_attn"].takes_steps():
            return None
        after = self._after.operation(x, self._layers_after())
        before = after and self._before.operation(x, self._layers_before())
        return (before, after) if before and after else None

    def prepared(self, x: Tensor) -> tuple[ops.Projections, ops.LayerEnd] | None:
        """The same for an operation of several layers, which looks itself for what has changed and who wants to see."""
        if not self.is_ours():
            return None
        before, after = _beginning(x, self._layers_before()), _ending(x, self._layers_after())
        return (before, after) if before and after else None

    def is_ours(self) -> bool:
        """Whether attention and the feed-forward layer are modules of this file."""
        modules: Any = self._modules
        return isinstance(modules["self_attn"], ProjectedAttention) and isinstance(modules["mlp"], GatedMLP)

    def _layers_before(self) -> list[nn.Module]:
        modules: Any = self._modules
        return [modules["input_layernorm"], *modules["self_attn"].layers()]

    def _layers_after(self) -> list[nn.Module]:
        modules: Any = self._modules
        mlp = modules["mlp"]
        return [modules["self_attn"]._modules["o_proj"], modules["post_attention_layernorm"], mlp, *mlp.layers()]


class LlamaLayer(DecoderLayer, LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """Llama's layer."""

    stands_for = LlamaDecoderLayer


class MistralLayer(DecoderLayer, MistralDecoderLayer):  # type: ignore[no-untyped-call]
    """Mistral's layer."""

    stands_for = MistralDecoderLayer


class Qwen2Layer(DecoderLayer, Qwen2DecoderLayer):  # type: ignore[no-untyped-call]
    """Qwen2's layer."""

    stands_for = Qwen2DecoderLayer


class Qwen3Layer(DecoderLayer, Qwen3DecoderLayer):  # type: ignore[no-untyped-call]
    """Qwen3's layer."""

    stands_for = Qwen3DecoderLayer


# All names that the code of these classes uses, so that another version of it is noticed and left as it is.
_NAMES = {
    "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout", "config",
    "contiguous", "eager_attention_forward", "get_interface", "head_dim", "k_proj", "layer_idx", "o_proj", "q_proj",
    "reshape", "scaling", "shape", "training", "transpose", "update", "v_proj", "view",
}  # fmt: skip
_LAYER_NAMES = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
REPLACEMENTS: dict[type[nn.Module], tuple[Callable[[nn.Module], nn.Module], set[str]]] = {
    LlamaAttention: (ProjectedLlama, _NAMES),
    MistralAttention: (ProjectedMistral, _NAMES | {"getattr"}),
    Qwen2Attention: (ProjectedQwen2, _NAMES | {"sliding_window"}),
    Qwen3Attention: (ProjectedQwen3, _NAMES | {"sliding_window", "q_norm", "k_norm"}),
    LlamaDecoderLayer: (LlamaLayer, _LAYER_NAMES),
    MistralDecoderLayer: (MistralLayer, _LAYER_NAMES),
    Qwen2DecoderLayer: (Qwen2Layer, _LAYER_NAMES),
    Qwen3DecoderLayer: (Qwen3Layer, _LAYER_NAMES),
}


def decode_module(module: nn.Module) -> nn.Module | None:
    """Our module for one of a model's, which shares its layers; None where there is none."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    replacement, names = REPLACEMENTS.get(type(module), (None, set[str]()))
    if replacement and set(inspect.unwrap(type(module).forward).__code__.co_names) == names:
        return replacement(module)
    if code_of(type(module)) == code_of(LlamaMLP) and type(module.act_fn) in SILU:
        return GatedMLP(module)
    return None


def decode_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Our module for every one of a model's that has one, by name."""
    return {name: ours for name, part in model.named_modules() if (ours := decode_module(part)) is not None}
