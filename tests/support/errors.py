"""Errors that a user meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(action: Callable[[], Any], *words: str) -> str:
    """Catches an error, and holds it to be one line that contains the given words."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        action()
    message = str(caught.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, message
    return message
