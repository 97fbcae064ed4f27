"""Raw EAGLE-1 (and EAGLE-2, which is trained the same): a Llama's config.json, and weights without a prefix.

Loads in vLLM 0.33 (`EagleLlamaForCausalLM`) and SGLang 0.5.23 (`LlamaForCausalLMEagle`), which need different architectures.
vLLM's `fc` has no bias and drops one silently; SGLang's has one, which stays random where the file holds none: a bias of zeros
is written, which is right in both. Neither has an output layer of its own, nor a first norm in layer 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.checkpoint import hf_common
from specdec.checkpoint.hf_common import Export, Shapes
from specdec.checkpoint.lint import ENGINES, Findings, TargetFacts, check_embedding, check_layer, check_names, check_weights
from specdec.checkpoint.native import Checkpoint

PRECEDENCE = 3
METHOD = "eagle"
WRITES = {METHOD: {"vllm": "vllm", "sglang": "sglang"}}
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}  # as written
VLLM_CLASS = "EagleLlamaForCausalLM"


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    """By the architecture of a Llama, and the tensors of a drafter."""
    architectures = llama_config(config).get("architectures") or ["LlamaForCausalLM"]
    return bool({*ARCHITECTURES.values(), VLLM_CLASS} & set(architectures)) and is_drafter(names)


def is_drafter(names: set[str]) -> bool:
    """Whether a drafter's tensors are there: `fc`, or layers without the prefix that a language model's have."""
    return any(name.removeprefix("model.") == "fc.weight" or name.startswith(("layers.0.", "midlayer.")) for name in names)


def llama_config(config: dict[str, Any]) -> dict[str, Any]:
    """The Llama's config; vLLM also reads it from inside one of type `eagle`."""
    inner = config.get("model")
    if config.get("model_type") != "eagle" or not isinstance(inner, dict):
        return config
    return inner | {key: value for key, value in config.items() if key not in ("model", "model_type", "architectures")}


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return METHOD


def shapes(geometry: dict[str, Any], hidden: int) -> Shapes:
    """Name and shape of every tensor of a native EAGLE-1 drafter, but for an output layer."""
    layer = hf_common.layer_shapes("layers.0", geometry, hidden, hidden, ("post_attention_layernorm",))
    return {"fc.weight": (hidden, 2 * hidden)} | layer


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name = str(directory)
    config = llama_config(config)
    hf_common.refuse_options(config, set(), name)
    if (num_layers := hf_common.depth_of(config, name)) != 1:
        raise ValueError(f"{name}: num_hidden_layers={num_layers} cannot be represented; EAGLE-1 has one layer here")
    hidden = hf_common.integer(config, "hidden_size", name)
    vocab = hf_common.integer(config, "vocab_size", name)
    tensors = hf_common.read_tensors(directory)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bias.any():
        raise ValueError(f"{name}: fc.bias of up to {bias.abs().max():.3g} cannot be represented; vLLM drops it too")
    geometry = hf_common.geometry_of(config, name)
    copies = hf_common.take_copies(config, tensors, hidden, vocab, name)
    table = shapes(geometry, hidden)
    has_lm_head = "lm_head.weight" in tensors
    if has_lm_head:
        table["lm_head.weight"] = (vocab, hidden)
    hf_common.check_tensors(tensors, table, name)
    settings = {"geometry": geometry, "own_lm_head": has_lm_head, "draft_vocab_size": vocab}
    return Checkpoint(METHOD, settings, hf_common.target_facts(config, name), tensors, name, copies)


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    return hf_common.scales_embedding(checkpoint)


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    settings = checkpoint.config
    tensors = dict(checkpoint.tensors or {})
    hidden = hf_common.require(checkpoint, "hidden_size")
    vocab = hf_common.require(checkpoint, "vocab_size")
    if settings["own_lm_head"]:
        raise ValueError(
            f"{checkpoint.name} has an output layer of its own ({settings['draft_vocab_size']} tokens), for which EAGLE-1 of "
            "vLLM and SGLang has no place; train with train.init.train_lm_head=false"
        )
    config = {
        "architectures": [ARCHITECTURES[export.engine]],
        "model_type": "llama",
        **hf_common.llama_config(settings["geometry"], hidden, 1, vocab),
    }
    tensors["fc.bias"] = torch.zeros(hidden, dtype=tensors["fc.weight"].dtype)
    copies = hf_common.scaled_embedding(checkpoint, export.target)
    hf_common.write_directory(directory, config, tensors | copies, checkpoint, copies)


# ------------------------------------------------------------------------------------------------ lint


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    engines = ("vllm", "sglang")
    tensors = check_weights(config, hf_common.read_tensors(directory), findings)
    config = llama_config(config)
    findings.error("speculators", "format", "speculators has no EAGLE-1 (0.9: eagle3, peagle, mtp and block drafters)")
    architectures = config.get("architectures") or []
    for engine, name in ARCHITECTURES.items():
        accepted = {name} if engine == "sglang" else {name, VLLM_CLASS}
        if not accepted & set(architectures[:1]):
            text = f"architectures is {architectures}, and {ENGINES[engine]} needs [{name!r}]; export for it by itself"
            findings.error(engine, "architecture", text)
    geometry = check_layer(config, findings, target)
    hidden = config["hidden_size"]
    vocab = config.get("vocab_size") or 0
    if target.hidden_size not in (None, hidden):
        text = f"hidden_size is {hidden}, and must be the target's, {target.hidden_size}"
        findings.error(engines, "hidden_size", text)
    if config.get("num_hidden_layers", 1) != 1:
        findings.warn(engines, "layers", f"num_hidden_layers={config['num_hidden_layers']}: only one layer was looked at")
    if tensors.pop("lm_head.weight", None) is not None:
        text = "lm_head.weight: EagleLlama has no output layer while it loads, and raises; remove it"
        findings.error("vllm", "lm_head", text)
        findings.warn("sglang", "lm_head", "lm_head.weight is ignored: SGLang drafts from the target's")
    if tensors.pop("layers.0.input_layernorm.weight", None) is not None:
        text = "layers.0.input_layernorm.weight: layer 0 has no first norm in EAGLE-1; remove it"
        findings.error("vllm", "input_layernorm", text)
        findings.warn("sglang", "input_layernorm", "layers.0.input_layernorm.weight is ignored")
    bias = tensors.pop("fc.bias", None)
    if bias is None:
        findings.error("sglang", "fc.bias", "no fc.bias: SGLang's fc has one, which would stay random; write zeros")
    elif bias.any():
        text = f"fc.bias of up to {bias.abs().max():.2g} is dropped silently; train without it"
        findings.error("vllm", "fc.bias", text)
    check_embedding(tensors, hidden, vocab, findings, target)
    check_names(tensors, shapes(geometry, hidden), findings, engines)
