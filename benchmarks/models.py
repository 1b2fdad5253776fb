"""Run every causal model family of the installed transformers as a tiny random model, and write down what was found.

    python benchmarks/models.py

It takes a few minutes, and writes src/skimkv/hf/families.json, which `skimkv info --models` prints, and the lists of
docs/models.md. A slow test runs the families again and compares.
"""

from pathlib import Path

from skimkv.cli.output import progress_bar
from skimkv.hf.families import counts, run_all, to_json, to_markdown
from skimkv.hf.tiny_models import families

ROOT = Path(__file__).parents[1]
MARK = "<!-- python benchmarks/models.py writes what follows -->\n\n"


def main() -> None:
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
