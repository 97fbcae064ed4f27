"""The scripts of eval/, as a user meets them: what they write, what they refuse and in which words, what survives a crash.

A call costs seconds as a process of its own (torch is imported) and a tenth as `runpy` within this one, so processes are
started only where that is the point: an exit code, a signal, a home directory.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec import config, engine, stats, tasks, track
from specdec.config import CONF, read
from specdec.target import CausalLM

EVAL = CONF.parent / "eval"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
SMALL = ("experiment=tiny", "limit=2", "sampling.max_tokens=8")
# `tiny` drafts for itself, so at temperature 0 every draft stands
SELF = ("method=draft_model", "method.model=tiny")


@dataclass
class Done:
    """What a process leaves: exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that it failed with."""
        assert self.code != 0, self.out
        said = self.err.strip()
        assert len(said.splitlines()) == 1, f"more than one line:\n{said}"
        assert said.startswith("error: "), said
        return said


Cli = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call a script in this process as `python eval/NAME.py ARGUMENTS` from another directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def call(name: str, *arguments: object, folder: Path = EVAL) -> Done:
        script = folder / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:  # what the interpreter makes of it
            code = ended.code
        out, err = capsys.readouterr()
        if isinstance(code, str):
            code, err = 1, f"{err}{code}\n"
        return Done(code or 0, out, err)

    return call


def start(*arguments: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EVAL / "run.py"), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env={**os.environ, **OFFLINE, **env}, **pipes)


def ended(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs(out_dir: Path, name: str = "requests") -> dict[str, list[int]]:
    return {row["id"]: row["output_token_ids"] for row in rows_of(out_dir / f"{name}.jsonl")}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tasks(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


# ------------------------------------------------------------------------------------------- what a run writes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done, Path]:
    """A run as a process of its own, called from a directory that has nothing to do with the repository."""
    cwd, out_dir = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("finished") / "run"
    return out_dir, ended(start(*SMALL, *SELF, f"out_dir={out_dir}", cwd=cwd)), cwd


def test_a_run_writes_its_files_and_nothing_else(finished: tuple[Path, Done, Path]) -> None:
    out_dir, done, cwd = finished
    assert done.code == 0, done.err
    names = {"requests.jsonl", "baseline.jsonl", "summary.json", "config.yaml", "run.json", "run.png"}
    assert {path.name for path in out_dir.iterdir()} == names
    assert list(cwd.iterdir()) == [], "no outputs/, no .hydra/ where it was called"
    assert "Traceback" not in done.err


def test_a_run_prints_a_table_and_its_proof(finished: tuple[Path, Done, Path]) -> None:
    _, done, _ = finished
    columns = ("category", "requests", "mean acceptance", "tokens/step", "tokens/s", "speedup", "model", "efficiency")
    assert all(word in done.out for word in columns), done.out
    assert all(name in done.out for name in ("chat", "code", "all"))
    assert "lossless: yes, 4 of 4 outputs equal plain decoding" in done.out
    assert "none" in done.err, "progress is shown, and kept apart from the results"
    assert "draft_model" in done.err


def test_a_row_says_all_about_its_request(finished: tuple[Path, Done, Path]) -> None:
    out_dir = finished[0]
    chosen = {task.id: task for task in tasks.load(tasks.DEMO, 2)}
    rows = rows_of(out_dir / "requests.jsonl")
    assert {row["id"] for row in rows} == {f"{t.id}/{turn + 1}" for t in chosen.values() for turn in range(len(t.turns))}
    for row in rows:
        assert row["prompt_id"] in chosen
        assert row["category"] == chosen[row["prompt_id"]].category
        assert (row["method"], row["rejection"], row["lossless"]) == ("draft_model", "standard", True)
        assert row["num_speculative_tokens"] == 3
        assert row["sampling"]["temperature"] == 0.0
        assert row["sampling"]["max_tokens"] == 8
        assert isinstance(row["seed"], int)
        assert row["finish_reason"] == "length"
        assert row["stop_reason"] is None
        assert isinstance(row["text"], str)
        assert len(row["output_token_ids"]) == row["num_output_tokens"] == 8
        # a token from prefill, then 3 drafts and a bonus, then what is left: 3 tokens, of which a draft is 2
        assert row["drafted"] == row["accepted"] == [3, 2]
        assert row["emitted"] == [4, 3]
        assert row["batch_size"] == [1, 1]
        assert all(len(row[key]) == 2 and min(row[key]) > 0 for key in ("draft_s", "verify_s"))
        assert 0 < row["prefill_s"] <= row["time_to_first_token_s"]
        assert row["decode_s"] >= sum(row["draft_s"]) + sum(row["verify_s"]) - 1e-9
        own = stats.RequestStats(**{key: row[key] for key in (*track._LISTS, *track._TIMES)})
        assert {key: row[key] for key in stats.request_metrics(own)} == stats.request_metrics(own)
    for row in rows_of(out_dir / "baseline.jsonl"):
        assert (row["method"], row["num_speculative_tokens"]) == ("none", 0)
        assert row["drafted"] == [0] * 7
    assert outputs(out_dir) == outputs(out_dir, "baseline")


def test_the_summary_follows_from_the_rows(finished: tuple[Path, Done, Path]) -> None:
    out_dir = finished[0]
    summary = json.loads((out_dir / "summary.json").read_text())
    assert summary["target"] == "tiny-llama"
    assert summary["method"] == "draft_model"
    assert summary["rejection"] == "standard"
    assert summary["lossless"] is True
    assert summary["num_speculative_tokens"] == 3
    assert set(summary["verify_cost"]) == {"1", "2", "3", "4"}
    assert summary["verify_cost"]["1"] == 1.0
    assert {"torch", "transformers", "python", "processor", "num_threads"} <= set(summary["environment"])
    overall = summary["overall"]
    assert (overall["num_requests"], overall["num_steps"], overall["num_drafts"]) == (4, 8, 8)
    assert overall["num_draft_tokens"] == overall["num_accepted_tokens"] == 4 * 5
    assert overall["mean_acceptance_length"] == 1 + 20 / 8
    assert overall["tokens_per_step"] == overall["speedup_ideal"] == 28 / 8
    assert overall["acceptance_rate_per_position"] == [1.0, 1.0, 0.5]
    assert overall["conditional_acceptance_per_position"] == [1.0, 1.0, 1.0]
    speed, baseline = overall["decode_tokens_per_s"], overall["baseline_tokens_per_s"]
    assert overall["speedup"] == pytest.approx(speed / baseline)
    assert overall["efficiency"] == pytest.approx(overall["speedup"] / overall["speedup_model"])
    assert overall["tokens_per_step_over_requests"]["num_requests"] == 4
    parts = summary["categories"].values()
    for key in ("num_requests", "num_steps", "num_accepted_tokens", "num_output_tokens"):
        assert sum(part[key] for part in parts) == overall[key]


def test_the_plot_is_a_picture(finished: tuple[Path, Done, Path]) -> None:
    png = (finished[0] / "run.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 20_000


def test_the_saved_config_is_resolved_and_runs_again(finished: tuple[Path, Done, Path], tmp_path: Path, cli: Cli) -> None:
    text = (finished[0] / "config.yaml").read_text()
    assert "${" not in text
    cfg = read(finished[0] / "config.yaml")
    assert cfg["model"]["path"] == "tiny-llama"
    script = runpy.run_path(str(EVAL / "run.py"))
    script["run"]({**cfg, "out_dir": str(tmp_path / "again"), "baseline": False})
    assert outputs(tmp_path / "again") == outputs(finished[0])


def test_the_json_object_is_the_groups_by_another_door(finished: tuple[Path, Done, Path], tmp_path: Path, cli: Cli) -> None:
    given = {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}
    arguments = (*SMALL, "baseline=false", f"out_dir={tmp_path / 'json'}")
    done = cli("run", *arguments, f"speculative_config={json.dumps(given)}")
    assert done.code == 0, done.err
    same = ("id", "method", "rejection", "num_speculative_tokens", "output_token_ids", "drafted", "accepted", "seed")
    wanted, got = (rows_of(path / "requests.jsonl") for path in (finished[0], tmp_path / "json"))
    assert [[row[key] for key in same] for row in got] == [[row[key] for key in same] for row in wanted]


def test_without_a_baseline_there_is_no_speedup_to_speak_of(tmp_path: Path, cli: Cli) -> None:
    arguments = ("baseline=false", "sampling.temperature=0.8", "max_batch_size=4", f"out_dir={tmp_path / 'run'}")
    done = cli("run", *SMALL, *SELF, *arguments)
    assert done.code == 0, done.err
    assert "lossless: yes, in law (standard)" in done.out
    overall = json.loads((tmp_path / "run" / "summary.json").read_text())["overall"]
    assert overall["speedup"] is overall["efficiency"] is overall["baseline_tokens_per_s"] is None
    assert overall["speedup_model"] > 0


def test_a_lossy_scheme_says_so_everywhere(tmp_path: Path, cli: Cli) -> None:
    arguments = ("rejection=synthetic", "rejection.synthetic_acceptance_length=2.5", f"out_dir={tmp_path / 'run'}")
    done = cli("run", *SMALL, *SELF, *arguments)
    assert done.code == 0, done.err
    assert "lossless: NO" in done.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["lossless"] is False
    assert summary["lossless_said"].startswith("NO")
    assert not any(row["lossless"] for row in rows_of(tmp_path / "run" / "requests.jsonl"))


def test_block_with_greedy_drafts_says_that_nothing_is_gained(tmp_path: Path, cli: Cli) -> None:
    done = cli("run", *SMALL, *SELF, "rejection=block", f"out_dir={tmp_path / 'run'}")
    assert "law of standard" in done.out


# ------------------------------------------------------------------------------------------- conversations


def test_a_conversation_is_answered_turn_by_turn(tmp_path: Path, cli: Cli) -> None:
    turns = ["What is a sieve?", "And a colander?", "Thanks."]
    lines = [{"id": "talk", "category": "kitchen", "turns": turns}, {"turns": ["Hello."]}]
    path, out_dir = write_tasks(tmp_path / "tasks.jsonl", lines), tmp_path / "run"
    arguments = ("model=tiny", "task=jsonl", f"task.path={path}", "sampling.max_tokens=6", "max_batch_size=2")
    done = cli("run", *arguments, *SELF, f"out_dir={out_dir}")
    assert done.code == 0, done.err
    rows = {row["id"]: row for row in rows_of(out_dir / "requests.jsonl")}
    assert set(rows) == {"talk/1", "talk/2", "talk/3", "2/1"}
    assert rows["talk/2"]["category"] == "kitchen"
    assert rows["2/1"]["category"] == "all", "neither id nor category need be given"
    tokenizer = CausalLM("tiny", "float32", "cpu").tokenizer
    answers: list[str] = []
    for turn in (1, 2, 3):
        row = rows[f"talk/{turn}"]
        assert row["turn"] == turn
        assert row["num_prompt_tokens"] == len(tasks.prompt_ids(tokenizer, turns[:turn], answers))
        answers.append(row["text"])
    summary = json.loads((out_dir / "summary.json").read_text())
    assert summary["categories"]["kitchen"]["num_requests"] == 3
    assert "4 of 4 outputs equal plain decoding" in done.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"turns": ["a"]\n', ["line 2", "not JSON"]),
        ("nonsense\n", ["line 2", "not JSON"]),
        ({"category": "x"}, ["line 2", "'turns'"]),
        ({"turns": []}, ["line 2", "'turns'"]),
        ({"turns": "What?"}, ["line 2", "'turns'"]),
        ({"turns": ["a", "  "]}, ["line 2", "non-empty"]),
        ("[1]\n", ["line 2", "'turns'"]),
        ({"id": "first", "turns": ["a"]}, ["line 2", "'first'", "unique"]),
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: Any, words: list[str], tmp_path: Path, cli: Cli) -> None:
    lines = [{"id": "first", "turns": ["a"]}, line, {"turns": ["b"]}]
    path = write_tasks(tmp_path / "tasks.jsonl", lines)
    error = cli("run", "model=tiny", "task=jsonl", f"task.path={path}", f"out_dir={tmp_path / 'run'}").error
    assert str(path) in error
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


def test_files_that_hold_no_task(tmp_path: Path, cli: Cli) -> None:
    where = ("model=tiny", "task=jsonl", f"out_dir={tmp_path / 'run'}")
    assert "task.path is missing" in cli("run", *where).error
    assert "no such file" in cli("run", *where, "task.path=nowhere.jsonl").error
    path = write_tasks(tmp_path / "empty.jsonl", ["\n"])
    assert "no tasks" in cli("run", *where, f"task.path={path}").error


# ------------------------------------------------------------------------------------------- mistakes

TYPOS = [
    (("methud=ngram",), "unknown key 'methud'; did you mean 'method'?"),
    (("method=ngrma",), "method=ngrma: no such choice; did you mean 'ngram'?"),
    (("rejection=standrad",), "did you mean 'standard'?"),
    (("model=lama",), "did you mean 'llama'?"),
    (("experiment=tinny",), "did you mean 'tiny'?"),
    (("sampling.temprature=0.5",), "unknown key 'sampling.temprature'; did you mean 'sampling.temperature'?"),
    (("temperature=0.5",), "did you mean 'sampling.temperature'?"),
    (("max_new_tokens=5",), "did you mean 'sampling.max_new_tokens'?"),
    (("method.num_speculativ_tokens=4",), "did you mean 'method.num_speculative_tokens'?"),
    (("method=suffix", "method.prompt_lookup_max=3"), "unknown key 'method.prompt_lookup_max'"),
    (("rejection=synthetic", "rejection.synthetic_acceptence_length=2"), "synthetic_acceptance_length'?"),
    (("model.architectur=gemma3",), "did you mean 'model.architecture'?"),
    (("model.architecture=lama",), "did you mean 'llama'?"),
    (("model=llama", "model.size=9b"), "model.size=9b: llama has no such size; did you mean '8b'?"),
    (("model.dtype=flot32",), "did you mean 'float32'?"),
    (("limt=3",), "did you mean 'limit'?"),
    (('speculative_config={"method": "ngrm"}',), "unknown method 'ngrm'; did you mean 'ngram'?"),
    (('speculative_config={"method": "ngram", "num_speculative_tokes": 3}',), "'num_speculative_tokens'?"),
    (('speculative_config={"method": "ngram",}',), "speculative_config is not JSON"),
]


@pytest.mark.parametrize(("arguments", "words"), TYPOS, ids=lambda value: " ".join(value) if value[0] else None)
def test_a_typo_names_the_nearest(arguments: tuple[str, ...], words: str, tmp_path: Path, cli: Cli) -> None:
    assert words in cli("run", *SMALL, f"out_dir={tmp_path / 'run'}", *arguments).error
    assert not (tmp_path / "run").exists()


BAD_VALUES = [
    (("limit=0",), ["limit=0", "at least 1"]),
    (("limit=many",), ["limit='many'", "a number"]),
    (("seed=abc",), ["seed='abc'", "a number"]),
    (("baseline=maybe",), ["baseline='maybe'", "true or false"]),
    (("sampling.temperature=-1",), ["temperature=-1", "greater than or equal to 0"]),
    (("sampling.max_tokens=4", "sampling.max_new_tokens=5"), ["max_tokens=4", "max_new_tokens=5"]),
    (("method.num_speculative_tokens=0",), ["num_speculative_tokens=0", "at least 1"]),
    (("rejection=synthetic",), ["exactly one of", "neither"]),
    (("max_batch_size=0",), ["max_batch_size=0", "at least 1"]),
    (("max_model_len=99999",), ["max_model_len=99999", "4096"]),
    (("max_model_len=20",), ["prompt has", "max_model_len=20", "shorten"]),
    (("model.path=/nowhere",), ["'/nowhere'", "no such directory"]),
    (("model.path=some-org/some-model",), ["can't be reached", "model.path=", "smollm2-135m"]),
    (("method=custom_class", "method.model=no_such_module.Class"), ["cannot import 'no_such_module'"]),
    (("resume=true",), ["holds no run"]),
    (("nonsense",), ["'nonsense'", "key=value"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_VALUES, ids=lambda value: " ".join(value))
def test_a_value_beyond_its_limit(arguments: tuple[str, ...], words: list[str], tmp_path: Path, cli: Cli) -> None:
    error = cli("run", *SMALL, f"out_dir={tmp_path / 'run'}", *arguments).error
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_found_before_anything_runs(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "free_memory", lambda device: 1000)
    error = cli("run", *SMALL, f"out_dir={tmp_path / 'run'}").error
    assert all(word in error for word in ("GiB", "free", "lower max_batch_size")), error
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    """The real thing: a process, its exit code, and no traceback; from a directory of its own."""
    done = ended(start("experiment=tiny", "sampling.temprature=1", cwd=tmp_path))
    assert done.code == 1
    assert done.error == "error: unknown key 'sampling.temprature'; did you mean 'sampling.temperature'?"
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- experiment files


@pytest.fixture
def experiment(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Done]:
    """Run a copy of the repository's conf/ and eval/ with an experiment file of the given text."""
    shutil.copytree(CONF, tmp_path / "copy" / "conf")
    shutil.copytree(EVAL, tmp_path / "copy" / "eval")
    monkeypatch.setattr(config, "CONF", tmp_path / "copy" / "conf")

    def run(text: str) -> Done:
        head = "# @package _global_\ndefaults:\n  - override /model: tiny\n"
        (tmp_path / "copy" / "conf" / "experiment" / "mine.yaml").write_text(head + text)
        where = f"out_dir={tmp_path / 'run'}"
        return cli("run", "experiment=mine", "sampling.max_tokens=4", where, folder=tmp_path / "copy" / "eval")

    return run


def test_an_experiment_file_is_applied_last(experiment: Callable[[str], Done], tmp_path: Path) -> None:
    done = experiment("limit: 1\nmethod: {num_speculative_tokens: 7}\nseed: 3\n")
    assert done.code == 0, done.err
    saved = read(tmp_path / "run" / "config.yaml")
    assert (saved["seed"], saved["method"]["num_speculative_tokens"]) == (3, 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limit: 1\nsampling: {temprature: 0.5}\n", "did you mean"),
        ("limit: 1\nmethod: {num_speculativ_tokens: 2}\n", "did you mean"),
        ("limit: 1\nlimt: 2\n", "did you mean 'limit'"),
        ("limit: 1\nmodel: {architectur: gemma3}\n", "did you mean 'model.architecture'"),
    ],
)
def test_a_typo_in_an_experiment_file(experiment: Callable[[str], Done], text: str, words: str) -> None:
    assert words in experiment(text).error
