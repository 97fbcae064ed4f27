"""DFlash and DSpark as they are published: a Qwen3's config.json with a few keys more, and weights without a prefix.

    z-lab      `DFlashDraftModel`: mask_token_id and target_layer_ids inside `dflash_config`; no embedding, no output layer.
    DeepSpec   `Qwen3DSparkModel`: the same keys at the top, those of the Markov and the confidence head beside them, and copies
               of the target's embedding and output layer. Its DFlash is a DSpark without heads: markov_rank 0.
    SpecForge  `DSparkDraftModel`: z-lab's layout, with the heads' keys inside `dflash_config` too. It is read only.

`target_layer_ids` count outputs: id i leaves layer i, so it enters layer i + 1. z-lab's drafters fill in unless told otherwise,
the others draft from the anchor. vLLM 0.33 loads z-lab's DFlash and DeepSpec's DSpark, and needs no copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.checkpoint import hf_common
from specdec.checkpoint.hf_common import Export, Shapes
from specdec.checkpoint.lint import (
    Findings,
    TargetFacts,
    check_embedding,
    check_layer,
    check_names,
    check_weights,
)
from specdec.checkpoint.native import Checkpoint
from specdec.checkpoint.raw_eagle3 import check_draft_vocabulary
from specdec.hub import MAX_LAYERS

PRECEDENCE = 1
DFLASH = "dflash"
DSPARK = "dspark"
DEEPSPEC = "deepspec"  # as `format=`, their layout
WRITES = {DFLASH: {"vllm": "vllm", DEEPSPEC: DEEPSPEC}, DSPARK: {"vllm": "vllm", DEEPSPEC: DEEPSPEC}}
Z_LAB = "DFlashDraftModel"
ARCHITECTURES = (Z_LAB, "Qwen3DSparkModel", "DSparkDraftModel")
IDS = "target_layer_ids"
DEFAULT_HEADS = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
HEADS = tuple(DEFAULT_HEADS)
# keys at the top or inside dflash_config
EITHER = {"mask_token_id", IDS, "block_size", "sample_from_anchor", *HEADS}
KNOWN = EITHER | {
    "dflash_config", "num_target_layers", "num_anchors", "draft_vocab_size", "target_hidden_size", "has_own_lm_head",
    "is_causal", "use_sliding_window", "tie_word_embeddings", "max_window_layers",
}  # fmt: skip
NESTED = EITHER | {"causal", "use_swa", "swa_window_size", "use_aux_hidden_state", "num_target_layers", "projector_type"}
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return bool(set(config.get("architectures") or []) & set(ARCHITECTURES))


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return DSPARK if "markov_head.markov_w1.weight" in names else DFLASH


def shapes(config: dict[str, Any], hidden: int, vocab: int, method: str) -> Shapes:
    """Name and shape of every tensor of a native DFlash or DSpark drafter, but for d2t."""
    num_taps = len(config["aux_hidden_state_layer_ids"])
    table: Shapes = {
        "fc.weight": (hidden, num_taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        qk_norm = config["layer_type"] == "qwen3"
        table |= hf_common.layer_shapes(f"layers.{i}", config["geometry"], hidden, hidden, LAYER_NORMS, qk_norm)
    if config["own_lm_head"]:
        table["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    if method == DSPARK:
        rank = config["markov_rank"]
        table |= {
            "markov_head.markov_w1.weight": (vocab, rank),
            "markov_head.markov_w2.weight": (config["draft_vocab_size"], rank),
        }
        if config["markov_head_type"] == "gated":
            table |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if config["markov_head_type"] == "rnn":
            table["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            table["markov_head.joint_proj.bias"] = (3 * rank,)
        if config["enable_confidence_head"]:
            width = hidden + rank * config["confidence_head_with_markov"]
            table |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return table


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    return assemble(name, *settings_of(config, name), hf_common.read_tensors(directory), config)


def settings_of(config: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a drafter's config says of it, with the keys of `specdec.method.dflash`, and what it says of its target. Raises
    ValueError for an option that would change the function."""
    nested = config.get("dflash_config") or {}
    refuse_options(config, KNOWN, name)
    for key, value in nested.items():
        if key not in NESTED and value not in (None, False):
            raise ValueError(f"{name}: dflash_config.{key}={str(value)[:60]!r} cannot be represented")
        if key in EITHER and config.get(key) not in (None, value):
            raise ValueError(f"{name}: {key} is {config[key]!r}, and {value!r} inside dflash_config; which is it?")
    values = {key: nested.get(key) if config.get(key) is None else config[key] for key in EITHER}
    outputs = layer_ids(values[IDS], IDS, name)
    sample_from_anchor = values["sample_from_anchor"]
    if sample_from_anchor is None:
        sample_from_anchor = Z_LAB not in config["architectures"]
    is_causal = config.get("is_causal")
    settings: dict[str, Any] = {
        "block_size": hf_common.integer(values, "block_size", name),
        "sample_from_anchor": sample_from_anchor,
        "mask_token_id": mask_token(values, config, name),
        "aux_hidden_state_layer_ids": [i + 1 for i in outputs],
        "causal": bool(nested.get("causal") if is_causal is None else is_causal),
    }
    if config.get("use_sliding_window") and not config.get("layer_types") and not nested.get("use_swa"):
        raise ValueError(f"{name}: use_sliding_window=true and no layer_types; write which layers slide")
    window = nested.get("swa_window_size") if nested.get("use_swa") else config.get("sliding_window")
    settings |= windows(config.get("layer_types"), window, bool(nested.get("use_swa")))
    # as vLLM has it: where the causality of the whole is said, it is that of the sliding layers too
    says_no = is_causal is False or (is_causal is None and nested.get("causal") is False)
    settings["sliding_window_non_causal"] = says_no and settings["sliding_window"] is not None
    if values["markov_rank"]:
        settings |= {key: values[key] for key in HEADS if values[key] is not None}
    facts = hf_common.target_facts(config, name)
    depth = config.get("num_target_layers") or nested.get("num_target_layers")
    if depth is not None:
        facts.setdefault("num_hidden_layers", depth)
    return settings, facts


