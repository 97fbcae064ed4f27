"""Every test runs torch on one thread: two on a busy machine are slower, and figures need a setting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def refused(action: Callable[[], Any], *words: str) -> str:
    """Catches an error, and holds it to be one line that contains the given words."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        action()
    message = str(caught.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, message
    return message


@pytest.fixture
def one_line() -> Callable[..., str]:
    return refused
