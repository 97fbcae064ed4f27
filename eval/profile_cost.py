"""Measure what verifying and drafting cost on this machine, by batch size and length; with the acceptance of a finished run,
propose how much to draft at each batch size.

    python eval/profile_cost.py method=ngram
    python eval/profile_cost.py checkpoint=DIR acceptance=outputs/demo-llama-eagle3-standard/latest
    python eval/run.py num_speculative_tokens_per_batch_size=outputs/cost-llama-ngram/latest/cost.json max_batch_size=8

Writes out_dir/cost.json, config.yaml and cost.png. Nothing is learned from what is decoded here: prompts are made up.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import ProfileCost


def run(cfg: ProfileCost) -> None:
    from specdec import config
    from specdec.files import read_json_object
    from specdec.measure import acceptance, logger, records, stats
    from specdec.measure.report import console
    from specdec.measure.report import cost as cost_report
    from specdec.measure.report import run as run_report
    from specdec.policy import cost_table, profiling

    plan = cfg.plan()
    plan.check_processes(1)
    out_dir = cfg.start()
    finished = None if cfg.acceptance is None else acceptance.read_run(Path(cfg.acceptance), plan.method)

    target = cfg.model.load()
    proposer, _ = plan.build(target)
    known = None if finished is None else finished.acceptance(target, proposer.drafts_trees)
    longest_draft = max(proposer.num_speculative_tokens, cfg.max_draft or 0)
    sizes = profiling.sizes_up_to(cfg.max_batch_size)
    begin_s = time.perf_counter()
    begin_cpu_s = time.process_time()
    with console.one_bar("steps", profiling.num_steps(cfg.max_batch_size, longest_draft, cfg.repeats)) as advance:
        measured = profiling.measure(target, proposer, sizes, longest_draft, cfg.context, cfg.repeats, cfg.sampling, advance)
    wall_over_cpu = (time.perf_counter() - begin_s) / (time.process_time() - begin_cpu_s)
    table = replace(measured, about=measured.about | {"method": plan.method, "environment": records.environment()})

    shown: list[Any] = cost_report.cost_tables(table)
    predicted: tuple[Any, ...] = ()
    proposal = ""
    if known is not None:
        max_draft = proposer.num_speculative_tokens
        table = acceptance.with_schedule(table, known, max_draft)
        if len(known.survival) < max_draft:
            shown.append(
                f"note: the drafts of {cfg.acceptance} had K={len(known.survival)}, and nothing is known beyond it, so at most "
                f"that is proposed; decode with method.num_speculative_tokens={max_draft} to know more"
            )
        rates = cost_table.tokens_per_s(table, known.survival, max_draft, known.draft_share)
        predicted = (known.survival, rates)
        shown.append(cost_report.schedule_table(table, *predicted))
        survival = " ".join(f"{p:.2f}" for p in known.survival)
        what = "the i-th node is accepted" if proposer.drafts_trees else "i draft tokens are accepted"
        shown.append(f"P({what}), of {known.num_steps} steps: {survival}")
        proposal = f"num_speculative_tokens_per_batch_size={json.dumps(table.schedule, separators=(',', ':'))}\n"
    cfg.claim({"profile": cfg.name})
    table.save(out_dir / "cost.json")
    about = table.about
    title = f"{plan.method} on {target.name}, {about['dtype']}, context {about['context']}"
    plot = cost_report.plot_cost(table, title, out_dir / "cost.png", *predicted)
    # a slow moment hits one batch size, and is averaged away with its neighbours where more rows seem to cost less
    if target.device.type == "cpu" and (reasons := stats.busy_reasons({}, {"measuring": wall_over_cpu})):
        shown.append(f"{run_report.busy_note(reasons, None)}; measure again")
    console.show(*shown)
    print(proposal, end="")  # without line breaks: to be copied
    wandb_run = logger.WandbRun(config.plain(cfg), "cost")
    wandb_run.finish(read_json_object(out_dir / "cost.json"), [plot, out_dir / "cost.json"])
    console.show(f"written to {out_dir / 'cost.json'}")


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("profile_cost", run, *config.words_of_checkpoint())
