"""Run every causal model family of the installed transformers as a tiny random model, and write down what was found.

    python benchmarks/models.py

It takes a few minutes, and writes src/skimkv/hf/families.json, which `skimkv info --models` prints, and the lists of
docs/models.md. A slow test runs the families again and compares.
"""

from __future__ import annotations

import json
from pathlib import Path

from skimkv.cli.output import progress_bar
from skimkv.hf.families import HEADINGS, PARTLY, Record, counts, remarks, run_all
from skimkv.hf.tiny_models import families

ROOT = Path(__file__).parents[1]
MARK = "<!-- python benchmarks/models.py writes what follows -->\n\n"


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
