"""Raw EAGLE-3 and raw P-EAGLE: a Llama's config.json with a few keys more, and weights without a prefix.

One directory loads in vLLM 0.33 (`Eagle3LlamaForCausalLM`, `Eagle3Qwen3ForCausalLM`) and in SGLang 0.5.23
(`LlamaForCausalLMEagle3`), where both can represent the drafter; `specdec.checkpoint.lint` says where not. What the two take
differently is written in both ways:

    layer ids          vLLM: top level, id i enters layer i. SGLang: inside `eagle_config`, id i leaves layer i. Default layers
                       need neither.
    layers 1, 2, ...   the first norm is `input_layernorm` in vLLM, `hidden_norm` in SGLang; each passes over the other's.
    draft_vocab_size   null: the target's output layer (SGLang needs the key). A number: the drafter's own `lm_head`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.checkpoint import hf_common, raw_eagle
from specdec.checkpoint.hf_common import Shapes
from specdec.checkpoint.native import IDS, Checkpoint, default_ids, engines_default
from specdec.model.target import CausalLM

WRITES = {"eagle3": ("vllm", "sglang"), "peagle": ("vllm",)}
ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "llama", "Eagle3LlamaForCausalLM": "llama", "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama", "Eagle3MiniMaxM2ForCausalLM": "llama", "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama", "Eagle3Qwen3ForCausalLM": "qwen3", "PeagleQwen3ForCausalLM": "qwen3",
}  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # vLLM's order
KNOWN = {
    IDS,
    *FLAGS,
    *MASK_KEYS,
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "eagle_config",
    "use_aux_norm",
    "num_depths",
}
OLD_NAMES = {"midlayer.": "layers.0.", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    """By its architecture; that of a plain Llama is EAGLE-3 too if it has a draft vocabulary or reads several layers."""
    own = {"draft_vocab_size", IDS, "eagle_config"} & set(config)
    plain = "LlamaForCausalLM" in (config.get("architectures") or []) and raw_eagle.drafts(names)
    return architecture_of(config) is not None or (plain and bool(own))


def architecture_of(config: dict[str, Any]) -> str | None:
    return next((name for name in config.get("architectures") or [] if name in ARCHITECTURES), None)


def shapes(config: dict[str, Any], hidden: int, taps: int, peagle: bool) -> Shapes:
    """Name and shape of every tensor of a native EAGLE-3 or P-EAGLE drafter."""
    geometry, qk_norm = config["geometry"], config["layer_type"] == "qwen3"
    table: Shapes = {"fc.weight": (hidden, taps * hidden), "norm.weight": (hidden,)}
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    table |= hf_common.layer_shapes("layers.0", geometry, hidden, 2 * hidden, (*norms, "hidden_norm"), qk_norm)
    for i in range(1, config.get("num_hidden_layers", 1)):
        table |= hf_common.layer_shapes(f"layers.{i}", geometry, hidden, hidden, norms, qk_norm)
    if config["norm_before_fc"]:
        table["input_norm.weight"] = (taps * hidden,)
    if config["fc_norm"]:
        table |= {f"fc_norm.{j}.weight": (hidden,) for j in range(taps)}
    if config["own_lm_head"]:
        table["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    if peagle:
        table["mask_hidden"] = (1, 1, taps * hidden)
    return table


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    if config.get("fc_norm") is None and config.get("use_aux_norm"):
        config = config | {"fc_norm": True}
    hf_common.refuse_options(config, KNOWN, name)
    architecture = architecture_of(config)
    layer_type = "qwen3" if config.get("model_type") == "qwen3" else "llama"
    if architecture is not None and ARCHITECTURES[architecture] != layer_type:
        layer_type = ARCHITECTURES[architecture]
    tensors = {renamed(key): tensor for key, tensor in hf_common.read_tensors(directory).items()}
    nested = config.get("eagle_config") or {}
    for key, value in nested.items():
        neutral: dict[str, tuple[Any, ...]] = {
            "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
            "use_mtp_layernorm": (False,), "next_layer_regular": (True,), "parallel_draft_step": (1,),
            "parallel_draft_heads_num_layers": (1,),
        }  # fmt: skip
        if key not in (IDS, "norm_before_fc") and value is not None and value not in neutral.get(key, ()):
            raise ValueError(f"{name}: eagle_config.{key}={value!r} cannot be represented")
    facts = hf_common.facts_of(config, name)
    ids = layer_ids(config, facts.get("num_hidden_layers"), name)
    flags = {key: bool(config.get(key)) for key in FLAGS}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
    return assembled(name, config, tensors, ids, flags, layer_type, facts)


def assembled(
    name: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    ids: list[int] | None,
    flags: dict[str, bool],
    layer_type: str,
    facts: dict[str, Any],
) -> Checkpoint:
    """The checkpoint that a config (the layer's and the drafter's keys in one) and tensors with native names make, if they are
    whole. Raises ValueError for what is not."""
    hidden = hf_common.integer(config, "hidden_size", name)
    vocab = hf_common.integer(config, "vocab_size", name)
    draft_vocab = hf_common.integer(config, "draft_vocab_size", name, vocab)
    copies = hf_common.copies_in(config, tensors, hidden, vocab, name)
    # a number for draft_vocab_size and no lm_head: vLLM shares the target's
    own: dict[str, Any] = {
        IDS: ids,
        "layer_type": layer_type,
        "num_hidden_layers": hf_common.integer(config, "num_hidden_layers", name, 1, most=hf_common.DEEPEST),
        **flags,
        "geometry": hf_common.geometry_of(config, name),
        "own_lm_head": "lm_head.weight" in tensors,
        "draft_vocab_size": draft_vocab,
    }
    mask = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    peagle = mask is not None or "mask_hidden" in tensors
    if peagle:
        if not isinstance(mask, int) or not 0 <= mask < vocab:
            raise ValueError(f"{name}: P-EAGLE's mask token is {mask!r}; give an id of 0..{vocab - 1} as mask_token_id")
        own["mask_token_id"] = mask
    depths = (config.get(hf_common.OURS) or {}).get("num_depths")
    depths = config.get("num_depths") if depths is None else depths
    if depths is not None:
        if not peagle:
            raise ValueError(f"{name}: num_depths={depths} is P-EAGLE's, and the weights are those of eagle3; remove the key")
        own["num_depths"] = hf_common.integer({"num_depths": depths}, "num_depths", name)

    hf_common.check_vocabulary(tensors, vocab, name)
    tensors.pop("t2d", None)
    for i in range(1, own["num_hidden_layers"]):  # SGLang's name for a norm that vLLM calls input_layernorm
        theirs = tensors.pop(f"layers.{i}.hidden_norm.weight", None)
        mine = tensors.setdefault(f"layers.{i}.input_layernorm.weight", theirs) if theirs is not None else None
        if mine is not theirs and not torch.equal(mine, theirs):  # type: ignore[arg-type]
            raise ValueError(
                f"{name}: layers.{i}.hidden_norm.weight is not input_layernorm.weight: vLLM reads one and SGLang the other"
            )
    taps = len(ids) if ids is not None else hf_common.integer(config, "num_aux_hidden_states", name, 3, most=hf_common.DEEPEST)
    if config.get("num_aux_hidden_states") not in (None, taps):
        raise ValueError(f"{name}: num_aux_hidden_states={config['num_aux_hidden_states']}, and {IDS} names {taps} layers")
    table = shapes(own, hidden, taps, peagle)
    if draft_vocab < vocab:
        table |= {"d2t": (draft_vocab,), "lm_head.weight": (draft_vocab, hidden)}
    elif draft_vocab > vocab:
        raise ValueError(f"{name}: draft_vocab_size={draft_vocab} is more than vocab_size={vocab}, the target's")
    hf_common.check_tensors(tensors, table, name)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
    return Checkpoint("peagle" if peagle else "eagle3", own, facts, tensors, name, copies)


def renamed(key: str) -> str:
    for old, new in OLD_NAMES.items():
        key = key.replace(old, new)
    return key


def layer_ids(config: dict[str, Any], num_layers: int | None, name: str) -> list[int] | None:
    """Tapped layers, id i entering layer i; None where the engines' default is meant and the target's depth is not known."""
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    if top is None and nested is None:
        return None if num_layers is None else engines_default(num_layers, name)
    for given in (top, nested):
        whole = isinstance(given, list) and given and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
        if given is not None and (not whole or given != sorted(set(given))):
            raise ValueError(f"{name}: {IDS}={given!r} is no ascending list of distinct layers, as engines concatenate them")
    shifted = None if nested is None else [i + 1 for i in nested]
    if top is not None and shifted not in (None, top):
        raise ValueError(
            f"{name}: {IDS} is {top}, and eagle_config has {nested}, which means {shifted}; vLLM reads one, SGLang the other"
        )
    return top if top is not None else shifted


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
    qwen3 = own["layer_type"] == "qwen3"
    num_layers = own.get("num_hidden_layers", 1)
    config: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if qwen3 else "llama",
        **hf_common.hf_layer(own["geometry"], hidden, num_layers, vocab),
        "draft_vocab_size": own["draft_vocab_size"] if own["own_lm_head"] else None,
        **{key: own[key] for key in FLAGS},
    }
    if (ids := own[IDS]) is not None and (
        "num_hidden_layers" not in checkpoint.target or ids != default_ids(checkpoint.target["num_hidden_layers"])
    ):
        config |= {IDS: ids, "eagle_config": {IDS: [i - 1 for i in ids]}, "num_aux_hidden_states": len(ids)}
    if checkpoint.method == "peagle":
        config["ptd_token_id"] = own["mask_token_id"]
    tensors |= (copied := hf_common.own_embedding(checkpoint, target))
    if "d2t" in tensors:
        tensors["t2d"] = hf_common.t2d_of(tensors["d2t"], vocab)
    for i in range(1, num_layers):
        tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"].clone()
    hf_common.write_directory(directory, config, tensors, checkpoint, copied)
