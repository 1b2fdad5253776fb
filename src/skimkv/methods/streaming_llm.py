"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2): the first tokens as sinks, and a window after."""

from __future__ import annotations

from dataclasses import dataclass

from .lm_infinite import FirstAndRecent
from .slots import check_at_most


@dataclass(frozen=True, repr=False)
class StreamingLLM(FirstAndRecent):
    """The first `sinks` tokens and the most recent k - sinks, at positions counted in the cache.

    It is LMInfinite(k, initial=sinks, positions="cache") by its own name, with its paper's four sinks: the algorithm
    stands in lm_infinite.py. Reads 2kD + 2D elements, and reads and writes another 2·sinks·D once it drops tokens.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most("sinks", self.sinks, 0, self.k, 1)

    @property
    def first(self) -> int:
        """How many of the first tokens are kept."""
        return self.sinks

    @property
    def counts_in_cache(self) -> bool:
        """Whether positions are counted in the cache: always."""
        return True
