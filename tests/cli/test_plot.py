"""skimkv plot: which figures a file gives, and what is drawn in them."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from skimkv import plotting
from skimkv.bench import figures as bench_figures
from skimkv.cli import main
from skimkv.eval import figures, panels, sweeps
from support.command_line import assert_mistake, run

BASE = {"model": "m", "dtype": "float32", "seed": 0, "counted": False, "mode": "blind", "steps": 2}


def record(task: str, method: str, number: int, score: float, share: float, tokens: int, at: Any = ()) -> str:
    row = {**BASE, "task": task, "method": method, "id": str(number), "score": score, "at": list(at),
           "prompt_tokens": tokens, "bytes": round(4000 * share), "dense_bytes": 4000}  # fmt: skip
    return json.dumps(row) + "\n"


@pytest.fixture
def drawn(monkeypatch):
    """What each figure was given, by the name of its function."""
    given: dict[str, Any] = {}

    def watch(module: Any, name: str) -> None:
        draw = getattr(module, name)

        def spy(what: Any, path: Path) -> None:
            given[name] = what
            draw(what, path)
            assert path.read_bytes().startswith(b"\x89PNG")

        monkeypatch.setattr(module, name, spy)

    for name in ("scores", "needles", "lengths", "ablation"):
        watch(figures, name)
    for name in ("attention", "sweep", "token"):
        watch(bench_figures, name)
    return given


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    made: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: made.append(figure))
    return made


def plot(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["plot", str(path), "--out", str(path.with_name("f.png")), "--json"]) == 0
    return [Path(figure).name for figure in json.loads(capsys.readouterr().out)["figures"]]


@pytest.mark.slow
def test_needles(tmp_path, capsys, drawn):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(
        record(task, spec, 10 * n + d, float(d > 0), 0.25, n, (n, d))
        for task in ("lines", "needle(depths=2)") for spec in ("Dense()", "LMInfinite(k=32)")
        for n in (100, 200) for d in (0, 1)
    ))  # fmt: skip
    assert plot(path, capsys) == ["f.png", "f-needle-blind.png", "f-length.png"]
    assert drawn["needles"][1] == ("LMInfinite(k=32)", {(100, 0): 0, (200, 0): 0, (100, 1): 1, (200, 1): 1})
    out = tmp_path / "f.png"
    assert main(["plot", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.split("\n")[0] == f"Figure: {out}"


def test_score_against_length(tmp_path, capsys, drawn):
    """Two methods near 1/4 at both lengths, one only at the shorter; one setting kept while its share falls."""
    path, rows = tmp_path / "r.jsonl", []
    for lines, tokens, r, score in ((20, 300, 8, 1.0), (40, 600, 10, 0.5)):
        task = f"record(lines={lines})"
        for i in range(5):
            wrong = float(i > 0)
            rows += [
                record(task, "Dense()", i, 1.0, 1.0, tokens),
                record(task, f"SparQ(r={r}, k=64)", i, score, 0.25, tokens),
                record(task, f"SparQ(r={r}, k=64, channels='int8')", i, wrong, 0.125, tokens),
                record(task, "LMInfinite(k=80)", i, wrong, 80 / tokens, tokens),
            ]
    path.write_text("".join(rows))
    assert plot(path, capsys) == ["f.png", "f-length.png", "f-ablation.png"]
    panels = {title: lines for title, _, lines, *_ in drawn["lengths"]}
    assert list(panels) == ["record, blind, settings kept", "record, blind, 1/4 of the bytes",
                            "record, blind, 1/8 of the bytes"]  # fmt: skip
    assert [p[:2] for p in panels["record, blind, 1/4 of the bytes"]["SparQ"]] == [(300, 1.0), (600, 0.5)]
    assert set(panels["record, blind, 1/4 of the bytes"]) == {"Dense", "SparQ"}, "80 of 600 is no quarter"
    assert set(panels["record, blind, settings kept"]) == {"Dense", "LMInfinite(k=80)"}
    (tokens, mean, low, high), _ = panels["record, blind, 1/8 of the bytes"]["SparQ, channels='int8'"]
    assert (tokens, mean) == (300, 0.8) and (low, high) == pytest.approx((0.3755, 0.9638), abs=1e-4), "Wilson's, 4 of 5"


def test_ablation(tmp_path, capsys, drawn):
    """The sweep of that name gives the three panels of SparQ's figure 7."""
    path = tmp_path / "r.jsonl"
    specs = [*sweeps.ABLATION, "H2O(k=64)"]
    path.write_text("".join(
        record("record", spec, i, float((i + j) % 3 > 0), 1.0 if spec == "Dense()" else (j + 1) / 60, 500)
        for j, spec in enumerate(specs) for i in range(3)
    ))  # fmt: skip
    assert plot(path, capsys) == ["f.png", "f-ablation.png"]
    ((title, finding, changes, counts, greatest),) = drawn["ablation"]
    assert (title, greatest) == ("record, blind", 1)
    assert {name for name, *_ in finding} == {"Dense", "oracle top-k", "LowRank", "SparQ"}
    assert sum(name == "SparQ" for name, *_ in finding) == 4, "k = 128 only"
    assert {setting for setting, *_ in changes} == {"r = 8, k = 32", "r = 16, k = 128"}
    kinds = {kind for _, kind, *_ in changes}
    assert kinds >= {"as published", "local=0", "mean_value=False", "mean_value=True\ntemperature='sqrt_r'"}
    assert {name for name, *_ in counts} == {"Dense", *(f"SparQ, k={k}" for k in (32, 64, 128, 256))}
    shown = {name for name, *_ in drawn["scores"][0][1]}
    assert "H2O" in shown and not any("=" in name and "k=" not in name for name in shown), "no changed SparQ"


