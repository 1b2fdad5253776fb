"""The figures of benchmarks: which lines they draw, from rows as the commands print them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from skimkv.bench import figures

SPARQ = "SparQ(r=32, k=128)"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Draws a figure and returns its panels: for each the title, and for each labelled line its points."""
    kept: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, path: Path) -> None:
        save(figure, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        kept.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(function: Any, *args: Any) -> list[tuple[str, dict[str, tuple[list[float], list[float]]]]]:
        function(*args, tmp_path / "figure.png") if function is not figures.memory else function(
            args[0], tmp_path / "figure.png", *args[1:]
        )
        return [
            (
                ax.get_title(loc="left"),
                {
                    str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
                    for line in ax.get_lines()
                    if not str(line.get_label()).startswith("_")
                },
            )
            for ax in kept[-1].axes
        ]

    return draw


def attention_row(method: str, n: int, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "length": n, "speedup_dense": n / 512, "speedup_theory": 6.0, "best_of_torch": False,
        "batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "bfloat16", **more,
    }  # fmt: skip


def test_attention(drawn):
    rows = [attention_row(m, n) for n in (1024, 2048) for m in ("Dense()", SPARQ)]
    rows += [attention_row("torch:sdpa-flash:float32", n, best_of_torch=True) for n in (2048, 1024)]
    ((title, lines),) = drawn(figures.attention, rows)
    assert title.startswith("Decode attention: batch 1, 8 query heads on 8, head size 64, bfloat16")
    assert lines == {SPARQ: ([1024, 2048], [2, 4]), "PyTorch's best dense": ([1024, 2048], [2, 4])}


def test_a_sweep_has_a_panel_for_each_batch_and_a_line_for_each_r(drawn):
    rows = [attention_row(f"SparQ(r={r}, k={k})", n, batch=batch, speedup_best=batch * n / k)
            for batch in (1, 4, 16) for r in (16, 32) for k in (64, 128) for n in (1024, 4096)]  # fmt: skip
    panels = drawn(figures.sweep, rows)
    assert [title for title, _ in panels if title] == ["batch 1", "batch 4", "batch 16"]
    assert panels[1][1] == {name: ([1024, 4096], [64, 256]) for name in ("r = 16", "r = 32")}


def test_tokens_are_compared_with_dense_at_their_length(drawn):
    rows = [  # the medians of ratios, which differ from the ratios of medians
        {"method": m, "length": n, "ms": ms, "ms_attention": ms / 4, "floor_ms": ms / 2, "shape": "tiny", "layers": 2,
         "weights": "int8", "speedup_dense": 4.5 / ms}
        for n in (300, 600) for m, ms in (("transformers", 8.0), ("Dense()", 4.0), (SPARQ, 2.0))
    ]  # fmt: skip
    (title, faster), (_, share) = drawn(figures.token, rows)
    assert title.startswith("A whole token: tiny, 2 layers, int8 weights")
    assert faster == {"transformers": ([300, 600], [0.5625, 0.5625]), SPARQ: ([300, 600], [2.25, 2.25])}
    assert share == {m: ([300, 600], [25, 25]) for m in ("transformers", "Dense()", SPARQ)}


def test_memory(drawn):
    rows = [{"method": "Dense()", "length": n, "nbytes": n << 10, "peak_rss_growth": n << 11} for n in (1024, 2048)]
    ((title, lines),) = drawn(figures.memory, rows, "8 KV heads of 64, bfloat16")
    assert "8 KV heads of 64, bfloat16" in title
    assert lines == {"Dense()": ([1024, 2048], [1, 2])}


def test_the_roofline(drawn):
    hardware = [{"name": "A", "multiply_adds_per_s": 1e14, "bytes_per_s": 1e12}]
    rows = [{"hardware": "A", "method": "Dense()", "intensity": 3.0}]
    curves = [("Dense()", [256, 512], [0.1, 0.2], [1, 1]), (SPARQ, [256, 512], [0.05, 0.1], [1.1, 1.2])]
    roof, share, faster = drawn(figures.roofline, hardware, curves, rows, "a setting")
    assert roof[1] == {"A": ([0.1, 100, 1000], [1e11, 1e14, 1e14])}
    assert share[1] == {"Dense()": ([256, 512], [10, 20]), SPARQ: ([256, 512], [5, 10])}
    assert faster[1] == {SPARQ: ([256, 512], [1.1, 1.2])}
