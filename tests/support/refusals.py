"""What is refused, is refused in one line."""

from collections.abc import Callable

import pytest


def refuses(call: Callable[[], object], match: str, error: type[Exception] = ValueError) -> None:
    """Assert that a call raises an error that matches, in one line of less than 600 characters."""
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
