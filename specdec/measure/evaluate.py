"""Tasks decoded with a method, and plainly beside it: the rows of both, what was gained, and whether anything was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engine import Engine
from specdec.measure import records, stats, tasks
from specdec.measure.records import JsonlFile
from specdec.measure.report import console
from specdec.measure.report import run as run_report
from specdec.measure.tasks import Task
from specdec.model import distributed
from specdec.model.device import memory_line
from specdec.model.distributed import SharedCount
from specdec.params import PLAIN, SamplingParams
from specdec.policy import profiling
from specdec.rejection import synthetic


@dataclass(frozen=True)
class Pass:
    """All tasks decoded once.

    method: the name of the engine's method
    engine: decodes
    path: of the file with a row per request
    """

    method: str
    engine: Engine
    path: Path

    @property
    def facts(self) -> dict[str, Any]:
        """What all rows have in common."""
        return {
            "method": self.method,
            "rejection": self.engine.verifier.name,
            "num_speculative_tokens": self.engine.proposer.num_speculative_tokens,
            "lossless": self.engine.verifier.lossless,
        }


def memory(passes: Sequence[Pass], drafters: Sequence[Path]) -> str:
    """A line with what the prepared passes take, and what is free. drafters: directories of checkpoints."""
    engine = passes[-1].engine
    target = engine.target
    num_places = engine.max_batch_size * (engine.proposer.num_speculative_tokens + 1)
    drafter_bytes = sum(path.stat().st_size for directory in drafters for path in directory.glob("*.safetensors"))
    taken = {
        "weights": target.num_parameters * target.dtype.itemsize // target.processes.size,
        **({"drafter" if len(drafters) == 1 else "drafters": drafter_bytes} if drafters else {}),
        f"caches of {engine.cache.rows} rows x {engine.cache.slots} slots": sum(each.engine.cache_bytes for each in passes),
        "a step's logits and probabilities": num_places * target.vocab_size * (target.dtype.itemsize + 4),
    }
    return memory_line(taken, target.device)


def decode(
    passes: Sequence[Pass],
    chosen: list[Task],
    params: SamplingParams,
    seed: int,
    on_request: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[JsonlFile]:
    """Decode what the files of the passes do not have yet, group by group with every pass in turn. Where several groups of
    processes share the tasks, each has its own part of them.

    on_request: takes the row of every request that has finished, in the first process.

    Returns the files with the rows of all, in the order of the tasks: none but in the first process.
    """
    target = passes[0].engine.target
    processes = target.processes
    counts = [SharedCount(processes, each.path.name) for each in passes]
    files = [JsonlFile(each.path) for each in passes] if processes.is_first else []
    for file in files:
        records.check_rows(file.rows, file.path)
    answered = processes.from_first([file.answered for file in files])
    if processes.is_main and not processes.is_first:
        files = [records.open_shared(each.path, processes) for each in passes]
    rates = [stats.RunningRates() for _ in passes]
    num_answered = {each.method: len(outputs) for each, outputs in zip(passes, answered, strict=True)}
    with console.progress(sum(len(task.turns) for task in chosen), processes.is_first, **num_answered) as advance:

        def show(place: int, count: int) -> None:
            advance(passes[place].method, str(rates[place]), counts[place].add(count))

        def show_all() -> None:
            for place in range(len(passes)):
                show(place, 0)

        for group in tasks.groups(processes.share(chosen), passes[0].engine.max_batch_size):
            for place, each in enumerate(passes):
                for task, turn, request in tasks.decode(each.engine, group, params, seed, answered[place]):
                    if processes.is_main:
                        row = records.request_record(task, turn, request, target.tokenizer, each.facts)
                        files[place].add(row)
                        on_request(row)
                    rates[place].add(request.stats)
                    show(place, 1)
        distributed.wait_for_all(processes, show_all)
    if not processes.is_first:
        for file in files:
            file.close()
        return []
    place_of = {name: place for place, name in enumerate(tasks.prompt_texts(chosen))}
    for file in files:
        for row in file.take_parts():
            on_request(row)
        file.sort(place_of)
        file.close()
    return files


def verify_seconds(engine: Engine, files: list[JsonlFile], num_rows: int) -> Callable[[float], float]:
    """Seconds of a forward of n tokens in each of num_rows rows, in the middle of an average request. Every process of the
    target takes part."""
    rows = files[-1].rows if files else []
    lengths = [row["num_prompt_tokens"] + len(row["output_token_ids"]) / 2 for row in rows]
    context = engine.target.processes.broadcast_object(int(sum(lengths) / len(lengths)) if lengths else None)
    max_tokens = engine.proposer.num_speculative_tokens + 1
    is_eager = engine.fixed_shapes is None
    return profiling.verify_seconds(engine.target, num_rows, max_tokens, context, enforce_eager=is_eager)


def summarize(
    passes: Sequence[Pass], files: list[JsonlFile], verify_s: Callable[[float], float], params: SamplingParams
) -> dict[str, Any]:
    """The numbers of a run: acceptance, speed, and whether the output is the target's.

    passes: the method's last; before it, if there is one, that of plain decoding
    files: of the passes
    verify_s: as `verify_seconds` returns it
    params: of the requests
    """
    engine = passes[-1].engine
    rows = files[-1]
    plain = files[0] if len(passes) > 1 else None
    max_draft = engine.proposer.num_speculative_tokens
    if passes[-1].method == PLAIN:
        short, verdict = "-", "this is plain decoding"
    else:
        short, verdict = run_report.lossless_verdict(
            engine.verifier, params.greedy, rows.answered, None if plain is None else plain.answered
        )
    category_of = {row["id"]: row["category"] for row in rows.rows}
    summary = {
        "num_speculative_tokens": max_draft,
        "lossless": engine.verifier.lossless,
        "lossless_short": short,
        "lossless_said": verdict,
        "verify_cost": {n: verify_s(n) / verify_s(1) for n in range(1, max_draft + 2)},
        "plain_step_s": verify_s(1),
        "resumed": any(file.is_of_several_processes for file in files),
        "environment": records.environment(),
        **run_report.summarize(rows.stats, {} if plain is None else plain.stats, category_of, verify_s),
    }
    reasons = [] if plain is None else run_report.busy_reasons(summary, passes[-1].method, timed_on_cpu(engine))
    summary["busy"] = reasons
    return summary | engine.proposer.summarize(list(rows.answered.values()))


def timed_on_cpu(engine: Engine) -> bool:
    """Whether this process's CPU time did all of the work."""
    return engine.target.device.type == "cpu" and engine.target.processes.size == 1


