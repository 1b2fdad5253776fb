"""What the references of several methods share: pure functions of tensors, in float32 (float64 in, float64 out).

A NaN among a head's logits makes its output NaN, as it does in dense attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Bound logits to softcap * tanh(logits / softcap), Gemma 2's bound on logits; None leaves them as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension, whose sum a sink joins: a logit that takes weight and has no value.

    logits (...,m) · sinks, which can be broadcast to (...), or None -> (...,m), which sum to less than 1 with sinks.
    """
    if sinks is None:
        return logits.softmax(-1)
    sink = sinks.to(logits.dtype).expand(logits.shape[:-1])[..., None]
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def check_softcap(softcap: float | None) -> None:
    """Raise ValueError unless softcap is a positive, finite number, or None."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap = {softcap} must be positive and finite; None means no cap")


def check_query(q: Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless q has this shape, is on this device, and of this type; None: of any floating one."""
    has_type = q.is_floating_point() if dtype is None else q.dtype == dtype
    if q.shape != shape or q.device != device or not has_type:
        expected = "floating-point" if dtype is None else dtype
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)} on {q.device}; must be {expected} {shape} on {device}")


def check_sinks(sinks: Tensor | None, H: int, G: int, device: torch.device) -> None:
    """Raise ValueError unless sinks are (H,G) float32 on this device, or None."""
    if sinks is not None and (sinks.shape != (H, G) or sinks.dtype != torch.float32 or sinks.device != device):
        raise ValueError(
            f"sinks is {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; must be torch.float32 {(H, G)} on {device}"
        )


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention of one query per head over rows of K and V (SparQ eq. 2).

    q (B,H,G,D) · k, v (B,H,m,D) · valid (B,1|H,m) bool · sinks (H,G) -> y (B,H,G,D) and the softmax weights (B,H,G,m).
    """
    logits = apply_softcap(q @ k.transpose(-1, -2) * scale, softcap).masked_fill(~valid[:, :, None], -torch.inf)
    weights = softmax_with_sinks(logits, sinks)
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


def block_mask(start: int, stop: int, history: int, device: torch.device) -> Tensor:
    """The causal mask of queries start .. stop-1 of a block: query i sees the history and tokens 0 .. i of the block.

    Returns (stop-start, history+stop) bool.
    """
    i = torch.arange(start, stop, device=device)[:, None]
    return torch.arange(history + stop, device=device) <= history + i
