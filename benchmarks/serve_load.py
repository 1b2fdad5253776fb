"""Load `skimkv serve` with clients that ask at the same time: python benchmarks/serve_load.py MODEL

For every number of --parallel a server is started on a free port, every client asks one streamed completion, all at
once, and the server is ended. Prompts are random tokens, or pieces of the files that --text names, different for every
client and the same for every server. Answers have all --new tokens, and are greedy unless there is a --temperature,
with which each client has a seed of its own. A table of the figures is printed, then whether the answers are the same:

    tokens/s   new tokens of all clients, over the time from the first request to the last token
    while decoding   the same without prompts: from the time at which every client has its first token to the first
        client's end, and of --parallel 1 from each client's first token to its last
    first token, p50 and p99   seconds from a client's request to its first piece of text
    between tokens, p50 and p99   milliseconds between two pieces of text of one client. A token that ends in the middle
        of a character comes with the next one, which happens often after random tokens: --text avoids it

With --cache-dir every server keeps its conversations there, and a second one is started afterwards, which is asked the
same: its row, `again`, tells how long a client waits where a file holds what was read of its prompt. In the first row,
the gaps between tokens hold what the writing of files took. The folder must not exist, and is deleted at the end.

The clients are threads of one process beside the server, which share its cores. Where skimkv is not installed, write
PYTHONPATH=src in front.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = (
    "--parallel", "tokens/s", "while decoding", "first token, p50 (s)", "p99 (s)", "between tokens, p50 (ms)",
    "p99 (ms)", "longest (ms)",
)  # fmt: skip


class Answered(NamedTuple):
    """What one client saw: when it asked, when each piece of text came, the text, and how many tokens it had.

    cached: how many of the prompt's tokens the server had read before.
    """

    asked: float
    times: list[float]
    text: str
    tokens: int
    cached: int


def ask(port: int, model: str, prompt: Sequence[int], new: int, end: int, sampling: dict[str, float]) -> Answered:
    """Ask for the completion of a prompt's tokens, which the token `end` cannot end, and read the stream to its end."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": new, "stream": True, **sampling,
        "stream_options": {"include_usage": True}, "logit_bias": {str(end): -100},
    }  # fmt: skip
    connection, asked = http.client.HTTPConnection("127.0.0.1", port, timeout=600), time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server answers {response.status}: {response.read().decode()}")
    times, pieces, usage = [], [], dict[str, Any]()
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise SystemExit(f"the server answers: {event['error']['message']}")
        if text := "".join(choice["text"] for choice in event.get("choices", [])):
            times.append(time.perf_counter())
            pieces.append(text)
        usage = event.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answered(asked, times, "".join(pieces), usage["completion_tokens"], cached)


def ask_all(
    port: int, model: str, prompts: Sequence[Sequence[int]], new: int, end: int, sampling: dict[str, float]
) -> list[Answered]:
    """Let a client ask each of the prompts, all at once."""
    answers: dict[int, Answered] = {}

    def client(i: int) -> None:
        answers[i] = ask(port, model, prompts[i], new, end, {**sampling, "seed": i})

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(answers) < len(prompts):
        raise SystemExit("some clients had no answer")
    return [answers[i] for i in range(len(prompts))]


def make_prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """The tokens of every client's prompt: pieces of the text, or random ones."""
    if arguments.text is None:
        draw = random.Random(0)
        return [
            [draw.randrange(10, arguments.vocabulary) for _ in range(arguments.prompt)]
            for _ in range(arguments.clients)
        ]
    from transformers import AutoTokenizer

    text = "\n".join(file.read_text() for file in arguments.text)
    tokens = AutoTokenizer.from_pretrained(arguments.model)(text)["input_ids"]
    if len(tokens) < arguments.clients * arguments.prompt:
        raise SystemExit(f"--text has {len(tokens)} tokens, not {arguments.clients} x {arguments.prompt}: name more")
    return [tokens[i * arguments.prompt : (i + 1) * arguments.prompt] for i in range(arguments.clients)]


