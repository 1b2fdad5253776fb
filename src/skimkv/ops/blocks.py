"""What the references of several methods share: pure functions of tensors, in float32 (float64 in, float64 out).

A NaN among a head's logits makes its output NaN, as it does in dense attention.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Bound logits to softcap * tanh(logits / softcap), Gemma 2's bound on logits; None leaves them as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Dense attention of one query per head over rows of K and V (SparQ eq. 2).

    q (B,H,G,D) · k, v (B,H,m,D) · valid (B,1|H,m) bool -> y (B,H,G,D) and the softmax weights (B,H,G,m).
    """
    logits = apply_softcap(q @ k.transpose(-1, -2) * scale, softcap).masked_fill(~valid[:, :, None], -torch.inf)
    weights = logits.softmax(-1)
    return weights @ v, weights


def take(x: Tensor, index: Tensor) -> Tensor:
    """Entries of the last dimension for every query head: x (B,H,G,n), index (B,H,m) -> (B,H,G,m)."""
    return x.gather(-1, index[:, :, None].expand(-1, -1, x.shape[2], -1))


def choose_positions(score: Tensor, lengths: list[int], k: int, local: int) -> tuple[Tensor, Tensor]:
    """The current token, the `local` before it, and the positions of the largest scores: k besides the current token.

    score (B,H,N) -> index (B,H,m) and valid (B,H,m), which is False where a row has fewer than m tokens.
    """
    last = torch.tensor(lengths, device=score.device)[:, None, None] - 1
    position = torch.arange(score.shape[-1], device=score.device)
    rank = score.masked_fill((position >= last - local) & (position <= last), torch.inf)
    rank = rank.masked_fill(position > last, -torch.inf)
    index = rank.topk(min(k + 1, score.shape[-1]), -1).indices
    return index, index <= last
