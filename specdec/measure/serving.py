"""Decoding requests at the times when they arrive: one engine by the wall clock, or several engines in turn, each by a clock of
its own.

Arrivals are open-loop (`specdec.measure.arrivals`). `one_at_a_time` is the closed loop with a single user.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.checked import short_repr
from specdec.core import Request, Step
from specdec.engine import Engine
from specdec.measure.arrivals import Arrival, is_number, make_requests, poisson
from specdec.measure.stats import RequestTiming
from specdec.measure.tasks import Task
from specdec.params import SamplingParams


@dataclass
class StepRecord:
    """One call of `Engine.step`.

    at_s: its end, in seconds from the start of the run.
    wall_s: its duration, prefills included.
    waiting, running: requests at its end.
    rows, drafted, verified, accepted, emitted: rows that decoded, and their tokens; 0 if only prompts were processed.
    draft_s, verify_s: durations of the two phases.
    """

    at_s: float
    wall_s: float
    waiting: int
    running: int
    rows: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def row(self) -> dict[str, Any]:
        """A line of steps.jsonl, in which `made` are the drafted and `drafted` the verified tokens."""
        return {
            "at_s": round(self.at_s, 6),
            "wall_s": round(self.wall_s, 6),
            "waiting": self.waiting,
            "running": self.running,
            "rows": self.rows,
            "made": self.drafted,
            "drafted": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "draft_s": round(self.draft_s, 6),
            "verify_s": round(self.verify_s, 6),
        }


OnStep = Callable[[StepRecord, Step | None], object]


def warm_up(engine: Engine, num_tokens: int = 8, num_prompt: int = 64) -> None:
    """Decode made-up prompts in every row, so that one-time work (memory, compilation) is not measured. The proposer forgets
    their answers."""
    # an engine beside it, so that its policy learns nothing
    limits = (engine.max_batch_size, engine.max_model_len, engine.prefill_chunk_size)
    beside = Engine(engine.target, engine.proposer, engine.verifier, *limits, cache=engine.cache)
    beside.fixed_shapes = engine.fixed_shapes
    room = min(engine.max_model_len, num_prompt + num_tokens)
    params = SamplingParams(temperature=0, max_tokens=min(num_tokens, room - 1), ignore_eos=True)
    # the prompt repeats itself, so that lookups draft
    ids = (np.arange(max(room - num_tokens, 1)) % min(8, engine.target.vocab_size)).tolist()
    for _ in beside.run(Request(f"warm-up {row}", ids, params, row) for row in range(engine.max_batch_size)):
        pass
    engine.proposer.reset()
    # a collection over all loaded objects takes a quarter of a second, and would fall into some request's first token
    gc.collect()
    gc.freeze()


class Stopwatch:
    """A clock that runs only between start and stop. Sleeping on it puts it forward without waiting."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._started_at: float | None = None

    def __call__(self) -> float:
        running_s = 0.0 if self._started_at is None else time.perf_counter() - self._started_at
        return self._elapsed_s + running_s

    def start(self) -> None:
        self._started_at = time.perf_counter()

    def stop(self) -> None:
        self._elapsed_s = self()
        self._started_at = None

    def sleep(self, seconds: float) -> None:
        self._elapsed_s += seconds


def run_open_loop(
    engine: Engine,
    timed: Iterable[tuple[float, Request]],
    on_step: OnStep = lambda record, step: None,
    one_at_a_time: bool = False,
) -> Generator[list[tuple[float, float, Request]]]:
    """Add each request to the engine when it arrives, and yield what finished, as (arrival_s, added_s, request) in seconds from
    the start, after every step and every half second of sleep. Sleeps only while no request is in the engine, and holds only
    requests that are.

    engine: decodes, and has the clock.
    timed: (arrival_s, request) in order of time.
    on_step: called after every step.
    one_at_a_time: each request arrives when the one before it is finished, whatever its arrival_s.
    """
    requests = iter(timed)
    upcoming = next(requests, None)
    in_flight: dict[str, tuple[float, float]] = {}
    sleep = engine.clock.sleep if isinstance(engine.clock, Stopwatch) else time.sleep
    begin = engine.clock()
    try:
        while upcoming is not None or in_flight:
            now_s = engine.clock() - begin
            while upcoming is not None and (not in_flight if one_at_a_time else upcoming[0] <= now_s):
                arrival_s, request = upcoming
                assert request.id not in in_flight, f"two requests are called {request.id}"
                engine.add(request)
                added_s = request.added_at - begin
                in_flight[request.id] = (added_s if one_at_a_time else arrival_s, added_s)
                upcoming = next(requests, None)
            if not in_flight:
                assert upcoming is not None
                sleep(min(upcoming[0] - now_s, 0.5))
                yield []
                continue
            step_begin = engine.clock()
            finished = engine.step()
            step_end = engine.clock()
            step = engine.last_step
            record = StepRecord(step_end - begin, step_end - step_begin, len(engine.waiting), engine.num_running)
            if step is not None:
                record.rows = len(step.verified_B)
                record.drafted = int(step.drafted_B.sum())
                record.verified = int(step.verified_B.sum())
                record.accepted = int(step.accepted_B.sum())
                record.emitted = int(step.emitted_B.sum())
                record.draft_s = step.draft_s
                record.verify_s = step.verify_s
            on_step(record, step)
            yield [(*in_flight.pop(request.id), request) for request in finished]
    finally:
        if in_flight:
            engine.abort_all()