def refuse_options(config: dict[str, Any], known: set[str], name: str) -> None:
    """As `hf_common.refuse_options`; windows can be represented."""
    layer = {key: value for key, value in config.items() if key not in ("sliding_window", "layer_types")}
    hf_common.refuse_options(layer, known, name)


def layer_ids(ids: Any, key: str, name: str) -> list[int]:
    if not isinstance(ids, list) or not ids or ids != sorted(set(ids)):
        raise ValueError(f"{name}: {key}={ids!r} is no ascending list of distinct layers, as engines concatenate them")
    return ids


def mask_token(values: dict[str, Any], layer: dict[str, Any], name: str) -> int:
    vocab = hf_common.integer(layer, "vocab_size", name)
    mask = values.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < vocab:
        raise ValueError(f"{name}: mask_token_id={mask!r} is outside 0..{vocab - 1}, the rows of the target's embedding")
    return mask


def windows(layer_types: list[str] | None, window: int | None, all_slide: bool = False) -> dict[str, Any]:
    """The keys of a native config."""
    if all_slide or (layer_types and set(layer_types) == {"sliding_attention"}):
        return {"sliding_window": window, "layer_types": None}
    slides = window is not None and "sliding_attention" in (layer_types or [])
    return {"sliding_window": window if slides else None, "layer_types": layer_types if slides else None}


