"""Measure what verifying and drafting cost on this machine, by batch size and length; with the acceptance of a finished run,
propose how much to draft at each batch size.

    python eval/profile_cost.py method=ngram
    python eval/profile_cost.py checkpoint=outputs/eagle3_demo-llama-demo acceptance=outputs/demo-llama-eagle3-standard
    python eval/run.py method=ngram num_speculative_tokens_per_batch_size=outputs/cost-llama-ngram/cost.json max_batch_size=8

Writes out_dir/cost.json, config.yaml and cost.png. Nothing is learned from what is decoded here: prompts are made up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import ProfileCost


def run(cfg: ProfileCost) -> None:
    import torch

    from specdec import config
    from specdec.measure import records
    from specdec.measure.report import console
    from specdec.measure.report import cost as cost_report
    from specdec.policy import cost_table, profiling

    plan, params = cfg.plan(), cfg.sampling
    name = plan.method
    plan.check_processes(1)
    out_dir = Path(cfg.out_dir)
    records.reserve(out_dir, resume=False, resumes=False)
    before = None if cfg.acceptance is None else read_run(Path(cfg.acceptance), name)
    torch.set_num_threads(cfg.num_threads or 1)

    target = cfg.model.load()
    proposer, _ = plan.build(target)
    most = proposer.num_speculative_tokens
    dtype = str(target.dtype).removeprefix("torch.")
    for key, value in (("target", target.name), ("dtype", dtype)):
        if before is not None and before["summary"].get(key) != value:
            raise ValueError(f"acceptance={cfg.acceptance}: a run of {key}={before['summary'].get(key)!r}, not {value!r}")
    acceptance = None if before is None else survival_of(before, target.max_model_len)
    if acceptance is not None and not acceptance[-1]:
        raise ValueError(f"acceptance={cfg.acceptance}: no step of it had a whole draft; decode more tokens")
    sizes, longest = profiling.sizes_up_to(cfg.max_batch_size), max(most, cfg.max_draft or 0)
    total = len(sizes) * (cfg.repeats + 1) * len(profiling.lengths_up_to(longest))
    with console.one_bar("steps", total) as advance:
        table = profiling.measure(target, proposer, sizes, longest, cfg.context, cfg.repeats, params, advance)
    table = replace(table, about={**table.about, "method": name, "environment": records.environment()})

    parts, proposal = list[Any](cost_report.cost_tables(table)), ""
    if acceptance is not None:
        stood_K, reach_K, count = acceptance
        if len(stood_K) < most:
            parts.append(
                f"note: the drafts of {cfg.acceptance} had K={len(stood_K)}, and nothing is known beyond it, so at most "
                f"that is proposed; decode with method.num_speculative_tokens={most} to know more"
            )
        schedule = cost_table.best_schedule(table, stood_K, most, reach_K)
        about = {**table.about, "acceptance": {"survival": stood_K, "reach": reach_K, "num_steps": count}}
        table = replace(table, schedule=schedule, about=about)
        parts.append(cost_report.schedule_table(table, cost_table.tokens_per_s(table, stood_K, most, reach_K)))
        parts.append(f"P(i draft tokens stand), of {count} steps: {' '.join(f'{p:.2f}' for p in stood_K)}")
        proposal = f"num_speculative_tokens_per_batch_size={json.dumps(schedule, separators=(',', ':'))}\n"
    records.claim(out_dir, False, {"profile": cfg.name}, resumes=False)
    config.save(cfg, out_dir / "config.yaml")
    table.save(out_dir / "cost.json")
    cost_report.plot_cost(table, f"{name} on {target.name}, {dtype}, context {table.about['context']}", out_dir / "cost.png")
    console.show(*parts)
    print(proposal, end="")  # as it is: to be copied
    console.show(f"written to {out_dir / 'cost.json'}")


def read_run(directory: Path, method: str) -> dict[str, Any]:
    """Summary and rows of a run of eval/run.py. ValueError if its acceptance says nothing about this method."""
    from specdec.measure import records

    what = f"acceptance={directory}"
    if not all((directory / name).is_file() for name in ("summary.json", "requests.jsonl")):
        raise ValueError(f"{what}: not the out_dir of a finished eval/run.py")
    try:
        summary = records.read_summary(directory, "run it again", ("target", "dtype", "method", "num_speculative_tokens"))
        rows = list(records.rows_in(directory / "requests.jsonl"))
        records.check_rows(rows, directory / "requests.jsonl")
    except (OSError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from None
    if summary.get("method") != method:
        raise ValueError(f"{what}: a run of method {summary.get('method')!r}, not {method!r}; give one of the same method")
    settings = summary.get("speculative_config", {})
    for key in ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification"):
        if settings.get(key):
            raise ValueError(f"{what}: its drafts were cut by {key}; give a run without it")
    if settings.get("num_speculative_tokens") == "auto":
        raise ValueError(f"{what}: its K was chosen step by step; give a run with a number as num_speculative_tokens")
    if not summary.get("lossless", True):
        raise ValueError(
            f"{what}: its acceptance is that of {summary.get('rejection')}, not the drafter's; give a lossless run"
        )
    if not rows:
        raise ValueError(f"{what}: no requests in it")
    return {"summary": summary, "rows": rows}


def survival_of(run: dict[str, Any], max_model_len: int) -> tuple[list[float], list[float], int]:
    """`stats.survival` of a run's rows."""
    from specdec.measure import records, stats

    limit = run["summary"].get("max_model_len") or max_model_len
    budgets = []
    for row in run["rows"]:
        room = limit - row["num_prompt_tokens"]
        budgets.append(min(room, row["sampling"]["max_tokens"] or room))
    num_draft = run["summary"]["num_speculative_tokens"]
    return stats.survival([records.stats_of(row) for row in run["rows"]], budgets, num_draft)


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("profile_cost", run, *config.method_of_checkpoint())
