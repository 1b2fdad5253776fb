"""The README and the pages in docs/: links lead somewhere, examples run, and every method is described."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import skimkv
from skimkv.eval import tasks
from skimkv.methods import METHODS
from support.kernels import NATIVE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.glob("*.md"))]
OWN_METHODS = [name for name, method in METHODS.items() if method.__module__.startswith("skimkv.")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page that are marked as this language."""
    return [code for found, code in CODE.findall(page.read_text(encoding="utf-8")) if found == language]


def relative_links(text: str) -> list[str]:
    """The files that a Markdown text links to, besides addresses of the web and references into the API."""
    text = CODE.sub("", text)
    return [link.split("#")[0] for link in LINK.findall(text) if not re.match(r"https?:|mailto:|#", link)]


def test_links_are_told_from_other_text():
    text = "[a](docs/b.md#c) ![d](e.png) [f](https://g.h) [i](#j)\n```python\nk[0](l)\n```\n"
    assert relative_links(text) == ["docs/b.md", "e.png"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    missing = [link for link in relative_links(text) if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to files that do not exist: {missing}"


def test_paths_in_prose_exist():
    """A file or folder of the repository that a page names in backticks, or that the README's tree shows, exists."""
    named = re.compile(r"`((?:src|csrc|tests|docs|benchmarks|examples|training)/[\w./-]+)`")
    names = {(page.name, name) for page in PAGES for name in named.findall(page.read_text(encoding="utf-8"))}
    tree = next(block for block in blocks(ROOT / "README.md", "text") if "src/skimkv/" in block)
    folder = Path()
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else Path(name)
        names.add(("README.md", str(folder / name) if line.startswith(" ") else name))
    assert len(names) > 15
    missing = [(page, name) for page, name in sorted(names) if not (ROOT / name).exists()]
    assert not missing


def test_the_version_is_the_same_everywhere():
    """The package, CITATION.cff and the newest heading of the changelog that is a version."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == released[0] == skimkv.__version__


def test_every_page_is_in_the_table_of_contents():
    listed = "\n".join(
        re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    )
    for page in DOCS.glob("*.md"):
        assert page.stem == "index" or page.stem in re.findall(r"^(?:.*<)?([\w-]+)>?$", listed, re.MULTILINE), (
            f"{page.name} is in no toctree of index.md"
        )


@pytest.mark.parametrize("name", OWN_METHODS)
def test_every_method_is_described(name):
    guide = (DOCS / "methods.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {name}\n\n(.*?)(?=^## |\Z)", guide, re.MULTILINE | re.DOTALL)
    assert section, f"docs/methods.md has no section on {name}"
    assert f"`{name}(" in section[1]
    assert "Reads" in section[1]
    assert re.search(rf"^\| .*`{name}\(", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f".. autoclass:: skimkv.{name}\n" in (DOCS / "api.md").read_text(encoding="utf-8")


def test_every_task_is_described():
    """docs/tasks.md has a row for every task, of those with more sizes than a length with all defaults."""
    page = (DOCS / "tasks.md").read_text(encoding="utf-8")
    for name in tasks.TASKS:
        sizes = tasks.parse(name).sizes
        spec = name if sizes == "length=4096" else f"{name}({sizes})"
        assert f"\n| `{spec}` | " in page


def test_every_public_name_is_in_the_reference():
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    missing = [name for name in skimkv.__all__ if not re.search(rf":: skimkv\.{name}\b", reference)]
    assert not missing


def test_every_command_is_described():
    from typer.main import get_command

    from skimkv.cli.app import app

    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    commands = []
    for name, command in get_command(app).commands.items():
        group = getattr(command, "commands", None)
        commands += [f"{name} {sub}" for sub in group] if group else [name]
    assert len(commands) > 8
    for name in commands:
        assert f"## skimkv {name}\n" in page
        assert re.search(rf"^skimkv {name}\b", page, re.MULTILINE), f"command-line.md has no example of skimkv {name}"


@pytest.mark.parametrize("page", ["command-line.md", "kernels.md"])
def test_instruction_sets_are_those_of_the_library(page):
    source = (ROOT / "csrc" / "instruction_sets.cpp").read_text(encoding="utf-8")
    names = re.findall(r'^ *{"(\w+)", &', source, re.MULTILINE)
    assert "scalar" in names
    text = (DOCS / page).read_text(encoding="utf-8")
    assert not [name for name in names if f"`{name}`" not in text and f"SKIMKV_ISA={name}`" not in text]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_compile(page):
    for number, code in enumerate(blocks(page, "python")):
        compile(code, f"{page.name}, block {number}", "exec")


def test_specs_in_the_pages_are_valid():
    """Whatever the pages pass to --method, attach or parse is a spec that is accepted."""
    pattern = re.compile(r"""(?:--method |attach\(model, |parse\()(["'])(.*?)\1(?=[\s,)]|$)""", re.MULTILINE)
    specs = {spec for page in PAGES for _, spec in pattern.findall(page.read_text(encoding="utf-8"))}
    assert len(specs) > 5
    for spec in specs - {"Dilated(window=64)"}:
        skimkv.parse(spec)


def test_the_accounting_example_gives_the_papers_formula(capsys):
    code = next(code for code in blocks(DOCS / "accounting.md", "python") if "traffic" in code)
    exec(compile(code, "accounting.md", "exec"), {})
    n, D, r, k = 16384, 128, 32, 128
    printed = capsys.readouterr().out
    assert f"paper={8 * (n * r + 2 * k * D + 4 * D)})" in printed
    dense = skimkv.parse("Dense()").traffic(n, skimkv.Shape(1, 8, 4, D), torch.bfloat16)
    assert str(dense.bytes) in printed


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [False, True])
def test_the_example_of_a_new_method_runs(tmp_path, kernel):
    """docs/examples/dilated.py, which "add a method" shows, obeys the laws and generates, also with its kernel."""
    examples = DOCS / "examples"
    assert "{literalinclude} examples/dilated.py" in (DOCS / "add-a-method.md").read_text(encoding="utf-8")
    assert "{literalinclude} examples/dilated.c" in (DOCS / "kernels.md").read_text(encoding="utf-8")
    shutil.copy(examples / "dilated.py", tmp_path)
    if kernel:
        if not NATIVE or shutil.which("cc") is None:
            pytest.skip("no native library, or no C compiler")
        build = re.search(r"cc -O3 .*\.so", (examples / "dilated.c").read_text(encoding="utf-8"))[0]
        build = build.replace("python ", f"{sys.executable} ").replace("dilated.c", str(examples / "dilated.c"))
        subprocess.run(build, shell=True, check=True, cwd=tmp_path)
    script = "import dilated, runpy; print(dilated.Dilated(window=8).has_kernel('cpu'));"
    script += "dilated.skimkv.METHODS.pop('Dilated'); runpy.run_path('dilated.py', run_name='__main__')"
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:skimkv", "-c", script],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{kernel}\n") and run.stdout.rstrip().endswith("red-fox: 31425")
