"""`skimkv generate`: continue a prompt with a method, and report what it cost."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options, output
from .errors import INTERRUPTED, fail

if TYPE_CHECKING:
    from ..eval.generate import Result
    from ..methods.base import Method as AnyMethod


LEAST_TEMPERATURE = 1e-6  # logits divided by less could exceed float32; the most likely token is taken anyway


def _check_temperature(value: float) -> None:
    if value != 0 and not LEAST_TEMPERATURE <= value < math.inf:
        raise ValueError(f"--temperature {value} must be 0, or at least {LEAST_TEMPERATURE}")


def generate(
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The prompt. Without --prompt and --prompt-file it is read from stdin."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        options.path_option(
            "--prompt-file", options.check_readable, "A text file (UTF-8) that holds the prompt.", None
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template first.")] = False,
    method: options.Method = "Dense()",
    compare: Annotated[
        bool, typer.Option("--compare", help="Run dense attention as well, and show where the two texts differ.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The largest number of tokens to generate.")] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            callback=options.checked(_check_temperature),
            help="Sampling temperature; at 0 the most likely token is always taken.",
        ),
    ] = 0.0,
    seed: Annotated[
        int, options.seed_option("Random seed of the sampling; without a temperature it has no effect.")
    ] = 0,
    model: options.Model = "builtin",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    fast: options.Fast = True,
    device: options.Device = "cpu",
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            rich_help_panel=options.MODEL_OPTIONS,
            help="Compile the model around our attention. The first token then takes up to a minute; on a CPU, PyTorch "
            "needs a C++ compiler.",
        ),
    ] = False,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the cache of the prompt in this file. If the file exists, load it instead of reading those "
            "tokens again; the prompt must begin with the same tokens, and model and method must be the same.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Continue a prompt with a method, and report what it cost.

    Example:

        skimkv generate --prompt "lamp: 31425, goat: 27182, lamp: " --method "SparQ(r=16, k=16)" --compare

    The text goes to stdout. Time per token, bytes moved per step and the cache's size go to stderr.
    """
    if prompt is not None and prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if prompt_cache is not None and compare:
        raise ValueError("--prompt-cache with --compare: a file holds the cache of one method; leave one of them out")
    if prompt_cache is not None and not prompt_cache.is_file():
        options.check_writable("--prompt-cache", prompt_cache)
    from ..hf.load import load

    options.check_formats(model, dtype, weights)
    if compile and (weights is not None or model.endswith(".gguf")):
        raise ValueError("--compile: a model with --weights or of a GGUF file cannot be compiled")
    text = _read_prompt(prompt, prompt_file)
    options.check_environment()
    options.quiet(model)
    from ..methods import parse

    parsed = parse(method)
    network, tokenizer = load(model, dtype=dtype, weights=weights, device=options.resolve_device(device), fast=fast)
    from ..eval import generate as generation  # after `load`, which finds mistakes before it imports transformers

    ids = generation.encode(tokenizer, text, chat)

    def run(method: AnyMethod) -> Result:
        """Generate with this method; without --json the text streams to stdout and its cost goes to stderr."""
        if compare and not as_json:
            print(f"--- {method}")
        line = ""  # which the cursor stands on

        def write(text: str) -> None:
            """Print a piece of the text, unless the text belongs to the JSON object."""
            nonlocal line
            if not as_json:
                print(text, end="", flush=True)
                line = (line + text).rpartition("\n")[2]

        try:
            result = generation.run(
                network, tokenizer, ids, method, max_new_tokens, temperature, seed, write,
                compile=compile, prompt_cache=prompt_cache,
            )  # fmt: skip
        except Exception:
            if line:
                print(flush=True)  # the message on stderr has a line of its own
            raise
        if as_json:
            return result
        print("" if result.text.endswith("\n") else "\n", end="")
        print(result.line(), file=sys.stderr)
        return result

    result = run(parsed)
    answer: dict[str, Any] = result.json()
    interrupted = result.interrupted
    if compare and not interrupted:
        dense = run(parse("Dense()"))
        interrupted = dense.interrupted
        differs_at = generation.first_difference(result.text, dense.text)
        answer["compare"] = {"dense": dense.json(), "differs_at": differs_at}
        if not as_json:
            print(_difference(result.text, dense.text, differs_at))
            if differs_at is not None and network.dtype.itemsize < 4:
                name = str(network.dtype).removeprefix("torch.")
                print(f"    In {name} rounding alone can part two texts: --dtype float32 tells it from the method.")
    if as_json:
        output.print_json(answer)
    return fail("interrupted", INTERRUPTED) if interrupted else 0


def _difference(text: str, dense: str, differs_at: int | None) -> str:
    """Where the method's text leaves dense attention's, for a person."""
    if differs_at is None:
        return f"--- the texts are equal, all {len(text)} characters"
    start = max(0, differs_at - 20)
    return (
        f"--- the texts part at character {differs_at}, after {text[start:differs_at]!r}:\n"
        f"    method: {text[differs_at : differs_at + 40]!r}\n"
        f"    dense:  {dense[differs_at : differs_at + 40]!r}"
    )


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from --prompt, --prompt-file or stdin. Raises ValueError if it is empty or not UTF-8 text."""
    if prompt is None:
        if file is None and sys.stdin is None:
            raise ValueError("stdin is closed; give --prompt or --prompt-file")
        if file is None and sys.stdin.isatty():
            print("Type the prompt; Ctrl-D on an empty line ends it.", file=sys.stderr)
        try:
            prompt = (file.read_bytes() if file is not None else sys.stdin.buffer.read()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            where = f"{error.reason} at byte {error.start}"
            raise ValueError(f"{file or 'stdin'}: not UTF-8 text ({where})") from None
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python passes on bytes that are not UTF-8
        raise ValueError("--prompt: not UTF-8 text")
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    return prompt
