"""Write documents of three kinds for benchmarks/divergence.py: python benchmarks/divergence_texts.py DATA OUT

Each is a file OUT/KIND-NUMBER.txt with at least --tokens tokens of --model's tokenizer:

- wikitext: articles of DATA/wikitext-*.txt;
- code: modules of the standard library of the Python that runs this;
- chat: a chat in the model's own template, made of a data set and not recorded: a user quotes passages of
  DATA/squad.json, asks SQuAD's questions about each, and gets SQuAD's answers. No passage is in two chats. A model
  without a template gets "User: " or "Assistant: " before each turn, and an empty line after it.

A seed chooses among what is long enough. The texts are not ours: do not give OUT away. Where skimkv is not installed,
write PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from skimkv.eval.tasks import source
from skimkv.eval.tasks.bpc import split_articles
from skimkv.eval.tasks.kl import TOKEN_CHARACTERS
from skimkv.hf.load import load

PLAIN = "{% for turn in messages %}{{ turn.role.capitalize() }}: {{ turn.content }}\n\n{% endfor %}"
SPARE = 32  # tokens more than are asked for, so that a cut at the end of a text changes none of them


def articles(data: Path, draw: random.Random) -> Iterator[str]:
    """The articles of the folder's WikiText files, in random order."""
    texts = sorted(data.glob("wikitext-*.txt"))
    if not texts:
        raise ValueError(f"{data}: it holds no wikitext-*.txt")
    found = [article for text in texts for _, article in split_articles(source.read_text(text))]
    draw.shuffle(found)
    yield from found


def modules(draw: random.Random) -> Iterator[str]:
    """The modules of the standard library that are one file, in random order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    draw.shuffle(files)
    for file in files:
        yield source.read_text(file)


def chats(data: Path, draw: random.Random, tokenizer: Any, tokens: int) -> Iterator[str]:
    """Chats with at least so many tokens, of passages in random order; what is left at the end is no chat."""
    squad = json.loads(source.read_text(data / "squad.json"))["data"]
    passages = [passage for article in squad for passage in article["paragraphs"]]
    draw.shuffle(passages)
    turns: list[dict[str, str]] = []
    for passage in passages:
        for i, question in enumerate(passage["qas"]):
            asked = question["question"] if i else f"{passage['context']}\n\n{question['question']}"
            turns.append({"role": "user", "content": asked})
            turns.append({"role": "assistant", "content": question["answers"][0]["text"]})
        chat: str = tokenizer.apply_chat_template(turns, chat_template=tokenizer.chat_template or PLAIN, tokenize=False)
        if count(tokenizer, chat) >= tokens:
            yield chat
            turns = []


def count(tokenizer: Any, text: str) -> int:
    """How many tokens a text has."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def write(data: Path, out: Path, tokenizer: Any, tokens: int, documents: int, seed: int) -> None:
    """Write so many documents of each kind. Raises ValueError if a kind has too few that are long enough."""
    enough, draw = tokens + SPARE, random.Random(seed)
    kinds = {"wikitext": articles(data, draw), "code": modules(draw), "chat": chats(data, draw, tokenizer, enough)}
    out.mkdir(parents=True, exist_ok=True)
    for kind, texts in kinds.items():
        # longer texts would be cut into several documents
        cut = (text[: TOKEN_CHARACTERS * tokens] for text in texts)
        found = list(islice((text for text in cut if count(tokenizer, text) >= enough), documents))
        if len(found) < documents:
            raise ValueError(f"{kind}: {len(found)} documents have {enough} tokens, not {documents}: ask for fewer")
        for i, text in enumerate(found):
            (out / f"{kind}-{i}.txt").write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the documents; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with wikitext-*.txt and squad.json")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--model", default="builtin", help="builtin, a folder, or a Hugging Face id")
    parser.add_argument("--tokens", type=int, default=7064, help="that each document has at least")
    parser.add_argument("--documents", type=int, default=4, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice")
    args = parser.parse_args(argv)
    try:
        _, tokenizer = load(args.model)
        write(args.data, args.out, tokenizer, args.tokens, args.documents, args.seed)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
