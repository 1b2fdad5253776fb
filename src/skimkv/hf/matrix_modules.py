"""Modules over matrices of every kind (ops/matrices.py): a linear layer and an embedding."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import matrices
from .autocast import is_autocast, with_autocast
from .watch import NotesChanges


class MatrixModule(NotesChanges):
    """A matrix (rows,columns) as it is stored. `weight` is the stored tensor, so that tied modules can share it.

    kind: one of ops/matrices.py. dtype: of what an embedding returns, and of the bias; None: PyTorch's default.
    Raises ValueError if the weight does not hold such a matrix.
    """

    def __init__(self, weight: Tensor, kind: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        matrices.check(weight, kind, rows, columns)
        self.kind, self.shape, self.dtype = kind, (rows, columns), dtype or torch.get_default_dtype()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def extra_repr(self) -> str:
        """The sizes and the kind."""
        return f"{self.shape[1]}, {self.shape[0]}, {self.weight.dtype if self.kind == matrices.FLOATS else self.kind}"


class MatrixLinear(MatrixModule):
    """A linear layer (nn.Linear) for inference. Activations are float32, bfloat16 or float16.

    order: (rows,) int32, the output that each row gives; None if row i gives output i. Only for blocks.
    """

    order: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        kind: str,
        rows: int,
        columns: int,
        dtype: torch.dtype | None = None,
        bias: nn.Parameter | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(weight, kind, rows, columns, dtype)
        self.out_features, self.in_features = rows, columns
        self.register_parameter("bias", bias)
        self.register_buffer("order", order, persistent=False)
        self._product = ops.Product(
            partial(ops.matrix, kind=kind, rows=rows, order=order),
            partial(ops.linear, kind=kind, rows=rows, order=order),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (...,in) -> (...,out), in the type of x, or in that of autocast, as nn.Linear does.

        Raises ValueError if a gradient is wanted.
        """
        return with_autocast(self._multiply, x) if is_autocast(x) else self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        if "bias" not in parameters:  # it is no parameter any more, as of pruning
            return self._product(x, parameters["weight"], cast(Tensor, self.bias))
        return self._product(x, parameters["weight"], parameters["bias"])


class MatrixEmbedding(MatrixModule):
    """An embedding (nn.Embedding) whose rows are dequantised when they are looked up."""

    def __init__(self, weight: Tensor, kind: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(weight, kind, rows, columns, dtype)
        self.num_embeddings, self.embedding_dim = rows, columns
        self._rows = ops.Rows(kind, columns)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (...) of any integer type -> (...,columns). Raises IndexError for an id out of range."""
        if self.kind == matrices.FLOATS:
            return nn.functional.embedding(ids, self.weight).to(self.dtype)
        index = ids.flatten().tolist()
        if not index:
            return torch.empty(*ids.shape, self.embedding_dim, dtype=self.dtype, device=ids.device)
        if not 0 <= min(index) <= max(index) < self.num_embeddings:
            raise IndexError(f"token ids must be from 0 to {self.num_embeddings - 1}")
        rows = self._rows(self.weight, index, self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)
