"""Method selection: runs of several methods on the same requests, seeds and arrival times, in turn on one target, and which of
them is the fastest.

A run is a method with its settings. Rates are levels of `specdec.measure.serving`, from low to high; at the lowest one latency
is compared, at the highest one throughput.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specdec import method, rejection
from specdec.checked import nearest
from specdec.core import Proposer, Request, RequestStats
from specdec.engine import Engine
from specdec.measure import serving, stats, tasks
from specdec.measure.report import console
from specdec.measure.report.run import lossless_verdict
from specdec.measure.serving import Level, RunRecord, Stopwatch
from specdec.measure.stats import RequestTiming
from specdec.measure.tasks import Task
from specdec.model.kv import SlotCache
from specdec.model.target import CausalLM
from specdec.params import PLAIN, SamplingParams
from specdec.policy import cost_table, profiling
from specdec.policy.cost_table import CostTable
from specdec.rejection import Verifier
from specdec.speculative_config import SpeculativeConfig, SpeculativePlan

Settings = dict[str, Any]  # an object of `--speculative-config`
Records = dict[Level, dict[str, RunRecord]]  # by rate, then by run

# ---------------------------------------------------------------- what is compared


def parse_runs(
    methods: Sequence[Any],
    checkpoints: Mapping[Any, Any] | None,
    runs: Mapping[Any, Any] | None,
    scheme: Settings,
    defaults: Callable[[str], Settings],
) -> dict[str, SpeculativePlan]:
    """The plan of every run by its name, plain decoding first. ValueError, one line, for what is not known.

    methods: names, each a run with the default settings.
    checkpoints: directories of trained drafters by method; their methods are runs too.
    runs: settings of further runs by name.
    scheme: settings of the rejection scheme, for all runs that have no other.
    defaults: default settings of a method, by name.
    """
    known = [name for name in method.names() if name == PLAIN or method.facts(name).drafts]
    checkpoints = checkpoints or {}
    _check_methods(methods, checkpoints, known)

    def settings_of(name: str) -> Settings:
        settings = defaults(name) | {"method": name}
        if name in checkpoints:
            if "model" not in settings:
                raise ValueError(f"checkpoints: method {name!r} takes none; leave it out")
            settings["model"] = str(checkpoints[name])
        return settings

    all_settings = {name: settings_of(name) for name in dict.fromkeys([PLAIN, *methods, *checkpoints])}
    for name in methods:
        if "model" in method.required(name) and all_settings[name].get("model") is None:
            raise ValueError(f"methods: {name!r} drafts with a trained drafter; give checkpoints={{{name}: DIR}}")
    for name, settings in (runs or {}).items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(name)) or name in all_settings:
            why = "is a run already" if name in all_settings else "may have letters, digits, '.', '_' and '-' only"
            raise ValueError(f"runs: the name {name!r} {why}; give another")
        if isinstance(settings, str) and settings in known:
            raise ValueError(
                f"runs: {name!r} has {settings!r}, and must be a mapping; write {{{name}: {{method: {settings}}}}}"
            )
        if not isinstance(settings, dict) or settings.get("method") not in known:
            value = settings.get("method") if isinstance(settings, dict) else settings
            raise ValueError(f"runs: {name!r} needs a method, and has {value!r}; {nearest(str(value), known)}")
        all_settings[name] = settings_of(settings["method"]) | settings
    return {name: _resolve(name, settings, scheme) for name, settings in all_settings.items()}


def _check_methods(methods: Sequence[Any], checkpoints: Mapping[Any, Any], known: list[str]) -> None:
    for key, names in (("methods", methods), ("checkpoints", checkpoints)):
        for name in names:
            if name not in known:
                raise ValueError(f"{key}: no method {name!r}; {nearest(str(name), known)}")
    for name, directory in checkpoints.items():
        if directory is None or isinstance(directory, list | dict):
            raise ValueError(f"checkpoints: {name} has {directory!r}; give the directory of a drafter, {{{name}: DIR}}")
    if len(set(methods)) < len(methods):
        raise ValueError(f"methods={methods}: an entry is there twice; name variants in runs=")


def _resolve(name: str, settings: Settings, scheme: Settings) -> SpeculativePlan:
    """The plan of a run. Plain decoding has no draft to verify, but it samples as the scheme does."""
    takes_scheme = name != PLAIN or rejection.shares_noise(scheme.get("rejection_sample_method", "standard"))
    both = scheme | settings if takes_scheme else settings
    try:
        plan = SpeculativeConfig.parse({key: value for key, value in both.items() if value is not None}).resolve()
        plan.check_processes(1)
    except ValueError as error:
        raise ValueError(f"run {name!r}: {error}") from None
    return plan


@dataclass
class Run:
    """A method under test.

    plan, proposer, verifier: the method.
    target: of all runs.
    shape: arguments of the engine, such as max_batch_size.
    cache: of its engines.
    costs: measured, once they are.
    """

    plan: SpeculativePlan
    proposer: Proposer
    verifier: Verifier
    target: CausalLM
    shape: dict[str, Any]
    cache: SlotCache
    costs: CostTable | None = None

    def new_engine(self, with_policy: bool = True) -> Engine:
        """An engine whose method has learned nothing."""
        self.proposer.reset()
        policy = None
        if with_policy:
            policy = self.plan.policy.build(self.target, self.proposer, self.shape["max_batch_size"])
        method_and_target = (self.target, self.proposer, self.verifier)
        return Engine(*method_and_target, **self.shape, cache=self.cache, policy=policy, clock=Stopwatch())

    def save_costs(self, path: Path) -> None:
        """Write the costs to a file; if the plan needs costs and has none, they are these."""
        assert self.costs is not None
        self.costs.save(path)
        if self.plan.policy.needs_costs and self.plan.policy.cost_table is None:
            config = self.plan.config.model_copy(update={"cost_table": str(path)})
            self.plan = replace(self.plan, config=config, policy=replace(self.plan.policy, cost_table=self.costs))

    def row(self) -> dict[str, Any]:
        """What the rows of its requests have in common."""
        return {
            "method": self.plan.method,
            "rejection": self.verifier.name,
            "num_speculative_tokens": self.proposer.num_speculative_tokens,
            "lossless": self.verifier.lossless,
        }


def build_runs(
    plans: dict[str, SpeculativePlan], target: CausalLM, shape: dict[str, Any], chosen: list[Task], params: SamplingParams
) -> dict[str, Run]:
    """The runs, with memory for the tasks. ValueError, one line with the run's name, for what cannot work.

    plans: by name.
    target, shape: of every run.
    chosen, params: tasks to decode.
    """
    runs = {}
    for name, plan in plans.items():
        try:
            proposer, verifier = plan.build(target)
            runs[name] = Run(plan, proposer, verifier, target, shape, target.new_cache())
            tasks.prepare(runs[name].new_engine(with_policy=False), chosen, params)
        except ValueError as error:
            raise ValueError(f"run {name!r}: {error}") from None
    return runs


# ---------------------------------------------------------------- measuring


def typical_context(target: CausalLM, chosen: list[Task], params: SamplingParams) -> int:
    """Tokens of a row in the middle of its answer, on average."""
    lengths = [len(tasks.first_prompt_ids(target.tokenizer, task)) for task in chosen]
    return int(np.mean(lengths) + (params.max_tokens or 128) / 2)


def measure_costs(runs: dict[str, Run], context: int, repeats: int, params: SamplingParams) -> None:
    """Measure the costs of every run, and warm it up.

    runs: get their costs.
    context: tokens of each row.
    repeats, params: as of `profiling.measure`.
    """
    tables = {}
    for name, run in runs.items():
        max_batch_size = run.shape["max_batch_size"]
        sizes = profiling.sizes_up_to(max_batch_size)
        num_steps = profiling.num_steps(max_batch_size, run.proposer.num_speculative_tokens, repeats)
        with console.one_bar(f"costs of {name}", num_steps) as advance:
            tables[name] = profiling.measure(run.target, run.proposer, sizes, None, context, repeats, params, advance)
        serving.warm_up(run.new_engine(with_policy=False))
    for name, table in cost_table.share_verification(tables).items():
        runs[name].costs = table


def plain_capacity(run: Run, chosen: list[Task], params: SamplingParams, seed: int) -> float:
    """Requests per second that plain decoding serves when all arrive at once."""
    piece = tasks.groups(chosen, run.shape["max_batch_size"])[0]
    record = RunRecord()
    for _ in serving.run_interleaved({PLAIN: run.new_engine()}, {PLAIN: record}, [piece], None, params, seed):
        pass
    return len(piece) / record.clock_s


def decode(
    runs: dict[str, Run],
    records: Records,
    rounds: int,
    capacity: float | None,
    chosen: list[Task],
    params: SamplingParams,
    seed: int,
) -> Iterator[tuple[Level, int, str, Task, RequestTiming, Request]]:
    """Decode the tasks with every run at every rate, again in every round. Yields (rate, round, run, task, timing, request) as
    requests finish. A method starts each round at each rate anew, since the same prompts come again.

    runs: by name.
    records: by rate and run; are added to.
    rounds: how often everything is decoded.
    capacity: requests per second of plain decoding, for rates that are multiples of it.
    chosen, params, seed: the requests.
    """
    for number in range(rounds):
        for level, level_records in records.items():
            engines = {name: run.new_engine() for name, run in runs.items()}
            one_at_a_time = level == "one"
            pieces = [[task] for task in chosen] if one_at_a_time else tasks.groups(chosen, engines[PLAIN].max_batch_size)
            rate = None if isinstance(level, str) else level * (capacity or 1.0)
            finished = serving.run_interleaved(engines, level_records, pieces, rate, params, seed, one_at_a_time)
            for name, task, timing, request in finished:
                yield level, number, name, task, timing, request


# ---------------------------------------------------------------- summarising


def summarize(runs: dict[str, Run], records: Records, greedy: bool, timed_on_cpu: bool) -> dict[str, Any]:
    """Keys `runs`, `fastest` and `busy` of choose.json.

    runs: what was compared.
    records: of the runs by rate, from low to high.
    greedy: temperature 0.
    timed_on_cpu: the work was done by this process's CPU time, and not by a device.
    """
    levels = list(records)
    low = levels[0]
    high = levels[-1]
    of_run = {name: {level: records[level][name] for level in levels} for name in runs}
    summaries = {name: _summarize_run(run, of_run[name], of_run[PLAIN], greedy) for name, run in runs.items()}
    latency = {name: ([1.0] * len(record.timings), record.end_to_end()) for name, record in records[low].items()}
    throughput = {name: _work_and_seconds(record, stats.engine_seconds) for name, record in records[high].items()}
    busy = {}
    if timed_on_cpu:
        for level in levels:
            all_stats = {name: [timing.stats for timing in record.timings] for name, record in records[level].items()}
            shares = {name: stats.wall_over_cpu(each) for name, each in all_stats.items()}
            busy[str(level)] = stats.busy_reasons({}, shares)
    fastest = {
        "low": verdict("low", latency, summaries, str(low), timed_on_cpu),
        "high": verdict("high", throughput, summaries, str(high), timed_on_cpu),
    }
    return {"fastest": fastest, "busy": busy, "runs": summaries}


def _summarize_run(run: Run, records: dict[Level, RunRecord], plain: dict[Level, RunRecord], greedy: bool) -> dict[str, Any]:
    levels = list(records)
    low = levels[0]
    high = levels[-1]
    outputs, output_verdict = lossless_verdict(run.verifier, greedy, _all_answers(records), _all_answers(plain))
    assert run.costs is not None
    return {
        "method": run.plan.method,
        "speculative_config": run.plan.config.as_dict(),
        "num_speculative_tokens": run.proposer.num_speculative_tokens,
        "lossless": run.verifier.lossless,
        "outputs": outputs,
        "outputs_said": output_verdict,
        "gain_low": stats.ratio_of_sums(plain[low].end_to_end(), records[low].end_to_end()),
        "gain_high": _gain(plain[high], records[high], stats.engine_seconds),
        "gain_cpu": {str(level): _gain(plain[level], records[level], stats.engine_cpu_seconds)["ratio"] for level in levels},
        "at": {str(level): _numbers(records[level], run.costs) for level in levels},
    }


def _all_answers(records: dict[Level, RunRecord]) -> dict[str, list[int]]:
    return {f"{level} {name}": ids for level, record in records.items() for name, ids in record.answered.items()}


def _numbers(record: RunRecord, costs: CostTable) -> dict[str, Any]:
    """Numbers of a run at a rate, and the tokens per second that the costs of its steps predict."""
    seconds = sum(step.draft_s + step.verify_s for step in record.steps)
    predicted_s = cost_table.predicted_seconds(record.steps, costs)
    emitted = sum(int(step.emitted_B.sum()) for step in record.steps)
    return stats.serving_metrics(record.timings) | {
        "decode_tokens_per_s": emitted / seconds if seconds else None,
        "predicted_tokens_per_s": emitted / predicted_s if predicted_s else None,
        "measured_over_predicted": predicted_s / seconds if seconds else None,
    }


def _work_and_seconds(record: RunRecord, seconds_of: Callable[[RequestStats], float]) -> tuple[list[float], list[float]]:
    """Output tokens of each request, and its share of the engine's time (`seconds_of` its statistics)."""
    tokens = record.by_request(lambda timing: timing.num_output_tokens)
    return tokens, record.by_request(lambda timing: seconds_of(timing.stats))


