"""A small setting of every method, and of each form of its cache."""

from __future__ import annotations

from skimkv.methods import parse

EACH = [parse(spec) for spec in (
    "Dense()", "SparQ(6, 4, mean_value=True)", "SparQ(6, 4, channels='none')", "SparQ(6, 4, channels='int8')",
    "SparQ(6, 4, channels='int4')", "Skim(4)", "TopK(4)", "TopK(4, oracle=True)", "TopK(4, mean_value=True)",
    "Quest(4, 12)", "LowRank(2, 4)", "LMInfinite(6, initial=2)", "LMInfinite(6, initial=2, positions='cache')",
    "StreamingLLM(6, sinks=2)", "Strided(8, local=3)", "Fixed(8, l=4, c=2)", "H2O(6)", "H2O(0.5)",
    "H2O(6, score='mean')", "SnapKV(6, window=2, pool=3)", "TOVA(6)", "SubGen(3, recent=3)", "SubGenStream(0.5, 2, 3)",
    "TopP(0.5)", "RaBitQ(4)", "SANTA(4)", "VAttention(k=4, base=4)", "RocketKV(6, window=2, pool=3, top=4, page=2)",
)]  # fmt: skip
