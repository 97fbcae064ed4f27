"""Decode under load: requests arrive by a random process or a trace, wait for a row, and are timed from when they were due.

    python eval/load.py method=ngram request_rate=0.5
    python eval/load.py method=suffix request_rate='[[30, 0.2], [30, 2.0], [30, 0.2]]'
    python eval/load.py method=none arrivals=trace trace=outputs/load-demo-llama-ngram-standard/requests.jsonl

First turns of the tasks only. Writes, line by line while it runs, out_dir/requests.jsonl (a row per finished request) and
steps.jsonl (a row per step of the engine), and at the end summary.json and serving.png, with config.yaml. What had finished when a
run was interrupted or killed stays readable; after Ctrl-C it is summarised. A run is not resumed: its clock has stopped.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Load


def run(cfg: Load) -> dict[str, Any]:
    import torch

    from specdec import config
    from specdec.engine import Engine
    from specdec.measure import arrivals, logger, records, serving, stats, tasks
    from specdec.measure.report import console
    from specdec.measure.report import run as run_report
    from specdec.measure.report import serving as serving_report

    params, plan = cfg.sampling, cfg.plan()
    name, scheme = plan.method, plan.scheme
    plan.check_processes(1)
    chosen = tasks.load(cfg.task.path or tasks.DEMO, cfg.limit)
    coming = arrivals.make_arrivals(cfg.arrivals, cfg.request_rate, cfg.trace, cfg.num_requests, len(chosen), cfg.seed)
    out_dir = Path(cfg.out_dir)
    records.reserve(out_dir, resume=False, resumes=False)
    torch.set_num_threads(cfg.num_threads or 1)

    target = cfg.model.load()
    proposer, verifier = plan.build(target)
    engine = Engine(target, proposer, verifier, **cfg.engine)
    for _, request, _ in arrivals.make_requests(target, chosen, coming, params, cfg.seed):
        engine.check(request)
    longest = [params.model_copy(update={"max_tokens": a.max_tokens}) for a in coming if a.max_tokens]
    for own in [params, *sorted(longest, key=lambda own: own.max_tokens)[-1:]]:
        tasks.prepare(engine, chosen, own)
    policy = plan.policy.build(target, proposer, cfg.max_batch_size)
    engine = Engine(target, proposer, verifier, cache=engine.cache, policy=policy, **cfg.engine)
    identity = records.run_identity(target, chosen, params, cfg.seed, scheme) | {
        "method": name,
        "speculative_config": plan.config.as_dict(),
        **{key: getattr(cfg, key) for key in ("arrivals", "trace", "num_requests")},
        "request_rate": str(cfg.request_rate),
        **cfg.engine,
    }
    records.claim(out_dir, False, identity, resumes=False)
    config.save(cfg, out_dir / "config.yaml")
    common = {
        "method": name,
        "rejection": verifier.name,
        "num_speculative_tokens": proposer.num_speculative_tokens,
        "lossless": verifier.lossless,
    }
    print("warming up", file=sys.stderr)
    serving.warm_up(engine)

    rows, steps = (records.JsonlFile(out_dir / f"{what}.jsonl", keep=False) for what in ("requests", "steps"))
    task_of: dict[str, tasks.Task] = {}

    def timed() -> Any:
        for arrival_s, request, task in arrivals.make_requests(target, chosen, coming, params, cfg.seed):
            task_of[request.id] = task
            yield arrival_s, request

    interrupted, exit_code, began, num_not_due = False, 0, 0.0, 0
    with console.one_bar("requests", len(coming)) as advance:

        def told(turn: serving.StepRecord, _: Any) -> None:
            nonlocal began
            began = engine.clock() - turn.at_s
            steps.add(turn.row())
            advance(0, f"{turn.waiting} waiting, {turn.running} running")

        sent = serving.run_open_loop(engine, timed(), told)
        try:
            for arrival_s, added_s, request in sent:
                row = records.request_record(task_of.pop(request.id), 1, request, target.tokenizer, common)
                rows.add({**row, "id": request.id, "arrival_s": arrival_s, "added_s": added_s})
                advance()
        except KeyboardInterrupt as error:
            interrupted, stopped_s, exit_code = True, engine.clock() - began, script.exit_code(error)
            num_not_due = sum(arrival.at_s > stopped_s for arrival in coming)
            sent.close()
    rows.close()
    steps.close()

    served = [records.timing_of(row) for row in records.rows_in(out_dir / "requests.jsonl")]
    if not served:
        print("interrupted before any request had finished", file=sys.stderr)
        sys.exit(exit_code)
    changing = cfg.arrivals == "poisson" and isinstance(cfg.request_rate, list)
    rates = arrivals.parse_request_rate(cfg.request_rate) if changing else []
    edges = list(accumulate(seconds for seconds, _ in rates))
    phases = stats.by_phase(served, rates, cut=interrupted or len(coming) == cfg.num_requests)
    busy = sum(turn["wall_s"] for turn in records.rows_in(out_dir / "steps.jsonl"))
    overall = stats.serving_metrics(served)
    summary = identity | {
        "num_speculative_tokens": proposer.num_speculative_tokens,
        "lossless": verifier.lossless,
        "num_arrivals": len(coming),
        "num_unfinished": len(coming) - num_not_due - len(served),  # were due, but not through when it was interrupted
        "num_not_due": num_not_due,
        "interrupted": interrupted,
        "busy_share": busy / overall["end_s"],
        "environment": records.environment(),
        "overall": overall,
        "phases": phases,
    }
    records.write_json(out_dir / "summary.json", summary)
    said = cfg.trace if cfg.arrivals == "trace" else f"{cfg.request_rate} requests/s"
    title = f"{name} (K={proposer.num_speculative_tokens}, {scheme}) on {target.name}, {identity['dtype']}: {said}"
    plot = serving_report.plot_load(served, records.rows_in(out_dir / "steps.jsonl"), edges, title, out_dir / "load.png")
    console.show(*serving_report.load_tables(summary, title), f"the engine was busy {summary['busy_share']:.0%} of the time")
    share = stats.wall_over_cpu([one.stats for one in served]) if target.device.type == "cpu" else None
    if reasons := stats.busy_reasons({}, {name: share}):
        console.show(run_report.busy_note(reasons, None))
    if not verifier.lossless:
        console.show(f"lossless: NO, {verifier.name} does not preserve the target's distribution")
    if cfg.logger.name == "wandb":
        logged = list(records.rows_in(out_dir / "requests.jsonl"))
        where = logger.to_wandb(config.plain(cfg), logged, summary | {"categories": phases}, [plot])
        console.show(f"wandb: {where}")
    console.show(f"written to {out_dir}")
    if interrupted:
        later = f", {num_not_due} were not due yet" if num_not_due else ""
        print(f"interrupted: {len(served)} of {len(coming)} requests had finished, and are summarised{later}", file=sys.stderr)
        sys.exit(exit_code)
    return summary


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("load", run, *config.method_of_checkpoint())
