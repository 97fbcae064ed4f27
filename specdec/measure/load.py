"""A run under load: requests are decoded as they arrive and written line by line, then summarised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from specdec import script
from specdec.core import Request, Step
from specdec.engine import Engine
from specdec.measure import records, serving, stats, tasks
from specdec.measure.arrivals import Arrival, Phases, make_requests
from specdec.measure.report import console
from specdec.measure.serving import StepRecord
from specdec.measure.stats import RequestTiming
from specdec.measure.tasks import Task
from specdec.params import SamplingParams


@dataclass(frozen=True)
class Interruption:
    """How a run was stopped. exit_code: of the process, 128 plus the signal; num_not_due: requests that had not arrived yet."""

    exit_code: int
    num_not_due: int


def prepare(engine: Engine, chosen: list[Task], arrivals: Sequence[Arrival], params: SamplingParams, seed: int) -> None:
    """Check every request and reserve memory for the longest. Raises ValueError, one line, for one that cannot be decoded."""
    for _, request, _ in make_requests(engine.target, chosen, arrivals, params, seed):
        engine.check(request)
    tasks.prepare(engine, chosen, params)
    if max_tokens := [arrival.max_tokens for arrival in arrivals if arrival.max_tokens]:
        tasks.prepare(engine, chosen, params.model_copy(update={"max_tokens": max(max_tokens)}))


def decode(
    engine: Engine,
    chosen: list[Task],
    arrivals: Sequence[Arrival],
    params: SamplingParams,
    seed: int,
    out_dir: Path,
    common: dict[str, Any],
    on_request: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Interruption | None:
    """Decode the requests as they arrive, and write requests.jsonl and steps.jsonl while doing so. Ctrl-C and SIGTERM end it
    after the step in which they come.

    engine: decodes.
    chosen, arrivals, params, seed: the requests.
    out_dir: of the run.
    common: what all rows have in common.
    on_request: takes the row of every request that has finished.
    """
    rows = records.JsonlFile(out_dir / "requests.jsonl", keep=False)
    steps = records.JsonlFile(out_dir / "steps.jsonl", keep=False)
    rates = stats.RunningRates()
    task_of: dict[str, Task] = {}

    def timed() -> Iterator[tuple[float, Request]]:
        for arrival_s, request, task in make_requests(engine.target, chosen, arrivals, params, seed):
            task_of[request.id] = task
            yield arrival_s, request

    interruption = None
    with console.one_bar("requests", len(arrivals)) as advance, contextlib.closing(script.StopSignals()) as signals:

        def on_step(record: StepRecord, _: Step | None) -> None:
            steps.add(record.row())
            beside = f", {rates}" if str(rates) else ""
            advance(0, f"{record.waiting} waiting, {record.running} running{beside}")

        begin = engine.clock()
        loop = serving.run_open_loop(engine, timed(), on_step)
        for finished in loop:
            for arrival_s, added_s, request in finished:
                row = records.request_record(task_of.pop(request.id), 1, request, engine.target.tokenizer, common)
                row |= {"id": request.id, "arrival_s": arrival_s, "added_s": added_s}
                rows.add(row)
                on_request(row)
                rates.add(request.stats)
                advance()
            if signals.received is not None:
                stopped_s = engine.clock() - begin
                num_not_due = sum(arrival.at_s > stopped_s for arrival in arrivals)
                interruption = Interruption(128 + signals.received, num_not_due)
                loop.close()
    rows.close()
    steps.close()
    return interruption


def read_timings(out_dir: Path) -> list[RequestTiming]:
    """Of the requests that finished."""
    return [records.timing_of(row) for row in records.rows_in(out_dir / "requests.jsonl")]


def summarize(
    out_dir: Path,
    timings: list[RequestTiming],
    phases: Phases,
    arrivals: Sequence[Arrival],
    all_arrived: bool,
    interruption: Interruption | None,
) -> dict[str, Any]:
    """The numbers of summary.json.

    out_dir: of the run.
    timings: of the requests that finished.
    phases: of the request rate, if it changes.
    arrivals: of all requests.
    all_arrived: requests stopped arriving before the phases ended.
    interruption: if it was interrupted.
    """
    overall = stats.serving_metrics(timings)
    busy_s = sum(step["wall_s"] for step in records.rows_in(out_dir / "steps.jsonl"))
    num_not_due = interruption.num_not_due if interruption else 0
    return {
        "num_arrivals": len(arrivals),
        "num_unfinished": len(arrivals) - num_not_due - len(timings),  # due, but not finished when the run was interrupted
        "num_not_due": num_not_due,
        "interrupted": interruption is not None,
        "busy_share": busy_s / overall["end_s"],
        "environment": records.environment(),
        "overall": overall,
        "phases": stats.by_phase(timings, phases, cut=all_arrived or interruption is not None),
    }


def phase_edges(phases: Phases) -> list[float]:
    """Seconds at which the request rate changes."""
    return list(accumulate(seconds for seconds, _ in phases))
