"""`skimkv bench serve --engine vllm`: stock vLLM beside skimkv's methods, with the same bytes of cache and requests.

vLLM decides how many requests decode at once: as many as find blocks. Each comparison runs in a process of its own
(`vllm_engines`), whose engines take their steps in turns; vLLM reads its settings from the environment at its start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

from .. import ops
from ..methods import Dense, parse
from .machine import Call, Machine, nothing
from .models import random_llama
from .serve import default_methods
from .served_rows import BATCH, MEMORY, VLLM, Comparisons, Records, Setting, check_engine
from .vllm_engines import Job

PROGRAM = (sys.executable, "-m", "skimkv.bench.vllm_engines")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all engines live in the one process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def serve(machine: Machine, asked: Comparisons, requests: int, tick: Call = nothing) -> dict[str, Any]:
    """Return the rows of the JSON contract: for each (prompt, new), all engines with all requests, and at one batch.

    Raises ValueError, in one line, if shape or weights are unknown, if vLLM is not installed or runs on another device,
    or if an engine does not start.
    """
    shape, layers, weights, lengths, memory, methods, records = asked
    check_engine(VLLM, weights)
    rows: list[dict[str, Any]] = []
    backend = ops.select_backend(machine.device.type)[0]
    with Records(records, backend) as kept, tempfile.TemporaryDirectory() as folder:
        model = random_llama(shape, layers, weights, max(map(sum, lengths)))
        _write(model, folder)
        layers = len(model.model.layers)
        del model
        for prompt, new in lengths:
            specs = [repr(parse(spec)) for spec in methods or default_methods(prompt, new)]
            names = list(dict.fromkeys([VLLM, repr(Dense()), *specs]))
            same = {"requests": requests, "machine": machine.name}
            fields = {e: Setting(shape, layers, weights, prompt, new, memory, e, VLLM)._asdict() | same
                      for e in (MEMORY, BATCH)}  # fmt: skip
            job_methods = [None if name == VLLM else name for name in names]
            job = Job(folder, machine.device.type, weights, job_methods, prompt, new, memory, requests)
            wanted = [{**fields[e], "method": name} for e in fields for name in names]
            rows += kept.rows(wanted, partial(_measure, job, fields, machine.threads, tick))
    return {"machine": machine.name, "rows": rows}


def _measure(job: Job, fields: Mapping[str, dict[str, Any]], threads: int, tick: Call) -> list[dict[str, Any]]:
    """The rows of a job with their fields, and how many times as fast as stock vLLM they are."""
    measured = [fields[row["equal"]] | row for row in run(job, threads, tick)]
    stock = {row["equal"]: row["tokens_per_s"] for row in measured if row["method"] == VLLM}
    return [{**row, "ratio_stock": row["tokens_per_s"] / stock[row["equal"]]} for row in measured]


def _write(model: Any, folder: str) -> None:
    """Write the model's files, without the library's own progress bar."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging  # its functions have no types
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if has_bar:
            logging.enable_progress_bar()


def run(job: Job, threads: int, tick: Call = nothing) -> list[dict[str, Any]]:
    """Return the rows that the program measures; tick is called for each part that is done.

    Raises ValueError, in one line, if an engine does not start or the program ends without an answer.
    """
    environment = {**os.environ, **ENVIRONMENT}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)  # vLLM would take one
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        command = [*PROGRAM, json.dumps(job._asdict())]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as program:
            try:
                answer = _last_answer(program, tick)
            except BaseException:
                program.kill()
                raise
        log.seek(0)
        lines = log.read().split("\n")
    if answer is None:
        last = next((line for line in reversed(lines) if line.strip()), "no line on stderr")
        raise ValueError(f"vLLM ended with status {program.returncode}: {last.strip()}")
    if "error" in answer:
        raise ValueError(answer["error"])
    rows: list[dict[str, Any]] = answer["rows"]
    return rows


def _last_answer(program: subprocess.Popen[str], tick: Call) -> dict[str, Any] | None:
    """The object that the program writes at its end; None if it ended without one."""
    for line in program.stdout or ():
        answer: dict[str, Any] | None = json.loads(line)
        if answer is not None:
            return answer
        tick()
    return None
