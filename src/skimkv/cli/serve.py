"""`skimkv serve`: an OpenAI endpoint on one machine."""

from __future__ import annotations

import contextlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from . import options

SERVER_OPTIONS = "Server options"
REUSE_OPTIONS = "Options for the next turn of a conversation"
LOCAL = ("localhost", "::1")


def _check_origin(value: str) -> None:
    if value != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", value) is None:
        raise ValueError(f"--cors {value!r} must be an origin such as http://localhost:3000, or *")


def _check_key(value: str) -> None:
    if re.fullmatch(r"[!-~]{8,}", value) is None:
        raise ValueError(f"--api-key has {len(value)} characters; it must be 8 or more, printable ASCII without spaces")


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", callback=options.checked(partial(options.check_model, name="")),
            help="The model: builtin, a folder, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B.",
        ),
    ],
    method: options.Method = "Dense()",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    fast: options.Fast = True,
    device: options.Device = "cpu",
    host: Annotated[
        str,
        typer.Option(
            rich_help_panel=SERVER_OPTIONS,
            help="The address to listen on. With 0.0.0.0 other machines can connect; give an --api-key then.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, rich_help_panel=SERVER_OPTIONS, help="The port; with 0 a free one is chosen."),
    ] = 8000,
    parallel: Annotated[
        int,
        typer.Option(
            min=1, rich_help_panel=SERVER_OPTIONS,
            help="How many requests are answered together at most, each with a cache of its own. Others wait.",
        ),
    ] = 4,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", rich_help_panel=SERVER_OPTIONS, callback=options.checked(_check_key),
            envvar="SKIMKV_API_KEY", show_envvar=True,
            help="Refuse requests without the header 'Authorization: Bearer KEY', except those to /health.",
        ),
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            min=0, metavar="SECONDS", rich_help_panel=SERVER_OPTIONS,
            help="After SIGTERM or Ctrl-C, how long answers that have begun may take to finish.",
        ),
    ] = 5,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, rich_help_panel=SERVER_OPTIONS, show_default="the model's positions",
            help="The largest number of tokens of a prompt and its answer together.",
        ),
    ] = None,
    max_body: Annotated[
        str | None,
        options.size_option(
            "The largest body of a request, such as 4M. A larger one is refused before it is tokenised.",
            SERVER_OPTIONS, "1M, or 32 bytes for each token of --max-tokens if that is more",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", rich_help_panel=SERVER_OPTIONS, callback=options.checked(_check_origin),
            help="Let pages of this origin ask the server, such as http://localhost:3000, or * for all. May be given "
            "several times.",
        ),
    ] = None,
    conversations: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=REUSE_OPTIONS,
            help="How many conversations are kept, so that their next turn need not read their prompt again.",
        ),
    ] = 4,
    conversation_memory: Annotated[
        str,
        options.size_option(
            "The largest memory that the kept conversations take together, such as 500M or 2G.", REUSE_OPTIONS
        ),
    ] = "1G",
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel=REUSE_OPTIONS,
            help="Also keep conversations in files in this folder, so that they can continue after a restart.",
        ),
    ] = None,
    cache_dir_size: Annotated[
        str,
        options.size_option(
            "The largest total size of these files. The least recently used ones are removed first.", REUSE_OPTIONS
        ),
    ] = "10G",
) -> None:  # fmt: skip
    """Serve a model to OpenAI clients on this machine.

    Example:

        skimkv serve Qwen/Qwen3-0.6B --method "Skim(k=128)"

    Every request decodes with --method, in a cache of its own. Up to --parallel requests are answered together. For
    many clients, use skimkv's plugin for vLLM.
    """
    from ..hf.load import load

    options.check_formats(model, dtype, weights)
    largest = None if max_body is None else options.number_of_bytes("--max-body", max_body)
    if largest == 0:
        raise ValueError("--max-body 0 refuses every request; give a number of bytes such as 1M")
    from .. import serve as server

    server.check_installed()
    options.check_environment()
    options.quiet(model)
    memory, disk = (
        options.number_of_bytes(name, size)
        for name, size in (("--conversation-memory", conversation_memory), ("--cache-dir-size", cache_dir_size))
    )
    if cache_dir is not None and conversations == 0:
        raise ValueError(
            "--cache-dir with --conversations 0: nothing is kept that could be written; leave one of them out"
        )
    from ..methods import parse
    from ..serve.conversations import Conversations
    from ..serve.folder import Folder, claim
    from ..serve.generation import Generator

    parsed = parse(method)

    def log(line: str) -> None:
        """Write a line to stderr."""
        print(line, file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        reserved = stack.enter_context(server.reserve(host, port))  # before a model is loaded, which may take minutes
        if cache_dir is not None:
            stack.enter_context(claim(cache_dir))
        network, tokenizer = load(model, dtype=dtype, weights=weights, device=options.resolve_device(device), fast=fast)
        generator = Generator(network, parsed, Conversations(conversations, memory), max_tokens, log)
        if cache_dir is not None:
            generator.folder = Folder(cache_dir, disk, memory, network, parsed, generator.max_tokens, log)
        app = server.build_application(generator, tokenizer, model, cors or (), largest, parallel, api_key)
        opened = server.listen(host, port, reserved)
        shown = f"[{host}]" if ":" in host else host
        print(f"skimkv serves {model} with {parsed} at http://{shown}:{opened.getsockname()[1]}/v1", flush=True)
        if parallel > 1 and generator.alone:
            log(f"skimkv: --parallel {parallel} has no effect with this model: {generator.alone}")
        how_many = "one request" if parallel == 1 or generator.alone else f"up to {parallel} requests"
        print(f"It answers {how_many} at a time; others wait for their turn. Ctrl-C ends it.", flush=True)
        if api_key is None and host not in LOCAL and not host.startswith("127."):
            log("skimkv: warning: whoever can reach this address can use the model: give an --api-key")
        server.run(app, opened, grace)
