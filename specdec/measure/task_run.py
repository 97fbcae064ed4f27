"""From a composed configuration to a decoded task with its records: what eval/run.py calls, and a notebook may."""

from __future__ import annotations

import sys
from typing import Any

from specdec import config, lock, method, rejection
from specdec.config.pages import Eval
from specdec.engine import Engine
from specdec.files import write_json
from specdec.measure import evaluate, logger, records, tasks
from specdec.measure.evaluate import Pass
from specdec.measure.report import console, page
from specdec.measure.report import run as run_report
from specdec.measure.report.table import method_words
from specdec.model import distributed
from specdec.model.target import choose_device


@lock.released_at_end()
def run(cfg: Eval, quiet: bool = False) -> dict[str, Any]:
    """Decode as the config says. Returns what is in summary.json; {} in a process that does not write. quiet: no tables."""
    # everything that a typo can break comes before the weights
    plan = cfg.plan()
    plan.check_processes(cfg.tensor_parallel_size)
    chosen = cfg.task.load(cfg.limit)
    out_dir = cfg.start()
    num_shares = distributed.num_started() // cfg.tensor_parallel_size
    if num_shares > len(chosen):
        raise ValueError(f"{num_shares} processes for a task of {len(chosen)} rows; start at most one for each")
    processes = distributed.join(cfg.tensor_parallel_size, choose_device(cfg.model.device), data_parallel=True)
    target = cfg.model.load(processes=processes)
    proposer, verifier = plan.build(target)
    policy = plan.policy.build(target, proposer, cfg.max_batch_size)
    cache = target.new_cache()
    engine = Engine(target, proposer, verifier, cache=cache, policy=policy, **cfg.engine)
    passes = [Pass(plan.method, engine, out_dir / "requests.jsonl")]
    if cfg.baseline and plan.method != method.PLAIN:
        plain = Engine(target, method.build(method.PLAIN, target), rejection.of_plain(verifier), cache=cache, **cfg.engine)
        passes.insert(0, Pass(method.PLAIN, plain, out_dir / "baseline.jsonl"))
    for each in passes:
        tasks.prepare(each.engine, chosen, cfg.sampling)
    identity = records.run_identity(target, chosen, cfg.sampling, cfg.seed, plan.scheme) | {
        "method": plan.method,
        "speculative_config": plan.config.as_dict(),
        "drafter_weights": records.drafter_weights(plan),
        "tensor_parallel_size": cfg.tensor_parallel_size,
        **cfg.engine,
    }
    wandb_run = None
    if processes.is_first:
        cfg.claim(identity)
        if not quiet:
            print(evaluate.memory(passes, list(records.drafter_directories(plan).values())), file=sys.stderr)
        wandb_run = logger.WandbRun(config.plain(cfg), "eval")

    on_request = wandb_run.log_request if wandb_run else lambda row: None
    files = evaluate.decode(passes, chosen, cfg.sampling, cfg.seed, on_request)
    if processes.data_parallel_rank > 0:
        return {}
    verify_s = evaluate.verify_seconds(engine, files, min(cfg.max_batch_size, len(chosen)))
    if wandb_run is None:
        return {}
    summary = (
        identity
        | {"data_parallel_size": processes.data_parallel_size}
        | evaluate.summarize(passes, files, verify_s, cfg.sampling)
    )
    write_json(out_dir / "summary.json", summary)
    title = f"{method_words(summary)} on {target.name}, {identity['dtype']}, {cfg.task.name}"
    plot = run_report.plot_run(summary, title, out_dir / "run.png")
    report = page.write_run(out_dir, page.collect_texts(files[-1].rows, target.tokenizer, chosen))
    numbers = {key: summary[key] for key in ("overall", "categories", "lossless_said")}
    results = [plot, out_dir / "summary.json", report]
    if not quiet:
        gain = run_report.speedup_line(summary["overall"])
        console.show(*run_report.tables(summary, title), *([gain] if gain else []), f"lossless: {summary['lossless_said']}")
        console.show(*evaluate.notes(engine, summary))
    wandb_run.finish(numbers, results, files[-1].rows, tasks.prompt_texts(chosen))
    if not quiet:
        console.show(f"report: {report}", f"written to {out_dir}")
    return summary
