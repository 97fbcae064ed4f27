"""What the Hugging Face formats share: config.json, safetensors, and the table of tensors that a directory must hold.

Nothing of a directory is executed or unpickled. A name, a shape or an option that no drafter here can represent is an error
that names it: a checkpoint is read completely or not at all.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec.checked import first_line, nearest, short_repr
from specdec.checkpoint.native import Checkpoint, check_values, target_part, write_weights
from specdec.files import read_json, read_json_object
from specdec.hub import MAX_LAYERS
from specdec.model.target import CausalLM

Shapes = dict[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SPECDEC_KEY = "specdec"  # the key of config.json under which `write` keeps facts about the target; engines ignore it
MASK_KEYS = (
    "mask_token_id",
    "pard_token",
    "ptd_token_id",
)  # the mask token of a drafter that drafts in one pass, in vLLM's order

# Options of a layer, and the values with which it is the layer of this project. An absent option has that value.
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
# The type of a key, at the top of config.json and inside it; null is the same as absent.
FIELD_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("eagle_config", "dflash_config", "speculators_config", "verifier", "transformer_layer_config", "rope_scaling",
         "rope_parameters", "target", SPECDEC_KEY),
        ("a mapping", lambda value: isinstance(value, dict)),
    ),
    **dict.fromkeys(
        ("architectures", "copies", "layer_types"),
        ("a list of words", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)),
    ),
    **dict.fromkeys(
        ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids", "top_k_tokens_per_head"),
        ("a list of integers", lambda value: isinstance(value, list) and all(_is_int(each) for each in value)),
    ),
    "proposal_methods": ("a list of mappings", lambda v: isinstance(v, list) and all(isinstance(each, dict) for each in v)),
    **dict.fromkeys(
        ("name_or_path", "model_type", "speculators_model_type", "torch_dtype", "dtype", "hidden_act", "rope_type"),
        ("a word", lambda value: isinstance(value, str)),
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta"),
        ("a number above 0", lambda value: _is_int(value) or (isinstance(value, float) and math.isfinite(value))),
    ),
    **dict.fromkeys(
        ("hidden_size", "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "num_hidden_layers",
         "max_position_embeddings", "speculative_tokens", "inner_dim", "emb_dim", "n_predict", "num_depths",
         "block_size", "markov_rank", "num_target_layers", "sliding_window", "swa_window_size"),
        ("an integer of 0 or more", lambda value: _is_int(value) and 0 <= value <= 2**31),
    ),
    **dict.fromkeys(MASK_KEYS, ("a token id", lambda value: _is_int(value))),
    **dict.fromkeys(
        ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_weights", "scale_input",
         "tie_word_embeddings", "sample_from_anchor", "is_causal", "causal", "use_swa", "sliding_window_non_causal",
         "enable_confidence_head", "confidence_head_with_markov"),
        ("true or false", lambda value: isinstance(value, bool)),
    ),
}  # fmt: skip
# Keys that do not change the function: tokens, training, bookkeeping.
IGNORED_VALUES = {
    "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
    "transformers_version", "torch_dtype", "dtype", "pretraining_tp", "attention_dropout", "max_window_layers",
    "attn_implementation", "_attn_implementation", "_name_or_path", "name_or_path", "return_dict", "output_hidden_states",
    "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "id2label", "label2id",
    "problem_type", "hidden_dropout_prob", "hidden_dropout", "attention_probs_dropout_prob", "tie_encoder_decoder",
    "add_cross_attention", "cross_attention_hidden_size", "torchscript", "use_bfloat16", "task_specific_params", "vocab_size",
    "hidden_size", "auto_map", "trust_remote_code", SPECDEC_KEY,
}  # fmt: skip
GEOMETRY = {
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "original_max_position_embeddings", "num_hidden_layers", "layer_types",
    "sliding_window",
}  # fmt: skip


@dataclass(frozen=True)
class Export:
    """What `write` needs to know besides the checkpoint.

    engine: vllm, sglang or speculators.
    target: the loaded target, of which some formats hold parts.
    target_name: the name under which the engine loads the target, where that is not the one that the checkpoint has.
    num_speculative_tokens: how many tokens to draft, where the format records it.
    """

    engine: str
    target: CausalLM | None = None
    target_name: str | None = None
    num_speculative_tokens: int | None = None


# ------------------------------------------------------------------------------------------------ reading a directory


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory. Raises ValueError where there is none, or where it needs code to be run."""
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory}: no config.json; give the directory that holds it beside the weights")
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{directory}: config.json is no mapping of options, but {str(config)[:40]!r}")
    code = config.get("auto_map")
    # `speculators` writes an entry under the name "", which no loader looks up and which has no file
    if code and not (isinstance(code, dict) and set(code) == {""}):
        raise ValueError(f"{directory}: refused: config.json asks for code (auto_map={code!r}); remove the key")
    if config.get("trust_remote_code"):
        raise ValueError(f"{directory}: refused: config.json asks for code (trust_remote_code); remove the key")
    _check_types(config, directory)
    return config


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(config: dict[str, Any], directory: Path) -> None:
    """Raise ValueError for a list where a number should be, and so on."""
    for key, value in config.items():
        type_name, is_valid = FIELD_TYPES.get(key, ("", lambda value: True))
        if value is not None and not is_valid(value):
            raise ValueError(f"{directory}: {key} is {str(value)[:40]!r} in config.json, and should be {type_name}")
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _check_types(inner, directory)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: those that its index names, or the only one."""
    if (directory / INDEX).exists():
        names = sorted(set(weight_map(directory).values()))
        for name in names:
            if Path(name).name != name or not (directory / name).is_file():
                raise ValueError(f"{directory}: the index names {name!r}, and there is no such file; fetch all shards")
        return [directory / name for name in names]
    paths = sorted(directory.glob("*.safetensors"))
    if (directory / "model.safetensors") in paths:
        return [directory / "model.safetensors"]
    if len(paths) > 1:
        raise ValueError(f"{directory}: {len(paths)} safetensors files and no {INDEX}; add the index, or join them")
    if not paths:
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
        if pickled:
            raise ValueError(f"{directory}: {pickled[0]} refused: pickled weights can run code; convert to safetensors")
        raise ValueError(f"{directory}: no weights (model.safetensors)")
    return paths


def weight_map(directory: Path) -> dict[str, str]:
    """Which file holds each tensor, by the index of a directory."""
    file_of = read_json_object(directory / INDEX).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
        raise ValueError(f"{directory}: {INDEX} cannot be read (weight_map must give each tensor a file); fetch it again")
    return file_of


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """An open safetensors file. Raises ValueError, one line, for one that cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path.parent}: {path.name} cannot be read ({first_line(error)}); fetch it again") from None


