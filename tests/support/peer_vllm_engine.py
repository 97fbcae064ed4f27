"""vLLM's side of tests/support/peer_vllm.py and peer_speed.py, in its own environment.

python tests/support/peer_vllm_engine.py CASE.json RESULT.json     # decodes what a file asks for, and records every step
python tests/support/peer_vllm_engine.py --serve ENGINE            # answers lines on standard input, see `serve`
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# no second process, no network, nothing reported
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def record_steps() -> dict[str, list[list[int]]]:
    """Make vLLM's scheduler note (drafted, accepted) of every step by request, whose name it has with a random tail; the token
    that prefill yields is one of the steps."""
    from vllm.v1.core.sched.scheduler import Scheduler

    steps: dict[str, list[list[int]]] = {}
    update = Scheduler.update_from_output

    def noting(self: Any, scheduled: Any, output: Any) -> Any:
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            tokens = output.sampled_token_ids[output.req_id_to_index[name]] if output.sampled_token_ids else []
            if request is not None and not request.is_finished() and len(tokens):
                drafted = len(scheduled.scheduled_spec_decode_tokens.get(name, []))
                steps.setdefault(name.rpartition("-")[0] or name, []).append([drafted, len(tokens) - 1])
        return update(self, scheduled, output)

    Scheduler.update_from_output = noting  # type: ignore[method-assign]
    return steps


def standard_output() -> int:
    """A file of its own for answers; what libraries write to standard output goes to standard error from now on."""
    file = os.dup(1)
    os.dup2(2, 1)
    return file


def serve(output: int, answers: dict[str, Callable[..., dict[str, float]]]) -> None:
    """Answer lines of JSON on standard input, each with `what` and its arguments."""
    for line in sys.stdin:
        question = json.loads(line)
        answer = answers[question.pop("what")](**question)
        os.write(output, (json.dumps(answer) + "\n").encode())


def timed(step: Callable[[], dict[str, int]], num_requests: int) -> dict[str, float]:
    """Wall and CPU seconds, steps and tokens of decoding, from when all requests have a token.

    step: a step of an engine. Returns how many tokens each request has that has some; nothing when all are finished.
    """
    counts: dict[str, int] = {}
    while len(counts) < num_requests:
        counts |= step()
    num_first = sum(counts.values())
    num_steps = 0
    begin = time.perf_counter()
    begin_cpu = time.process_time()
    while moved := step():
        counts |= moved
        num_steps += 1
    cpu_s = time.process_time() - begin_cpu
    wall_s = time.perf_counter() - begin
    return {"wall_s": wall_s, "cpu_s": cpu_s, "steps": num_steps, "tokens": sum(counts.values()) - num_first}


def engine_of(case: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        model=case["model"],
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        max_num_seqs=case["max_num_seqs"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=case["speculative_config"],
    )


def serve_vllm(case: dict[str, Any]) -> None:
    output = standard_output()
    engine = engine_of(case).llm_engine
    from vllm import SamplingParams, TokensPrompt

    def decode(prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for i, ids in enumerate(prompts):
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=ids), params)

        def step() -> dict[str, int]:
            if not engine.has_unfinished_requests():
                return {}
            moved: dict[str, int] = {}
            while not moved:  # a step that only prefills a part of a prompt has no output
                moved = {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
            return moved

        return timed(step, len(prompts))

    serve(output, {"decode": decode})


def main() -> None:
    if sys.argv[1] == "--serve":
        serve_vllm(json.loads(sys.argv[2]))
        return
    import vllm
    from vllm import SamplingParams, TokensPrompt
    from vllm.v1.metrics.reader import Counter, Vector

    case = json.loads(Path(sys.argv[1]).read_text())
    steps = record_steps()
    llm = engine_of(case)
    params = SamplingParams(temperature=0, max_tokens=case["max_tokens"])
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in case["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name + (f"/{metric.labels['finished_reason']}" if "finished_reason" in metric.labels else "")
        if isinstance(metric, Counter) and metric.labels.keys() <= {"model_name", "engine", "finished_reason"}:
            counters[name] = metric.value
        elif isinstance(metric, Vector):
            counters[name] = metric.values
    result = {
        "version": vllm.__version__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "steps": [steps[output.request_id][1:] for output in outputs],
        "counters": counters,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
