"""A draft model: a plain Hugging Face causal LM that transformers, vLLM and this project load like any other.

config.json, model.safetensors (tied weights once) and the target's tokenizer, whose vocabulary is the draft model's too. A
parallel one (PARD, 2504.18583) has two more keys in config.json: `pard_token`, which vLLM reads, and `num_depths` under
`specdec`, which this project reads.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import checkpoint as checkpoints
from specdec import hub
from specdec.checkpoint import hf_common, mtp, native
from specdec.checkpoint.hf_common import MASK_KEYS, SPECDEC_KEY, Export, Shapes
from specdec.checkpoint.lint import NOT_COMPARED, Findings, TargetFacts, check_names, check_weights
from specdec.checkpoint.native import Checkpoint
from specdec.files import read_json_object
from specdec.model.contract import layers_of
from specdec.model.target import check_contract, load_weights

PRECEDENCE = 4
DRAFT_MODEL = "draft_model"
PARD = "pard"
WRITES = {DRAFT_MODEL: {"vllm": "vllm", "sglang": "sglang"}, PARD: {"vllm": "vllm"}}
# keys that transformers adds to every config, or that name where a model was read from
IGNORED_KEYS = {
    "_name_or_path", "transformers_version", "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "is_encoder_decoder",
}  # fmt: skip
# files of a tokenizer, and of how a generation ends
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    """By its class; drafters of some other formats have a Llama's."""
    return bool(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) & set(map(str, config.get("architectures") or [])))


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return DRAFT_MODEL if mask_token(config) is None else PARD


def mask_token(config: dict[str, Any]) -> int | None:
    """The mask token, whose embedding is that of tokens not known yet, if a config.json names one. Raises ValueError for
    one that is no token id."""
    num_depths(config)
    for key in MASK_KEYS:
        token = config.get(key)
        if token is None:
            continue
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{key} is {str(token)[:40]!r} in config.json, and should be a token id")
        return token
    return None


def num_depths(config: dict[str, Any]) -> int | None:
    """For how many mask tokens the model was trained, if its config.json says so. Raises ValueError for what is no number."""
    specdec = config.get(SPECDEC_KEY)
    value = specdec.get("num_depths") if isinstance(specdec, dict) else specdec
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(
            f"{SPECDEC_KEY}.num_depths is {str(value)[:40]!r} in config.json, and should be an integer of 1 or more"
        )
    return value


def shapes(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """Name and shape of every tensor of a model, and the names that may be absent. Raises ValueError where it is not known."""
    if config.get("quantization_config"):
        raise ValueError("quantized weights have other names")
    if get_checkpoint_conversion_mapping(str(config.get("model_type"))):
        raise ValueError(f"models of type {config['model_type']!r} have other names in files than in transformers")
    model = hf_common.model_on_meta(config)
    table = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return table, {_lm_head_name(model)} if is_tied else set()


def module_name(model: Any, module: Any) -> str:
    """The name of a module inside a model."""
    return next(name for name, each in model.named_modules() if each is module)


def _lm_head_name(model: Any) -> str:
    return module_name(model, model.get_output_embeddings()) + ".weight"


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any]) -> NoReturn:
    """Raise ValueError: a causal LM is no drafter that reads the target's states; `load` reads it."""
    model_type = config.get("model_type")
    method = method_of(config, set())
    raise ValueError(f"{directory}: a causal LM (model_type {model_type!r}), which drafts with method={method}")


def find(name: str | Path, revision: str | None = None) -> Path:
    """The directory of a model: itself, `best` or else `last` of a training run, or whatever `hub.resolve` takes. Raises
    ValueError for a drafter of another method."""
    path = Path(name).expanduser()
    directory = native.find(path) if path.is_dir() else hub.resolve(str(name), revision, hub.DRAFTER_INSTEAD)
    method = _drafter_method(directory)
    if method is not None:
        raise ValueError(f"{directory} is a drafter of method {method!r}, and no causal LM; say method={method}")
    return directory