def shapes_of(directory: Path) -> Shapes:
    """Name and shape of every tensor, from the files' headers."""
    shapes: Shapes = {}
    for path in weight_files(directory):
        with open_weights(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def read_tensors(directory: Path, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor whose name begins with `prefix`, under the rest of its name."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118
                if not name.startswith(prefix):
                    continue
                key = name.removeprefix(prefix)
                if key in tensors:
                    raise ValueError(f"{directory}: {name!r} is in two files, the second is {path.name}; remove one")
                tensors[key] = file.get_tensor(name)
    if (directory / INDEX).exists():
        for name in sorted(weight_map(directory)):
            if name.startswith(prefix) and name.removeprefix(prefix) not in tensors:
                raise ValueError(f"{directory}: the index names {name!r}, and its file lacks it; fetch all shards")
    return tensors


# ------------------------------------------------------------------------------------------------ tables of tensors


def check_tensors(tensors: dict[str, Tensor], shapes: Shapes, name: str) -> dict[str, Tensor]:
    """The tensors themselves. Raises ValueError for a name or a shape that is not in the table, and for one that is missing."""
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
    """Name and shape of every tensor of one decoder layer.

    prefix: of the names.
    geometry: as `geometry_of` has it.
    hidden: width of its output.
    in_features: width of what its attention reads.
    norms: names of the norms of width `hidden`.
    qk_norm: whether queries and keys have norms.
    """
    head_dim = geometry["head_dim"]
    intermediate = geometry["intermediate_size"]
    queries = geometry["num_attention_heads"] * head_dim
    keys = geometry["num_key_value_heads"] * head_dim
    shapes: Shapes = {
        "self_attn.q_proj": (queries, in_features),
        "self_attn.k_proj": (keys, in_features),
        "self_attn.v_proj": (keys, in_features),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    } | {norm: (hidden,) for norm in norms}
    if qk_norm:
        shapes |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    return {f"{prefix}.{key}.weight": shape for key, shape in shapes.items()}


def model_on_meta(config: dict[str, Any]) -> Any:
    """The transformers model of a config.json, without memory. Raises ValueError, one line, where there is none."""
    model_type = str(config.get("model_type"))
    num_layers = (config.get("text_config") or config).get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers={num_layers} is over {MAX_LAYERS}")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(dict(config)))
    except Exception as error:  # a config can be wrong in every way
        reason = first_line(error)
        raise ValueError(f"transformers makes no model of type {model_type!r} from config.json ({reason})") from None


# ------------------------------------------------------------------------------------------------ options of a config


def integer(config: dict[str, Any], key: str, name: str, default: int | None = None, maximum: int = 2**31) -> int:
    """The value of a key that must be an integer of 1..maximum. Raises ValueError for another one.

    name: of the checkpoint, for the error.
    default: for a key that is absent or null.
    """
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        raise ValueError(f"{name}: {key} is {short_repr(value)} in config.json, and should be an integer of 1..{maximum}")
    return value


def depth_of(config: dict[str, Any], name: str) -> int:
    """Number of a drafter's layers, 1 where its config has none."""
    return integer(config, "num_hidden_layers", name, 1, maximum=MAX_LAYERS)


@cache
def _ignored_keys() -> frozenset[str]:
    return frozenset(IGNORED_VALUES | set(PretrainedConfig().to_dict()))


def refuse_options(config: dict[str, Any], known: set[str], name: str) -> None:
    """Raise ValueError for an option that would change the function, or that is unknown."""
    for key, value in config.items():
        if key in REQUIRED_VALUES and key not in known:
            if value not in REQUIRED_VALUES[key]:
                raise ValueError(f"{name}: {key}={value!r} cannot be represented; use {REQUIRED_VALUES[key][0]!r}")
        elif key not in known | GEOMETRY | _ignored_keys() and value not in (None, False):
            raise ValueError(
                f"{name}: unknown option {key}={str(value)[:60]!r} in config.json; {nearest(key, known | GEOMETRY)}"
            )
    if config.get("sliding_window") and "sliding_attention" in (config.get("layer_types") or []):
        raise ValueError(
            f"{name}: sliding_window={config['sliding_window']} cannot be represented; drafters here attend to all"
        )


def geometry_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The shape of a layer as a native checkpoint has it. What is absent has the default of LlamaConfig, as in the engines."""
    hidden = integer(config, "hidden_size", name)
    heads = integer(config, "num_attention_heads", name)
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
    settings = config.get("rope_parameters")
    if settings is None:
        settings = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    if not isinstance(settings, dict):
        raise ValueError(f"{name}: rope_parameters={settings!r} is no mapping")
    rope = {"rope_theta": config.get("rope_theta", 10000.0)} | settings
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    factor = rope.pop("partial_rotary_factor", None)
    if factor not in (None, 1):
        raise ValueError(f"{name}: partial_rotary_factor={factor} cannot be represented; drafters here rotate all")
    if "mrope_section" in rope:
        raise ValueError(f"{name}: mrope_section={rope['mrope_section']} cannot be represented; positions are one number here")
    return rope


def llama_config(
    geometry: dict[str, Any], hidden: int, num_layers: int, vocab: int, rope_parameters: bool = False
) -> dict[str, Any]:
    """The config of a Llama with layers of that shape.

    geometry: as `geometry_of` has it.
    hidden: width.
    num_layers: how many.
    vocab: size of the vocabulary.
    rope_parameters: write the key of transformers 5; otherwise the keys that every version and other converters read.
    """
    rest = {key: value for key, value in geometry.items() if key != "rope_parameters"}
    rope = dict(geometry["rope_parameters"])
    rope_keys: dict[str, Any] = {"rope_parameters": rope}
    if not rope_parameters:
        theta = rope.pop("rope_theta", 10000.0)
        rope_keys = {"rope_theta": theta, "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}
    return {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        **rest,
        **rope_keys,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


# ------------------------------------------------------------------------------------------------ modules inside a target

# Model types with prediction modules that vLLM 0.33 and SGLang 0.5.23 load, in one of the two namings that are read here.
MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model, which may be inside that of a larger model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def num_mtp_modules(config: dict[str, Any]) -> tuple[str, Any]:
    """How many prediction modules a config has, and the key that engines read it from."""
    text = text_config(config)
    qwen3_5 = str(text.get("model_type")).startswith("qwen3_5")
    key = "mtp_num_hidden_layers" if qwen3_5 else "num_nextn_predict_layers"
    return key, text.get(key)


# ------------------------------------------------------------------------------------------------ vocabulary


def check_vocabulary(tensors: dict[str, Tensor], vocab: int, name: str) -> None:
    """Raise ValueError unless d2t maps draft ids to different tokens of the target, and t2d, if present, marks the same."""
    if "d2t" not in tensors:
        return
    if tensors["d2t"].ndim != 1 or not len(tensors["d2t"]):
        raise ValueError(f"{name}: d2t is {list(tensors['d2t'].shape)}, and should be one row, an offset for each draft token")
    offset = tensors["d2t"].long()
    ids = offset + torch.arange(len(offset))
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab or len(ids.unique()) < len(ids):
        holds_ids = int(offset.min()) >= 0 and int(offset.max()) < vocab and len(offset.unique()) == len(offset)
        hint = "; it looks like a list of ids, and should be id - position" if holds_ids else ""
        raise ValueError(f"{name}: d2t does not map its {len(ids)} draft ids to different tokens of 0..{vocab - 1}{hint}")
    if "t2d" in tensors:
        if tuple(tensors["t2d"].shape) != (vocab,):
            raise ValueError(f"{name}: t2d is {list(tensors['t2d'].shape)}, and the target has {vocab} tokens")
        marked = tensors["t2d"].bool().nonzero().flatten()
        if not torch.equal(marked, ids.sort().values):
            raise ValueError(f"{name}: t2d and d2t name different tokens; one of them is of another drafter")


def check_drafter(tensors: dict[str, Tensor], table: Shapes, hidden: int, draft_vocab: int, vocab: int, name: str) -> None:
    """As `check_tensors`, for a drafter that has an output layer of its own and d2t, made int64 here, if it has a draft
    vocabulary."""
    if draft_vocab > vocab:
        raise ValueError(f"{name}: draft_vocab_size={draft_vocab} is more than vocab_size={vocab}, the target's")
    if draft_vocab < vocab:
        table = table | {"d2t": (draft_vocab,), "lm_head.weight": (draft_vocab, hidden)}
    check_tensors(tensors, table, name)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()


def t2d_of(d2t: Tensor, vocab: int) -> Tensor:
    """Which tokens of the target can be drafted, bool [vocab]."""
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[d2t + torch.arange(len(d2t))] = True
    return mask


# ------------------------------------------------------------------------------------------------ facts about the target


# Where a config.json names the target: as this project does, in its own format and in others', `speculators`, and Medusa.
TARGET_NAMES = (
    ("target", "name"),
    (SPECDEC_KEY, "target", "name"),
    ("speculators_config", "verifier", "name_or_path"),
    ("base_model_name_or_path",),
)


def target_name(config: dict[str, Any]) -> str | None:
    """The target that a drafter's config.json names."""
    for path in TARGET_NAMES:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str):
            return value
    return None


def target_facts(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Facts about the drafter's target in a config.json: width, vocabulary, and what `write_directory` added."""
    specdec = config.get(SPECDEC_KEY) or {}
    if not isinstance(specdec, dict) or not isinstance(specdec.get("target", {}), dict):
        raise ValueError(f"{name}: {SPECDEC_KEY}={specdec!r} in config.json is not what train/share.py writes; remove the key")
    hidden = config.get("hidden_size")
    target_hidden = config.get("target_hidden_size")
    if target_hidden not in (None, hidden):
        raise ValueError(
            f"{name}: target_hidden_size={target_hidden} cannot be represented; the drafter's is {hidden}, which must be equal"
        )
    facts = {"hidden_size": hidden, "vocab_size": config.get("vocab_size")}
    for key, value in specdec.get("target", {}).items():
        if facts.get(key) not in (None, value):
            raise ValueError(f"{name}: {key} is {facts[key]} in config.json and {value} under {SPECDEC_KEY!r}; which is it?")
    return {key: value for key, value in (facts | specdec.get("target", {})).items() if value is not None}


def require(checkpoint: Checkpoint, key: str) -> int:
    """A fact about the target that the format must hold. Raises ValueError where the checkpoint has none."""
    value = checkpoint.target.get(key)
    if not isinstance(value, int):
        raise ValueError(f"{checkpoint.name} does not tell {key} of its target, which the export needs; give target=")
    return value


def public_name(checkpoint: Checkpoint) -> str | None:
    """The target's name, without the directories of the machine that it was trained on."""
    name = checkpoint.target.get("name")
    return Path(name).name if name and (name.startswith((".", "~", "/")) or name.count("/") > 1) else name


def scales_embedding(checkpoint: Checkpoint) -> bool:
    """Whether the target multiplies the rows of its embedding (Gemma), which engines hand to drafters without the factor."""
    return str(checkpoint.target.get("model_type")).startswith("gemma")


# ------------------------------------------------------------------------------------------------ parts of the target


def target_parts(checkpoint: Checkpoint, target: CausalLM, *keys: str) -> dict[str, Tensor]:
    """Parts of the target, in the dtype of the drafter's weights."""
    dtype = next(tensor.dtype for tensor in (checkpoint.tensors or {}).values() if tensor.is_floating_point())
    return {key: target_part(target, key).detach().to("cpu", dtype, copy=True) for key in keys}


def scaled_embedding(checkpoint: Checkpoint, target: CausalLM | None) -> dict[str, Tensor]:
    """The embedding, where an export must hold it: if the target scales its rows (Gemma), engines share the rows without the
    scale. Empty where the target's rows are right. Raises ValueError if the target is needed and is None."""
    if target is None:
        if scales_embedding(checkpoint):
            raise ValueError(
                f"{checkpoint.name}: its target scales the embedding, so the export must hold it; give target= to write it"
            )
        return {}
    parts = target_parts(checkpoint, target, "embed_tokens.weight")
    scaled = parts["embed_tokens.weight"]
    plain = torch.as_tensor(target.embedding.weight)[: target.vocab_size]
    return {} if torch.equal(plain.to(scaled).cpu(), scaled) else parts


def take_copies(
    config: dict[str, Any], tensors: dict[str, Tensor], hidden: int, vocab: int, name: str
) -> dict[str, Tensor] | None:
    """Remove from the tensors what should equal the target's, and return it: an embedding, and an output layer that
    `write_directory` listed as a copy. None if there is nothing.

    config: config.json.
    tensors: of the drafter, changed in place.
    hidden, vocab: shape of both, [vocab, hidden].
    name: of the checkpoint, for errors.
    """
    listed = (config.get(SPECDEC_KEY) or {}).get("copies") or []
    copies = {key: tensors.pop(key) for key in {"embed_tokens.weight", *listed} & set(tensors)}
    for key, tensor in copies.items():
        if tuple(tensor.shape) != (vocab, hidden):
            raise ValueError(f"{name}: {key} is {list(tensor.shape)}, and its config asks for {[vocab, hidden]}")
    check_values(copies, name)
    return copies or None


# ------------------------------------------------------------------------------------------------ writing


def write_directory(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], checkpoint: Checkpoint, copies: Iterable[str] = ()
) -> None:
    """Write config.json and model.safetensors into a directory that exists and nobody reads yet.

    config: of the format, completed here by the dtype and by the facts about the target.
    tensors: under the names of the format.
    checkpoint: the drafter that they were made from.
    copies: names of tensors that are the target's.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    target_name = public_name(checkpoint)
    config[SPECDEC_KEY] = {"target": checkpoint.target | ({"name": target_name} if target_name else {})}
    for key in ("num_depths", "confidence_temperatures"):
        if key in checkpoint.config:
            config[SPECDEC_KEY][key] = checkpoint.config[key]
    if copies := sorted(copies):
        config[SPECDEC_KEY]["copies"] = copies
    write_weights(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
