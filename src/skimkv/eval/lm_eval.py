"""lm-evaluation-harness with a method: every scored or generated token is decoded, none is read with the prompt.

    from skimkv.lm_eval import SkimLM
    lm = SkimLM(pretrained=model, tokenizer=tokenizer, method="Skim(k=128)")
    lm_eval.simple_evaluate(model=lm, tasks=["copa", "piqa", "winogrande"])

Under the name "skimkv" the class is one of the harness's models as soon as this module is imported. Version 0.4.13 of
the harness finds no models of other packages by itself, so its command is started through skimkv:

    python -m skimkv.lm_eval --model skimkv --model_args "pretrained=NAME,method=Skim(k=128)" --tasks piqa

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

from ..hf.cache import Cache
from ..hf.supported import needed_max_tokens
from ..methods import parse
from ..methods.base import Method
from .answer import Question, answer_questions
from .shared_prompt import copy_rows, record_prompt

try:
    HFLM: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    register_model: Any = importlib.import_module("lm_eval.api.registry").register_model
    tqdm: Any = importlib.import_module("tqdm").tqdm
except ImportError as error:
    raise ImportError(f"skimkv.lm_eval needs the harness: pip install 'skimkv[eval]' ({error})") from None

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (texts, context, continuation)


class BadMethodError(ValueError):
    """The argument `method` of SkimLM is missing, or is not the spec of a method."""


@register_model("skimkv")
class SkimLM(HFLM):  # type: ignore[misc]
    """The harness's model class for causal models, with a method that decodes.

    `decoded` is the number of tokens that the method has decoded for log-likelihoods so far. Raises BadMethodError if
    there is no method of that name, or if its arguments are wrong.
    """

    def __init__(self, *args: Any, method: Method | str = "", **options: Any) -> None:
        if method == "":
            raise BadMethodError("method is missing; write for example method=Skim(k=128)")
        try:
            self.method = parse(method)
        except ValueError as error:
            raise BadMethodError(f"method: {error}") from None
        self.decoded = 0
        super().__init__(*args, **{"backend": "causal", **options})

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        cache = Cache(self.model, self.method, needed_max_tokens(self.model, max_length))
        out: torch.Tensor = super()._model_generate(context, max_length, stop, past_key_values=cache, **options)
        return out

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score continuations: (log-likelihood in nats, whether greedy decoding says the same) for each request."""
        size = override_bs or (self.batch_size if isinstance(self.batch_size, int) else 8)
        splits = [_split(context, continuation, self.max_length) for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda i: splits[i][0])
        scores: dict[int, tuple[float, bool]] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Decoding loglikelihood requests")
        for prompt_ids, group in groupby(order, key=lambda i: splits[i][0]):
            members = list(group)
            new_tokens = max(len(splits[i][1]) for i in members)
            ids = torch.tensor([prompt_ids], device=self.device)
            prompt = record_prompt(self.model, ids, new_tokens=new_tokens)
            cache = prompt.cache(self.method)
            for batch in (members[start : start + size] for start in range(0, len(members), size)):
                questions = [Question(splits[i][1], len(requests[i][2])) for i in batch]
                rows = [0] * len(batch)
                caches = [copy_rows(cache, rows)]
                (answers,) = answer_questions(self.model, self.tokenizer, caches, prompt.logits[rows], questions)
                for i, answer in zip(batch, answers, strict=True):
                    scores[i] = -answer.bits * math.log(2), answer.likeliest
                    self.decoded += answer.steps
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], scores[i])
                bar.update(len(batch))
        bar.close()
        return [scores[i] for i in range(len(requests))]


def _split(context: list[int], continuation: list[int], longest: int) -> tuple[list[int], list[int]]:
    """The tokens that are read and those that are decoded.

    A context that is too long is cut on the left; at least one token is read.
    """
    context = context[-max(longest + 1 - len(continuation), 1) :]
    prompt = context[:-1] or context
    return prompt, context[len(prompt) :] + continuation


def main() -> None:
    """Run the harness's command, with "skimkv" among its models. Raises SystemExit, in one line, at a bad method."""
    try:
        importlib.import_module("lm_eval.__main__").cli_evaluate()
    except BadMethodError as error:
        raise SystemExit(f"skimkv.lm_eval: {error}") from None
