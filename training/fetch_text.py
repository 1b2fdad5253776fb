"""Collect the text that the bundled model is trained on: `python -m training.fetch_text --out FOLDER ...`.

All of it may be passed on: WikiText's validation part and Tiny Shakespeare, which you name as files, and books and
documentation out of Debian packages, which `apt-get download` fetches and `dpkg-deb` unpacks, so it runs on Debian and
its kin. Of each package the copyright file must still grant the licence that is written here. The folder gets one
*.txt for each source, several of the same for a source that shall be read more often, and SOURCES.md, a table of the
sources, their licences and their sizes.

Left out on purpose: packages under the GPL or the GFDL, the RFCs (Debian keeps them outside its free part), and all
that was only given for research.
"""

from __future__ import annotations

import gzip
import random
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from skimkv.cli.errors import carry_out
from skimkv.cli.help import App

SHORTEST = 80  # characters of a paragraph that counts as prose
LEAST_LETTERS = 0.9  # of a paragraph: letters, spaces and the common marks
MOST_CHARACTERS = 1_500_000  # of one source, so that none outweighs the others
LEAST_CHARACTERS = 50_000  # of one source; less means that the package has changed


class Source(NamedTuple):
    """A Debian package with English prose: which of its files, how they are read, and what its copyright file says."""

    package: str
    title: str
    files: str  # a pattern below the package's root
    read: Callable[[Path], str]
    licence: str
    grant: str  # what stands in the copyright file, in a regular expression


