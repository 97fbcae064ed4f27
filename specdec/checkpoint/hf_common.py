"""What the foreign formats share: a config.json in Hugging Face's words, safetensors, and the table of tensors that they must
hold.

Nothing of the directory is executed or unpickled. A name, a shape or an option that our drafters cannot represent is an error
that names it: a checkpoint is read whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.checked import first_line, nearest
from specdec.checkpoint.native import DEEPEST as DEEPEST
from specdec.checkpoint.native import Checkpoint, check_values, part_of, write_weights
from specdec.files import read_json, read_json_object
from specdec.model.target import CausalLM

Shapes = dict[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OURS = "specdec"  # the key of a foreign config.json under which we keep the facts about the target; engines pass over it

# Options of a layer, and the one value that our layers have. What is absent has it.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "bias": (False, None),
    "is_causal": (True, None),
    "partial_rotary_factor": (1, None),
    "logit_scale": (1, None),
    "tie_word_embeddings": (False, None),
    "truncated_vocab_size": (None,),
    "hot_vocab_size": (None,),
    "quantization_config": (None,),
    "add_para_norm": (False, None),
    "use_sliding_window": (False, None),
    "parallel_draft_step": (1, None),
}
# What a key must be, wherever it stands; null is what an absent one is.
FIELD_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("eagle_config", "speculators_config", "verifier", "transformer_layer_config", "rope_scaling", "rope_parameters",
         "target", OURS),
        ("a mapping", lambda value: isinstance(value, dict)),
    ),
    **dict.fromkeys(
        ("architectures", "copies", "layer_types"),
        ("a list of words", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)),
    ),
    **dict.fromkeys(
        ("eagle_aux_hidden_state_layer_ids", "top_k_tokens_per_head"),
        ("a list of integers", lambda value: isinstance(value, list) and all(_whole(each) for each in value)),
    ),
    "proposal_methods": ("a list of mappings", lambda v: isinstance(v, list) and all(isinstance(each, dict) for each in v)),
    **dict.fromkeys(
        ("name_or_path", "model_type", "speculators_model_type", "torch_dtype", "dtype", "hidden_act", "rope_type"),
        ("a word", lambda value: isinstance(value, str)),
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta"), ("a number above 0", lambda v: _whole(v) or (isinstance(v, float) and math.isfinite(v)))
    ),
    **dict.fromkeys(
        ("hidden_size", "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "num_hidden_layers",
         "max_position_embeddings", "speculative_tokens", "inner_dim", "emb_dim", "n_predict", "num_depths"),
        ("an integer of 0 or more", lambda value: _whole(value) and 0 <= value <= 2**31),
    ),
    **dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), ("a token id", lambda value: _whole(value))),
    **dict.fromkeys(
        ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_weights", "scale_input",
         "tie_word_embeddings"),
        ("true or false", lambda value: isinstance(value, bool)),
    ),
}  # fmt: skip
# Keys that say nothing about the function: tokens, training, bookkeeping.
IGNORED_VALUES = {
    "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
    "transformers_version", "torch_dtype", "dtype", "pretraining_tp", "attention_dropout", "max_window_layers",
    "attn_implementation", "_attn_implementation", "_name_or_path", "name_or_path", "return_dict", "output_hidden_states",
    "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "id2label", "label2id",
    "problem_type", "hidden_dropout_prob", "hidden_dropout", "attention_probs_dropout_prob", "tie_encoder_decoder",
    "add_cross_attention", "cross_attention_hidden_size", "torchscript", "use_bfloat16", "task_specific_params", "vocab_size",
    "hidden_size", "auto_map", "trust_remote_code", OURS,
}  # fmt: skip
GEOMETRY = {
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "original_max_position_embeddings", "num_hidden_layers", "layer_types",
    "sliding_window",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ reading a directory


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory. Raises ValueError where there is none, or where it asks for code."""
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory}: no config.json; give the directory that holds it beside the weights")
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{directory}: config.json is no mapping of options, but {str(config)[:40]!r}")
    code = config.get("auto_map")
    # `speculators` writes an entry under the name "", which no loader looks up and no file stands behind
    if code and not (isinstance(code, dict) and set(code) == {""}):
        raise ValueError(f"{directory}: refused: config.json asks for code (auto_map={code!r}); remove the key")
    if config.get("trust_remote_code"):
        raise ValueError(f"{directory}: refused: config.json asks for code (trust_remote_code); remove the key")
    _check_kinds(config, directory)
    return config


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_kinds(config: dict[str, Any], directory: Path) -> None:
    """Raise ValueError for a list where a number should be, and so on."""
    for key, value in config.items():
        what, holds = FIELD_TYPES.get(key, ("", lambda value: True))
        if value is not None and not holds(value):
            raise ValueError(f"{directory}: {key} is {str(value)[:40]!r} in config.json, and should be {what}")
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _check_kinds(inner, directory)


