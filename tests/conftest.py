"""Every test runs torch on one thread: two on a busy machine are slower, and figures need a setting."""

from collections.abc import Callable

import pytest
import torch

from support.errors import refused

torch.set_num_threads(1)


@pytest.fixture
def one_line() -> Callable[..., str]:
    return refused
