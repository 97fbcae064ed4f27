"""Make training data: the target answers prompts with the project's own engine, and its token ids are kept.

    python train/prepare.py out=data.jsonl                          # the target invents the user turns, too
    python train/prepare.py prompts=prompts.jsonl out=data.jsonl    # lines with turns, messages or conversations
    python train/prepare.py prompts=prompts.jsonl out=data.jsonl resume=true
    torchrun --nproc_per_node 4 train/prepare.py prompts=prompts.jsonl out=data.jsonl   # four processes share the prompts

The first line of `out` is a header that says how it was made; then one line per conversation: messages, input_ids and loss_mask
(1 where the target generated the token). Answers of the prompt set are dropped and made anew, turn by turn; its `tools` reach
the chat template, and what a call of one gave cannot be made anew, so that such a row is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Prepare


def run(cfg: Prepare) -> None:
    from specdec.training import prepare

    prepare.run(cfg)


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("prepare", run)
