"""Share a drafter: write it as an engine loads it, check it against the engines' rules, and describe it and how to serve it.

    python train/share.py checkpoint=outputs/eagle3_demo-llama-demo/latest format=vllm out_dir=shared
    python train/share.py checkpoint=DIR format=speculators out_dir=shared serve_target=meta-llama/Llama-3.1-8B-Instruct
    python train/share.py checkpoint=DIR out_dir=shared eval=outputs/eagle3-demo/latest push=org/name
    python train/share.py checkpoint=org/their-drafter format=native out_dir=mine target=meta-llama/Llama-3.1-8B-Instruct
    python train/share.py lint=DIR target=meta-llama/Llama-3.1-8B-Instruct

Writes out_dir/config.json, model.safetensors, provenance.json and README.md. Exit code 1 if the engine would not load it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Share


def run(cfg: Share) -> None:
    from specdec.checkpoint import native
    from specdec.sharing import share

    if cfg.lint is None:
        share.share(cfg)
        return
    for key in ("checkpoint", "out_dir", "push", "eval"):
        if getattr(cfg, key) is not None:
            raise ValueError(f"lint={cfg.lint} writes nothing; leave {key}= out")
    if not share.show_lint(native.find(cfg.lint, cfg.revision), cfg.target):
        sys.exit(1)


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("share", run)
