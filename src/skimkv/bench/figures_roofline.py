"""The figure of `skimkv roofline`: machines' roofs, attention's share of a step, and the speed-up that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from ..plotting import STYLES


def roofline(
    hardware: Sequence[Mapping[str, Any]],
    curves: Sequence[tuple[str, Sequence[int], Sequence[float], Sequence[float]]],
    rows: Sequence[Mapping[str, Any]],
    setting: str,
    path: Path,
) -> None:
    """Left: attainable multiply-adds against intensity (SparQ fig. 2), a point where dense decoding stands.

    Middle and right: share of the time in attention (fig. 3) and speed-up over dense, on the first machine.
    """
    fig, (a, b, c) = plt.subplots(1, 3, figsize=(16.5, 5.2), dpi=130, layout="constrained")
    for fact, (colour, marker) in zip(hardware, STYLES, strict=False):
        top, speed = fact["multiply_adds_per_s"], fact["bytes_per_s"]
        ridge = top / speed
        a.loglog([0.1, ridge, 10 * max(ridge, 100)], [0.1 * speed, top, top], color=colour, linewidth=1.8,
                 label=fact["name"])  # fmt: skip
        points = [r for r in rows if r["hardware"] == fact["name"] and r["method"] == "Dense()"]
        a.loglog([r["intensity"] for r in points], [min(top, r["intensity"] * speed) for r in points], marker,
                 color=colour, markersize=8, markeredgecolor="white")  # fmt: skip
    a.set_xlabel("arithmetic intensity: multiply-adds per byte")
    a.set_ylabel("multiply-adds per second, at most")
    a.set_title("Where dense decoding stands under the roof", loc="left", fontsize=10, weight="bold")
    a.legend(frameon=False, fontsize=8, loc="lower right")
    for (name, lengths, shares, gains), (colour, _) in zip(curves, [("#000000", ""), *STYLES], strict=False):
        b.plot(lengths, [100 * x for x in shares], color=colour, linewidth=1.8, label=name)
        if name != "Dense()":
            c.plot(lengths, gains, color=colour, linewidth=1.8, label=name)
    first = hardware[0]["name"]
    b.set_ylim(0, 100)
    b.set_ylabel("% of the step's time in attention")
    b.set_title(f"Time in attention, {first}", loc="left", fontsize=10, weight="bold")
    c.axhline(1, color="0.4", linewidth=1)
    c.set_ylim(bottom=0)
    c.set_ylabel("times as fast as a dense step, at most")
    c.set_title(f"Speed-up of the whole step, {first}", loc="left", fontsize=10, weight="bold")
    for ax in (b, c):
        ax.set_xscale("log", base=2)
        ticks = [2**i for i in range(8, 19, 2)]
        ax.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
        ax.minorticks_off()
        ax.set_xlabel("cached tokens N")
        ax.legend(frameon=False, fontsize=8, loc="upper left")
    for ax in (a, b, c):
        ax.grid(color="0.92")
        ax.spines[["top", "right"]].set_visible(False)
    fig.suptitle(setting, x=0.01, ha="left", fontsize=11)
    fig.savefig(path)
    plt.close(fig)
