"""Train an MLP speculator for a frozen target, and choose its checkpoint by what the engine accepts.

    python train/mlp.py model=llama                                       # on the demo data
    python train/mlp.py model=llama data=jsonl data.path=TEXT data.supervise=all train=mlp train.max_steps=15000 train.lr=1e-3
    python train/mlp.py model=llama data=jsonl data.path=FILE train=mlp checkpoint=DIR              # second stage

The first stage learns from any text, the second from what the target wrote. Writes what train/eagle.py writes.
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

        config.launch("train", run, "method=mlp")
