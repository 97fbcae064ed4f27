"""The format of the `speculators` package 0.9 (`eagle3` and `peagle`), which vLLM 0.33 loads too.

Weights are those of raw EAGLE-3. The layer's config stands inside `transformer_layer_config`, the drafter's keys at the top,
the target and how many tokens to draft inside `speculators_config`. Defaults differ between the package and vLLM
(`norm_before_residual`), so that every key is written. So are copies of the target's embedding and, where the drafter has none,
of its output layer: the package means to fetch what is missing from the target, and with transformers 5.24 leaves memory that
was never written instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.checkpoint import hf_common, raw_eagle3
from specdec.checkpoint.native import Checkpoint
from specdec.model.target import CausalLM

WRITES = {"eagle3": ("speculators",), "peagle": ("speculators",)}
VERSION = "0.9.0"
NUM_SPECULATIVE_TOKENS = 3  # where nobody says otherwise; `vllm serve DRAFTER` takes what the config says
KNOWN = {
    raw_eagle3.IDS, *raw_eagle3.FLAGS, "mask_token_id", "draft_vocab_size", "target_hidden_size", "speculators_model_type",
    "speculators_version", "speculators_config", "transformer_layer_config", "embed_requires_grad", "provenance", "num_depths",
}  # fmt: skip


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return config.get("speculators_model_type") in WRITES


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name, kind = str(directory), config["speculators_model_type"]
    hf_common.refuse_options(config, KNOWN, name)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type") not in ("llama", "qwen3"):
        said = layer.get("model_type") if isinstance(layer, dict) else layer
        raise ValueError(f"{name}: transformer_layer_config is of type {said!r}; llama and qwen3 layers can be read")
    hf_common.refuse_options(layer, {"tie_word_embeddings"}, f"{name}: transformer_layer_config")
    tensors = hf_common.read_tensors(directory)
    facts = hf_common.facts_of(layer | {key: config.get(key) for key in ("target_hidden_size", hf_common.OURS)}, name)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    if verifier.get("name_or_path"):
        facts.setdefault("name", verifier["name_or_path"])
    # the package's own default, which vLLM does not share for eagle3: hence never left to a default on the way out
    flags = {key: bool(config.get(key)) for key in raw_eagle3.FLAGS}
    if kind == "eagle3" and "norm_before_residual" not in config:
        raise ValueError(
            f"{name}: norm_before_residual is missing, and is false in speculators and true in vLLM by default; write it"
        )
    ids = raw_eagle3.layer_ids({raw_eagle3.IDS: config.get(raw_eagle3.IDS)}, facts.get("num_hidden_layers"), name)
    keys = {key: config.get(key) for key in ("draft_vocab_size", "target_hidden_size", "mask_token_id", "num_depths")}
    found = raw_eagle3.assembled(
        name, layer | keys | {hf_common.OURS: config.get(hf_common.OURS)}, tensors, ids, flags, layer["model_type"], facts
    )
    if found.method != kind:
        raise ValueError(f"{name}: speculators_model_type={kind!r}, and the weights are those of {found.method}")
    return found


def write(
    checkpoint: Checkpoint,
    directory: Path,
    engine: str,
    target: CausalLM | None = None,
    served: str | None = None,
    count: int | None = None,
) -> None:
    count = count or min(NUM_SPECULATIVE_TOKENS, checkpoint.config.get("num_depths") or NUM_SPECULATIVE_TOKENS)
    own, tensors, kind = checkpoint.config, dict(checkpoint.tensors or {}), checkpoint.method
    hidden, vocab = hf_common.require(checkpoint, "hidden_size"), hf_common.require(checkpoint, "vocab_size")
    shared = ["embed_tokens.weight", *(["lm_head.weight"] if not own["own_lm_head"] else [])]
    if target is None:
        raise ValueError(f"{checkpoint.name}: the format holds copies of the target's {' and '.join(shared)}; give target=")
    if own["norm_before_fc"] and own["fc_norm"]:
        raise ValueError(f"{checkpoint.name}: norm_before_fc and fc_norm are both true, which speculators refuses; train one")
    layer = {
        "model_type": own["layer_type"],
        **hf_common.hf_layer(own["geometry"], hidden, own.get("num_hidden_layers", 1), vocab, rope_parameters=True),
    }
    config = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": count,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": served or hf_common.public_name(checkpoint),
                "architectures": _architectures(checkpoint.target.get("model_type")),
            },
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": own["draft_vocab_size"],
        "target_hidden_size": None,
        raw_eagle3.IDS: own[raw_eagle3.IDS],
        **{key: own[key] for key in raw_eagle3.FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
    if kind == "peagle":
        config["mask_token_id"] = own["mask_token_id"]
    tensors |= (copied := hf_common.copies(checkpoint, target, *shared))
    if "d2t" in tensors:
        tensors["t2d"] = hf_common.t2d_of(tensors["d2t"], vocab)
    hf_common.write_directory(directory, config, tensors, checkpoint, copied)


def _architectures(model_type: str | None) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found: Any = NAMES.get(model_type or "", [])
    return [found] if isinstance(found, str) else list(found)[:1]
