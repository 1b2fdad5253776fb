"""The experts of a layer with their matrices as a GGUF file holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Experts (Qwen2MoeExperts and its like) of three matrices each, for inference.

    gate, up and down: the linear layers of all experts. combine(gate, up): what the last layer is given, elementwise.
    """

    def __init__(
        self,
        gate: list[nn.Module],
        up: list[nn.Module],
        down: list[nn.Module],
        combine: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.ModuleList(gate), nn.ModuleList(up), nn.ModuleList(down)
        self.combine = combine

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Add up the chosen experts: x (n,size) · chosen (n,k) int64 · weights (n,k) -> (n,size).

        Only the matrices of chosen experts are read.
        """
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            if number >= len(self.down):  # stands for no expert
                continue
            token, place = torch.where(chosen == number)
            inputs = x[token]
            inner = self.combine(self.gate[number](inputs), self.up[number](inputs))
            y.index_add_(0, token, (self.down[number](inner) * weights[token, place, None]).to(y.dtype))
        return y


def combine_of(experts: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """How transformers' module of experts combines the outputs of its first two matrices."""
    if not hasattr(experts, "alpha"):
        act: Callable[[Tensor], Tensor] = experts.act_fn
        return lambda gate, up: act(gate) * up
    alpha, limit = experts.alpha, experts.limit

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        """gpt-oss's: both are clamped, and 1 is added to the second."""
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)

    return clamped
