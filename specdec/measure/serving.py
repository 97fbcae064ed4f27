"""Requests that come when they come: arrival times, the requests of a task that arrive at them, and the driver that sends them
into an engine by the wall clock.

Arrivals are open-loop, as users are: nobody waits with a question until another's is answered. `one_at_a_time` is the closed
loop with a single user. First turns of the tasks only: when a second turn comes would hang on the answer to the first.
"""

from __future__ import annotations

import gc
import math
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from specdec.checked import nearest, short_repr
from specdec.core import Request, Step
from specdec.engine import Engine
from specdec.files import parse_json
from specdec.measure.stats import RequestTiming
from specdec.measure.tasks import Task, first_prompt_ids, request_id
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.prompts import derived_seed

KINDS = ("poisson", "trace")
MOST = 1_000_000  # arrivals of a run: they are listed before it begins
YEAR_S = 365 * 86400.0  # no arrival is later: what is meant are seconds from the start, and sleeping has a limit too
Phases = list[tuple[float, float]]  # seconds, requests per second


@dataclass(frozen=True)
class Arrival:
    """at_s: seconds from the start; id, max_tokens: of the request, if the trace says them."""

    at_s: float
    id: str | None = None
    max_tokens: int | None = None


def phases(request_rate: Any) -> Phases:
    """`request_rate` as (seconds, requests per second): one endless phase of a number; null and inf are all at once.
    ValueError, one line, for anything else."""
    if request_rate is None:
        return [(math.inf, math.inf)]
    if isinstance(request_rate, list):
        if not request_rate:
            raise ValueError("request_rate=[]: give [[seconds, requests per second], ...], or a number")
        found = []
        for entry in request_rate:
            if not isinstance(entry, list) or len(entry) != 2 or not all(map(_is_number, entry)):
                raise ValueError(f"request_rate: {short_repr(entry)} must be [seconds, requests per second], such as [10, 2.0]")
            seconds, rate = map(float, entry)
            if not 0 < seconds < math.inf:
                raise ValueError(f"request_rate: {short_repr(entry)} lasts {entry[0]} s; give seconds above 0")
            if not 0 <= rate < math.inf:
                raise ValueError(
                    f"request_rate: {short_repr(entry)} has rate {entry[1]}; give requests per second, 0 for a pause"
                )
            found.append((seconds, rate))
        if not any(rate for _, rate in found):
            raise ValueError(f"request_rate={short_repr(request_rate)}: no request ever comes; give a phase a rate above 0")
        return found
    if not _is_number(request_rate) or not request_rate > 0:
        raise ValueError(
            f"request_rate={short_repr(request_rate)} must be requests per second above 0, inf or null for all at once, or "
            "[[seconds, rate], ...]"
        )
    return [(math.inf, float(request_rate))]


def _is_number(value: Any) -> TypeGuard[float]:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # an integer that no float holds
        return False


@np.errstate(over="ignore")  # what is too late to be told is inf
def poisson(request_rate: Phases, count: int | None, seed: int) -> list[Arrival]:
    """Arrivals of a Poisson process whose rate changes from phase to phase; the same noise at every rate.

    count: so many requests; where phases end, so many at most (None: as many as come).
    """
    rng = np.random.default_rng(seed)
    if math.isinf(request_rate[0][0]):
        assert count is not None
        at_N = np.cumsum(rng.exponential(size=count)) / request_rate[0][1]
        return [Arrival(float(at)) for at in at_N]
    # in units of expected arrivals the process has rate 1 throughout
    seconds, rates = np.array(request_rate).T
    time_at, expected_at = np.concatenate([[0.0], seconds.cumsum()]), np.concatenate([[0.0], (seconds * rates).cumsum()])
    found: list[Arrival] = []
    expected = float(rng.exponential())
    while expected < expected_at[-1] and (count is None or len(found) < count):
        phase = int(np.searchsorted(expected_at, expected, side="right")) - 1
        found.append(Arrival(float(time_at[phase] + (expected - expected_at[phase]) / rates[phase])))
        expected += float(rng.exponential())
    if not found:
        raise ValueError(f"request_rate={request_rate}: by this seed no request comes in that time; give longer phases")
    return found


