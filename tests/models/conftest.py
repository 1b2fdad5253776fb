"""What the tests of training share: a text, and the rows that are made of it."""

from __future__ import annotations

import pytest

from skimkv.models import folder
from skimkv.models.data import RowMaker
from support.training import random_text


@pytest.fixture(scope="session")
def text() -> str:
    return random_text()


@pytest.fixture(scope="session")
def maker(text: str) -> RowMaker:
    return RowMaker([text], folder.train_tokenizer([text], 300))
