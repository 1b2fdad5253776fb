"""The structure of the source tree: who imports whom, and that every test asserts something.

Every rule reads the files with `ast` and runs nothing. A rule is a function that returns one line for each place where
it is broken. The tests at the end break each rule on purpose in a small package of their own.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "skimkv"
TESTS = ROOT / "tests"
TRAINING = ROOT / "training"

# From the bottom to the top. A folder or module imports only from lines above its own, never from its neighbours in a
# line. This is the one place where the order stands.
ORDER = (
    ("spec", "plotting", "header", "models", "records"),
    ("stores",),
    ("ops",),
    ("methods",),
    ("hf", "testing"),
    ("eval", "bench", "serve", "vllm"),
    ("analysis", "lm_eval"),
    ("cli",),
)
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
FROM_ROOT = {"__version__", "__path__"}  # all that a module may import from `skimkv` itself


class Import(NamedTuple):
    """One import statement, resolved: the module that it names, and the line where it stands."""

    module: str
    line: int


def python_files(*folders: Path) -> list[Path]:
    """Return every Python file in the folders and below, sorted by path."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """Parse one file; a text that was parsed before is not parsed again."""
    return parse_text(path.read_text(encoding="utf-8"))


parse_text = functools.cache(ast.parse)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_names(package: Path) -> dict[str, Path]:
    """Return the modules of a package: their dotted names and their files."""
    names = {}
    for path in python_files(package):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Yield what a module imports at any depth: in functions, under TYPE_CHECKING, and by `import_module`.

    `from .folder import name` yields the module `folder.name` where there is one, and otherwise the attribute's home,
    `folder`. The root package yields the attribute itself, so that a rule can tell which one it is.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    root = next(iter(known)).partition(".")[0]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{home}.{alias.name}"
                yield Import(inner if inner in known or home == root else home, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("."):
                    yield Import(f"{package}{part.value}".rstrip("."), node.lineno)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield Import(part.value, node.lineno)


def broken_order(package: Path) -> list[str]:
    """Find imports that run upward or sideways, and imports of public names from the root package."""
    known, found = module_names(package), []
    root = package.name
    for module, path in known.items():
        if module == root:
            continue
        part = module.split(".")[1]
        if part not in LEVEL:
            found.append(f"{module}: ORDER does not name {part!r}")
            continue
        for target, line in imports(module, path, known):
            if target.split(".")[0] != root:
                continue
            where, other = f"{module}:{line}", [*target.split("."), ""][1]
            if other not in LEVEL:
                if other not in FROM_ROOT:
                    found.append(f"{where} imports {other or root!r} from the root package")
            elif other != part and LEVEL[other] >= LEVEL[part]:
                found.append(f"{where} imports {target}, which stands beside or above it")
    return found


def circles(package: Path) -> list[str]:
    """Find modules that import each other, directly or by way of others."""
    known = module_names(package)
    graph = {
        module: {target for target, _ in imports(module, path, known) if target in known and target != module}
        for module, path in known.items()
        if module != package.name
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def imports_of_tests(folder: Path) -> list[str]:
    """Find imports of test files and of conftest.py; what tests share belongs in a file of its own."""
    found = []
    for path in python_files(folder):
        for node in ast.walk(parse(path)):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(part == "conftest" or part.startswith("test_") for name in names for part in name.split(".")):
                found.append(f"{path.relative_to(folder)}:{node.lineno}")
    return found


def unknown_modules(package: Path, *paths: Path) -> list[str]:
    """Find imports of modules of the package that do not exist, also in strings that a test runs and in documents."""
    known, found = module_names(package), []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for module in re.findall(rf"(?:from|import|-m) ({package.name}(?:\.[a-z]\w*)+)", line):
                if module not in known:
                    found.append(f"{path}:{number} {module}")
    return found


ASSERTS = {"raises", "warns", "fail", "assert_close", "assert_allclose", "assert_array_equal"}
# Tests that fail by other means than an assertion that can be seen in the text.
EXPLAINED = {
    "test_law": "The laws of skimkv.testing assert; this test has them as a parameter.",
    "test_law_of_any_backend": "So has this one.",
    "test_python_blocks_compile": "compile() raises SyntaxError.",
}


def statements(function: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of a function, but not those of functions that are defined in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (*FUNCTION, ast.Lambda)):
            yield from statements(node)


class Calls(NamedTuple):
    """What a function does that matters here: the lines of its assertions, and the names that it calls, with lines."""

    asserts: list[int]
    calls: list[tuple[str, int]]


@functools.cache
def calls(function: ast.AST) -> Calls:
    """Return the assertions and calls of a function; the name of `pytest.raises(...)` is `raises`."""
    nodes = list(ast.walk(function))
    names = [(node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node.lineno) for node in nodes
             if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))]  # fmt: skip
    return Calls([node.lineno for node in nodes if isinstance(node, ast.Assert)], names)


def assertions(function: ast.AST, names: set[str]) -> list[int]:
    """Return the lines where a function asserts, or calls one of these names."""
    found = calls(function)
    return found.asserts + [line for name, line in found.calls if name in names]


def asserting_names(trees: list[ast.Module]) -> set[str]:
    """Return the names of functions that assert something, themselves or through another such function."""
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names, before = set(ASSERTS), -1
    while len(names) > before:
        before = len(names)
        names |= {function.name for function in functions if assertions(function, names)}
    return names


def empty_tests(folder: Path, *helpers: Path) -> list[str]:
    """Find tests that assert nothing, and tests that may return before they have asserted anything.

    A helper that asserts counts, wherever under `folder` or among `helpers` it is defined.
    """
    trees = {path: parse(path) for path in python_files(folder)}
    asserting = asserting_names([*trees.values(), *map(parse, helpers)])
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_") or node.name in EXPLAINED:
                continue
            where, lines = f"{path.relative_to(folder)}:{node.lineno} {node.name}", assertions(node, asserting)
            returns = [part.lineno for part in statements(node) if isinstance(part, ast.Return)]
            if not lines:
                found.append(f"{where} asserts nothing")
            elif returns and min(returns) < min(lines):
                found.append(f"{where} returns early")
    return found


def test_imports_run_downward_only() -> None:
    assert broken_order(PACKAGE) == []


def test_no_modules_import_each_other() -> None:
    assert circles(PACKAGE) == []


def test_no_test_imports_another() -> None:
    assert imports_of_tests(TESTS) + imports_of_tests(TRAINING) == []


def test_modules_that_are_named_exist() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert unknown_modules(PACKAGE, *python_files(PACKAGE, TESTS, TRAINING, ROOT / "benchmarks"), *documents) == []
    assert unknown_modules(TRAINING, *python_files(TRAINING), *documents) == []


def test_every_test_asserts_something() -> None:
    assert empty_tests(TESTS, *PACKAGE.glob("testing.py")) + empty_tests(TRAINING) == []


def write(folder: Path, files: dict[str, str]) -> Path:
    """Make a package in the folder from paths without their `.py` and texts."""
    package = folder / "skimkv"
    for name, text in {"__init__": "", **files}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


@pytest.mark.parametrize("statement", [
    "from ..methods import base",
    "from ..methods.base import Method",
    "from .. import methods",
    "import skimkv.methods.base",
    "def f():\n    from ..methods import base",
    "if TYPE_CHECKING:\n    from ..methods import base",
    "import_module('skimkv.methods.base')",
    "importlib.import_module(f'skimkv.methods.base')",
])  # fmt: skip
def test_an_upward_import_is_seen(tmp_path: Path, statement: str) -> None:
    downward = (
        "from ..stores import full\nfrom ..stores.full import Full\nfrom .. import __version__, spec\nimport torch"
    )
    package = write(tmp_path, {"stores/full": "", "methods/base": "", "spec": "", "ops/kernel": downward})
    assert broken_order(package) == []
    (package / "ops" / "kernel.py").write_text(statement)
    assert ["skimkv.ops.kernel" in line for line in broken_order(package)] == [True]


@pytest.mark.parametrize(("files", "words"), [
    ({"eval/run": "from ..bench import token", "bench/token": ""}, "eval.run:1 imports skimkv.bench.token"),
    ({"ops/kernel": "from .. import attach"}, "'attach' from the root package"),
    ({"ops/kernel": "import skimkv"}, "'skimkv' from the root package"),
    ({"other/main": ""}, "ORDER does not name 'other'"),
])  # fmt: skip
def test_a_sideways_or_unknown_import_is_seen(tmp_path: Path, files: dict[str, str], words: str) -> None:
    (line,) = broken_order(write(tmp_path, files))
    assert words in line


def test_a_circle_is_seen(tmp_path: Path) -> None:
    chain = {"ops/a": "from . import b", "ops/b": "def f():\n    from .c import g"}
    assert circles(write(tmp_path, {**chain, "ops/c": ""})) == []
    (line,) = circles(write(tmp_path, {**chain, "ops/c": "from .a import h"}))
    assert sorted(line.split(" imports ")[1:]) == ["skimkv.ops.a", "skimkv.ops.b", "skimkv.ops.c"]


@pytest.mark.parametrize("statement", ["from ops.test_gpu import case", "from . import test_gpu", "import conftest"])
def test_an_import_of_a_test_is_seen(tmp_path: Path, statement: str) -> None:
    folder = write(tmp_path, {"test_this": f"from support import kernels\n{statement}"})
    assert imports_of_tests(folder) == ["test_this.py:2"]


def test_a_module_that_does_not_exist_is_seen(tmp_path: Path) -> None:
    text = "f('from skimkv.methods import sparq')\n'python -m skimkv.methods.base'"
    package = write(tmp_path, {"methods/__init__": "", "methods/base": "", "cli/main": text})
    assert unknown_modules(package, *python_files(package)) == []
    (package / "cli" / "main.py").write_text(text.replace("base", "case"))
    assert unknown_modules(package, *python_files(package)) == [f"{package}/cli/main.py:2 skimkv.methods.case"]


def test_a_test_that_asserts_nothing_is_seen(tmp_path: Path) -> None:
    helper = "def check(x):\n    assert x\n\ndef twice(x):\n    check(x)"
    good = "def test_a():\n    assert 1\ndef test_b():\n    twice(1)\ndef test_c():\n    pytest.raises(E, f)"
    poor = "def test_d():\n    f()\ndef test_e(x):\n    if x:\n        return\n    assert x"
    poor += "\ndef test_f(x):\n    if x:\n        assert x\n        return\n    assert not x"
    folder = write(tmp_path, {"support/help": helper, "test_good": good, "test_poor": poor})
    assert empty_tests(folder) == ["test_poor.py:1 test_d asserts nothing", "test_poor.py:3 test_e returns early"]
