"""How long the parts of a decode step take on a CPU: attention inside it, and the linear layers alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..hf.attach import Cache
from ..hf.cache_step import CacheStep
from ..hf.decode_modules import decode_modules
from ..hf.decode_step import StepForward, replace_forward, restore_forward, step_forward
from ..hf.float_modules import FloatLinear
from ..hf.norms import norms_of
from .machine import Call
from .models import next_token

PLAIN, OURS = "linear layers of transformers", "linear layers of ours"  # what is timed beside tokens


class OwnLayers:
    """The modules of a model in whose place ours can stand: its own, and ours with the same weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        linear = {n: part for n, part in model.named_modules() if hasattr(part, "in_features")}
        self.model = model
        self.ours: dict[str, Any] = decode_modules(model) | norms_of(model)
        self.plain: dict[str, Any] = {name: model.get_submodule(name) for name in self.ours} | linear
        self.ours |= {
            name: FloatLinear(part.weight, part.weight.dtype) if type(part) is torch.nn.Linear else part
            for name, part in linear.items()
        }

    def use(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Let the model have these layers, `plain` or `ours`, and with ours the forward that runs them at once."""
        for name, layer in layers.items():
            self.model.set_submodule(name, layer)
        if layers is self.ours:
            replace_forward(self.model)
        else:
            restore_forward(self.model)

    def calls(self) -> dict[str, Call]:
        """Products of one token with all linear layers, one after the other, by PLAIN and OURS."""
        return {PLAIN: partial(_call_all, self._products()), OURS: partial(_call_all, self._operations())}

    def _products(self) -> list[Call]:
        linear = [part for part in self.plain.values() if hasattr(part, "in_features")]
        return [partial(part, self._ones(part.in_features)) for part in linear]

    def _operations(self) -> list[Call]:
        """All layers but attention as one operation, and the product after them."""
        self.use(self.ours)
        forward = step_forward(self.model.model)
        assert forward is not None
        x = self._ones(self.model.lm_head.in_features)
        angles = self._ones(self.model.model.layers[0].self_attn.head_dim)
        return [partial(_call_operation, forward, x, angles), partial(self.model.lm_head, x)]

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(1, 1, size, dtype=self.model.dtype)


def _call_operation(forward: StepForward, x: torch.Tensor, angles: torch.Tensor) -> None:
    operation = forward.operation(x)
    assert operation is not None
    operation(x, angles, angles, None)


def _call_all(calls: Sequence[Call]) -> None:
    with torch.inference_mode():
        for call in calls:
            call()


class AttentionClock:
    """Takes decode steps, and notes for each of them the seconds in every layer's cache update and attention.

    Where a step is one operation of the library, that says how long attention took; what Python does with the cache
    before and after it is added.
    """

    def __init__(self, model: LlamaForCausalLM, cache: Any) -> None:
        self.model, self.cache, self.seconds, self.inside = model, cache, list[float](), 0.0
        self.steps_at_once = 0  # steps that were one operation
        cache.update = self._timed(cache.update)
        if isinstance(cache, Cache):
            self._begin = self._timed(cache.begin_step)
            cache.begin_step = self._begin_step  # type: ignore[method-assign, assignment]

    def next_token(self) -> None:
        """Take one decode step with whatever attention function the model has now.

        Raises RuntimeError if a step is not one operation, and those before it were.
        """
        self.inside, name, before = 0.0, self.model.config._attn_implementation, self.steps_at_once
        function = ALL_ATTENTION_FUNCTIONS[name]
        # with a function in the place of ours, no step is one operation: the second step shows whether they are
        is_at_once = before > 0 or len(self.seconds) == 1
        if not is_at_once:
            AttentionInterface.register(name, self._timed(function))
        try:
            next_token(self.model, self.cache)
        finally:
            AttentionInterface.register(name, function)
        if before and self.steps_at_once == before:
            raise RuntimeError("a decode step was not one operation, as those before it: its attention was not timed")
        self.seconds.append(self.inside)

    def _begin_step(self, *args: Any) -> CacheStep | None:
        """Begin a step of the cache, whose time in the library is taken by the library."""
        step: CacheStep | None = self._begin(*args)
        forward = step_forward(self.model.model)
        if step is None or forward is None:
            return step
        take, clock, outside = step.take, c_int64(), 0.0
        forward.attention_ns = clock

        def timed_take(run: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
            """Take the step; of the operation itself, only attention counts as inside."""

            def timed_run(addresses: Sequence[int]) -> torch.Tensor:
                """Run the operation, whose seconds are outside."""
                nonlocal outside
                start = time.perf_counter()
                result = run(addresses)
                outside = time.perf_counter() - start
                return result

            start = time.perf_counter()
            result = take(timed_run)
            self.inside += time.perf_counter() - start - outside + clock.value / 1e9
            self.steps_at_once += 1
            return result

        step.take = timed_take  # type: ignore[method-assign]
        return step

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            """Call the function, and add its seconds to those inside."""
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.inside += time.perf_counter() - start
            return result

        return timed
