"""Which method to choose: all of them on the same requests, seeds and arrival times, at a low and a high request rate, in one
process on one target, taking turns step by step, each by a clock of its own.

    python eval/choose.py
    python eval/choose.py methods=[none,ngram] checkpoints='{eagle3: outputs/eagle3_demo-llama-demo}' rates=[one,0.5,2,all]
    python eval/choose.py methods=[none,ngram] runs='{ngram-auto: {method: ngram, num_speculative_tokens: auto}}'

Writes out_dir/requests.jsonl (a row per request, run and rate), cost-RUN.json, choose.json, choose.png and config.yaml, and
prints the table, for people and in Markdown.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Choose, Rejection
from specdec.params import PLAIN


def run(cfg: Choose) -> dict[str, Any]:
    import numpy as np
    import torch

    from specdec import config
    from specdec.engine import Engine
    from specdec.measure import records, serving, stats, tasks
    from specdec.measure.report import choose as choose_report
    from specdec.measure.report import console
    from specdec.measure.report import run as run_report
    from specdec.measure.report.table import markdown
    from specdec.policy import cost_table, profiling

    params = cfg.sampling
    plans = {name: parse(name, given, cfg.rejection) for name, given in entries(cfg).items()}
    levels = serving.parse_rates(cfg.rates)
    chosen = tasks.load(cfg.task.path or tasks.DEMO, cfg.limit)
    out_dir, rows = Path(cfg.out_dir), cfg.max_batch_size
    records.reserve(out_dir, resume=False, resumes=False)
    torch.set_num_threads(cfg.num_threads or 1)

    target = cfg.model.load()
    built, engines = {}, {}
    for name, plan in plans.items():
        try:
            built[name] = plan.build(target)
            engines[name] = Engine(target, *built[name], **cfg.engine, clock=serving.Stopwatch())
            tasks.prepare(engines[name], chosen, params)
        except ValueError as error:
            raise ValueError(f"run {name!r}: {error}") from None
    plain = engines[PLAIN]
    identity = records.run_identity(target, chosen, params, cfg.seed, cfg.rejection.name) | {
        "rates": [str(level) for level in levels],
        "rounds": cfg.rounds,
        **cfg.engine,
    }

    lengths = [len(tasks.first_prompt_ids(target.tokenizer, task)) for task in chosen]
    context = cfg.cost_context or int(np.mean(lengths) + (params.max_tokens or 128) / 2)
    tables = {}
    for name, (proposer, _) in built.items():
        sizes, most = profiling.sizes_up_to(rows), proposer.num_speculative_tokens
        total = len(sizes) * (cfg.cost_repeats + 1) * len(profiling.lengths_up_to(most))
        with console.one_bar(f"costs of {name}", total) as advance:
            table = profiling.measure(target, proposer, sizes, None, context, cfg.cost_repeats, params, advance)
        tables[name] = table
        serving.warm_up(engines[name])
    records.claim(out_dir, False, identity, resumes=False)
    config.save(cfg, out_dir / "config.yaml")
    tables = cost_table.share_verification(tables)
    for name, table in tables.items():
        table.save(path := out_dir / f"cost-{name}.json")
        plan = plans[name]
        if plan.policy.needs_costs and plan.policy.cost_table is None:
            given = plan.config.model_copy(update={"cost_table": str(path)})
            plans[name] = replace(plan, config=given, policy=replace(plan.policy, cost_table=table))

    def afresh() -> None:
        """Nothing that a method learned counts twice: the same prompts come again."""
        for name, (proposer, _) in built.items():
            proposer.reset()
            policy = plans[name].policy.build(target, proposer, rows)
            engines[name] = Engine(
                target, *built[name], **cfg.engine, cache=engines[name].cache, policy=policy, clock=serving.Stopwatch()
            )

    capacity = None
    if any(not isinstance(level, str) for level in levels):
        first = {PLAIN: serving.RunRecord()}
        piece = tasks.groups(chosen, rows)[:1]
        for _ in serving.run_interleaved({PLAIN: plain}, first, piece, None, params, cfg.seed):
            pass
        capacity = len(piece[0]) / first[PLAIN].clock_s

    written = records.JsonlFile(out_dir / "requests.jsonl", keep=False)
    measured = {level: {name: serving.RunRecord() for name in engines} for level in levels}
    total = cfg.rounds * len(levels) * len(engines) * len(chosen)
    with console.one_bar("requests", total) as advance:
        for number in range(cfg.rounds):
            for level in levels:
                afresh()
                pieces = [[task] for task in chosen] if level == "one" else tasks.groups(chosen, rows)
                rate = None if isinstance(level, str) else level * (capacity or 1.0)
                turns = serving.run_interleaved(engines, measured[level], pieces, rate, params, cfg.seed, level == "one")
                for name, task, served, request in turns:
                    facts = {
                        "run": name,
                        "rate": str(level),
                        "round": number,
                        "method": plans[name].method,
                        "rejection": built[name][1].name,
                        "num_speculative_tokens": built[name][0].num_speculative_tokens,
                        "lossless": built[name][1].lossless,
                        "arrival_s": served.arrival_s,
                        "added_s": served.added_s,
                    }
                    written.add({**records.request_record(task, 1, request, target.tokenizer, facts), "id": request.id})
                    advance(1, f"rate {level}, {name}")
    written.close()

    found: dict[str, Any] = {}
    for name, (proposer, verifier) in built.items():
        own = {level: measured[level][name] for level in levels}
        base = {level: measured[level][PLAIN] for level in levels}
        merged = [
            {f"{level} {key}": ids for level in levels for key, ids in side[level].answered.items()} for side in (own, base)
        ]
        at = {str(level): numbers(own[level], tables[name]) for level in levels}
        outputs, said = run_report.lossless_verdict(verifier, params.greedy, *merged)
        found[name] = {
            "method": plans[name].method,
            "speculative_config": plans[name].config.as_dict(),
            "num_speculative_tokens": proposer.num_speculative_tokens,
            "num_speculative_tokens_said": describe_k(plans[name].config, proposer.num_speculative_tokens),
            "lossless": verifier.lossless,
            "outputs": outputs,
            "outputs_said": said,
            "gain_low": stats.ratio_of_sums(base[levels[0]].end_to_end(), own[levels[0]].end_to_end()),
            "gain_high": gain(base[levels[-1]], own[levels[-1]], stats.engine_seconds),
            "gain_cpu": {str(level): gain(base[level], own[level], stats.engine_cpu_seconds)["ratio"] for level in levels},
            "at": at,
        }
    low, high = measured[levels[0]], measured[levels[-1]]
    latency = {name: ([1.0] * len(record.timings), record.end_to_end()) for name, record in low.items()}
    throughput = {name: work_and_seconds(record, stats.engine_seconds) for name, record in high.items()}
    timed_on_cpu = target.device.type == "cpu"
    verdicts = {
        "low": verdict("low", latency, found, str(levels[0]), timed_on_cpu),
        "high": verdict("high", throughput, found, str(levels[-1]), timed_on_cpu),
    }
    busy = {}
    if timed_on_cpu:
        for level in levels:
            shares = {name: stats.wall_over_cpu([one.stats for one in own.timings]) for name, own in measured[level].items()}
            busy[str(level)] = stats.busy_reasons({}, shares)
    summary = identity | {
        "plain": PLAIN,
        "levels": [str(level) for level in levels],
        "plain_requests_per_s": capacity,
        "num_requests": len(chosen),
        "cost_context": context,
        "environment": records.environment(),
        "fastest": verdicts,
        "busy": busy,
        "runs": found,
    }
    records.write_json(out_dir / "choose.json", summary)
    title = f"{target.name}, {identity['dtype']}, {len(chosen)} requests of {cfg.task.name}"
    choose_report.plot_choose(summary, title, out_dir / "choose.png")
    console.show(*choose_report.choose_tables(summary, title), "")
    print(markdown(*choose_report.choose_cells(summary)), end="\n\n")  # as it is: a line must not be broken
    console.show(*verdicts.values())
    for level, reasons in busy.items():
        if reasons:
            gains = ", ".join(f"{name} {own['gain_cpu'][level]:.2f}" for name, own in found.items() if name != PLAIN)
            console.show(f"{run_report.busy_note(reasons, None)}; gains by CPU time at rate {level}: {gains}")
    for name, own in found.items():
        if own["outputs_said"].startswith("NO"):
            console.show(f"warning: {name}: {own['outputs_said']}")
    console.show(f"written to {out_dir}")
    return summary


def numbers(record: Any, table: Any) -> dict[str, Any]:
    """What came of a run at a rate, next to what the costs of its steps predict."""
    from specdec.measure import stats
    from specdec.policy import cost_table

    seconds = sum(step.draft_s + step.verify_s for step in record.steps)
    predicted = cost_table.predicted_seconds(record.steps, table)
    emitted = sum(int(step.emitted_B.sum()) for step in record.steps)
    return stats.serving_metrics(record.timings) | {
        "decode_tokens_per_s": emitted / seconds if seconds else None,
        "predicted_tokens_per_s": emitted / predicted if predicted else None,
        "measured_over_predicted": predicted / seconds if seconds else None,
    }


def work_and_seconds(record: Any, seconds_of: Any) -> tuple[list[float], list[float]]:
    """Output tokens of each request, and the engine's time that it accounts for: `seconds_of` its statistics."""
    return record.by_request(lambda one: one.num_output_tokens), record.by_request(lambda one: seconds_of(one.stats))


