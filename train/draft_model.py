"""Train a small causal LM as a draft model for a frozen target, and choose its checkpoint by what the engine accepts.

    python train/draft_model.py model=llama                               # some layers of the target, on the demo data
    python train/draft_model.py model=llama train.drafter.layer_ids=[0,1,28,29]
    python train/draft_model.py model=llama model.size=8b data=jsonl data.path=FILE train=draft_model \\
        train.drafter.model=meta-llama/Llama-3.2-1B-Instruct              # the full recipe, from another LM
    torchrun --nproc_per_node 2 train/draft_model.py model=llama train.sharding=fsdp
    python eval/run.py method=draft_model checkpoint=outputs/draft_model_demo-llama-demo/latest

Its checkpoints are models that transformers and vLLM load. Writes out_dir/metrics.jsonl, checkpoints/, best and last (links),
config.yaml, summary.json, train.png and report.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Train


def run(cfg: Train) -> None:
    from specdec.training import recipe

    recipe.run(cfg, Path(__file__).stem)


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("train", run, "method=draft_model")
