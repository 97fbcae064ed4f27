"""A draft model at rest: a plain Hugging Face causal LM that transformers, vLLM and this project load as any other.

config.json, model.safetensors (weights that are tied once) and the target's tokenizer, whose vocabulary is the draft model's
too. A parallel one (PARD, 2504.18583) has two more keys in config.json: `pard_token`, which vLLM reads, and `num_depths` under
`specdec`, ours.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import hub
from specdec.checked import first_line
from specdec.checkpoint import native
from specdec.checkpoint.hf_common import DEEPEST, OURS
from specdec.checkpoint.native import Checkpoint
from specdec.files import read_json_object
from specdec.model.contract import layers_of
from specdec.model.target import check_contract, load_weights

# what transformers says of every config, and where a model was read from
CLUTTER = {
    "_name_or_path", "transformers_version", "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "is_encoder_decoder",
}  # fmt: skip
WRITES = {"draft_model": ("vllm", "sglang"), "pard": ("vllm",)}
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order
# what belongs to a tokenizer, and how a generation ends
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    """After all drafters of other kinds, some of which bear a Llama's name."""
    return bool(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) & set(map(str, config.get("architectures") or [])))


def find(name: str | Path, revision: str | None = None) -> Path:
    """The directory of a model: itself, `best` or else `last` of a training run, or whatever `hub.resolve` takes. Raises
    ValueError for a drafter of another method."""
    directory = Path(name).expanduser()
    found = native.find(directory) if directory.is_dir() else hub.resolve(str(name), revision)
    if (kind := _drafter(found)) is not None:
        raise ValueError(f"{found} is a drafter of method {kind!r}, and no causal LM; say method={kind}")
    return found


def _drafter(directory: Path) -> str | None:
    """The method of a directory that holds a drafter of another kind; None for a model, and for what cannot be told."""
    from specdec import checkpoint

    try:
        config = read_json_object(directory / "config.json")
        if config.get("format") == native.FORMAT:
            return str(config.get("method"))
        kind = checkpoint.format_of(directory, config).__name__.rpartition(".")[2]
    except (OSError, ValueError, AttributeError, TypeError):  # told where it is loaded
        return None
    return None if kind in ("causal_lm", "mtp") else checkpoint.method_of(directory)


def read(name: str | Path, revision: str | None = None, method: str = "draft_model") -> Checkpoint:
    """A model's weights in float32, under their own names, and its config. Raises ValueError, one line, for what is no causal
    LM whose attention layers a slot cache can serve, or not in safetensors."""
    directory, cpu = find(name, revision), torch.device("cpu")
    model = load_weights(directory, torch.float32, cpu)
    check_contract(model, directory, torch.float32, cpu)
    return taken(model, method, str(name))


def taken(model: Any, method: str, name: str) -> Checkpoint:
    """A loaded model as a checkpoint."""
    if model.config.get_text_config() is not model.config:
        raise ValueError(
            f"{name}: a {model.config.model_type} is more than a causal LM, and cannot be trained as a draft model"
        )
    config = {key: value for key, value in model.config.to_dict().items() if key not in CLUTTER}
    config |= {"architectures": [type(model).__name__]}
    tensors = {key: tensor.detach().float() for key, tensor in model.state_dict().items()}
    native.check_values(tensors, name)
    if config.get("tie_word_embeddings"):
        tensors.pop(named(model, model.get_output_embeddings()) + ".weight")
    facts = {"num_hidden_layers": model.config.num_hidden_layers, "pard_token": mask_token(config), **(config.get(OURS) or {})}
    return Checkpoint(method, facts | {"hf_config": config}, {}, tensors, name)


def method_of(config: dict[str, Any]) -> str:
    """The method that such a model drafts with."""
    return "draft_model" if mask_token(config) is None else "pard"


def mask_token(config: dict[str, Any]) -> int | None:
    """The token whose embedding stands for tokens that are not there yet, if a config.json names one. Raises ValueError where
    that, or what stands beside it, is not what we write."""
    told = config.get(OURS)
    depths = told.get("num_depths") if isinstance(told, dict) else told
    if depths is not None and (not isinstance(depths, int) or isinstance(depths, bool) or depths < 1):
        raise ValueError(f"{OURS}.num_depths is {str(depths)[:40]!r} in config.json, and should be an integer of 1 or more")
    found = next(((key, config[key]) for key in MASK_KEYS if config.get(key) is not None), None)
    if found is not None and (not isinstance(found[1], int) or isinstance(found[1], bool)):
        raise ValueError(f"{found[0]} is {str(found[1])[:40]!r} in config.json, and should be a token id")
    return None if found is None else found[1]


