"""Small target models, loaded once a process, and random ones of published architectures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3NextConfig

from specdec import hub
from specdec.model.target import CausalLM

SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip


MLA = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1, "q_lora_rank": None,
}  # fmt: skip


NEXT = {
    "num_key_value_heads": 2, "head_dim": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "layer_types": ["full_attention"] * 3,
}  # fmt: skip


SHIPPED: dict[str, tuple[Any, dict[str, Any], int]] = {
    "deepseek-moe": (DeepseekV3Config, MLA, 1),
    "deepseek-2-dense-q-lora": (DeepseekV3Config, MLA | {"first_k_dense_replace": 9, "q_lora_rank": 16}, 2),
    "deepseek-2-moe": (DeepseekV3Config, MLA, 2),
    "qwen3-next-moe": (Qwen3NextConfig, NEXT, 1),
    "qwen3-next-dense": (Qwen3NextConfig, NEXT | {"num_experts": 0}, 1),
}


@cache
def random_target(name: str, root: Path) -> Path:
    """A random target of the published architecture, and modules with random weights under the published names beside it: the
    layer of a module is named as the target's last one, which transformers writes."""
    directory = root / name
    (kind, shape, count) = SHIPPED[name]
    nextn = {} if name == "qwen3-next-dense" else {"num_nextn_predict_layers": count}  # as the published ones
    config = kind(**SMALL, **shape, **nextn)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    noise = torch.Generator().manual_seed(7)
    layer = "model.layers.2."
    qwen = kind is Qwen3NextConfig
    norm = 0.0 if qwen else 1.0

    def near(like: Tensor, middle: float, width: float) -> Tensor:
        return middle + width * torch.randn(like.shape, generator=noise)

    more: dict[str, Tensor] = {}
    for i in range(count):
        prefix = "mtp.layers.0." if qwen else f"model.layers.{3 + i}."
        for key in [key for key in tensors if key.startswith(layer)]:
            is_norm = key.endswith("norm.weight")
            more[prefix + key.removeprefix(layer)] = near(tensors[key], norm if is_norm else 0, 0.15 if is_norm else 0.3)
        width = tensors["model.norm.weight"]
        both = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        if qwen:
            prefix = "mtp."
            both = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        for key in both[:3]:
            more[f"{prefix}{key}.weight"] = near(width, norm, 0.15)
        more[f"{prefix}{both[3]}.weight"] = near(torch.empty(32, 64), 0, 0.2)
        if not qwen:
            more[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            more[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    keys = sorted(tensors | more)
    tensors["model.norm.weight"] = near(tensors["model.norm.weight"], norm, 0.4)
    if name == "deepseek-2-moe":  # in shards, the modules in both
        (directory / "model.safetensors").unlink()
        shards = {"model-00001-of-00002.safetensors": keys[::2], "model-00002-of-00002.safetensors": keys[1::2]}
        for shard, shard_keys in shards.items():
            save_file({key: (tensors | more)[key] for key in shard_keys}, directory / shard, {"format": "pt"})
        placed = {key: shard for shard, shard_keys in shards.items() for key in shard_keys}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    else:
        save_file(tensors | more, directory / "model.safetensors", {"format": "pt"})
    for path in [*hub.tiny().glob("*token*"), *hub.tiny().glob("*.jinja")]:
        shutil.copyfile(path, directory / path.name)
    return directory


def tensors_of(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def changed(source: Path, directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a target whose tensors are others."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = tensors_of(source)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@cache
def loaded(name: str = "tiny") -> CausalLM:
    return CausalLM(name, "float32", "cpu")
