"""vLLM's server with our plugin gets the requests that our own server is tested with."""

from __future__ import annotations

import os
import runpy
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skimkv
from support import vllm_engines as engines
from support.openai_requests import CASES, NAME, TEMPLATE, Case, Endpoint, Formula, check, describe

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A server of the bundled model, whose method reads all tokens of such short texts."""
    folder, example = tmp_path_factory.mktemp("server"), runpy.run_path(str(ROOT / "examples/vllm_processes.py"))
    script, template, port = folder / "serve.py", folder / "template.jinja", example["free_port"]()
    script.write_text(example["VLLM"])
    template.write_text(TEMPLATE)
    settings = "--enforce-eager --dtype float32 --max-model-len 2048 --max-num-seqs 4 --block-size 256".split()
    more = [*settings, "--served-model-name", NAME, "--chat-template", str(template), "--port", str(port)]
    command = example["command"](str(script), str(ROOT / "src/skimkv/models/tiny"), "Skim(k=512)", 1, more)
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "skimkv", "OMP_NUM_THREADS": "1"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # vLLM's log-probabilities would be compiled for a minute
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            endpoint = Endpoint("127.0.0.1", port)
            while not answers(endpoint):
                assert process.poll() is None, (folder / "log").read_text()[-5000:]
                time.sleep(1)
            yield endpoint
        finally:
            process.terminate()
            process.wait()


def answers(server: Endpoint) -> bool:
    """Whether a server has started."""
    try:
        return server.send("/health").status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def formula() -> Formula:
    torch.set_num_threads(1)
    return Formula(*skimkv.load("builtin"))


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_what_clients_send(server: Endpoint, formula: Formula, case: Case) -> None:
    check(server, formula, case, by_vllm=True)


def test_the_answers_are_those_of_the_plugin(server: Endpoint) -> None:
    """The steps of all answers above were skimkv's."""
    lines = server.send("/metrics").read().decode().splitlines()
    (steps,) = [float(line.split()[-1]) for line in lines if line.startswith("skimkv_steps_total{")]
    assert steps > 0
