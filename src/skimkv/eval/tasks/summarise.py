"""Summaries of CNN/DailyMail (SparQ Attention, appendix G.1.3) and XSum (the H2O paper).

The score is stemmed ROUGE-L F, 0 to 100. The output is cut at the reference's length in tokens.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import source
from .base import Example

UNIT, GREATEST = "100 ROUGE-L F1", 100.0
XSUM = ("###\nArticle: ", "\n\nSummarize the above article in 1 sentence.\n")  # around the articles of H2O's file


def examples(*, data: Path | None = None, seed: int = 0, corpus: str = "cnn") -> Iterator[Example]:
    """Give articles in random order, of 4000 to 8000 characters where they are CNN/DailyMail's.

    corpus: "cnn", or "xsum", whose summaries are one sentence. A file cnn.jsonl has `id`, `article` and `highlights`
    per line; xsum.jsonl is that of the H2O repository.
    """
    if corpus not in ("cnn", "xsum"):
        raise ValueError(f"summarise: corpus = {corpus!r} must be 'cnn' or 'xsum'")
    _rouge()  # if it is missing, this is said before a model runs
    path = source.find_file(data, f"{corpus}.jsonl")
    rows: list[dict[str, Any]] | Any
    if path is not None:
        rows = list(source.read_rows(path))
    elif corpus == "cnn":
        rows = source.load_from_hub("summarise", "cnn.jsonl", "abisee/cnn_dailymail", "3.0.0", split="validation")
    else:
        rows = source.load_from_hub("summarise", "xsum.jsonl", "EdinburghNLP/xsum", split="test")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    for i in order:
        row = rows[i]
        article = row.get("article", row.get("document"))
        summary = next((row[k] for k in ("highlights", "summary", "summary_gt") if k in row), None)
        if not isinstance(article, str) or not isinstance(summary, str):
            raise ValueError(f"{path}, line {i + 1}: needs an article and its highlights or summary_gt")
        article = article.removeprefix(XSUM[0]).removesuffix(XSUM[1])
        if corpus == "xsum" or 4000 <= len(article) <= 8000:
            yield Example(str(row.get("id", i)), article, "", (summary,), 0)


def prompt(example: Example) -> tuple[str, str]:
    """The article, and the word that asks for its summary."""
    return f"Article: {example.context}", "\nSummary:"


@functools.cache
def _rouge() -> Any:
    try:
        scorer: Any = importlib.import_module("rouge_score.rouge_scorer")
    except ImportError:
        raise ValueError("summarise is scored with rouge-score: pip install 'skimkv[eval]'") from None
    return scorer.RougeScorer(["rougeL"], use_stemmer=True)


def score(output: str, example: Example) -> float:
    """Compute ROUGE-L F between the output and the reference."""
    return 100 * float(_rouge().score(example.answers[0], output)["rougeL"].fmeasure)
