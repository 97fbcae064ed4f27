"""Give a small causal LM mask tokens, so that it drafts in one forward (PARD), and choose its checkpoint by what is accepted.

    python train/pard.py model=llama                                      # from some layers of the target, on the demo data
    python train/pard.py model=llama checkpoint=outputs/draft_model_demo-llama-demo/latest          # from a trained draft model
    python train/pard.py model=qwen3 model.size=8b data=jsonl data.path=FILE train=pard checkpoint=Qwen/Qwen3-0.6B
    python eval/run.py method=pard checkpoint=outputs/pard_demo-llama-demo/latest

Its checkpoints are models that transformers and vLLM load, with `pard_token` in config.json. Writes what train/draft_model.py
writes.
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

        config.launch("train", run, "method=pard")
