"""IBM's MLP speculator (Wertheimer et al. 2404.19124): `model_type: mlp_speculator`, weights `speculator.{emb,...}.{i}`.

Loads in vLLM up to 0.32 (0.33 has removed it; its V0 engine, which ran it, ended with 0.9.2) and in IBM's own forks. The format
has embeddings and output layers of its own and no reduced vocabulary: what a drafter shares with its target is written out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.checkpoint import hf_common
from specdec.checkpoint.hf_common import Shapes
from specdec.checkpoint.native import Checkpoint
from specdec.model.target import CausalLM

WRITES = {"mlp": ("vllm",)}
PREFIX = "speculator."
# tree widths: of a search that nobody runs any more
KNOWN = {
    "emb_dim",
    "inner_dim",
    "n_predict",
    "top_k_tokens_per_head",
    "n_candidates",
    "tie_weights",
    "scale_input",
    "model_type",
}


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return config.get("model_type") == "mlp_speculator"


def shapes(config: dict[str, Any], hidden: int) -> Shapes:
    """Name and shape of every tensor of a native MLP drafter."""
    heads, inner, vocab = config["n_predict"], config["inner_dim"], config["draft_vocab_size"]
    table: Shapes = {}
    for i in range(heads):
        if i < 2 or not config["tie_weights"]:
            table[f"proj.{i}.weight"] = (inner, hidden if i == 0 else inner)
        if i and config["tie_weights"]:
            continue
        table |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
        if config["own_embedding"]:
            table[f"emb.{i}.weight"] = (vocab, inner)
        if config["own_lm_head"]:
            table[f"head.{i}.weight"] = (vocab, inner)
    return table


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    hf_common.refuse_options(config, KNOWN, name)
    hidden = hf_common.integer(config, "emb_dim", name)
    vocab, heads = (
        hf_common.integer(config, "vocab_size", name),
        hf_common.integer(config, "n_predict", name, most=hf_common.DEEPEST),
    )
    own: dict[str, Any] = {
        "n_predict": heads,
        "inner_dim": config.get("inner_dim") or hidden,
        "tie_weights": bool(config.get("tie_weights")),
        "scale_input": bool(config.get("scale_input")),
        "own_embedding": True,
        "own_lm_head": True,
        "draft_vocab_size": vocab,
    }
    tensors = {key.removeprefix(PREFIX): tensor for key, tensor in hf_common.read_tensors(directory).items()}
    if own["tie_weights"]:
        drop_copies(tensors, heads, name)
    hf_common.check_tensors(tensors, shapes(own, hidden), name)
    facts = hf_common.facts_of(config | {"hidden_size": hidden}, name)
    return Checkpoint("mlp", own, facts, tensors, name)


def drop_copies(tensors: dict[str, Tensor], heads: int, name: str) -> None:
    """Tied heads share one tensor; a file may hold it once for each of them."""
    for kind, first in (("emb", 0), ("head", 0), ("ln", 0), ("proj", 1)):
        for i in range(first + 1, heads):
            for part in ("weight", "bias"):
                copy, kept = tensors.pop(f"{kind}.{i}.{part}", None), tensors.get(f"{kind}.{first}.{part}")
                if copy is not None and (kept is None or not torch.equal(copy, kept)):
                    raise ValueError(f"{name}: tie_weights=true, and {kind}.{i}.{part} is not {kind}.{first}.{part}")


def write(
    checkpoint: Checkpoint,
    directory: Path,
    engine: str,
    target: CausalLM | None = None,
    served: str | None = None,
    count: int | None = None,
) -> None:
    own, tensors = checkpoint.config, dict(checkpoint.tensors or {})
    hidden, vocab = hf_common.require(checkpoint, "hidden_size"), hf_common.require(checkpoint, "vocab_size")
    if own["draft_vocab_size"] != vocab:
        raise ValueError(
            f"{checkpoint.name} drafts {own['draft_vocab_size']} of {vocab} tokens, and its format here has no d2t; "
            "train with train.drafter.draft_vocab_size=null"
        )
    copies = 1 if own["tie_weights"] else own["n_predict"]
    for flag, kind in (("own_embedding", "emb"), ("own_lm_head", "head")):
        if own[flag]:
            continue
        if target is None:
            raise ValueError(f"{checkpoint.name} shares its target's {kind}, which the format holds; give target= to write it")
        key = "embed_tokens.weight" if kind == "emb" else "lm_head.weight"
        rows = hf_common.copies(checkpoint, target, key)[key]
        tensors |= {f"{kind}.{i}.weight": rows.clone() for i in range(copies)}
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": hidden,
        "inner_dim": own["inner_dim"],
        "n_predict": own["n_predict"],
        "top_k_tokens_per_head": [1] * own["n_predict"],
        "n_candidates": 1,
        "tie_weights": own["tie_weights"],
        "scale_input": own["scale_input"],
    }
    if target is not None:  # without it vLLM takes 2048 for the drafter (vllm#6294)
        config["max_position_embeddings"] = target.max_model_len
    hf_common.write_directory(directory, config, {PREFIX + key: tensor for key, tensor in tensors.items()}, checkpoint)
