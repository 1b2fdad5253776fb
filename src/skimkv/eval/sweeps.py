"""The grids of methods that `skimkv eval --sweep` runs, as specs, and the modes in which a question is asked."""

from __future__ import annotations

MODES = ("blind", "aware")  # blind: the prompt is the context; aware: the question belongs to the prompt
SHARES = (1 / 2, 1 / 4, 1 / 8)  # of dense attention's bytes: where the sweep "matched" compares the methods

# SparQ Attention, table G1; at the same budgets what it did not measure.
PAPER = (
    "Dense()",
    *(f"SparQ(r={r}, k=128)" for r in (8, 16, 32, 64)),
    *(f"{name}(k={k})" for name in ("H2O", "LMInfinite", "Strided", "Fixed") for k in (192, 256, 384, 512, 768)),
    *(f"SubGen(k={k - 64}, recent=64)" for k in (192, 256, 384, 512, 768)),
    *(f"TopK(k={k})" for k in (2, 8, 32, 128, 256)),
    *(f"LowRank(r={r}, k=128)" for r in (8, 16, 32, 64)),
)
_CHANGES = (
    "mean_value=False",
    "mean_value=True",
    "mean_value=True, temperature='sqrt_d'",
    "mean_value=True, temperature='sqrt_r'",
    "local=0",
    "channels='int8'",
    "channels='int4'",
)
# SparQ Attention, fig. 7a, 7b and 7c; and its channels in 8 and 4 bits.
ABLATION = (
    "Dense()",
    *(f"TopK(k={k}, oracle=True)" for k in (16, 32, 64, 128, 256)),
    *(f"LowRank(r={r}, k=128)" for r in (8, 16, 32, 64)),
    *(f"SparQ(r={r}, k={k})" for k in (32, 64, 128, 256) for r in (8, 16, 32, 64)),
    *(f"SparQ(r={r}, k={k}, {change})" for r, k in ((8, 32), (16, 128)) for change in _CHANGES),
)
# Methods that others use beside H2O and LMInfinite, at SparQ's budgets, and what else the papers tried.
RIVALS = (
    "Dense()",
    *(f"{name}(k={k})" for name in ("SnapKV", "TOVA", "H2O", "StreamingLLM") for k in (192, 256, 384, 512, 768)),
    *(f"SnapKV(k={k}, pool=13)" for k in (192, 256, 384, 512, 768)),  # where a token is a character or two
    *(f"H2O(k={k}, score='mean')" for k in (192, 256, 384, 512, 768)),
    *(f"H2O(k={k}, pattern='{pattern}')" for pattern in ("strided", "fixed", "top") for k in (192, 384, 768)),
    *(f"Quest(page=16, k={k})" for k in (64, 128, 256, 512)),
    *(f"TopK(k={k}, mean_value=True)" for k in (2, 8, 32, 128, 256)),
    *(f"TopP(p={p})" for p in (0.7, 0.85, 0.95, 0.99)),
    *(f"RaBitQ(k={k})" for k in (64, 128, 256, 512)),
    *(f"SANTA(s={s})" for s in (16, 64, 256)),
    *(f"VAttention(epsilon={epsilon})" for epsilon in (0.4, 0.2, 0.1, 0.05)),
    *(f"RocketKV(k={k}, top={k // 4})" for k in (192, 256, 384, 512, 768)),
)
# The sweep "matched" has no grid: its parameters are solved for each task (budgets.py). Where queries share KV heads,
# it runs SparQ without and with the mean value (plan.matched_to).
SWEEPS: dict[str, tuple[str, ...]] = {"paper": PAPER, "matched": (), "ablation": ABLATION, "rivals": RIVALS}
