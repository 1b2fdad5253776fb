"""Time prompts and whole tokens beside llama.cpp: python benchmarks/rivals.py FOLDER --llama PATH [--file FILE ...]

Of each GGUF file, `skimkv bench generate --against` reads prompts, and `skimkv bench token --against` takes tokens
after as many cached ones as --length says. Without a file it writes slices of 8 layers of Llama 2 7B (Q8_0 and Q4_K_M)
and Llama 3 8B (Q4_K_M) into the folder, which take 4 GB, and runs `skimkv bench token --against` on each of them. A
result is one JSON file; what is there already is not measured again, so a run can be stopped and go on. At the end it
prints all results as one table. PATH is a llama-bench, --fork that of the SparQ authors' llama.cpp, which does not
support the grouped queries of Llama 3. Leave the machine alone meanwhile. docs/reproduce.md says how to build a
llama-bench that fills its cache: otherwise it reads a prompt for each of its two settings, which takes long.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skimkv.bench.shapes import MODELS as SIZES

MODELS = {
    "llama-2-7b-Q8_0": ("llama-2-7b", "Q8_0"),
    "llama-2-7b-Q4_K_M": ("llama-2-7b", "Q4_K_M"),
    "llama-3-8b-Q4_K_M": ("llama-3-8b", "Q4_K_M"),
}
LAYERS, LENGTHS = 8, (16384, 32768)
FILE_LENGTHS, FILE_PROMPTS = (64, 2048, 7000), (512, 2048)
PROMPT_ROUNDS = 3  # a prompt takes seconds
WRITER = Path(__file__).with_name("write_gguf.py")
BENCH = [sys.executable, "-m", "skimkv.cli", "bench"]


def commands(options: argparse.Namespace) -> Iterator[tuple[Path, list[list[str]]]]:
    """The file of every result, and the commands that make it: the last one prints it."""
    if options.file:
        yield from of_files(options)
        return
    for length in options.length or LENGTHS:
        for name in options.model or MODELS:
            shape, type = MODELS[name]
            sizes = SIZES[shape]
            programs = [f"llama.cpp={options.llama}"]
            if options.fork and sizes.heads == sizes.kv_heads:
                programs.append(f"fork={options.fork}")
            file = options.folder / f"{name}.gguf"
            write = [sys.executable, str(WRITER), str(file), "--shape", shape, "--layers", str(LAYERS), "--type", type]
            bench = [*BENCH, "token", "--model", str(file)]
            bench += ["--length", str(length), "--rounds", str(options.rounds), "--json"]
            bench += [word for program in programs for word in ("--against", program)]
            yield options.folder / f"{name}-{length}.json", [*([] if file.exists() else [write]), bench]


def of_files(options: argparse.Namespace) -> Iterator[tuple[Path, list[list[str]]]]:
    """The same for files that somebody has."""
    for file in options.file:
        of_all = ["--model", str(file), "--against", f"llama.cpp={options.llama}", "--json"]
        for prompt in FILE_PROMPTS:
            bench = [*BENCH, "generate", *of_all, "--length", f"{prompt}+8", "--rounds", str(PROMPT_ROUNDS)]
            yield options.folder / f"{file.stem}-prompt-{prompt}.json", [bench]
        for length in options.length or FILE_LENGTHS:
            bench = [*BENCH, "token", *of_all, "--length", str(length), "--rounds", str(options.rounds)]
            yield options.folder / f"{file.stem}-{length}.json", [bench]


def measure(result: Path, steps: Sequence[Sequence[str]]) -> str:
    """Run the commands, and keep what the last one prints. Returns the error of one that failed, "" otherwise."""
    done = None
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
    assert done is not None
    new = result.with_suffix(".new")
    new.write_text(done.stdout.splitlines()[-1] + "\n", encoding="utf-8")
    new.replace(result)
    return ""


def table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The lines of a Markdown table: milliseconds, their spread, and how many times as fast as llama.cpp."""
    yield "| file, tokens | | ms a token, or for the prompt | least to most | calls that count | to llama.cpp |"
    yield "|---|---|---|---|---|---|"
    for name, result in results.items():
        better = next(row["method"] for row in result["rows"] if row["better"])
        for row in result["rows"]:
            ms = "first_ms" if "first_speedup_rival" in row else "ms"
            ratio = row["first_speedup_rival"] if ms == "first_ms" else row["speedup_rivals"][better]
            yield (
                f"| {name} | `{row['method']}` | {row[ms]:.1f} | {row[f'{ms}_min']:.1f} to {row[f'{ms}_max']:.1f} | "
                f"{row['kept']} | {ratio:.2f}× |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, and print the table of all that is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where files and results are")
    parser.add_argument("--llama", type=Path, required=True, help="a llama-bench of llama.cpp")
    parser.add_argument("--file", type=Path, action="append", help="a GGUF file; may be given several times")
    parser.add_argument("--fork", type=Path, help="the llama-bench of the SparQ authors' fork")
    parser.add_argument("--model", choices=MODELS, action="append", help="a file; may be given several times")
    parser.add_argument("--length", type=int, action="append", help="cached tokens; may be given several times")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each candidate")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for result, steps in commands(options):
        if not result.exists() and (error := measure(result, steps)):
            print(f"{result.stem}: {error}", file=sys.stderr)
        if result.exists():
            results[result.stem] = json.loads(result.read_text(encoding="utf-8"))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
