"""vLLM's server with skimkv: one process, two that share the model, and two nodes, asked over HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import vllm_engines as engines

pytestmark = pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_processes_and_two_nodes_answer_as_one_process_does():
    model, spec = ROOT / "src/skimkv/models/tiny", "SparQ(r=8, k=64, mean_value=False)"
    settings = "--enforce-eager --dtype float32 --max-model-len 2048 --max-num-seqs 4 --block-size 256".split()
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    prompt = "the cat sat on the mat and " * 20
    result = subprocess.run(
        [sys.executable, ROOT / "examples/vllm_processes.py", model, prompt, spec, *settings],
        env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-5000:]
    answers = re.findall(r"^(one process|two processes|two nodes): (.*)$", result.stdout, re.M)
    assert [name for name, _ in answers] == ["one process", "two processes", "two nodes"]
    steps = re.findall(r"skimkv_steps_total\{.*rank=\"(\d)\"\} (\S+)", result.stdout)
    per_worker = 4.0 * 23  # layers, and tokens but the first
    assert [(rank, float(n)) for rank, n in steps] == [(rank, per_worker) for rank in "0" + "01" + "01"]
