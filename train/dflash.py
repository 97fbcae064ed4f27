"""Train a DFlash or DSpark drafter for a frozen target, and choose its checkpoint by what the engine accepts.

    python train/dflash.py model=llama                                              # on the demo data
    python train/dflash.py model=llama data=jsonl data.path=FILE train=dflash       # the published recipe
    python train/dflash.py model=llama method=dspark                                # with a Markov head

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

        config.launch("train", run, "method=dflash")