def test_only_what_the_ablation_shows_is_left_out_of_the_scores(tmp_path, capsys, drawn):
    """Changed forms of other methods, and of SparQ where it ran once at that r and k, are in no other figure."""
    path = tmp_path / "r.jsonl"
    specs = ("Dense()", "SparQ(r=16, k=64)", "SparQ(r=16, k=64, channels='int8')", "SparQ(r=8, k=64, local=0)",
             "H2O(k=64)", "H2O(k=64, kv='int4')", "SnapKV(k=64, pool=13)", "Skim(k=32, kv='int8')")  # fmt: skip
    rows = [record("record", spec, i, 1.0, 0.25, 500) for spec in specs for i in range(6)]
    rows += [record("passkey", specs[2], i, 1.0, 0.25, 500) for i in range(6)]
    path.write_text("".join(rows))
    assert plot(path, capsys) == ["f.png", "f-ablation.png"]
    shown = [{name for name, *_ in panel[1]} for panel in drawn["scores"]]
    others = {"H2O", "H2O, kv='int4'", "SnapKV, pool=13", "Skim, kv='int8'"}
    assert shown == [{"Dense", "SparQ", "SparQ, local=0", *others}, {"SparQ, channels='int8'"}]
    assert [change[:2] for change in drawn["ablation"][0].changes] == [
        ("r = 16, k = 64", "as published"), ("r = 16, k = 64", "channels='int8'"),
    ]  # fmt: skip


def test_no_panel_is_empty_where_all_is_ablation(tmp_path, capsys, drawn):
    path = tmp_path / "r.jsonl"
    specs = ("SparQ(r=8, k=64, local=0)", "SparQ(r=8, k=64, channels='int8')")
    path.write_text("".join(record("record", spec, i, 1.0, 0.25, 500) for spec in specs for i in range(6)))
    assert plot(path, capsys) == ["f.png", "f-ablation.png"]
    assert len(drawn["scores"][0][1]) == 2


def test_an_ablation_shows_every_r_and_k(tmp_path, monkeypatch):
    """More of them than there are colours: each has its marks, and no mark reaches the next kind of change."""
    saved: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: saved.append(figure))
    settings = [f"r = {r}, k = 64" for r in range(1, 21)]
    changes = [(setting, kind, 0.5, None, None) for setting in settings for kind in ("as published", "local=0")]
    figures.ablation([figures.Ablation("record", [], changes, [], 1.0)], tmp_path / "a.png")
    lines = saved[0].axes[1].lines
    assert [line.get_label() for line in lines] == settings
    heights = [sorted(line.get_ydata()[kind] for line in lines) for kind in (0, 1)]
    assert heights[0][-1] < heights[1][0] and len(set(heights[0])) == 20


def test_a_needle_that_was_counted_too_is_one_needle(tmp_path, capsys, drawn):
    path = tmp_path / "r.jsonl"
    rows = [json.loads(record("needle", "H2O(k=64)", i, i % 2, 0.25, 100, (100, 0))) for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, {**rows[1], "counted": True})))
    plot(path, capsys)
    assert drawn["needles"] == [("H2O(k=64)", {(100, 0): 0.5})]