def files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: those of its index, or the one that it has."""
    if (directory / INDEX).exists():
        for name in (names := sorted(set(weight_map(directory).values()))):
            if Path(name).name != name or not (directory / name).is_file():
                raise ValueError(f"{directory}: the index names {name!r}, and there is no such file; fetch all shards")
        return [directory / name for name in names]
    found = sorted(directory.glob("*.safetensors"))
    if (directory / "model.safetensors") in found:
        return [directory / "model.safetensors"]
    if len(found) > 1:
        raise ValueError(f"{directory}: {len(found)} safetensors files and no {INDEX}; add the index, or join them")
    if not found:
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
        if pickled:
            raise ValueError(f"{directory}: {pickled[0]} refused: pickled weights can run code; convert to safetensors")
        raise ValueError(f"{directory}: no weights (model.safetensors)")
    return found


def weight_map(directory: Path) -> dict[str, str]:
    """Which file holds each tensor, as the index of a directory says."""
    placed = read_json_object(directory / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ValueError(f"{directory}: {INDEX} cannot be read (weight_map must give each tensor a file); fetch it again")
    return placed


def shapes_of(directory: Path) -> Shapes:
    """Name and shape of every tensor, from the files' headers."""
    found: Shapes = {}
    for path in files(directory):
        try:
            with safe_open(path, "pt") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{directory}: {path.name} cannot be read ({first_line(error)}); fetch it again") from None
    return found


