"""The logits of a model's next token, with less of the library's code than a call of the model enters for each."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import matrices
from .angles import AngleTable
from .decode_step import TakenStep, matrix_of, taken_steps
from .linear_forward import LinearForward
from .matrix_modules import MatrixEmbedding
from .supported import decoder_of
from .watch import has_hooks, is_of_libraries

# What a decoder is given, in the loops of ours; all else that it gets must say nothing.
GIVEN = "input_ids", "attention_mask", "position_ids", "past_key_values"
SAYS_NOTHING = {"use_cache", "return_dict"}


class NextToken(NamedTuple):
    """What a model says of the token after some: its logits (B,V), and the most likely token (B,1) if that is known."""

    logits: Tensor
    most_likely: Tensor | None = None


class NextLogits:
    """The logits of the next token, by a model whose loop runs no code but ours between two tokens.

    The first token goes through the model's own forward. If that handed all on to a decoder whose step is one
    operation, and the logits are what the model's last layer makes of the result, the later ones are one operation from
    the token to its logits; what it computes with is looked at in the first step only.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._steps: Steps | None = None
        self._installation: Any = None
        self._has_looked = False

    def __call__(self, input_ids: Tensor, past_key_values: Any, **inputs: Any) -> NextToken:
        """What the model says after one token in every row, input_ids (B,1).

        The other inputs are as the model takes them: the cache of the call before, a mask with one column more, and the
        positions that follow.
        """
        found = self._direct(input_ids, past_key_values, **inputs) if self._steps is not None else None
        return self._by_model(input_ids, past_key_values=past_key_values, **inputs) if found is None else found

    def _direct(
        self,
        ids: Tensor,
        cache: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> NextToken | None:
        if vars(self.model).get("_skimkv") is not self._installation:  # somebody detached the model
            return None
        assert self._steps is not None
        self._installation.begin_forward(cache, ids, position_ids)
        return self._steps.take(ids, cache, attention_mask, position_ids)

    def _by_model(self, input_ids: Tensor, **inputs: Any) -> NextToken:
        steps = list[TakenStep]()
        before = taken_steps.set(None if self._has_looked else steps)
        try:
            output = self.model(input_ids=input_ids, return_dict=True, **inputs)
        finally:
            taken_steps.reset(before)
        if steps:
            self._has_looked = True
            if len(steps) == 1 and self._hands_on(steps[0], {"input_ids": input_ids, **inputs}, output.logits):
                self._steps = Steps(steps[0], self.model.get_output_embeddings())
                self._installation = vars(self.model)["_skimkv"]
        return NextToken(next_logits(output))

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
        if not isinstance(head, nn.Module) or not all(map(_is_unseen, (head, decoder.embed_tokens))):
            return False
        if not all(map(is_of_libraries, (type(model), type(model).forward, type(head)))):
            return False
        return torch.equal(head(step.y), logits)


class Steps:
    """Decode steps of one cache that follow one another, between which no code runs but ours.

    What stays as it was in the step before is not prepared anew. first: the step before them. head: the module that
    makes logits of what the layers return.
    """

    def __init__(self, first: TakenStep, head: Any) -> None:
        self.forward, self.prepared, self.head = first.forward, first.prepared, head
        layers = cast(ops.Layers, self.prepared.operation)
        self._angles, self._layers, self._like = AngleTable(self.forward.model), layers, torch.empty_like(first.y)
        self._embed: Any = self.forward.model.embed_tokens
        last, rows = matrix_of(head, first.y, converts=False), _embedding(self._embed, first.y)
        self._decoder = None if last is None else ops.Decoder(layers, last, rows)
        self._embeds = self._decoder is None or rows is None
        self._step: Any = None

    def take(self, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> NextToken | None:
        """Take the tokens ids (B,1) after the last ones; None where the model's own forward does.

        mask, positions: as StepForward.take has them; the mask has a one more in every row.
        """
        if positions is None:
            positions = torch.tensor([[cache.get_seq_length()]], device="cpu")
        tokens, like = (self._embed(ids),) * 2 if self._embeds else (ids, self._like)
        if len(like) != len(ids):
            self._like = like = like.new_empty(len(ids), *like.shape[1:])
        cos, sin = self._angles(like, positions)
        if not self._layers.fits(len(ids), cos, sin):
            return None
        step, self._step = self._step, None
        if step is None or not cache.continues(step, mask):
            step = cache.begin_step(mask, len(ids), self._layers.dtype, self.prepared.attention)
            if step is None:
                return None
        if self._decoder is None:
            found = NextToken(self.head(self.forward.take_in(step, self._layers, tokens, cos, sin))[:, -1])
        else:
            found = NextToken(*self.forward.take_in(step, self._decoder, tokens, cos, sin))
        self._step = step
        return found


def _is_unseen(module: nn.Module) -> bool:
    """Whether nobody wants to see a module called, nor has replaced its forward, and might change the model there."""
    return not has_hooks(module.modules()) and isinstance(vars(module).get("forward"), LinearForward | None)


def _embedding(module: nn.Module, x: Tensor) -> ops.Matrix | None:
    """The matrix of an embedding that only looks up tokens of x's type; None for another one."""
    if type(module) is MatrixEmbedding:
        kind, dtype = module.kind, module.dtype
    elif type(module) is nn.Embedding and module.max_norm is None:
        kind, dtype = matrices.FLOATS, module.weight.dtype
    else:
        return None
    is_of_type = dtype == x.dtype and (kind != matrices.FLOATS or module.weight.dtype == dtype)
    return ops.matrix(x, module.weight, kind, module.num_embeddings) if is_of_type else None


def next_logits(output: Any) -> Tensor:
    """The logits (B,V) of the next token in an output of the model, as they lie there."""
    logits: Tensor = output.logits
    return logits[:, -1]
