"""Decode a task with a method under a rejection scheme, and without speculation, and say what was gained and whether anything
was lost.

    python eval/run.py method=suffix
    python eval/run.py method=ngram method.num_speculative_tokens=8 sampling.temperature=0.8 rejection=match
    python eval/run.py -m method=ngram,suffix limit=24
    python eval/run.py checkpoint=outputs/eagle3_demo-llama-demo/latest          # any drafter in a known format says its method
    torchrun --nproc_per_node 4 eval/run.py model=qwen3                          # four processes share the task
    torchrun --nproc_per_node 6 eval/run.py tensor_parallel_size=3               # two groups share it, each with one target
    python eval/run.py method=hybrid checkpoint=DIR                              # n-gram where it matches, else the drafter
    python eval/run.py task=jsonl task.path=prompts.jsonl speculative_config='{"method": "suffix"}'

Writes out_dir/requests.jsonl, baseline.jsonl, summary.json, config.yaml, run.png and report.html.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Eval


def run(cfg: Eval) -> None:
    from specdec.measure import task_run

    task_run.run(cfg)


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        if "TORCHELASTIC_RUN_ID" in os.environ:
            from specdec.model import distributed

            distributed.report_failure_once()
        config.launch("eval", run, *config.words_of_checkpoint())
