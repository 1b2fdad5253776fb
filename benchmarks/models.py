"""Run every causal model family of the installed transformers as a tiny random model, and write down what was found.

    python benchmarks/models.py

It takes a few minutes, and writes src/skimkv/hf/families.json, which `skimkv info --models` prints, and the lists of
docs/models.md. A slow test runs the families again and compares.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from skimkv import Cache, detach
from skimkv.cli.output import progress_bar
from skimkv.hf.families import (
    DIFFERS,
    EQUAL,
    HEADINGS,
    NOT_RUN,
    PARTLY,
    REFUSED,
    Family,
    Record,
    counts,
    remarks,
)  # fmt: skip
from skimkv.hf.supported import model_layers, other_layers
from skimkv.hf.tiny_sizes import POSITIONS, VOCABULARY

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.random_models import families, random_model, tiny_configuration  # noqa: E402

FULL_BUDGETS = (
    "Dense()", "SparQ(r=16, k=128)", "TopK(k=128)", "LowRank(r=16, k=128)", "LMInfinite(k=128)", "H2O(k=128)",
    "SubGen(k=64, recent=64)",
)  # fmt: skip
PROMPT, NEW = 24, 12
MARK = "<!-- python benchmarks/models.py writes what follows -->\n\n"


def run_all(names: Iterable[str] | None = None, tick: Callable[[str], None] = lambda name: None) -> Record:
    """Run families, by default all that transformers has. tick: called with each name before it runs."""
    results = []
    for name in families() if names is None else names:
        tick(name)
        results.append(run(name))
    return Record(transformers.__version__, results)


def run(name: str) -> Family:
    """Make a tiny model of a family, and compare its own tokens with those of every method at full budget."""
    with _silence():
        try:
            model = random_model(tiny_configuration(name))
        except Exception as error:
            return Family(name, "", NOT_RUN, 0, 0, f"the library makes no tiny model of it: {_line(error)}", [])
        return run_model(name, model)


def run_model(name: str, model: PreTrainedModel) -> Family:
    """Compare a model's own tokens with those of every method at full budget. Its sliding windows must be small."""
    kind = type(model).__name__
    try:
        layers = model_layers(model, PROMPT + NEW)
        some = any(layer.supported for layer in layers)
    except ValueError as error:
        return Family(name, kind, REFUSED, 0, _count(model), _reason(kind, error), [])
    if not some and any(layer.window is not None for layer in layers):
        return _run_wide(name)
    decoded = sum(layer.supported for layer in layers)
    if not decoded:
        return Family(name, kind, REFUSED, 0, len(layers), "it has no layer of full attention", [])
    status, why, lacks = _compare(model)
    if status == EQUAL and decoded < len(layers):
        status, why = PARTLY, f"the other layers {' or '.join(other_layers(layers))}"
    return Family(name, kind, status, decoded, len(layers), why, lacks)


def _run_wide(name: str) -> Family:
    """Run a family whose attention layers all slide, with windows that cover all tokens."""
    kept = {"sliding_window", "attention_window_size", "sliding_window_size"}
    config = tiny_configuration(name)
    for part in (config, config.get_text_config(decoder=True)):
        for setting in kept:
            if isinstance(getattr(part, setting, None), int):
                setattr(part, setting, POSITIONS)
    model = random_model(config)
    kind = type(model).__name__
    try:
        layers = model_layers(model, PROMPT + NEW)
    except ValueError as error:
        return Family(name, kind, REFUSED, 0, _count(model), _reason(kind, error), [])
    decoded = sum(layer.supported for layer in layers)
    status, why, lacks = _compare(model)
    if status == EQUAL:
        status = EQUAL if decoded == len(layers) else PARTLY
        why = "its layers of attention slide, and are decoded while their window covers all tokens"
    return Family(name, kind, status, decoded, len(layers), why, lacks)


def _count(model: PreTrainedModel) -> int:
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    return count if isinstance(count, int) else 0


def _reason(kind: str, error: Exception) -> str:
    return _line(error).removeprefix(f"{kind} is not supported: ")


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def prompt(rows: int, n: int = PROMPT, seed: int = 0) -> Tensor:
    """Random tokens (rows,n), none of them special."""
    return torch.randint(3, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(seed))


def padded() -> dict[str, Tensor]:
    """A batch of two rows, the second of them padded on the left."""
    ids, mask = prompt(2), torch.ones(2, PROMPT, dtype=torch.long)
    ids[1, :11], mask[1, :11] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


MakeCache = Callable[[], Any]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def greedy(model: Any, make_cache: MakeCache) -> Tensor:
    """One text."""
    ids = prompt(1)
    tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=make_cache(), **GREEDY)
    return tokens


