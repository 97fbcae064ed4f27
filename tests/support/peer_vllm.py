"""Our engine against a real vLLM: tokens, what every step drafted and accepted, and the drafters that we export.

    make peer-vllm                                                   # makes vLLM's own environment first (4 GB)
    python tests/support/peer_vllm.py --vllm .venv-vllm/bin/python --only ngram "eagle3, raw"

A drafter of each kind is trained in seconds, on the target's own answers to the very prompts that are decoded then: what is
compared needs drafts of which some are accepted, not a good drafter. Ours decodes with the checkpoint that training wrote,
vLLM with the directory that train/share.py made of it. float32, temperature 0, one method per process.

vLLM drafts K tokens in a request's last steps too, and counts what is accepted beyond its end; `cut` takes that off, as
specdec/measure/stats.py describes it. Then every step must be the same. Exit code 1 if any token or step is not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.peer_vllm_engine import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
MAX_MODEL_LEN = 1024
K = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
Steps = list[tuple[int, int]]  # (drafted, accepted) of every step after prefill


@dataclass
class Case:
    """One comparison. ours, theirs: the speculative_config of either side; drafter and format: what is trained and exported
    for it, whose directories become `model`; needs: a module that vLLM wants for it."""

    name: str
    ours: dict[str, Any]
    vllm: dict[str, Any] = field(default_factory=dict)
    drafter: str | None = None
    format: str = "vllm"
    max_batch_size: int = 4
    needs: str | None = None


def k(method: str, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": K, **more}


NGRAM = k("ngram", prompt_lookup_min=2, prompt_lookup_max=4)
PARALLEL = {"parallel_drafting": True}
CASES = [
    Case("none", {"method": "none"}),
    Case("ngram", NGRAM, NGRAM),
    # rows of a batch see each other's tokens, in an order that is each engine's own
    Case("suffix", {"method": "suffix"}, {"method": "suffix"}, max_batch_size=1, needs="arctic_inference.suffix_decoding"),
    Case("eagle3, raw", k("eagle3"), k("eagle3"), "eagle3"),
    Case("eagle3, speculators", k("eagle3"), k("eagle3"), "eagle3", "speculators"),
    Case("peagle, raw", k("peagle"), k("eagle3", **PARALLEL), "peagle"),
    Case("peagle, speculators", k("peagle"), k("eagle3", **PARALLEL), "peagle", "speculators"),
    Case("dflash, raw", k("dflash"), k("dflash"), "dflash"),
    Case("dflash, speculators", k("dflash"), k("dflash"), "dflash", "speculators"),
    # no dspark: vLLM 0.32 has it in its newer model runner alone, which does not run on a CPU
    Case("eagle, raw", k("eagle"), k("eagle"), "eagle"),
    Case("draft_model", k("draft_model"), k("draft_model"), "draft_model"),
    Case("pard", k("pard"), k("draft_model", **PARALLEL), "pard"),
]
SCRIPTS = {
    "eagle3": "eagle", "peagle": "eagle", "eagle": "eagle", "draft_model": "draft_model", "pard": "pard", "dflash": "dflash",
}  # fmt: skip


@dataclass
class Run:
    """What one engine did with the prompts. counters: what it says itself, under vLLM's names."""

    tokens: list[list[int]]
    steps: list[Steps]
    counters: dict[str, Any]


def cut(steps: Steps, num_output_tokens: int, max_tokens: int) -> Steps:
    """vLLM's steps of a request as they are counted here. num_output_tokens: of its answer, with the token of prefill."""
    steps_of_request = []
    emitted = 1
    for drafted, accepted in steps:
        num_drafted = min(drafted, max_tokens - emitted - 1)
        steps_of_request.append((num_drafted, min(accepted, num_drafted, num_output_tokens - emitted)))
        emitted += accepted + 1
    return steps_of_request


def sums(steps: list[Steps]) -> tuple[int, int, int]:
    """Drafts, tokens drafted, tokens accepted."""
    drafts = [step for request_steps in steps for step in request_steps if step[0]]
    return len(drafts), sum(d for d, _ in drafts), sum(a for _, a in drafts)


