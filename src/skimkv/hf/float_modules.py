"""Modules whose weights are floats that a decode step reads at the memory's speed (ops/linear.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops


class Floats(nn.Module):
    """A matrix of float32, bfloat16 or float16. `weight` is (rows,columns), so that tied modules can share it.

    dtype: of what an embedding returns, and of the bias; it may be another than that of the weights.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = weight.shape[0], weight.shape[1]
        self.dtype = dtype
        self.weight = nn.Parameter(weight, requires_grad=False)

    def extra_repr(self) -> str:
        """The sizes and the type of the weights."""
        return f"{self.shape[1]}, {self.shape[0]}, weights={self.weight.dtype}"


class FloatLinear(Floats):
    """A linear layer (nn.Linear) for inference, whose decode steps run in C++ on a CPU."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight, dtype)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", bias)
        self._product = ops.Product(ops.float_matrix, ops.float_linear)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (...,in) -> (...,out), in the type of x. Raises ValueError if a gradient is wanted."""
        return self._product(x, self._parameters["weight"], self._parameters["bias"])


class FloatEmbedding(Floats):
    """An embedding (nn.Embedding) that returns another type than that of its weights."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__(weight, dtype)
        self.num_embeddings, self.embedding_dim = self.shape

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (...) of any integer type -> (...,columns). Raises IndexError for an id out of range."""
        return nn.functional.embedding(ids, self.weight).to(self.dtype)
