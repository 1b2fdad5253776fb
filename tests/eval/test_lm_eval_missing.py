"""What the adapter of lm-evaluation-harness says where the harness is not installed."""

from __future__ import annotations

import runpy
import sys

import pytest


def test_the_harness_is_missing(monkeypatch):
    """One line that says what to install: an ImportError for who imports it, an exit for the program."""
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    for module in ("skimkv.lm_eval", "skimkv.eval.lm_eval"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    message = r"\Askimkv\.lm_eval needs the harness: pip install 'skimkv\[eval\]' [^\n]+\Z"
    with pytest.raises(ImportError, match=message):
        runpy.run_module("skimkv.lm_eval")
    with pytest.raises(SystemExit, match=message):
        runpy.run_module("skimkv.lm_eval", run_name="__main__")
