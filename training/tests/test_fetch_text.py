"""python -m training.fetch_text: prose out of packages that lie on this disk, with their licences."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import pytest

from skimkv.cli.errors import carry_out
from skimkv.cli.help import App
from training import fetch_text
from training.fetch_text import Source

LONG = "It was a dark and stormy night, and the captain said to the mate, tell us a story, and he began. "
BOOK = Source(
    "a-book", "A Book", "usr/share/*.gz", fetch_text.read_compressed, "public domain", r"License: public-domain"
)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one package, which the command takes for all that there are."""
    share = tmp_path / "packages" / "a-book" / "usr" / "share"
    (share / "doc" / "a-book").mkdir(parents=True)
    (share / "doc" / "a-book" / "copyright").write_text("Files: *\nLicense: public-domain\n")
    chapters = "\n\n".join(f"Chapter {i}. {LONG}" for i in range(600))
    (share / "book.gz").write_bytes(gzip.compress(chapters.encode()))
    (tmp_path / "wiki.txt").write_text(" = Title = \n")
    (tmp_path / "play.txt").write_text("First Citizen:\nSpeak.\n")
    monkeypatch.setattr(fetch_text, "SOURCES", (BOOK,))
    return tmp_path / "packages"


def command(tmp_path: Path, *more: object) -> int:
    app = App()
    app.command()(fetch_text.main)
    files = ["--wikitext", tmp_path / "wiki.txt", "--shakespeare", tmp_path / "play.txt", "--out", tmp_path / "out"]
    return carry_out(lambda: app, "fetch_text", [str(x) for x in (*files, *more)])


def test_the_folder_has_the_texts_and_a_table_of_their_licences(tmp_path: Path, packages: Path) -> None:
    assert command(tmp_path, "--packages", packages) == 0
    out = tmp_path / "out"
    names = {path.name for path in out.glob("*.txt")}
    assert names == {
        *(f"wikitext-{i}.txt" for i in (1, 2, 3, 4)),
        "shakespeare-1.txt",
        "shakespeare-2.txt",
        "a-book.txt",
    }
    assert (out / "wikitext-4.txt").read_text() == " = Title = \n"
    text = (out / "a-book.txt").read_text()
    assert text.startswith("Chapter 0. It was")
    assert (
        f"| A Book (Debian package `a-book`) | public domain | {len(text):,} | 1 |" in (out / "SOURCES.md").read_text()
    )


def test_a_package_that_does_not_grant_its_licence_is_refused(
    tmp_path: Path, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packages / "a-book" / "usr/share/doc/a-book/copyright").write_text("All rights reserved.")
    assert command(tmp_path, "--packages", packages) == 2
    error = capsys.readouterr().err
    assert "does not say 'License: public-domain'" in error
    assert error.count("\n") == 1


def test_a_package_with_hardly_any_text_is_refused(packages: Path) -> None:
    source = BOOK._replace(files="usr/share/*.txt")
    with pytest.raises(ValueError, match=r"0 characters of prose in usr/share/\*.txt, need 50000"):
        fetch_text.source_text(source, packages / "a-book")


def test_no_source_is_longer_than_the_most(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_text, "MOST_CHARACTERS", 52_000)
    assert 50_000 <= len(fetch_text.source_text(BOOK, packages / "a-book")) <= 52_000


def test_without_apt_the_command_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="apt-get is not installed: fetch the text on Debian or Ubuntu"):
        fetch_text.unpacked("a-book", tmp_path)


def test_a_download_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'E: Unable to locate package a-book' >&2\nexit 100\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ValueError, match=r"cannot download a-book \(E: Unable to locate package a-book\)$"):
        fetch_text.unpacked("a-book", tmp_path)


def test_prose_is_whole_lines_without_tables_headings_and_repetitions() -> None:
    text = f"Title\n\n{LONG[:40]}\n{LONG[40:]}\n\n| 1 | 2 | {'| 3 ' * 40}|\n\n{LONG}\n\n{LONG}“Well,” he said."
    assert fetch_text.prose(text) == f'{LONG.strip()}\n\n{LONG}"Well," he said.'


def test_markup_without_code(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<body><nav>Home</nav><p>One <b>bold</b><br>word.</p><pre>x = 1</pre><ul><li>Two</li></ul></body>")
    parts = [part for part in fetch_text.read_markup(page).split("\n\n") if part]
    assert parts == ["One bold word.", "Two"]


def test_restructured_text_without_directives_and_code(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("Use :func:`~os.open` or ``read``, *now*.\n\n.. note::\n   A note.\n\n>>> 1\n1\n\n    code\n")
    assert fetch_text.read_restructured(page) == "Use os.open or read, now."


def test_a_sword_module_is_blocks_of_zlib(tmp_path: Path) -> None:
    blocks = ["<chapter osisID='a.1'/><w>In</w> <w>the</w> <w>beginning</w> .<note>See John.</note>", "And so on."]
    packed = [zlib.compress(block.encode()) for block in blocks]
    (tmp_path / "ot.bzz").write_bytes(b"".join(packed))
    index = [(0, len(packed[0]), len(blocks[0])), (len(packed[0]), len(packed[1]), len(blocks[1])), (0, 0, 0)]
    (tmp_path / "ot.bzs").write_bytes(b"".join(struct.pack("<III", *entry) for entry in index))
    assert fetch_text.read_sword(tmp_path / "ot.bzz").split("\n\n") == ["", "In the beginning. ", "And so on."]
