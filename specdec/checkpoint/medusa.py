"""Medusa heads (2401.10774), in two layouts. vLLM's, up to 0.32: `model_type: medusa`, `blocks.{k}.layers.{i}.weight`,
`lm_heads.{k}.weight` or one `lm_head.weight` (`original_lm_head`), and `token_map`, the target ids of a draft vocabulary. Its
authors': `medusa_num_heads` in config.json, `{k}.{i}.linear.weight` and `.bias`, `{k}.{num_layers}.weight`.

vLLM reads both. The authors' config.json leaves width and vocabulary to the weights; ours has them, for vLLM's sake.
"""

from __future__ import annotations

import re
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
METHOD = "medusa"
AUTHORS = "medusa"  # as `format=`, the authors' layout
ENGINE = "vllm_medusa"
WRITES = {METHOD: {"vllm": ENGINE, AUTHORS: ENGINE}}
# max_paths and topk are widths of a tree search that vLLM never had; num_lookahead_tokens is its own name for num_heads
KNOWN = {
    "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "version", "num_heads", "num_hidden_layers",
    "medusa_fc_bias", "original_lm_head", "truncated_vocab_size", "max_paths", "topk", "max_seq_len", "num_lookahead_tokens",
}  # fmt: skip
_AUTHORS_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return METHOD


def shapes(config: dict[str, Any], hidden: int) -> Shapes:
    """Name and shape of every tensor of a native drafter, but for d2t."""
    table: Shapes = {}
    for k in range(config["num_heads"]):
        for i in range(config["num_hidden_layers"]):
            table[f"blocks.{k}.layers.{i}.weight"] = (hidden, hidden)
            if config["medusa_fc_bias"]:
                table[f"blocks.{k}.layers.{i}.bias"] = (hidden,)
    if config["own_lm_head"]:
        names = ["lm_head"] if config["original_lm_head"] else [f"lm_heads.{k}" for k in range(config["num_heads"])]
        table |= {f"{name}.weight": (config["draft_vocab_size"], hidden) for name in names}
    return table


def _native_name(name: str) -> str:
    """vLLM's name of a tensor, which is ours."""
    name = name.removeprefix("medusa_heads.")
    match = _AUTHORS_NAME.fullmatch(name)
    if match is None:
        return name
    head, layer, linear, part = match.groups()
    return f"blocks.{head}.layers.{layer}.{part}" if linear else f"lm_heads.{head}.{part}"


def _native_names(stored: dict[str, Tensor], config: dict[str, Any], name: str) -> dict[str, Tensor]:
    tensors = {_native_name(key): tensor for key, tensor in stored.items()}
    if len(tensors) < len(stored):
        raise ValueError(f"{name}: tensors of the same meaning under two names; remove one")
    if config.get("original_lm_head") and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    return tensors


def _completed(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """config.json with the width and the vocabulary, which its authors leave to the weights."""
    known = {}
    for key, name in (("hidden_size", "blocks.0.layers.0.weight"), ("vocab_size", "lm_heads.0.weight")):
        if config.get(key) is None and name in tensors and tensors[name].ndim:
            known[key] = tensors[name].shape[0]
    return config | known


def _settings(config: dict[str, Any], name: str) -> tuple[dict[str, Any], int, int]:
    """Settings of the native drafter, its width and its target's vocabulary, from a completed config.json. name: of the
    checkpoint, for errors."""
    by_authors = "medusa_num_heads" in config
    heads, layers = ("medusa_num_heads", "medusa_num_layers") if by_authors else ("num_heads", "num_hidden_layers")
    hidden = hf_common.integer(config, "hidden_size", name)
    vocab = hf_common.integer(config, "vocab_size", name)
    settings = {
        "num_heads": hf_common.integer(config, heads, name, maximum=MAX_LAYERS),
        "num_hidden_layers": hf_common.integer(config, layers, name, 1, maximum=MAX_LAYERS),
        "medusa_fc_bias": bool(config.get("medusa_fc_bias", by_authors)),
        "original_lm_head": bool(config.get("original_lm_head")),
        "own_lm_head": True,
        "draft_vocab_size": hf_common.integer(config, "truncated_vocab_size", name, vocab, maximum=vocab),
    }
    return settings, hidden, vocab


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    hf_common.refuse_options(config, KNOWN, name)
    tensors = _native_names(hf_common.read_tensors(directory), config, name)
    config = _completed(config, tensors)
    settings, hidden, vocab = _settings(config, name)
    d2t = _take_token_map(tensors, settings["draft_vocab_size"], vocab, name)
    copies = hf_common.take_copies(config, tensors, hidden, vocab, name)
    settings["own_lm_head"] = "lm_head.weight" not in (copies or {})
    hf_common.check_tensors(tensors, shapes(settings, hidden), name)
    if d2t is not None:
        tensors["d2t"] = d2t
        hf_common.check_vocabulary(tensors, vocab, name)
    facts = hf_common.target_facts(config, name)
    if "name" not in facts and (target := hf_common.target_name(config)):
        facts["name"] = target
    return Checkpoint(METHOD, settings, facts, tensors, name, copies)


def _take_token_map(tensors: dict[str, Tensor], draft_vocab: int, vocab: int, name: str) -> Tensor | None:
    """Remove token_map, and return it as d2t; None if all tokens are drafted. Output layers that have all rows keep those of
    the draft vocabulary, as in vLLM."""
    ids = tensors.pop("token_map", None)
    if draft_vocab == vocab:
        return None
    if ids is None:
        raise ValueError(f"{name}: truncated_vocab_size={draft_vocab} of {vocab} tokens, and the weights lack 'token_map'")
    if tuple(ids.shape) != (draft_vocab,) or ids.is_floating_point() or not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"{name}: token_map must be {draft_vocab} ids of 0..{vocab - 1}, as truncated_vocab_size has it")
    ids = ids.long()
    for key, tensor in tensors.items():
        if key.startswith("lm_head") and tensor.shape[:1] == (vocab,):
            tensors[key] = tensor[ids]
    return ids - torch.arange(draft_vocab)


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    return not checkpoint.config["own_lm_head"]


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    settings = checkpoint.config
    tensors = dict(checkpoint.tensors or {})
    hidden = hf_common.require(checkpoint, "hidden_size")
    vocab = hf_common.require(checkpoint, "vocab_size")
    is_reduced = settings["draft_vocab_size"] < vocab
    if not settings["own_lm_head"]:
        if export.target is None:
            raise ValueError(f"{checkpoint.name} shares its target's output layer, which the format holds; give target=")
        tensors |= hf_common.target_parts(checkpoint, export.target, "lm_head.weight")
    shares_head = "lm_head.weight" in tensors
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocab,
    }
    if export.engine == AUTHORS:
        if is_reduced:
            raise ValueError(
                f"{checkpoint.name} drafts {settings['draft_vocab_size']} of {vocab} tokens, and the authors' layout has all; "
                "give format=vllm, or train with train.drafter.draft_vocab_size=null"
            )
        config |= {
            "medusa_num_heads": settings["num_heads"],
            "medusa_num_layers": settings["num_hidden_layers"],
            "medusa_fc_bias": True,
        }
        if target_name := hf_common.public_name(checkpoint):
            config["base_model_name_or_path"] = target_name
        hf_common.write_directory(directory, config, _authors_tensors(tensors, settings), checkpoint)
        return
    if is_reduced and not shares_head:
        raise ValueError(
            f"{checkpoint.name} drafts {settings['draft_vocab_size']} of {vocab} tokens, which vLLM loads with one output "
            "layer for all heads only; train with train.drafter.original_lm_head=true, or with draft_vocab_size=null"
        )
    config |= {
        "num_heads": settings["num_heads"],
        "num_hidden_layers": settings["num_hidden_layers"],
        "medusa_fc_bias": settings["medusa_fc_bias"],
        "original_lm_head": shares_head,
        "truncated_vocab_size": settings["draft_vocab_size"],
    }
    if is_reduced:
        d2t = tensors.pop("d2t")
        tensors["token_map"] = d2t + torch.arange(len(d2t))
    copies = [] if settings["own_lm_head"] else ["lm_head.weight"]
    hf_common.write_directory(directory, config, tensors, checkpoint, copies)


