"""When requests arrive: a Poisson process, or a trace, and the requests of a task at these times.

Arrivals are open-loop, as users are: nobody waits with a question until another's is answered. First turns of the tasks only:
when a second turn arrives would depend on the answer to the first.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from specdec.checked import nearest, short_repr
from specdec.core import Request
from specdec.files import parse_json
from specdec.measure.tasks import Task, first_prompt_ids, request_id
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.prompts import derived_seed

KINDS = ("poisson", "trace")
MAX_ARRIVALS = 1_000_000  # of a run: they are listed before it begins
YEAR_S = 365 * 86400.0  # no arrival is later: arrival times are seconds from the start, and sleeping has a limit too
Phases = list[tuple[float, float]]  # seconds, requests per second


@dataclass(frozen=True)
class Arrival:
    """at_s: seconds from the start; id, max_tokens: of the request, if the trace has them."""

    at_s: float
    id: str | None = None
    max_tokens: int | None = None


def parse_request_rate(request_rate: Any) -> Phases:
    """`request_rate` as phases: one endless phase for a number; null and inf are all at once. ValueError, one line, for
    anything else."""
    if request_rate is None:
        return [(math.inf, math.inf)]
    if isinstance(request_rate, list):
        if not request_rate:
            raise ValueError("request_rate=[]: give [[seconds, requests per second], ...], or a number")
        phases = [_parse_phase(entry) for entry in request_rate]
        if not any(rate for _, rate in phases):
            raise ValueError(f"request_rate={short_repr(request_rate)}: no request ever arrives; give a phase a rate above 0")
        return phases
    if not is_number(request_rate) or not request_rate > 0:
        raise ValueError(
            f"request_rate={short_repr(request_rate)} must be requests per second above 0, inf or null for all at once, or "
            "[[seconds, rate], ...]"
        )
    return [(math.inf, float(request_rate))]


def _parse_phase(entry: Any) -> tuple[float, float]:
    if not isinstance(entry, list) or len(entry) != 2 or not all(map(is_number, entry)):
        raise ValueError(f"request_rate: {short_repr(entry)} must be [seconds, requests per second], such as [10, 2.0]")
    seconds, rate = map(float, entry)
    if not 0 < seconds < math.inf:
        raise ValueError(f"request_rate: {short_repr(entry)} lasts {entry[0]} s; give seconds above 0")
    if not 0 <= rate < math.inf:
        raise ValueError(f"request_rate: {short_repr(entry)} has rate {entry[1]}; give requests per second, 0 for a pause")
    return seconds, rate


def is_number(value: Any) -> TypeGuard[float]:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # an integer beyond every float
        return False


@np.errstate(over="ignore")  # a time beyond every float is inf
def poisson(phases: Phases, count: int | None, seed: int) -> list[Arrival]:
    """Arrivals of a Poisson process whose rate changes from phase to phase; the same random numbers at every rate.

    phases: as of `parse_request_rate`.
    count: number of requests; where phases end, the largest number (None: no limit).
    seed: of the process.
    """
    rng = np.random.default_rng(seed)
    if math.isinf(phases[0][0]):
        assert count is not None
        at_N = np.cumsum(rng.exponential(size=count)) / phases[0][1]
        return [Arrival(float(at)) for at in at_N]
    # in units of expected arrivals the process has rate 1 throughout
    seconds, rates = np.array(phases).T
    begin_s = np.concatenate([[0.0], seconds.cumsum()])
    expected_at_begin = np.concatenate([[0.0], (seconds * rates).cumsum()])
    arrivals: list[Arrival] = []
    expected = float(rng.exponential())
    while expected < expected_at_begin[-1] and (count is None or len(arrivals) < count):
        phase = int(np.searchsorted(expected_at_begin, expected, side="right")) - 1
        arrivals.append(Arrival(float(begin_s[phase] + (expected - expected_at_begin[phase]) / rates[phase])))
        expected += float(rng.exponential())
    if not arrivals:
        raise ValueError(f"request_rate={phases}: by this seed no request arrives in that time; give longer phases")
    return arrivals


def read_trace(path: Path | str) -> list[Arrival]:
    """Arrivals of a JSON-lines file, in order of time: `arrival_s` and, optionally, `id` and `max_tokens`. Other keys are not
    read, so that the requests.jsonl of a run is a trace too. A malformed line is a ValueError with its number."""
    if not isinstance(path, str | Path):
        raise ValueError(f"trace={path!r} must be the path of a file; where that is its name, trace=./{path}")
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"trace={path}: no such file; give JSON lines with arrival_s, or the requests.jsonl of eval/load.py")
    arrivals: list[Arrival] = []
    ids: set[str] = set()
    lines = path.read_bytes().split(b"\n")  # the last is empty, or a run was killed within it
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        is_last = number == len(lines)
        where = f"{path}, line {number}"
        try:
            row = parse_json(line.decode(), where)
        except UnicodeDecodeError as error:
            if is_last and error.reason == "unexpected end of data":
                break
            raise ValueError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
        except ValueError:
            if is_last:
                break
            raise
        arrival = _parse_arrival(row, where)
        if arrival.id is not None:
            if arrival.id in ids:
                raise ValueError(f"{where}: the id {row['id']!r} has been used before; make ids unique")
            ids.add(arrival.id)
        arrivals.append(arrival)
    if not arrivals:
        raise ValueError(f"{path}: no arrivals in the file")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _parse_arrival(row: Any, where: str) -> Arrival:
    at_s = row.get("arrival_s") if isinstance(row, dict) else None
    if not is_number(at_s) or not 0 <= at_s < math.inf:
        raise ValueError(f"{where}: needs 'arrival_s', seconds from 0 on, and has {at_s!r}")
    if at_s > YEAR_S:
        raise ValueError(f"{where}: arrival_s={at_s!r} is over a year; give seconds from the start of the run")
    max_tokens = row.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"{where}: max_tokens={max_tokens!r} must be a number from 1 on")
    name = row.get("id")
    return Arrival(float(at_s), None if name is None else str(name), max_tokens)


def make_arrivals(
    kind: str, request_rate: Any, trace: Any, num_requests: int | None, num_tasks: int, seed: int
) -> list[Arrival]:
    """Arrivals by the settings of conf/load.yaml. ValueError, one line, for settings that do not go together.

    kind: an entry of KINDS.
    request_rate: of a Poisson process, as of `parse_request_rate`.
    trace: path of a file, if that is the kind.
    num_requests: None: one for each task, or as many as arrive in the phases, or as are in the trace.
    num_tasks: tasks that there are.
    seed: of the Poisson process.
    """
    if kind not in KINDS:
        raise ValueError(f"arrivals={kind}: no such process; {nearest(str(kind), KINDS)}")
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"num_requests={num_requests}: at least 1 is needed; null means one for each task")
    if num_requests is not None and num_requests > MAX_ARRIVALS:
        raise ValueError(f"num_requests={num_requests}: {MAX_ARRIVALS} are the most; lower it")
    if kind == "trace":
        if trace is None:
            raise ValueError("arrivals=trace needs trace=FILE, JSON lines with arrival_s")
        arrivals = read_trace(trace)[:num_requests]
        if len(arrivals) > MAX_ARRIVALS:
            raise ValueError(
                f"trace={trace}: {len(arrivals)} requests would arrive, and {MAX_ARRIVALS} are the most; give num_requests="
            )
        return arrivals
    if trace is not None:
        raise ValueError(f"trace={trace} is for arrivals=trace; leave it out, or add arrivals=trace")
    phases = parse_request_rate(request_rate)
    is_endless = math.isinf(phases[0][0])
    expected = num_tasks if is_endless else sum(seconds * rate for seconds, rate in phases)
    if num_requests is None and expected > MAX_ARRIVALS:
        lower = "limit" if is_endless else "its rates or seconds"
        raise ValueError(
            f"request_rate={request_rate}: about {expected:.7g} requests would arrive, and {MAX_ARRIVALS} are the most; "
            f"lower {lower}, or give num_requests="
        )
    arrivals = poisson(phases, num_requests or num_tasks if is_endless else num_requests, seed)
    if arrivals[-1].at_s > YEAR_S:
        raise ValueError(
            f"request_rate={request_rate}: the last of {len(arrivals)} requests would arrive after {arrivals[-1].at_s:.3g} s, "
            "over a year; raise it, or give a lower num_requests="
        )
    return arrivals


def make_requests(
    target: CausalLM, tasks: Sequence[Task], arrivals: Sequence[Arrival], params: SamplingParams, seed: int
) -> Iterator[tuple[float, Request, Task]]:
    """(arrival_s, request, task) in order of arrival, made one by one.

    Request i is the first turn of task i. After the last task the first one comes again, with '#2' behind its id and so another
    seed; where the trace has given that id to another request, with the next number.
    """
    trace_ids = {arrival.id for arrival in arrivals if arrival.id}
    last_number = [0] * len(tasks)  # by task, behind its id
    prompts = [first_prompt_ids(target.tokenizer, task) for task in tasks]
    for i, arrival in enumerate(arrivals):
        num_rounds, place = divmod(i, len(tasks))
        task = tasks[place]
        name = arrival.id or ""
        if not name:
            last_number[place] = max(last_number[place], num_rounds) + 1
            while (name := _numbered(request_id(task, 1), last_number[place])) in trace_ids:
                last_number[place] += 1
        request_params = params
        if arrival.max_tokens is not None:
            request_params = params.model_copy(update={"max_tokens": arrival.max_tokens})
        request_seed = derived_seed(seed, zlib.crc32(name.encode())) if params.seed is None else params.seed
        yield arrival.at_s, Request(name, prompts[place], request_params, request_seed, task.category), task


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}#{number}"