def load(arguments: argparse.Namespace, parallel: int) -> list[Answered]:
    """Start a server that answers `parallel` requests together, load it, and end it."""
    argv = [
        sys.executable, "-m", "skimkv.cli", "serve", arguments.model, "--port", "0", "--method", arguments.method,
        "--parallel", str(parallel),
    ]  # fmt: skip
    kept = ["--conversations", str(arguments.clients), "--cache-dir", str(arguments.cache_dir)]
    argv += kept if arguments.cache_dir else ["--conversations", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        if "http://" not in first:
            raise SystemExit(f"the server did not start; try {' '.join(argv[2:])}")
        port, prompts = int(first.rpartition(":")[2].partition("/")[0]), make_prompts(arguments)
        end, sampling = arguments.end_token, {"temperature": arguments.temperature, "top_p": arguments.top_p}
        # The first tokens prepare the model's layers.
        ask_all(port, arguments.model, [prompts[0][:100]], 8, end, sampling)
        return ask_all(port, arguments.model, prompts, arguments.new, end, sampling)
    finally:
        process.terminate()  # which lets files be written
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def figures(parallel: int, answers: Sequence[Answered], what: str = "") -> list[str]:
    """The cells of a row of the table."""
    seconds = max(answer.times[-1] for answer in answers) - min(answer.asked for answer in answers)
    first = [answer.times[0] - answer.asked for answer in answers]
    gaps = [1e3 * (b - a) for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False)]
    rate = sum(answer.tokens for answer in answers) / seconds
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    together = [time for answer in answers for time in answer.times if begin <= time <= end]
    decoding = 1e3 / statistics.mean(gaps) if parallel == 1 else len(together) / (end - begin) if end > begin else 0
    return [
        f"{parallel}{what}", f"{rate:.1f}", f"{decoding:.1f}" if decoding else "-",
        f"{statistics.median(first):.1f}", f"{percentile(first, 99):.1f}",
        f"{statistics.median(gaps):.0f}", f"{percentile(gaps, 99):.0f}", f"{max(gaps):.0f}",
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--method", default="Dense()")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1536, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="the share of the likelihood that is sampled from")
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--text", type=Path, nargs="+", help="take the prompts from these files, one after the other")
    parser.add_argument("--vocabulary", type=int, default=1000, help="prompts are drawn from the first tokens")
    parser.add_argument("--end-token", type=int, default=2, help="the token that ends a text; it gets a bias of -100")
    parser.add_argument("--cache-dir", type=Path, help="a new folder, in which the servers keep conversations")
    arguments = parser.parse_args()
    if arguments.cache_dir and arguments.cache_dir.exists():
        parser.error(f"--cache-dir {arguments.cache_dir} exists: name a new folder")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    texts = []
    for parallel in arguments.parallel:
        answers = load(arguments, parallel)
        texts.append([answer.text for answer in answers])
        print("| " + " | ".join(figures(parallel, answers)) + " |", flush=True)
        if arguments.cache_dir:
            again = load(arguments, parallel)
            print("| " + " | ".join(figures(parallel, again, ", again")) + " |", flush=True)
            read = sum(answer.cached for answer in again)
            size = sum(file.stat().st_size for file in arguments.cache_dir.rglob("*") if file.is_file())
            shutil.rmtree(arguments.cache_dir)
            print(f"of the second server's prompts {read} tokens came from {size / 1e6:.0f} MB of files", flush=True)
    for parallel, own in zip(arguments.parallel[1:], texts[1:], strict=True):
        same = sum(a == b for a, b in zip(texts[0], own, strict=True))
        print(f"--parallel {parallel}: {same} of {len(own)} answers are those of --parallel {arguments.parallel[0]}")


if __name__ == "__main__":
    main()