def row(case: Case, ours: Run, vllm: Run, max_tokens: int) -> dict[str, Any]:
    """The comparison in numbers."""
    ruled = [cut(request_steps, len(tokens), max_tokens) for request_steps, tokens in zip(vllm.steps, vllm.tokens, strict=True)]
    count = len(ours.tokens)
    our_sums = sums(ours.steps)
    raw = sums(vllm.steps)
    same = sums(ruled)
    general = [key for key in ours.counters if not key.startswith("vllm:spec_decode")]
    return {
        "case": case.name,
        "requests": count,
        "tokens_equal": sum(a == b for a, b in zip(ours.tokens, vllm.tokens, strict=True)),
        "steps_equal": sum(a == b for a, b in zip(ours.steps, ruled, strict=True)),
        "steps_equal_uncut": sum(a == b for a, b in zip(ours.steps, vllm.steps, strict=True)),
        "counters_equal": all(ours.counters[key] == vllm.counters.get(key) for key in general),
        "drafted": [our_sums[1], raw[1], same[1]],
        "accepted": [our_sums[2], raw[2], same[2]],
        "mean_acceptance_length": [1 + x[2] / x[0] if x[0] else 1.0 for x in (our_sums, raw, same)],
        "their_counters_are_their_steps": list(raw)
        == [
            vllm.counters.get(f"vllm:spec_decode_{key}", 0) for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        ],
    }


def equal(comparison: dict[str, Any]) -> bool:
    wanted = comparison["requests"]
    return bool(comparison["tokens_equal"] == comparison["steps_equal"] == wanted and comparison["counters_equal"])


