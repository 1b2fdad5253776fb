"""The logits of a model's next token, with less of the library's code than a call of the model enters for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decode_step import Steps, TakenStep, taken_steps
from .supported import decoder_of

# What a decoder is given, in the loops of ours; all else that it gets must say nothing.
GIVEN = "input_ids", "attention_mask", "position_ids", "past_key_values"
SAYS_NOTHING = {"use_cache", "return_dict"}


class NextLogits:
    """The logits of the next token, by a model whose loop runs no code but ours between two tokens.

    The first token goes through the model's own forward. If that handed all on to a decoder whose step is one
    operation, and the logits are what the model's last layer makes of the result, the later ones go there directly;
    what the decoder computes with is looked at in the first step only.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._steps: Steps | None = None
        self._parts: tuple[Any, Any, Any] = None, None, None  # what is installed, the embedding and the last layer
        self._has_looked = False

    def __call__(self, input_ids: Tensor, past_key_values: Any, **inputs: Any) -> Tensor:
        """The logits (B,V) after one token in every row, input_ids (B,1), as the model gives them.

        The other inputs are as the model takes them: the cache of the call before, a mask with one column more, and the
        positions that follow.
        """
        logits = self._direct(input_ids, past_key_values, **inputs) if self._steps is not None else None
        return self._by_model(input_ids, past_key_values=past_key_values, **inputs) if logits is None else logits

    def _direct(
        self,
        ids: Tensor,
        cache: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Tensor | None:
        installation, embed, head = self._parts
        if vars(self.model).get("_skimkv") is not installation:  # somebody detached the model
            return None
        assert self._steps is not None
        installation.begin_forward(cache, ids, position_ids)
        y = self._steps.take(embed(ids), cache, attention_mask, position_ids)
        return None if y is None else head(y)[:, -1]

    def _by_model(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        steps = list[TakenStep]()
        before = taken_steps.set(None if self._has_looked else steps)
        try:
            output = self.model(input_ids=input_ids, return_dict=True, **inputs)
        finally:
            taken_steps.reset(before)
        if steps:
            self._has_looked = True
            if len(steps) == 1 and self._hands_on(steps[0], {"input_ids": input_ids, **inputs}, output.logits):
                self._steps, model = Steps(steps[0]), self.model
                self._parts = vars(model)["_skimkv"], decoder_of(model).embed_tokens, model.get_output_embeddings()
        return next_logits(output)

    def _hands_on(self, step: TakenStep, inputs: dict[str, Any], logits: Tensor) -> bool:
        """Whether a call of the model with these inputs did no more than one step of its decoder and its last layer."""
        model, decoder, head = self.model, decoder_of(self.model), self.model.get_output_embeddings()
        says = {name for name, value in step.kwargs.items() if value is not None and value is not False}
        if decoder is not step.forward.model or not says <= {*GIVEN, *SAYS_NOTHING} or "_skimkv" not in vars(model):
            return False
        if any(step.kwargs.get(name) is not inputs.get(name) for name in GIVEN):
            return False
        hooks = model._forward_hooks, model._forward_pre_hooks, decoder._forward_hooks
        if "forward" in vars(model) or any(hooks) or len(decoder._forward_pre_hooks) != 1:  # which is ours
            return False
        return isinstance(head, torch.nn.Module) and torch.equal(head(step.y), logits)


def next_logits(output: Any) -> Tensor:
    """The logits (B,V) of the next token in an output of the model, as they lie there."""
    logits: Tensor = output.logits
    return logits[:, -1]
