"""A random token by its scores, with one random number."""

from __future__ import annotations

import torch
from torch import Tensor


class NotDrawable(RuntimeError):
    """No token can be drawn by these scores."""


def draw(scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A random token (B,1) of every row of scores (B,V), each as likely as their softmax says.

    It is the first token up to which the probabilities add up to more than a random number from `generator`. (Of equal
    likelihood, but not the token that torch.multinomial draws, which makes a random number for each of the vocabulary:
    that takes longer than a token of a small model.) Raises NotDrawable if a score is NaN or
    infinitely large, or none is finite.
    """
    sums = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    if not bool(total.isfinite().all()):
        raise NotDrawable(
            "the model's scores of the next token cannot be drawn by: one is NaN or infinitely large, or none is finite"
        )
    number = torch.rand(total.shape, dtype=total.dtype, device=total.device, generator=generator) * total
    below_total = number.minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, below_total, right=True)
