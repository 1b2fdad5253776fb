"""What the benchmarks print: a table of rows, what is said below it, and the progress while they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .. import output


def milliseconds(ms: float) -> str:
    """Write a time with three digits after the point, or with one from 100 milliseconds on."""
    return f"{ms:,.3f}" if ms < 100 else f"{ms:,.1f}"


def microseconds(us: float | None) -> str:
    """Write the time of a stage, or a dash for one that was not measured."""
    return "–" if us is None else f"{us:.2f}"


STAGES = ("prepare", "score", "choose", "fetch", "attend", "append", "call")  # of a step, in bench attention --profile
# Key of a row -> (heading of its column, how its numbers are written)
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "method": ("method", str),
    "batch": ("batch", str),
    "length": ("cached\ntokens", "{:,}".format),
    "ms": ("ms", milliseconds),
    "ms_min": ("least\nms", milliseconds),
    "ms_max": ("most\nms", milliseconds),
    # a difference of two times, which noise may turn
    "ms_attention": ("ms in\nattention", lambda ms: milliseconds(max(ms, 0.0))),
    "ms_weights": ("ms in\nthe rest", milliseconds),
    "ms_linear": ("ms of linear\nlayers", milliseconds),
    "floor_ms": ("ms at\nbandwidth", milliseconds),
    "bytes_predicted": ("bytes\nread", "{:,}".format),
    "bytes_read": ("bytes\nread", "{:,}".format),
    "weight_bytes": ("weight bytes\nread", "{:,}".format),
    "gb_per_s": ("GB/s", "{:.1f}".format),
    "share_of_peak": ("of the\nbandwidth", "{:.0%}".format),
    "speedup_dense": ("speed-up\nto dense", "{:.2f}".format),
    "speedup_torch": ("to torch's\nbest", "{:.2f}".format),
    "speedup_transformers": ("to trans-\nformers", "{:.2f}".format),
    "speedup_theory": ("to dense\nby bytes", "{:.2f}".format),
    "speedup_llama.cpp": ("to llama.cpp's\nbetter -fa", "{:.2f}".format),
    "speedup_fork": ("to the\nfork's SparQ", "{:.2f}".format),
    "speedup_allowed": ("to dense\nby bytes", "{:.2f}".format),
    "prompt": ("prompt\ntokens", "{:,}".format),
    "new": ("new\ntokens", "{:,}".format),
    "tokens_per_s": ("tokens\nper s", "{:,.0f}".format),
    "ratio_dense": ("times\ndense's", "{:.2f}".format),
    "ratio_stock": ("times\nstock's", "{:.2f}".format),
    "blocks": ("blocks of\nthe cache", "{:,}".format),
    "block_size": ("tokens of\na block", "{:,}".format),
    "first_ms": ("ms to the\nfirst token", milliseconds),
    "first_speedup": ("to trans-\nformers", "{:.2f}".format),
    "first_speedup_rival": ("to llama.cpp's\nbetter -fa", "{:.2f}".format),
    "ms_later": ("ms of a\nlater one", milliseconds),
    "prompt_s": ("s for\nprompts", "{:.2f}".format),
    "latency_s": ("s in\nall", "{:.2f}".format),
    "ms_per_step": ("ms a\nstep", milliseconds),
    **{stage: (stage, microseconds) for stage in STAGES},
    "nbytes": ("bytes\nheld", "{:,}".format),
    "allocated": ("bytes\nallocated", "{:,}".format),
    "peak_rss_growth": ("growth of the\nprocess's peak", "{:,}".format),
}


@contextmanager
def progress() -> Iterator[Callable[[], None]]:
    """Show how many rounds were measured; yields what counts one more."""
    with output.progress_bar() as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda: bar.advance(task)


def print_table(result: Mapping[str, Any], columns: Sequence[str], title: str) -> None:
    """Print these columns of the rows, and below them the machine, with its bandwidth if that was measured."""
    table = output.table(title, *(COLUMNS[name][0] for name in columns))
    for row in result["rows"]:
        table.add_row(*("—" if row[name] is None else COLUMNS[name][1](row[name]) for name in columns))
    table.caption = result["machine"]
    if "peak" in result:
        does = "copies" if result["peak"] == "copy" else "reads"
        table.caption += f"; {does} {result['peak_gb_per_s']:.1f} GB/s at best"
    output.print_table(table, 160)


def print_kept(result: Mapping[str, Any], rounds: int) -> None:
    """Say how many calls count, and what those are that do not; nothing for a GPU, which is not shared."""
    rows = result["rows"]
    if not result["waits_known"]:
        if result["peak"] == "read":
            print("This system does not tell how long threads wait for a processor: all calls count.")
        return
    kept = sum(row["kept"] for row in rows)
    calls = sum(row.get("calls", rounds) for row in rows)
    print(f"{kept} of {calls} calls count: their threads waited less than 100 µs, or 1%, for a processor.")
    for row in rows:
        if not row["kept"]:
            where = f"{row['method']} at {row['length']} tokens"
            print(f"{where}: no call was undisturbed, and its times are those of all calls; use an idle machine")


def print_interleaved(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say so if the candidates of a length were not measured in turn."""
    if not all(row["interleaved"] for row in rows):
        print(
            "The candidates were measured one after the other: their caches do not fit in memory together, or the "
            "model is compiled."
        )
