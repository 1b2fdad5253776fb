"""Rotary position embeddings of keys: how a cached key is turned from one position to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KeyRotation:
    """What a model's rotary embedding does to a key when its position grows.

    Channels are turned in pairs: pair f by frequencies[f] radians for each position. The pairs are the first 2F
    channels of F frequencies, the others have no position. interleaved: a pair is two neighbours, (0, 1), (2, 3), ...;
    otherwise the first half of the 2F channels is paired with the second, (0, F), (1, F+1), ...

    RoFormer (Su et al. 2021, arXiv 2104.09864), equation 34; the halves are those of GPT-NeoX and Llama.
    """

    def __init__(self, frequencies: Sequence[float] | Tensor, interleaved: bool = False) -> None:
        if not isinstance(frequencies, Tensor):
            frequencies = torch.tensor(frequencies, dtype=torch.float64, device="cpu")
        self.frequencies = frequencies.to("cpu", torch.float64)
        self.interleaved = interleaved
        self._last: tuple[object, tuple[Tensor, Tensor]] | None = None

    @classmethod
    def llama(cls, head_size: int, theta: float = 10000.0) -> KeyRotation:
        """The rotation of Llama's keys: all channels, paired by halves, frequencies theta^(-2f/D)."""
        return cls(theta ** (-torch.arange(0, head_size - 1, 2, dtype=torch.float64, device="cpu") / head_size))

    def __call__(self, keys: Tensor, distances: Sequence[int]) -> Tensor:
        """Turn keys (B,H,n,D) on by distances[b] positions in row b of the batch.

        Angles are computed in float64, products in the type of the keys.
        """
        width = 2 * len(self.frequencies)
        cos, sin = self.factors(tuple(distances), keys.dtype, keys.device)
        x, rest = keys[..., :width], keys[..., width:]
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        x = torch.stack([a, b], -1).flatten(-2) if self.interleaved else torch.cat([a, b], -1)
        return torch.cat([x, rest], -1) if rest.shape[-1] else x

    def factors(
        self, distances: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, (B,1,1,F) each; the layers of a model ask for the same ones in turn."""
        last, key = self._last, (distances, dtype, device)
        if last is None or last[0] != key:
            turned = torch.tensor(distances, dtype=torch.float64, device=self.frequencies.device)
            angles = turned[:, None, None, None] * self.frequencies
            cos, sin = (x.to(device, dtype) for x in (angles.cos(), angles.sin()))
            self._last = last = key, (cos, sin)
        return last[1]
