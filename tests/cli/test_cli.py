"""The scripts of eval/, as a user meets them: what they write, what they refuse, what survives a crash.

A call costs seconds as a process of its own, which imports torch, and a tenth of that as `runpy` within this
one; so processes are started only where they are the point: an exit code, a signal, a home directory.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specdec import config, engine, hub, method, rejection
from specdec.config import CONF, pages, read
from specdec.measure import bench, records, stats, task_run, tasks
from specdec.model.target import CausalLM
from support.cli import EVAL, Cli, Done, call, contents, outputs, rows_of, write_tasks
from support.processes import ended, fork, start, wait_for_lines
from support.wandb_offline import FakeRun, offline_history, offline_summary

SMALL = ("model=tiny", "limit=2", "sampling.max_tokens=8")
# `tiny` drafts for itself, so at temperature 0 every draft is accepted
SELF = ("method=draft_model", "method.model=tiny")


Finished = tuple[Path, Done, Path]  # out_dir, what the process left, where it was called


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return partial(call, cwd=tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run as a process of its own, called from a directory that has nothing to do with the repository."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    return out_dir, ended(start(EVAL / "run.py", *SMALL, *SELF, f"out_dir={out_dir}", cwd=cwd)), cwd


def test_a_run_writes_its_files_and_nothing_else(finished: Finished) -> None:
    out_dir, done, cwd = finished
    assert done.code == 0, done.err
    names = {"requests.jsonl", "baseline.jsonl", "summary.json", "config.yaml", "run.json", "run.png", "report.html"}
    assert {path.name for path in out_dir.iterdir()} == names
    assert list(cwd.iterdir()) == [], "no outputs/, no .hydra/ where it was called"
    assert "Traceback" not in done.err


def test_a_run_prints_a_table_and_its_proof(finished: Finished) -> None:
    _, done, _ = finished
    columns = ("category", "requests", "mean acceptance", "tokens/step", "speedup", "model", "efficiency")
    assert all(word in done.out for word in columns), done.out
    assert all(name in done.out for name in ("chat", "code", "all"))
    assert "lossless: yes, 4 of 4 outputs equal plain decoding" in done.out
    assert "none" in done.err, "progress is shown, and kept apart from the results"
    assert "draft_model" in done.err


def test_a_row_says_all_about_its_request(finished: Finished) -> None:
    out_dir = finished[0]
    chosen = {task.id: task for task in tasks.load(tasks.DEMO, 2)}
    rows = rows_of(out_dir / "requests.jsonl")
    names = {tasks.request_id(task, i + 1) for task in chosen.values() for i in range(len(task.turns))}
    assert {row["id"] for row in rows} == names
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
        request_stats = stats.RequestStats(**{key: row[key] for key in (*records._LISTS, *records._TIMES)})
        assert {key: row[key] for key in stats.request_metrics(request_stats)} == stats.request_metrics(request_stats)
    for row in rows_of(out_dir / "baseline.jsonl"):
        assert (row["method"], row["num_speculative_tokens"]) == ("none", 0)
        assert row["drafted"] == [0] * 7
    assert outputs(out_dir) == outputs(out_dir, "baseline")


def test_a_hybrid_says_who_drafted(cli: Cli, tmp_path: Path) -> None:
    parts = "[{method: ngram, prompt_lookup_min: 2}, {method: draft_model, model: tiny}]"
    done = cli("run", *SMALL, "method=hybrid", f"method.proposers={parts}", f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    rows = rows_of(tmp_path / "run" / "requests.jsonl")
    assert all(len(row["proposer"]) == len(row["drafted"]) for row in rows)
    overall = json.loads((tmp_path / "run" / "summary.json").read_text())["overall"]
    assert {name or "none" for row in rows for name in row["proposer"]} == set(overall["proposers"])
    assert sum(part["num_emitted_tokens"] for part in overall["proposers"].values()) == overall["num_emitted_tokens"]
    assert "by proposer" in done.out
    assert "equal plain decoding" in done.out


def test_the_summary_follows_from_the_rows(finished: Finished) -> None:
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
    speed = overall["decode_tokens_per_s"]
    baseline = overall["baseline_tokens_per_s"]
    assert overall["speedup"] == pytest.approx(speed / baseline)
    assert overall["efficiency"] == pytest.approx(overall["speedup"] / overall["speedup_model"])
    assert overall["tokens_per_step_over_requests"]["num_requests"] == 4
    parts = summary["categories"].values()
    for key in ("num_requests", "num_steps", "num_accepted_tokens", "num_output_tokens"):
        assert sum(part[key] for part in parts) == overall[key]


def test_the_plot_is_a_picture(finished: Finished) -> None:
    png = (finished[0] / "run.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 20_000


def test_the_saved_config_is_resolved_and_runs_again(finished: Finished, tmp_path: Path, cli: Cli) -> None:
    text = (finished[0] / "config.yaml").read_text()
    assert "${" not in text
    cfg = read(finished[0] / "config.yaml")
    assert cfg["model"]["path"] == "tiny-llama"
    script = runpy.run_path(str(EVAL / "run.py"))
    script["run"](pages.Eval(**{**cfg, "out_dir": str(tmp_path / "again"), "baseline": False}))
    assert outputs(tmp_path / "again") == outputs(finished[0])


def test_the_json_object_is_the_groups_by_another_door(finished: Finished, tmp_path: Path, cli: Cli) -> None:
    config = {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}
    arguments = (*SMALL, "baseline=false", f"out_dir={tmp_path / 'json'}")
    done = cli("run", *arguments, f"speculative_config={json.dumps(config)}")
    assert done.code == 0, done.err
    same = ("id", "method", "rejection", "num_speculative_tokens", "output_token_ids", "drafted", "seed")
    wanted, got = (rows_of(path / "requests.jsonl") for path in (finished[0], tmp_path / "json"))
    assert [[row[key] for key in same] for row in got] == [[row[key] for key in same] for row in wanted]


def test_without_a_baseline_there_is_no_speedup_to_speak_of(tmp_path: Path, cli: Cli) -> None:
    warm = ("sampling.temperature=0.8", "max_batch_size=4")
    done = cli("run", *SMALL, *SELF, *warm, "baseline=false", f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert "lossless: yes, in distribution (standard)" in done.out
    greedy = cli("run", *SMALL, *SELF, "baseline=false", f"out_dir={tmp_path / 'greedy'}")
    assert "lossless: yes (standard); not compared with plain decoding" in greedy.out
    overall = json.loads((tmp_path / "run" / "summary.json").read_text())["overall"]
    assert overall["speedup"] is overall["efficiency"] is overall["baseline_tokens_per_s"] is None
    assert overall["speedup_model"] > 0


def test_a_lossy_scheme_says_so_everywhere(tmp_path: Path, cli: Cli) -> None:
    scheme = ("rejection=synthetic", "rejection.synthetic_acceptance_length=2.5")
    done = cli("run", *SMALL, *SELF, *scheme, f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert "lossless: NO" in done.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["lossless"] is False
    assert summary["lossless_said"].startswith("NO")
    assert not any(row["lossless"] for row in rows_of(tmp_path / "run" / "requests.jsonl"))


def test_acceptance_that_was_asked_for_and_cannot_be_reached(tmp_path: Path, cli: Cli) -> None:
    """Of a suffix tree of 16 nodes paths are 2 long."""
    short_trees = ("method=suffix", "method.num_speculative_tokens=16", "method.tree_topk=4", "method.tree_depth=2")
    scheme = ("rejection=synthetic", "rejection.synthetic_acceptance_length=4")
    done = cli("run", *SMALL, *short_trees, *scheme, f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert "acceptance that was asked for: mean length 4.00" in done.out.replace("\n", " ")


def test_block_with_greedy_drafts_says_that_nothing_is_gained(tmp_path: Path, cli: Cli) -> None:
    done = cli("run", *SMALL, *SELF, "rejection=block", f"out_dir={tmp_path / 'run'}")
    assert "block verification equals standard" in done.out


# ------------------------------------------------------------------------------------------ conversations


def test_a_conversation_is_answered_turn_by_turn(tmp_path: Path, cli: Cli) -> None:
    turns = ["What is a sieve?", "And a colander?", "Thanks."]
    lines = [{"id": "talk", "category": "kitchen", "turns": turns}, {"turns": ["Hello."]}]
    path = write_tasks(tmp_path / "tasks.jsonl", lines)
    out_dir = tmp_path / "run"
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
def test_a_malformed_line_is_named(line: Any, words: list[str], tmp_path: Path, cli: Cli) -> None:
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


# ----------------------------------------------------------------------------------------------- mistakes

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
    (("method=hybrid", "method.proposers.0.prompt_lookup_mn=3"), "did you mean 'method.proposers.0.prompt_lookup_min'?"),
    (("method=hybrid",), "proposers[1]: it has neither method nor model; give its model (eval/run.py: checkpoint=DIR)"),
    (("task.path=x",), "task.path is a key of task=jsonl or alpaca"),
    (("data.path=x",), "unknown key 'data.path'"),
    (("method=suffix", "method.prompt_lookup_max=3"), "method.prompt_lookup_max is a key of method=ngram or ngram_gpu"),
    (("rejection=synthetic", "rejection.synthetic_acceptence_length=2"), "synthetic_acceptance_length'?"),
    (("model.architectur=gemma3",), "did you mean 'model.architecture'?"),
    (("model.architecture=lama",), "did you mean 'llama'?"),
    (("model=llama", "model.size=9b"), "model.size=9b: llama has no such size; its sizes are 135m, 1b, 3b, 8b"),
    (("model.dtype=flot32",), "did you mean 'float32'?"),
    (("limt=3",), "did you mean 'limit'?"),
    (('speculative_config={"method": "ngrm"}',), "unknown method 'ngrm'; did you mean 'ngram'?"),
    (('speculative_config={"method": "ngram", "num_speculative_tokes": 3}',), "'num_speculative_tokens'?"),
    (('speculative_config={"method": "ngram",}',), "speculative_config is not JSON"),
]


@pytest.mark.parametrize(("arguments", "words"), TYPOS, ids=lambda value: "".join(value)[:40])
def test_a_typo_names_the_nearest(arguments: tuple[str, ...], words: str, tmp_path: Path, cli: Cli) -> None:
    assert words in cli("run", *SMALL, f"out_dir={tmp_path / 'run'}", *arguments).error
    assert not (tmp_path / "run").exists()


BAD_VALUES = [
    (("limit=0",), ["limit=0", "at least 1"]),
    (("limit=many",), ["limit='many' must be a number of at least 1, or null"]),
    (("speculative_config={method: ngram",), ["speculative_config={method: ngram", "brace or quote not closed"]),
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


@pytest.mark.parametrize(("arguments", "words"), BAD_VALUES, ids=lambda value: "".join(value)[:40])
def test_a_bad_value(arguments: tuple[str, ...], words: list[str], tmp_path: Path, cli: Cli) -> None:
    error = cli("run", *SMALL, f"out_dir={tmp_path / 'run'}", *arguments).error
    assert all(word in error for word in words), error
    assert "(a valid" not in error, "the type is said in words already"
    assert not (tmp_path / "run").exists()


ODDITIES = [
    (("+limt=3",), "'limt'"),
    (("~sampling",), "sampling"),
    (("sampling={temprature: 1}",), "'sampling.temperature'"),
    (("sampling.logit_bias.5=1.0",), "logit_bias"),
    (("method=ngram,suffix",), "-m"),
    (("num_threads=-1",), "num_threads=-1"),
    (("method.num_speculative_tokens=5000",), "5000"),
    (("method=suffix", 'speculative_config={"method": "ngram", "num_speculative_tokens": 3}'), "speculative_config"),
    (
        ('speculative_config={"method": "ngram", "num_speculative_tokens": 3}', "enable_adaptive_verification=true"),
        "enable_adaptive_verification= and speculative_config=",
    ),
    (("method.num_speculative_tokens=auo",), "must be a number, or auto"),
    (("num_speculative_tokens_per_batch_size=[[2,4,1]]",), "first batch size must be 1"),
]


@pytest.mark.parametrize(("arguments", "words"), ODDITIES, ids=lambda value: "".join(value)[:40])
def test_an_oddity(arguments: tuple[str, ...], words: str, tmp_path: Path, cli: Cli) -> None:
    assert words in cli("run", *SMALL, f"out_dir={tmp_path / 'run'}", *arguments).error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argument", "number"),
    [
        ("limit=null", 2),
        ("sampling.max_tokens=null", 1),
    ],
)
def test_a_limit_can_be_taken_away(argument: str, number: int, tmp_path: Path, cli: Cli) -> None:
    path = write_tasks(tmp_path / "tasks.jsonl", [{"turns": ["a"]}, {"turns": ["b"]}])
    what = ("model=tiny", "task=jsonl", f"task.path={path}", "limit=1", "max_model_len=40")
    done = cli("run", *what, argument, f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert len(outputs(tmp_path / "run")) == number


def test_too_little_memory(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "free_memory", lambda device: 1000)
    error = cli("run", *SMALL, f"out_dir={tmp_path / 'run'}").error
    assert all(word in error for word in ("GiB", "free", "lower max_batch_size")), error
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    """The real thing: a process, its exit code, and no traceback; from a directory of its own."""
    done = ended(start(EVAL / "run.py", "experiment=tiny", "sampling.temprature=1", cwd=tmp_path))
    assert done.code == 1
    assert done.error == "error: unknown key 'sampling.temprature'; did you mean 'sampling.temperature'?"
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------- experiment files


@pytest.fixture
def experiment(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Done]:
    """Run a copy of the repository's conf/ and eval/ with an experiment file of the given text."""
    shutil.copytree(CONF, tmp_path / "copy" / "conf")
    shutil.copytree(EVAL, tmp_path / "copy" / "eval")
    monkeypatch.setattr(config, "CONF", tmp_path / "copy" / "conf")

    def run(text: str) -> Done:
        head = "# @package _global_\ndefaults:\n  - override /model: tiny\n"
        (tmp_path / "copy" / "conf" / "experiment" / "mine.yaml").write_text(head + text)
        arguments = ("experiment=mine", "sampling.max_tokens=4", f"out_dir={tmp_path / 'run'}")
        return cli("run", *arguments, folder=tmp_path / "copy" / "eval")

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
        ("limit: 1\nlimt: 2\n", "'limit'"),
        ("limit: 1\nmodel: {architectur: x}\n", "'model.architecture'"),
        ("limit: [1\n", "mine.yaml"),
        ("limit: many\n", "limit"),
    ],
)
def test_a_typo_in_an_experiment_file(experiment: Callable[[str], Done], text: str, words: str) -> None:
    assert words in experiment(text).error