def notes(engine: Engine, summary: dict[str, Any]) -> list[str]:
    """What a reader of the table must know, a line each."""
    lines = []
    overall = summary["overall"]
    if summary["busy"]:
        lines.append(run_report.busy_note(summary["busy"], overall["speedup_cpu"] if timed_on_cpu(engine) else None))
    if engine.verifier.name == "block" and not engine.proposer.needs_uniforms:
        lines.append("note: these drafts are deterministic, for which block verification equals standard; nothing is gained")
    if engine.verifier.name == "synthetic" and overall["num_drafts"]:
        rates = engine.verifier.params["synthetic_acceptance_rates"]
        reached = synthetic.reached(rates, [sum(accepted) for accepted in overall["acceptance_histogram"]])
        if 1 + sum(rates) - reached > 0.05:
            lines.append(
                f"note: drafts were too short for the acceptance that was asked for: mean length {1 + sum(rates):.2f}, "
                f"with these drafts {reached:.2f}"
            )
    if overall["num_draft_tokens"] and not overall["num_accepted_tokens"]:
        drafted = f"none of {overall['num_draft_tokens']} drafted tokens was accepted"
        hint = "" if engine.proposer.facts.train_script is None else "; was the drafter trained for this target?"
        lines.append(f"note: {drafted}{hint}")
    if coverage := summary.get("vocabulary"):
        lines.append(
            f"vocabulary: {coverage['share_of_emitted']:.2%} of the {coverage['num_emitted']} tokens that were emitted can be "
            f"drafted, {coverage['share_of_vocabulary']:.1%} of the vocabulary"
        )
    if summary["resumed"]:
        lines.append("note: resumed: times are of several processes, and what a method learns from earlier answers began anew")
    return lines
