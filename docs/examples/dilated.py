"""A method in a script of your own: read a window of recent tokens and every tenth before it.

Run it with `python dilated.py`. Its kernel is in dilated.c: once it is built, the method uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import skimkv
from skimkv.ops import KernelStep, Token
from skimkv.ops.blocks import attend_rows
from skimkv.ops.cpu.library import step_function
from skimkv.ops.cpu.run import OPERATIONS, Operation
from skimkv.stores.base import compute_dtype
from skimkv.stores.full import Full

KERNEL = Path(__file__).with_name("libdilated.so")
if KERNEL.exists():
    OPERATIONS["dilated"] = Operation((Full,), step=step_function(str(KERNEL), "dilated_step"))


@skimkv.register
@dataclass(frozen=True, repr=False)
class Dilated(skimkv.Method[Full]):
    """Attend to the `window` most recent tokens and to every `stride`-th token before them."""

    window: int
    stride: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 0 or self.stride < 1:
            raise ValueError(f"{self}: window must be at least 0, and stride at least 1")

    def store(
        self, shape: skimkv.Shape, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Full:
        """Keep every token."""
        return Full(shape, dtype, device, kv=self.kv)

    def step(  # type: ignore[override]  # it takes no sinks
        self,
        store: Full,
        q: Tensor,
        token: Token | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """q (B,H,G,D) attends to the chosen tokens; the result has the shape of q."""
        if token is not None:
            store.append_token(*token)
        index, valid = self.positions(store)
        keys, values = store.read_keys(index, valid), store.read_values(index, valid)
        x = q.to(compute_dtype(store.dtype))
        y, _ = attend_rows(x, keys, values, valid, scale, softcap)
        return y.to(q.dtype)

    def kernel(self, store: Full) -> KernelStep | None:
        """The kernel of the same step, which dilated.c has for float32."""
        has_kernel = "dilated" in OPERATIONS and store.dtype == torch.float32 and self.kv is None
        return KernelStep("dilated", r=self.stride, k=self.window) if has_kernel else None

    def positions(self, store: Full) -> tuple[Tensor, Tensor]:
        """The chosen positions (B,H,m), the current token among them, and which of them count.

        The rows of a batch may have different lengths. A short row is filled up with positions
        that do not count.
        """
        rows = []
        for n in store.lengths:  # the last of n tokens is the current one
            first_recent = max(n - 1 - self.window, 0)
            rows.append([*range(0, first_recent, self.stride), *range(first_recent, n)])
        most = max(len(row) for row in rows)
        index = torch.tensor([row + [0] * (most - len(row)) for row in rows], device=store.device)
        valid = torch.tensor(
            [[i < len(row) for i in range(most)] for row in rows], device=store.device
        )
        shape = (len(rows), store.shape.H, most)
        return index[:, None].expand(shape), valid[:, None].expand(shape)

    def traffic(self, n: int, shape: skimkv.Shape, dtype: torch.dtype) -> skimkv.Traffic:
        """What a step moves: it reads the chosen keys and values, and writes the current ones."""
        recent = min(self.window, n)
        older = -(-(n - recent) // self.stride)
        rows = 2 * (recent + older) + 2
        heads, moved = shape.B * shape.H, self.row_format(shape.D).traffic(rows, dtype)
        return skimkv.Traffic.of(heads, rows * shape.D, *moved)

    def bound(self, n: int, shape: skimkv.Shape, dtype: torch.dtype) -> int:
        """An upper bound of the bytes that n tokens occupy."""
        return self.row_format(shape.D).nbytes(2 * n * shape.B * shape.H, dtype)


if __name__ == "__main__":
    from skimkv.testing import check_method

    print(check_method(Dilated(window=16), full=Dilated(window=0, stride=1)))

    model, tokenizer = skimkv.load("builtin")
    inputs = tokenizer("red-fox: 31425\nold-oak: 27182\nred-fox: ", return_tensors="pt")
    with skimkv.attach(model, "Dilated(window=24)"):
        print(tokenizer.decode(model.generate(**inputs, max_new_tokens=5)[0]))