# -------------------------------------------------------------------------------- runs that exist already


def test_a_directory_that_holds_a_run_is_left_alone(finished: Finished, cli: Cli) -> None:
    out_dir = finished[0]
    before = contents(out_dir)
    for arguments in ((*SMALL, *SELF), (*SMALL, "method=suffix"), ("model=tiny", "limit=1")):
        error = cli("run", *arguments, f"out_dir={out_dir}").error
        assert "already holds a run" in error
        assert "resume=true" in error
    assert contents(out_dir) == before


def test_only_the_same_run_can_be_resumed(finished: Finished, cli: Cli) -> None:
    out_dir = finished[0]
    before = contents(out_dir)
    for change, key in (
        ("sampling.temperature=0.5", "sampling"),
        ("method.num_speculative_tokens=2", "speculative_config"),
        ("rejection=match", "rejection"),
        ("seed=1", "seed"),
        ("limit=1", "prompts"),
        ("model.architecture=qwen3", "target"),
        ("model.dtype=bfloat16", "dtype"),
        ("max_batch_size=2", "max_batch_size"),
    ):
        error = cli("run", *SMALL, *SELF, f"out_dir={out_dir}", "resume=true", change).error
        assert "resume=true, but" in error
        assert "same settings" in error
        assert key in error, f"{change}: {error}"
    assert contents(out_dir) == before