def gain(base: Any, own: Any, seconds_of: Any) -> dict[str, float]:
    """Output tokens per second of the engine's time, prefill included, over those of the baseline."""
    from specdec.measure import stats

    return stats.ratio_of_rates(*work_and_seconds(base, seconds_of), *work_and_seconds(own, seconds_of))


def verdict(
    rate: str, measured: dict[str, tuple[list[float], list[float]]], runs: dict[str, Any], level: str, timed_on_cpu: bool
) -> str:
    """Which run is fastest at a rate, in a line; none is where the noise does not allow it.

    measured: work and seconds of each request, by run; timed_on_cpu: the work was done by this process's CPU time. Only a run
    that drafted something, and then is faster by CPU time too, can be the fastest; others that seemed faster are named.
    """
    from specdec.measure import stats

    num_requests = len(measured[PLAIN][0])
    if num_requests < stats.MIN_REQUESTS:
        return f"{rate} rate: {num_requests} requests are too few to name the fastest; give {stats.MIN_REQUESTS} or more"
    not_counted = {name: "drafted nothing" for name, own in runs.items() if not own["at"][level]["num_draft_tokens"]}
    if timed_on_cpu:
        slower = {name: "not by CPU time" for name, own in runs.items() if own["gain_cpu"][level] <= 1}
        not_counted = slower | not_counted
    candidates = [name for name in runs if name not in not_counted]
    amounts, seconds = ({name: pair[place] for name, pair in measured.items()} for place in (0, 1))
    best, within_noise = stats.fastest(seconds, amounts, PLAIN, candidates)
    gains = {name: stats.ratio_of_rates(*measured[PLAIN], *measured[name]) for name in runs}
    seeming = [f"{name} ({why})" for name, why in not_counted.items() if gains[name]["low"] > 1]
    equals = [name for name in within_noise if name in candidates]
    beside = f"; within the noise of it: {', '.join(equals)}" if equals else ""
    beside += f"; seemed faster than {PLAIN}, and is not counted: {', '.join(seeming)}" if seeming else ""
    if best is None:
        return f"{rate} rate: no run is faster than {PLAIN} beyond the noise{beside}"
    return "fastest at the {} rate: {}, {ratio:.2f} ({low:.2f} to {high:.2f}){}".format(rate, best, beside, **gains[best])