def trace(path: Path | str) -> list[Arrival]:
    """Arrivals of a JSON-lines file, in order of time: `arrival_s` and, optionally, `id` and `max_tokens`; other keys are not
    looked at, so that a former run's requests.jsonl is a trace too. A malformed line is a ValueError with its number."""
    if not isinstance(path, str | Path):
        raise ValueError(f"trace={path!r} must be the path of a file; where that is its name, trace=./{path}")
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"trace={path}: no such file; give JSON lines with arrival_s, or the requests.jsonl of eval/load.py")
    found: list[Arrival] = []
    seen: set[str] = set()
    lines = path.read_bytes().split(b"\n")  # the last is empty, or a run was killed within it
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line.decode(), where)
        except UnicodeDecodeError as error:
            if number == len(lines) and error.reason == "unexpected end of data":
                break
            raise ValueError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
        except ValueError:
            if number == len(lines):
                break
            raise
        at = row.get("arrival_s") if isinstance(row, dict) else None
        if not _is_number(at) or not 0 <= at < math.inf:
            raise ValueError(f"{where}: needs 'arrival_s', seconds from 0 on, and has {at!r}")
        if at > YEAR_S:
            raise ValueError(f"{where}: arrival_s={at!r} is over a year; give seconds from the start of the run")
        name, most = row.get("id"), row.get("max_tokens")
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"{where}: max_tokens={most!r} must be a number from 1 on")
        if name is not None:
            if str(name) in seen:
                raise ValueError(f"{where}: the id {name!r} has been used before; make ids unique")
            seen.add(str(name))
        found.append(Arrival(float(at), None if name is None else str(name), most))
    if not found:
        raise ValueError(f"{path}: no arrivals in the file")
    return sorted(found, key=lambda arrival: arrival.at_s)


def arrivals(kind: str, request_rate: Any, path: Any, count: int | None, num_tasks: int, seed: int) -> list[Arrival]:
    """By the settings of conf/load.yaml. count None: as many as there are tasks, or come in the phases, or are in the trace."""
    if kind not in KINDS:
        raise ValueError(f"arrivals={kind}: no such process; {nearest(str(kind), KINDS)}")
    if count is not None and count < 1:
        raise ValueError(f"num_requests={count}: at least 1 is needed; null means one for each task")
    if count is not None and count > MOST:
        raise ValueError(f"num_requests={count}: {MOST} are the most; lower it")
    if kind == "trace":
        if path is None:
            raise ValueError("arrivals=trace needs trace=FILE, JSON lines with arrival_s")
        found = trace(path)[:count]
        if len(found) > MOST:
            raise ValueError(f"trace={path}: {len(found)} requests would come, and {MOST} are the most; give num_requests=")
        return found
    if path is not None:
        raise ValueError(f"trace={path} is for arrivals=trace; leave it out, or say arrivals=trace")
    rate = phases(request_rate)
    endless = math.isinf(rate[0][0])
    expected = num_tasks if endless else sum(seconds * per_s for seconds, per_s in rate)
    if count is None and expected > MOST:
        lower = "limit" if endless else "its rates or seconds"
        raise ValueError(
            f"request_rate={request_rate}: about {expected:.7g} requests would come, and {MOST} are the most; "
            f"lower {lower}, or give num_requests="
        )
    found = poisson(rate, count or num_tasks if endless else count, seed)
    if found[-1].at_s > YEAR_S:
        raise ValueError(
            f"request_rate={request_rate}: the last of {len(found)} requests would come after {found[-1].at_s:.3g} s, over a "
            "year; raise it, or give a lower num_requests="
        )
    return found


def requests(
    target: CausalLM, tasks: Sequence[Task], arrivals: Sequence[Arrival], params: SamplingParams, seed: int
) -> Iterator[tuple[float, Request, Task]]:
    """(arrival_s, request, task) in order, made one by one. Request i asks the first turn of task i, beginning again after the
    last: then with '#2' behind its id, and so another seed. Where a trace has given that name to another, the next number."""
    given = {arrival.id for arrival in arrivals if arrival.id}
    last = [0] * len(tasks)
    prompts = [first_prompt_ids(target.tokenizer, task) for task in tasks]
    for i, arrival in enumerate(arrivals):
        again, place = divmod(i, len(tasks))
        task = tasks[place]
        name = arrival.id or ""
        if not name:
            last[place] = max(last[place], again) + 1
            while (name := request_id(task, 1) + (f"#{last[place]}" if last[place] > 1 else "")) in given:
                last[place] += 1
        own = params if arrival.max_tokens is None else params.model_copy(update={"max_tokens": arrival.max_tokens})
        number = derived_seed(seed, zlib.crc32(name.encode())) if params.seed is None else params.seed
        yield arrival.at_s, Request(name, prompts[place], own, number, task.category), task


