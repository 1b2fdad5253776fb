"""A small evaluation of the bundled model: a task, three methods, and the setup and job that run them."""

from __future__ import annotations

import functools
from typing import Any

import torch

import skimkv
from skimkv.eval import tasks
from skimkv.eval.plan import Job, Setup, plan_job
from skimkv.eval.results import Record, RecordKey
from skimkv.eval.run import Run
from skimkv.eval.timing import StepTimes

TASK = "record(lines=12, asked=3)"
SPECS = ("Dense()", "SparQ(r=8, k=16)", "LMInfinite(k=32)")


@functools.cache
def builtin() -> tuple[Any, Any]:
    """The bundled model and its tokenizer, loaded once."""
    torch.set_num_threads(1)  # the model is too small for two
    return skimkv.load("builtin")


def small_job(
    task: str = TASK, mode: str = "blind", specs: tuple[str, ...] = SPECS, limit: int = 6, **options: Any
) -> tuple[Setup, Job]:
    """A setup of the bundled model, by default with two rows in a batch, and a job of one task."""
    setup = Setup(*builtin(), "builtin", **{"batch": 2, **options})
    return setup, plan_job(setup, tasks.parse(task), mode, [skimkv.parse(spec) for spec in specs], None, limit)


def run_job(setup: Setup, job: Job, done: set[RecordKey] | None = None, times: StepTimes | None = None) -> list[Record]:
    """The records of a job that are not done; `times` takes their times."""
    return list(Run(setup, done or set(), times).records(job))


def eval_argv(out: Any, *options: str, limit: int = 6) -> list[str]:
    """The command line of `skimkv eval` that runs the same task by the same methods."""
    methods = [part for spec in SPECS for part in ("--method", spec)]
    return ["eval", "--task", TASK, "--batch", "2", "--limit", str(limit), "--out", str(out), *methods, *options]
