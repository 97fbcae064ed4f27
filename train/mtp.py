"""Train multi-token-prediction modules for a frozen target, or go on with those that it ships.

    python train/mtp.py model=llama                                       # one module on the demo data
    python train/mtp.py model=llama data=jsonl data.path=FILE train=mtp train.drafter.num_modules=3
    python train/mtp.py model.path=TARGET checkpoint=TARGET data=jsonl data.path=FILE train=mtp   # the target's own modules
    python train/share.py checkpoint=outputs/mtp-llama-jsonl/latest format=vllm target=TARGET out_dir=DIR  # into the target

Writes what train/eagle.py writes.
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

        config.launch("train", run, "method=mtp")
