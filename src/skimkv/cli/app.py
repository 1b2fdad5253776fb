"""The command line, its other commands in *_cli.py. Errors are one line on stderr and exit status 2.

With --json the last line on stdout is one JSON object, and nothing else is printed there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import analyse as analyse_cli
from . import bench as bench_cli
from . import eval as eval_cli
from . import plot as plot_cli
from . import roofline as roofline_cli
from . import tune as tune_cli

app = typer.Typer(
    help="Decode with a small part of the key-value cache, and know exactly how many bytes it took.",
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip
app.add_typer(bench_cli.app, name="bench")
app.command("eval")(eval_cli.evaluate)
app.command("plot")(plot_cli.plot)
app.command("tune")(tune_cli.tune)
app.command("analyse")(analyse_cli.analyse)
app.command("roofline")(roofline_cli.roofline)
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")]


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return carry_out(app, "skimkv", argv)


def carry_out(commands: typer.Typer, name: str, argv: list[str] | None = None) -> int:
    """Run a command; its exit status: 0, 2 for a mistake, 130 after Ctrl-C."""
    try:
        status = commands(argv, prog_name=name, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except (ValueError, OSError) as error:
        return _fail(str(error))
    except Exception as error:
        usage: Callable[[], str] | None = getattr(error, "format_message", None)
        if usage is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(usage(), file=sys.stderr)
            return 2
        return _fail(usage())
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int = 2) -> int:
    print("skimkv:", " ".join(message.split()), file=sys.stderr)
    return status


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the figure goes.")] = Path("skimkv-demo.png"),
    lines: Annotated[int, typer.Option(help="Lines of the record, about 15 tokens each.")] = 190,
    asked: Annotated[int, typer.Option(help="Lines asked for.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the record.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask a small model for lines of a long record, with every method at matched budgets. Needs no network."""
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    eval_cli.quiet("builtin")
    import torch

    from ..eval import demo as the_demo
    from ..eval import figures as plots
    from . import show

    torch.set_num_threads(1)  # the model is too small to gain from more

    run = the_demo.Demo(lines, asked, seed)
    plan, missed = run.plan()
    tokens = run.prompt.shape[1]
    setting = f"a record of {lines} lines, {tokens} tokens; {asked} lines asked for after it"
    console = Console(stderr=as_json)
    console.print(f"Bundled model, {run.where}: {setting}.", highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        job = bar.add_task("asking", total=len(plan) * asked)
        rows = list(run.rows(plan, lambda: bar.advance(job)))
    finding = the_demo.finding(rows)
    plots.quality([row.point() for row in rows], out, *show.title(rows, setting))
    if as_json:
        print(json.dumps({"rows": [row.json() for row in rows], "figure": str(out)}))
        return
    show.table(rows, missed)
    print(f"{finding}\nFigure: {out}")


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="builtin, a folder, a GGUF file, or a Hugging Face id.")] = "builtin",
    method: Annotated[str, typer.Option(help="For example 'SparQ(r=32, k=128)'; see skimkv info.")] = "Dense()",
    prompt: Annotated[str | None, typer.Option(help="The prompt; without it and --prompt-file, stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file that holds the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's turn of a chat.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run dense as well; show where the texts part.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else the checkpoint's.")] = None,
    weights: Annotated[str | None, typer.Option(help="int8: quantise as they are read; GGUF files are.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    as_json: Json = False,
) -> int:
    """Continue a prompt with a method, and say what it cost."""
    from ..methods import parse

    wanted = parse(method)
    text = _prompt(prompt, prompt_file)
    eval_cli.quiet(model)
    from ..eval import generate as generation
    from ..hf.attach import load

    network, tokenizer = load(model, dtype=dtype, weights=weights)
    ids = generation.encode(tokenizer, text, chat)

    def one(which: Any, heading: str) -> generation.Result:
        write = (lambda text: None) if as_json else (lambda text: print(text, end="", flush=True))
        if compare and not as_json:
            print(heading)
        done = generation.run(network, tokenizer, ids, which, max_new_tokens, temperature, seed, write)
        if not as_json:
            print("" if done.text.endswith("\n") else "\n", end="")
            print(done.line(), file=sys.stderr)
        return done

    result = one(wanted, f"--- {wanted}")
    answer = result.json()
    interrupted = result.interrupted
    if compare and not interrupted:
        dense = one(parse("Dense()"), "--- Dense()")
        interrupted, at = dense.interrupted, generation.part(result.text, dense.text)
        answer["compare"] = {"dense": dense.json(), "differs_at": at}
        if not as_json:
            print(_difference(result.text, dense.text, at))
    if as_json:
        print(json.dumps(answer))
    return _fail("interrupted", 130) if interrupted else 0


def _difference(text: str, dense: str, at: int | None) -> str:
    if at is None:
        return f"--- the texts are equal, all {len(text)} characters"
    start = max(0, at - 20)
    return (
        f"--- the texts part at character {at}, after {text[start:at]!r}:\n"
        f"    method: {text[at : at + 40]!r}\n    dense:  {dense[at : at + 40]!r}"
    )


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if prompt is not None:
        return prompt
    try:
        data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file or 'stdin'}: not UTF-8 text ({error.reason} at byte {error.start})") from None


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, devices, backends and methods."""
    from . import show

    facts = show.facts()
    if as_json:
        print(json.dumps(facts))
    else:
        show.info(facts)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from .. import __version__

        print(f"skimkv {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    sys.exit(main())
