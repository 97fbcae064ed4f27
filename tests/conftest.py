"""Every test runs torch on one thread: two on a busy machine are slower, and figures need a setting."""

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra.plugins.config_source import ConfigResult
from matplotlib.figure import Figure

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


@pytest.fixture(scope="session", autouse=True)
def one_plot_of_each_name() -> Iterator[None]:
    """Half the time of a short run is that of its plots: the first of each name is drawn, and later ones are copies of it."""
    savefig = Figure.savefig
    pngs: dict[str, bytes] = {}

    def save(figure: Figure, path: Any, **how: Any) -> None:
        if not isinstance(path, Path):
            savefig(figure, path, **how)
        elif path.name in pngs:
            path.write_bytes(pngs[path.name])
        else:
            savefig(figure, path, **how)
            pngs[path.name] = path.read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield


@pytest.fixture(scope="session", autouse=True)
def hydra_composes_once() -> Iterator[None]:
    """A script's config is composed once and not twice, from files that are read once: Hydra composes one more to learn
    `hydra.mode`, which no test gives. Processes that tests start leave Hydra as it is."""
    read = FileConfigSource.load_config
    results: dict[tuple[str, int], bytes] = {}

    def load_config(source: FileConfigSource, config_path: str) -> ConfigResult:
        path = Path(source.path, source._normalize_file_name(config_path))
        key = (str(path), path.stat().st_mtime_ns)
        if key not in results:
            results[key] = pickle.dumps(read(source, config_path))
        return pickle.loads(results[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        patch.setattr(FileConfigSource, "load_config", load_config)
        yield
