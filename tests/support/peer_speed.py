"""Our engine's speed beside a real vLLM's: the same prompts and tokens, in turn, in one run. `make peer-vllm` prints it.

    python tests/support/peer_speed.py --vllm .venv-vllm/bin/python
    python tests/support/peer_speed.py --vllm .venv-vllm/bin/python --dtype bfloat16 --threads 2

Both engines are loaded, each in a process of its own, and one of them works at a time. A repetition is ours, vLLM's, vLLM's,
ours, and a plain sum over as many bytes as the weights have: what memory gives at that moment. Timed is decoding alone, from
the step after which all requests have a token to the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.peer_vllm import MAX_MODEL_LEN, MODEL, ROOT, clean_environment, end_with, last_line, target_and_prompts
from support.peer_vllm_engine import ENVIRONMENT, serve, standard_output, timed

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
Ask = Callable[..., Any]


@dataclass
class Case:
    """max_batch_size: 1 decodes the prompts one after the other, more of them at once."""

    name: str
    speculative_config: dict[str, Any] | None
    max_batch_size: int


CASES = [
    Case("plain, 1 row", None, 1),
    Case("plain, 8 rows", None, 8),
    Case("ngram K=5, 1 row", NGRAM, 1),
    Case("ngram K=5, 8 rows", NGRAM, 8),
]


# ------------------------------------------------------------------------------------------------------------ our worker


def serve_ours(query: dict[str, Any]) -> None:
    """Answers as `peer_vllm_engine` does, and `sum`: seconds of a plain sum over the bytes of the weights."""
    output = standard_output()
    import torch

    from specdec import LLM
    from specdec.core import Request
    from specdec.measure import bench
    from specdec.params import SamplingParams

    llm = LLM(
        query["model"],
        dtype=query["dtype"],
        device="cpu",
        max_batch_size=query["max_num_seqs"],
        max_model_len=query["max_model_len"],
        speculative_config=query["speculative_config"],
        num_threads=torch.get_num_threads(),
    )
    engine = llm.engine
    memory = bench.MemoryRead(bench.weight_bytes(engine.target))

    def decode(prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
        engine.proposer.reset()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        requests = [Request(str(i), ids, params) for i, ids in enumerate(prompts)]
        engine.add(*requests)

        def step() -> dict[str, int]:
            if not engine.waiting and not engine.num_running:
                return {}
            engine.step()
            return {request.id: 1 + sum(request.stats.emitted) for request in requests if request.stats.emitted}

        return timed(step, len(prompts))

    serve(output, {"decode": decode, "sum": lambda: {"seconds": memory.seconds(), "bytes": memory.num_bytes}})


# ---------------------------------------------------------------------------------------------------------- the parent


@contextmanager
def worker(command: list[str], query: dict[str, Any], threads: int, log: Path) -> Iterator[Ask]:
    """A process that holds an engine, as a function that asks it one thing and waits. RuntimeError if the process ends."""
    environment = clean_environment() | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--serve", json.dumps(query)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    questions, answers = process.stdin, process.stdout

    def ask(what: str, **arguments: Any) -> Any:
        try:
            questions.write(json.dumps({"what": what, **arguments}) + "\n")
            questions.flush()
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"exit {process.wait()}: {last_line(log)}")
        return json.loads(answer)

    try:
        yield ask
    finally:
        process.kill()
        process.wait()


def decoding(ask: Ask, prompts: list[list[int]], max_tokens: int, rows: int) -> dict[str, float]:
    """Sums over the prompts, `rows` of them at a time."""
    parts = [
        ask("decode", prompts=prompts[first : first + rows], max_tokens=max_tokens) for first in range(0, len(prompts), rows)
    ]
    return {key: sum(part[key] for part in parts) for key in parts[0]}


def measure(ours: Ask, vllm: Ask, prompts: list[list[int]], max_tokens: int, rows: int, repetitions: int) -> dict[str, Any]:
    """Ratios of tokens per second, ours / vLLM's, of every repetition, by wall and by CPU time; and GB/s."""
    for ask in (ours, vllm):
        decoding(ask, prompts, max_tokens, rows)  # a warm-up
    ratios: dict[str, list[float]] = {"wall_s": [], "cpu_s": []}
    gb_per_s: dict[str, list[float]] = {"ours": [], "vllm": [], "sum": []}
    ms_per_step: dict[str, list[float]] = {"ours": [], "vllm": []}
    for _ in range(repetitions):
        order = [("ours", ours), ("vllm", vllm), ("vllm", vllm), ("ours", ours)]
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "vllm": []}
        sums = []
        for name, ask in order:
            runs[name].append(decoding(ask, prompts, max_tokens, rows))
            sums.append(ours("sum"))
        num_bytes = sums[0]["bytes"]
        totals = {name: {key: sum(run[key] for run in both) for key in both[0]} for name, both in runs.items()}
        for clock, values in ratios.items():
            rate = {name: total["tokens"] / total[clock] for name, total in totals.items()}
            values.append(rate["ours"] / rate["vllm"])
        for name, total in totals.items():
            gb_per_s[name].append(num_bytes * total["steps"] / total["wall_s"] / 1e9)
            ms_per_step[name].append(1e3 * total["wall_s"] / total["steps"])
        gb_per_s["sum"].append(num_bytes / float(np.median([one["seconds"] for one in sums])) / 1e9)
    return {"ratios": ratios, "gb_per_s": gb_per_s, "ms_per_step": ms_per_step}