def test_the_matched_sweep_shows_both_settings_of_the_mean_value(tmp_path, capsys, drawn):
    """SparQ with its step 3 is a line of its own beside the default, and no ablation."""
    path = tmp_path / "r.jsonl"
    specs = ("Dense()", "SparQ(r=8, k=64)", "SparQ(r=8, k=64, mean_value=True)")
    path.write_text("".join(record("record", spec, i, 1.0, 0.25, 500) for spec in specs for i in range(6)))
    assert plot(path, capsys) == ["f.png"]
    assert [name for name, *_ in drawn["scores"][0][1]] == ["Dense", "SparQ", "SparQ, mean_value=True"]


def test_divergences(tmp_path, capsys, drawn):
    """Mean and 99th percentile by bytes on a logarithmic axis, without dense; every form of a method is a line."""
    path, specs = tmp_path / "r.jsonl", {"Dense()": 1e-12, "SparQ(r=8, k=64)": 0.1, "SparQ(r=16, k=64)": 0.01,
                                         "SparQ(r=8, k=64, channels='int4')": 0.2}  # fmt: skip
    for spec, kl in specs.items():
        share = 0.25 if kl > 0.05 else 0.5
        rows = [json.loads(record("kl(context=64)", spec, i, kl, share, 64)) for i in range(6)]
        with path.open("a") as file:
            file.writelines(json.dumps({**row, "kl": [kl / 2, 3 * kl / 2], "agrees": "10"}) + "\n" for row in rows)
    assert plot(path, capsys) == ["f.png"]
    mean, tail = drawn["scores"]
    assert "mean KL" in mean[0] and "99th" in tail[0] and "lower is better" in mean[0] and mean[3] and tail[3]
    assert mean[1][3][:2] == ("SparQ, channels='int4'", 0.25) and mean[1][3][2] == pytest.approx(0.2)
    assert [point[2] for point in tail[1]] == pytest.approx([1.5 * kl for kl in specs.values()])
    ax = plotting.new_figure((4, 4)).subplots()
    plotting.draw_scores(ax, *mean[:2], plotting.line_styles(["SparQ"]), *mean[2:])
    low, high = ax.get_ylim()
    assert ax.get_yscale() == "log" and 0 < low < 0.01 < 0.1 < high < 1 and low > 1e-4, "dense does not set the axis"


ATTENTION = {"speedup_theory": 6.0, "batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "bfloat16"}
TOKEN = {"ms_attention": 1.0, "shape": "tiny", "layers": 2, "weights": "int8"}


def test_benchmarks(tmp_path, capsys, drawn):
    path = tmp_path / "b.json"
    rows = [{**ATTENTION, "method": m, "length": n, "speedup_dense": n / 512, "best_of_torch": m.startswith("torch")}
            for n in (1024, 2048) for m in ("torch:sdpa", "Dense()", "SparQ(r=8, k=32)")]  # fmt: skip
    path.write_text("a card\n" + json.dumps({"machine": "x", "rows": rows}) + "\n")
    assert plot(path, capsys) == ["f.png"] and drawn["attention"] == rows
    rows = [{**ATTENTION, "method": f"SparQ(r={r}, k=32)", "length": n, "batch": b, "speedup_best": 1.5}
            for b in (1, 4) for r in (8, 16) for n in (1024, 2048)]  # fmt: skip
    path.write_text(json.dumps({"machine": "x", "rows": rows}))
    assert plot(path, capsys) == ["f.png"] and drawn["sweep"] == rows
    rows = [{**TOKEN, "method": m, "length": n, "ms": 4.0, "floor_ms": 2.0, "speedup_dense": 1.0}
            for n in (1024, 2048) for m in ("transformers", "Dense()", "SparQ(r=8, k=32)")]  # fmt: skip
    path.write_text(json.dumps({"machine": "x", "rows": rows}))
    assert plot(path, capsys) == ["f.png"] and drawn["token"] == rows
    for found, words in (
        ([row for row in rows if row["method"] != "Dense()"], "Dense() is not among"),
        ([{"method": "Dense()", "nbytes": 4}], "only what bench attention and bench token print"),
        ([], "only what bench"),
    ):
        path.write_text(json.dumps({"machine": "x", "rows": found}))
        assert main(["plot", str(path)]) == 2
        assert words in (err := capsys.readouterr().err) and err.count("\n") == 1


@pytest.mark.parametrize(("spec", "name"), [
    ("SparQ(r=8, k=32)", "SparQ"), ("SparQ(r=8, k=32, channels='int4', local=0)", "SparQ, local=0, channels='int4'"),
    ("TopK(k=4, oracle=True)", "oracle top-k"), ("TopK(k=4)", "TopK"), ("SubGen(k=8, recent=4)", "SubGen"),
    ("SubGenStream(delta=1.0, t=2, s=8)", "SubGenStream"), ("LMInfinite(k=9, initial=0)", "LMInfinite, initial=0"),
])  # fmt: skip
def test_a_line_is_a_method_without_its_budget(spec, name):
    assert panels.label(spec) == name


def test_one_figure_is_of_one_model(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({**json.loads(record("record", "Dense()", i, 1, 1, 9)), "model": str(i)}) + "\n"
                            for i in range(2)))  # fmt: skip
    assert_mistake(run(capsys, "plot", str(path)), "several models")


