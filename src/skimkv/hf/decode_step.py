"""A decode step of a model as one operation of the library, from the embedding to the last normalisation.

It takes the place of the forward of transformers' model of decoder layers (LlamaModel and its like). A step of one
token in every row, with a cache of ours whose layers only repeat their last step, runs without transformers' code
between the layers. All else goes to the model's own forward, as do layers with a hook, an adapter or a gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from .. import ops
from .attention_interface import attention
from .decode_modules import DecoderLayer, decode_modules, norm_of
from .joint_operation import JointOperation
from .norms import replace_norms

# All names that the code of these classes uses, so that another version of it is noticed and left as it is.
_NAMES = {
    "BaseModelOutputWithPast", "DynamicCache", "ValueError", "arange", "config", "create_causal_mask", "device",
    "embed_tokens", "get_seq_length", "layers", "norm", "num_hidden_layers", "rotary_emb", "shape", "torch",
    "unsqueeze",
}  # fmt: skip
_TWO_MASKS = _NAMES | {
    "create_sliding_window_causal_mask", "dict", "enumerate", "has_sliding_layers", "isinstance", "layer_types",
}  # fmt: skip
MODELS: dict[type[nn.Module], set[str]] = {
    LlamaModel: _NAMES,
    MistralModel: _NAMES | {"create_sliding_window_causal_mask", "sliding_window"},
    Qwen2Model: _TWO_MASKS,
    Qwen3Model: _TWO_MASKS,
}


class StepForward:
    """The forward of a model of decoder layers, whose decode steps are one operation."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._joint = JointOperation(self._prepare)
        self._dicts: list[Mapping[str, nn.Module]] = []
        self._modules: list[nn.Module] = []
        self._attentions: list[dict[str, Any]] = []
        self._forms: list[tuple[float, int | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the model's own forward does, whose arguments and errors these are."""
        if not args and not torch.compiler.is_compiling():
            y = self._step(kwargs)
            if y is not None:
                return BaseModelOutputWithPast(last_hidden_state=y, past_key_values=kwargs["past_key_values"])
        return type(self.model).forward(self.model, *args, **kwargs)

    def __getstate__(self) -> dict[str, object]:
        """A copy is of other modules: it looks for them anew."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def _step(self, kwargs: dict[str, Any]) -> Tensor | None:
        """The tokens (B,1,size) after the last normalisation; None where the model's own forward has to compute them.

        Tokens that were embedded for it are put into kwargs, so that they are embedded once.
        """
        cache: Any = kwargs.get("past_key_values")
        ids, x = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        begin, tokens = getattr(cache, "begin_step", None), cast(Tensor, ids if x is None else x)
        if begin is None or (ids is None) == (x is None) or tokens.ndim < 2 or tokens.shape[1] != 1:
            return None
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)) or not self._is_plain(kwargs):
            return None
        step = begin(mask, tokens.shape[0])
        if step is None:
            return None
        try:
            if x is None:
                x = self.model.embed_tokens(ids)
                del kwargs["input_ids"]
                kwargs["inputs_embeds"] = x
            operation = self.operation(x)
            if operation is None or step.forms != [(x.dtype, *form) for form in self._forms]:
                return None
            if positions is None:
                positions = torch.tensor([[cache.get_seq_length()]])
            angles = self.model.rotary_emb(x, position_ids=positions)
            if not operation.fits(x, *angles):
                return None
            cos, sin = angles
            y: Tensor = step.take(lambda addresses: operation(x, cos, sin, addresses))
            return y
        finally:
            step.release()

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call asks for the last tokens only, of a model that decodes with our attention function."""
        if torch.is_grad_enabled():
            return False
        for name, value in kwargs.items():
            if name not in PLAIN_ARGUMENTS and value is not None and value is not False:
                return False
        config = self.model.config
        if not (config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]):
            return False
        if not kwargs.get("return_dict", True) or not config.return_dict:
            return False
        if config.output_attentions or config.output_hidden_states or getattr(config, "is_causal", None) is False:
            return False
        function = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
        return getattr(function, "func", None) is attention

    def operation(self, x: Tensor) -> ops.Layers | None:
        """All layers as one operation for x (B,1,size) and its like; None where they are called one by one."""
        modules = [module for part in self._dicts for module in part.values()]
        if not modules or modules != self._modules:
            self._find_modules()
            modules = self._modules
        operation = self._joint.operation(x, modules)
        if operation is None or self.model.config.num_hidden_layers != operation.count:
            return None
        return None if any(attributes["training"] for attributes in self._attentions) else operation

    def _find_modules(self) -> None:
        layers = self.model.layers
        parents: list[nn.Module] = [self.model, layers]
        for layer in layers:
            parents += [layer, *(part for part in layer._modules.values() if part is not None)]
        self._dicts = [parent._modules for parent in parents]  # type: ignore[misc]
        self._modules = [module for part in self._dicts for module in part.values()]

    def _prepare(self, x: Tensor, modules: Sequence[nn.Module]) -> ops.Layers | None:
        layers, self._forms, self._attentions = list(self.model.layers), [], []
        norm = norm_of(self.model.norm, x)
        if norm is None or not layers or x.shape[1] != 1 or not all(isinstance(one, DecoderLayer) for one in layers):
            return None
        parts = [part for layer in layers if (part := layer.prepared(x)) is not None]
        attentions = [layer.self_attn for layer in layers]
        if len(parts) < len(layers) or [one.layer_idx for one in attentions] != [*range(len(layers))]:
            return None
        self._forms = [(one.scaling, one.window()) for one in attentions]
        self._attentions = [one.__dict__ for one in attentions]
        return ops.Layers(parts, norm)


# What a decode step is made of, or what changes nothing in one.
PLAIN_ARGUMENTS = {
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict",
    "cache_position",
}  # fmt: skip


def step_forward(model: nn.Module) -> StepForward | None:
    """The forward of ours that a model has; None if it has its own."""
    forward = model.__dict__.get("forward")
    return forward if isinstance(forward, StepForward) else None


def replace_modules(model: nn.Module) -> None:
    """Put our modules in the places of a model's normalisations, feed-forward and attention layers, and layers.

    And its forward, where all of these are one operation.
    """
    replace_norms(model)
    for name, ours in decode_modules(model).items():
        model.set_submodule(name, ours)
    replace_forward(model)


def replace_forward(model: nn.Module) -> None:
    """Let every model of decoder layers inside this one take decode steps as one operation, where its code is known."""
    for part in model.modules():
        names = MODELS.get(type(part))
        if names is None or "forward" in part.__dict__:
            continue
        if set(inspect.unwrap(type(part).forward).__code__.co_names) == names:
            part.forward = StepForward(part)


def restore_forward(model: nn.Module) -> None:
    """Undo `replace_forward`."""
    for part in model.modules():
        if step_forward(part) is not None:
            del part.forward