# ---------------------------------------------------------------- several engines on the same requests

Level = str | float  # "one", "all", or a multiple of what plain decoding can serve


def parse_rates(rates: Any) -> list[Level]:
    """`rates` of conf/choose.yaml, from low to high. ValueError, one line, for anything else."""
    if not isinstance(rates, list) or len(rates) < 2:
        raise ValueError(f"rates={short_repr(rates)} must be a list of two or more, such as [one, 0.5, all]")
    for rate in rates:
        if isinstance(rate, str) and rate not in ("one", "all"):
            raise ValueError(
                f"rates: {short_repr(rate)} is no rate; use one (at a time), all (at once), or a multiple of plain capacity"
            )
        if not isinstance(rate, str) and not (is_number(rate) and 0 < rate < math.inf):
            raise ValueError(
                f"rates: {short_repr(rate)} must be a multiple above 0 of what plain decoding can serve, or one, or all"
            )
    if len(set(rates)) < len(rates):
        raise ValueError(f"rates={short_repr(rates)}: an entry is there twice; leave it out")
    return sorted(rates, key=lambda rate: {"one": 0.0, "all": math.inf}.get(rate, rate))


@dataclass
class RunRecord:
    """Requests and steps of one engine at one rate.

    timings: of the finished requests, on a clock that ran only in the engine's turns.
    steps: of the engine.
    answered: output tokens by request, in the same order as timings (a request that is decoded again is marked with ').
    clock_s: the end of the last piece of work.
    """

    timings: list[RequestTiming] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    answered: dict[str, list[int]] = field(default_factory=dict)
    clock_s: float = 0.0

    def add_step(self, record: StepRecord, step: Step | None) -> None:
        if step is not None:
            self.steps.append(step)

    def add(self, timing: RequestTiming, request: Request) -> None:
        name = request.id
        while name in self.answered:
            name += "'"
        self.timings.append(timing)
        self.answered[name] = request.output_token_ids

    def by_request(self, number: Callable[[RequestTiming], float]) -> list[float]:
        """A number of each request, in the order of their names: two records give pairs."""
        by_name = sorted(zip(self.answered, self.timings, strict=True), key=lambda pair: pair[0])
        return [number(timing) for _, timing in by_name]

    def end_to_end(self) -> list[float]:
        """Seconds of each request from arrival to its last token."""
        return self.by_request(lambda timing: timing.end_to_end)


def run_interleaved(
    engines: dict[str, Engine],
    records: dict[str, RunRecord],
    pieces: Sequence[Sequence[Task]],
    requests_per_s: float | None,
    params: SamplingParams,
    seed: int,
    one_at_a_time: bool = False,
) -> Iterator[tuple[str, Task, RequestTiming, Request]]:
    """All engines decode a piece of the tasks, then all of them the next one. Yields (name of the engine, task, timing,
    request) as requests finish.

    Within a piece the engines alternate step by step, each by a clock that runs in its own steps alone and jumps over its idle
    times: a slow moment of the machine hits them alike. So they need a cache each. Requests, seeds and arrival times are the
    same for all; the engine that begins changes from piece to piece.

    engines, records: by name; the records are added to.
    pieces: tasks that are decoded together.
    requests_per_s: of the random arrivals within a piece; None: all at once.
    params, seed: of the requests.
    one_at_a_time: each request arrives when the one before it is finished.
    """
    names = list(engines)
    for number, piece in enumerate(pieces):
        arrivals = [Arrival(0.0)] * len(piece)
        if requests_per_s is not None:
            arrivals = poisson([(math.inf, requests_per_s)], len(piece), seed + number)
        first = number % len(names)
        task_of: dict[str, Task] = {}
        running = {}
        clocks = {}
        for name in names[first:] + names[:first]:
            requests = list(make_requests(engines[name].target, piece, arrivals, params, seed))
            task_of |= {request.id: task for _, request, task in requests}
            clock = engines[name].clock
            assert isinstance(clock, Stopwatch), f"engine {name} needs a Stopwatch as its clock"
            clocks[name] = clock
            timed = [(arrival_s, request) for arrival_s, request, _ in requests]
            running[name] = run_open_loop(engines[name], timed, records[name].add_step, one_at_a_time)
        begin_s = {name: records[name].clock_s for name in names}
        try:
            while running:
                for name in list(running):
                    clocks[name].start()
                    finished = next(running[name], None)
                    clocks[name].stop()
                    if finished is None:
                        del running[name]
                        continue
                    for arrival_s, added_s, request in finished:
                        timing = RequestTiming(begin_s[name] + arrival_s, begin_s[name] + added_s, request.stats)
                        records[name].add(timing, request)
                        yield name, task_of[request.id], timing, request
        finally:
            for iterator in running.values():
                iterator.close()
        for name in names:
            records[name].clock_s = max(timing.finished_s for timing in records[name].timings)