ODD_VALUES = [
    None, True, "x", "", -1, 0, 1, 0.5, 1e308, -1e308, math.nan, math.inf, 2**31, 2**62, 2**63, 10**400, [], [1], ["x"],
    [math.nan, 1], [1e308, -1e308], {}, {"x": 1}, [[]], "Dense()", "TopK(k=0)", "TopK(k=2", "SparQ(r=8, k=32)",
    "needle", "lines(lines=2)", "lines(lines=-1)", "a" * 5000, "\udcff",
]  # fmt: skip


def drawn_or_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the figure was drawn; if it was not, there is one line on stderr."""
    status = main(["plot", str(path), "--out", str(path.with_name("f.svg"))])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("skimkv: warning: ")]
    assert (status == 0 and not lines) or (status == 2 and not out and len(lines) == 1 and len(err) < 1000), err
    return status == 0


@pytest.mark.slow
def test_damaged_records_are_drawn_or_refused_in_one_line(tmp_path, capsys):
    """Whatever stands in the fields of a few records."""
    path, draw, refused = tmp_path / "r.jsonl", random.Random(0), 0
    rows = [
        json.loads(record(task, method, i, i % 2, share, 90 + at, (at, 0.5)))
        for task, at in (("needle", 300), ("lines(lines=2)", 2), ("lines(lines=4)", 4)) for i in range(2)
        for method, share in (("Dense()", 1.0), ("SparQ(r=8, k=32)", 0.25), ("SparQ(r=8, k=32, local=0)", 0.25))
    ]  # fmt: skip
    n = 14
    for _ in range(n):
        damaged = [dict(row) for row in rows]
        for row in draw.sample(damaged, draw.choice([1, 1, 3, len(damaged)])):
            name = draw.choice([*row, "output", "versions", "context"])
            row[name] = draw.choice(ODD_VALUES)
            if draw.random() < 0.1:
                del row[name]
        path.write_text("".join(json.dumps(row) + "\n" for row in damaged))
        refused += not drawn_or_refused(path, capsys)
    assert n // 4 < refused < n


@pytest.mark.slow
def test_damaged_benchmarks_are_drawn_or_refused_in_one_line(tmp_path, capsys):
    path, draw, refused = tmp_path / "b.json", random.Random(0), 0
    methods = ("torch:sdpa", "Dense()", "SparQ(r=8, k=32)")
    kinds = [
        [{**ATTENTION, "method": m, "length": n, "speedup_dense": 1.5, "best_of_torch": m.startswith("torch")}
         for n in (1024, 2048) for m in methods],
        [{**ATTENTION, "method": methods[2], "length": n, "batch": b, "speedup_best": 1.5}
         for b in (1, 4) for n in (1024, 2048)],
        [{**TOKEN, "method": m, "length": n, "ms": 4.0, "floor_ms": 2.0} for n in (1024, 2048) for m in methods[1:]],
    ]  # fmt: skip
    n = 24
    for i in range(n):
        rows: list[Any] = [dict(row) for row in kinds[i % 3]]
        for at in draw.sample(range(len(rows)), draw.choice([1, 1, len(rows)])):
            name = draw.choice([*rows[at]])
            rows[at][name] = draw.choice(ODD_VALUES)
            if draw.random() < 0.2:
                rows[at] = draw.choice([None, 7, [], "x", {}])
        path.write_text(json.dumps({"machine": "x", "rows": rows}))
        refused += not drawn_or_refused(path, capsys)
    assert n // 4 < refused < n


def test_what_has_no_end_is_not_read(capsys):
    assert main(["plot", "/dev/zero"]) == 2
    assert "this is a device" in capsys.readouterr().err


@pytest.mark.parametrize("greatest", [1.0, 256.0])
def test_nothing_is_drawn_outside_the_scale(greatest):
    """Twelve methods that are all right, or all wrong: lines are drawn side by side, and the axis is the scale."""
    names = [f"M{i}" for i in range(12)]
    points = [("Dense", 1.0, greatest, None, None)]
    points += [(name, share, score, score, score) for name in names for share, score in ((0.25, 0.0), (0.5, greatest))]
    ax = plotting.new_figure((4, 4)).subplots()
    plotting.draw_scores(ax, "title", points, plotting.line_styles(names), greatest)
    assert ax.get_ylim() == (0, greatest)
    lines = [line.get_ydata() for line in ax.lines if len(line.get_ydata()) == 2 and line.get_marker() != "None"]
    assert len(lines) == 12 and all(0 <= y <= greatest for line in lines for y in line)
    assert len({line[0] for line in lines}) == len({line[1] for line in lines}) == 12, "none hides another"
    assert all(greatest - line[1] < 0.0301 * greatest for line in lines)


def test_a_score_that_is_no_number_is_not_drawn_as_the_best():
    assert str(plotting.side_by_side([float("nan"), 0.5], 0, 2, 1.0)[0]) == "nan"


@pytest.mark.parametrize("share", [0.16, 0.4])
def test_the_name_of_the_chosen_method_is_in_the_picture(share: float, tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    points = [("SparQ", x, 0.02, None, None) for x in (0.15, share, 0.45)]
    figures.tuning(points, 0.01, ("SparQ(r=4, k=8, channels='int4')", share, 0.02), "a text", tmp_path / "f.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (name,) = [text for text in figure.legends[0].get_texts() if "SparQ(" in text.get_text()]
    assert name.get_text() == "chosen: SparQ(r=4, k=8, channels='int4')"
    inside = name.get_window_extent()
    assert inside.x0 >= 0 and inside.x1 <= figure.bbox.x1


@pytest.mark.parametrize("from_dense", [False, True])
def test_no_name_of_tuning_stands_over_a_point(from_dense: bool, saved: list[Any], tmp_path: Path) -> None:
    """Points, bars and dashed lines fill the axes; what names them stands outside, and inside the picture."""
    points = [(f"Method{i}, channels='int4'", 0.03 * 1.1**j, value, value / 2, 2 * value)
              for i in range(8) for j in range(20) for value in [0.1 / (1 + i + j)]]  # fmt: skip
    figures.tuning(
        points, 0.01, ("SparQ(r=16, k=128, channels='int4')", 0.1, 0.009), "a text", tmp_path / "f.png", from_dense
    )
    (figure,) = saved
    figure.draw_without_rendering()
    (ax,), (legend,) = figure.axes, figure.legends
    texts = [*ax.texts, *legend.get_texts(), *(label for label in ax.get_xticklabels() if label.get_text())]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    assert len(boxes) >= 12 and "target" in boxes[0][0]
    assert overlap([*boxes, ("the axes", ax.get_window_extent())]) == []
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for _, box in boxes)


def test_the_bytes_of_tuning_have_two_ticks_at_least(saved: list[Any], tmp_path: Path) -> None:
    points = [("Skim", share, 0.01, None, None) for share in (0.034, 0.09)]
    figures.tuning(points, 0.01, ("Skim(k=8)", 0.034, 0.01), "a text", tmp_path / "f.png")
    saved[0].draw_without_rendering()
    ax = saved[0].axes[0]
    left, right = ax.get_xlim()
    assert [label.get_text() for at, label in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
            if left <= at <= right] == ["1/32", "1/16", "1/8"]  # fmt: skip


APART = "Lines are drawn a little apart, at most 3% of the axis, so that they hide each other less."


def texts_of(figure: Any) -> str:
    """All that stands in a figure outside its panels, in one line."""
    parts = [*figure.texts, figure._supxlabel, figure._supylabel]
    return " ".join(part.get_text() for part in parts if part is not None).replace("\n", " ")


def point_of(share: float, score: float) -> tuple[float, float, None, None]:
    return share, score, None, None


@pytest.mark.parametrize("lines", [1, 2])
def test_figures_say_that_lines_are_drawn_apart(lines: int, saved: list[Any], tmp_path: Path) -> None:
    """Lines of one score in all three figures; a single line is not moved, and then nothing is said."""
    names = [f"M{i}" for i in range(lines)]
    path, points = tmp_path / "f.png", [(name, *point_of(share, 1.0)) for name in names for share in (0.25, 0.5)]
    figures.scores([("a task", points, 1.0, False)], path)
    figures.lengths([("a task", "score", {name: [point_of(300, 1.0), point_of(600, 1.0)] for name in names}, 1.0,
                      False)], path)  # fmt: skip
    figures.ablation([figures.Ablation("a task", points, [], points, 1.0)], path)
    assert [APART in texts_of(figure) for figure in saved] == [lines > 1] * 3
    for figure in saved:
        figure.draw_without_rendering()
        if lines > 1:
            box = figure._supxlabel.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
            assert not any(box.overlaps(ax.get_tightbbox()) for ax in figure.axes)


@pytest.mark.parametrize("count", [2, 6])
def test_axes_without_an_end_fit_their_lines(count: int, saved: list[Any], tmp_path: Path) -> None:
    """A score from 40 to 90 at 300 to 600 tokens, with intervals that are bands or bars."""
    lines = {f"M{i}": [(300, 40.0, 35.0, 45.0), (600, 90.0, 85.0, 95.0)] for i in range(count)}
    figures.lengths([("a task", "score", lines, math.inf, False)], tmp_path / "f.png")
    ax = saved[0].axes[0]
    assert 250 < ax.get_xlim()[0] < 300 and 600 < ax.get_xlim()[1] < 700
    assert 30 < ax.get_ylim()[0] < 35 and 95 < ax.get_ylim()[1] < 100


def test_what_is_said_of_lines_that_are_drawn_apart() -> None:
    """Where a scale has no end, lines are moved by points of the paper, which are no share of the axis."""
    assert plotting.apart_note([(1, 1.0), (3, 1.0)]) == APART
    assert plotting.apart_note([(2, math.inf)]) == "Lines are drawn a little apart so that they hide each other less."
    assert plotting.apart_note([(1, 1.0), (0, math.inf)]) == plotting.apart_note([]) == ""


def test_the_legends_of_an_ablation_say_what_lines_are_and_hide_none(saved: list[Any], tmp_path: Path) -> None:
    finding = [(name, *point_of(share, 0.9)) for name in ("oracle top-k", "LowRank", "SparQ")
               for share in (0.05, 0.1, 0.5)]  # fmt: skip
    counts = [(f"SparQ, k={k}", *point_of(share, 0.1)) for k in (32, 64, 128, 256) for share in (0.1, 0.9)]
    changes = [(setting, kind, score, 0.0, 1.0) for setting in ("r = 8, k = 32", "r = 16, k = 128")
               for kind in ("as published", "local=0") for score in (0.1, 0.9)]  # fmt: skip
    dense = ("Dense", *point_of(1.0, 0.5))
    row = figures.Ablation("a task", [dense, *finding], changes, [dense, *counts], 1.0)
    figures.ablation([row, row._replace(finding=finding[3:])], tmp_path / "f.png")
    (figure,) = saved
    figure.draw_without_rendering()
    legends = [ax.get_legend() for ax in figure.axes]
    assert [text.get_text() for text in legends[0].get_texts()] == ["oracle top-k", "LowRank", "SparQ", "Dense"]
    assert legends[0].get_title().get_text() == "each mark: another r, at k = 128 (oracle top-k: another k)"
    assert legends[3].get_title().get_text() == "each mark: another r, at k = 128"
    assert legends[2].get_title().get_text() == "each mark: another r"
    assert "changed" in legends[1].get_title().get_text()
    boxes = [(f"panel {i}", ax.get_window_extent()) for i, ax in enumerate(figure.axes)]
    boxes += [(f"legend {i}", legend.get_window_extent()) for i, legend in enumerate(legends)]
    boxes += [(f"label {i}", ax.xaxis.label.get_window_extent()) for i, ax in enumerate(figure.axes)]
    assert overlap(boxes) == []


def test_a_legend_has_no_more_columns_than_there_is_room_for(saved: list[Any], tmp_path: Path) -> None:
    """One panel with the longest names: the legend stays in the picture."""
    names = ["Dense", *(f"SparQ(r={r}, k=128, channels='int8', local=0)" for r in (8, 16, 32, 64))]
    lines = {name: [point_of(300, 1.0), point_of(600, 1.0)] for name in names}
    figures.lengths([("a task", "score", lines, 1.0, False)], tmp_path / "f.png")
    (figure,) = saved
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert plotting.legend_columns(["a", "b", "c"], 9) == 3 and plotting.legend_columns(names, 5) == 1


@pytest.mark.parametrize(("low", "high", "ticks"), [
    (1, 70, [1, 2, 5, 10, 20, 50]), (2.5, 900, [10, 100]), (1, 512, [1, 10, 100]), (0.15, 0.9, [0.2, 0.5]),
    (1, 1, [1]),
])  # fmt: skip
def test_the_ticks_of_a_logarithmic_axis(low: float, high: float, ticks: list[float]) -> None:
    assert plotting.plain_log_ticks(low, high) == pytest.approx(ticks)
    assert len(plotting.plain_log_ticks(1e-20, 1e20)) <= 9


@pytest.mark.parametrize("share", [0.01, 0.029, 0.1, 1.05])
def test_a_point_beside_the_ticks_is_in_the_picture(share: float) -> None:
    ax = plotting.new_figure((4, 4)).subplots()
    plotting.draw_scores(
        ax, "kl", [("Skim", share, 0.006, None, None)], plotting.line_styles(["Skim"]), math.inf, from_dense=True
    )
    left, right = ax.get_xlim()
    assert left < share < right and left <= 0.125 and right >= 1


def overlap(boxes: Any) -> list[tuple[str, str]]:
    """The names of those boxes that have a part in common; boxes: (name, box in pixels)."""
    return [(a, b) for i, (a, box) in enumerate(boxes) for b, other in boxes[:i] if box.overlaps(other)]


def test_the_demo_is_drawn_inside_the_scale_and_its_texts_do_not_meet(tmp_path, monkeypatch):
    """Fourteen methods, many with the same score: the legend, the titles and the ticks keep apart."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    names = [f"SubGenStream{i}" for i in range(14)]
    points = [
        figures.DemoPoint(name, share, score, 3.0 * share, i % 2 == 0, i != 3)
        for i, name in enumerate(names) for share, score in ((0.124, 0.0), (0.5, 1.0 if i < 7 else 0.25))
    ]  # fmt: skip
    points.insert(0, figures.DemoPoint("Dense", 1.0, 1.0, 4.0, True, True))
    figures.demo(points, tmp_path / "d.png", 11_000_000, "title", "one\ntwo")
    (figure,) = drawn
    scores, times = figure.axes
    assert scores.get_ylim() == (0, 1) and times.get_ylim()[0] == 0 and times.get_ylim()[1] > 4
    assert all(0 <= y <= 1 for line in scores.lines if line.get_marker() != "None" for y in line.get_ydata())
    assert len(times.lines) == len(scores.lines) - 1, "no line among the times for what has no kernel"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*names, "Dense"]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [t for ax in figure.axes for t in (*ax.get_xticklabels(), *ax.get_yticklabels(), ax.title, ax._left_title)]
    texts += [*figure.texts, *legend.get_texts()]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in texts if t.get_text()]
    assert len(boxes) > 30 and overlap(boxes) == []
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for _, box in boxes)


