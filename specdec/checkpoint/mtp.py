"""Multi-token-prediction modules inside a target's own directory, which transformers leaves out when it loads or saves one.

Two namings: DeepSeek-V3's, where module i is `model.layers.{num_hidden_layers + i}` with `enorm`, `hnorm`, `eh_proj` and
`shared_head` (config `num_nextn_predict_layers`), and Qwen3-Next's `mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm,
layers.0}`. Experts are single tensors in both; transformers' layers, and so native drafters, hold them as one tensor.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.checkpoint import hf_common, native
from specdec.checkpoint.hf_common import MTP_MODEL_TYPES, SPECDEC_KEY, Export, Shapes, text_config
from specdec.checkpoint.lint import NOT_COMPARED, Findings, TargetFacts, check_names, check_weights
from specdec.checkpoint.native import Checkpoint

PRECEDENCE = 1
METHOD = "mtp"
WRITES = {METHOD: {"vllm": "vllm", "sglang": "sglang"}}
SHARD = "mtp.safetensors"
CONVENTIONS = ("last_hidden_kind", "hidden_feedback", "zero_first_embedding")
# native names by the names of each naming; in DeepSeek's all else is the layer's
_QWEN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "norm", "layers.0": "block"}
_DEEPSEEK = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "norm"}
_DEEPSEEK_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's embedding and output layer
_QWEN_NAME = re.compile(r"mtp\.(fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\.")
_DEEPSEEK_NAME = re.compile(r"model\.layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\.")
_NUMBERED = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return bool(traces(config, names))


def method_of(config: dict[str, Any], names: set[str]) -> str:
    return METHOD


def _is_qwen(model_type: str) -> bool:
    """Whether modules of a model type have Qwen3-Next's naming."""
    return model_type.startswith(("qwen3_next", "qwen3_5"))


def _prefixes(config: dict[str, Any], names: set[str]) -> list[str]:
    """Prefix of every module that is there, in their order."""
    if "mtp.fc.weight" in names:
        return ["mtp."]
    first = text_config(config).get("num_hidden_layers")
    if not isinstance(first, int):
        return []
    prefixes: list[str] = []
    while f"model.layers.{first + len(prefixes)}.enorm.weight" in names:
        prefixes.append(f"model.layers.{first + len(prefixes)}.")
    return prefixes


def traces(config: dict[str, Any], names: set[str]) -> list[str]:
    """Prefixes under which there is any tensor of a module, be it complete or not."""
    if any(_QWEN_NAME.match(name) for name in names):
        return ["mtp."]
    first = text_config(config).get("num_hidden_layers")
    numbered = [(int(match[1]), name) for name in names if (match := _NUMBERED.match(name))]
    later = {i for i, _ in numbered if isinstance(first, int) and i >= first}
    if not any(i in later and _DEEPSEEK_NAME.match(name) for i, name in numbered):
        return []
    return [f"model.layers.{i}." for i in sorted(later)]


def kind_of_layer(text: Any) -> int:
    """Which layer of a target its modules have the shape of: the last that attends to everything, or the last. text: the
    transformers config."""
    types = getattr(text, "layer_types", None) or []
    full = [i for i, layer_type in enumerate(types[: text.num_hidden_layers]) if layer_type == "full_attention"]
    return full[-1] if full else text.num_hidden_layers - 1


def shapes(config: dict[str, Any], count: int) -> tuple[Shapes, set[str]]:
    """Name and shape of every tensor of so many modules of a target, experts one by one, and the names that may be absent:
    copies of the target's. Raises ValueError where that is not known."""
    if config.get("quantization_config") or text_config(config).get("quantization_config"):
        raise ValueError("quantized weights have other names")
    model = hf_common.model_on_meta(config)
    text = model.config.get_text_config()
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise ValueError(f"transformers' {text.model_type} has other parts than the models that ship such modules")
    parts = {f"block.{key}": part for key, part in decoder.layers[kind_of_layer(text)].state_dict().items()}
    for norm in ("enorm", "hnorm", "norm"):
        parts |= {f"{norm}.{key}": part for key, part in decoder.norm.state_dict().items()}
    parts["eh_proj.weight"] = torch.empty(text.hidden_size, 2 * text.hidden_size, device="meta")
    is_qwen = _is_qwen(str(text.model_type))
    copies = {} if is_qwen else dict.fromkeys(_DEEPSEEK_COPIES, (text.vocab_size, text.hidden_size))
    module = {_file_name(key, is_qwen): tuple(part.shape) for key, part in _split_experts(parts).items()} | copies
    prefixes = ["mtp."] if is_qwen else [f"model.layers.{text.num_hidden_layers + i}." for i in range(count)]
    table = {f"{prefix}{key}": shape for prefix in prefixes for key, shape in module.items()}
    return table, {f"{prefix}{key}" for prefix in prefixes for key in copies}


