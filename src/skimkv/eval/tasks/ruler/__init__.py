"""RULER's 13 tasks (Hsieh et al. 2024, arXiv 2404.06654), by the recipe that their authors publish.

A module each has the templates of one kind of task, a function `make` that makes one sample from a random generator,
and the functions of every task. RECIPES says which arguments make which of the 13 out of them.

The length of a task is what the paper calls it: the tokens of the model at hand that the prompt and the tokens to
generate have together. The hay is fitted to it, example by example.
"""

from __future__ import annotations

from typing import Any

SUITE = "ruler"  # the name of all 13 together
_KEYS: dict[str, dict[str, Any]] = {
    "niah_single_1": {"hay": "noise"},
    "niah_single_2": {"hay": "essays"},
    "niah_single_3": {"hay": "essays", "value_kind": "uuids"},
    "niah_multikey_1": {"hay": "essays", "keys": 4},
    "niah_multikey_2": {"hay": "needles"},
    "niah_multikey_3": {"hay": "needles", "key_kind": "uuids", "value_kind": "uuids"},
    "niah_multivalue": {"hay": "essays", "values": 4},
    "niah_multiquery": {"hay": "essays", "keys": 4, "queries": 4},
}
# The name of a task: its module in tasks/, and the arguments of the module's `examples` that make it.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("ruler.niah", arguments) for name, arguments in _KEYS.items()},
    "vt": ("ruler.vt", {}),
    "cwe": ("ruler.cwe", {}),
    "fwe": ("ruler.fwe", {}),
    "qa_1": ("ruler.qa", {"corpus": "squad"}),
    "qa_2": ("ruler.qa", {"corpus": "hotpotqa"}),
}
WITHOUT_DATA = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
