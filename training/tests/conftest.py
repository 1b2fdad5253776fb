"""What the tests of training share: one thread, a seed, a text, and the rows that are made of it."""

from __future__ import annotations

import pytest
import torch

from training import folder
from training.data import RowMaker
from training.tests.micro_model import random_text


@pytest.fixture(autouse=True)
def _threads_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text() -> str:
    return random_text()


@pytest.fixture(scope="session")
def maker(text: str) -> RowMaker:
    return RowMaker([text], folder.train_tokenizer([text], 300))
