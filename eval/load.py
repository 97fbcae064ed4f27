"""Decode under load: requests arrive by a random process or a trace, wait for a row, and are timed from when they were due.

    python eval/load.py method=ngram request_rate=0.5
    python eval/load.py method=suffix request_rate='[[30, 0.2], [30, 2.0], [30, 0.2]]'
    python eval/load.py method=none arrivals=trace trace=outputs/load-demo-llama-ngram-standard/latest/requests.jsonl

First turns of the tasks only. Writes, line by line while it runs, out_dir/requests.jsonl (a row per finished request) and
steps.jsonl (a row per step of the engine), and at the end summary.json and load.png, with config.yaml. Rows of a run that was
interrupted or killed stay readable; after Ctrl-C they are summarised. A run is not resumed: its clock has stopped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Load


def run(cfg: Load) -> dict[str, Any]:
    from specdec import config
    from specdec.engine import Engine
    from specdec.files import write_json
    from specdec.measure import arrivals, load, logger, records, serving, stats, tasks
    from specdec.measure.report import console
    from specdec.measure.report import run as run_report
    from specdec.measure.report import serving as serving_report
    from specdec.measure.report.table import method_words

    plan = cfg.plan()
    plan.check_processes(1)
    chosen = cfg.task.load(cfg.limit)
    at = arrivals.make_arrivals(cfg.arrivals, cfg.request_rate, cfg.trace, cfg.num_requests, len(chosen), cfg.seed)
    out_dir = cfg.start()

    target = cfg.model.load()
    proposer, verifier = plan.build(target)
    engine = Engine(target, proposer, verifier, **cfg.engine)
    load.prepare(engine, chosen, at, cfg.sampling, cfg.seed)
    policy = plan.policy.build(target, proposer, cfg.max_batch_size)
    engine = Engine(target, proposer, verifier, **cfg.engine, cache=engine.cache, policy=policy)
    identity = records.run_identity(target, chosen, cfg.sampling, cfg.seed, plan.scheme) | {
        "method": plan.method,
        "speculative_config": plan.config.as_dict(),
        **{key: getattr(cfg, key) for key in ("arrivals", "trace", "num_requests")},
        "request_rate": str(cfg.request_rate),
        **cfg.engine,
    }
    cfg.claim(identity)
    wandb_run = logger.WandbRun(config.plain(cfg), "load")
    print("warming up", file=sys.stderr)
    serving.warm_up(engine)

    facts = {"num_speculative_tokens": proposer.num_speculative_tokens, "lossless": verifier.lossless}
    common = {"method": plan.method, "rejection": verifier.name, **facts}
    interruption = load.decode(engine, chosen, at, cfg.sampling, cfg.seed, out_dir, common, wandb_run.log_request)
    timings = load.read_timings(out_dir)
    if not timings:
        assert interruption is not None
        print("interrupted before any request had finished", file=sys.stderr)
        sys.exit(interruption.exit_code)

    is_changing = cfg.arrivals == "poisson" and isinstance(cfg.request_rate, list)
    phases = arrivals.parse_request_rate(cfg.request_rate) if is_changing else []
    numbers = load.summarize(out_dir, timings, phases, at, len(at) == cfg.num_requests, interruption)
    summary = identity | facts | numbers
    write_json(out_dir / "summary.json", summary)
    rate = cfg.trace if cfg.arrivals == "trace" else f"{cfg.request_rate} requests/s"
    title = f"{method_words(summary)} on {target.name}, {identity['dtype']}: {rate}"
    steps = records.rows_in(out_dir / "steps.jsonl")
    plot = serving_report.plot_load(timings, steps, load.phase_edges(phases), title, out_dir / "load.png")
    console.show(*serving_report.load_tables(summary, title))
    console.show(f"the engine was busy {summary['busy_share']:.0%} of the time")
    share = stats.wall_over_cpu([timing.stats for timing in timings]) if target.device.type == "cpu" else None
    if reasons := stats.busy_reasons({}, {plan.method: share}):
        console.show(run_report.busy_note(reasons, None))
    if not verifier.lossless:
        console.show(f"lossless: NO, {verifier.name} does not preserve the target's distribution")
    rows = list(records.rows_in(out_dir / "requests.jsonl"))
    wandb_run.finish(numbers, [plot, out_dir / "summary.json"], rows, tasks.prompt_texts(chosen))
    console.show(f"written to {out_dir}")
    if interruption is not None:
        later = f", {interruption.num_not_due} were not due yet" if interruption.num_not_due else ""
        print(f"interrupted: {len(timings)} of {len(at)} requests had finished, and are summarised{later}", file=sys.stderr)
        sys.exit(interruption.exit_code)
    return summary


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("load", run, *config.words_of_checkpoint())
