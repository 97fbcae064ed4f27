"""Train an MLP speculator for a frozen target, and choose its checkpoint by what the engine accepts.

    python train/mlp.py model=llama                                       # on the demo data
    python train/mlp.py model=llama data=jsonl data.path=TEXT data.supervise=all train=mlp train.max_steps=15000 train.lr=1e-3
    python train/mlp.py model=llama data=jsonl data.path=FILE train=mlp checkpoint=outputs/mlp-llama-jsonl   # second stage

The first stage learns from any text, the second from what the target wrote. Writes what train/eagle.py writes.
"""

from __future__ import annotations

from typing import Any

import hydra

from specdec import config


def run(cfg: dict[str, Any]) -> dict[str, Any]:
    from specdec import recipe

    return recipe.run(cfg, ("mlp",))


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: Any) -> None:
    config.main(run)(cfg)


if __name__ == "__main__":
    config.check_command_line("train", "method=mlp")
    main()
