"""What the package promises before anything is run."""

import re
import subprocess
import sys

import pytest

import skimkv


def test_import_imports_nothing_else() -> None:
    code = (
        "import sys, skimkv; print(*(m for m in ('torch', 'transformers', 'matplotlib', 'rich') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.slow
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