def demo_heights(points: Any, tmp_path: Path, monkeypatch: Any) -> tuple[dict[str, list[float]], str]:
    """The height of every mark of the demo's left panel by its method, and all other texts of the figure."""
    saved: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: saved.append(figure))
    points = [figures.DemoPoint("Dense", 1.0, 0.9, 4.0, True, True)] + [
        figures.DemoPoint(name, share, score, 2.0, True, True) for name, share, score in points
    ]
    figures.demo(points, tmp_path / "d.png", 1000, "title", "subtitle")
    (figure,) = saved
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    lines = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    heights = {name: list(line.get_ydata()) for name, line in zip(names, lines, strict=True)}
    return heights, "\n".join(text.get_text() for text in figure.texts)


def test_the_demo_draws_scores_where_they_are(tmp_path, monkeypatch):
    """Lines that cross, the same score at other shares, and another score at the same share do not meet."""
    points = [("Skim", 0.0625, 0.953125), ("Skim", 0.125, 1.0), ("Quest", 0.06, 0.515625), ("Quest", 0.123, 0.8125),
              ("TOVA", 0.0625, 0.828125), ("TOVA", 0.125, 0.59375), ("TopK", 0.5, 1.0)]  # fmt: skip
    heights, texts = demo_heights(points, tmp_path, monkeypatch)
    assert heights == {"Skim": [0.953125, 1.0], "TOVA": [0.828125, 0.59375], "Quest": [0.515625, 0.8125],
                       "TopK": [1.0], "Dense": [0.9]}  # fmt: skip
    assert "side by side" not in texts


