"""What the tests of the plugin share."""

from __future__ import annotations

import pytest

from support import vllm_engines as engines


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a small Llama with random weights."""
    return engines.write_model(tmp_path_factory.mktemp("llama"))
