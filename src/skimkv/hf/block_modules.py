"""Modules whose weights are blocks in the layout of GGUF files (ops/block_weights.py)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import block_weights


class Blocks(nn.Module):
    """A matrix in blocks. `weight` is (rows, row_bytes) uint8, so that tied modules can share it.

    blocks: the type of the blocks, one of block_weights.TYPES. columns: the weights of a row. dtype: of what an
    embedding returns.
    Raises ValueError if the weight is not that of such rows.
    """

    def __init__(self, weight: Tensor, blocks: str, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        row_bytes = block_weights.row_bytes(blocks, columns)
        if weight.ndim != 2 or weight.shape[1] != row_bytes or (weight.dtype != torch.uint8 and not weight.is_meta):
            raise ValueError(
                f"weights are {weight.dtype} {tuple(weight.shape)}; {blocks} needs uint8 (rows, {row_bytes})"
            )
        self.blocks, self.columns, self.dtype = blocks, columns, dtype
        self.shape = weight.shape[0], columns
        self.weight = nn.Parameter(weight, requires_grad=False)

    def extra_repr(self) -> str:
        """The sizes and the type of the blocks."""
        return f"{self.columns}, {self.weight.shape[0]}, blocks={self.blocks!r}"


class BlockLinear(Blocks):
    """A linear layer (nn.Linear) with weights in blocks, for inference.

    order: (out,) int32, the output that each row gives; None if row i gives output i.
    """

    order: Tensor | None

    def __init__(
        self, weight: Tensor, blocks: str, columns: int, dtype: torch.dtype, order: Tensor | None = None
    ) -> None:
        super().__init__(weight, blocks, columns, dtype)
        self.in_features, self.out_features = columns, weight.shape[0]
        self.register_parameter("bias", None)
        self.register_buffer("order", order, persistent=False)
        self._product = ops.Product(
            partial(ops.block_matrix, type=blocks, order=order), partial(ops.block_linear, type=blocks, order=order)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (...,in) -> (...,out), in the type of x. Raises ValueError if a gradient is wanted."""
        return self._product(x, self._parameters["weight"], self._parameters["bias"])


class BlockEmbedding(Blocks):
    """An embedding (nn.Embedding) with rows in blocks, which are dequantised when they are looked up."""

    def __init__(self, weight: Tensor, blocks: str, columns: int, dtype: torch.dtype) -> None:
        super().__init__(weight, blocks, columns, dtype)
        self.num_embeddings, self.embedding_dim = weight.shape[0], columns

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (...) of any integer type -> (...,columns). Raises IndexError for an id out of range."""
        index = ids.flatten().long()
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.num_embeddings:
            raise IndexError(f"token ids must be from 0 to {self.num_embeddings - 1}")
        if not index.numel():
            return torch.empty(*ids.shape, self.columns, dtype=self.dtype, device=ids.device)
        return block_weights.dequantise(self.weight[index], self.blocks).view(*ids.shape, -1).to(self.dtype)
