"""The format of the `speculators` package 0.9 (`eagle3` and `peagle`), which vLLM 0.33 loads too.

Weights are those of raw EAGLE-3. The layer's config is inside `transformer_layer_config`, the drafter's keys are at the top,
the target and how many tokens to draft inside `speculators_config`. Defaults differ between the package and vLLM
(`norm_before_residual`), so every key is written. So are copies of the target's embedding and, where the drafter has none, of
its output layer: the package means to fetch what is missing from the target, and with transformers 5.24 leaves memory that was
never written instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.checkpoint import hf_common, raw_eagle3
from specdec.checkpoint.hf_common import Export
from specdec.checkpoint.lint import Findings, TargetFacts, check_layer, check_weights
from specdec.checkpoint.native import LAYER_IDS, Checkpoint
from specdec.checkpoint.raw_eagle3 import EAGLE3, FLAGS, PEAGLE

PRECEDENCE = 0
_ENGINES = {"speculators": "speculators"}
WRITES = {EAGLE3: _ENGINES, PEAGLE: _ENGINES}
VERSION = "0.9.0"
NUM_SPECULATIVE_TOKENS = 3  # the default; `vllm serve DRAFTER` drafts as many as the config has
LAYER_TYPES = ("llama", "qwen3")
KNOWN = {
    LAYER_IDS, *FLAGS, "mask_token_id", "draft_vocab_size", "target_hidden_size", "speculators_model_type",
    "speculators_version", "speculators_config", "transformer_layer_config", "embed_requires_grad", "provenance", "num_depths",
}  # fmt: skip


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return config.get("speculators_model_type") in WRITES


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return str(config["speculators_model_type"])


def proposals(config: dict[str, Any]) -> dict[str, Any]:
    """How the drafter was meant to be used, the first of `speculators_config.proposal_methods`; empty where there is none."""
    section = config.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first if isinstance(first, dict) else {}


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    method = method_of(config, set())
    hf_common.refuse_options(config, KNOWN, name)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type") not in LAYER_TYPES:
        layer_type = layer.get("model_type") if isinstance(layer, dict) else layer
        raise ValueError(f"{name}: transformer_layer_config is of type {layer_type!r}; llama and qwen3 layers can be read")
    hf_common.refuse_options(layer, {"tie_word_embeddings"}, f"{name}: transformer_layer_config")
    tensors = hf_common.read_tensors(directory)
    specdec = {hf_common.SPECDEC_KEY: config.get(hf_common.SPECDEC_KEY)}
    facts = facts_of(config, layer, name)
    flags = {key: bool(config.get(key)) for key in FLAGS}
    if method == EAGLE3 and "norm_before_residual" not in config:
        raise ValueError(
            f"{name}: norm_before_residual is missing, and is false in speculators and true in vLLM by default; write it"
        )
    ids = raw_eagle3.layer_ids({LAYER_IDS: config.get(LAYER_IDS)}, facts.get("num_hidden_layers"), name)
    keys = {key: config.get(key) for key in ("draft_vocab_size", "target_hidden_size", "mask_token_id", "num_depths")}
    checkpoint = raw_eagle3.assemble(name, layer | keys | specdec, tensors, ids, flags, layer["model_type"], facts)
    if checkpoint.method != method:
        raise ValueError(f"{name}: speculators_model_type={method!r}, and the weights are those of {checkpoint.method}")
    return checkpoint


def facts_of(config: dict[str, Any], layer: dict[str, Any], name: str) -> dict[str, Any]:
    """Facts about the target. layer: `transformer_layer_config`; name: of the checkpoint, for errors."""
    of_target = {key: config.get(key) for key in (hf_common.SPECDEC_KEY, "target_hidden_size")}
    facts = hf_common.target_facts(layer | of_target, name)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    if verifier.get("name_or_path"):
        facts.setdefault("name", verifier["name_or_path"])
    return facts


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    return True


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    settings = checkpoint.config
    method = checkpoint.method
    tensors = dict(checkpoint.tensors or {})
    hidden = hf_common.require(checkpoint, "hidden_size")
    vocab = hf_common.require(checkpoint, "vocab_size")
    shared = ["embed_tokens.weight", *(["lm_head.weight"] if not settings["own_lm_head"] else [])]
    if export.target is None:
        raise ValueError(f"{checkpoint.name}: the format holds copies of the target's {' and '.join(shared)}; give target=")
    if settings["norm_before_fc"] and settings["fc_norm"]:
        raise ValueError(f"{checkpoint.name}: norm_before_fc and fc_norm are both true, which speculators refuses; train one")
    layer = {
        "model_type": settings["layer_type"],
        **hf_common.llama_config(
            settings["geometry"], hidden, settings.get("num_hidden_layers", 1), vocab, rope_parameters=True
        ),
    }
    config = {
        "architectures": ["Eagle3Speculator" if method == EAGLE3 else "PEagleSpeculator"],
        **usage(checkpoint, export, settings.get("num_depths")),
        "transformer_layer_config": layer,
        "draft_vocab_size": settings["draft_vocab_size"],
        "target_hidden_size": None,
        LAYER_IDS: settings[LAYER_IDS],
        **{key: settings[key] for key in FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
    if method == PEAGLE:
        config["mask_token_id"] = settings["mask_token_id"]
    copies = hf_common.target_parts(checkpoint, export.target, *shared)
    tensors |= copies
    if "d2t" in tensors:
        tensors["t2d"] = hf_common.t2d_of(tensors["d2t"], vocab)
    hf_common.write_directory(directory, config, tensors, checkpoint, copies)


def usage(checkpoint: Checkpoint, export: Export, max_draft: int | None) -> dict[str, Any]:
    """The keys that say how a drafter is meant to be used. max_draft: most tokens of a draft, if the drafter has a limit."""
    default_count = min(NUM_SPECULATIVE_TOKENS, max_draft or NUM_SPECULATIVE_TOKENS)
    return {
        "speculators_model_type": checkpoint.method,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": checkpoint.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": export.num_speculative_tokens or default_count,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": export.target_name or hf_common.public_name(checkpoint),
                "architectures": _architectures(checkpoint.target.get("model_type")),
            },
        },
    }


def _architectures(model_type: str | None) -> list[str]:
    """The class of a model type in transformers, as a list; empty where there is none."""
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type or "", [])
    return [names] if isinstance(names, str) else list(names)[:1]


# ------------------------------------------------------------------------------------------------ lint


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    engines = ("vllm", "speculators")
    tensors = check_weights(config, hf_common.read_tensors(directory), findings)
    findings.error("sglang", "format", "SGLang does not read the speculators format; export with format=sglang")
    check_usage(config, findings)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type") not in LAYER_TYPES:
        layer_type = layer.get("model_type") if isinstance(layer, dict) else layer
        text = f"transformer_layer_config is of type {layer_type!r}; llama or qwen3 is needed"
        findings.error(engines, "keys", text)
        return
    geometry = check_layer(layer, findings, target)
    hidden = layer["hidden_size"]
    vocab = layer.get("vocab_size") or 0
    target_hidden = raw_eagle3.check_target_hidden(config, hidden, findings, engines, target)
    flags = {key: bool(config.get(key)) for key in FLAGS}
    raw_eagle3.check_flags(config, flags, findings, engines)
    draft_vocab = config.get("draft_vocab_size") or vocab
    raw_eagle3.check_draft_vocabulary(tensors, draft_vocab, vocab, findings, engines)
    if draft_vocab == vocab and "lm_head.weight" not in tensors:
        text = "no lm_head.weight: with transformers 5.24 it is never initialised; write a copy"
        findings.error("speculators", "lm_head", text)
    if "embed_tokens.weight" not in tensors:
        text = "no embed_tokens.weight: with transformers 5.24 it is never initialised; write a copy"
        findings.error("speculators", "embedding", text)
    ids = config.get(LAYER_IDS)
    if ids is not None and (not isinstance(ids, list) or ids != sorted(set(ids))):
        text = f"{LAYER_IDS} is {ids}: engines concatenate ascending and once each; train fc in that order"
        findings.error(engines, "layer_ids", text)
    if ids and target.num_layers is not None and not 0 <= min(ids) <= max(ids) <= target.num_layers:
        findings.error(engines, "layer_ids", f"layers {ids} are outside 0..{target.num_layers}, the target's")
    num_taps = len(ids) if isinstance(ids, list) and ids else 3
    if method_of(config, set()) == PEAGLE:
        raw_eagle3.check_mask(config, tensors, findings)
        if not isinstance(config.get("mask_token_id"), int):
            findings.error(engines, "mask_token_id", "peagle without mask_token_id")
    elif "mask_hidden" in tensors:
        text = "mask_hidden in an eagle3 drafter; say speculators_model_type peagle"
        findings.error("vllm", "mask_hidden", text)
    num_layers = hf_common.depth_of(layer, "config.json")
    for i in range(1, num_layers):
        if f"layers.{i}.hidden_norm.weight" in tensors:
            text = f"layers.{i}.hidden_norm.weight is ignored; it is SGLang's name for a norm"
            findings.warn("speculators", "layers", text)
    layer_type = layer["model_type"]
    sizes = raw_eagle3.Sizes(hidden, target_hidden, vocab, draft_vocab, num_taps, num_layers, geometry, layer_type, flags)
    raw_eagle3.check_table(tensors, sizes, findings, engines, target)


def check_usage(config: dict[str, Any], findings: Findings) -> None:
    """Check how many tokens to draft, and the target's name."""
    section = config.get("speculators_config") or {}
    if not isinstance(proposals(config).get("speculative_tokens"), int):
        text = "speculators_config.proposal_methods[0].speculative_tokens is missing"
        findings.error(("vllm", "speculators"), "keys", text)
    for key in ("algorithm", "default_proposal_method"):
        if not section.get(key):
            findings.error("speculators", "keys", f"speculators_config.{key} is missing")
    name = (section.get("verifier") or {}).get("name_or_path")
    if not name:
        text = "speculators_config.verifier.name_or_path is missing; write the target's hub id"
        findings.error("vllm", "verifier", text)
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith(".") or Path(name).exists():
        text = f"verifier.name_or_path={name!r} is no hub id: `vllm serve DRAFTER` refuses; serve the target, or write its id"
        findings.warn("vllm", "verifier", text)
