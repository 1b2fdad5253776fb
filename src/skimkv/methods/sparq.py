"""SparQ Attention (Ribar et al., ICML 2024, arXiv 2312.04985), algorithm 1, with grouped queries as in section 4.

Step 1 reads r channels of every key, step 2 reads the k rows that look best by them, and step 3 gives the softmax mass
that was left out to the mean value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import KernelStep, SoftmaxOptions, Token, kernel_step
from ..ops.blocks import apply_softcap, attend_rows, choose_positions, softmax_with_sinks, take
from ..stores.base import Shape, compute_dtype
from ..stores.channel_index import IndexFormat
from ..stores.full import CHANNELS, Full
from ..stores.mean_value import MeanValue
from .base import Method, Traffic, check_whole

TEMPERATURES = ("coverage", "sqrt_d", "sqrt_r")


@dataclass(frozen=True, repr=False)
class SparQ(Method[Full]):
    """Reads Nr + 2kD + 4D elements (eq. 11).

    r: channels read in step 1. k: positions read in step 2, of which `local` are the most recent (None: k//4).
    mean_value: step 3 (None: on for G = 1, off for grouped queries, as the paper found best). Warning: True with
    grouped queries can make the error several times as large; measure it on your model before you use it.
    temperature: "coverage" is eq. 9; "sqrt_d" and "sqrt_r" are the ablations of fig. 7b. channels: where step 1 reads
    K: "copy" (K again, channel-major, +50% memory), "none" (the one K), "int8" and "int4" (a quantised channel-major
    copy, +25% and +12.5%). For grouped queries the scores are summed after the softmax, as in the paper; the authors'
    code sums logits.
    """

    r: int
    k: int
    local: int | None = None
    mean_value: bool | None = None
    temperature: str = "coverage"
    channels: str = "copy"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("r", self.r, 1)
        check_whole("k", self.k, 1)
        if self.local is not None:
            check_whole("local", self.local, 0, self.k)
        if self.mean_value is not None and not isinstance(self.mean_value, bool):
            raise ValueError(f"mean_value = {self.mean_value!r} must be None, True or False")
        if self.temperature not in TEMPERATURES:
            raise ValueError(f"temperature = {self.temperature!r} must be one of {', '.join(TEMPERATURES)}")
        if self.channels not in CHANNELS:
            raise ValueError(f"channels = {self.channels!r} must be one of {', '.join(CHANNELS)}")

    def _local(self) -> int:
        return self.k // 4 if self.local is None else self.local

    def _uses_mean(self, shape: Shape) -> bool:
        return shape.G == 1 if self.mean_value is None else self.mean_value

    def _index(self, D: int) -> IndexFormat | None:
        return None if self.channels == "none" else IndexFormat(self.channels, D)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token, with the index and the mean value that this setting reads.

        Raises ValueError if r exceeds the head size.
        """
        check_whole("r", self.r, 1, shape.D)
        return Full(shape, dtype, device, self.channels, self._uses_mean(shape), kv=self.kv)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Algorithm 1. Reads Nr + 2kD elements per KV head, and v_mean."""
        if token is not None:
            store.append_token(*token)
        x = q.to(compute_dtype(store.dtype))
        # step 1: approximate scores s_hat from the r largest channels of q
        i1 = top_channels(x, self.r)
        logits = take(x, i1) @ store.read_channels(i1) * inverse_temperature(x, i1, softmax["scale"], self.temperature)
        s_hat = approximate_scores(logits, store, softmax.get("softcap"), softmax.get("sinks"))
        # step 2: attention over the chosen positions i2
        i2, valid = choose_positions(s_hat.sum(2), store.lengths, self.k, self._local())
        y, _ = attend_rows(x, store.read_keys(i2, valid), store.read_values(i2, valid), valid, **softmax)
        # step 3: alpha y + (1 - alpha) v_mean (eq. 10)
        alpha = covered_mass(s_hat, i2, valid, softmax.get("sinks"))
        if self._uses_mean(store.shape):
            return (alpha * y + (1 - alpha) * store.read_mean()[:, :, None]).to(q.dtype)
        return y.masked_fill(alpha.isnan(), torch.nan).to(q.dtype)

    def kernel(self, store: Full) -> KernelStep:
        """The kernel of the same step."""
        return kernel_step("sparq", self.r, self.k, self._local(), self.temperature, self._uses_mean(store.shape))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count Nr + 2kD + 4D elements (eq. 11), as this code moves them.

        The paper's 4D become 2D and 2D float32 with v_mean, and 2D without. The channel copy's own write is D more,
        and quantised copies add scales, the open group, and quantising one group in every 256 steps. Where channels
        are read from rows in 8 bits, the ends of all of a row's spans come with them; rows in 4 bits are read whole.
        """
        D, r, rows, index = shape.D, self.r, self.row_format(shape.D), self._index(shape.D)
        parts = rows.traffic(2 * min(self.k, n) + 2, dtype)
        if index is None:
            parts += rows.traffic_of_channels(n, r, dtype)
        else:
            parts += index.read(n, r, dtype) + index.append(n, dtype)
        if self._uses_mean(shape):
            parts += MeanValue.traffic(D)
        return Traffic.of(shape.B * shape.H, n * r + 2 * self.k * D + 4 * D, *parts)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, of the index with its scales and its open group, and of v_mean."""
        index = self._index(shape.D)
        total = self.row_format(shape.D).nbytes(2 * n, dtype) + (0 if index is None else index.bound(n, dtype))
        return shape.B * shape.H * (total + (MeanValue.nbytes(shape.D) if self._uses_mean(shape) else 0))


def top_channels(q: Tensor, r: int) -> Tensor:
    """Choose i1, the r channels with the largest sum over the group of |q|, of equal ones the lower (sec. 4).

    q (B,H,G,D) -> (B,H,r), ascending.
    """
    order = q.abs().sum(2).argsort(dim=-1, descending=True, stable=True)
    return order[..., :r].sort(-1).values


def inverse_temperature(q: Tensor, i1: Tensor, scale: float, temperature: str) -> Tensor:
    """Compute 1/tau per query head, (B,H,G,1). Eq. 9: tau = sqrt(D |q[i1]|_1 / |q|_1), scale being 1/sqrt(D).

    A head that has nothing of |q| in i1 has logits of 0 at every temperature; its tau is sqrt(D).
    """
    D, r = q.shape[-1], i1.shape[-1]
    if temperature == "coverage":
        chosen = take(q.abs(), i1).sum(-1, keepdim=True)
        coverage = chosen / q.abs().sum(-1, keepdim=True)
        return scale / torch.where(chosen > 0, coverage, 1).sqrt()
    return torch.full_like(q[..., :1], scale if temperature == "sqrt_d" else scale * (D / r) ** 0.5)


def approximate_scores(logits: Tensor, store: Full, softcap: float | None, sinks: Tensor | None = None) -> Tensor:
    """Compute s_hat, the softmax of approximate logits (B,H,G,N) over the cached positions, per query head (eq. 7).

    The logits are scaled already. A sink is not approximated: it is no product with q, and tau does not change it.
    """
    logits = apply_softcap(logits, softcap).masked_fill(~store.valid()[:, :, None], -torch.inf)
    return softmax_with_sinks(logits, sinks)


def covered_mass(s_hat: Tensor, i2: Tensor, valid: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Sum alpha, the mass of s_hat (B,H,G,N) on the chosen positions i2 (B,H,m), the current token included:
    (B,H,G,1).

    A sink counts as chosen: the softmax over the chosen has it too, and v_mean stands for positions only.
    """
    mass = take(s_hat, i2).masked_fill(~valid[:, :, None], 0).sum(-1, keepdim=True)
    if sinks is not None:
        mass = mass + 1 - s_hat.sum(-1, keepdim=True)
    return mass.clamp(max=1)
