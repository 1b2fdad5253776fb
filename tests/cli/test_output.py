"""Tables: numbers are whole on every terminal, and where stdout is none."""

from __future__ import annotations

import pytest
from rich.text import Text

from skimkv.cli import output


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, terminal: bool) -> str:
    """What a table of two rows is, where stdout has so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
    table = output.table("a title", "method", "bytes\nread", "to trans-\nformers")
    table.add_row("SparQ(r=16, k=256, channels='int4')", "123,456,789", "1.25 ×")
    table.add_row("[bold]Dense()[/]", "987,654,321,000", "")
    output.print_table(table, min_width=30)
    return Text.from_ansi(capsys.readouterr().out).plain


@pytest.mark.parametrize(("columns", "terminal"), [(120, True), (60, True), (120, False), (20, False)])
def test_numbers_stand_on_one_line(capsys, monkeypatch, columns, terminal):
    lines = printed(capsys, monkeypatch, columns, terminal).splitlines()
    assert any("123,456,789 │ 1.25 ×" in " ".join(line.split()) for line in lines)
    assert any("987,654,321,000" in line and "Dense()" in line for line in lines)
    assert columns == 20 or max(map(len, lines)) <= columns


def test_a_terminal_that_is_too_narrow_gets_a_line_for_each_number(capsys, monkeypatch):
    lines = [line.rstrip() for line in printed(capsys, monkeypatch, 30, True).splitlines()]
    assert "  bytes read: 123,456,789" in lines and "  to transformers: 1.25 ×" in lines
    assert lines[-2:] == ["Dense()", "  bytes read: 987,654,321,000"] and not any("│" in line for line in lines)
