"""DFlash and DSpark in the format of the `speculators` package 0.9, which vLLM 0.33 loads too.

Weights are those of `raw_dflash`, `aux_hidden_state_layer_ids` count inputs as ours do, and the rest is as for EAGLE-3
(`speculators`). Where the target's vocabulary is drafted whole, the package takes embedding and output layer from the target;
copies are written all the same, for what loads the directory without it. Windows: the package trains with one that counts from
the anchor, and engines decode with one that counts from each token, as this project does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.checkpoint import hf_common, raw_dflash, speculators
from specdec.checkpoint.hf_common import Export
from specdec.checkpoint.lint import Findings, TargetFacts, check_weights
from specdec.checkpoint.native import Checkpoint
from specdec.checkpoint.raw_dflash import DFLASH, DSPARK, HEADS

PRECEDENCE = 0
WRITES = {DFLASH: {"speculators": "speculators"}, DSPARK: {"speculators": "speculators"}}
IDS = "aux_hidden_state_layer_ids"
KNOWN = {
    IDS, *HEADS, "block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal", "draft_vocab_size",
    "target_hidden_size", "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "provenance", "use_aux_hidden_state",
}  # fmt: skip


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return config.get("speculators_model_type") in WRITES


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return str(config["speculators_model_type"])


def layer_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """`transformer_layer_config`. Raises ValueError for layers that are not Qwen3's."""
    layer = config.get("transformer_layer_config")
    layer_type = layer.get("model_type") if isinstance(layer, dict) else layer
    if not isinstance(layer, dict) or layer_type != "qwen3":
        raise ValueError(f"{name}: transformer_layer_config is of type {layer_type!r}; qwen3 layers can be read")
    raw_dflash.refuse_options(layer, {"tie_word_embeddings", "use_sliding_window"}, f"{name}: transformer_layer_config")
    return layer


def settings_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """What a drafter's config says of it, with the keys of `specdec.method.dflash`."""
    hf_common.refuse_options(config, KNOWN, name)
    layer = layer_of(config, name)
    method = method_of(config, set())
    if method == DSPARK and config.get("sample_from_anchor") is None:
        raise ValueError(
            f"{name}: sample_from_anchor is missing, and is true in speculators and false in vLLM by default; write it"
        )
    window = layer.get("sliding_window") if layer.get("use_sliding_window", True) else None
    settings: dict[str, Any] = {
        "block_size": hf_common.integer(config, "block_size", name),
        "sample_from_anchor": bool(config.get("sample_from_anchor")),
        "mask_token_id": raw_dflash.mask_token(config, layer, name),
        IDS: raw_dflash.layer_ids(config.get(IDS), IDS, name),
        "causal": False,
        **raw_dflash.windows(layer.get("layer_types"), window),
        "sliding_window_non_causal": bool(config.get("sliding_window_non_causal")),
    }
    if method == DSPARK:
        settings |= {key: config[key] for key in HEADS if config.get(key) is not None}
    return settings


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    settings = settings_of(config, name)
    layer = layer_of(config, name)
    facts = speculators.facts_of(config, layer, name)
    keys = {key: config.get(key) for key in ("draft_vocab_size", hf_common.SPECDEC_KEY)}
    tensors = hf_common.read_tensors(directory)
    kinds = method_of(config, set()), raw_dflash.method_of(config, set(tensors))
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name}: speculators_model_type={kinds[0]!r}, and the weights are those of {kinds[1]}")
    return raw_dflash.assemble(name, settings, facts, tensors, layer | keys)


def needs_target(checkpoint: Checkpoint) -> bool:
    return True


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    settings = checkpoint.config
    name = checkpoint.name
    tensors = dict(checkpoint.tensors or {})
    raw_dflash.check_layers(checkpoint)
    if settings["causal"]:
        raise ValueError(f"{name}: its blocks are causal, which speculators has for sliding layers alone; train without causal")
    if settings.get("markov_head_type") == "rnn" and not settings["sample_from_anchor"]:
        raise ValueError(
            f"{name}: speculators' rnn head remembers the anchor's place too; train with train.drafter.sample_from_anchor=true"
        )
    if hf_common.scales_embedding(checkpoint):
        raise ValueError(
            f"{name}: its target scales the embedding, which speculators fetches for these drafters without the scale; give "
            "format=vllm"
        )
    if settings["own_lm_head"] and settings["draft_vocab_size"] == hf_common.require(checkpoint, "vocab_size"):
        raise ValueError(
            f"{name} has an output layer of its own for all tokens, which speculators replaces by the target's; train with "
            "train.init.train_lm_head=false, or with a draft vocabulary"
        )
    shared = ["embed_tokens.weight", *([] if settings["own_lm_head"] else ["lm_head.weight"])]
    if export.target is None:
        raise ValueError(f"{name}: the format holds copies of the target's {' and '.join(shared)}; give target=")
    max_draft = settings["block_size"] - (not settings["sample_from_anchor"])
    config = {
        "architectures": ["DFlashSpeculator" if checkpoint.method == DFLASH else "DSparkSpeculator"],
        **speculators.usage(checkpoint, export, max_draft),
        "transformer_layer_config": raw_dflash.layer_config(checkpoint, rope_parameters=True),
        **{key: settings[key] for key in ("draft_vocab_size", "block_size", "mask_token_id", "sample_from_anchor", IDS)},
        "sliding_window_non_causal": settings["sliding_window_non_causal"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **{key: settings[key] for key in HEADS if key in settings},
    }
    copies = hf_common.target_parts(checkpoint, export.target, *shared)
    tensors |= copies
    if "d2t" in tensors:
        tensors["t2d"] = hf_common.t2d_of(tensors["d2t"], hf_common.require(checkpoint, "vocab_size"))
    hf_common.write_directory(directory, config, tensors, checkpoint, copies)


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    engines = ("vllm", "speculators")
    tensors = check_weights(config, hf_common.read_tensors(directory), findings)
    findings.error("sglang", "format", "SGLang does not read the speculators format")
    speculators.check_usage(config, findings)
    method = method_of(config, set())
    settings = settings_of(config, "config.json")
    if method == DFLASH and settings["sample_from_anchor"]:
        findings.error("vllm", "sample_from_anchor", "vLLM's DFlash fills in; train with sample_from_anchor=false")
    raw_dflash.check_taps(settings, findings, engines, target)
    layer = layer_of(config, "config.json")
    raw_dflash.check_sizes(tensors, settings, config, layer, method, findings, engines, target)