def assemble(
    name: str, settings: dict[str, Any], facts: dict[str, Any], tensors: dict[str, Tensor], layer: dict[str, Any]
) -> Checkpoint:
    """The checkpoint of settings and tensors. Raises ValueError, one line, for what is not complete.

    name: of the checkpoint, for errors.
    settings, facts: of the drafter, but for its layers, and of its target.
    tensors: under native names; what is not the drafter's is removed.
    layer: the config of a layer, with the keys that every format has.
    """
    hidden = hf_common.integer(layer, "hidden_size", name)
    vocab = hf_common.integer(layer, "vocab_size", name)
    draft_vocab = hf_common.integer(layer, "draft_vocab_size", name, vocab)
    method = method_of(layer, set(tensors))
    if method == DSPARK:
        settings = DEFAULT_HEADS | settings
        hf_common.integer(settings, "markov_rank", name)
        if settings["markov_head_type"] not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"{name}: markov_head_type={settings['markov_head_type']!r}; vanilla, gated and rnn can be read")
        specdec = layer.get(hf_common.SPECDEC_KEY) or {}
        if (temperatures := specdec.get("confidence_temperatures")) is not None:
            settings["confidence_temperatures"] = temperatures
    elif settings.get("markov_rank"):
        raise ValueError(f"{name}: markov_rank={settings['markov_rank']}, and the weights lack 'markov_head.markov_w1.weight'")
    elif any(key.startswith("confidence_head.") for key in tensors):
        raise ValueError(f"{name}: a confidence head without a Markov head, which cannot be represented")
    copies = hf_common.take_copies(layer, tensors, hidden, vocab, name)
    if draft_vocab == vocab:
        tensors.pop("d2t", None)
    settings |= {
        "layer_type": "qwen3",
        "num_hidden_layers": hf_common.depth_of(layer, name),
        "geometry": hf_common.geometry_of(layer, name),
        "own_lm_head": "lm_head.weight" in tensors,
        "draft_vocab_size": draft_vocab,
    }
    hf_common.check_vocabulary(tensors, vocab, name)
    tensors.pop("t2d", None)
    hf_common.check_drafter(tensors, shapes(settings, hidden, vocab, method), hidden, draft_vocab, vocab, name)
    return Checkpoint(method, settings, facts, tensors, name, copies)


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    return hf_common.scales_embedding(checkpoint)


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    settings = checkpoint.config
    tensors = dict(checkpoint.tensors or {})
    vocab = hf_common.require(checkpoint, "vocab_size")
    check_layers(checkpoint)
    is_reduced = settings["draft_vocab_size"] < vocab
    in_deepspec = export.engine == DEEPSPEC
    config: dict[str, Any] = {
        "architectures": [Z_LAB if checkpoint.method == DFLASH and not in_deepspec else "Qwen3DSparkModel"],
        **layer_config(checkpoint),
        "block_size": settings["block_size"],
    }
    if num_layers := checkpoint.target.get("num_hidden_layers"):
        config["num_target_layers"] = num_layers
    if is_reduced:
        config["draft_vocab_size"] = settings["draft_vocab_size"]
    common = {
        "mask_token_id": settings["mask_token_id"],
        IDS: [i - 1 for i in settings["aux_hidden_state_layer_ids"]],
        "sample_from_anchor": settings["sample_from_anchor"],
    }
    if min(common[IDS]) < 0:
        raise ValueError(f"{checkpoint.name} taps layer 0, the embedding, which {IDS} cannot name; train with layers from 1 on")
    # whether blocks are causal in all layers or in none; unsaid, they are in the sliding ones alone
    causal = settings["causal"] if settings["causal"] or settings["sliding_window_non_causal"] else None
    if checkpoint.method == DFLASH and not in_deepspec:
        if settings["sample_from_anchor"]:
            raise ValueError(
                f"{checkpoint.name} drafts from the anchor (sample_from_anchor), which vLLM has for dspark alone; give "
                "format=deepspec, or train with train.drafter.sample_from_anchor=false"
            )
        config["dflash_config"] = common | ({} if causal is None else {"causal": causal})
    else:
        if in_deepspec and (settings["causal"] or settings["sliding_window"]):
            raise ValueError(f"{checkpoint.name}: DeepSpec has no causal blocks and no windows; give format=vllm")
        config |= common | ({} if causal is None else {"is_causal": causal})
        heads = {key: settings[key] for key in HEADS if key in settings}
        config |= heads or {"markov_rank": 0, "enable_confidence_head": False}
    copies = hf_common.scaled_embedding(checkpoint, export.target)
    if in_deepspec:
        if is_reduced or not settings["sample_from_anchor"]:
            raise ValueError(
                f"{checkpoint.name}: DeepSpec's drafters draft all tokens, from the anchor; give format=vllm, or train with "
                "train.drafter.draft_vocab_size=null train.drafter.sample_from_anchor=true"
            )
        if export.target is None:
            raise ValueError(
                f"{checkpoint.name}: DeepSpec's layout holds the target's embedding and output layer; give target="
            )
        shared = ["embed_tokens.weight", *([] if settings["own_lm_head"] else ["lm_head.weight"])]
        copies = hf_common.target_parts(checkpoint, export.target, *shared)
        config["num_anchors"] = 512
    tensors |= copies
    if "d2t" in tensors:
        tensors["t2d"] = hf_common.t2d_of(tensors["d2t"], vocab)
    hf_common.write_directory(directory, config, tensors, checkpoint, copies)


def check_layers(checkpoint: Checkpoint) -> None:
    """Raise ValueError for layers that no engine builds."""
    if checkpoint.config["layer_type"] != "qwen3":
        raise ValueError(
            f"{checkpoint.name} has {checkpoint.config['layer_type']} layers, and engines build Qwen3's; train with "
            "train.drafter.layer_type=qwen3"
        )


