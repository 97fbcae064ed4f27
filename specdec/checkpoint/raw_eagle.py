"""Raw EAGLE-1 (and EAGLE-2, which is trained the same): a Llama's config.json, and weights without a prefix.

Loads in vLLM 0.33 (`EagleLlamaForCausalLM`) and SGLang 0.5.23 (`LlamaForCausalLMEagle`), which want different architectures.
vLLM's `fc` has no bias and drops one without a word; SGLang's has one, which stays random where the file holds none: a bias
of zeros is written, which is right in both. Neither has an output layer of its own, nor a first norm in layer 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.checkpoint import hf_common
from specdec.checkpoint.hf_common import Shapes
from specdec.checkpoint.native import Checkpoint
from specdec.model.target import CausalLM

WRITES = {"eagle": ("vllm", "sglang")}
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
ACCEPTED = (*ARCHITECTURES.values(), "EagleLlamaForCausalLM")


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    """A Llama by its config; its tensors tell it from one that stands on its own."""
    architectures = unwrapped(config).get("architectures") or ["LlamaForCausalLM"]
    return bool(set(ACCEPTED) & set(architectures)) and drafts(names)


def drafts(names: set[str]) -> bool:
    """A drafter's tensors: `fc`, or layers without the prefix that a language model's have."""
    return any(name.removeprefix("model.") == "fc.weight" or name.startswith(("layers.0.", "midlayer.")) for name in names)


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM also takes the Llama's config inside one of type `eagle`."""
    inner = config.get("model")
    if config.get("model_type") != "eagle" or not isinstance(inner, dict):
        return config
    return inner | {key: value for key, value in config.items() if key not in ("model", "model_type", "architectures")}


def shapes(geometry: dict[str, Any], hidden: int) -> Shapes:
    """Name and shape of every tensor of a native EAGLE-1 drafter, but for an output layer."""
    return {"fc.weight": (hidden, 2 * hidden)} | hf_common.layer_shapes(
        "layers.0", geometry, hidden, hidden, ("post_attention_layernorm",)
    )


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    name, config = str(directory), unwrapped(config)
    hf_common.refuse_options(config, set(), name)
    if (num_layers := hf_common.integer(config, "num_hidden_layers", name, 1, most=hf_common.DEEPEST)) != 1:
        raise ValueError(f"{name}: num_hidden_layers={num_layers} cannot be represented; EAGLE-1 has one layer here")
    hidden, vocab = hf_common.integer(config, "hidden_size", name), hf_common.integer(config, "vocab_size", name)
    tensors = hf_common.read_tensors(directory)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bias.any():
        raise ValueError(f"{name}: fc.bias of up to {bias.abs().max():.3g} cannot be represented; vLLM drops it too")
    geometry, copies = hf_common.geometry_of(config, name), hf_common.copies_in(config, tensors, hidden, vocab, name)
    table = shapes(geometry, hidden)
    if "lm_head.weight" in tensors:
        table["lm_head.weight"] = (vocab, hidden)
    hf_common.check_tensors(tensors, table, name)
    own = {"geometry": geometry, "own_lm_head": "lm_head.weight" in tensors, "draft_vocab_size": vocab}
    return Checkpoint("eagle", own, hf_common.facts_of(config, name), tensors, name, copies)


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
    if own["own_lm_head"]:
        raise ValueError(
            f"{checkpoint.name} has an output layer of its own ({own['draft_vocab_size']} tokens), for which EAGLE-1 of vLLM "
            "and SGLang has no place; train with train.init.train_lm_head=false"
        )
    config = {
        "architectures": [ARCHITECTURES[engine]],
        "model_type": "llama",
        **hf_common.hf_layer(own["geometry"], hidden, 1, vocab),
    }
    tensors["fc.bias"] = torch.zeros(hidden, dtype=tensors["fc.weight"].dtype)
    tensors |= (copied := hf_common.own_embedding(checkpoint, target))
    hf_common.write_directory(directory, config, tensors, checkpoint, copied)