def read_tensors(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in files(directory):
        try:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in found:
                        raise ValueError(f"{directory}: {name!r} is in two files, the second is {path.name}; remove one")
                    found[name] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{directory}: {path.name} cannot be read ({first_line(error)}); fetch it again") from None
    if (directory / INDEX).exists() and (missing := sorted(set(weight_map(directory)) - set(found))):
        raise ValueError(f"{directory}: the index names {missing[0]!r}, and its file lacks it; fetch all shards")
    return found


# --------------------------------------------------------------------------------------------------- what must be there


def check_tensors(tensors: dict[str, Tensor], shapes: Shapes, name: str) -> dict[str, Tensor]:
    """The tensors, held against the table: no other name, no other shape, none missing."""
    for key, tensor in tensors.items():
        if key not in shapes:
            raise ValueError(f"{name}: unknown tensor {key!r}; {nearest(key, shapes)}")
        if tuple(tensor.shape) != shapes[key]:
            raise ValueError(f"{name}: {key} is {list(tensor.shape)}, and its config asks for {list(shapes[key])}")
        if key == "t2d" and tensor.is_floating_point():
            raise ValueError(f"{name}: t2d is {tensor.dtype}; it marks tokens, and is not a weight")
    if missing := sorted(set(shapes) - set(tensors)):
        raise ValueError(f"{name}: the weights lack {missing[0]!r}")
    check_values(tensors, name)
    return tensors


def layer_shapes(
    prefix: str, geometry: dict[str, Any], hidden: int, in_features: int, norms: tuple[str, ...], qk_norm: bool = False
) -> Shapes:
    """One decoder layer. norms: those of the width `hidden`."""
    width, mlp = geometry["head_dim"], geometry["intermediate_size"]
    queries, keys = geometry["num_attention_heads"] * width, geometry["num_key_value_heads"] * width
    found: Shapes = {
        "self_attn.q_proj": (queries, in_features),
        "self_attn.k_proj": (keys, in_features),
        "self_attn.v_proj": (keys, in_features),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    } | {norm: (hidden,) for norm in norms}
    if qk_norm:
        found |= {"self_attn.q_norm": (width,), "self_attn.k_norm": (width,)}
    return {f"{prefix}.{key}.weight": shape for key, shape in found.items()}


def integer(config: dict[str, Any], key: str, name: str, default: int | None = None, most: int = 2**31) -> int:
    """A key that must be a positive whole number, and not absurdly large."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}: {key} is {str(value)[:40]!r} in config.json, and should be an integer of 1..{most}")
    return value


@cache
def _idle() -> frozenset[str]:
    from transformers import PretrainedConfig

    return frozenset(IGNORED_VALUES | set(PretrainedConfig().to_dict()))


def refuse_options(config: dict[str, Any], known: set[str], name: str) -> None:
    """Raise ValueError for an option that would change the function, or that nobody here knows."""
    for key, value in config.items():
        if key in REQUIRED_VALUES and key not in known:
            if value not in REQUIRED_VALUES[key]:
                raise ValueError(f"{name}: {key}={value!r} cannot be represented; ours have {REQUIRED_VALUES[key][0]!r}")
        elif key not in known | GEOMETRY | _idle() and value not in (None, False):
            raise ValueError(
                f"{name}: unknown option {key}={str(value)[:60]!r} in config.json; {nearest(key, known | GEOMETRY)}"
            )
    if config.get("sliding_window") and "sliding_attention" in (config.get("layer_types") or []):
        raise ValueError(f"{name}: sliding_window={config['sliding_window']} cannot be represented; ours attend to everything")


def geometry_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The shape of a layer as the native checkpoint has it. What is absent is what LlamaConfig takes, as in the engines."""
    hidden, heads = integer(config, "hidden_size", name), integer(config, "num_attention_heads", name)
    return {
        "intermediate_size": integer(config, "intermediate_size", name),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(config, "num_key_value_heads", name, heads),
        "head_dim": integer(config, "head_dim", name, hidden // heads),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": integer(config, "max_position_embeddings", name, 2048),
        "rope_parameters": rope_of(config, name),
    }


def rope_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Rotary settings in one mapping, from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    given = config.get("rope_parameters")
    if given is None:
        given = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    if not isinstance(given, dict):
        raise ValueError(f"{name}: rope_parameters={given!r} is no mapping")
    rope = {"rope_theta": config.get("rope_theta", 10000.0)} | given
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if rope.pop("partial_rotary_factor", None) not in (None, 1):
        raise ValueError(f"{name}: partial_rotary_factor={given['partial_rotary_factor']} cannot be represented; ours turn all")
    if "mrope_section" in rope:
        raise ValueError(f"{name}: mrope_section={rope['mrope_section']} cannot be represented; positions are one number here")
    return rope


def hf_layer(
    geometry: dict[str, Any], hidden: int, num_layers: int, vocab: int, rope_parameters: bool = False
) -> dict[str, Any]:
    """The config of a Llama with that layer. rope_parameters: in the words of transformers 5 alone; else in those that every
    version and the converters of others read."""
    rest = {key: value for key, value in geometry.items() if key != "rope_parameters"}
    rope = dict(geometry["rope_parameters"])
    spelled: dict[str, Any] = {"rope_parameters": rope}
    if not rope_parameters:
        theta = rope.pop("rope_theta", 10000.0)
        spelled = {"rope_theta": theta, "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}
    return {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        **rest,
        **spelled,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


# -------------------------------------------------------------------------------------------------------------- vocabulary


def check_vocabulary(tensors: dict[str, Tensor], vocab: int, name: str) -> None:
    """d2t gives each draft id another token of the target, and t2d, where there is one, says the same."""
    if "d2t" not in tensors:
        return
    if tensors["d2t"].ndim != 1 or not len(tensors["d2t"]):
        raise ValueError(f"{name}: d2t is {list(tensors['d2t'].shape)}, and should be one row, an offset for each draft token")
    offset = tensors["d2t"].long()
    ids = offset + torch.arange(len(offset))
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab or len(ids.unique()) < len(ids):
        as_ids = int(offset.min()) >= 0 and int(offset.max()) < vocab and len(offset.unique()) == len(offset)
        hint = "; it looks like a list of ids, and should be id - position" if as_ids else ""
        raise ValueError(f"{name}: d2t does not map its {len(ids)} draft ids to different tokens of 0..{vocab - 1}{hint}")
    if "t2d" in tensors:
        if tuple(tensors["t2d"].shape) != (vocab,):
            raise ValueError(f"{name}: t2d is {list(tensors['t2d'].shape)}, and the target has {vocab} tokens")
        said = tensors["t2d"].bool().nonzero().flatten()
        if not torch.equal(said, ids.sort().values):
            raise ValueError(f"{name}: t2d and d2t name different tokens; one of them is of another drafter")


def t2d_of(d2t: Tensor, vocab: int) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[d2t + torch.arange(len(d2t))] = True
    return mask


# ----------------------------------------------------------------------------------------------------------------- writing


def write_directory(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], checkpoint: Checkpoint, copied: Iterable[str] = ()
) -> None:
    """config.json and model.safetensors, into a directory that exists and nobody reads yet. copied: tensors of the target."""
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(floats) == 1:
        config["torch_dtype"] = str(floats.pop()).removeprefix("torch.")
    config[OURS] = {"target": checkpoint.target | ({"name": public_name(checkpoint)} if public_name(checkpoint) else {})}
    if "num_depths" in checkpoint.config:
        config[OURS]["num_depths"] = checkpoint.config["num_depths"]
    if copied := sorted(copied):
        config[OURS]["copies"] = copied
    write_weights(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def public_name(checkpoint: Checkpoint) -> str | None:
    """The target's name, without the directories of the machine that it was trained on."""
    name = checkpoint.target.get("name")
    return Path(name).name if name and (name.startswith((".", "~", "/")) or name.count("/") > 1) else name


def facts_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """What a foreign config says about its target: width, vocabulary, and what we wrote there ourselves."""
    told = config.get(OURS) or {}
    if not isinstance(told, dict) or not isinstance(told.get("target", {}), dict):
        raise ValueError(f"{name}: {OURS}={told!r} in config.json is not what we write there; remove the key")
    hidden, theirs = config.get("hidden_size"), config.get("target_hidden_size")
    if theirs not in (None, hidden):
        raise ValueError(
            f"{name}: target_hidden_size={theirs} cannot be represented; the drafter's is {hidden}, which must be the same"
        )
    facts = {"hidden_size": hidden, "vocab_size": config.get("vocab_size")}
    for key, value in told.get("target", {}).items():
        if facts.get(key) not in (None, value):
            raise ValueError(f"{name}: {key} is {facts[key]} in config.json and {value} under {OURS!r}; which is it?")
    return {key: value for key, value in (facts | told.get("target", {})).items() if value is not None}


def require(checkpoint: Checkpoint, key: str) -> int:
    """A fact about the target that the format must tell."""
    value = checkpoint.target.get(key)
    if not isinstance(value, int):
        raise ValueError(f"{checkpoint.name} does not tell {key} of its target, which the export needs; give target=")
    return value


def own_embedding(checkpoint: Checkpoint, target: CausalLM | None) -> dict[str, Tensor]:
    """The embedding where an export must hold it, since an engine would share another: where the target scales its embedding
    (Gemma), engines hand out the rows without the scale. Nothing where the target's own rows are right."""
    if target is None:
        if str(checkpoint.target.get("model_type")).startswith("gemma"):
            raise ValueError(
                f"{checkpoint.name}: its target scales the embedding, so the export must hold it; give target= to write it"
            )
        return {}
    plain = torch.as_tensor(target.embedding.weight)[: target.vocab_size]
    copied = copies(checkpoint, target, "embed_tokens.weight")
    return {} if torch.equal(plain.to(copied["embed_tokens.weight"]).cpu(), copied["embed_tokens.weight"]) else copied


def copies(checkpoint: Checkpoint, target: CausalLM, *keys: str) -> dict[str, Tensor]:
    """Parts of the target, in the type of the drafter's weights."""
    dtype = next(tensor.dtype for tensor in (checkpoint.tensors or {}).values() if tensor.is_floating_point())
    return {key: part_of(target, key).detach().to("cpu", dtype, copy=True) for key in keys}


def copies_in(
    config: dict[str, Any], tensors: dict[str, Tensor], hidden: int, vocab: int, name: str
) -> dict[str, Tensor] | None:
    """Take out of the tensors what should be the target's: an embedding, and an output layer that we wrote as a copy."""
    told = (config.get(OURS) or {}).get("copies") or []
    found = {key: tensors.pop(key) for key in {"embed_tokens.weight", *told} & set(tensors)}
    for key, tensor in found.items():
        if tuple(tensor.shape) != (vocab, hidden):
            raise ValueError(f"{name}: {key} is {list(tensor.shape)}, and its config asks for {[vocab, hidden]}")
    check_values(found, name)
    return found or None


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tensors over their largest value."""
    scale = max(a.abs().max().item(), b.abs().max().item())
    return (a.float() - b.float()).abs().max().item() / (scale or 1.0)
