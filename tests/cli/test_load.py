"""Decoding under load, what costs, and what to choose: arrivals and latencies by hand, the driver against an engine whose
steps take scripted times, and the three scripts as a user meets them."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from specdec import method, rejection
from specdec.core import Request, RequestStats, Step
from specdec.engine import Engine
from specdec.measure import arrivals, choose, records, serving, stats, tasks
from specdec.measure.arrivals import Arrival
from specdec.measure.stats import RequestTiming
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.policy import cost_table
from specdec.policy.cost_table import CostTable
from support.cli import EVAL, Cli, call, contents, outputs, rows_of, write_tasks
from support.processes import ended, fork, wait_for_lines

SELF = ("method=draft_model", "method.model=tiny")  # drafts for itself, so at temperature 0 every draft is accepted


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return partial(call, cwd=tmp_path)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM("tiny", "float32", "cpu")


def short_tasks(path: Path, count: int = 12) -> Path:
    return write_tasks(path, [{"id": f"t{i}", "category": "ab"[i % 2], "turns": [f"Say {i}.", "Why?"]} for i in range(count)])


# ------------------------------------------------------------------------------------------------ arrivals


def test_arrivals_at_one_rate() -> None:
    slow, fast = (arrivals.make_arrivals("poisson", rate, None, 4000, 3, seed=5) for rate in (2.0, 8))
    assert len(slow) == 4000
    assert [a.at_s / 4 for a in slow] == pytest.approx([a.at_s for a in fast]), "the same noise at every rate"
    gaps = np.diff([a.at_s for a in slow])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.05), "exponential"
    assert slow == arrivals.make_arrivals("poisson", 2.0, None, 4000, 3, seed=5)
    assert slow != arrivals.make_arrivals("poisson", 2.0, None, 4000, 3, seed=6)
    assert len(arrivals.make_arrivals("poisson", 2.0, None, None, 3, seed=5)) == 3, "each task once"
    for at_once in (None, math.inf):
        assert {a.at_s for a in arrivals.make_arrivals("poisson", at_once, None, 7, 3, 0)} == {0.0}


def test_arrivals_in_phases() -> None:
    at = np.array([a.at_s for a in arrivals.make_arrivals("poisson", [[100, 5.0], [50, 0], [100, 20]], None, None, 3, seed=1)])
    assert (np.diff(at) > 0).all()
    counts = [((at >= a) & (at < b)).sum() for a, b in ((0, 100), (100, 150), (150, 250))]
    assert counts[1] == 0, "a pause"
    assert counts[0] == pytest.approx(500, rel=0.2)
    assert counts[2] == pytest.approx(2000, rel=0.1)
    assert sum(counts) == len(at), "none after the end"
    assert len(arrivals.make_arrivals("poisson", [[100, 5.0]], None, 10, 3, seed=1)) == 10, "num_requests is the most"


def test_a_trace(tmp_path: Path) -> None:
    path = write_tasks(tmp_path / "t", [{"arrival_s": 2, "id": "b"}, {"arrival_s": 0.5, "max_tokens": 3, "other": 1}, "\n"])
    assert arrivals.read_trace(path) == [Arrival(0.5, None, 3), Arrival(2.0, "b")]
    with path.open("a") as file:
        file.write('{"arrival_s": 4, "id')  # a run that was killed within a line
    assert len(arrivals.read_trace(path)) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense\n", ["line 2", "not JSON"]),
        ({"at": 1}, ["line 2", "arrival_s", "None"]),
        ({"arrival_s": -1}, ["line 2", "-1", "from 0 on"]),
        ({"arrival_s": True}, ["line 2", "True"]),
        ("[1]\n", ["line 2", "arrival_s"]),
        ({"arrival_s": 1, "id": "a"}, ["line 2", "'a'", "unique"]),
        ({"arrival_s": 1, "max_tokens": 0}, ["line 2", "max_tokens=0"]),
        ({"arrival_s": 1.7e9}, ["line 2", "over a year", "from the start"]),
        ({"arrival_s": 10**400}, ["line 2", "arrival_s"]),
    ],
)
def test_a_malformed_trace(line: Any, words: list[str], tmp_path: Path) -> None:
    path = write_tasks(tmp_path / "t", [{"arrival_s": 0, "id": "a"}, line])
    with pytest.raises(ValueError, match="line 2") as error:
        arrivals.read_trace(path)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_a_trace_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes('{"arrival_s": 0, "id": "a\u2028b"}\n{"arrival_s": 1, "id": "ü"}\n'.encode())
    assert [a.id for a in arrivals.read_trace(path)] == ["a\u2028b", "ü"], "a line ends with a newline only"
    path.write_bytes(b'{"arrival_s": 0}\n{"id": "\xfc", "arrival_s": 1}\n')
    with pytest.raises(ValueError, match=r"t, line 2: byte 9 is not UTF-8"):
        arrivals.read_trace(path)
    path.write_bytes('{"arrival_s": 0}\n{"id": "ü'.encode()[:-1])
    assert len(arrivals.read_trace(path)) == 1, "killed within a character"


def test_names_that_a_trace_has_given_are_left_to_it(target: CausalLM, tmp_path: Path) -> None:
    chosen = tasks.load(short_tasks(tmp_path / "t", 2))
    params = SamplingParams(max_tokens=5)
    trace_ids = [None, "t0/1", None, None, "t1/1#2", "t0/1#3", None, None, None]
    at = [Arrival(0.0, name) for name in trace_ids]
    names = [request.id for _, request, _ in arrivals.make_requests(target, chosen, at, params, 0)]
    assert [name for name, trace_id in zip(names, trace_ids, strict=True) if trace_id] == ["t0/1", "t1/1#2", "t0/1#3"]
    assert names == ["t0/1#2", "t0/1", "t0/1#4", "t1/1#3", "t1/1#2", "t0/1#3", "t0/1#5", "t1/1#4", "t0/1#6"]
    assert len(set(names)) == len(names)


def test_requests_begin_again_under_other_names_and_seeds(target: CausalLM, tmp_path: Path) -> None:
    chosen = tasks.load(short_tasks(tmp_path / "t", 3))
    params = SamplingParams(max_tokens=5)
    at = [Arrival(float(i)) for i in range(6)] + [Arrival(6.0, "mine", 2)]
    got = list(arrivals.make_requests(target, chosen, at, params, 0))
    assert [request.id for _, request, _ in got] == ["t0/1", "t1/1", "t2/1", "t0/1#2", "t1/1#2", "t2/1#2", "mine"]
    assert len({request.seed for _, request, _ in got}) == 7
    assert [task.id for _, _, task in got] == ["t0", "t1", "t2", "t0", "t1", "t2", "t0"]
    assert got[0][1].prompt_token_ids == got[3][1].prompt_token_ids
    assert [request.params.max_tokens for _, request, _ in got] == [5] * 6 + [2]


# --------------------------------------------------------------------------------------- numbers, by hand


def request(*steps: tuple[int, int, int, float, int], trimmed: int = 0) -> RequestStats:
    """Steps of (drafted, accepted, emitted, wall_s, batch size)."""
    request_stats = RequestStats()
    for drafted, accepted, emitted, wall_s, rows in steps:
        request_stats.add(drafted, accepted, emitted, 0.1, 0.2, rows, trimmed=trimmed, wall_s=wall_s)
        request_stats.decode_s += wall_s
    return request_stats


def test_latencies_are_measured_from_when_a_request_was_due() -> None:
    request_stats = request((3, 2, 3, 0.5, 2), (3, 0, 1, 1.0, 1))
    request_stats.queue_s = 2.0
    request_stats.time_to_first_token_s = 0.25
    one = RequestTiming(10.0, 10.5, request_stats)  # the engine was in a step for half a second
    assert one.admitted_s == 12.5
    assert one.time_to_first_token == 2.75
    assert one.end_to_end == 4.25
    assert one.finished_s == 14.25
    assert one.num_output_tokens == 5
    assert one.time_per_output_token == 1.5 / 4
    # tokens at 12.75 (1), 13.25 (3), 14.25 (1)
    assert [one.tokens_between(*ends) for ends in ((0, 12.75), (12.75, 13.25), (13, 14.25), (13, 15))] == [0, 1, 3, 4]
    assert RequestTiming(0, 0, RequestStats()).time_per_output_token is None


def test_a_run_by_hand() -> None:
    first = RequestTiming(0.0, 0.0, request((2, 1, 2, 1.0, 1), (2, 2, 3, 2.0, 2)))  # tokens at 0, 1, 3
    second = RequestTiming(2.0, 2.0, request((2, 0, 1, 1.0, 2), trimmed=1))  # tokens at 2, 3
    got = stats.serving_metrics([first, second])
    assert (got["num_requests"], got["num_output_tokens"], got["begin_s"], got["end_s"]) == (2, 8, 0.0, 3.0)
    assert got["output_tokens_per_s"] == 8 / 3
    assert got["requests_per_s"] == 2 / 3
    assert got["offered_requests_per_s"] == 2 / 2, "until the last came"
    assert got["batch_size_share"] == {1: 0.5, 2: 0.5}, "the step that they share is one step"
    assert got["mean_batch_size"] == 1.5
    assert got["wasted_share"] == 1 - 3 / 7, "what was not verified was made too"
    assert got["inter_token_s"]["median"] == 1.0
    assert got["end_to_end_s"]["mean"] == 2.0
    assert got["mean_acceptance_length"] == 1 + 3 / 3
    early = stats.serving_metrics([first, second], 0.0, 1.5)
    late = stats.serving_metrics([first, second], 1.5, 3.0)
    assert (early["num_requests"], late["num_requests"]) == (1, 1)
    assert (early["output_tokens_per_s"], late["output_tokens_per_s"]) == (3 / 1.5, 1 / 1.5), "the last come at 3.0, not before"
    assert (early["requests_per_s"], late["requests_per_s"]) == (0, 0)


def test_phases_that_num_requests_cuts_short() -> None:
    served = [
        RequestTiming(at, at, request((1, 1, 2, 0.25, 1))) for at in (0.0, 0.5, 2.25, 2.5)
    ]  # two tokens each, and a first
    rates = [(1.0, 2.0), (1.0, 0.0), (2.0, 4.0), (5.0, 1.0)]
    cut, complete = (stats.by_phase(served, rates, cut) for cut in (True, False))
    assert list(cut) == ["0 to 1 s at 2/s", "1 to 2 s at 0/s", "2 to 2.75 s at 4/s"]
    assert list(complete) == [*list(cut)[:2], "2 to 4 s at 4/s", "4 to 9 s at 1/s"]
    ended = cut["2 to 2.75 s at 4/s"]
    lasting = complete["2 to 4 s at 4/s"]
    assert (ended["end_s"], ended["output_tokens_per_s"], ended["requests_per_s"]) == (2.75, 6 / 0.75, 2 / 0.75)
    assert ended["offered_requests_per_s"] == 2 / 0.5, "until the last came"
    assert (lasting["end_s"], lasting["output_tokens_per_s"], lasting["offered_requests_per_s"]) == (4.0, 6 / 2, 2 / 2)
    assert cut["0 to 1 s at 2/s"] == complete["0 to 1 s at 2/s"]
    assert "4 to 9 s at 1/s" not in cut, "it never began"


def test_a_phase_in_which_nobody_came() -> None:
    got = stats.serving_metrics([RequestTiming(0.0, 0.0, request((1, 1, 2, 5.0, 1)))], 2.0, 4.0)
    assert got["num_requests"] == 0
    assert got["output_tokens_per_s"] == 0
    assert got["time_to_first_token_s"] is got["mean_batch_size"] is got["wasted_share"] is None


def test_spread_and_ratio() -> None:
    assert stats.percentiles([]) is None
    assert stats.percentiles([3.0, 1.0, 2.0]) == {
        "mean": 2.0,
        "median": 2.0,
        "p90": 2.8,
        "p99": pytest.approx(2.98),
        "max": 3.0,
    }
    got = stats.ratio_of_sums([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert got == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    mixed = stats.ratio_of_sums([1.0, 3.0], [1.0, 1.0])
    assert mixed["low"] == 1.0 < mixed["ratio"] == 2.0 < mixed["high"] == 3.0


def test_survival_leaves_out_drafts_that_were_cut() -> None:
    uncut = request((2, 2, 3, 1, 1), (2, 0, 1, 1, 1), (0, 0, 1, 1, 1), (1, 1, 2, 1, 1))  # 20 tokens may be emitted
    assert stats.survival([uncut], [20], 2) == ([2 / 4, 1 / 4], [3 / 4, 2 / 4], 4)
    # of 5 tokens the first is the prefill's, three come of the first step, and for the second no room for 2 and a bonus is left
    assert stats.survival([request((2, 2, 3, 1, 1), (0, 0, 1, 1, 1))], [5], 2) == ([1, 1], [1, 1], 1)
    assert stats.survival([request((2, 0, 1, 1, 1), trimmed=1)], [20], 2) == ([], [], 0), "a part was not verified"
    assert stats.survival([request((2, 1, 1, 1, 1))], [20], 2)[2] == 0, "a stop"


def test_predicted_tokens_per_s() -> None:
    table = CostTable([1, 2], [0, 2], [[1.0, 1.5], [2.0, 4.0]], [[0.0, 0.5], [0.0, 1.0]], {})
    got = cost_table.tokens_per_s(table, [0.8, 0.4], 2)
    assert got[0] == pytest.approx([1 / 1, 1.8 / (1.25 + 0.25), 2.2 / (1.5 + 0.5)])
    assert got[1] == pytest.approx([2 / 2, 3.6 / (3 + 0.5), 4.4 / (4 + 1)])
    assert cost_table.best_schedule(table, [0.8, 0.4], 2) == [[1, 1, 1], [2, 2, 1]] or cost_table.best_schedule(
        table, [0.8, 0.4], 2
    ) == [[1, 2, 1]]
    # drafts in half of the steps only: half of the drafting, and of the tokens to verify
    assert cost_table.tokens_per_s(table, [0.4], 2, [0.5])[0] == pytest.approx([1.0, 1.4 / (1.125 + 0.125)])


def test_verifying_costs_the_same_whoever_drafts() -> None:
    table = lambda lengths, verify, draft: CostTable([1], lengths, [verify], [draft], {})
    tables = {
        "none": table([0], [9.0], [0.0]),  # a slow moment
        "a": table([0, 2], [1.0, 3.0], [0.0, 5.0]),
        "b": table([0, 1, 4], [1.2, 2.4, 6.0], [0.0, 1.0, 4.0]),
    }
    got = cost_table.share_verification(tables)
    assert got["none"].verify_s == [[1.2]]
    assert got["a"].verify_s == [[1.2, pytest.approx((3.0 + 3.6) / 2)]], "in between is as the tables have it"
    assert got["b"].verify_s == [[1.2, pytest.approx((2.0 + 2.4) / 2), 6.0]], "beyond its end a table says nothing"
    assert [t.draft_s for t in got.values()] == [t.draft_s for t in tables.values()]


# ---------------------------------------------------------------------------------------------- the driver


class Slow:
    """An engine of one row whose steps take `step_s`; a request is done after `steps` of them."""

    def __init__(self, step_s: float, steps: int = 2):
        self.step_s = step_s
        self.num_steps = steps
        self.waiting: list[Request] = []
        self.running: list[list[Any]] = []
        self.last_step: Step | None = None
        self.cleared = False
        self.clock = time.perf_counter

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, request: Request) -> None:
        request.stats = RequestStats()
        request.added_at = time.perf_counter()
        self.waiting.append(request)

    def step(self) -> list[Request]:
        if not self.running:
            request = self.waiting.pop(0)
            request.stats.queue_s = time.perf_counter() - request.added_at
            self.running.append([request, 0])
        time.sleep(self.step_s)
        one = np.ones(1, dtype=np.int64)
        self.last_step = Step(2 * one, one, one, 2 * one, 0.001, 0.002, 0.003, time.perf_counter())
        self.running[0][1] += 1
        if self.running[0][1] == self.num_steps:
            return [self.running.pop()[0]]
        return []

    def abort_all(self) -> None:
        self.cleared = True


def ask(name: str) -> Request:
    return Request(name, [1], SamplingParams())


def open_loop(*args: Any, **more: Any) -> list[tuple[float, float, Request]]:
    return [each for finished in serving.run_open_loop(*args, **more) for each in finished]


def test_a_request_that_comes_during_a_step_waits_from_then_on() -> None:
    turns: list[serving.StepRecord] = []
    engine: Any = Slow(0.05)
    timed = [(0.0, ask("a")), (0.01, ask("b")), (0.3, ask("c"))]
    got = {r.id: (arrival_s, added_s) for arrival_s, added_s, r in open_loop(engine, timed, lambda t, _: turns.append(t))}
    assert [got[name][0] for name in "abc"] == [0.0, 0.01, 0.3]
    assert 0.05 <= got["b"][1] < 0.1, "given to the engine after the step"
    assert 0.3 <= got["c"][1] < 0.34, "it was idle, so at once"
    assert [(t.waiting, t.running) for t in turns[:2]] == [(0, 1), (1, 0)]
    assert len(turns) == 6
    assert (turns[0].drafted, turns[0].verified, turns[0].accepted, turns[0].emitted) == (2, 1, 1, 2)
    assert all(t.wall_s >= 0.05 for t in turns)
    assert not engine.cleared


def test_it_sleeps_only_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    engine: Any = Slow(0.0)
    sleep = time.sleep

    def counted(seconds: float) -> None:
        if seconds:
            assert not engine.waiting
            assert not engine.running
            slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(serving.time, "sleep", counted)
    assert len(open_loop(engine, [(0.0, ask("a")), (0.0, ask("b")), (0.1, ask("c"))])) == 3
    assert len(slept) == 1
    assert slept[0] == pytest.approx(0.1, abs=0.03)


def test_one_at_a_time() -> None:
    engine: Any = Slow(0.01)
    got = open_loop(engine, [(5.0, ask("a")), (5.0, ask("b"))], one_at_a_time=True)
    assert [r.id for _, _, r in got] == ["a", "b"]
    assert all(arrival_s == added_s for arrival_s, added_s, _ in got)
    assert got[1][0] >= 0.02, "when the first was finished"


def test_a_long_sleep_is_cut_into_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who listens for Ctrl-C need not wait for the next request."""
    engine: Any = Slow(0.0)
    sent = serving.run_open_loop(engine, [(3600.0, ask("a"))])
    begin = time.monotonic()
    assert [next(sent), next(sent)] == [[], []]
    assert time.monotonic() - begin < 5


