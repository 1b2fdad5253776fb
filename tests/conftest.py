"""Settings for all tests: where the kernels run, threads, seeds, and the backends that a test can ask for."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import settings

import skimkv

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the GPU kernels run in Triton's interpreter; read when they are defined
if "SKIMKV_LIBRARY" in os.environ:  # a folder with another build of the kernels: make sanitize
    skimkv.__path__.insert(0, os.environ["SKIMKV_LIBRARY"])

from skimkv import ops

settings.register_profile("repeatable", derandomize=True, deadline=None)  # the same examples on every machine
settings.load_profile("repeatable")

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # as the command line: read once, when transformers is imported
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _threads_and_seed():
    torch.set_num_threads(1)  # tiny shapes: a second thread only waits; kernel tests ask for more
    # torch.manual_seed() keeps the stack for every kind of device that is not there: 1.4 ms a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="PyTorch sees no CUDA device"))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what imports and collection left, which takes it half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Escape what is no UTF-8 in captured output, which a process of xdist could not send to its parent."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def backends() -> list[str]:
    """Return the backends that a test of the fixture `backend` runs with: ref, and cpu where its library was built."""
    return ["ref", "cpu"] if ops.select_backend("cpu")[0] == "cpu" else ["ref"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", backends(), indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest):
    """Run the test on one backend; give its name."""
    with ops.backend(request.param):
        yield request.param
