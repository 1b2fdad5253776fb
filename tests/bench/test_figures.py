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

    draw.figures = kept  # type: ignore[attr-defined]
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


def labels(drawn: Any) -> list[tuple[str, list[float], tuple[float, float]]]:
    """What x is called in each panel of the last figure, its ticks, and its ends."""
    return [(ax.get_xlabel(), list(ax.get_xticks()), ax.get_xlim()) for ax in drawn.figures[-1].axes if ax.get_xlabel()]


ONE_LENGTH = "8,192 cached tokens; from left to right as in the legend"


def assert_one_length(drawn: Any) -> None:
    """Methods of one length stand beside each other, on an axis that is no axis of lengths."""
    for label, ticks, (left, right) in labels(drawn):
        assert label == ONE_LENGTH and ticks == [] and -1 < left < 0 and right > 0
    for ax in drawn.figures[-1].axes:
        at = [
            float(x) for line in ax.get_lines() if not str(line.get_label()).startswith("_") for x in line.get_xdata()
        ]
        assert len(at) == len(set(at)) and all(ax.get_xlim()[0] < x < ax.get_xlim()[1] for x in at)
        assert ax.get_xscale() == "linear" and "dashed" not in ax.get_title(loc="left")


def test_methods_at_one_length_stand_beside_each_other(drawn):
    """Attention, a sweep, a token and memory: no line, no logarithmic axis and no word of either."""
    others = [attention_row(SPARQ, 8192), attention_row("Skim(k=64)", 8192), attention_row("onnxruntime:mha", 8192)]
    ((title, lines),) = drawn(figures.attention, [*others, attention_row("torch:sdpa", 8192, best_of_torch=True)])
    assert_one_length(drawn)
    assert title.endswith("mark: measured, short line: what the bytes allow")
    assert lines == {SPARQ: ([0], [16]), "Skim(k=64)": ([1], [16]), "PyTorch's best dense": ([2], [16]),
                     "ONNX Runtime's best dense": ([3], [16])}  # fmt: skip
    rows = [attention_row(f"SparQ(r={r}, k={k})", 8192, batch=batch, speedup_best=512 / k)
            for batch in (1, 4) for r in (16, 32) for k in (64, 128)]  # fmt: skip
    panels = drawn(figures.sweep, rows)
    assert_one_length(drawn)
    assert panels[0][1] == {"r = 16": ([0], [8]), "r = 32": ([1], [8])}
    assert [list(bar.get_segments()[0][:, 1]) for bar in drawn.figures[-1].axes[0].collections] == [[4, 8]] * 2
    row = {"length": 8192, "ms": 4.0, "ms_attention": 1.0, "floor_ms": 2.0, "shape": "tiny", "layers": 2,
           "weights": "int8", "speedup_dense": 1.5}  # fmt: skip
    faster, share = drawn(figures.token, [{**row, "method": m} for m in ("transformers", "Dense()", SPARQ)])
    assert_one_length(drawn)
    assert faster[1] == {"transformers": ([0], [1.5]), SPARQ: ([2], [1.5])} and len(share[1]) == 3
    rows = [{"method": m, "length": 8192, "nbytes": 8 << 20, "peak_rss_growth": 9 << 20} for m in ("Dense()", SPARQ)]
    ((title, lines),) = drawn(figures.memory, rows, "8 KV heads of 64, bfloat16")
    assert_one_length(drawn)
    assert "filled: the cache" in title and lines == {"Dense()": ([0], [8]), SPARQ: ([1], [8])}


def test_a_sweep_says_what_its_lines_are_and_its_legend_hides_none(drawn):
    rows = [attention_row(f"SparQ(r={r}, k={k})", n, batch=1, speedup_best=n / k)
            for r in (16, 32) for k in (64, 128) for n in (1024, 4096)]  # fmt: skip
    drawn(figures.sweep, rows)
    figure = drawn.figures[-1]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["r = 16", "r = 32"]
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())
    (words,) = [text for text in figure.texts if "dashed: what the bytes of the smallest k allow" in
                text.get_text().replace("\n", " ")]  # fmt: skip
    assert "band: all k" in words.get_text() and words.get_window_extent().x1 <= figure.bbox.x1


def test_the_times_of_other_programs_stand_above_the_lines(drawn):
    rows = [{"method": m, "length": 512, "ms": 30.0, "ms_min": 20.0, "ms_max": 40.0, "better": True, "shape": "tiny",
             "layers": 2, "weights": "int8"} for m in ("llama.cpp", "Dense()")]  # fmt: skip
    drawn(figures.rivals, rows)
    texts = drawn.figures[-1].axes[0].texts
    assert [(text.get_text(), text.get_position()[1]) for text in texts] == [("30", 40), ("30", 40)]