def test_the_demo_moves_only_lines_that_meet(tmp_path, monkeypatch):
    """At 1/8 three methods have 50%; at 100% one stays over the shares where another one ends."""
    points = [("A", 0.124, 0.5), ("B", 0.125, 0.5), ("C", 0.123, 0.5), ("D", 0.125, 0.515625), ("A", 0.25, 1.0),
              ("A", 0.5, 1.0), ("B", 0.4, 1.0), ("C", 0.25, 0.25), ("D", 0.25, 0.0)]  # fmt: skip
    heights, texts = demo_heights(points, tmp_path, monkeypatch)
    assert texts.count("Lines that meet in the left panel are drawn side by side.") == 1
    (a, *a_best), (b, b_best), (c, c_last), (d, d_last) = (heights[name] for name in "ABCD")
    assert sorted([a, b, c])[1] == 0.5 and len({a, b, c}) == 3 and max(a, b, c) - min(a, b, c) <= 0.0081
    assert max(a, b, c) < d == 0.515625 and (c_last, d_last) == (0.25, 0.0)
    assert a_best[0] == a_best[1] != b_best and {a_best[0], b_best} == {1.0, 0.996}


def test_the_intervals_of_many_lines_are_bars_beside_each_other():
    ax = plotting.new_figure((4, 4)).subplots()
    ax.set_xlim(0, 2)
    for i in range(6):
        plotting.draw_intervals(ax, [1.0], [0.2], [0.6], "black", i, 6)
    at = [bars.get_transform().transform(bars.get_segments()[0])[0][0] for bars in ax.collections]
    assert len(at) == 6 and all(1 < b - a < 4 for a, b in itertools.pairwise(at)), "pixels apart"


