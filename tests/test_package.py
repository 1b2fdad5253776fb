"""What the package promises before anything is run."""

import re
import subprocess
import sys

import pytest

import skimkv
from skimkv.eval.tasks import record


def test_import_imports_nothing_else() -> None:
    code = (
        "import sys, skimkv; print(*(m for m in ('torch', 'transformers', 'matplotlib', 'rich') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_methods_and_stores_need_no_transformers() -> None:
    code = "import sys, skimkv; skimkv.parse('SparQ(r=8, k=16)'); print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_export_and_method_is_there() -> None:
    for name in (*skimkv.__all__, *skimkv.METHODS):
        assert getattr(skimkv, name) is not None
        assert name in dir(skimkv)
    with pytest.raises(AttributeError, match="SparK"):
        getattr(skimkv, "SparK")  # noqa: B009


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", skimkv.__version__)


def test_bundled_model_is_whole() -> None:
    from importlib.resources import files

    tiny = files("skimkv.models") / "tiny"
    names = (
        "README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json".split()
    )
    assert [name for name in names if not (tiny / name).is_file()] == []


def test_record_asks_for_lines_that_are_there_once() -> None:
    (one, two), (again, _) = record.records(2, 50, 12, seed=3), record.records(2, 50, 12, seed=3)
    assert one == again
    assert one != two
    assert one.context.count("\n") == 50
    assert len({question for question, _ in one.questions}) == 12
    for question, answer in one.questions:
        assert one.context.count(question) == 1
        assert f"{question}{answer}\n" in one.context


def test_record_covers_the_whole_length() -> None:
    (only,) = record.records(1, 100, 10)
    keys = [line.split(" ")[0] for line in only.context.splitlines()]
    places = sorted(keys.index(question.strip()) // 10 for question, _ in only.questions)
    assert places == list(range(10))


@pytest.mark.parametrize(("lines", "asked"), [(10, 11), (10, 0), (36482, 5)])
def test_record_refuses(lines: int, asked: int) -> None:
    with pytest.raises(ValueError, match=f"asked = {asked}, lines = {lines}"):
        record.records(1, lines, asked)


@pytest.mark.parametrize(
    ("output", "right"), [("123\nx: 4", 1), ("123", 1), ("1234\n", 0), ("12", 0), ("", 0), ("\n123", 0)]
)
def test_record_score(output: str, right: int) -> None:
    assert record.right(output, "123") == right