def first_layers(model: Any, layer_ids: list[int], method: str, name: str) -> Checkpoint:
    """These layers of a loaded model, its embedding, final norm and output layer."""
    whole = taken(model, method, name)
    assert whole.tensors is not None
    config, num_layers = whole.config["hf_config"], whole.config["num_hidden_layers"]
    layers, alone = layers_of(model, num_layers), f"{name}: some layers of a {model.config.model_type} alone make no model"
    if layers is None:
        raise ValueError(f"{alone}, since they are not in one list; give a whole one, train.drafter.model=DIR")
    for key, value in config.items():  # what a config says of each layer
        if isinstance(value, list) and len(value) == num_layers and key != "architectures":
            config[key] = [value[layer] for layer in layer_ids]
    if isinstance(by_layer := config.get("per_layer_config"), dict):
        by_layer = {int(layer): own for layer, own in by_layer.items()}
        config["per_layer_config"] = {i: by_layer[layer] for i, layer in enumerate(layer_ids) if layer in by_layer}
    config[model.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layer_ids)
    if "max_window_layers" in config:  # said by layer_types
        config["max_window_layers"] = len(layer_ids)
    prefix = named(model, layers) + "."
    tensors = {key: tensor for key, tensor in whole.tensors.items() if not key.startswith(prefix)}
    for place, layer in enumerate(layer_ids):
        own = f"{prefix}{layer}."
        tensors |= {
            f"{prefix}{place}.{key.removeprefix(own)}": tensor for key, tensor in whole.tensors.items() if key.startswith(own)
        }
    own_shapes = {key: tensor.shape for key, tensor in on_meta(config).state_dict().items()}
    if config.get("tie_word_embeddings"):
        own_shapes.pop(named(model, model.get_output_embeddings()) + ".weight", None)
    held = {key: tensor.shape for key, tensor in tensors.items()}
    if strange := sorted(key for key in held | own_shapes if held.get(key) != own_shapes.get(key)):
        raise ValueError(f"{alone}, since its {strange[0]} would be another; give a whole one, train.drafter.model=DIR")
    facts = whole.config | {"num_hidden_layers": len(layer_ids), "hf_config": config}
    return Checkpoint(method, facts, {}, tensors, name)


def build(checkpoint: Checkpoint) -> Any:
    """The transformers model of a checkpoint, in float32, with its weights, and without dropout."""
    given = dict(checkpoint.config["hf_config"])
    config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="specdec")
    assert checkpoint.tensors is not None
    own = model.state_dict()
    for key, tensor in checkpoint.tensors.items():
        if key not in own or own[key].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.name}: {key} {list(tensor.shape)} is not a tensor of its config; fetch the model again"
            )
    model.load_state_dict(checkpoint.tensors, strict=False)
    tied = {named(model, model.get_output_embeddings()) + ".weight"} if given.get("tie_word_embeddings") else set()
    if lacking := sorted(set(own) - set(checkpoint.tensors) - tied):
        raise ValueError(f"{checkpoint.name}: the weights lack {lacking[0]!r}; fetch the model again")
    return model.eval()


def on_meta(config: dict[str, Any]) -> Any:
    """The transformers model of a config.json, without memory. Raises ValueError, one line, where there is none."""
    kind, deep = str(config.get("model_type")), (config.get("text_config") or config).get("num_hidden_layers")
    if isinstance(deep, int) and deep > DEEPEST:
        raise ValueError(f"num_hidden_layers={deep} is over {DEEPEST}")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(dict(config)))
    except Exception as error:  # a config can be wrong in every way
        raise ValueError(f"transformers makes no model of type {kind!r} from config.json ({first_line(error)})") from None


def shapes(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Name and shape of every tensor of a model, and the names that may be absent. Raises ValueError where that cannot be
    told."""
    if config.get("quantization_config"):
        raise ValueError("quantized weights have names of their own")
    if get_checkpoint_conversion_mapping(str(config.get("model_type"))):
        raise ValueError(f"models of type {config['model_type']!r} have other names in files than in transformers")
    model = on_meta(config)
    table = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return table, {named(model, model.get_output_embeddings()) + ".weight"} if tied else set()


def named(model: Any, part: Any) -> str:
    """The name of a module inside another."""
    return next(name for name, module in model.named_modules() if module is part)


def write(
    checkpoint: Checkpoint,
    directory: Path,
    engine: str,
    target: Any = None,
    served: str | None = None,
    count: int | None = None,
) -> None:
    """The same model for an engine; all of them load it as any other."""
    save(directory, checkpoint, Path(checkpoint.name), {}, "")


def save(directory: Path, checkpoint: Checkpoint, beside: Path, provenance: dict[str, Any], card: str) -> None:
    """Write a model into a directory that exists and nobody reads yet. beside: where its tokenizer is, if there is one."""
    assert checkpoint.tensors is not None
    config = {key: value for key, value in checkpoint.config["hf_config"].items() if key not in (*MASK_KEYS, OURS)}
    config |= {"dtype": str(next(iter(checkpoint.tensors.values())).dtype).removeprefix("torch.")}
    if checkpoint.config.get("pard_token") is not None:
        config["pard_token"] = checkpoint.config["pard_token"]
    if checkpoint.config.get("num_depths") is not None:
        config[OURS] = {"num_depths": checkpoint.config["num_depths"]}
    native.write_weights(directory / "model.safetensors", checkpoint.tensors)
    for name in BESIDE:
        if (beside / name).is_file():
            shutil.copyfile(beside / name, directory / name)
    for name, value in (("config.json", config), ("provenance.json", provenance)):
        (directory / name).write_text(json.dumps(value, indent=1, default=str) + "\n")
    (directory / "README.md").write_text(card)