def _gain(plain: RunRecord, record: RunRecord, seconds_of: Callable[[RequestStats], float]) -> dict[str, float]:
    """Output tokens per second of engine time, prefill included, over those of plain decoding."""
    return stats.ratio_of_rates(*_work_and_seconds(plain, seconds_of), *_work_and_seconds(record, seconds_of))


def verdict(
    rate: str,
    measured: dict[str, tuple[list[float], list[float]]],
    summaries: dict[str, dict[str, Any]],
    level: str,
    timed_on_cpu: bool,
) -> str:
    """Which run is the fastest at a rate, in a line.

    A run that drafted nothing, or is not faster by CPU time, cannot be the fastest; if it seemed faster, the line says so.

    rate: its name in the line.
    measured: work and seconds of each request, by run.
    summaries: of the runs.
    level: the rate.
    timed_on_cpu: the work was done by this process's CPU time.
    """
    num_requests = len(measured[PLAIN][0])
    if num_requests < stats.MIN_REQUESTS:
        return f"{rate} rate: {num_requests} requests are too few to name the fastest; give {stats.MIN_REQUESTS} or more"
    excluded = {name: "drafted nothing" for name, run in summaries.items() if not run["at"][level]["num_draft_tokens"]}
    if timed_on_cpu:
        slower = {name: "not by CPU time" for name, run in summaries.items() if run["gain_cpu"][level] <= 1}
        excluded = slower | excluded
    candidates = [name for name in summaries if name not in excluded]
    amounts = {name: amount for name, (amount, _) in measured.items()}
    seconds = {name: each for name, (_, each) in measured.items()}
    best, within_noise = stats.fastest(seconds, amounts, PLAIN, candidates)
    gains = {name: stats.ratio_of_rates(*measured[PLAIN], *measured[name]) for name in summaries}
    seemed_faster = [f"{name} ({why})" for name, why in excluded.items() if gains[name]["low"] > 1]
    equals = [name for name in within_noise if name in candidates]
    beside = f"; within the noise of it: {', '.join(equals)}" if equals else ""
    beside += f"; seemed faster than {PLAIN}, and is not counted: {', '.join(seemed_faster)}" if seemed_faster else ""
    if best is None:
        return f"{rate} rate: no run is faster than {PLAIN} beyond the noise{beside}"
    return "fastest at the {} rate: {}, {ratio:.2f} ({low:.2f} to {high:.2f}){}".format(rate, best, beside, **gains[best])
