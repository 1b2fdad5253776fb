"""The packages that users get: a source distribution, the wheel, and the wheel where nothing else is.

The wheel is built from this checkout, where the kernels have been compiled for the installation, and the source
distribution has the same files. With SKIMKV_DIST, a folder, the two packages that lie there are tested instead, of
which the wheel was built from the source distribution: `make wheel`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from skimkv import __version__

ROOT = Path(__file__).parents[1]
DIST = os.environ.get("SKIMKV_DIST")
# The newest symbol versions that every Linux of the tag manylinux_2_28 has.
NEWEST_SYMBOLS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
LARGEST_WHEEL = 20e6  # bytes
# Where an installation was not by `make`, the kernels are compiled: once, by one process.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("wheel")]


def run(*command: object, cwd: Path, programs: Path | None = None) -> str:
    """Run a command that does not see this checkout, and return what it prints.

    programs: the only folder in which it finds other programs; by default it finds all of this machine.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SKIMKV"))}
    if programs is not None:
        environment["PATH"] = str(programs)
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def new_environment(folder: Path) -> Path:
    """Make an empty virtual environment and return its Python."""
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def add_dependencies(python: Path) -> None:
    """Let an environment import the packages of this one: neither the network nor gigabytes of copies are needed.

    Files in these folders that end in .pth are not read, so an editable install of this checkout is not seen.
    """
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    folders = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(folders) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    """The source distribution of this checkout."""
    if DIST:
        (path,) = Path(DIST).absolute().glob("*.tar.gz")
        return path
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed")
    code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    return folder / run(sys.executable, "-c", code, folder, cwd=ROOT).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    if DIST:
        (path,) = Path(DIST).absolute().glob("*.whl")
        return path
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(folder: Path, wheel: Path) -> Path:
    """The Python of an environment into which the wheel was installed, and nothing else."""
    python = new_environment(folder / "installed")
    options = ("--no-index", "--no-deps", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    add_dependencies(python)
    return python


def test_the_source_distribution_builds_the_same_wheel(sdist, tmp_path):
    """It has what a wheel is built from, as it is in this checkout, and CMake finds all of it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    names = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    needed = [ROOT / name for name in ("CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md")]
    needed += [path for folder in ("csrc", "src") for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = {path.relative_to(ROOT) for path in needed if path.suffix not in (".pyc", ".so")}
    assert sorted(kept - names) == []
    assert [name for name in kept if (source / name).read_bytes() != (ROOT / name).read_bytes()] == []
    assert not [name for name in names if name.suffix in (".so", ".o")]
    if cmake := shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        run(cmake, "-S", source, "-B", tmp_path / "build", "-DCMAKE_BUILD_TYPE=Release", cwd=tmp_path)


def test_one_wheel_serves_every_interpreter(wheel):
    assert re.fullmatch(rf"skimkv-{re.escape(__version__)}-py3-none-[\w.]+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (.*)$", archive.read(metadata).decode(), re.M)
    assert tags
    assert all(tag.startswith("py3-none-") and not tag.endswith("-any") for tag in tags)
    wanted = "include/skimkv.h libskimkv.so py.typed models/tiny/model.safetensors models/tiny/README.md".split()
    assert [name for name in wanted if f"skimkv/{name}" not in names] == []
    assert not [name for name in names if name.endswith((".cpp", ".o")) or "tests/" in name]


@pytest.mark.skipif(sys.platform != "linux", reason="symbol versions are those of Linux")
def test_the_library_asks_for_no_newer_symbols_than_its_tag(wheel, tmp_path):
    """The library loads wherever manylinux_2_28 is admitted: no versioned symbol is newer."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("skimkv/libskimkv.so")
    asked = {name: versions(library, name) for name in NEWEST_SYMBOLS}
    assert asked["GLIBC"], "the library names no version of glibc: is it one?"
    newer = {name: found for name, found in asked.items() if max(found, default=(0,)) > NEWEST_SYMBOLS[name]}
    assert newer == {}


def versions(library: bytes, name: str) -> set[tuple[int, ...]]:
    """The versions of symbols that a library asks for, such as (2, 17) for the name GLIBC."""
    found = re.findall(rf"\0{name}_([\d.]+)\0".encode(), library)
    return {tuple(map(int, version.split(b"."))) for version in found}


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size <= LARGEST_WHEEL


def packages_after(code: str, python: Path, cwd: Path) -> set[str]:
    """The packages outside the standard library that this code has imported when it ends."""
    known = "import sys; known = {*sys.modules, *sys.stdlib_module_names}"
    told = run(python, "-c", f"{known}\n{code}\nprint(*{{m.split('.')[0] for m in sys.modules}} - known)", cwd=cwd)
    return {name for name in told.splitlines()[-1].split() if not name.startswith("_")}


def test_import_and_help_take_no_time(installed, tmp_path):
    """Importing skimkv imports no other package, and --help those that typer's own help needs."""
    assert packages_after("import skimkv", installed, tmp_path) == {"skimkv"}
    smallest = "import typer; app = typer.Typer(rich_markup_mode='markdown')"
    smallest += "; app.command(help='*Help*.')(lambda number=1: None); app(['--help'], standalone_mode=False)"
    needed = packages_after(smallest, installed, tmp_path)
    assert {"typer", "rich"} <= needed
    help = "from skimkv.cli import main; main(['--help'])"
    assert packages_after(help, installed, tmp_path) <= needed | {"skimkv"}


def test_the_fast_tests_pass_on_the_installed_wheel(installed, tmp_path):
    """The tests of stores and methods, in a folder that has nothing else of this checkout, without a compiler.

    Those of the laws, half of them by their time, say nothing more of a package.
    """
    for name in ("conftest.py", "test_package.py", "support", "stores", "methods"):
        copy = shutil.copytree if (ROOT / "tests" / name).is_dir() else shutil.copy
        copy(ROOT / "tests" / name, tmp_path / name)
    settings = ("--import-mode=importlib", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path)
    settings += ("-o", f"pythonpath={tmp_path}", "-o", "cache_dir=cache", "-p", "no:xdist", "-q", "-m", "not slow")
    settings += ("--ignore", tmp_path / "methods" / "test_laws.py")
    told = run(installed, "-m", "pytest", *settings, tmp_path, cwd=tmp_path, programs=installed.parent)
    assert int(re.search(r"(\d+) passed", told)[1]) > 1000


def test_the_installed_wheel_runs_the_demo(installed, tmp_path):
    code = "import skimkv; from skimkv.ops.cpu import library; print(skimkv.__file__, library.isa())"
    file, isa = run(installed, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parents[1])
    assert isa != "None"
    demo = run(installed.parent / "skimkv", "demo", "--json", "--lines", 30, "--asked", 3, cwd=tmp_path,
               programs=installed.parent)  # fmt: skip
    rows = json.loads(demo)["rows"]
    assert rows[0]["method"] == "Dense()"
    assert len(rows) > 1
    assert all(row["elements_counted"] == row["elements_predicted"] for row in rows)


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_a_c_program_is_built_with_the_installed_header(installed, tmp_path):
    include = Path(run(installed, "-c", "import skimkv; print(skimkv.include_dir())", cwd=tmp_path).strip())
    assert include.is_relative_to(installed.parents[1])
    library = include.parent / "libskimkv.so"
    program = tmp_path / "decode"
    run("gcc", "-std=c11", f"-I{include}", ROOT / "examples" / "decode.c", library, "-lm",
        f"-Wl,-rpath,{library.parent}", "-o", program, cwd=tmp_path)  # fmt: skip
    assert len(re.findall(r"error \d", run(program, cwd=tmp_path))) == 6
