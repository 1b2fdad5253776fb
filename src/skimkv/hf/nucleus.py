"""Top-p sampling without sorting the whole vocabulary, which takes longer than a token of a small model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

CANDIDATES = 256  # tokens that are sorted
ROUNDING = 1e-5  # more than sums of probabilities err by


class Nucleus(LogitsProcessor):
    """Keeps the tokens that `warper` of the Transformers library keeps, and gives the others its value.

    These are the likeliest tokens whose probabilities add up to top_p (Holtzman et al., arXiv 1904.09751). Only the
    CANDIDATES likeliest of all tokens are sorted, unless more are kept: then the library's processor is called. Of
    equally likely tokens of which only some are kept, these may be others than the library's.
    """

    def __init__(self, warper: TopPLogitsWarper) -> None:
        self.warper = warper

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (B,V) after the tokens input_ids (B,n)."""
        found = None
        is_large = scores.shape[-1] >= 2 * CANDIDATES and self.warper.min_tokens_to_keep <= CANDIDATES
        if is_large and scores.device.type == "cpu":
            found = self._among_candidates(scores)
        return cast(Tensor, self.warper(cast(Any, input_ids), cast(Any, scores))) if found is None else found

    def _among_candidates(self, scores: Tensor) -> Tensor | None:
        """The same without the library; None where it has to be called."""
        values, tokens = scores.topk(CANDIDATES)
        probabilities = scores.softmax(-1).gather(-1, tokens).double()
        likelier = probabilities.cumsum(-1) - probabilities  # the sum of those before a token
        if not (likelier[:, -1] > self.warper.top_p + ROUNDING).all():
            return None
        is_left_out = likelier >= self.warper.top_p
        is_left_out[:, : self.warper.min_tokens_to_keep] = False
        nothing = torch.full_like(scores, self.warper.filter_value)
        return nothing.scatter_(-1, tokens, values.masked_fill(is_left_out, self.warper.filter_value))


def without_sorting_all(processors: Iterable[LogitsProcessor]) -> LogitsProcessorList:
    """The same processors, of which those for top-p sort few tokens."""
    return LogitsProcessorList([Nucleus(one) if type(one) is TopPLogitsWarper else one for one in processors])
