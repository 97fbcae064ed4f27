"""Several processes that share the work of a script: what they write together is what one writes alone, also when they are
killed and one goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec import artifact
from specdec.config import CONF
from specdec.measure.records import part
from support.cli import call, rows_of
from support.processes import ended, fork, fork_ranks, started_ranks, wait_for_lines

ROOT = CONF.parent
EVAL = ["experiment=tiny", "limit=7", "sampling.max_tokens=40", "method=ngram", "max_batch_size=2"]
PREPARE = ["model=tiny_trained", "synthesize.count=4", "synthesize.max_tokens=60", "answers.max_tokens=60", "max_batch_size=1"]
EXTRACT = ["model=tiny", "data.limit=12", "shard_mb=0"]


def script(name: str) -> Path:
    return ROOT / f"{name}.py"


def numbers(path: Path) -> list[dict[str, Any]]:
    """The rows of a run, without its times."""
    return [
        {
            key: value
            for key, value in row.items()
            if not key.endswith("_s") and "per_s" not in key and key not in ("batch_size", "speedup")
        }
        for row in rows_of(path)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes."""
    directory = tmp_path_factory.mktemp("alone")
    assert call("run", *EVAL, "out_dir=run", cwd=directory).code == 0
    for name, arguments in (("prepare", [*PREPARE, "out=data.jsonl"]), ("extract", [*EXTRACT, "out_dir=hidden"])):
        done = ended(fork(script(f"train/{name}"), *arguments, cwd=directory))
        assert done.code == 0, done.err
    return directory


def test_eval(alone: Path, tmp_path: Path) -> None:
    done = fork_ranks(script("eval/run"), *EVAL, "out_dir=run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("written to") == done.out.count("lossless: yes, 9 of 9") == 1
    for name in ("requests.jsonl", "baseline.jsonl"):
        assert numbers(tmp_path / "run" / name) == numbers(alone / "run" / name)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data_parallel_size"] == 2
    assert not list((tmp_path / "run").glob("*part-*")), "every row is in the run's own files"


def test_eval_of_two_groups(alone: Path, tmp_path: Path) -> None:
    """Each with a target that is in two."""
    done = fork_ranks(script("eval/run"), *EVAL, "tensor_parallel_size=2", "out_dir=run", cwd=tmp_path, size=4)
    assert done.code == 0, done.err
    rows = [numbers(path / "run" / "requests.jsonl") for path in (tmp_path, alone)]
    assert rows[0] == rows[1]


def test_eval_goes_on_alone(alone: Path, tmp_path: Path) -> None:
    with started_ranks(script("eval/run"), *EVAL, "out_dir=run", cwd=tmp_path) as ranks:
        first_file = tmp_path / "run" / "requests.jsonl"
        wait_for_lines(first_file, 1, ranks[0])
        wait_for_lines(part(first_file, 1), 1, ranks[1])
        for process in ranks:
            process.kill()
        for process in ranks:
            ended(process)
    kept = rows_of(first_file) + rows_of(part(first_file, 1))
    done = call("run", *EVAL, "out_dir=run", "resume=true", cwd=tmp_path)
    assert done.code == 0, done.error
    assert numbers(first_file) == numbers(alone / "run" / "requests.jsonl")
    assert all(row in rows_of(first_file) for row in kept), "nothing was decoded again"


def test_prepare(alone: Path, tmp_path: Path) -> None:
    done = fork_ranks(script("train/prepare"), *PREPARE, "out=data.jsonl", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("written to data.jsonl") == 1
    for name in ("data.jsonl", "data.jsonl.prompts.jsonl"):
        assert (tmp_path / name).read_bytes() == (alone / name).read_bytes()


def test_prepare_goes_on_alone(alone: Path, tmp_path: Path) -> None:
    first_file = tmp_path / "data.jsonl"
    with started_ranks(script("train/prepare"), *PREPARE, "out=data.jsonl", cwd=tmp_path) as ranks:
        wait_for_lines(part(first_file, 1), 1, ranks[1])
        for process in ranks:
            process.kill()
        for process in ranks:
            ended(process)
    done = ended(fork(script("train/prepare"), *PREPARE, "out=data.jsonl", "resume=true", cwd=tmp_path))
    assert done.code == 0, done.err
    assert first_file.read_bytes() == (alone / "data.jsonl").read_bytes()


def samples(directory: Path) -> dict[str, str | None]:
    """The hash of everything that is stored of a sample, by its id."""
    return {
        location.id: location.sha256 for path in directory.glob("*.safetensors") for location, _ in artifact.locations(path)
    }


def test_extract(alone: Path, tmp_path: Path) -> None:
    done = fork_ranks(script("train/extract"), *EXTRACT, "out_dir=hidden", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("12 samples computed, 0 were there") == 1
    assert samples(tmp_path / "hidden") == samples(alone / "hidden")


def test_what_cannot_be_shared(tmp_path: Path) -> None:
    few = fork_ranks(script("eval/run"), "experiment=tiny", "task.path=one.jsonl", "task=jsonl", cwd=tmp_path)
    assert "task.path=one.jsonl: no such file" in few.err
    (tmp_path / "one.jsonl").write_text('{"prompt": "alone"}\n')
    few = fork_ranks(script("eval/run"), "experiment=tiny", "task.path=one.jsonl", "task=jsonl", cwd=tmp_path)
    assert "error: 2 processes for a task of 1 rows; start at most one for each" in few.err
    choose = fork_ranks(script("eval/choose"), "experiment=tiny", cwd=tmp_path)
    assert "error: torchrun has started 2 processes, and choose.py works in one; leave torchrun out" in choose.err
    uneven = fork_ranks(script("eval/run"), "experiment=tiny", "tensor_parallel_size=2", cwd=tmp_path, size=3)
    assert "error: tensor_parallel_size=2, and 3 processes were started; type torchrun --nproc_per_node 2" in uneven.err