def padding(model: Any, make_cache: MakeCache) -> Tensor:
    """A batch of two texts of different length."""
    tokens: Tensor = model.generate(**padded(), past_key_values=make_cache(), **GREEDY)
    return tokens


def beam(model: Any, make_cache: MakeCache) -> Tensor:
    """Beam search."""
    ids, options = prompt(1), {"num_beams": 3, "num_return_sequences": 2, **GREEDY}
    tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=make_cache(), **options)
    return tokens


def conversation(model: Any, make_cache: MakeCache) -> Tensor:
    """Three turns on one cache."""
    cache, text = make_cache(), prompt(1)
    for turn in (prompt(1, 9, 1), prompt(1, 1, 2), prompt(1, 0)):
        mask = torch.ones_like(text)
        tokens = model.generate(text, attention_mask=mask, past_key_values=cache, **{**GREEDY, "max_new_tokens": 7})
        text = torch.cat([tokens, turn], 1)
    return text


def chunks(model: Any, make_cache: MakeCache) -> Tensor:
    """A prompt that is read in chunks, the last of one token."""
    ids, options = prompt(1, 22), {"prefill_chunk_size": 7, **GREEDY}
    tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=make_cache(), **options)
    return tokens


MODES: dict[str, Callable[[Any, MakeCache], Tensor]] = {
    "padded batch": padding, "beam search": beam, "a second turn": conversation, "a prompt in chunks": chunks,
}  # fmt: skip


def _compare(model: Any) -> tuple[str, str, list[str]]:
    """The status, the reason, and the ways to generate text that are not possible."""
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None

    def own() -> Any:
        """The library's cache."""
        return DynamicCache(config=model.config)

    def ours(spec: str) -> MakeCache:
        """What makes our cache with this method."""
        return lambda: Cache(model, spec, POSITIONS)

    lacks: list[str] = []
    try:
        expected = {"greedy": greedy(model, own).tolist()}
    except Exception as error:
        return NOT_RUN, f"the library's generate() fails on the tiny model: {_line(error)}", []
    for mode, generate in MODES.items():
        try:
            expected[mode] = generate(model, own).tolist()
        except Exception:
            lacks.append(mode)
    try:
        for spec in FULL_BUDGETS:
            if greedy(model, ours(spec)).tolist() != expected["greedy"]:
                return DIFFERS, f"{spec}: other tokens than the model's own attention", lacks
        for mode, generate in MODES.items():
            if mode in expected and generate(model, ours("Dense()")).tolist() != expected[mode]:
                return DIFFERS, f"{mode}: other tokens than the model's own attention", lacks
    except Exception as error:
        return DIFFERS, f"it fails: {type(error).__name__}: {_line(error)}", lacks
    finally:
        detach(model)
    return EQUAL, "", lacks


class _silence:
    """Switches the library's warnings off: a tiny model has many settings that are not worth a word."""

    def __enter__(self) -> None:
        self.level = transformers.utils.logging.get_verbosity()
        transformers.utils.logging.set_verbosity(logging.CRITICAL)
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: Any) -> None:
        self.caught.__exit__(*error)
        transformers.utils.logging.set_verbosity(self.level)


def to_json(record: Record) -> str:
    """The text of families.json: one family on a line."""
    lines = ",\n".join(json.dumps(family._asdict()) for family in record.families)
    return f'{{"transformers": "{record.transformers}", "families": [\n{lines}\n]}}\n'


def to_markdown(record: Record) -> str:
    """The lists of docs/models.md: first how many there are of each status, then a table for each."""
    parts = [f"Found with transformers {record.transformers}, {len(record.families)} families."]
    for status, number in counts(record).items():
        if not number:
            continue
        parts += [f"## {HEADINGS[status]}: {number}", "| family | model | layers | remarks |\n|---|---|---|---|"]
        rows = []
        for family in record.families:
            if family.status == status:
                layers = f"{family.decoded} of {family.layers}" if status == PARTLY else f"{family.layers or ''}"
                model = f"`{family.model}`" if family.model else ""
                rows.append(f"| {family.name} | {model} | {layers} | {remarks(family).replace('|', ' ')} |")
        parts[-1] += "\n" + "\n".join(rows)
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run all families, and write the record and the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    names = families()
    with progress_bar() as bar:
        task = bar.add_task("", total=len(names))
        record = run_all(names, lambda name: bar.update(task, description=name, completed=names.index(name)))
    (ROOT / "src/skimkv/hf/families.json").write_text(to_json(record), encoding="utf-8")
    page = ROOT / "docs/models.md"
    text = page.read_text(encoding="utf-8").partition(MARK)[0]
    page.write_text(text + MARK + to_markdown(record), encoding="utf-8")
    print(counts(record))


if __name__ == "__main__":
    main()
