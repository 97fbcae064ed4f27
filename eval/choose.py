"""Which method to choose: all of them on the same requests, seeds and arrival times, at a low and a high request rate, in one
process on one target, in turn step by step, each by a clock of its own.

    python eval/choose.py
    python eval/choose.py methods=[none,ngram] checkpoints='{eagle3: DIR}' rates=[one,0.5,2,all]
    python eval/choose.py methods=[none,ngram] runs='{ngram-auto: {method: ngram, num_speculative_tokens: auto}}'

Writes out_dir/requests.jsonl (a row per request, run and rate), cost-RUN.json, choose.json, choose.png and config.yaml, and
prints the tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Choose


def run(cfg: Choose) -> dict[str, Any]:
    from specdec import config
    from specdec.files import write_json
    from specdec.measure import choose, logger, records, serving
    from specdec.measure.report import choose as choose_report
    from specdec.measure.report import console
    from specdec.params import PLAIN

    def defaults(name: str) -> dict[str, Any]:
        return {key: value for key, value in config.read(config.CONF / f"method/{name}.yaml").items() if key != "name"}

    params = cfg.sampling
    scheme = cfg.rejection.settings | {"rejection_sample_method": cfg.rejection.name}
    plans = choose.parse_runs(cfg.methods, cfg.checkpoints, cfg.runs, scheme, defaults)
    levels = serving.parse_rates(cfg.rates)
    chosen = cfg.task.load(cfg.limit)
    out_dir = cfg.start()

    target = cfg.model.load()
    runs = choose.build_runs(plans, target, cfg.engine, chosen, params)
    identity = records.run_identity(target, chosen, params, cfg.seed, cfg.rejection.name) | {
        "rates": [str(level) for level in levels],
        "repeats": cfg.repeats,
        **cfg.engine,
    }
    context = cfg.cost_context or choose.typical_context(target, chosen, params)
    choose.measure_costs(runs, context, cfg.cost_repeats, params)
    cfg.claim(identity)
    wandb_run = logger.WandbRun(config.plain(cfg), "choose")
    for name, each in runs.items():
        each.save_costs(out_dir / f"cost-{name}.json")

    capacity = None
    if any(not isinstance(level, str) for level in levels):
        capacity = choose.plain_capacity(runs[PLAIN], chosen, params, cfg.seed)
    rows = records.JsonlFile(out_dir / "requests.jsonl", keep=False)
    measured = {level: {name: serving.RunRecord() for name in runs} for level in levels}
    finished = choose.decode(runs, measured, cfg.repeats, capacity, chosen, params, cfg.seed)
    with console.one_bar("requests", cfg.repeats * len(levels) * len(runs) * len(chosen)) as advance:
        for level, number, name, task, timing, request in finished:
            common = {"run": name, "rate": str(level), "round": number, **runs[name].row()}
            times = {"arrival_s": timing.arrival_s, "added_s": timing.added_s}
            row = records.request_record(task, 1, request, target.tokenizer, common | times)
            rows.add({**row, "id": request.id})
            wandb_run.log({f"choose/{level}/{name}/decode_tokens_per_s": row["decode_tokens_per_s"]})
            advance(1, f"rate {level}, {name}")
    rows.close()

    summary = identity | {
        "plain": PLAIN,
        "levels": [str(level) for level in levels],
        "plain_requests_per_s": capacity,
        "num_requests": len(chosen),
        "cost_context": context,
        "environment": records.environment(),
        **choose.summarize(runs, measured, params.greedy, target.device.type == "cpu"),
    }
    write_json(out_dir / "choose.json", summary)
    title = f"{target.name}, {identity['dtype']}, {len(chosen)} requests of {cfg.task.name}"
    plot = choose_report.plot_choose(summary, title, out_dir / "choose.png")
    console.show(*choose_report.choose_tables(summary, title))
    console.show(*choose_report.verdicts_and_notes(summary))
    wandb_run.finish(summary, [plot, out_dir / "choose.json"])
    console.show(f"written to {out_dir}")
    return summary


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("choose", run)