def table(rows: list[dict[str, Any]], about: str) -> str:
    """At most 80 columns wide."""
    lines = [
        f"speed, {about}",
        "ours / vLLM: tokens/s of decoding, median of the repetitions (range).",
        "GB/s: bytes of all weights x steps / time, and of a plain sum in between.",
        "",
        f"{'':18} {'ours / vLLM':^33}  {'ms a step':^11}  {'GB/s':^14}",
        f"{'':18} {'by wall time':>16} {'by CPU time':>16}  {'ours':>5} {'vLLM':>5}  {'ours':>4} {'vLLM':>4} {'sum':>4}",
    ]
    for one in rows:
        if "reason" in one:
            lines.append(f"{one['case']:18} {one['reason'][:61]}")
            continue
        ratios = [
            f"{np.median(one['ratios'][clock]):.2f} ({min(one['ratios'][clock]):.2f}-{max(one['ratios'][clock]):.2f})"
            for clock in ("wall_s", "cpu_s")
        ]
        steps = [f"{np.median(one['ms_per_step'][name]):5.1f}" for name in ("ours", "vllm")]
        rates = [f"{np.median(one['gb_per_s'][name]):4.1f}" for name in ("ours", "vllm", "sum")]
        lines.append(f"{one['case']:18} {ratios[0]:>16} {ratios[1]:>16}  {' '.join(steps)}  {' '.join(rates)}")
    return "\n".join(lines)


def compare(arguments: argparse.Namespace, out: Path) -> int:
    directory, prompts = target_and_prompts(8)
    rows = []
    for case in [case for case in CASES if not arguments.only or case.name in arguments.only]:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        query = {
            "model": str(directory),
            "dtype": arguments.dtype,
            "max_num_seqs": case.max_batch_size,
            "max_model_len": MAX_MODEL_LEN,
            "speculative_config": case.speculative_config,
        }
        chosen = prompts[:2] if case.max_batch_size == 1 else prompts  # a step of 8 rows yields more tokens
        try:
            with ExitStack() as stack:
                ours, vllm = (
                    stack.enter_context(worker([python, str(path)], query, arguments.threads, out / f"{path.stem}.log"))
                    for python, path in (
                        (sys.executable, Path(__file__)),
                        (arguments.vllm, Path(__file__).with_name("peer_vllm_engine.py")),
                    )
                )
                rate = measure(ours, vllm, chosen, arguments.max_tokens, case.max_batch_size, arguments.repetitions)
                rows.append({"case": case.name, **rate})
        except RuntimeError as error:
            rows.append({"case": case.name, "reason": f"FAILED {error}"})
    about = (
        f"{MODEL}, {arguments.dtype}, {arguments.threads} thread(s), T=0, {arguments.max_tokens} tokens, "
        f"{arguments.repetitions} repetitions"
    )
    text = table(rows, about)
    (out / "speed.txt").write_text(text + "\n")
    (out / "speed.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(text)
    return int(any("reason" in row for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="the Python of an environment that has vLLM")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], help="these rows")
    parser.add_argument("--out", type=Path, help="keep the table and the logs here")
    if sys.argv[1:2] == ["--serve"]:
        serve_ours(json.loads(sys.argv[2]))
    else:
        end_with(compare, parser)


if __name__ == "__main__":
    main()
