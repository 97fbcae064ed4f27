"""Write the target's hidden states of a training set to disk, once, for training that does not run the target.

    python train/extract.py model=llama out_dir=hidden                         # layers that EAGLE-3 taps by default
    python train/extract.py data=jsonl data.path=FILE layer_ids=[2,15,27] dry_run=true
    torchrun --nproc_per_node 4 train/extract.py model=llama out_dir=hidden    # four processes share the samples
    python train/eagle.py features.path=hidden                                 # with the same data settings

Killed at any moment it goes on with resume=true; a file that is cut short is made again, and so is an altered one (layout=vllm
has no hashes that would tell).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from specdec import script

if TYPE_CHECKING:
    from specdec.config.pages import Extract


def run(cfg: Extract) -> None:
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # as in train/eagle.py
    from specdec import artifact, hub
    from specdec.measure.report import console
    from specdec.method.eagle3 import Architecture
    from specdec.model import distributed
    from specdec.model.target import choose_device
    from specdec.training import features
    from specdec.training.samples import fingerprint

    if not cfg.dry_run:
        cfg.start()
    processes = distributed.join(1, choose_device(cfg.model.device), data_parallel=True)
    show = console.show if processes.is_first else lambda *lines: None
    target = cfg.model.load(processes, fastest=True)
    loaded = cfg.data.load(target)
    for note in loaded.notes:
        show(f"note: {note}")
    layers = cfg.layer_ids if cfg.layer_ids is not None else Architecture().layers(target.num_layers)
    source = features.OnlineFeatures(target, layers)
    tokens = sum(len(sample.token_n) for sample in loaded.samples)
    need = artifact.num_bytes(target, source.layers, loaded.samples)
    show(
        f"{len(loaded.samples)} samples, {tokens} tokens, layers {list(source.layers)}: {need / 2**30:.2f} GiB "
        f"({need // max(tokens, 1)} bytes per token)"
    )
    if cfg.dry_run:
        return
    manifest = artifact.manifest_of(target, source.layers, cfg.model.revision)
    identity = {
        "data": fingerprint(loaded.samples),
        "layer_ids": list(source.layers),
        "target_weights": hub.weights_digest(target.path),
    }
    if processes.is_first:
        cfg.claim(identity)
    processes.from_first(None)  # the others write there when it is taken
    as_vllm = cfg.layout == "vllm"  # which has a file for each sample
    writer = artifact.Writer(Path(cfg.out_dir), manifest, 0 if as_vllm else cfg.shard_mb << 20, as_vllm)
    with console.progress(len(loaded.samples), processes.is_first, samples=0) as advance:
        num_computed = features.extract(source, loaded.samples, writer, lambda done: advance("samples", num_done=done))
    num_present = len(loaded.samples) - num_computed
    show(f"{num_computed} samples computed, {num_present} were there; written to {cfg.out_dir}")


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("extract", run)
