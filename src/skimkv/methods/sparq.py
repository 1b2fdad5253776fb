"""SparQ Attention (Ribar et al., ICML 2024, arXiv 2312.04985), algorithm 1, with grouped queries as in section 4.

Read r channels of every key, choose k positions by the approximate scores, read those whole, and give the
mass that was left out to the mean value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..stores.base import Shape, Store
from ..stores.codes import BITS, GROUP
from ..stores.full import Full
from .base import Method, Traffic, check

TEMPERATURES = ("coverage", "sqrt_d", "sqrt_r")
CHANNELS = ("copy", "none", "int8", "int4")


@dataclass(frozen=True, repr=False)
class SparQ(Method):
    """Reads Nr + 2kD + 4D elements (eq. 11).

    local: how many of the k are the most recent (None: k//4). mean_value: step 3 (None: on for G = 1, off for
    grouped queries, as the paper found best). temperature: "coverage" is eq. 9; "sqrt_d" and "sqrt_r" are the
    ablations of fig. 7b. channels: where step 1 reads K: "copy" (K again, channel-major, +50% memory), "none"
    (the one K), "int8" and "int4" (a quantised channel-major copy, +25% and +12.5%).
    The GQA sum is over softmaxed scores, as in the paper; the authors' code sums logits.
    """

    r: int
    k: int
    local: int | None = None
    mean_value: bool | None = None
    temperature: str = "coverage"
    channels: str = "copy"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("r", self.r, 1)
        check("k", self.k, 1)
        if self.local is not None:
            check("local", self.local, 0, self.k)
        if self.mean_value is not None and not isinstance(self.mean_value, bool):
            raise ValueError(f"mean_value = {self.mean_value!r} must be None, True or False")
        if self.temperature not in TEMPERATURES:
            raise ValueError(f"temperature = {self.temperature!r} must be one of {', '.join(TEMPERATURES)}")
        if self.channels not in CHANNELS:
            raise ValueError(f"channels = {self.channels!r} must be one of {', '.join(CHANNELS)}")

    def _mean(self, shape: Shape) -> bool:
        return shape.G == 1 if self.mean_value is None else self.mean_value

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        check("r", self.r, 1, shape.D)
        return Full(shape, dtype, device, self.channels, self._mean(shape), kv=self.kv)

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        local = self.k // 4 if self.local is None else self.local
        mean = self._mean(store.shape)
        return ops.sparq(store, q, scale, softcap, self.r, self.k, local, self.temperature, mean, (k, v))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """The paper's 4D becomes 2D + 2D float32 with v_mean and 2D without; the channel copy's own write is D more,
        and quantised copies add scales, the open group, and re-coding one group in every 256 steps. Where channels are
        read from coded rows, the ends of all of a row's groups come with them."""
        D, r, size, bits, form = shape.D, self.r, dtype.itemsize, BITS.get(self.channels), self.form(shape.D)
        closed = (n + 1) // GROUP * GROUP if bits else 0
        coded = min(n, closed)
        rows = form.parts(2 * min(self.k, n) + 2, dtype)
        if self.channels == "none" and form.bits:
            rows += [(n * r, form.bits / 8), (n * form.ends // 2, 2)]
            full = 0
        else:
            full = r * (n - coded) + (0 if self.channels == "none" else D)
        codes, scales = r * coded, 2 * r * (closed // GROUP)
        means = 2 * D if self._mean(shape) else 0
        parts = [*rows, (full, size), (codes, (bits or 0) / 8), (scales + means, 4)]
        if bits and (n + 1) % GROUP == 0:
            parts += [(D * GROUP, size), (D * GROUP * bits // 8, 1), (2 * D, 4)]
        return Traffic.of(shape.B * shape.H, n * r + 2 * self.k * D + 4 * D, *parts)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        D, size = shape.D, dtype.itemsize
        total = self.form(D).nbytes(2 * n, dtype) + (4 * D if self._mean(shape) else 0)
        bits = BITS.get(self.channels)
        if bits:
            total += n * D * bits // 8 + n // GROUP * 8 * D + GROUP * D * size
        elif self.channels == "copy":
            total += n * D * size
        return shape.B * shape.H * total