@dataclass
class StepRecord:
    """One call of the engine's step. at_s: its end; wall_s: how long it took, prefills included; waiting, running: requests
    when it ended; the rest sums over its rows, and is 0 if nothing but prompts was processed."""

    at_s: float
    wall_s: float
    waiting: int
    running: int
    rows: int = 0
    made: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def row(self) -> dict[str, Any]:
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(self).items()}


def warm_up(engine: Engine, num_tokens: int = 8, num_prompt: int = 64) -> None:
    """Decode made-up prompts in every row, so that what happens once (memory, compilation) is not measured. What a proposer
    remembers of it is forgotten."""
    room = min(engine.max_model_len, num_prompt + num_tokens)
    params = SamplingParams(temperature=0, max_tokens=min(num_tokens, room - 1), ignore_eos=True)
    ids = (np.arange(max(room - num_tokens, 1)) % min(8, engine.target.vocab_size)).tolist()  # repeats itself: drafts are found
    # an engine beside it, so that its policy learns nothing
    beside = Engine(
        engine.target,
        engine.proposer,
        engine.verifier,
        engine.max_batch_size,
        engine.max_model_len,
        engine.prefill_chunk_size,
        engine.cache,
    )
    for _ in beside.run(Request(f"warm-up {row}", ids, params, row) for row in range(engine.max_batch_size)):
        pass
    engine.proposer.reset()
    # a collection over all that is loaded takes a quarter of a second, and would fall into somebody's first token
    gc.collect()
    gc.freeze()


class Stopwatch:
    """A clock that runs only between start and stop; who sleeps on it just puts it forward."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.since: float | None = None

    def __call__(self) -> float:
        return self.at_s if self.since is None else self.at_s + time.perf_counter() - self.since

    def start(self) -> None:
        self.since = time.perf_counter()

    def stop(self) -> None:
        self.at_s, self.since = self(), None

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds


def run_open_loop(
    engine: Engine,
    timed: Iterable[tuple[float, Request]],
    told: Callable[[StepRecord, list[Step]], object] = lambda turn, steps: None,
    one_at_a_time: bool = False,
) -> Generator[tuple[float, float, Request]]:
    """Give the engine each request when its time has come, and yield (arrival_s, added_s, request) as each finishes, in seconds
    from the start. Sleeps only while there is nothing to do. Holds no more than what is in flight.

    timed: (arrival_s, request) in order of time. told: called after every step. one_at_a_time: each request comes when the one
    before it is finished, whatever its time is.
    """
    for finished in iterate_steps(engine, timed, told, one_at_a_time):
        yield from finished


def iterate_steps(
    engine: Engine,
    timed: Iterable[tuple[float, Request]],
    told: Callable[[StepRecord, list[Step]], object],
    one_at_a_time: bool,
) -> Generator[list[tuple[float, float, Request]]]:
    """`send`, with a list of what finished after every step of the engine, by the engine's own clock."""
    following = iter(timed)
    due = next(following, None)
    flight: dict[str, tuple[float, float]] = {}
    sleep = engine.clock.sleep if isinstance(engine.clock, Stopwatch) else time.sleep
    begin = engine.clock()
    try:
        while due is not None or flight:
            now = engine.clock() - begin
            while due is not None and (not flight if one_at_a_time else due[0] <= now):
                arrival_s, request = due
                assert request.id not in flight, f"two requests are called {request.id}"
                engine.add(request)
                added_s = request.added_at - begin
                flight[request.id] = (added_s if one_at_a_time else arrival_s, added_s)
                due = next(following, None)
            if not flight:
                assert due is not None
                sleep(due[0] - now)
                continue
            before = engine.clock()
            finished = engine.step()
            after = engine.clock()
            turn = StepRecord(after - begin, after - before, len(engine.waiting), engine.num_running)
            steps = [] if engine.last_step is None else [engine.last_step]
            for step in steps:
                turn.rows, turn.draft_s, turn.verify_s = len(step.drafted_B), step.draft_s, step.verify_s
                turn.made, turn.drafted = int(step.made_B.sum()), int(step.drafted_B.sum())
                turn.accepted, turn.emitted = int(step.accepted_B.sum()), int(step.emitted_B.sum())
            told(turn, steps)
            yield [(*flight.pop(request.id), request) for request in finished]
    finally:
        if flight:
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
                f"rates: {short_repr(rate)} is none; one (request at a time), all (at once), or a multiple of plain capacity"
            )
        if not isinstance(rate, str) and not (_is_number(rate) and 0 < rate < math.inf):
            raise ValueError(
                f"rates: {short_repr(rate)} must be a multiple above 0 of what plain decoding can serve, or one, or all"
            )
    if len(set(rates)) < len(rates):
        raise ValueError(f"rates={short_repr(rates)}: one of them stands there twice; leave it out")
    return sorted(rates, key=lambda rate: {"one": 0.0, "all": math.inf}.get(rate, rate))