def _drafter_method(directory: Path) -> str | None:
    """The method of a directory that holds a drafter of another format; None for a model, which may hold modules, and for what
    cannot be read, which fails where it is loaded."""
    try:
        config = read_json_object(directory / "config.json")
        if config.get("format") == native.FORMAT:
            return str(config.get("method"))
        method = checkpoints.format_of(directory, config).method_of(config, set(hf_common.shapes_of(directory)))
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return None if method in WRITES or method in mtp.WRITES else method


def load(name: str | Path, revision: str | None = None, method: str = DRAFT_MODEL) -> Checkpoint:
    """A model's weights in float32, under their own names, and its config. Raises ValueError, one line, for what is no causal
    LM whose attention layers a slot cache can serve, or not in safetensors."""
    directory = find(name, revision)
    device = torch.device("cpu")
    model = load_weights(directory, torch.float32, device)
    check_contract(model, directory, torch.float32, device)
    return checkpoint_of(model, method, str(name))


def checkpoint_of(model: Any, method: str, name: str) -> Checkpoint:
    """A loaded model as a checkpoint."""
    if model.config.get_text_config() is not model.config:
        raise ValueError(
            f"{name}: a {model.config.model_type} is more than a causal LM, and cannot be trained as a draft model"
        )
    config = {key: value for key, value in model.config.to_dict().items() if key not in IGNORED_KEYS}
    config |= {"architectures": [type(model).__name__]}
    tensors = {key: tensor.detach().float() for key, tensor in model.state_dict().items()}
    native.check_values(tensors, name)
    if config.get("tie_word_embeddings"):
        tensors.pop(_lm_head_name(model))
    settings = {
        "num_hidden_layers": model.config.num_hidden_layers,
        "pard_token": mask_token(config),
        **(config.get(SPECDEC_KEY) or {}),
        "hf_config": config,
    }
    return Checkpoint(method, settings, {}, tensors, name)


def first_layers(model: Any, layer_ids: list[int], method: str, name: str) -> Checkpoint:
    """These layers of a loaded model, its embedding, final norm and output layer."""
    full = checkpoint_of(model, method, name)
    assert full.tensors is not None
    config = full.config["hf_config"]
    num_layers = full.config["num_hidden_layers"]
    refusal = f"{name}: some layers of a {model.config.model_type} alone make no model"
    layers = layers_of(model, num_layers)
    if layers is None:
        raise ValueError(f"{refusal}, since they are not in one list; give a complete model, train.drafter.model=DIR")
    for key, value in config.items():  # lists with an entry for each layer
        if isinstance(value, list) and len(value) == num_layers and key != "architectures":
            config[key] = [value[layer] for layer in layer_ids]
    if isinstance(by_layer := config.get("per_layer_config"), dict):
        by_layer = {int(layer): options for layer, options in by_layer.items()}
        config["per_layer_config"] = {i: by_layer[layer] for i, layer in enumerate(layer_ids) if layer in by_layer}
    config[model.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layer_ids)
    if "max_window_layers" in config:  # layer_types has the same
        config["max_window_layers"] = len(layer_ids)
    prefix = module_name(model, layers) + "."
    tensors = {key: tensor for key, tensor in full.tensors.items() if not key.startswith(prefix)}
    for i, layer in enumerate(layer_ids):
        layer_prefix = f"{prefix}{layer}."
        for key, tensor in full.tensors.items():
            if key.startswith(layer_prefix):
                tensors[f"{prefix}{i}.{key.removeprefix(layer_prefix)}"] = tensor
    small = hf_common.model_on_meta(config)
    expected = {key: tensor.shape for key, tensor in small.state_dict().items()}
    if config.get("tie_word_embeddings"):
        expected.pop(_lm_head_name(model), None)
    actual = {key: tensor.shape for key, tensor in tensors.items()}
    if differing := sorted(key for key in actual | expected if actual.get(key) != expected.get(key)):
        raise ValueError(
            f"{refusal}, since its {differing[0]} would be another; give a complete model, train.drafter.model=DIR"
        )
    settings = full.config | {"num_hidden_layers": len(layer_ids), "hf_config": config}
    return Checkpoint(method, settings, {}, tensors, name)


