"""Train an EAGLE drafter for a frozen target, and choose its checkpoint by what the engine accepts.

    python train/eagle.py model=llama                                     # EAGLE-3 on the demo data
    python train/eagle.py model=llama method=eagle                        # EAGLE-1; method=peagle: P-EAGLE
    python train/eagle.py model=llama model.size=8b data=jsonl data.path=FILE train=eagle3   # the published recipe
    python train/eagle.py -m train.lr=1e-4,3e-4
    torchrun --nproc_per_node 2 train/eagle.py model=llama train.sharding=fsdp
    python eval/run.py checkpoint=outputs/eagle3_demo-llama-demo/latest

Writes out_dir/metrics.jsonl, checkpoints/, best and last (links), config.yaml, summary.json, train.png and report.html. Ctrl-C
and SIGTERM end a run after its step, with a checkpoint and exit code 130 or 143; resume=true goes on to what an unstopped run
would be.
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

        config.launch("train", run)