def table(rows: list[dict[str, Any]], version: str, about: str) -> str:
    """At most 80 columns wide."""
    lines = [
        f"specdec against vLLM {version}",
        about,
        "steps: (drafted, accepted) of every step, vLLM's last steps cut as ours are",
        "",
        f"{'':20} {'equal requests':^16}  {'drafted':^13} {'accepted':^11} {'acc. length':^11}",
        f"{'':20} {'tokens':>7} {'steps':>8}  {'ours':>6} {'vLLM':>6} {'ours':>5} {'vLLM':>5} {'ours':>5} {'vLLM':>5}",
    ]
    for one in rows:
        if "reason" in one:
            lines.append(f"{one['case']:20} {one['reason'][:59]}")
            continue
        count = one["requests"]
        pairs = f"{one['drafted'][0]:>6} {one['drafted'][1]:>6} {one['accepted'][0]:>5} {one['accepted'][1]:>5}"
        lengths = f"{one['mean_acceptance_length'][0]:>5.2f} {one['mean_acceptance_length'][1]:>5.2f}"
        same = f"{one['tokens_equal']}/{count}", f"{one['steps_equal']}/{count}"
        lines.append(f"{one['case']:20} {same[0]:>7} {same[1]:>8}  {pairs} {lengths}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- our side


def ours_of(target: Path, case: Case, prompts: list[list[int]], max_tokens: int, model: str | None) -> Run:
    from specdec import LLM, SamplingParams
    from specdec.measure.stats import Counter, Vector

    llm = LLM(
        target,
        dtype="float32",
        device="cpu",
        max_batch_size=case.max_batch_size,
        max_model_len=MAX_MODEL_LEN,
        speculative_config=case.ours | ({"model": model} if model else {}),
        num_threads=1,
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    stats = [output.request.stats for output in outputs if output.request is not None]
    steps = [list(zip(request_stats.drafted, request_stats.accepted, strict=True)) for request_stats in stats]
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name + (f"/{metric.labels['finished_reason']}" if "finished_reason" in metric.labels else "")
        counters[name] = metric.value if isinstance(metric, Counter) else metric.values if isinstance(metric, Vector) else None
    return Run([output.outputs[0].token_ids for output in outputs], steps, counters)


def script(name: str, *arguments: str) -> None:
    """One of train/. RuntimeError with its last line if it fails."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "train" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        raise RuntimeError(f"train/{name}.py: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")


def train(drafter: str, data: Path, out: Path, max_steps: int) -> Path:
    """The directory of a run on these data. pard starts from the draft model, which is trained first."""
    run = out / drafter
    if run.exists():
        return run
    more = []
    if drafter == "pard":
        more = [f"checkpoint={train('draft_model', data, out, max_steps)}", "train.objective.depth_warmup=0"]
    elif SCRIPTS[drafter] in ("eagle", "dflash"):
        more = [f"method={drafter}"]
        if drafter == "eagle3":  # all steps unrolled from the first on, so that later positions are accepted too
            more.append("train.objective.ttt_warmup=0")
    settings = (
        "model=llama", "model.dtype=float32", "train.mixed_precision=no", "data=jsonl", f"data.path={data}", "data.held_out=2",
        f"train.max_steps={max_steps}", "eval.num_prompts=0", f"train.eval_every={max_steps}", f"out_dir={run}",
    )  # fmt: skip
    script(SCRIPTS[drafter], *settings, *more)
    return run


def export(run: Path, format: str, out: Path) -> Path:
    if not out.exists():
        script("share", f"checkpoint={run}", f"format={format}", f"out_dir={out}")
    return out


# ----------------------------------------------------------------------------------------------------------- their side


def vllm_run(
    python: str, target: Path, case: Case, prompts: list[list[int]], max_tokens: int, out: Path, model: Path | None
) -> Any:
    """vLLM's Run, and its version. RuntimeError with the last line that it wrote."""
    spec = None if case.name == "none" else case.vllm | ({"model": str(model)} if model else {})
    query = {
        "model": str(target), "dtype": "float32", "speculative_config": spec, "prompts": prompts, "max_tokens": max_tokens,
        "max_model_len": MAX_MODEL_LEN, "max_num_seqs": case.max_batch_size,
    }  # fmt: skip
    stem = out / case.name.replace(", ", "-")
    question, answer, log = (stem.with_suffix(suffix) for suffix in (".case.json", ".vllm.json", ".log"))
    question.write_text(json.dumps(query))
    with log.open("w") as file:
        command = [python, str(Path(__file__).with_name("peer_vllm_engine.py")), str(question), str(answer)]
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=clean_environment() | ENVIRONMENT | ONE_THREAD, cwd=out
        )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {last_line(log)}")
    result = json.loads(answer.read_text())
    steps = [[(d, a) for d, a in request_steps] for request_steps in result["steps"]]
    return Run(result["tokens"], steps, result["counters"]), result["version"]


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def clean_environment() -> dict[str, str]:
    """This process's, without what our engine sets for itself: vLLM ends with SIGILL where oneDNN is forbidden AMX."""
    return {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}


def has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


# ----------------------------------------------------------------------------------------------------------------- both


def target_and_prompts(count: int) -> tuple[Path, list[list[int]]]:
    """The target's directory, and first turns of the demo task as its token ids."""
    from specdec import hub
    from specdec.measure import tasks
    from specdec.model.target import CausalLM

    directory = hub.resolve(MODEL)
    tokenizer = CausalLM(directory, "float32", "cpu").tokenizer
    return directory, [tasks.prompt_ids(tokenizer, [task.turns[0]], []) for task in tasks.load(tasks.DEMO, count)]


def compare(arguments: argparse.Namespace, out: Path) -> int:
    directory, prompts = target_and_prompts(arguments.prompts)
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only]
    plain = ours_of(directory, CASES[0], prompts, arguments.max_tokens, None)
    data = out / "answers.jsonl"
    samples = [
        {"input_ids": ids + answer, "loss_mask": [0] * len(ids) + [1] * len(answer)}
        for ids, answer in zip(prompts, plain.tokens, strict=True)
    ]
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))

    rows = []
    version = "?"
    for case in chosen:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        if case.needs and not has(arguments.vllm, case.needs):
            rows.append({"case": case.name, "reason": f"left out: {case.needs} is not in vLLM's environment"})
            continue
        try:
            run = None
            to_checkpoint = None
            if case.drafter is not None:
                run = train(case.drafter, data, out / "runs", arguments.max_steps)
                to_checkpoint = export(run, case.format, out / f"{case.drafter}-{case.format}")
            ours = ours_of(directory, case, prompts, arguments.max_tokens, str(run) if run else None)
            vllm, version = vllm_run(arguments.vllm, directory, case, prompts, arguments.max_tokens, out, to_checkpoint)
            rows.append(row(case, ours, vllm, arguments.max_tokens))
        except RuntimeError as error:
            rows.append({"case": case.name, "reason": f"FAILED {error}", "failed": True})
    about = f"{MODEL}, float32, T=0, K={K}, {len(prompts)} prompts, {arguments.max_tokens} tokens"
    text = table(rows, version, about)
    (out / "table.txt").write_text(text + "\n")
    (out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(text)
    return int(any(one.get("failed") or ("reason" not in one and not equal(one)) for one in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="the Python of an environment that has vLLM")
    parser.add_argument("--prompts", type=int, default=12, help="first turns of the demo task")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-steps", type=int, default=40, help="of training a drafter")
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], help="these comparisons")
    parser.add_argument("--out", type=Path, help="keep everything here; nothing that is there already is made again")
    end_with(compare, parser)


def end_with(compare: Callable[[argparse.Namespace, Path], int], parser: argparse.ArgumentParser) -> NoReturn:
    """End the program with what `compare` returns for the arguments --vllm and --out."""
    arguments = parser.parse_args()
    arguments.vllm = shutil.which(arguments.vllm) or parser.error(
        f"--vllm {arguments.vllm}: no such program; make peer-vllm makes it"
    )
    arguments.vllm = str(Path(arguments.vllm).absolute())
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        sys.exit(compare(arguments, arguments.out.resolve()))
    with tempfile.TemporaryDirectory() as name:
        sys.exit(compare(arguments, Path(name)))


if __name__ == "__main__":
    main()
