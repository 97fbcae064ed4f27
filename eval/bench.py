"""How fast is the loop? Our engine against Hugging Face's `generate`, prompt lookup and assisted generation.

    python eval/bench.py
    python eval/bench.py limit=24 threads=[1,2] dtypes=[bfloat16]

Prints tokens/s of each, the ratio ours/theirs (median over prompts; prefill included on both sides), the share of time that the
engine spends outside forwards, and the cost of the suffix trie. "our layers": their loop with the linear layers of
`specdec/model/packed_linear.py`, so that the ratio is that of the loops alone. Writes out_dir/bench.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Bench


def run(cfg: Bench) -> None:
    import torch
    from transformers.utils import logging

    from specdec import config, hub, method, rejection
    from specdec.core import Request
    from specdec.engine import Engine
    from specdec.measure import bench, records, stats, tasks
    from specdec.measure.report import bench as bench_report
    from specdec.measure.report import console
    from specdec.measure.report import run as run_report
    from specdec.method import suffix
    from specdec.model import packed_linear
    from specdec.model.target import CausalLM, choose_device, choose_dtype
    from specdec.params import SamplingParams

    logging.set_verbosity_error()  # generate warns about its own arguments at every call
    out_dir, k = Path(cfg.out_dir), cfg.num_speculative_tokens
    chosen = tasks.load(cfg.task.path or tasks.DEMO, cfg.limit)
    # everything that a typo can break comes before the first figure
    for dtype in cfg.dtypes:
        choose_dtype(dtype, choose_device(cfg.model.device))
    records.reserve(out_dir, resume=False, resumes=False)
    results: dict[str, Any] = {"environment": records.environment(), "speed": [], "batch": [], "suffix": []}

    for dtype in cfg.dtypes:
        target = CausalLM(cfg.model.source, dtype, cfg.model.device, cfg.model.revision)
        draft_name = cfg.draft_model or str(target.path)

        def plain(path: Path, target: CausalLM = target) -> Any:
            loaded = hub.load_model(path, dtype=target.dtype).to(target.device).eval()
            loaded.generation_config.update(
                num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
            )
            return loaded

        theirs, assistant = plain(target.path), plain(hub.resolve(draft_name))
        prompts = [tasks.first_prompt_ids(target.tokenizer, task) for task in chosen]

        def engine(name: str, rows: int = 1, target: CausalLM = target, **settings: Any) -> Engine:
            return Engine(target, method.build(name, target, **settings), rejection.build("standard"), rows)

        def hf(target: Any = theirs, **options: Any) -> Any:
            return bench.hugging_face(target, cfg.max_tokens, **options)

        same_rule = {"num_speculative_tokens": k, "prompt_lookup_min": 1, "prompt_lookup_max": cfg.max_matching_ngram_size}
        ngram_default = {key: value for key, value in config.read(config.CONF / "method/ngram.yaml").items() if key != "name"}
        own = {
            "none": engine("none"),
            f"ngram K={k} n<={cfg.max_matching_ngram_size}": engine("ngram", **same_rule),
            "ngram, our default": engine("ngram", **ngram_default),
            "suffix, our default": engine("suffix"),
            f"draft_model K={k}": engine("draft_model", model=draft_name, num_speculative_tokens=k),
        }
        lookup = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": cfg.max_matching_ngram_size}
        rivals = {
            "HF generate": hf(),
            f"HF prompt lookup K={k} n<={cfg.max_matching_ngram_size}": hf(**lookup),
            "HF prompt lookup, its default": hf(prompt_lookup_num_tokens=10),
            f"HF assisted K={k}": hf(assistant_model=assistant),
        }
        names, rival_names = list(own), list(rivals)
        pairs = list(zip(names, [*rival_names[:3], rival_names[2], rival_names[3]], strict=True))
        if cfg.loop_alone and packed_linear.can_pack(target.dtype, target.device):
            # their loops with our linear layers: what is left of the ratio is the loop's
            packed, packed_assistant = plain(target.path), plain(hub.resolve(draft_name))
            packed_linear.pack(packed)
            packed_linear.pack(packed_assistant)
            alone = (hf(packed), hf(packed, **lookup), hf(packed, assistant_model=packed_assistant))
            for name, rival, decode in zip(
                (names[0], names[1], names[4]), (*rival_names[:2], rival_names[3]), alone, strict=True
            ):
                rivals[f"{rival}, our layers"] = decode
                pairs.append((name, f"{rival}, our layers"))
        for threads in cfg.threads:
            torch.set_num_threads(threads)
            contenders = rivals | {name: bench.ours(e, cfg.max_tokens) for name, e in own.items()}
            timings = bench.run_side_by_side(contenders, prompts)
            for name, rival in pairs:
                results["speed"].append(
                    {
                        "dtype": dtype,
                        "threads": threads,
                        "ours": name,
                        "theirs": rival,
                        "ours_tokens_per_s": timings[name].tokens_per_s,
                        "theirs_tokens_per_s": timings[rival].tokens_per_s,
                        **bench.ratios(timings[name], timings[rival]),
                    }
                )
            for name, settings in (
                ("none", {}),
                ("ngram", ngram_default),
                ("draft_model", {"model": draft_name, "num_speculative_tokens": k}),
            ):
                for rows in cfg.batch_sizes:
                    params = SamplingParams(temperature=0, max_tokens=cfg.max_tokens)
                    requests = [Request(str(i), ids, params) for i, ids in enumerate(prompts)]
                    outside, speed = bench.share_outside_forwards(engine(name, rows, **settings), requests)
                    line = {"dtype": dtype, "threads": threads, "method": name, "batch_size": rows}
                    results["batch"].append(line | {"tokens_per_s": speed, "outside_forwards": outside})
    torch.set_num_threads(1)
    for count in cfg.suffix_tokens:
        results["suffix"].append({"cached_tokens": count, **suffix.measure(count)})

    records.claim(out_dir, False, {"bench": cfg.name}, resumes=False)
    config.save(cfg, out_dir / "config.yaml")
    records.write_json(out_dir / "bench.json", results)
    console.show(*bench_report.bench_tables(results))
    if target.device.type == "cpu":
        shares = {
            f"{name} ({line['dtype']}, {line['threads']} threads)": share
            for line in results["speed"]
            for name, share in zip((line["ours"], line["theirs"]), line["wall_over_cpu"], strict=True)
        }
        worst = dict(sorted(shares.items(), key=lambda pair: -pair[1])[:1])
        if reasons := stats.busy_reasons({}, worst):
            console.show(f"{run_report.busy_note(reasons, None)}; compare the ratios by CPU time")
    console.show(f"written to {out_dir}")


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("bench", run)
