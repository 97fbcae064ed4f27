"""Decode a task with a method under a rejection scheme, and without speculation, and say what was gained and whether anything
was lost.

    python eval/run.py method=suffix
    python eval/run.py method=ngram method.num_speculative_tokens=8 sampling.temperature=0.8 rejection=match
    python eval/run.py -m method=ngram,suffix limit=24
    python eval/run.py checkpoint=outputs/eagle3_demo-llama-demo          # any drafter in a known format says its method
    python eval/run.py task=jsonl task.path=prompts.jsonl speculative_config='{"method": "suffix"}'

Writes out_dir/requests.jsonl, baseline.jsonl, summary.json, config.yaml and run.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra

from specdec import config


def run(cfg: dict[str, Any]) -> dict[str, Any]:
    import torch

    from specdec import cost, method, rejection, report, tasks, track
    from specdec.core import SamplingParams
    from specdec.engine import Engine
    from specdec.llm import SpeculativeConfig
    from specdec.target import CausalLM

    # everything that a typo can break comes before the weights
    if cfg["checkpoint"] is not None:
        config.take_checkpoint(cfg)
    params = SamplingParams(**cfg["sampling"])
    speculative = SpeculativeConfig.parse(config.speculative(cfg))
    name, scheme = speculative.resolved_method, speculative.rejection_sample_method
    chosen = tasks.load(cfg["task"]["path"] or tasks.DEMO, cfg["limit"])
    model, out_dir = cfg["model"], Path(cfg["out_dir"])
    track.refuse_taken(out_dir, cfg["resume"])
    torch.set_num_threads(config.threads(cfg))

    target = CausalLM(config.model_name(model), model["dtype"], model["device"], model["revision"])
    proposer, verifier = speculative.build(target)
    shape = {key: cfg[key] for key in ("max_batch_size", "max_model_len", "prefill_chunk_size")}
    identity = {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": tasks.fingerprint(chosen),
        "sampling": params.model_dump(),
        "seed": cfg["seed"],
        "rejection": scheme,
        "method": name,
        "speculative_config": speculative.model_dump(exclude_none=True),
        **shape,
    }
    passes = [(out_dir / "requests.jsonl", proposer, verifier)]
    if cfg["baseline"] and name != "none":
        passes.insert(0, (out_dir / "baseline.jsonl", method.build("none", target), rejection.build("standard")))
    cache = target.new_cache()
    engines = [Engine(target, own, judge, cache=cache, **shape) for _, own, judge in passes]
    engines[-1].policy = speculative.policy(target, proposer, cfg["max_batch_size"])
    for engine in engines:
        tasks.prepare(engine, chosen, params)
    track.claim(out_dir, cfg["resume"], identity)
    config.save(cfg, out_dir / "config.yaml")

    names = ["none", name][-len(passes) :]
    recorded = [track.Rows(path) for path, _, _ in passes]
    common = [
        {
            "method": label,
            "rejection": judge.name,
            "num_speculative_tokens": own.num_speculative_tokens,
            "lossless": judge.lossless,
        }
        for label, (_, own, judge) in zip(names, passes, strict=True)
    ]
    done = {label: len(rows.rows) for label, rows in zip(names, recorded, strict=True)}
    with report.progress(sum(len(task.turns) for task in chosen), **done) as advance:
        for group in tasks.groups(chosen, cfg["max_batch_size"]):
            for label, rows, engine, facts in zip(names, recorded, engines, common, strict=True):
                for task, turn, request in tasks.decode(engine, group, params, cfg["seed"], rows.answered):
                    rows.add(track.row_of(task, turn, request, target.tokenizer, facts))
                    advance(label)
    for rows in recorded:
        rows.close()

    method_rows, plain_rows = recorded[-1], recorded[0]
    lengths = [row["num_prompt_tokens"] + len(row["output_token_ids"]) / 2 for row in method_rows.rows]
    active_rows = min(cfg["max_batch_size"], len(chosen))
    context = int(sum(lengths) / len(lengths))
    verify_s = cost.verify_seconds(target, active_rows, proposer.num_speculative_tokens + 1, context)
    category_of = {row["id"]: row["category"] for row in method_rows.rows}
    plain = plain_rows.answered if len(passes) > 1 else None
    short, said = report.lossless_said(verifier, params.greedy, method_rows.answered, plain)
    summary = identity | {
        "num_speculative_tokens": proposer.num_speculative_tokens,
        "lossless": verifier.lossless,
        "lossless_short": short,
        "lossless_said": said,
        "verify_cost": {n: verify_s(n) / verify_s(1) for n in range(1, proposer.num_speculative_tokens + 2)},
        "plain_step_s": verify_s(1),
        "resumed": cfg["resume"],
        "environment": track.environment(),
        **report.summarize(method_rows.stats, plain_rows.stats if len(passes) > 1 else {}, category_of, verify_s),
    }
    track.write_json(out_dir / "summary.json", summary)
    title = (
        f"{name} (K={proposer.num_speculative_tokens}, {scheme}) on {target.name}, {identity['dtype']}, {cfg['task']['name']}"
    )
    plot = report.plot_run(summary, title, out_dir / "run.png")
    report.show(report.table(summary, title), f"lossless: {said}")
    if scheme == "block" and not getattr(proposer, "probabilistic", False):
        report.show(
            "note: these drafts are deterministic, for which block verification has the law of standard; nothing is gained"
        )
    drafted, accepted = (summary["overall"][f"num_{what}_tokens"] for what in ("draft", "accepted"))
    if drafted and not accepted:
        report.show(f"note: none of {drafted} drafted tokens was accepted; was the drafter trained for this target?")
    if cfg["resume"]:
        report.show("note: resumed: times are of several processes; a tree of responses began cold, so drafts may differ")
    if cfg["logger"]["name"] == "wandb":
        report.show(f"wandb: {track.to_wandb(cfg['logger'], cfg, method_rows.rows, summary, [plot])}")
    report.show(f"written to {out_dir}")
    return summary


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(cfg: Any) -> None:
    config.main(run)(cfg)


if __name__ == "__main__":
    config.check_command_line("eval", *config.its_method())
    main()