def entries(cfg: Choose) -> dict[str, dict[str, Any]]:
    """The object of every run by its name, plain decoding first. ValueError, one line, for what is not known."""
    from specdec import config, method
    from specdec.checked import nearest

    known = [name for name in method.names() if name == PLAIN or method.facts(name).drafts]
    given, checkpoints = cfg.methods, cfg.checkpoints or {}
    for key, names in (("methods", given), ("checkpoints", checkpoints)):
        for name in names:
            if name not in known:
                raise ValueError(f"{key}: no method {name!r}; {nearest(str(name), known)}")
    for name, directory in checkpoints.items():
        if directory is None or isinstance(directory, list | dict):
            raise ValueError(f"checkpoints: {name} has {directory!r}; give the directory of a drafter, {{{name}: DIR}}")
    if len(set(given)) < len(given):
        raise ValueError(f"methods={given}: one of them stands there twice; name variants in runs=")

    def settings(name: str) -> dict[str, Any]:
        own = {key: value for key, value in config.read(config.CONF / f"method/{name}.yaml").items() if key != "name"}
        if name in checkpoints:
            if "model" not in own:
                raise ValueError(f"checkpoints: method {name!r} takes none; leave it out")
            own["model"] = str(checkpoints[name])
        return {key: value for key, value in own.items() if value is not None} | {"method": name}

    found = {name: settings(name) for name in dict.fromkeys([PLAIN, *given, *checkpoints])}
    for name in given:
        if "model" in method.required(name) and "model" not in found[name]:
            raise ValueError(f"methods: {name!r} drafts with a trained drafter; give checkpoints={{{name}: DIR}}")
    for name, own in (cfg.runs or {}).items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(name)) or name in found:
            why = "is a run already" if name in found else "may have letters, digits, '.', '_' and '-' only"
            raise ValueError(f"runs: the name {name!r} {why}; give another")
        if isinstance(own, str) and own in known:
            raise ValueError(f"runs: {name!r} has {own!r}, and must be a mapping; write {{{name}: {{method: {own}}}}}")
        if not isinstance(own, dict) or own.get("method") not in known:
            said = own.get("method") if isinstance(own, dict) else own
            raise ValueError(f"runs: {name!r} needs a method, and has {said!r}; {nearest(str(said), known)}")
        found[name] = {key: value for key, value in (settings(own["method"]) | own).items() if value is not None}
    return found


def parse(name: str, given: dict[str, Any], rejection: Rejection) -> Any:
    """A run's object under the rejection scheme of all; plain decoding has no draft to judge."""
    from specdec.speculative_config import SpeculativeConfig

    scheme = {key: value for key, value in rejection.settings.items() if value is not None}
    own = given if name == PLAIN else {**scheme, "rejection_sample_method": rejection.name, **given}
    try:
        plan = SpeculativeConfig.parse(own).resolve()
        plan.check_processes(1)
    except ValueError as error:
        raise ValueError(f"run {name!r}: {error}") from None
    return plan


def describe_k(settings: Any, most: int) -> str:
    """How many tokens are drafted, in a few characters."""
    if not most:
        return "-"
    said = "auto" if settings.num_speculative_tokens == "auto" else str(most)
    if settings.num_speculative_tokens_per_batch_size is not None:
        said = f"<= {most}, by batch"
    return f"{said}, adaptive" if settings.enable_adaptive_verification else said


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("choose", run)
