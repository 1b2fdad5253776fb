"""How often the error of Skim(error=E) exceeds E: python benchmarks/skim_error.py TEXT --model MODEL --tokens 2048

Dense attention reads pieces of a text (a file, or a folder of *.txt, each file a piece or more). Each method then
decodes the last tokens of every piece with the queries, keys and values that dense attention had there. Every query
head and step is one case; its error is |y - dense| / |dense|. The promise is that at most 5% of the cases exceed E.
Without a text, heads that are made up are measured: from sharp to flat, with outlier channels in the keys.

The table has, for every method: in how many cases the error exceeded E, by that much at its 99th percentile and in the
worst case, the mean of error / E, and the bytes that were counted, as a share of dense attention's. Where skimkv is not
installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from skimkv.analysis.output_error import CACHE_DTYPE, Heads, captured_heads, decode, percentile, synthetic_heads
from skimkv.eval.generate import encode_pieces
from skimkv.eval.tasks.source import find_texts, read_text
from skimkv.hf.load import load
from skimkv.methods import Dense, Skim

ERRORS = (0.05, 0.1, 0.2, 0.4)
COLUMNS = "method", "E", "cases", "exceeded", "mean / E", "99th / E", "worst / E", "bytes"


def pieces_of(texts: Path, tokenizer: object, tokens: int, count: int, skip: int) -> list[list[int]]:
    """`count` pieces of `tokens` tokens after the first `skip`: the first of every file, then the second, and so on."""
    of_files = [encode_pieces(tokenizer, read_text(path), tokens, skip + count) for path in find_texts(texts)]
    longest = max(map(len, of_files))
    return [pieces[i] for i in range(longest) for pieces in of_files if i < len(pieces)][skip : skip + count]


def heads_of(args: argparse.Namespace) -> Iterator[Heads]:
    """The heads that are measured."""
    if args.texts is None:
        yield synthetic_heads(args.steps, args.tokens)
        return
    model, tokenizer = load(args.model, dtype=torch.float32)
    pieces = pieces_of(args.texts, tokenizer, args.tokens, args.pieces, args.skip)
    if not pieces:
        raise SystemExit(f"{args.texts}: no text has {args.tokens} tokens")
    for piece in pieces:
        yield from captured_heads(model, [piece])


@torch.inference_mode()
def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="?", help="a text file or a folder of *.txt")
    parser.add_argument("--model", default="builtin", help="a folder, a GGUF file or an id")
    parser.add_argument("--tokens", type=int, default=2048, help="length of a piece")
    parser.add_argument("--pieces", type=int, default=2, help="how many pieces are read")
    parser.add_argument("--skip", type=int, default=0, help="how many pieces are left out before them")
    parser.add_argument("--steps", type=int, default=8, help="tokens at the end of a piece that are decoded")
    parser.add_argument("-k", type=int, nargs="*", default=[64], help="the fewest rows, Skim's k")
    args = parser.parse_args()
    methods = [Skim(k, error=error) for k in args.k for error in ERRORS]
    errors: list[list[torch.Tensor]] = [[] for _ in methods]
    moved, of_dense = [0] * len(methods), 0
    for heads in heads_of(args):
        dense, count = decode(Dense(), heads, args.steps, CACHE_DTYPE)
        of_dense += count
        for i, method in enumerate(methods):
            y, count = decode(method, heads, args.steps, CACHE_DTYPE)
            errors[i].append(((y - dense).norm(dim=-1) / dense.norm(dim=-1)).flatten())
            moved[i] += count
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for method, parts, count in zip(methods, errors, moved, strict=True):
        assert method.error is not None
        ratio = torch.cat(parts) / method.error
        cells = [
            f"`{method!r}`", f"{method.error:g}", f"{len(ratio)}", f"{(ratio > 1).float().mean():.2%}",
            f"{ratio.mean():.2f}", f"{percentile(ratio, 0.99):.2f}", f"{ratio.max():.1f}", f"{count / of_dense:.1%}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