def _authors_tensors(tensors: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Under their names: each head has an output layer, and each layer a bias."""
    num_layers = settings["num_hidden_layers"]
    stored: dict[str, Tensor] = {}
    for k in range(settings["num_heads"]):
        for i in range(num_layers):
            weight = tensors[f"blocks.{k}.layers.{i}.weight"]
            bias = tensors.get(f"blocks.{k}.layers.{i}.bias")
            stored[f"{k}.{i}.linear.weight"] = weight
            stored[f"{k}.{i}.linear.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
        head = tensors["lm_head.weight"].clone() if "lm_head.weight" in tensors else tensors[f"lm_heads.{k}.weight"]
        stored[f"{k}.{num_layers}.weight"] = head
    return stored


# ------------------------------------------------------------------------------------------------ lint


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    stored = hf_common.read_tensors(directory)
    token_map = stored.pop("token_map", None)
    tensors = _native_names(check_weights(config, stored, findings), config, "config.json")
    findings.error("vllm", "format", "Medusa is gone: vLLM has it up to 0.32")
    findings.error(("sglang", "speculators"), "format", "there is no Medusa")
    if config.get("hidden_size") is None:
        findings.error(ENGINE, "hidden_size", "no hidden_size: 4096 is taken; write the target's")
    config = _completed(config, tensors)
    settings, hidden, vocab = _settings(config, "config.json")
    draft_vocab = settings["draft_vocab_size"]
    if target.hidden_size not in (None, hidden):
        findings.error(ENGINE, "hidden_size", f"hidden_size is {hidden}, and the target's is {target.hidden_size}")
    if target.vocab_size not in (None, vocab):
        findings.error(ENGINE, "vocabulary", f"vocab_size is {vocab}, and the target's is {target.vocab_size}")
    if draft_vocab < vocab:
        if token_map is None:
            findings.error(ENGINE, "token_map", f"truncated_vocab_size is {draft_vocab} of {vocab}, and there is no token_map")
        if not settings["original_lm_head"]:
            text = f"lm_heads are made with {vocab} rows and refuse {draft_vocab}; one lm_head (original_lm_head) may have them"
            findings.error(ENGINE, "token_map", text)
    settings["medusa_fc_bias"] = bool(config.get("medusa_fc_bias"))
    table = shapes(settings, hidden)
    for name in sorted(name for name in set(tensors) - set(table) if not name.endswith(".bias")):
        del tensors[name]
        findings.error(
            ENGINE, "names", f"unknown tensor {name!r}, which is ignored silently; remove it, or write its name right"
        )
    if token_map is not None and draft_vocab < vocab:
        tensors = {
            name: tensor[: len(token_map)] if name.startswith("lm_head") and len(tensor) == vocab else tensor
            for name, tensor in tensors.items()
        }
    check_names(tensors, table, findings, (ENGINE,))
