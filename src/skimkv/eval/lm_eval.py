"""lm-evaluation-harness with a method: every scored or generated token is decoded, none is read with the prompt.

    from skimkv.lm_eval import SkimLM
    lm = SkimLM(pretrained=model, tokenizer=tokenizer, method="SparQ(r=32, k=128)")
    lm_eval.simple_evaluate(model=lm, tasks=["copa", "piqa", "winogrande"])

The harness scores a continuation with one forward pass over context and continuation, which is dense whatever is
attached. Here the context but its last token is the dense prompt, read once for all its continuations; that token
and the continuation are decoded.
"""

from __future__ import annotations

import importlib
import math
from itertools import groupby
from typing import Any

import torch

from ..hf.attach import Cache
from ..methods import parse
from ..methods.base import Method
from . import shared_prompt as prompt
from .answer import Ask, answer

try:
    HFLM: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
except ImportError as error:
    raise ImportError(f"skimkv.lm_eval needs the harness: pip install 'skimkv[eval]' ({error})") from None

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (texts, context, continuation)


class SkimLM(HFLM):  # type: ignore[misc]
    """HFLM for causal models. `decoded`: tokens that the method has decoded for log-likelihoods so far."""

    def __init__(self, *args: Any, method: Method | str, **options: Any) -> None:
        self.method, self.decoded = parse(method), 0
        super().__init__(*args, **{"backend": "causal", **options})

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        cache = Cache(self.model, self.method)
        out: torch.Tensor = super()._model_generate(context, max_length, stop, past_key_values=cache, **options)
        return out

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding says the same) of each continuation."""
        size = override_bs or (self.batch_size if isinstance(self.batch_size, int) else 8)
        cut = [_cut(context, continuation, self.max_length) for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda i: cut[i][0])
        found: dict[int, tuple[float, bool]] = {}
        for dense, group in groupby(order, key=lambda i: cut[i][0]):
            held, logits = prompt.read(self.model, torch.tensor([dense], device=self.device))
            cache, members = prompt.fill(self.model, held, self.method), list(group)
            for part in (members[start : start + size] for start in range(0, len(members), size)):
                asks = [Ask(cut[i][1], len(requests[i][2])) for i in part]
                rows = [0] * len(part)
                said = answer(self.model, self.tokenizer, prompt.fork(cache, rows), logits[rows], asks)
                for i, each in zip(part, said, strict=True):
                    found[i] = -each.bits * math.log(2), each.likeliest
                    self.decoded += each.steps
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return [found[i] for i in range(len(requests))]


def _cut(context: list[int], continuation: list[int], longest: int) -> tuple[list[int], list[int]]:
    """What is read and what is decoded, cut on the left where it is too long; one token at least is read."""
    context = context[-max(longest + 1 - len(continuation), 1) :]
    dense = context[:-1] or context
    return dense, context[len(dense) :] + continuation
