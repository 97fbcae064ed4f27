"""Raw EAGLE-3 and raw P-EAGLE: a Llama's config.json with a few keys more, and weights without a prefix.

One directory loads in vLLM 0.33 (`Eagle3LlamaForCausalLM`, `Eagle3Qwen3ForCausalLM`) and in SGLang 0.5.23
(`LlamaForCausalLMEagle3`), where both can represent the drafter; `lint` says where not. What the two read differently is
written in both ways:

    layer ids          vLLM: top level, id i enters layer i. SGLang: inside `eagle_config`, id i leaves layer i. Default layers
                       need neither.
    layers 1, 2, ...   the first norm is `input_layernorm` in vLLM, `hidden_norm` in SGLang; each ignores the other's.
    draft_vocab_size   null: the target's output layer (SGLang needs the key). A number: the drafter's own `lm_head`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.checkpoint import hf_common, raw_eagle
from specdec.checkpoint.hf_common import MASK_KEYS, Export, Shapes
from specdec.checkpoint.lint import Findings, TargetFacts, check_embedding, check_layer, check_names, check_weights
from specdec.checkpoint.native import LAYER_IDS, Checkpoint, default_ids, engine_default_ids
from specdec.hub import MAX_LAYERS

PRECEDENCE = 2
EAGLE3 = "eagle3"
PEAGLE = "peagle"
WRITES = {EAGLE3: {"vllm": "vllm", "sglang": "sglang"}, PEAGLE: {"vllm": "vllm"}}
SGLANG_CLASS = "LlamaForCausalLMEagle3"
# the type of layer of each architecture
ARCHITECTURES = {
    SGLANG_CLASS: "llama", "Eagle3LlamaForCausalLM": "llama", "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama", "Eagle3MiniMaxM2ForCausalLM": "llama", "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama", "Eagle3Qwen3ForCausalLM": "qwen3", "PeagleQwen3ForCausalLM": "qwen3",
}  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
KNOWN = {
    LAYER_IDS, *FLAGS, *MASK_KEYS, "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "eagle_config",
    "use_aux_norm", "num_depths",
}  # fmt: skip
# options of `eagle_config`, and the values with which they do nothing
EAGLE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,), "next_layer_regular": (True,), "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1,),
}  # fmt: skip
OLD_NAMES = {"midlayer.": "layers.0.", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    """By its architecture; that of a plain Llama is EAGLE-3 too if it has a draft vocabulary or taps several layers."""
    has_keys = bool({"draft_vocab_size", LAYER_IDS, "eagle_config"} & set(config))
    is_llama = "LlamaForCausalLM" in (config.get("architectures") or [])
    return architecture_of(config) is not None or (is_llama and has_keys and raw_eagle.is_drafter(names))


def architecture_of(config: dict[str, Any]) -> str | None:
    return next((name for name in config.get("architectures") or [] if name in ARCHITECTURES), None)


def mask_token(config: dict[str, Any]) -> Any:
    """The value of the first key that names a mask token; None for EAGLE-3."""
    return next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)


def method_of(config: dict[str, Any], names: set[str]) -> str:
    """P-EAGLE has a mask token and a learned hidden state for it."""
    return EAGLE3 if mask_token(config) is None and "mask_hidden" not in names else PEAGLE


def shapes(config: dict[str, Any], hidden: int, num_taps: int, method: str) -> Shapes:
    """Name and shape of every tensor of a native EAGLE-3 or P-EAGLE drafter."""
    geometry = config["geometry"]
    qk_norm = config["layer_type"] == "qwen3"
    norms = ("input_layernorm", "post_attention_layernorm")
    table: Shapes = {"fc.weight": (hidden, num_taps * hidden), "norm.weight": (hidden,)}
    table |= hf_common.layer_shapes("layers.0", geometry, hidden, 2 * hidden, (*norms, "hidden_norm"), qk_norm)
    for i in range(1, config.get("num_hidden_layers", 1)):
        table |= hf_common.layer_shapes(f"layers.{i}", geometry, hidden, hidden, norms, qk_norm)
    if config["norm_before_fc"]:
        table["input_norm.weight"] = (num_taps * hidden,)
    if config["fc_norm"]:
        table |= {f"fc_norm.{j}.weight": (hidden,) for j in range(num_taps)}
    if config["own_lm_head"]:
        table["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    if method == PEAGLE:
        table["mask_hidden"] = (1, 1, num_taps * hidden)
    return table


def current_name(key: str) -> str:
    """The name that a tensor of older files has today."""
    for old, new in OLD_NAMES.items():
        key = key.replace(old, new)
    return key


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    if config.get("fc_norm") is None and config.get("use_aux_norm"):
        config = config | {"fc_norm": True}
    hf_common.refuse_options(config, KNOWN, name)
    architecture = architecture_of(config)
    layer_type = "qwen3" if config.get("model_type") == "qwen3" else "llama"
    if architecture is not None:
        layer_type = ARCHITECTURES[architecture]
    tensors = {current_name(key): tensor for key, tensor in hf_common.read_tensors(directory).items()}
    nested = config.get("eagle_config") or {}
    for key, value in nested.items():
        if key not in (LAYER_IDS, "norm_before_fc") and value is not None and value not in EAGLE_OPTIONS.get(key, ()):
            raise ValueError(f"{name}: eagle_config.{key}={value!r} cannot be represented")
    facts = hf_common.target_facts(config, name)
    ids = layer_ids(config, facts.get("num_hidden_layers"), name)
    flags = {key: bool(config.get(key)) for key in FLAGS}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
    return assemble(name, config, tensors, ids, flags, layer_type, facts)


def assemble(
    name: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    ids: list[int] | None,
    flags: dict[str, bool],
    layer_type: str,
    facts: dict[str, Any],
) -> Checkpoint:
    """The checkpoint of a config and tensors. Raises ValueError, one line, for what is not complete.

    name: of the checkpoint, for errors.
    config: keys of the layer and of the drafter.
    tensors: under native names; what is not the drafter's is removed.
    ids: tapped layers; None for the engines' default.
    flags: FLAGS.
    layer_type: llama or qwen3.
    facts: about the target.
    """
    hidden = hf_common.integer(config, "hidden_size", name)
    vocab = hf_common.integer(config, "vocab_size", name)
    draft_vocab = hf_common.integer(config, "draft_vocab_size", name, vocab)
    copies = hf_common.take_copies(config, tensors, hidden, vocab, name)
    num_layers = hf_common.depth_of(config, name)
    settings: dict[str, Any] = {
        LAYER_IDS: ids,
        "layer_type": layer_type,
        "num_hidden_layers": num_layers,
        **flags,
        "geometry": hf_common.geometry_of(config, name),
        "own_lm_head": "lm_head.weight" in tensors,  # without one vLLM shares the target's, whatever draft_vocab_size is
        "draft_vocab_size": draft_vocab,
    }
    method = method_of(config, set(tensors))
    if method == PEAGLE:
        mask = mask_token(config)
        if not isinstance(mask, int) or not 0 <= mask < vocab:
            raise ValueError(f"{name}: P-EAGLE's mask token is {mask!r}; give an id of 0..{vocab - 1} as mask_token_id")
        settings["mask_token_id"] = mask
    num_depths = (config.get(hf_common.SPECDEC_KEY) or {}).get("num_depths")
    num_depths = config.get("num_depths") if num_depths is None else num_depths
    if num_depths is not None:
        if method != PEAGLE:
            raise ValueError(
                f"{name}: num_depths={num_depths} is P-EAGLE's, and the weights are those of eagle3; remove the key"
            )
        settings["num_depths"] = hf_common.integer({"num_depths": num_depths}, "num_depths", name)

    hf_common.check_vocabulary(tensors, vocab, name)
    tensors.pop("t2d", None)
    for i in range(1, num_layers):
        sglang_norm = tensors.pop(f"layers.{i}.hidden_norm.weight", None)
        if sglang_norm is None:
            continue
        vllm_norm = tensors.setdefault(f"layers.{i}.input_layernorm.weight", sglang_norm)
        if not torch.equal(vllm_norm, sglang_norm):
            raise ValueError(
                f"{name}: layers.{i}.hidden_norm.weight is not input_layernorm.weight: vLLM reads one and SGLang the other"
            )
    num_taps = len(ids) if ids is not None else hf_common.integer(config, "num_aux_hidden_states", name, 3, maximum=MAX_LAYERS)
    if config.get("num_aux_hidden_states") not in (None, num_taps):
        count = config["num_aux_hidden_states"]
        raise ValueError(f"{name}: num_aux_hidden_states={count}, and {LAYER_IDS} names {num_taps} layers")
    hf_common.check_drafter(tensors, shapes(settings, hidden, num_taps, method), hidden, draft_vocab, vocab, name)
    return Checkpoint(method, settings, facts, tensors, name, copies)


def layer_ids(config: dict[str, Any], num_layers: int | None, name: str) -> list[int] | None:
    """Tapped layers, id i entering layer i; None where the engines' default is meant and the target's depth is not known."""
    top = config.get(LAYER_IDS)
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    if top is None and nested is None:
        return None if num_layers is None else engine_default_ids(num_layers, name)
    for ids in (top, nested):
        are_ids = isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if ids is not None and (not are_ids or ids != sorted(set(ids))):
            raise ValueError(
                f"{name}: {LAYER_IDS}={ids!r} is no ascending list of distinct layers, as engines concatenate them"
            )
    shifted = None if nested is None else [i + 1 for i in nested]
    if top is not None and shifted not in (None, top):
        raise ValueError(
            f"{name}: {LAYER_IDS} is {top}, and eagle_config has {nested}, which means {shifted}; vLLM reads one, SGLang the "
            "other"
        )
    return top if top is not None else shifted


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    return hf_common.scales_embedding(checkpoint)


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    settings = checkpoint.config
    tensors = dict(checkpoint.tensors or {})
    hidden = hf_common.require(checkpoint, "hidden_size")
    vocab = hf_common.require(checkpoint, "vocab_size")
    num_layers = settings.get("num_hidden_layers", 1)
    layer_type = settings["layer_type"]
    config: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if layer_type == "qwen3" else SGLANG_CLASS],
        "model_type": layer_type,
        **hf_common.llama_config(settings["geometry"], hidden, num_layers, vocab),
        "draft_vocab_size": settings["draft_vocab_size"] if settings["own_lm_head"] else None,
        **{key: settings[key] for key in FLAGS},
    }
    ids = settings[LAYER_IDS]
    num_target_layers = checkpoint.target.get("num_hidden_layers")
    if ids is not None and (num_target_layers is None or ids != default_ids(num_target_layers)):
        config |= {LAYER_IDS: ids, "eagle_config": {LAYER_IDS: [i - 1 for i in ids]}, "num_aux_hidden_states": len(ids)}
    if checkpoint.method == PEAGLE:
        config["ptd_token_id"] = settings["mask_token_id"]
    copies = hf_common.scaled_embedding(checkpoint, export.target)
    tensors |= copies
    if "d2t" in tensors:
        tensors["t2d"] = hf_common.t2d_of(tensors["d2t"], vocab)
    for i in range(1, num_layers):
        tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"].clone()
    hf_common.write_directory(directory, config, tensors, checkpoint, copies)


# ------------------------------------------------------------------------------------------------ lint


@dataclass(frozen=True)
class Sizes:
    """What a config.json says of the drafter.

    hidden, target_hidden: width of its states, and of the target's states that `fc` reads.
    vocab, draft_vocab: how many tokens the target has, and how many can be drafted.
    num_taps: tapped layers; None where the ids cannot be read.
    num_layers: of the drafter.
    geometry: of its layers.
    layer_type: llama or qwen3.
    flags: FLAGS.
    """

    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int
    num_taps: int | None
    num_layers: int
    geometry: dict[str, Any]
    layer_type: str
    flags: dict[str, bool]


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    engines = ("vllm", "sglang")
    tensors = check_weights(config, hf_common.read_tensors(directory), findings)
    tensors = {current_name(name): tensor for name, tensor in tensors.items()}
    findings.error("speculators", "format", "raw EAGLE-3: speculators reads its own format; export with format=speculators")
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in {*ARCHITECTURES, "LlamaForCausalLM"}:
        findings.error("vllm", "architecture", f"architectures is [{architecture!r}]; use {SGLANG_CLASS}")
    if architecture != SGLANG_CLASS:
        text = f"architectures is [{architecture!r}]; SGLang knows {SGLANG_CLASS} alone"
        findings.error("sglang", "architecture", text)
    geometry = check_layer(config, findings, target)
    hidden = config["hidden_size"]
    vocab = config.get("vocab_size") or 0
    target_hidden = check_target_hidden(config, hidden, findings, engines, target)
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        findings.error("sglang", "hidden_size", "target_hidden_size is null, which SGLang multiplies; remove the key")
    layer_type = ARCHITECTURES.get(architecture or "", "llama")
    if any(name.endswith("q_norm.weight") for name in tensors):
        text = "q_norm and k_norm: SGLang's layer has none, and ignores them; train layer_type=llama"
        findings.error("sglang", "qwen3", text)
        if layer_type != "qwen3":
            text = f"q_norm and k_norm, and {architecture} has none; say Eagle3Qwen3ForCausalLM"
            findings.error("vllm", "qwen3", text)
    nested = config.get("eagle_config") or {}
    flags = {key: bool(config.get(key)) for key in FLAGS}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
    flags["fc_norm"] = flags["fc_norm"] or bool(config.get("use_aux_norm"))
    check_flags(config, flags, findings, engines)
    if config.get("tie_word_embeddings"):
        findings.error("sglang", "lm_head", "tie_word_embeddings=true: the embedding would be the output layer; write false")
    draft_vocab = config.get("draft_vocab_size")
    if "draft_vocab_size" not in config:
        findings.error("sglang", "vocabulary", "no draft_vocab_size: SGLang stops; write null for the target's output layer")
    elif draft_vocab is None and "lm_head.weight" in tensors:
        findings.error("sglang", "lm_head", "draft_vocab_size is null: SGLang replaces lm_head by the target's; write its rows")
    elif draft_vocab == vocab and "lm_head.weight" not in tensors:
        text = f"draft_vocab_size={draft_vocab} without lm_head.weight, which would stay random; write null"
        findings.error("sglang", "lm_head", text)
    draft_vocab = vocab if draft_vocab is None else draft_vocab
    check_draft_vocabulary(tensors, draft_vocab, vocab, findings, engines)

    num_taps = _check_layer_ids(config, tensors, target_hidden, findings, target)
    if method_of(config, set(tensors)) == PEAGLE:
        check_mask(config, tensors, findings)
        text = 'serve it with "parallel_drafting": true, without which vLLM takes it for EAGLE-3'
        findings.warn("vllm", "parallel_drafting", text)
        findings.error("sglang", "peagle", "P-EAGLE: SGLang drafts one token at a time only; vLLM serves it")
    num_layers = hf_common.depth_of(config, "config.json")
    sizes = Sizes(hidden, target_hidden, vocab, draft_vocab, num_taps, num_layers, geometry, layer_type, flags)
    check_table(tensors, sizes, findings, engines, target)


def check_target_hidden(
    config: dict[str, Any], hidden: int, findings: Findings, engines: tuple[str, ...], target: TargetFacts
) -> int:
    """Check the width of the states that `fc` reads, and return it. hidden: that of the drafter."""
    width = config.get("target_hidden_size") or hidden
    if target.hidden_size not in (None, width):
        text = f"hidden_size is {width}, and the target's {target.hidden_size}; write target_hidden_size={target.hidden_size}"
        findings.error(engines, "hidden_size", text)
    return int(width)


def check_flags(config: dict[str, Any], flags: dict[str, bool], findings: Findings, engines: tuple[str, ...]) -> None:
    """Warn of keys that mean something else in another engine."""
    if "norm_before_residual" not in config:
        text = "no norm_before_residual: raw vLLM and speculators take false, vLLM's speculators format true; write it"
        findings.warn(engines, "norm_before_residual", text)
    if flags["norm_before_residual"] and "sglang" in engines:
        text = "norm_before_residual=true: SGLang adds the state without the norm; train with false to share with it"
        findings.error("sglang", "norm_before_residual", text)
    if flags["norm_output"]:
        text = "norm_output=true feeds the normed state back; SpecForge means another thing by it and feeds back the other"
        findings.warn(engines, "norm_output", text)
    if flags["norm_before_fc"] and flags["fc_norm"]:
        for engine in engines:
            if engine == "speculators":
                findings.error(engine, "norms", "norm_before_fc and fc_norm are both true; it refuses")
            else:
                findings.warn(engine, "norms", "norm_before_fc and fc_norm are both true; rarely tried")


def check_draft_vocabulary(
    tensors: dict[str, Tensor], draft_vocab: int, vocab: int, findings: Findings, engines: tuple[str, ...]
) -> None:
    """Check that d2t is there if, and only if, some tokens cannot be drafted, and then an output layer with it."""
    if draft_vocab == vocab:
        if "d2t" in tensors and "vllm" in engines:
            text = "d2t is there although every token can be drafted"
            findings.error("vllm", "d2t", f"{text}: vLLM has no place for it; remove it")
            findings.warn([engine for engine in engines if engine != "vllm"], "d2t", f"{text}; remove it")
        return
    if draft_vocab > vocab:
        findings.error(engines, "vocabulary", f"draft_vocab_size={draft_vocab} is more than vocab_size={vocab}")
        return
    if "lm_head.weight" not in tensors:
        text = f"draft_vocab_size={draft_vocab} of {vocab} without lm_head.weight: the target's output layer would be taken"
        findings.error(engines, "lm_head", text)
    if "d2t" not in tensors:
        text = f"draft_vocab_size={draft_vocab} of {vocab} without d2t: drafts would be the first {draft_vocab} ids"
        findings.error(engines, "d2t", f"{text}; write the offsets")
        return
    d2t = tensors["d2t"]
    if d2t.is_floating_point():
        findings.error(engines, "d2t", f"d2t is {d2t.dtype}; ids are int64")
        return
    if tuple(d2t.shape) != (draft_vocab,):
        findings.error(engines, "d2t", f"d2t is {list(d2t.shape)}, and draft_vocab_size={draft_vocab} asks for {[draft_vocab]}")
        return
    try:
        hf_common.check_vocabulary({"d2t": d2t}, vocab, "d2t")
    except ValueError as error:
        findings.error(engines, "d2t", str(error).removeprefix("d2t: "))
        return
    t2d = tensors.get("t2d")
    if t2d is None:
        if "speculators" in engines:
            findings.error("speculators", "t2d", "no t2d beside d2t: the package needs both")
        return
    if tuple(t2d.shape) != (vocab,):
        findings.error(engines, "t2d", f"t2d is {list(t2d.shape)}, and the target has {vocab} tokens; write {[vocab]}")
        return
    try:
        hf_common.check_vocabulary({"d2t": d2t, "t2d": t2d}, vocab, "t2d")
    except ValueError as error:
        for engine in engines:  # the others do not read t2d
            severity = findings.error if engine == "speculators" else findings.warn
            severity(engine, "t2d", str(error).removeprefix("t2d: "))


def _check_layer_ids(
    config: dict[str, Any], tensors: dict[str, Tensor], target_hidden: int, findings: Findings, target: TargetFacts
) -> int | None:
    """Check that both engines tap the same layers. Returns how many, by the ids or else by the columns of `fc`; None where the
    ids cannot be read."""
    engines = ("vllm", "sglang")
    top = config.get(LAYER_IDS)
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    for where, ids in (("", top), (" in eagle_config", nested)):
        if ids is not None and (not isinstance(ids, list) or not all(isinstance(i, int) for i in ids) or not ids):
            findings.error(engines, "layer_ids", f"{LAYER_IDS}{where} is {ids!r}; give a list of layers")
            return None
        if ids is not None and ids != sorted(set(ids)):
            text = f"{LAYER_IDS}{where} is {ids}: engines concatenate ascending and once each; train fc in that order"
            findings.error(engines, "layer_ids", text)
    depth = target.num_layers
    default = None if depth is None else default_ids(depth)
    tapped = top if top is not None else [i + 1 for i in nested] if nested is not None else None
    if tapped is None:
        if default is not None and not 0 < default[0] < default[1] < default[2]:
            text = f"no {LAYER_IDS}, and the default {default} of {depth} layers is not three of them; write the ids"
            findings.error(engines, "layer_ids", text)
        return _check_num_taps(config, tensors, target_hidden, 3, None, findings)
    if top is None and tapped != default:
        text = f"{LAYER_IDS} is in eagle_config alone, where vLLM takes other layers; write {tapped} at top level"
        findings.error("vllm", "layer_ids", text)
    if nested is None and top != default:
        text = f"{LAYER_IDS} at top level is not read by SGLang; write {[i - 1 for i in tapped]} in eagle_config too"
        findings.error("sglang", "layer_ids", text)
    if top is not None and nested is not None and top != [i + 1 for i in nested]:
        text = f"{LAYER_IDS} is {top} and eagle_config's {nested}, which counts outputs and must be one less"
        findings.error("sglang", "layer_ids", text)
    if depth is not None and not 0 <= min(tapped) <= max(tapped) <= depth:
        findings.error(engines, "layer_ids", f"layers {tapped} are outside 0..{depth}, the target's")
    if depth is not None and depth in tapped:
        findings.error("sglang", "layer_ids", f"layer {depth} is the last one's output, which SGLang does not capture")
    if len(tapped) == 1:
        text = "one tapped layer: SGLang runs fc only where its width is not the drafter's; tap two"
        findings.error("sglang", "layer_ids", text)
    implied = len(nested) if nested is not None else 3
    return _check_num_taps(config, tensors, target_hidden, len(tapped), implied, findings)


def _check_num_taps(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target_hidden: int,
    num_taps: int,
    implied: int | None,
    findings: Findings,
) -> int:
    """Check that engines count as many tapped layers, and that `fc` has columns for them. Returns how many it has columns for.

    config, tensors: of the directory.
    target_hidden: width of the states that `fc` reads.
    num_taps: by the ids.
    implied: how many engines count where config.json has no number; None for as many.
    """
    engines = ("vllm", "sglang")
    counted = config.get("num_aux_hidden_states")
    counted = implied if counted is None else counted
    if counted not in (None, num_taps):
        text = f"{num_taps} layers are tapped, and engines count {counted}; write num_aux_hidden_states={num_taps}"
        findings.error(engines, "num_aux_hidden_states", text)
    expected = num_taps * target_hidden
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else expected
    if columns == expected:
        return num_taps
    text = f"fc.weight reads {columns} values, and {num_taps} layers of {target_hidden} are {expected}; write the ids"
    findings.error(engines, "layer_ids", text)
    return max(1, columns // target_hidden)


def check_mask(config: dict[str, Any], tensors: dict[str, Tensor], findings: Findings) -> None:
    """Check what P-EAGLE needs for the tokens that are not there yet: a mask token and its hidden state."""
    engines = ("vllm", "speculators")
    if not any(isinstance(config.get(key), int) for key in MASK_KEYS):
        text = f"mask_hidden without the mask token's id ({', '.join(MASK_KEYS)}); vLLM stops"
        findings.error(engines, "mask_token_id", text)
    if "mask_hidden" not in tensors:
        findings.error(engines, "mask_hidden", "a mask token's id without mask_hidden [1, 1, layers * width]")


def check_table(
    tensors: dict[str, Tensor], sizes: Sizes, findings: Findings, engines: tuple[str, ...], target: TargetFacts
) -> None:
    """Check names and shapes of all tensors."""
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    settings = {
        "geometry": sizes.geometry,
        "num_hidden_layers": sizes.num_layers,
        "draft_vocab_size": sizes.draft_vocab,
        "layer_type": sizes.layer_type,
        "own_lm_head": "lm_head.weight" in tensors,
        **sizes.flags,
    }
    method = PEAGLE if "mask_hidden" in tensors else EAGLE3
    table = shapes(settings, sizes.hidden, sizes.num_taps or 3, method)
    if sizes.target_hidden != sizes.hidden and sizes.num_taps:
        for name, shape in table.items():
            if name in ("fc.weight", "input_norm.weight"):
                table[name] = (*shape[:-1], sizes.num_taps * sizes.target_hidden)
            elif name.startswith("fc_norm."):
                table[name] = (sizes.target_hidden,)
    for i in range(1, sizes.num_layers):
        vllm_name = f"layers.{i}.input_layernorm.weight"
        sglang_name = f"layers.{i}.hidden_norm.weight"
        sglang_norm = tensors.pop(sglang_name, None)
        if sglang_norm is None:
            if "sglang" in engines:
                text = f"the first norm of layer {i} is called {sglang_name} by SGLang; write it under both names"
                findings.error("sglang", "layers", text)
        elif vllm_name not in tensors:
            text = f"vLLM calls {sglang_name} {vllm_name}; write it under both names"
            findings.error([engine for engine in engines if engine != "sglang"], "layers", text)
            table.pop(vllm_name)
        elif not torch.equal(tensors[vllm_name], sglang_norm):
            text = f"{vllm_name} and {sglang_name} differ: vLLM reads one and SGLang the other"
            findings.error(engines, "layers", text)
    check_embedding(tensors, sizes.hidden, sizes.vocab, findings, target)
    check_names(tensors, table, findings, tuple(engine for engine in engines if engine != "sglang"))
    if "sglang" in engines:  # its loader also reads names with the prefix
        unprefixed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        check_names(unprefixed, table, findings, ("sglang",))