def test_a_finished_run_can_be_resumed_to_no_effect(finished: Finished, tmp_path: Path, cli: Cli) -> None:
    out_dir = tmp_path / "copy"
    shutil.copytree(finished[0], out_dir)
    done = cli("run", *SMALL, *SELF, f"out_dir={out_dir}", "resume=true")
    assert done.code == 0, done.err
    for name in ("requests.jsonl", "baseline.jsonl"):
        assert (out_dir / name).read_bytes() == (finished[0] / name).read_bytes()


def test_a_file_is_not_a_directory(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run").write_text("mine")
    assert "is a file" in cli("run", *SMALL, f"out_dir={tmp_path / 'run'}").error
    assert (tmp_path / "run").read_text() == "mine"


def test_an_interrupted_run_keeps_what_it_finished(tmp_path: Path, cli: Cli) -> None:
    """Ctrl-C, then resumed, then killed within a line, then resumed: complete lines stay, byte for byte,
    and the outputs are those of a run that nothing happened to. Sampled, so that seeds must come back;
    with conversations, whose second turns are made from answers on disk."""
    lines = [{"turns": [f"Tell me about the number {i}.", "Why?"][: 1 + i % 2]} for i in range(36)]
    count = 54
    path = write_tasks(tmp_path / "tasks.jsonl", lines)
    out_dir = tmp_path / "run"
    what = ("model=tiny", "task=jsonl", f"task.path={path}", *SELF, "method.num_speculative_tokens=1")
    how = ("sampling.temperature=0.8", "sampling.max_tokens=24", "max_batch_size=3", "baseline=false")
    shared = (*what, *how)
    requests = out_dir / "requests.jsonl"

    process = fork(EVAL / "run.py", *shared, f"out_dir={out_dir}", cwd=tmp_path)
    wait_for_lines(requests, 5, process)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code == 130
    assert "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith("interrupted; what had finished is kept in")
    first = requests.read_bytes()
    assert 5 <= first.count(b"\n") < count
    assert first.endswith(b"\n")
    assert not (out_dir / "summary.json").exists()

    process = fork(EVAL / "run.py", *shared, f"out_dir={out_dir}", "resume=true", cwd=tmp_path)
    wait_for_lines(requests, first.count(b"\n") + 3, process)
    process.send_signal(signal.SIGSTOP)  # it must not end while the other one starts
    error = cli("run", *shared, f"out_dir={out_dir}", "resume=true").error
    assert f"out_dir={out_dir} is in use by process {process.pid} on " in error, "two processes never share a directory"
    process.send_signal(signal.SIGCONT)
    wait_for_lines(requests, first.count(b"\n") + 10, process)
    process.kill()
    assert ended(process).code == -signal.SIGKILL
    second = requests.read_bytes()
    assert second.startswith(first)
    assert second.count(b"\n") < count
    complete_lines = second[: second.rindex(b"\n") + 1]
    requests.write_bytes(complete_lines + b'{"id": "7/1", "prompt_id": "7", "turn')  # as a full disk would leave it

    done = cli("run", *shared, f"out_dir={out_dir}", "resume=true")
    assert done.code == 0, done.err
    assert set(complete_lines.splitlines()) < set(requests.read_bytes().splitlines())
    assert cli("run", *shared, f"out_dir={tmp_path / 'straight'}").code == 0
    names = [f"{i}/{turn}" for i in range(1, 37) for turn in (1, 2)[: 1 + (i - 1) % 2]]
    assert [row["id"] for row in rows_of(requests)] == names, "in the order of the tasks, whenever they were decoded"
    assert len(names) == count
    assert outputs(out_dir) == outputs(tmp_path / "straight")
    assert json.loads((out_dir / "summary.json").read_text())["overall"]["num_requests"] == count


def test_fields_of_a_prompt_reach_the_template_or_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    tool = {"name": "add", "parameters": {}}
    rows = [
        {"turns": ["hi"], "system": "Be brief.", "reference": ["x"]},
        {"turns": ["hi"], "tools": [tool], "reference": None},
        {"turns": ["hi"], "tools": json.dumps([tool]), "difficulty": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    brief, listed, text = tasks.load(path)
    assert "fields that are not used: reference (1 rows), difficulty (1 rows)" in capsys.readouterr().err
    assert brief.system == "Be brief."
    assert listed.tools == text.tools == json.dumps([{"type": "function", "function": tool}])
    tokenizer = hub.load_tokenizer(hub.tiny())
    assert "Be brief." in tokenizer.decode(tasks.first_prompt_ids(tokenizer, brief))
    tasks.check_shown(tokenizer, brief)
    with pytest.raises(ValueError, match=r"task 2: the chat template does not show its tools"):
        tasks.check_shown(tokenizer, listed)
    tokenizer.chat_template = "{{ tools }}" + tokenizer.chat_template
    tasks.check_shown(tokenizer, listed)
    tokenizer.chat_template = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"task 1: the chat template does not show its system"):
        tasks.check_shown(tokenizer, brief)
    for bad in ({"system": 5}, {"tools": "not json"}, {"tools": [1]}):
        path.write_text(json.dumps({"turns": ["hi"]} | bad) + "\n")
        with pytest.raises(ValueError, match=r"prompts.jsonl, line 1: (system=5 must be text|tools are not)"):
            tasks.load(path)


# --------------------------------------------------------------------------------- sweeps and comparisons


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The jobs of two sweeps over the same two methods."""
    cwd = tmp_path_factory.mktemp("sweeps")
    jobs = []
    for name in ("one", "two"):
        sweep = ("-m", "method=none,ngram", "model=tiny", "limit=1", "sampling.max_tokens=4")
        done = call("run", *sweep, f"out_dir={cwd / name}", cwd=cwd)
        assert done.code == 0, done.err
        jobs += sorted(path for path in (cwd / name).iterdir() if path.is_dir())
    return jobs


def test_a_sweep_has_a_directory_per_job(sweeps: list[Path]) -> None:
    assert [path.parent.name for path in sweeps] == ["one", "one", "two", "two"]
    for path, name in zip(sweeps, ("none", "ngram") * 2, strict=True):
        assert path.name.endswith(name), "a job is called after what varies"
        assert {row["method"] for row in rows_of(path / "requests.jsonl")} == {name}
        assert read(path / "config.yaml")["out_dir"] == str(path)


def test_the_jobs_of_two_sweeps_compare(sweeps: list[Path], tmp_path: Path, cli: Cli) -> None:
    done = cli("compare", *sweeps, "--out", tmp_path / "both")
    assert done.code == 0, done.err
    # a line of each table
    assert all(done.out.count(f"\n {name}/{i}-") == 3 for name in ("one", "two") for i in (0, 1)), done.out
    png = (tmp_path / "both" / "compare.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_the_table_of_a_sweep_can_be_read(sweeps: list[Path], tmp_path: Path, cli: Cli) -> None:
    """As `make demo` ends: the jobs of a sweep in one table, in a file or a terminal of 150 columns."""
    done = cli("compare", *sweeps, "--out", tmp_path / "both")
    lines = [line for line in done.out.splitlines() if line.startswith((" one/", " two/"))]
    assert ["ngram" in line for line in lines[:4]] == [False, True, False, True], done.out
    assert len(lines) == 12, "then speed, then the categories"


def test_help_has_what_the_yaml_says(cli: Cli) -> None:
    """Of the choices on the command line, and of this script's groups only."""
    done = cli("run", "method=suffix", "--help")
    assert done.code == 0, done.err
    assert done.out.startswith("Decode a task with a method under a rejection scheme")
    assert "[suffix]" in done.out
    assert "max_batch_size: 1         # rows decoded together" in done.out
    assert "Keys of method=suffix (method.KEY=value):" in done.out
    assert "suffix_decoding_max_tree_depth" in done.out
    assert "prompt_lookup_min" not in done.out
    assert "ttt_steps" not in done.out
    assert "hydra:" not in done.out


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_tables_fit_the_terminal(
    columns: int, sweeps: list[Path], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too wide is stacked, and no number is cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    done = cli("compare", *sweeps, "--out", tmp_path / "both")
    assert "…" not in done.out
    tables = done.out.split("\none/0-none: ")[0]
    assert max(map(len, tables.splitlines())) <= columns
    for summary in (json.loads((path / "summary.json").read_text()) for path in sweeps):
        assert f"{summary['overall']['decode_tokens_per_s']:.1f}" in done.out


def test_a_sweep_leaves_nothing_where_it_was_called(sweeps: list[Path]) -> None:
    assert {path.name for path in sweeps[0].parents[1].iterdir()} == {"one", "two"}


def test_runs_that_differ_do_not_compare(finished: Finished, tmp_path: Path, cli: Cli) -> None:
    one = finished[0]
    other = tmp_path / "other"
    out = tmp_path / "plots"
    assert cli("run", *SMALL, *SELF, "sampling.temperature=0.5", f"out_dir={other}").code == 0
    error = cli("compare", one, other, "--out", out).error
    assert "sampling" in error
    assert "--anyway" in error
    assert not out.exists()
    done = cli("compare", one, other, "--out", out, "--anyway")
    assert done.code == 0, done.err
    assert "warning" in done.out
    assert (out / "compare.png").exists()


@pytest.mark.parametrize("key", ["target", "dtype", "prompts", "sampling", "seed", "rejection"])
def test_each_of_what_must_agree_is_looked_at(key: str, finished: Finished, tmp_path: Path, cli: Cli) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text(json.dumps({**summary, key: "another"}))
    error = cli("compare", finished[0], tmp_path / "other", "--out", tmp_path / "plots").error
    assert f"{key}=" in error or (key == "prompts" and "different prompts" in error)


def test_compare_needs_two_finished_runs(finished: Finished, tmp_path: Path, cli: Cli) -> None:
    assert "two or more" in cli("compare", finished[0]).error
    assert "two or more" in cli("compare", finished[0], finished[0]).error
    assert "no summary.json" in cli("compare", finished[0], tmp_path).error
    assert "no summary.json" in cli("compare", finished[0], tmp_path / "nowhere").error


def test_the_page_of_a_run_is_made_again_from_its_records(finished: Finished, tmp_path: Path, cli: Cli) -> None:
    """With the texts that it had, or without the page by the tokenizer and the task of its config."""
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    written = (run / "report.html").read_text()
    assert "Tokens" in written
    for remove in (False, True):
        if remove:
            (run / "report.html").unlink()
        done = cli("report", run)
        assert (done.code, done.out) == (0, f"written to {run / 'report.html'}\n"), done.err
        assert (run / "report.html").read_text() == written


def test_the_page_of_several_runs(sweeps: list[Path], tmp_path: Path, cli: Cli) -> None:
    done = cli("report", *sweeps[:2], "--out", tmp_path / "both")
    assert done.code == 0, done.err
    written = (tmp_path / "both" / "report.html").read_text()
    assert all(
        f"<th>{path.name}</th>" in written or f"<th>{path.parent.name}/{path.name}</th>" in written for path in sweeps[:2]
    )
    assert "report.html" in cli("compare", *sweeps, "--out", tmp_path / "compared").out


def test_a_directory_without_a_run_has_no_page(finished: Finished, tmp_path: Path, cli: Cli) -> None:
    assert "no summary.json" in cli("report", tmp_path).error
    assert "is for several runs" in cli("report", finished[0], "--out", tmp_path).error
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / "requests.jsonl").unlink()
    assert "no requests.jsonl" in cli("report", tmp_path / "run").error
    (tmp_path / "run" / "config.yaml").unlink()
    shutil.copy(finished[0] / "requests.jsonl", tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    done = cli("report", tmp_path / "run")
    assert done.code == 0, done.err
    assert "note" in done.out
    assert "lacks the text of the tokens" in done.out


# ---------------------------------------------------------------------------------- W&B and the benchmark


def test_wandb_without_a_key_is_kept_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    cache = os.environ.get("SPECDEC_CACHE") or str(Path.home() / ".cache" / "specdec")
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    out_dir = tmp_path / "run"
    arguments = (*SMALL, *SELF, "logger=wandb", f"out_dir={out_dir}")
    env = {"HOME": str(tmp_path / "home"), "SPECDEC_CACHE": cache}
    done = ended(fork(EVAL / "run.py", *arguments, cwd=tmp_path / "cwd", **env))
    assert done.code == 0, done.err
    assert "wandb: offline" in done.out
    assert list((tmp_path / "cwd").iterdir()) == []
    (kept,) = (out_dir / "wandb").glob("offline-run-*")
    assert f"`wandb sync {kept}` uploads it" in done.out
    (stored,) = kept.glob("*.wandb")
    (file,) = kept.glob("files/media/table/*.json")
    table = json.loads(file.read_text())
    rows = rows_of(out_dir / "requests.jsonl")
    assert {"id", "category", "method", "lossless", "tokens_per_step", "seed"} <= set(table["columns"])
    column = {name: [line[place] for line in table["data"]] for place, name in enumerate(table["columns"])}
    assert column["id"] == [row["id"] for row in rows]
    assert column["text"] == [row["text"] for row in rows]
    turns = {task.id: task.turns for task in tasks.load(tasks.DEMO)}
    assert column["prompt"] == [turns[row["prompt_id"]][row["turn"] - 1] for row in rows]

    # live: a line per request as it finished, in the order of requests.jsonl
    history = offline_history(stored)
    for prefix, name in (("eval", "requests"), ("eval/plain", "baseline")):
        key = f"{prefix}/decode_tokens_per_s"
        logged = [json.loads(metrics[key]) for metrics in history if key in metrics]
        assert logged == [pytest.approx(row["decode_tokens_per_s"]) for row in rows_of(out_dir / f"{name}.jsonl")]
    summary = json.loads((out_dir / "summary.json").read_text())
    held = offline_summary(stored)
    overall = summary["overall"]
    assert held["eval/overall/speedup"] == pytest.approx(overall["speedup"])
    assert held["eval/overall/acceptance_rate_per_position/1"] == pytest.approx(overall["acceptance_rate_per_position"][0])
    for category, numbers in summary["categories"].items():
        name = f"eval/categories/{category}/mean_acceptance_length"
        assert held.get(name) == pytest.approx(numbers["mean_acceptance_length"])
    assert held["eval/lossless_said"] == summary["lossless_said"]
    assert list(kept.glob("files/media/images/*.png"))


@pytest.mark.parametrize(
    ("name", "arguments", "key"),
    [
        ("load", (*SMALL, "method=ngram", "request_rate=50"), "load/overall/num_requests"),
        (
            "choose",
            ("model=tiny", "methods=[none,ngram]", "rates=[one,all]", "limit=1", "sampling.max_tokens=4"),
            "choose/num_requests",
        ),
        ("profile_cost", ("model=tiny", "repeats=2"), "cost/about/context"),
    ],
)
def test_other_measurements_reach_wandb(name: str, arguments: tuple[str, ...], key: str, cli: Cli, tmp_path: Path) -> None:
    done = cli(name, *arguments, "logger=wandb", "logger.mode=offline", f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    (stored,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    assert key in offline_summary(stored)


def test_the_runs_of_a_sweep_are_a_group_of_wandb(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[str] = []
    monkeypatch.setattr("wandb.init", lambda **kwargs: groups.append(kwargs["group"]) or FakeRun())
    sweep = ("-m", "method=none,ngram", "model=tiny", "limit=1", "sampling.max_tokens=4")
    done = cli("run", *sweep, "logger=wandb", "logger.mode=offline", f"out_dir={tmp_path / 'sweep'}")
    assert done.code == 0, done.err
    assert groups == [f"{tmp_path.name}-sweep"] * 2


def test_the_benchmark_runs(tmp_path: Path, cli: Cli) -> None:
    few = ("limit=2", "max_tokens=8", "dtypes=[float32]", "batch_sizes=[1]", "suffix_tokens=[2000]")
    done = cli("bench", "model=tiny", *few, f"out_dir={tmp_path / 'bench'}")
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "bench" / "bench.json").read_text())
    pairs = {(line["ours"], line["theirs"]) for line in results["speed"]}
    assert pairs >= {
        ("none", "HF generate"),
        ("ngram K=5 n<=3", "HF prompt lookup K=5 n<=3"),
        ("ngram, our default", "HF prompt lookup, its default"),
        ("suffix, our default", "HF prompt lookup, its default"),
        ("draft_model K=5", "HF assisted K=5"),
    }
    for line in results["speed"]:
        assert (line["dtype"], line["threads"]) == ("float32", 1)
        ours = line["ours_tokens_per_s"]
        hugging_face = line["theirs_tokens_per_s"]
        assert line["pooled_ratio"] == pytest.approx(ours / hugging_face)
        assert line["ratio"] > 0
    assert [line["method"] for line in results["batch"]] == ["none", "ngram", "draft_model"]
    assert all(0 < line["outside_forwards"] < 1 for line in results["batch"])
    assert [line["cached_tokens"] for line in results["suffix"]] == [2000]
    assert "HF assisted" in done.out
    assert "suffix tree" in done.out
    assert "limt" in cli("bench", "model=tiny", "limt=2").error
    assert "already holds a run" in cli("bench", "model=tiny", *few, f"out_dir={tmp_path / 'bench'}").error


def test_the_benchmark_decodes_every_prompt_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt twice takes as many forwards twice: a contender must not know the answer already."""
    target = CausalLM("tiny", "float32", "cpu")
    forward = CausalLM.forward
    counts = []

    def counted(*args: Any, **more: Any) -> Any:
        counts[-1] += 1
        return forward(*args, **more)

    monkeypatch.setattr(CausalLM, "forward", counted)
    drafter = method.build("suffix", target)
    decode = bench.ours(engine.Engine(target, drafter, rejection.build("standard")), 32)
    for _ in range(2):
        counts.append(0)
        decode(list(b"the quick brown fox"))
    assert counts[0] == counts[1]


def test_a_benchmark_that_cannot_start_takes_no_directory(tmp_path: Path, cli: Cli) -> None:
    where = f"out_dir={tmp_path / 'bench'}"
    assert "no such directory" in cli("bench", "model=tiny", "model.path=/nowhere", where).error
    assert not (tmp_path / "bench").exists()


# ------------------------------------------------------------------------------------- values and their kinds


KINDS = [
    (("run", "method=hybrid", "method.proposers={}"), "method.proposers={} must be"),
    (("run", "hydra/launcher=nope"), "hydra/launcher=nope: not installed; `pip install specdec-lab[slurm]`"),
    (("run", "hydra.nope=1"), "hydra.nope"),
    (("run", "--nope"), "unknown option '--nope'"),
    (("run", "--cfg", "nope"), "--cfg=nope: use one of job, hydra, all"),
    (("run", "model.path=''"), "model.path='' must be text"),
    (("run", "model.path=5"), "model.path=5 must be text"),
    (("run", "task=jsonl", "task.path=[a]"), "task.path=['a'] must be the path of a file"),
    (("run", "seed=1180591620717411303424"), "seed=1180591620717411303424 must be a number, an integer of 64 bits"),
    (("run", "num_threads=1000000"), "num_threads=1000000"),
    (("run", "sampling.skip_special_tokens=1"), "sampling.skip_special_tokens=1: input should be a valid boolean"),
    (("run", "sampling.stop_token_ids=[1.5]"), "sampling.stop_token_ids[0]=1.5: input should be a valid integer"),
    (("run", "-m", "limit=1,maybe"), "limit='maybe' must be a number"),
    (("run", "cost_table=/nowhere/x", "enable_adaptive_verification=true"), "/nowhere: x cannot be read"),
    (("bench", "dtypes=[1]"), "dtypes=[1] must be a list of types"),
    (("bench", "num_threads=[0]"), "num_threads=[0] must be a list of numbers of at least 1"),
]


@pytest.mark.parametrize(("arguments", "words"), KINDS, ids=lambda value: " ".join(value)[:40])
def test_a_value_of_another_kind_is_one_line(arguments: tuple[str, ...], words: str, tmp_path: Path, cli: Cli) -> None:
    name, *rest = arguments
    assert words in cli(name, "model=tiny", f"out_dir={tmp_path / 'run'}", *rest).error


@pytest.mark.parametrize("value", ["auto", "1.5", "true", "[3]"])
def test_training_drafts_a_number_of_tokens(value: str, tmp_path: Path, cli: Cli) -> None:
    where = {"folder": EVAL.parent / "train"}
    error = cli("eagle", "model=tiny", f"method.num_speculative_tokens={value}", f"out_dir={tmp_path / 'run'}", **where).error
    assert "method.num_speculative_tokens=" in error
    assert "must be a number" in error or "valid integer" in error


def test_hydras_own_options_still_work(cli: Cli) -> None:
    done = cli("run", "model=tiny", "--cfg", "job")
    assert done.code == 0, done.err
    assert "prefill_chunk_size: 512" in done.out


@pytest.mark.parametrize(("key", "value"), [("include_stop_str_in_output", "true"), ("skip_special_tokens", "false")])
def test_how_text_is_written_can_be_said(key: str, value: str, tmp_path: Path, cli: Cli) -> None:
    done = cli("run", *SMALL, "baseline=false", f"sampling.{key}={value}", f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert all(row["sampling"][key] is json.loads(value) for row in rows_of(tmp_path / "run" / "requests.jsonl"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"overall": 5}, "overall=5"), ({"seed": "x"}, "seed='x'"), ({"categories": []}, "categories=[]"),
        ({"overall": {"speedup": "x"}}, "overall.speedup='x'"), ({"sampling": None}, "sampling=None"),
    ],
)  # fmt: skip
def test_a_summary_of_other_types_is_named(
    change: dict[str, Any], words: str, finished: Finished, tmp_path: Path, cli: Cli
) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished[0], other)
    summary = json.loads((other / "summary.json").read_text())
    for key, value in change.items():
        summary[key] = summary[key] | value if isinstance(value, dict) else value
    (other / "summary.json").write_text(json.dumps(summary))
    assert words in cli("compare", finished[0], other).error
    assert words in cli("profile_cost", "model=tiny", "method=draft_model", "method.model=tiny", f"acceptance={other}").error


@pytest.mark.parametrize("arguments", [(), ("--nope",), ("a", "--out")])
def test_scripts_without_hydra_end_in_one_line(arguments: tuple[str, ...], cli: Cli) -> None:
    assert "see --help" in cli("compare", *arguments).error


def test_a_run_from_python_is_that_of_the_command_line(tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "method=suffix")
    cfg = config.compose("eval", *words, f"out_dir={tmp_path / 'python'}")
    summary = task_run.run(cfg, quiet=True)
    assert not capsys.readouterr().out
    done = cli("run", *words, f"out_dir={tmp_path / 'line'}")
    assert done.code == 0, done.err
    assert config.plain(cfg) == read(tmp_path / "line" / "config.yaml") | {"out_dir": cfg.out_dir}
    assert outputs(tmp_path / "python") == outputs(tmp_path / "line")
    assert json.loads((tmp_path / "python" / "summary.json").read_text())["overall"] == summary["overall"]
    shutil.rmtree(tmp_path / "python")
    task_run.run(cfg, quiet=True)  # nothing of the first run is held


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("methd=suffix",), "unknown key 'methd'; did you mean 'method'?"),
        (("method=ngram,suffix",), "several values are a sweep"),
        (("-m", "method=ngram,suffix"), "-m: of the command line alone; give settings of the page, key=value"),
        (("++hydra.run.dir=x",), "++hydra.run.dir=x: of the command line alone"),
        (("checkpoint=nowhere",), "checkpoint nowhere: no such directory"),
    ],
)
def test_what_the_command_line_refuses_is_refused_from_python(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        config.compose("eval", *words)
    with pytest.raises(ValueError, match="page 'evl': there is none; did you mean 'eval'"):
        config.compose("evl")