@dataclass
class RunRecord:
    """What came of one engine at one rate. served: on a clock that ran only while it was the engine's turn; answered: output
    tokens by request, in the same order (a request that comes again is marked with ')."""

    served: list[RequestTiming] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    answered: dict[str, list[int]] = field(default_factory=dict)
    clock_s: float = 0.0

    def keep(self, turn: StepRecord, steps: list[Step]) -> None:
        self.steps += steps

    def add(self, served: RequestTiming, request: Request) -> None:
        name = request.id
        while name in self.answered:
            name += "'"
        self.served.append(served)
        self.answered[name] = request.output_token_ids

    def each(self, number: Callable[[RequestTiming], float]) -> list[float]:
        """A number of each request, in the order of their names: of two records, pairs."""
        by_name = sorted(zip(self.answered, self.served, strict=True), key=lambda pair: pair[0])
        return [number(served) for _, served in by_name]

    def end_to_end(self) -> list[float]:
        """Seconds of each request from arrival to its last token."""
        return self.each(lambda served: served.end_to_end)


def run_interleaved(
    engines: dict[str, Engine],
    records: dict[str, RunRecord],
    pieces: Sequence[Sequence[Task]],
    requests_per_s: float | None,
    params: SamplingParams,
    seed: int,
    one_at_a_time: bool = False,
) -> Iterator[tuple[str, Task, RequestTiming, Request]]:
    """All engines decode a piece of the tasks, then all of them the next one. Within a piece they take turns step by step,
    each by a clock that runs in its own steps alone and jumps over its idle times: a slow moment of the machine hits them
    alike. So they need a cache each. Requests, seeds and arrival times are the same for all; who begins changes.

    requests_per_s: of the random arrivals within a piece; None: all at once. Adds to the records, and yields (name of the
    engine, task, as served, request) as requests finish.
    """
    names = list(engines)
    for number, piece in enumerate(pieces):
        at = [Arrival(0.0)] * len(piece)
        if requests_per_s is not None:
            at = poisson([(math.inf, requests_per_s)], len(piece), seed + number)
        first = number % len(names)
        task_of: dict[str, Task] = {}
        running, watches = {}, {}
        for name in names[first:] + names[:first]:
            coming = list(requests(engines[name].target, piece, at, params, seed))
            task_of |= {request.id: task for _, request, task in coming}
            watch = engines[name].clock
            assert isinstance(watch, Stopwatch), f"engine {name} needs a Stopwatch as its clock"
            watches[name] = watch
            timed = [(at_s, request) for at_s, request, _ in coming]
            running[name] = iterate_steps(engines[name], timed, records[name].keep, one_at_a_time)
        began = {name: records[name].clock_s for name in names}
        try:
            while running:
                for name in list(running):
                    watches[name].start()
                    finished = next(running[name], None)
                    watches[name].stop()
                    if finished is None:
                        del running[name]
                        continue
                    for arrival_s, added_s, request in finished:
                        served = RequestTiming(began[name] + arrival_s, began[name] + added_s, request.stats)
                        records[name].add(served, request)
                        yield name, task_of[request.id], served, request
        finally:
            for left in running.values():
                left.close()
        for name in names:
            records[name].clock_s = max(one.finished_s for one in records[name].served)
