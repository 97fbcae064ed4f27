"""Every test runs torch on one thread: two on a busy machine are slower, and figures need a setting."""

import gc
import os
from collections.abc import Callable

import pytest
import torch

from specdec.model import packed_linear
from support.errors import refused

torch.set_num_threads(1)
os.environ.pop("COLUMNS", None)  # tables are as in a file
packed_linear.turn_amx_off()  # before a test of training allows it to decoding in the same process


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def one_line() -> Callable[..., str]:
    return refused
