"""A small setting of every method, and of each form of its cache."""

from __future__ import annotations

from skimkv.methods import H2O, Dense, Fixed, LMInfinite, LowRank, Skim, SparQ, Strided, SubGen, SubGenStream, TopK

EACH = [
    Dense(),
    SparQ(6, 4, mean_value=True),
    SparQ(6, 4, channels="none"),
    SparQ(6, 4, channels="int8"),
    SparQ(6, 4, channels="int4"),
    Skim(4),
    TopK(4),
    TopK(4, oracle=True),
    LowRank(2, 4),
    LMInfinite(6, initial=2),
    LMInfinite(6, initial=2, positions="cache"),
    Strided(8, local=3),
    Fixed(8, l=4, c=2),
    H2O(6),
    H2O(0.5),
    SubGen(3, recent=3),
    SubGenStream(0.5, 2, 3),
]
