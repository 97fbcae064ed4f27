"""vLLM's side of tests/support/peer_vllm.py, in its own environment: decodes what a JSON file asks for, and records every step.

python tests/support/peer_vllm_engine.py CASE.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


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


def main() -> None:
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.v1.metrics.reader import Counter, Vector

    case = json.loads(Path(sys.argv[1]).read_text())
    steps = record_steps()
    llm = LLM(
        model=case["model"],
        dtype="float32",
        max_model_len=case["max_model_len"],
        max_num_seqs=case["max_num_seqs"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=case["speculative_config"],
    )
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
