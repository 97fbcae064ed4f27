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


# files of a minute or more, the longest first: one that starts late leaves the other workers idle at the end
LONG = (
    "test_exact", "test_engine", "test_engine_distribution", "test_train", "test_cli", "test_adaptive", "test_runs",
    "test_features", "test_checkpoint", "test_load", "test_draft_model", "test_notebooks", "test_parallel_decoding",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def one_line() -> Callable[..., str]:
    return refused