class _Paragraphs(HTMLParser):
    """Collects the text of paragraphs and list items, without code, scripts and navigation."""

    BLOCKS = frozenset(("p", "li", "dd", "item"))
    LEFT_OUT = frozenset(("script", "style", "pre", "nav", "code_block", "screen", "info", "table"))

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self.parts: list[str] = []
        self.left_out = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Begin a paragraph, or a part that is left out."""
        if tag in self.LEFT_OUT:
            self.left_out += 1
        elif tag in self.BLOCKS:
            self.end()
        elif tag == "br":
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        """End a paragraph, or a part that is left out."""
        if tag in self.LEFT_OUT:
            self.left_out = max(0, self.left_out - 1)
        elif tag in self.BLOCKS:
            self.end()

    def handle_data(self, data: str) -> None:
        """Keep a piece of text."""
        if not self.left_out:
            self.parts.append(data)

    def end(self) -> None:
        """Close the paragraph that is being read."""
        self.paragraphs.append("".join(self.parts))
        self.parts = []


def read_markup(path: Path) -> str:
    """Return the paragraphs of an HTML file, or of a Mallard page, with blank lines between them."""
    parser = _Paragraphs()
    parser.feed(path.read_text(encoding="utf-8", errors="replace"))
    parser.end()
    return "\n\n".join(parser.paragraphs)


def read_compressed(path: Path) -> str:
    """Return the text of a gzip file, as the dictionaries of dictd and the texts of /usr/share/doc are."""
    return gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")


def read_restructured(path: Path) -> str:
    """Return the paragraphs of a reStructuredText file without directives, code and marks of roles."""
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = [part for part in re.split(r"\n\s*\n", text) if not re.match(r"\s*(\.\.|>>>|:|\||\+-|=)|\s{4,}", part)]
    return re.sub(r":[\w:]+:`[~!]?([^`<]*)[^`]*`|`+|\*+", r"\1", "\n\n".join(kept))


def read_sword(path: Path) -> str:
    """Return the text of a SWORD module's *.bzz: blocks of zlib, which the *.bzs beside it lists (start, size, length).

    A chapter becomes a paragraph, or what stands between two empty lines.
    """
    data, index = path.read_bytes(), path.with_suffix(".bzs").read_bytes()
    texts = []
    for start, size, _ in struct.iter_unpack("<III", index[: len(index) // 12 * 12]):
        if size:
            texts.append(zlib.decompress(data[start : start + size]).decode("utf-8", errors="replace"))
    text = re.sub(r"<note\b.*?</note>|<title\b.*?</title>", " ", "\n\n".join(texts), flags=re.DOTALL)
    text = re.sub(r"<chapter\b[^>]*>|<(?:lb|p|div)\b[^>]*>", "\n\n", text)
    return re.sub(r" +([,.;:?!])", r"\1", re.sub(r"<[^>]*>", "", text))


DOC = "usr/share/doc"
SOURCES = (
    Source("sword-text-web", "World English Bible", "**/*.bzz", read_sword, "public domain", r"License: public-domain"),
    Source(
        "sword-comm-mhcc", "Matthew Henry's Concise Commentary", "**/*.bzz", read_sword, "public domain",
        r"License: public-domain",
    ),
    Source(
        "dict-devil", "Ambrose Bierce, The Devil's Dictionary", "**/devil.dict.dz", read_compressed, "public domain",
        r"The Devil's Dictionary is in the public domain",
    ),
    Source(
        "jargon-text", "The Jargon File", "**/jargon.txt.gz", read_compressed, "public domain",
        r"\(the Jargon File\) is in the public domain",
    ),
    Source(
        "gnome-user-docs", "GNOME's help", "usr/share/help/C/*/*.page", read_markup, "CC BY-SA 3.0",
        r"License: CC-BY-SA-3\.0",
    ),
    Source(
        "rust-doc", "The Rust Programming Language, and other books of Rust",
        f"{DOC}/rust-doc/html/*book/*.html", read_markup, "MIT or Apache-2.0", r"License: MIT or Apache-2\.0",
    ),
    Source(
        "postgresql-doc-15", "The manual of PostgreSQL", f"{DOC}/postgresql-doc-15/html/*.html", read_markup,
        "PostgreSQL licence", r"License: PostgreSQL",
    ),
    Source(
        "python3.11-doc", "The manual of Python", f"{DOC}/python3.11/html/_sources/**/*.rst.txt", read_restructured,
        "Python licence (PSF-2.0)", r"PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
    ),
)  # fmt: skip
PUNCTUATION = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\u200b": None, "\u00ad": None})


def prose(text: str) -> str:
    """Return the paragraphs that are prose, each as one line, with a blank line between them.

    A paragraph of fewer than SHORTEST characters, or with many other characters than letters, is no prose.
    """
    kept = []
    for part in re.split(r"\n\s*\n", text.translate(PUNCTUATION)):
        line = " ".join(part.split())
        letters = len(re.findall(r"[A-Za-z ,.;:'\"!?-]", line))
        if len(line) >= SHORTEST and letters >= LEAST_LETTERS * len(line):
            kept.append(line)
    return "\n\n".join(dict.fromkeys(kept))  # editions of one book repeat each other


def source_text(source: Source, root: Path) -> str:
    """Return the prose of a package that is unpacked under `root`, at most MOST_CHARACTERS of it.

    Where there is more, whole files are drawn. Raises ValueError if the licence is not granted there, or if there is
    hardly any text.
    """
    grant = root / DOC / source.package / "copyright"
    if not grant.is_file() or not re.search(source.grant, grant.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(f"{grant}: does not say {source.grant!r}, so its text may not be used as {source.licence}")
    paths = sorted(root.glob(source.files))
    random.Random(0).shuffle(paths)
    texts: list[str] = []
    room = MOST_CHARACTERS
    for path in paths:
        if room > 0 and (text := prose(source.read(path))):
            texts.append(text[:room])
            room -= len(text)
    text = prose("\n\n".join(texts))
    if len(text) < LEAST_CHARACTERS:
        raise ValueError(f"{root}: {len(text)} characters of prose in {source.files}, need {LEAST_CHARACTERS}")
    return text


def unpacked(package: str, folder: Path) -> Path:
    """Download a Debian package and unpack it below `folder` -> its root. Raises ValueError if that fails."""
    try:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True, text=True)
        archive = next(folder.glob(f"{package}_*.deb"))
        root = folder / package
        subprocess.run(["dpkg-deb", "-x", archive, root], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is not installed: fetch the text on Debian or Ubuntu") from None
    except (subprocess.CalledProcessError, StopIteration) as error:
        lines = getattr(error, "stderr", "").strip().splitlines()
        raise ValueError(f"apt-get cannot download {package} ({lines[-1] if lines else 'no file came'})") from None
    return root


def rows_of(
    wikitext: Path, shakespeare: Path, packages: Path | None, folder: Path
) -> Iterator[tuple[str, str, str, int, str]]:
    """Yield each source as (name, title, licence, how many times it shall stand in the folder, text)."""
    article = wikitext.read_text(encoding="utf-8")
    yield "wikitext", "WikiText-2, validation part", "CC BY-SA 3.0", 4, article
    play = shakespeare.read_text(encoding="utf-8")
    yield "shakespeare", "Tiny Shakespeare", "public domain", 2, play
    for source in SOURCES:
        root = packages / source.package if packages else unpacked(source.package, folder)
        title = f"{source.title} (Debian package `{source.package}`)"
        yield source.package, title, source.licence, 1, source_text(source, root)


def main(
    wikitext: Annotated[Path, typer.Option(metavar="FILE", help="WikiText's validation part, as plain text.")],
    shakespeare: Annotated[Path, typer.Option(metavar="FILE", help="Tiny Shakespeare, as plain text.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder for the texts and SOURCES.md.")],
    packages: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder with the packages unpacked, each in a folder of its name, instead of a download.",
        ),
    ] = None,
) -> None:
    """Collect the text that the bundled model is trained on: all of it may be passed on.

    About 90 MB of Debian packages are downloaded to a temporary folder.

    Example:

        python -m training.fetch_text --wikitext wiki.valid.txt --shakespeare input.txt --out text
    """
    out.mkdir(parents=True, exist_ok=True)
    table = ["| source | licence | characters | times read |", "| --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as folder:
        for name, title, licence, times, text in rows_of(wikitext, shakespeare, packages, Path(folder)):
            for i in range(times):
                (out / f"{name}{f'-{i + 1}' if times > 1 else ''}.txt").write_text(text, encoding="utf-8")
            table.append(f"| {title} | {licence} | {len(text):,} | {times} |")
    (out / "SOURCES.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n".join(table))


if __name__ == "__main__":
    app = App()
    app.command()(main)
    raise SystemExit(carry_out(lambda: app, "training.fetch_text"))