def _native_name(name: str, is_qwen: bool) -> str:
    for file_key, native_key in (_QWEN if is_qwen else _DEEPSEEK).items():
        if name.startswith(f"{file_key}."):
            return f"{native_key}.{name.removeprefix(f'{file_key}.')}"
    return f"block.{name}"


def _file_name(name: str, is_qwen: bool) -> str:
    for file_key, native_key in (_QWEN if is_qwen else _DEEPSEEK).items():
        if name.startswith(f"{native_key}."):
            return f"{file_key}.{name.removeprefix(f'{native_key}.')}"
    return name.removeprefix("block.")


# ------------------------------------------------------------------------------------------------ read


def read(directory: Path, config: dict[str, Any] | None = None) -> Checkpoint:
    """The modules of a target's directory as a drafter for it. Raises ValueError, one line, where there are none, or where they
    are not complete."""
    config = hf_common.read_config(directory) if config is None else config
    text = text_config(config)
    names = set(hf_common.shapes_of(directory)) if list(directory.glob("*.safetensors")) else set()
    prefixes = _prefixes(config, names)
    count = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0
    if not prefixes:
        reason = "it ships none"
        if traces(config, names):
            reason = "parts of some are there, without the enorm.weight or mtp.fc.weight that marks one"
        elif count:
            reason = f"its config speaks of {count}, and the weights hold none: they were dropped"
        raise ValueError(
            f"{directory}: no multi-token-prediction modules ({reason}); train some with train/mtp.py and give model=DIR "
            "(eval/run.py: checkpoint=DIR)"
        )
    is_qwen = prefixes[0] == "mtp."
    if (is_qwen and any(name.startswith("mtp.layers.1.") for name in names)) or (count and count != len(prefixes)):
        raise ValueError(f"{directory}: {count} prediction layers in its config, and {len(prefixes)} can be read")
    tensors: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for i, prefix in enumerate(prefixes):
        for name, tensor in hf_common.read_tensors(directory, prefix).items():
            if name in _DEEPSEEK_COPIES:
                copies[f"{name} of module {i}"] = tensor
            else:
                tensors[f"mtp.{i}.{_native_name(name, is_qwen)}"] = tensor
    head = _lm_head(directory, copies)
    if head is not None:
        if len(prefixes) > 1:
            raise ValueError(
                f"{directory}: modules with output layers of their own can be read one at a time, not {len(prefixes)}"
            )
        tensors["lm_head.weight"] = head
    settings = {
        "num_modules": len(prefixes),
        "last_hidden_kind": "post_norm",
        "hidden_feedback": "own",
        "zero_first_embedding": not is_qwen,
        **(config.get(SPECDEC_KEY) or {}).get("mtp", {}),
        "own_lm_head": head is not None,
        "draft_vocab_size": text["vocab_size"],
    }
    target = {"name": str(directory), "model_type": text.get("model_type", config.get("model_type"))}
    target |= {key: text[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in text}
    native.check_values(tensors, str(directory))
    return Checkpoint(METHOD, settings, target, _join_experts(tensors, directory), str(directory))


def _lm_head(directory: Path, copies: dict[str, Tensor]) -> Tensor | None:
    """The modules' output layer, if it is not the target's. Raises ValueError for an embedding that is not the target's."""
    embedding = hf_common.read_tensors(directory, "model.embed_tokens.").get("weight")
    target_head = hf_common.read_tensors(directory, "lm_head.").get("weight", embedding)
    head = None
    for name, tensor in copies.items():
        is_embedding = name.startswith("embed")
        part = embedding if is_embedding else target_head
        if part is not None and torch.equal(part, tensor):
            continue
        if is_embedding:
            raise ValueError(f"{directory}: {name} is not the target's embedding, which modules share here")
        head = tensor
    return head


def _join_experts(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """The tensors with those of every layer's experts as two: [E, 2 I, D] and [E, D, I] (E experts of width I)."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}  # {prefix: {gate, up or down: {expert: weight}}}
    joined = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            joined[name] = tensor
    for prefix, weights in experts.items():
        count = max(e for by_expert in weights.values() for e in by_expert) + 1
        for e in range(count):
            for key in ("gate", "up", "down"):
                if e not in weights.get(key, {}):
                    raise ValueError(f"{directory}: the weights lack '{prefix}.{e}.{key}_proj.weight'; fetch them again")
        for key in ("gate", "up", "down"):
            expected = weights["up" if key == "gate" else key][0].shape  # gate and up become one tensor
            for e in range(count):
                if weights[key][e].shape != expected:
                    raise ValueError(
                        f"{directory}: '{prefix}.{e}.{key}_proj.weight' is {list(weights[key][e].shape)}, and expert 0 has "
                        f"{list(expected)}; fetch them again"
                    )
        gate_up = [torch.cat([weights["gate"][e], weights["up"][e]]) for e in range(count)]
        joined[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        joined[f"{prefix}.down_proj"] = torch.stack([weights["down"][e] for e in range(count)])
    return joined


def _split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_join_experts`."""
    split = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("mlp.experts"):
            split[name] = tensor
            continue
        for e, weight in enumerate(tensor):
            parts = zip(("gate", "up"), weight.chunk(2), strict=True) if last == "gate_up_proj" else [("down", weight)]
            for key, part in parts:
                split[f"{prefix}.{e}.{key}_proj.weight"] = part.contiguous()
    return split


# ------------------------------------------------------------------------------------------------ write


def needs_target(checkpoint: Checkpoint) -> bool:
    return True


def write(checkpoint: Checkpoint, directory: Path, export: Export) -> None:
    """Write a copy of the target with these modules in it, in place of any that it ships."""
    assert checkpoint.tensors is not None
    target = export.target
    if target is None:
        raise ValueError(f"{checkpoint.name}: MTP modules are merged into their target's directory; give target=DIR")
    checkpoint.check(METHOD, target)
    if checkpoint.config.get("draft_vocab_size") != target.vocab_size:
        raise ValueError(
            f"{checkpoint.name}: modules of a target draft over all of its vocabulary, and these over "
            f"{checkpoint.config['draft_vocab_size']} tokens; train them with train.drafter.draft_vocab_size=null"
        )
    count = checkpoint.config["num_modules"]
    is_qwen = _is_qwen(target.config.model_type)
    if is_qwen and count > 1:
        raise ValueError(f"{checkpoint.name}: {count} modules, and Qwen3-Next's naming has one; train num_modules=1")
    if checkpoint.config.get("own_lm_head"):
        raise ValueError(
            f"{checkpoint.name}: an output layer of its own, which engines replace by the target's; train with "
            "train.init.train_lm_head=false"
        )
    config = hf_common.read_config(target.path)
    text = text_config(config)
    first = text["num_hidden_layers"]
    tensors = {}
    for name, tensor in _split_experts(checkpoint.tensors).items():
        _, i, rest = name.split(".", 2)
        prefix = "mtp." if is_qwen else f"model.layers.{first + int(i)}."
        tensors[prefix + _file_name(rest, is_qwen)] = tensor
    count_key, _ = hf_common.num_mtp_modules(config)
    text[count_key] = count
    conventions = {key: checkpoint.config[key] for key in CONVENTIONS}
    config[SPECDEC_KEY] = (config.get(SPECDEC_KEY) or {}) | {"mtp": conventions}
    _copy_target(target.path, directory, config, tensors)


def _copy_target(source: Path, directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Copy the files of a target without its modules, and write a shard of new ones with an index over all.

    source: directory of the target.
    directory: where to write.
    config: the new config.json.
    tensors: the new modules.
    """
    old_prefixes = tuple(_prefixes(hf_common.read_config(source), set(hf_common.shapes_of(source))))
    weight_map: dict[str, str] = {}
    size = 0
    for path in hf_common.weight_files(source):
        with hf_common.open_weights(path) as file:
            names = list(file.keys())
            others = [name for name in names if not name.startswith(old_prefixes)] if old_prefixes else names
            if len(others) == len(names):
                shutil.copyfile(path, directory / path.name)
            elif others:
                native.write_weights(directory / path.name, {name: file.get_tensor(name) for name in others})
        weight_map |= dict.fromkeys(others, path.name)
        size += (directory / path.name).stat().st_size if others else 0
    native.write_weights(directory / SHARD, tensors)
    weight_map |= dict.fromkeys(tensors, SHARD)
    size += (directory / SHARD).stat().st_size
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != hf_common.INDEX:
            shutil.copyfile(path, directory / path.name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / hf_common.INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------ lint


def module_tensors(directory: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """The modules' tensors under their names in the file, be they complete or not."""
    prefixes = traces(config, set(hf_common.shapes_of(directory)))
    return {
        f"{prefix}{name}": tensor for prefix in prefixes for name, tensor in hf_common.read_tensors(directory, prefix).items()
    }


def lint(directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
    """Look at the modules alone, not at the rest of the target."""
    engines = ("vllm", "sglang")
    tensors = check_weights(config, module_tensors(directory, config), findings)
    text = "modules inside a target: the package fine-tunes them, and reads them from the target"
    findings.error("speculators", "format", text)
    model_type = str(config.get("text_config", config).get("model_type"))
    if model_type.startswith(MTP_MODEL_TYPES):
        _check_modules(config, tensors, model_type, findings)
    else:
        text = (
            f"model_type {model_type!r} has no class for prediction modules ({', '.join(MTP_MODEL_TYPES)} and others have); "
            "specdec decodes with them, and train/eagle.py trains what engines load for such a target"
        )
        findings.error(engines, "model_type", text)
    if read(directory, config).config["own_lm_head"]:
        text = "shared_head.head is not the target's lm_head, by which engines replace it; train with train_lm_head=false"
        findings.error(engines, "lm_head", text)


def _check_modules(config: dict[str, Any], tensors: dict[str, Tensor], model_type: str, findings: Findings) -> None:
    """Check number, names, shapes and conventions of modules that engines have a class for."""
    engines = ("vllm", "sglang")
    key, count = hf_common.num_mtp_modules(config)
    num_present = len(traces(config, set(tensors)))
    if not count:
        findings.error(engines, key, f"no {key} in config.json: the modules would not be looked for")
    elif count != num_present:
        findings.error(engines, key, f"{key}={count} in config.json, and the weights hold {num_present}; write what is there")
    try:
        table, optional = shapes(config, num_present)
    except ValueError as error:
        findings.warn(engines, NOT_COMPARED, f"names and shapes of the modules were not compared: {error}")
    else:
        if any(name.endswith("mlp.experts.gate_up_proj") for name in tensors):
            findings.warn(engines, NOT_COMPARED, "experts in one tensor: their names and shapes were not compared")
            tensors = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
            table = {name: shape for name, shape in table.items() if ".mlp.experts." not in name}
        table = {name: shape for name, shape in table.items() if name in tensors or name not in optional}
        check_names(tensors, table, findings, engines, may_have_prefix=True)
    conventions = (config.get(SPECDEC_KEY) or {}).get("mtp", {})
    engine_values = ("post_norm", "own", not _is_qwen(model_type))
    for name, value in zip(CONVENTIONS, engine_values, strict=True):
        if conventions.get(name, value) != value:
            text = f"trained with {name}={conventions[name]}, and the engines' {model_type} has {value}; train it so"
            findings.error(engines, name, text.replace("True", "true").replace("False", "false"))
