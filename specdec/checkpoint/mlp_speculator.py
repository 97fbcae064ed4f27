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
from specdec.checkpoint.hf_common import Export, Shapes
from specdec.checkpoint.lint import Findings, TargetFacts, check_names, check_weights
from specdec.checkpoint.native import Checkpoint
from specdec.hub import MAX_LAYERS

PRECEDENCE = 0
METHOD = "mlp"
WRITES = {METHOD: {"vllm": "vllm_0_32"}}
PREFIX = "speculator."
# top_k_tokens_per_head and n_candidates are widths of a tree search that no engine runs any more
KNOWN = {
    "emb_dim", "inner_dim", "n_predict", "top_k_tokens_per_head", "n_candidates", "tie_weights", "scale_input", "model_type",
}  # fmt: skip


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return config.get("model_type") == "mlp_speculator"


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return METHOD


def shapes(config: dict[str, Any], hidden: int) -> Shapes:
    """Name and shape of every tensor of a native MLP drafter."""
    inner = config["inner_dim"]
    vocab = config["draft_vocab_size"]
    table: Shapes = {}
    for i in range(config["n_predict"]):
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


def _settings(config: dict[str, Any], name: str) -> tuple[dict[str, Any], int]:
    """Settings of the native drafter, and its width, from a config.json. name: of the checkpoint, for errors."""
    hidden = hf_common.integer(config, "emb_dim", name)
    vocab = hf_common.integer(config, "vocab_size", name)
    settings = {
        "n_predict": hf_common.integer(config, "n_predict", name, maximum=MAX_LAYERS),
        "inner_dim": config.get("inner_dim") or hidden,
        "tie_weights": bool(config.get("tie_weights")),
        "scale_input": bool(config.get("scale_input")),
        "own_embedding": True,
        "own_lm_head": True,
        "draft_vocab_size": vocab,
    }
    return settings, hidden


def drop_copies(tensors: dict[str, Tensor], num_heads: int, name: str) -> None:
    """Remove copies of tensors that tied heads share, of which a file may hold one for each head. Raises ValueError for a copy
    that differs.

    tensors: changed in place.
    num_heads: how many heads there are.
    name: of the checkpoint, for errors.
    """
    for kind, first in (("emb", 0), ("head", 0), ("ln", 0), ("proj", 1)):
        for i in range(first + 1, num_heads):
            for part in ("weight", "bias"):
                copy = tensors.pop(f"{kind}.{i}.{part}", None)
                shared = tensors.get(f"{kind}.{first}.{part}")
                if copy is not None and (shared is None or not torch.equal(copy, shared)):
                    raise ValueError(f"{name}: tie_weights=true, and {kind}.{i}.{part} is not {kind}.{first}.{part}")


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    hf_common.refuse_options(config, KNOWN, name)
    settings, hidden = _settings(config, name)
    tensors = {key.removeprefix(PREFIX): tensor for key, tensor in hf_common.read_tensors(directory).items()}
    if settings["tie_weights"]:
        drop_copies(tensors, settings["n_predict"], name)
    hf_common.check_tensors(tensors, shapes(settings, hidden), name)
    facts = hf_common.target_facts(config | {"hidden_size": hidden}, name)
    return Checkpoint(METHOD, settings, facts, tensors, name)


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    has_parts = checkpoint.config["own_embedding"] and checkpoint.config["own_lm_head"]
    return not has_parts or hf_common.scales_embedding(checkpoint)


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    settings = checkpoint.config
    target = export.target
    tensors = dict(checkpoint.tensors or {})
    hidden = hf_common.require(checkpoint, "hidden_size")
    vocab = hf_common.require(checkpoint, "vocab_size")
    if settings["draft_vocab_size"] != vocab:
        raise ValueError(
            f"{checkpoint.name} drafts {settings['draft_vocab_size']} of {vocab} tokens, and its format here has no d2t; "
            "train with train.drafter.draft_vocab_size=null"
        )
    num_copies = 1 if settings["tie_weights"] else settings["n_predict"]
    for flag, kind, key in (("own_embedding", "emb", "embed_tokens.weight"), ("own_lm_head", "head", "lm_head.weight")):
        if settings[flag]:
            continue
        if target is None:
            raise ValueError(f"{checkpoint.name} shares its target's {kind}, which the format holds; give target= to write it")
        rows = hf_common.target_parts(checkpoint, target, key)[key]
        tensors |= {f"{kind}.{i}.weight": rows.clone() for i in range(num_copies)}
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": hidden,
        "inner_dim": settings["inner_dim"],
        "n_predict": settings["n_predict"],
        "top_k_tokens_per_head": [1] * settings["n_predict"],
        "n_candidates": 1,
        "tie_weights": settings["tie_weights"],
        "scale_input": settings["scale_input"],
    }
    if target is not None:  # without it vLLM takes 2048 for the drafter (vllm#6294)
        config["max_position_embeddings"] = target.max_model_len
    hf_common.write_directory(directory, config, {PREFIX + key: tensor for key, tensor in tensors.items()}, checkpoint)


# ------------------------------------------------------------------------------------------------ lint


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    engines = ("vllm_0_32",)
    tensors = check_weights(config, hf_common.read_tensors(directory), findings)
    text = "the MLP speculator is gone: vLLM has its class up to 0.32, and the V0 engine that ran it up to 0.9.2"
    findings.error("vllm", "format", text)
    findings.error(("sglang", "speculators"), "format", "there is no MLP speculator")
    settings, hidden = _settings(config, "config.json")
    vocab = settings["draft_vocab_size"]
    num_heads = settings["n_predict"]
    if target.hidden_size not in (None, hidden):
        findings.error(engines, "hidden_size", f"emb_dim is {hidden}, and the target's width is {target.hidden_size}")
    if target.vocab_size not in (None, vocab):
        findings.error(engines, "vocabulary", f"vocab_size is {vocab}, and the target's is {target.vocab_size}")
    if len(config.get("top_k_tokens_per_head") or []) != num_heads:
        text = f"top_k_tokens_per_head must have n_predict={num_heads} entries; nobody reads their values"
        findings.error(engines, "keys", text)
    if "max_position_embeddings" not in config:
        findings.warn(engines, "positions", "no max_position_embeddings: vLLM takes 2048 for the drafter (vllm#6294)")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    if settings["tie_weights"]:
        try:
            drop_copies(tensors, num_heads, "config.json")
        except ValueError as error:
            findings.error(engines, "tied", str(error).removeprefix("config.json: "))
    check_names(tensors, shapes(settings, hidden), findings, engines)