def test_settings_that_are_solved_for_each_task_stand_on_one_line(tmp_path, capsys, drawn):
    """At equal bytes, r, k and page change from task to task; a line is named by its k only in a grid of r and k."""
    path = tmp_path / "r.jsonl"
    specs = {"record": ("SparQ(r=8, k=64)", "SparQ(r=25, k=128)", "Quest(page=16, k=64)"),
             "passkey": ("SparQ(r=8, k=50)", "SparQ(r=25, k=128)", "Quest(page=32, k=64)")}  # fmt: skip
    path.write_text("".join(record(task, spec, 0, 1.0, 0.25, 500) for task, own in specs.items() for spec in own))
    plot(path, capsys)
    assert [[name for name, *_ in panel[1]] for panel in drawn["scores"]] == [["SparQ", "SparQ", "Quest"]] * 2


def test_the_demo_where_no_method_has_a_kernel(tmp_path):
    """As on a machine for which the library was not built."""
    points = [figures.DemoPoint(name, 1.0, 1.0, 4.0, True, False) for name in ("Dense", "SparQ")]
    figures.demo(points, tmp_path / "d.png", 1000, "title", "subtitle")
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("target", [0.002, 0.01, 0.05, 0.3, 0.99])
@pytest.mark.parametrize("values", [(0.001, 0.004, 0.02), (-0.04, 0.1, 0.5), (0.2, 0.9, 1.9)])
def test_the_labels_of_tuning_do_not_meet(target: float, values: Any, tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    points = [("SparQ", 0.1 * (i + 1), value, None, None) for i, value in enumerate(values)]
    figures.tuning(points, target, None, "a text", tmp_path / "f.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    labels = [label for label in figure.axes[0].get_yticklabels() if label.get_text()]
    assert not overlap([(label.get_text(), label.get_window_extent()) for label in labels])
    assert len(labels) >= 3 and "0%" in [label.get_text() for label in labels]