def layer_config(checkpoint: Checkpoint, rope_parameters: bool = False) -> dict[str, Any]:
    """The keys of a Qwen3's layers."""
    settings = checkpoint.config
    hidden = hf_common.require(checkpoint, "hidden_size")
    vocab = hf_common.require(checkpoint, "vocab_size")
    num_layers = settings["num_hidden_layers"]
    window = settings["sliding_window"]
    default = "full_attention" if window is None else "sliding_attention"
    config = hf_common.llama_config(settings["geometry"], hidden, num_layers, vocab, rope_parameters)
    del config["mlp_bias"]
    return {
        "model_type": "qwen3",
        **config,
        "layer_types": settings["layer_types"] or [default] * num_layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,
    }


# ------------------------------------------------------------------------------------------------ lint


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    tensors = check_weights(config, hf_common.read_tensors(directory), findings)
    findings.error("speculators", "format", "not of its format; export with format=speculators")
    findings.error("sglang", "format", "SGLang's rules for these drafters are not known here, so nothing is claimed")
    engines = ("vllm", DEEPSPEC)
    settings, _ = settings_of(config, "config.json")
    method = method_of(config, set(tensors))
    is_z_lab = Z_LAB in config["architectures"]
    if is_z_lab:
        findings.error(DEEPSPEC, "architecture", f"{Z_LAB} is z-lab's; export with format=deepspec")
    if is_z_lab and settings["sample_from_anchor"]:
        findings.error("vllm", "sample_from_anchor", "vLLM's DFlash fills in; train with sample_from_anchor=false")
    if not is_z_lab and method == DFLASH:
        findings.error("vllm", "markov_rank", "vLLM's DSpark has a Markov head, and there is none; export with format=vllm")
    if "mask_hidden" in tensors:
        findings.error("vllm", "mask_hidden", "mask_hidden stops the loader; remove it")
    check_taps(settings, findings, engines, target)
    check_sizes(tensors, settings, config, config, method, findings, engines, target)
    if not is_z_lab:
        for key in ("embed_tokens.weight", "lm_head.weight"):
            if key not in hf_common.shapes_of(directory):
                findings.error(DEEPSPEC, "names", f"no {key}, which DeepSpec does not take from the target; write a copy")


def check_taps(settings: dict[str, Any], findings: Findings, engines: tuple[str, ...], target: TargetFacts) -> None:
    ids = settings["aux_hidden_state_layer_ids"]
    if target.num_layers is not None and not 0 <= min(ids) <= max(ids) <= target.num_layers:
        text = f"the states that enter layers {ids} are outside 0..{target.num_layers}, the target's"
        findings.error(engines, "layer_ids", text)


def check_sizes(
    tensors: dict[str, Tensor],
    settings: dict[str, Any],
    config: dict[str, Any],
    layer: dict[str, Any],
    method: str,
    findings: Findings,
    engines: tuple[str, ...],
    target: TargetFacts,
) -> None:
    """Check what must be there, and of which shape, and what must fit the target.

    settings: as `settings_of` has them.
    config: with draft_vocab_size.
    layer: the layers' config.
    """
    geometry = check_layer(layer, findings, target)
    hidden = hf_common.integer(layer, "hidden_size", "config.json")
    vocab = hf_common.integer(layer, "vocab_size", "config.json")
    draft_vocab = hf_common.integer(config, "draft_vocab_size", "config.json", vocab)
    if target.hidden_size not in (None, hidden):
        findings.error(engines, "hidden_size", f"hidden_size is {hidden}, and the target's is {target.hidden_size}")
    check_embedding(tensors, hidden, vocab, findings, target)
    complete = DEFAULT_HEADS | settings
    complete |= {
        "layer_type": "qwen3",
        "num_hidden_layers": hf_common.integer(layer, "num_hidden_layers", "config.json", maximum=MAX_LAYERS),
        "geometry": geometry,
        "own_lm_head": "lm_head.weight" in tensors or draft_vocab < vocab,
        "draft_vocab_size": draft_vocab,
    }
    check_draft_vocabulary(tensors, draft_vocab, vocab, findings, engines)
    rest = {key: tensor for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
    check_names(rest, shapes(complete, hidden, vocab, method), findings, engines)
