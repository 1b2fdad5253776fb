"""A decode step in all layers of a cache at once, for an operation that runs all layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .. import ops
from ..methods.base import Method
from .layer import Layer


class CacheStep:
    """One token in every row, in layers that all repeat their last step. Their stores are locked until `release`.

    forms: of each layer, the type of its queries and of its token, the scale of its logits, and its window. addresses:
    of each layer's step in the library.
    """

    def __init__(self, layers: Sequence[Layer], steps: Sequence[Any]) -> None:
        self.layers, self.steps = layers, steps
        self.forms = [(*step.contiguous, layer.window) for layer, step in zip(layers, steps, strict=True)]
        self.addresses: list[int] = [step.address for step in steps]

    def take(self, run: Callable[[Sequence[int]], Tensor]) -> Tensor:
        """Let run(addresses) take the token in all layers, and note it in their stores; return what it returns.

        If it raises an exception, the cache is half updated, and the next step is refused.
        """
        layers = self.layers
        layers[0].seen += 1  # beyond the others until the step is complete
        y = run(self.addresses)
        layers[0].seen -= 1
        for layer in layers:
            layer.store.advance()  # type: ignore[union-attr]
            layer.seen += 1
        return y

    def release(self) -> None:
        """Let go of the stores."""
        for step in self.steps:
            step.in_use.end()


def begin_step(layers: Sequence[Any], lengths: Sequence[int]) -> CacheStep | None:
    """Begin a step of layers that have taken so many tokens in every row, padding not included.

    None, and nothing is locked, unless each of them would only repeat its last step with another token.
    """
    steps, forced, seen = list[Any](), ops.forced_backend.get(), layers[0].seen
    for layer in layers:
        step = _repeated_step(layer, seen, lengths, forced)
        if step is None or not step.in_use.begin_if_free():
            break
        steps.append(step)
        if not step.prepare(layer.store):
            break
    else:
        return CacheStep(layers, steps)
    for step in steps:
        step.in_use.end()
    return None


def _repeated_step(layer: Any, seen: int, lengths: Sequence[int], forced: str | None) -> Any:
    """The step that a layer can repeat, for which it was not locked yet; None if it does anything else next."""
    if type(layer) is not Layer or layer.store is None or layer.store.choice is None:
        return None
    store, choice = layer.store, layer.store.choice
    step = choice.again
    if (
        not isinstance(step, ops.RepeatedStep)
        or step.contiguous is None
        or layer.seen != seen
        or layer.pending is not None
        or layer.record_past
        or layer.prompt is not None
        or (layer.prompt_end is not None and layer.prompt_end > seen)
        or (layer.window is not None and layer.window <= seen)
        or store.lengths != lengths
        or choice.method is not layer.method
        or choice.forced != forced
        or type(layer.method).decode is not Method.decode
    ):
        return None
    return step
