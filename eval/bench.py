"""How fast is the loop? Our engine against Hugging Face's `generate`, prompt lookup and assisted generation.

    python eval/bench.py
    python eval/bench.py limit=24 num_threads=[1,2] dtypes=[bfloat16]

Prints tokens/s of each, the ratio of ours to theirs (median over prompts; prefill included on both sides), the share of time
that the engine spends outside forwards, the rate at which a step reads the weights beside that of a plain sum (the limit on
this machine, now), and the cost of the suffix tree. "our layers": their loop with the linear layers of
`specdec/model/packed_linear.py`, so that the ratio is that of the loops alone. Writes out_dir/bench.json.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Bench
    from specdec.measure.bench import Decode
    from specdec.model.target import CausalLM


def run(cfg: Bench) -> None:
    import torch
    from transformers.utils import logging

    from specdec import config
    from specdec.core import Request
    from specdec.files import write_json
    from specdec.measure import bench, logger, records, stats, tasks
    from specdec.measure.report import bench as bench_report
    from specdec.measure.report import console
    from specdec.measure.report import run as run_report
    from specdec.method import suffix
    from specdec.model.target import CausalLM, choose_device, choose_dtype
    from specdec.params import SamplingParams

    logging.set_verbosity_error()  # generate warns about its own arguments at every call
    chosen = cfg.task.load(cfg.limit)
    # everything that a typo can break comes before the first figure
    for dtype in cfg.dtypes:
        choose_dtype(dtype, choose_device(cfg.model.device))
    out_dir = cfg.start()

    results: dict[str, Any] = {"environment": records.environment(), "speed": [], "batch": [], "suffix": []}
    params = SamplingParams(temperature=0, max_tokens=cfg.max_tokens)
    for dtype in cfg.dtypes:
        target = CausalLM(cfg.model.source, dtype, cfg.model.device, cfg.model.revision, timers=[])
        prompts = [tasks.first_prompt_ids(target.tokenizer, task) for task in chosen]
        contenders, pairs = contenders_and_pairs(cfg, target)
        for threads in cfg.num_threads:
            torch.set_num_threads(threads)
            where = {"dtype": dtype, "threads": threads}
            results["speed"] += [where | line for line in bench.compare(contenders, pairs, prompts)]
            for name, settings in batched_methods(cfg, target).items():
                for rows in cfg.batch_sizes:
                    engine = bench.make_engine(target, name, rows, **settings)
                    requests = [Request(str(i), ids, params) for i, ids in enumerate(prompts)]
                    speed = asdict(bench.batch_speed(engine, requests))
                    results["batch"].append(where | {"method": name, "batch_size": rows} | speed)
    torch.set_num_threads(1)
    for count in cfg.suffix_tokens:
        results["suffix"].append({"cached_tokens": count, **suffix.measure(count)})

    cfg.claim({"bench": cfg.name})
    write_json(out_dir / "bench.json", results)
    console.show(*bench_report.bench_tables(results))
    if target.device.type == "cpu" and (reasons := stats.busy_reasons({}, bench.busiest(results["speed"]))):
        console.show(f"{run_report.busy_note(reasons, None)}; compare the ratios by CPU time")
    wandb_run = logger.WandbRun(config.plain(cfg), "bench")
    wandb_run.finish(results, [out_dir / "bench.json"])
    console.show(f"written to {out_dir}")


def contenders_and_pairs(cfg: Bench, target: CausalLM) -> tuple[dict[str, Decode], list[tuple[str, str]]]:
    """Who decodes, by name, and (ours, peers) of each comparison."""
    from specdec import hub
    from specdec.measure import bench
    from specdec.model import packed_linear

    k = cfg.num_speculative_tokens
    max_n = cfg.max_matching_ngram_size
    draft_path = hub.resolve(cfg.draft_model or str(target.path))
    model = bench.load_hugging_face(target.path, target, k)
    assistant = bench.load_hugging_face(draft_path, target, k)
    lookup = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": max_n}
    generate = bench.hugging_face
    peers = {
        "HF generate": generate(model, cfg.max_tokens),
        f"HF prompt lookup K={k} n<={max_n}": generate(model, cfg.max_tokens, **lookup),
        "HF prompt lookup, its default": generate(model, cfg.max_tokens, prompt_lookup_num_tokens=10),
        f"HF assisted K={k}": generate(model, cfg.max_tokens, assistant_model=assistant),
    }
    same_rule = {"num_speculative_tokens": k, "prompt_lookup_min": 1, "prompt_lookup_max": max_n}
    batched = batched_methods(cfg, target)
    engines = {
        "none": bench.make_engine(target, "none"),
        f"ngram K={k} n<={max_n}": bench.make_engine(target, "ngram", **same_rule),
        "ngram, our default": bench.make_engine(target, "ngram", **batched["ngram"]),
        "suffix, our default": bench.make_engine(target, "suffix"),
        f"draft_model K={k}": bench.make_engine(target, "draft_model", **batched["draft_model"]),
    }
    plain, same_lookup, default_lookup, suffix, assisted = engines
    hf_plain, hf_same_lookup, hf_default_lookup, hf_assisted = peers
    pairs = [
        (plain, hf_plain),
        (same_lookup, hf_same_lookup),
        (default_lookup, hf_default_lookup),
        (suffix, hf_default_lookup),
        (assisted, hf_assisted),
    ]
    if cfg.loop_alone and packed_linear.can_pack(target.dtype, target.device):
        # their loops with our linear layers: what is left of the ratio is the loop's
        packed = bench.load_hugging_face(target.path, target, k)
        packed_assistant = bench.load_hugging_face(draft_path, target, k)
        packed_linear.pack(packed)
        packed_linear.pack(packed_assistant)
        options: dict[str, dict[str, Any]] = {
            hf_plain: {},
            hf_same_lookup: lookup,
            hf_assisted: {"assistant_model": packed_assistant},
        }
        for ours, peer in zip((plain, same_lookup, assisted), options, strict=True):
            peers[f"{peer}, our layers"] = generate(packed, cfg.max_tokens, **options[peer])
            pairs.append((ours, f"{peer}, our layers"))
    return peers | {name: bench.ours(engine, cfg.max_tokens) for name, engine in engines.items()}, pairs


def batched_methods(cfg: Bench, target: CausalLM) -> dict[str, dict[str, Any]]:
    """Settings of the methods whose batches are timed, by name."""
    from specdec import config

    ngram = {key: value for key, value in config.read(config.CONF / "method/ngram.yaml").items() if key != "name"}
    draft_model = {"model": cfg.draft_model or str(target.path), "num_speculative_tokens": cfg.num_speculative_tokens}
    return {"none": {}, "ngram": ngram, "draft_model": draft_model}


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("bench", run)
