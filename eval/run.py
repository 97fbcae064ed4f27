"""Decode a task with a method under a rejection scheme, and without speculation, and say what was gained and whether anything
was lost.

    python eval/run.py method=suffix
    python eval/run.py method=ngram method.num_speculative_tokens=8 sampling.temperature=0.8 rejection=match
    python eval/run.py -m method=ngram,suffix limit=24
    python eval/run.py checkpoint=outputs/eagle3_demo-llama-demo          # any drafter in a known format says its method
    torchrun --nproc_per_node 2 eval/run.py tensor_parallel_size=2
    python eval/run.py method=hybrid checkpoint=outputs/eagle3_demo-llama-demo   # n-gram where it matches, else the drafter
    python eval/run.py task=jsonl task.path=prompts.jsonl speculative_config='{"method": "suffix"}'

Writes out_dir/requests.jsonl, baseline.jsonl, summary.json, config.yaml and run.png.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Eval


def run(cfg: Eval) -> dict[str, Any]:
    import torch

    from specdec import config, method, rejection
    from specdec.drafter import shared_vocab
    from specdec.engine import Engine
    from specdec.measure import logger, records, tasks
    from specdec.measure.report import console
    from specdec.measure.report import run as run_report
    from specdec.model import distributed
    from specdec.model.target import choose_device
    from specdec.policy import profiling

    # everything that a typo can break comes before the weights
    params, plan = cfg.sampling, cfg.plan()
    name, scheme = plan.method, plan.scheme
    size, started = cfg.tensor_parallel_size, distributed.num_started()
    plan.check_processes(size)
    chosen = tasks.load(cfg.task.path or tasks.DEMO, cfg.limit)
    out_dir = Path(cfg.out_dir)
    records.reserve(out_dir, cfg.resume)
    torch.set_num_threads(cfg.num_threads or 1)

    if size == 1 < started:
        raise ValueError(f"torchrun has started {started} processes; add tensor_parallel_size={started}, or leave torchrun out")
    processes = distributed.join(size, choose_device(cfg.model.device))
    target = cfg.model.load(processes=processes)
    proposer, verifier = plan.build(target)
    identity = records.run_identity(target, chosen, params, cfg.seed, scheme) | {
        "method": name,
        "speculative_config": plan.config.as_dict(),
        "drafter_weights": records.drafter_weights(plan),
        "tensor_parallel_size": size,
        **cfg.engine,
    }
    passes = [(out_dir / "requests.jsonl", proposer, verifier)]
    if cfg.baseline and name != method.PLAIN:
        passes.insert(0, (out_dir / "baseline.jsonl", method.build(method.PLAIN, target), rejection.build("standard")))
    cache = target.new_cache()
    policies = [None, plan.policy.build(target, proposer, cfg.max_batch_size)][-len(passes) :]
    engines = [
        Engine(target, pass_proposer, pass_verifier, cache=cache, policy=policy, **cfg.engine)
        for (_, pass_proposer, pass_verifier), policy in zip(passes, policies, strict=True)
    ]
    for engine in engines:
        tasks.prepare(engine, chosen, params)
    names = [method.PLAIN, name][-len(passes) :]
    recorded: list[records.JsonlFile] = []
    if processes.is_main:  # of several processes with the same answers, one writes
        records.claim(out_dir, cfg.resume, identity)
        config.save(cfg, out_dir / "config.yaml")
        recorded = [records.JsonlFile(path) for path, _, _ in passes]
        for rows in recorded:
            records.check_rows(rows.rows, rows.path)
    answered = processes.broadcast_object([rows.answered for rows in recorded])
    common = [
        {
            "method": label,
            "rejection": judge.name,
            "num_speculative_tokens": own.num_speculative_tokens,
            "lossless": judge.lossless,
        }
        for label, (_, own, judge) in zip(names, passes, strict=True)
    ]
    done = {label: len(before) for label, before in zip(names, answered, strict=True)}
    with console.progress(sum(len(task.turns) for task in chosen), processes.is_main, **done) as advance:
        for group in tasks.groups(chosen, cfg.max_batch_size):
            for place, (label, before, engine) in enumerate(zip(names, answered, engines, strict=True)):
                for task, turn, request in tasks.decode(engine, group, params, cfg.seed, before):
                    if processes.is_main:
                        recorded[place].add(records.request_record(task, turn, request, target.tokenizer, common[place]))
                    advance(label)
    for rows in recorded:
        rows.close()

    lengths = [row["num_prompt_tokens"] + len(row["output_token_ids"]) / 2 for row in recorded[-1].rows] if recorded else []
    active_rows = min(cfg.max_batch_size, len(chosen))
    context = processes.broadcast_object(int(sum(lengths) / len(lengths)) if lengths else None)
    verify_s = profiling.verify_seconds(target, active_rows, proposer.num_speculative_tokens + 1, context)
    if not processes.is_main:
        return {}
    method_rows, plain_rows = recorded[-1], recorded[0]
    category_of = {row["id"]: row["category"] for row in method_rows.rows}
    plain = plain_rows.answered if len(passes) > 1 else None
    short, said = run_report.lossless_verdict(verifier, params.greedy, method_rows.answered, plain)
    summary = identity | {
        "num_speculative_tokens": proposer.num_speculative_tokens,
        "lossless": verifier.lossless,
        "lossless_short": short,
        "lossless_verdict": said,
        "verify_cost": {n: verify_s(n) / verify_s(1) for n in range(1, proposer.num_speculative_tokens + 2)},
        "plain_step_s": verify_s(1),
        "resumed": cfg.resume,
        "environment": records.environment(),
        **run_report.summarize(method_rows.stats, plain_rows.stats if len(passes) > 1 else {}, category_of, verify_s),
    }
    timed_on_cpu = target.device.type == "cpu" and processes.size == 1
    summary["busy"] = run_report.busy_reasons(summary, name, timed_on_cpu) if len(passes) > 1 else []
    two_vocabularies = getattr(proposer, "vocabulary", None)
    if isinstance(two_vocabularies, shared_vocab.SharedVocab):
        summary["vocabulary"] = two_vocabularies.coverage(method_rows.answered.values())
    records.write_json(out_dir / "summary.json", summary)
    num_draft = f"{'up to ' if policies[-1] else ''}{proposer.num_speculative_tokens}"
    title = f"{name} (K={num_draft}, {scheme}) on {target.name}, {identity['dtype']}, {cfg.task.name}"
    plot = run_report.plot_run(summary, title, out_dir / "run.png")
    more = [line] if (line := run_report.speedup_line(summary["overall"])) else []
    console.show(*run_report.tables(summary, title), *more, f"lossless: {said}")
    if summary["busy"]:
        console.show(run_report.busy_note(summary["busy"], summary["overall"]["speedup_cpu"] if timed_on_cpu else None))
    if scheme == "block" and not proposer.needs_uniforms:
        console.show(
            "note: these drafts are deterministic, for which block verification has the law of standard; nothing is gained"
        )
    drafted, accepted = (summary["overall"][f"num_{what}_tokens"] for what in ("draft", "accepted"))
    if drafted and not accepted:
        console.show(f"note: none of {drafted} drafted tokens was accepted; was the drafter trained for this target?")
    if told := summary.get("vocabulary"):
        console.show(
            f"vocabulary: {told['share_of_emitted']:.2%} of the {told['num_emitted']} tokens that were emitted can be drafted, "
            f"{told['share_of_vocabulary']:.1%} of the vocabulary"
        )
    if cfg.resume:
        console.show("note: resumed: times are of several processes; a tree of responses began cold, so drafts may differ")
    if cfg.logger.name == "wandb":
        console.show(f"wandb: {logger.to_wandb(config.plain(cfg), method_rows.rows, summary, [plot])}")
    console.show(f"written to {out_dir}")
    return summary


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        if "TORCHELASTIC_RUN_ID" in os.environ:
            from specdec.model import distributed

            distributed.report_failure_once()
        config.launch("eval", run, *config.method_of_checkpoint())