def build(checkpoint: Checkpoint) -> Any:
    """The transformers model of a checkpoint, in float32, with its weights, and without dropout."""
    assert checkpoint.tensors is not None
    hf_config = dict(checkpoint.config["hf_config"])
    config = CONFIG_MAPPING[hf_config["model_type"]].from_dict(hf_config)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="specdec")
    state = model.state_dict()
    for key, tensor in checkpoint.tensors.items():
        if key not in state or state[key].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.name}: {key} {list(tensor.shape)} is not a tensor of its config; fetch the model again"
            )
    model.load_state_dict(checkpoint.tensors, strict=False)
    tied = {_lm_head_name(model)} if hf_config.get("tie_word_embeddings") else set()
    if missing := sorted(set(state) - set(checkpoint.tensors) - tied):
        raise ValueError(f"{checkpoint.name}: the weights lack {missing[0]!r}; fetch the model again")
    return model.eval()


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    return False


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    """Write the model; every engine loads it like any other."""
    save(directory, checkpoint, Path(checkpoint.name), {}, "")


def save(directory: Path, checkpoint: Checkpoint, tokenizer_dir: Path, provenance: dict[str, Any], card: str) -> None:
    """Write a model into a directory that exists and nobody reads yet.

    tokenizer_dir: where its tokenizer is, if there is one.
    provenance: see `native.provenance`.
    card: text of README.md.
    """
    assert checkpoint.tensors is not None
    config = {key: value for key, value in checkpoint.config["hf_config"].items() if key not in (*MASK_KEYS, SPECDEC_KEY)}
    config |= {"dtype": str(next(iter(checkpoint.tensors.values())).dtype).removeprefix("torch.")}
    if checkpoint.config.get("pard_token") is not None:
        config["pard_token"] = checkpoint.config["pard_token"]
    if checkpoint.config.get("num_depths") is not None:
        config[SPECDEC_KEY] = {"num_depths": checkpoint.config["num_depths"]}
    native.write_weights(directory / "model.safetensors", checkpoint.tensors)
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, directory / name)
    native.write_json(directory / "config.json", config)
    native.write_json(directory / "provenance.json", provenance)
    (directory / "README.md").write_text(card)


# ------------------------------------------------------------------------------------------------ lint


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    engines = ("vllm", "sglang")
    tensors = check_weights(config, hf_common.read_tensors(directory), findings)
    mask = mask_token(config)
    findings.error("speculators", "format", "a causal LM; the package has no such drafters")
    vocab = config.get("vocab_size")
    if target.vocab_size not in (None, vocab):
        text = f"vocab_size is {vocab}, and the target's is {target.vocab_size}; they must be equal"
        findings.error(engines, "vocabulary", text)
    max_positions = config.get("max_position_embeddings")
    if target.max_position_embeddings and max_positions and max_positions < target.max_position_embeddings:
        limit = target.max_position_embeddings
        text = f"max_position_embeddings={max_positions} is below the target's {limit}; no drafts beyond"
        findings.warn(engines, "positions", text)
    if not config.get("tie_word_embeddings") and not any(name.endswith("lm_head.weight") for name in tensors):
        text = "no lm_head.weight, and tie_word_embeddings is not true: drafts would be random"
        findings.error(engines, "lm_head", text)
    key, count = hf_common.num_mtp_modules(config)
    if count and str(config.get("model_type")).startswith(hf_common.MTP_MODEL_TYPES):
        text = f"{key}={count} in config.json, and the weights hold no module: they were dropped; fetch the model again"
        findings.error(engines, key, text)
    try:
        table, optional = shapes(config)
    except ValueError as error:
        findings.warn(engines, NOT_COMPARED, f"names and shapes were not compared: {error}")
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if "rotary_emb." not in name}  # unused, of older files
        table = {name: shape for name, shape in table.items() if name in tensors or name not in optional}
        check_names(tensors, table, findings, engines, may_have_prefix=True)
    if mask is None:
        return
    findings.error("sglang", "pard", "PARD drafts with mask tokens, which SGLang does not; vLLM serves it")
    if not 0 <= mask < (vocab or 0):
        findings.error("vllm", "pard_token", f"pard_token={mask!r} is no token of 0..{(vocab or 0) - 1}")
    text = 'serve it with "parallel_drafting": true, without which vLLM takes it for a draft model of one token at a time'
    findings.warn("vllm", "parallel_drafting", text)