def test_who_stops_listening_leaves_the_engine_empty() -> None:
    engine: Any = Slow(0.0)
    sent = serving.run_open_loop(engine, [(0.0, ask("a")), (0.0, ask("b"))])
    next(sent)
    sent.close()
    assert engine.cleared


def test_warming_up_leaves_nothing_behind(target: CausalLM) -> None:
    proposer = method.build("suffix", target)
    engine = Engine(target, proposer, rejection.build("standard"), 3)
    serving.warm_up(engine)
    assert engine.num_running == 0
    assert not engine.waiting
    assert not proposer._cached, "no responses that a request could be drafted from"


def test_engines_that_take_turns_answer_the_same(target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tasks.load(short_tasks(tmp_path / "t", 5))
    engines = {
        name: Engine(target, method.build(name, target, **settings), rejection.build("standard"), 2, clock=serving.Stopwatch())
        for name, settings in (("none", {}), ("draft_model", {"model": "tiny", "num_speculative_tokens": 2}))
    }
    records = {name: serving.RunRecord() for name in engines}
    params = SamplingParams(temperature=0, max_tokens=6)
    pieces = [chosen[:3], chosen[3:]]
    order: list[str] = []
    for name, engine in engines.items():
        monkeypatch.setattr(engine, "step", lambda name=name, step=engine.step: (order.append(name), step())[1])
    before = time.perf_counter()
    names = [name for name, *_ in serving.run_interleaved(engines, records, pieces, 2.0, params, 0)]
    took = time.perf_counter() - before
    assert sorted(names) == ["draft_model"] * 5 + ["none"] * 5
    assert order[:4] == ["none", "draft_model"] * 2, "step by step"
    assert records["none"].answered == records["draft_model"].answered
    assert len(records["none"].answered) == 5
    for record in records.values():
        assert record.clock_s == max(one.finished_s for one in record.timings)
        assert sum(int(step.emitted_B.sum()) for step in record.steps) == sum(
            one.num_output_tokens - 1 for one in record.timings
        )
        idle = record.clock_s - sum(one.end_to_end for one in record.timings)
        assert idle > 0.5, "at 2 requests/s"
    assert took < records["none"].clock_s, "nobody waits for idle times"
    shift = min(one.arrival_s for one in records["none"].timings[3:])
    assert shift > max(one.finished_s for one in records["none"].timings[:3])


# ------------------------------------------------------------------------------------------- eval/load.py

TINY = ("model=tiny", "task=jsonl", "sampling.max_tokens=8", "sampling.ignore_eos=true")


def test_a_run_under_load(tmp_path: Path, cli: Cli) -> None:
    path = short_tasks(tmp_path / "tasks.jsonl", 6)
    out_dir = tmp_path / "run"
    warm_start = ("sampling.temperature=0.8", "seed=3", f"task.path={path}")
    rate = "request_rate=[[0.4, 20], [0.4, 60]]"
    done = cli("load", *TINY, *SELF, *warm_start, rate, "max_batch_size=2", f"out_dir={out_dir}")
    assert done.code == 0, done.err
    names = {"requests.jsonl", "steps.jsonl", "summary.json", "config.yaml", "run.json", "load.png"}
    assert {file.name for file in out_dir.iterdir()} == names
    rows = rows_of(out_dir / "requests.jsonl")
    turns = rows_of(out_dir / "steps.jsonl")
    summary = json.loads((out_dir / "summary.json").read_text())
    at = {a.at_s for a in arrivals.make_arrivals("poisson", [[0.4, 20], [0.4, 60]], None, None, 6, 3)}
    assert {row["arrival_s"] for row in rows} == at
    assert len(rows) == len({row["id"] for row in rows}) == summary["num_arrivals"] == summary["overall"]["num_requests"]
    assert {"t0/1", "t0/1#2"} <= {row["id"] for row in rows}, "more than the task holds"
    assert summary["num_unfinished"] == 0
    for row in rows:
        assert row["added_s"] >= row["arrival_s"]
        assert (row["method"], row["turn"], row["num_output_tokens"]) == ("draft_model", 1, 8)
        assert row["finish_reason"] == "length"
    assert list(summary["phases"]) == ["0 to 0.4 s at 20/s", "0.4 to 0.8 s at 60/s"]
    assert sum(phase["num_requests"] for phase in summary["phases"].values()) == len(rows)
    assert sum(turn["emitted"] for turn in turns) == sum(sum(row["emitted"]) for row in rows)
    assert max(turn["running"] for turn in turns) <= 2
    share = summary["overall"]["batch_size_share"]
    counted = {n: sum(turn["rows"] == n for turn in turns) for n in (1, 2)}
    assert share["2"] == pytest.approx(counted[2] / (counted[1] + counted[2]))
    assert 0 < summary["busy_share"] <= 1
    assert (out_dir / "load.png").read_bytes().startswith(b"\x89PNG")
    assert all(words in done.out for words in ("0 to 0.4 s at 20/s", "served /s", "wasted", "all")), done.out

    # what a request says hangs neither on the load nor on its neighbours
    assert cli("run", *TINY, *SELF, *warm_start, "baseline=false", f"out_dir={tmp_path / 'alone'}").code == 0
    alone = outputs(tmp_path / "alone")
    assert all(outputs(out_dir)[name] == alone[name] for name in alone if name.endswith("/1"))

    # its arrivals are a trace; without speculation the same requests come at the same times
    trace = ("arrivals=trace", f"trace={out_dir / 'requests.jsonl'}", "method=none", "rejection=match")
    again = cli("load", *TINY, *warm_start, *trace, f"out_dir={tmp_path / 'again'}")
    assert again.code == 0, again.err
    same = lambda folder: {row["id"]: (row["arrival_s"], row["seed"], row["num_prompt_tokens"]) for row in rows_of(folder)}
    assert same(tmp_path / "again" / "requests.jsonl") == same(out_dir / "requests.jsonl")

    before = contents(out_dir)
    assert "already holds a run" in cli("load", *TINY, *SELF, *warm_start, f"out_dir={out_dir}").error
    assert "cannot go on" in cli("load", *TINY, *SELF, *warm_start, f"out_dir={out_dir}", "resume=true").error
    assert contents(out_dir) == before


def test_a_thousand_requests_above_capacity(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is lost, none comes twice, and memory does not grow with what is through."""
    path = short_tasks(tmp_path / "tasks.jsonl")
    out_dir = tmp_path / "run"
    resident = []
    add = records.JsonlFile.add

    def watched(self: records.JsonlFile, row: dict[str, Any]) -> None:
        add(self, row)
        if "arrival_s" in row:
            resident.append(psutil.Process().memory_info().rss / 2**20)

    monkeypatch.setattr(records.JsonlFile, "add", watched)
    many = ("num_requests=1000", "request_rate=5000", "max_batch_size=16", "sampling.max_tokens=3", "method=ngram")
    done = cli("load", *TINY, *many, f"task.path={path}", f"out_dir={out_dir}")
    assert done.code == 0, done.err
    names = [row["id"] for row in rows_of(out_dir / "requests.jsonl")]
    wanted = {f"t{i % 12}/1" + (f"#{i // 12 + 1}" if i >= 12 else "") for i in range(1000)}
    assert len(names) == 1000
    assert set(names) == wanted
    assert max(turn["waiting"] for turn in rows_of(out_dir / "steps.jsonl")) > 200, "above capacity"
    assert resident[-1] - resident[200] < 12, "MiB"


def test_a_killed_run_keeps_what_had_finished(tmp_path: Path, cli: Cli) -> None:
    path = short_tasks(tmp_path / "tasks.jsonl")
    out_dir = tmp_path / "run"
    what = (*TINY, f"task.path={path}", "num_requests=2000", "request_rate=inf", f"out_dir={out_dir}")
    process = fork(EVAL / "load.py", *what, cwd=tmp_path)
    wait_for_lines(out_dir / "requests.jsonl", 20, process)
    process.kill()
    assert ended(process).code == -signal.SIGKILL
    rows = list(records.rows_in(out_dir / "requests.jsonl"))
    assert 20 <= len(rows) < 2000
    assert len({row["id"] for row in rows}) == len(rows)
    assert stats.serving_metrics([records.timing_of(row) for row in rows])["num_requests"] == len(rows)
    assert list(records.rows_in(out_dir / "steps.jsonl"))
    assert not (out_dir / "summary.json").exists()
    assert len(arrivals.read_trace(out_dir / "requests.jsonl")) == len(rows)
    before = contents(out_dir)
    assert "already holds a run" in cli("load", *what).error
    assert contents(out_dir) == before


def test_ctrl_c_summarises_what_had_finished(tmp_path: Path) -> None:
    path = short_tasks(tmp_path / "tasks.jsonl")
    out_dir = tmp_path / "run"
    what = (*TINY, f"task.path={path}", "num_requests=2000", "request_rate=inf", f"out_dir={out_dir}")
    process = fork(EVAL / "load.py", *what, cwd=tmp_path)
    wait_for_lines(out_dir / "requests.jsonl", 5, process)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code == 130
    assert "Traceback" not in done.err
    assert "resume" not in done.err
    summary = json.loads((out_dir / "summary.json").read_text())
    count = len(rows_of(out_dir / "requests.jsonl"))
    assert summary["interrupted"] is True
    assert (summary["overall"]["num_requests"], summary["num_unfinished"]) == (count, 2000 - count)
    assert f"{count} of 2000" in done.err
    assert summary["num_not_due"] == 0
    assert (out_dir / "load.png").exists()


def test_ctrl_c_tells_what_had_not_come(tmp_path: Path) -> None:
    path = short_tasks(tmp_path / "tasks.jsonl")
    out_dir = tmp_path / "run"
    trace = write_tasks(tmp_path / "trace", [{"arrival_s": 0.0}] * 3 + [{"arrival_s": 3600.0 + i} for i in range(7)])
    process = fork(
        EVAL / "load.py", *TINY, f"task.path={path}", "arrivals=trace", f"trace={trace}", f"out_dir={out_dir}", cwd=tmp_path
    )
    wait_for_lines(out_dir / "requests.jsonl", 3, process)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code == 130
    summary = json.loads((out_dir / "summary.json").read_text())
    assert (summary["num_arrivals"], summary["num_unfinished"], summary["num_not_due"]) == (10, 0, 7)
    assert "3 of 10" in done.err
    assert "7 were not due yet" in done.err


BAD_LOADS = [
    (("request_rate=-1",), ["request_rate=-1", "above 0"]),
    (("request_rate=0",), ["request_rate=0", "above 0"]),
    (("request_rate=fast",), ["request_rate='fast'", "inf or null"]),
    (("request_rate=true",), ["request_rate=True"]),
    (("request_rate=[]",), ["request_rate=[]"]),
    (("request_rate=[[10]]",), ["[10]", "[seconds, requests per second]"]),
    (("request_rate=[[-10,1]]",), ["lasts -10 s", "above 0"]),
    (("request_rate=[[10,-1]]",), ["rate -1"]),
    (("request_rate=[[10,inf]]",), ["rate inf"]),
    (("request_rate=[[10,0]]",), ["no request ever arrives"]),
    (("request_rate=[[0.001,0.001]]",), ["longer phases"]),
    (("request_rate=[[1e9,1e9]]",), ["about 1e+18 requests", "1000000 are the most", "rates or seconds", "num_requests="]),
    (("request_rate=[[1e300,1e300],[1,1]]",), ["about inf requests", "num_requests="]),
    (("request_rate=1e-320",), ["request_rate=1e-320", "over a year", "raise it"]),
    (("num_requests=0",), ["num_requests=0", "at least 1"]),
    (("num_requests=1000001",), ["num_requests=1000001", "1000000 are the most"]),
    (("num_requests=many",), ["num_requests='many'", "a number"]),
    (("arrivals=poison",), ["arrivals=poison", "did you mean 'poisson'?"]),
    (("arrivals=trace",), ["needs trace=FILE"]),
    (("arrivals=trace", "trace=nowhere.jsonl"), ["nowhere.jsonl", "no such file"]),
    (("arrivals=trace", "trace=5"), ["trace=5 must be the path", "trace=./5"]),
    (("arrivals=trace", "trace=empty.jsonl"), ["empty.jsonl", "no arrivals"]),
    (("trace=empty.jsonl",), ["arrivals=trace"]),
    (("reqest_rate=3",), ["did you mean 'request_rate'?"]),
    (("resume=true",), ["cannot go on"]),
    (("max_model_len=20",), ["prompt has", "max_model_len=20"]),
    (("method=none", "num_speculative_tokens_per_batch_size=[[1,2,3]]"), ["drafts nothing"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_LOADS, ids=lambda value: "".join(value)[:40])
def test_a_load_that_cannot_be(arguments: tuple[str, ...], words: list[str], tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    error = cli("load", "model=tiny", "limit=2", f"out_dir={tmp_path / 'run'}", *arguments).error
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------- eval/profile_cost.py


def test_costs_of_trees_and_the_size_that_pays(tmp_path: Path, cli: Cli) -> None:
    trees = ("model=tiny", *SELF, "method.tree_topk=2", "method.tree_depth=3", "method.num_speculative_tokens=6")
    assert cli("run", *trees, "limit=2", "sampling.max_tokens=16", "baseline=false", f"out_dir={tmp_path / 'run'}").code == 0
    costs = ("max_batch_size=2", "repeats=1", "context=16", f"acceptance={tmp_path / 'run'}", f"out_dir={tmp_path / 'c'}")
    done = cli("profile_cost", *trees, *costs)
    assert done.code == 0, done.err
    table = cost_table.load(tmp_path / "c" / "cost.json")
    assert table.about["drafts"] == "trees"
    survival = table.about["acceptance"]["survival"]
    accepted = []
    for row in rows_of(tmp_path / "run" / "requests.jsonl"):
        left = 16 - 1  # tokens after the prefill's
        for count, emitted in zip(row["accepted"], row["emitted"], strict=True):
            accepted += [count] if left > 3 else []  # there was room for the deepest path and the token after it
            left -= emitted
    assert sum(survival) == pytest.approx(sum(accepted) / len(accepted)), "the accepted nodes of a step"
    assert survival[0] == 1, "it drafts for itself, so that the likeliest token is always accepted"
    assert 0 < min(survival) < 1, "not all nodes are on the accepted path"
    assert "nodes   tokens/step   batch size 1" in done.out


def test_costs_of_a_busy_machine_are_said_to_be(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {True: "the machine was busy with other work (wall / CPU time is", False: "written to"}
    for is_busy, line in busy.items():
        monkeypatch.setattr("time.process_time", lambda is_busy=is_busy: time.perf_counter() / (1.5 if is_busy else 1))
        small = ("model=tiny", *SELF, "max_batch_size=1", "repeats=1", "context=16", f"out_dir={tmp_path / str(is_busy)}")
        done = cli("profile_cost", *small)
        assert done.code == 0, done.err
        assert line in " ".join(done.out.split())
        assert ("busy with other work" in " ".join(done.out.split())) == is_busy


def test_costs_and_the_schedule_that_follows(tmp_path: Path, cli: Cli) -> None:
    few = ("model=tiny", *SELF, "limit=2", "sampling.max_tokens=16")
    assert cli("run", *few, "baseline=false", f"out_dir={tmp_path / 'run'}").code == 0
    small = ("model=tiny", *SELF, "max_batch_size=3", "repeats=1", "context=16")
    done = cli(
        "profile_cost", *small, "method.num_speculative_tokens=4", f"acceptance={tmp_path / 'run'}", f"out_dir={tmp_path / 'c'}"
    )
    assert done.code == 0, done.err
    assert {file.name for file in (tmp_path / "c").iterdir()} == {"cost.json", "cost.png", "config.yaml", "run.json"}
    table = cost_table.load(tmp_path / "c" / "cost.json")
    assert (table.batch_sizes, table.draft_lengths) == ([1, 2, 3], [0, 1, 2, 3, 4])
    assert table.about["acceptance"]["survival"] == [1.0, 1.0, 1.0], "it drafts for itself"
    assert table.schedule is not None
    assert table.schedule[0][0] == 1
    assert table.schedule[-1][1] == 3
    assert max(entry[2] for entry in table.schedule) <= 3
    line = f"num_speculative_tokens_per_batch_size={json.dumps(table.schedule, separators=(',', ':'))}"
    assert line in done.out
    assert "K=3, and nothing is known beyond it" in " ".join(done.out.split())
    assert "predicted tokens/s" in done.out
    assert (
        "chains, and here drafts are trees"
        in cli(
            "profile_cost", *small, "method.tree_topk=2", f"acceptance={tmp_path / 'run'}", f"out_dir={tmp_path / 'd'}"
        ).error
    )
    for taken in (line, f"num_speculative_tokens_per_batch_size={tmp_path / 'c' / 'cost.json'}"):
        again = cli("run", *few, taken, "max_batch_size=2", "baseline=false", f"out_dir={tmp_path / str(len(taken))}")
        assert again.code == 0, again.err
    adaptive = ("method.num_speculative_tokens=auto", f"cost_table={tmp_path / 'c' / 'cost.json'}")
    assert cli("run", *few, *adaptive, "baseline=false", f"out_dir={tmp_path / 'auto'}").code == 0

    # what says nothing about this method
    where = (*small, f"out_dir={tmp_path / 'd'}")
    assert "not the out_dir" in cli("profile_cost", *where, f"acceptance={tmp_path}").error
    assert "its K was chosen" in cli("profile_cost", *where, f"acceptance={tmp_path / 'auto'}").error
    assert (
        "of the same method"
        in cli("profile_cost", "model=tiny", "method=ngram", *where[5:], f"acceptance={tmp_path / 'run'}").error
    )
    assert "max_batch_size=0" in cli("profile_cost", *where, "max_batch_size=0").error
    assert "not resumed" in cli("profile_cost", *where, "resume=true").error
    too_long = cli("profile_cost", *where, "max_draft=5000").error
    assert "drafts of up to 5000 tokens" in too_long
    assert "max_draft" in too_long
    assert "already holds a run" in cli("profile_cost", *small, f"out_dir={tmp_path / 'c'}").error
    assert "did you mean 'repeats'?" in cli("profile_cost", *where, "repeat=3").error
    assert not (tmp_path / "d").exists()


# ----------------------------------------------------------------------------------------- eval/choose.py


def test_choosing(tmp_path: Path, cli: Cli) -> None:
    path = short_tasks(tmp_path / "tasks.jsonl", 5)
    out_dir = tmp_path / "run"
    runs = "{own: {method: draft_model, model: tiny}, auto: {method: ngram, num_speculative_tokens: auto}}"
    few = ("limit=4", "cost_repeats=1", "max_batch_size=2", "rates=[all,0.8,one]", "repeats=2", "methods=[ngram]")
    done = cli("choose", *TINY, f"task.path={path}", *few, f"runs={runs}", f"out_dir={out_dir}")
    assert done.code == 0, done.err
    summary = json.loads((out_dir / "choose.json").read_text())
    assert list(summary["runs"]) == ["none", "ngram", "own", "auto"], "plain decoding is always there"
    assert summary["levels"] == ["one", "0.8", "all"]
    rows = rows_of(out_dir / "requests.jsonl")
    assert len(rows) == 4 * 3 * 4 * 2, "runs, rates, requests, rounds"
    for level in summary["levels"]:
        at = {
            name: [(row["id"], row["seed"]) for row in rows if row["run"] == name and row["rate"] == level]
            for name in summary["runs"]
        }
        assert all(sorted(tokens) == sorted(at["none"]) for tokens in at.values())
    plain = summary["runs"]["none"]
    assert plain["gain_low"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert plain["gain_high"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    for tokens in summary["runs"].values():
        assert tokens["outputs"] == "24/24"
        # at this rate the engine is never idle: what differs is the time between its steps
        assert tokens["gain_high"]["ratio"] == pytest.approx(
            tokens["at"]["all"]["output_tokens_per_s"] / plain["at"]["all"]["output_tokens_per_s"], rel=0.25
        )
        assert tokens["gain_high"]["low"] <= tokens["gain_high"]["high"]
        assert tokens["gain_low"]["ratio"] == pytest.approx(
            plain["at"]["one"]["end_to_end_s"]["mean"] / tokens["at"]["one"]["end_to_end_s"]["mean"]
        )
        assert tokens["at"]["one"]["mean_batch_size"] == 1
        n = tokens["at"]["all"]
        assert n["measured_over_predicted"] == pytest.approx(n["decode_tokens_per_s"] / n["predicted_tokens_per_s"])
    tokens = summary["runs"]["own"]["at"]["one"]
    assert tokens["wasted_share"] == 0
    assert tokens["mean_acceptance_length"] > 3
    assert re.search(r"auto +auto up to \d+ ", done.out), "how many tokens are drafted"
    assert (out_dir / "choose.png").read_bytes().startswith(b"\x89PNG")
    assert list(summary["fastest"]) == ["low", "high"]
    for line in summary["fastest"].values():
        assert line in " ".join(done.out.split())
        assert not re.search("fastest at the .* rate: none", line)
    assert set(summary["runs"]["own"]["gain_cpu"]) == set(summary["levels"])
    assert "already holds a run" in cli("choose", *TINY, f"task.path={path}", *few, f"out_dir={out_dir}").error


@pytest.mark.parametrize(
    ("rounds", "words"), [(4, "no run is faster than none beyond the noise"), (1, "2 requests are too few")]
)
def test_who_drafted_nothing_is_not_the_fastest(rounds: int, words: str, tmp_path: Path, cli: Cli) -> None:
    """An n-gram that never matches does what plain decoding does, and differs from it by chance alone."""
    path = short_tasks(tmp_path / "tasks.jsonl", 2)
    never = "{method: ngram, prompt_lookup_min: 200, prompt_lookup_max: 200}"
    few = ("cost_repeats=1", "max_batch_size=2", "methods=[none]", f"repeats={rounds}")
    done = cli("choose", *TINY, f"task.path={path}", *few, f"runs={{never: {never}}}", f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "choose.json").read_text())
    assert summary["runs"]["never"]["at"]["one"]["num_draft_tokens"] == 0
    assert all(words in line for line in summary["fastest"].values()), summary["fastest"]


def test_a_verdict_names_what_it_does_not_count() -> None:
    """A run that drafted nothing and one that is slower by CPU time are no winners, and no equals of the winner either."""
    base = [1.0 + 0.01 * i for i in range(12)]
    factors = {"none": 1.0, "idle": 2.0, "suffix": 1.5, "e3": 3.0}
    measured = {name: ([1.0] * 12, [second / by for second in base]) for name, by in factors.items()}
    runs = {
        name: {"at": {"all": {"num_draft_tokens": drafted}}, "gain_cpu": {"all": by_cpu}}
        for name, drafted, by_cpu in (("none", 0, 1.0), ("idle", 0, 2.0), ("suffix", 9, 1.4), ("e3", 9, 0.9))
    }
    line = choose.verdict("high", measured, runs, "all", True)
    assert line.startswith("fastest at the high rate: suffix, 1.50 (1.50 to 1.50)")
    assert line.endswith("; seemed faster than none, and is not counted: e3 (not by CPU time), idle (drafted nothing)")
    assert "within the noise" not in line
    assert choose.verdict("high", measured, runs, "all", False).startswith("fastest at the high rate: e3, 3.00")
    del runs["suffix"], measured["suffix"]
    assert "no run is faster than none beyond the noise; seemed" in choose.verdict("high", measured, runs, "all", True)


def test_outputs_that_differ_are_said(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    path = short_tasks(tmp_path / "tasks.jsonl", 2)
    add = serving.RunRecord.add

    def spoil(self: serving.RunRecord, served: RequestTiming, request: Request) -> None:
        if request.stats.accepted and max(request.stats.accepted):
            request.output_token_ids = [*request.output_token_ids[:-1], 0]
        add(self, served, request)

    monkeypatch.setattr(serving.RunRecord, "add", spoil)
    few = ("cost_repeats=1", "max_batch_size=2", "methods=[none]", "runs={own: {method: draft_model, model: tiny}}")
    done = cli("choose", *TINY, f"task.path={path}", *few, f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert "warning: own: NOT TOKEN FOR TOKEN" in done.out
    assert "0/4" in done.out


BAD_CHOICES = [
    (("methods=[ngrm]",), ["'ngrm'", "did you mean 'ngram'?"]),
    (("methods=ngram",), ["must be a list"]),
    (("methods=[ngram,ngram]",), ["twice", "runs="]),
    (("methods=[eagle3]",), ["checkpoints={eagle3: DIR}"]),
    (("checkpoints={egle3: there}",), ["checkpoints: no method 'egle3'", "did you mean 'eagle3'?"]),
    (("checkpoints=nodir",), ["checkpoints='nodir' must be a mapping", "{eagle3: DIR}"]),
    (("checkpoints={eagle3: null}",), ["eagle3 has None", "{eagle3: DIR}"]),
    (("runs=[ngram]",), ["runs=['ngram'] must be a mapping", "{a: {method: ngram}}"]),
    (("checkpoints={ngram: there}",), ["takes none"]),
    (("checkpoints={eagle3: /nowhere}",), ["run 'eagle3'", "'/nowhere': no such directory"]),
    (("runs={a: {method: ngram, num_speculativ_tokens: 2}}",), ["run 'a'", "'num_speculative_tokens'?"]),
    (("runs={a: {num_speculative_tokens: 2}}",), ["'a'", "needs a method"]),
    (("runs={a: ngram}",), ["'a' has 'ngram'", "write {a: {method: ngram}}"]),
    (("runs={a: ngrm}",), ["'a' needs a method", "did you mean 'ngram'?"]),
    (("runs={ngram: {method: ngram}}",), ["'ngram'", "already"]),
    (("runs={none: {method: none}}",), ["'none'", "already"]),
    (("rates=[one]",), ["two or more"]),
    (("rates=[one,evrything]",), ["'evrything' is no rate", "all (at once)"]),
    (("rates=[one,-1]",), ["-1", "above 0"]),
    (("rates=[all,all]",), ["twice"]),
    (("repeats=0",), ["repeats=0"]),
    (("resume=true",), ["cannot go on"]),
    (("rats=[one,all]",), ["did you mean 'rates'?"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_CHOICES, ids=lambda value: "".join(value)[:40])
def test_a_choice_that_cannot_be(arguments: tuple[str, ...], words: list[str], tmp_path: Path, cli: Cli) -> None:
    error = cli("choose", "model=tiny", "limit=2", f"out_dir={tmp_path / 'run'}", *arguments).error
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()
