"""Multi-token-prediction modules inside a target's own directory, which transformers leaves out when it loads or saves one.

Two namings: DeepSeek-V3's, where module i is `model.layers.{num_hidden_layers + i}` with `enorm`, `hnorm`, `eh_proj` and
`shared_head` (config `num_nextn_predict_layers`), and Qwen3-Next's `mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm,
layers.0}`. Experts stand one by one in both; transformers' layers, and so our drafters, hold them as one tensor.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.checked import first_line
from specdec.checkpoint import causal_lm, hf_common, native
from specdec.checkpoint.native import Checkpoint
from specdec.model.target import CausalLM

WRITES = {"mtp": ("vllm", "sglang")}
SHARD = "mtp.safetensors"
_QWEN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "norm", "layers.0": "block"}
_DEEPSEEK = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "norm"}  # all else is the layer's
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # DeepSeek's copies of the target's embedding and output layer
_QWENS_OWN = re.compile(r"mtp\.(fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\.")
_DEEPSEEKS_OWN = re.compile(r"model\.layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\.")
_NUMBERED = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _text(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _naming(model_type: str) -> str:
    return "qwen" if model_type.startswith(("qwen3_next", "qwen3_5")) else "deepseek"


def _modules(config: dict[str, Any], names: set[str]) -> dict[int, str]:
    """Prefix of every module that is there, by its number."""
    if "mtp.fc.weight" in names:
        return {0: "mtp."}
    first = _text(config).get("num_hidden_layers")
    found: dict[int, str] = {}
    if not isinstance(first, int):
        return {}
    while f"model.layers.{first + len(found)}.enorm.weight" in names:
        found[len(found)] = f"model.layers.{first + len(found)}."
    return found


def traces(config: dict[str, Any], names: set[str]) -> list[str]:
    """Prefixes under which there is anything of a module, whole or not."""
    if any(_QWENS_OWN.match(name) for name in names):
        return ["mtp."]
    first = _text(config).get("num_hidden_layers")
    numbered = [(int(found[1]), name) for name in names if (found := _NUMBERED.match(name))]
    later = {i for i, _ in numbered if isinstance(first, int) and i >= first}
    if not any(i in later and _DEEPSEEKS_OWN.match(name) for i, name in numbered):
        return []
    return [f"model.layers.{i}." for i in sorted(later)]


def recognises(config: dict[str, Any], names: set[str]) -> bool:
    return bool(traces(config, names))


def count_of(config: dict[str, Any]) -> tuple[str, Any]:
    """How many modules a config speaks of, and the key that engines read."""
    text = _text(config)
    qwen3_5 = str(text.get("model_type")).startswith("qwen3_5")
    key = "mtp_num_hidden_layers" if qwen3_5 else "num_nextn_predict_layers"
    return key, text.get(key)


def kind_of_layer(text: Any) -> int:
    """Which layer of a target its modules are like: the last that attends to everything, or just the last."""
    types = getattr(text, "layer_types", None) or []
    full = [i for i, of in enumerate(types[: text.num_hidden_layers]) if of == "full_attention"]
    return full[-1] if full else text.num_hidden_layers - 1


def shapes(config: dict[str, Any], count: int) -> tuple[hf_common.Shapes, set[str]]:
    """Name and shape of every tensor of so many modules of a target, experts one by one, and the names that may be absent:
    copies of the target's. Raises ValueError where that cannot be told."""
    if config.get("quantization_config") or _text(config).get("quantization_config"):
        raise ValueError("quantized weights have names of their own")
    model = causal_lm.on_meta(config)
    text, decoder = model.config.get_text_config(), model.get_decoder()
    qwen = _naming(str(text.model_type)) == "qwen"
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise ValueError(f"transformers' {text.model_type} has other parts than the models that ship such modules")
    parts = {f"block.{key}": part for key, part in decoder.layers[kind_of_layer(text)].state_dict().items()}
    for norm in ("enorm", "hnorm", "norm"):
        parts |= {f"{norm}.{key}": part for key, part in decoder.norm.state_dict().items()}
    parts["eh_proj.weight"] = torch.empty(text.hidden_size, 2 * text.hidden_size, device="meta")
    own = {_theirs(key, qwen): tuple(part.shape) for key, part in _experts_apart(parts).items()}
    copied = {} if qwen else dict.fromkeys(_SHARED, (text.vocab_size, text.hidden_size))
    prefixes = ["mtp."] if qwen else [f"model.layers.{text.num_hidden_layers + i}." for i in range(count)]
    table = {f"{prefix}{key}": shape for prefix in prefixes for key, shape in (own | copied).items()}
    return table, {f"{prefix}{key}" for prefix in prefixes for key in copied}


def read(directory: Path, config: dict[str, Any] | None = None) -> Checkpoint:
    """The modules of a target's directory as a drafter for it. Raises ValueError, one line, where there are none, or where they
    are not whole."""
    config = hf_common.read_config(directory) if config is None else config
    text, names = _text(config), set(hf_common.shapes_of(directory)) if list(directory.glob("*.safetensors")) else set()
    prefixes = _modules(config, names)
    told = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0
    if not prefixes:
        what = (
            "parts of some are there, without the enorm.weight or mtp.fc.weight that marks one"
            if traces(config, names)
            else f"its config speaks of {told}, and the weights hold none: they were dropped"
            if told
            else "it ships none"
        )
        raise ValueError(
            f"{directory}: no multi-token-prediction modules ({what}); train some with train/mtp.py and give model=DIR "
            "(eval/run.py: checkpoint=DIR)"
        )
    qwen = prefixes[0] == "mtp."
    if (qwen and any(name.startswith("mtp.layers.1.") for name in names)) or (told and told != len(prefixes)):
        raise ValueError(f"{directory}: {told} prediction layers in its config, and {len(prefixes)} can be read")
    tensors: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for i, prefix in prefixes.items():
        for name, tensor in _tensors(directory, prefix).items():
            if name in _SHARED:
                copies[f"{name} of module {i}"] = tensor
            else:
                tensors[f"mtp.{i}.{_ours(name, qwen)}"] = tensor
    head = _own_head(directory, copies)
    if head is not None:
        if len(prefixes) > 1:
            raise ValueError(
                f"{directory}: modules with output layers of their own can be read one at a time, not {len(prefixes)}"
            )
        tensors["lm_head.weight"] = head
    conventions = {
        "num_modules": len(prefixes),
        "last_hidden_kind": "post_norm",
        "hidden_feedback": "own",
        "zero_first_embedding": not qwen,
    } | (config.get(hf_common.OURS) or {}).get("mtp", {})
    target = {"name": str(directory), "model_type": text.get("model_type", config.get("model_type"))}
    target |= {key: text[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in text}
    conventions |= {"own_lm_head": head is not None, "draft_vocab_size": text["vocab_size"]}
    native.check_values(tensors, str(directory))
    return Checkpoint("mtp", conventions, target, _experts_joined(tensors, directory), str(directory))


def held(directory: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """The modules' tensors under their own names, whole or not."""
    prefixes = traces(config, set(hf_common.shapes_of(directory)))
    return {f"{prefix}{name}": tensor for prefix in prefixes for name, tensor in _tensors(directory, prefix).items()}


def _tensors(directory: Path, prefix: str) -> dict[str, Tensor]:
    """Everything under a prefix, without it."""
    found = {}
    for path in hf_common.files(directory):
        try:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name.startswith(prefix):
                        found[name.removeprefix(prefix)] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{directory}: {path.name} cannot be read ({first_line(error)}); fetch it again") from None
    return found


def _ours(name: str, qwen: bool) -> str:
    for theirs, ours in (_QWEN if qwen else _DEEPSEEK).items():
        if name.startswith(f"{theirs}."):
            return f"{ours}.{name.removeprefix(f'{theirs}.')}"
    return f"block.{name}"


def _theirs(name: str, qwen: bool) -> str:
    for theirs, ours in (_QWEN if qwen else _DEEPSEEK).items():
        if name.startswith(f"{ours}."):
            return f"{theirs}.{name.removeprefix(f'{ours}.')}"
    return name.removeprefix("block.")


def _own_head(directory: Path, copies: dict[str, Tensor]) -> Tensor | None:
    """The modules' output layer, if it is not the target's; an embedding of their own is refused."""
    shared = _tensors(directory, "model.embed_tokens."), _tensors(directory, "lm_head.")
    embedding, head = shared[0].get("weight"), shared[1].get("weight", shared[0].get("weight"))
    own = None
    for name, tensor in copies.items():
        part = embedding if name.startswith("embed") else head
        if part is not None and torch.equal(part, tensor):
            continue
        if name.startswith("embed"):
            raise ValueError(f"{directory}: {name} is not the target's embedding, which ours share")
        own = tensor
    return own


def _experts_joined(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """[E, 2 I, D] and [E, D, I] of every layer's experts."""
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    joined = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.fullmatch(name):
            parts.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = tensor
        else:
            joined[name] = tensor
    for prefix, of in parts.items():
        count = max(e for own in of.values() for e in own) + 1
        for e in range(count):
            for key in ("gate", "up", "down"):
                if e not in of.get(key, {}):
                    raise ValueError(f"{directory}: the weights lack '{prefix}.{e}.{key}_proj.weight'; fetch them again")
        for key in ("gate", "up", "down"):
            first = "up" if key == "gate" else key  # these two are one tensor
            for e in range(count):
                if of[key][e].shape != of[first][0].shape:
                    raise ValueError(
                        f"{directory}: '{prefix}.{e}.{key}_proj.weight' is {list(of[key][e].shape)}, and expert 0 has "
                        f"{list(of[first][0].shape)}; fetch them again"
                    )
        gate, up, down = ([of[key][e] for e in range(count)] for key in ("gate", "up", "down"))
        joined[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        joined[f"{prefix}.down_proj"] = torch.stack(down)
    return joined


def _experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    apart = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("mlp.experts"):
            apart[name] = tensor
            continue
        for e, own in enumerate(tensor):
            halves = own.chunk(2) if last == "gate_up_proj" else (own,)
            for key, part in zip(("gate", "up") if last == "gate_up_proj" else ("down",), halves, strict=True):
                apart[f"{prefix}.{e}.{key}_proj.weight"] = part.contiguous()
    return apart


def write(
    checkpoint: Checkpoint,
    directory: Path,
    engine: str,
    target: CausalLM | None = None,
    served: str | None = None,
    count: int | None = None,
) -> None:
    """A copy of the target with these modules in it, in place of any that it ships."""
    assert checkpoint.tensors is not None
    if target is None:
        raise ValueError(f"{checkpoint.name}: MTP modules are merged into their target's directory; give target=DIR")
    checkpoint.check("mtp", target)
    if checkpoint.config.get("draft_vocab_size") != target.vocab_size:
        raise ValueError(
            f"{checkpoint.name}: a target's own modules draft over its whole vocabulary, and these over "
            f"{checkpoint.config['draft_vocab_size']} tokens; train them with train.drafter.draft_vocab_size=null"
        )
    config = hf_common.read_config(target.path)
    text, qwen, count = _text(config), _naming(target.config.model_type) == "qwen", checkpoint.config["num_modules"]
    if qwen and count > 1:
        raise ValueError(f"{checkpoint.name}: {count} modules, and Qwen3-Next's naming has one; train num_modules=1")
    if checkpoint.config.get("own_lm_head"):
        raise ValueError(
            f"{checkpoint.name}: an output layer of its own, which engines replace by the target's; train with "
            "train.init.train_lm_head=false"
        )
    tensors = {}
    first = text["num_hidden_layers"]
    for name, tensor in _experts_apart(checkpoint.tensors).items():
        _, i, rest = name.split(".", 2)
        tensors[("mtp." if qwen else f"model.layers.{first + int(i)}.") + _theirs(rest, qwen)] = tensor
    text[count_of(config)[0]] = count
    ours = {key: checkpoint.config[key] for key in ("last_hidden_kind", "hidden_feedback", "zero_first_embedding")}
    config[hf_common.OURS] = (config.get(hf_common.OURS) or {}) | {"mtp": ours}
    _copy(target.path, directory, config, tensors)


def _copy(source: Path, directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The files of a target, without the modules that they hold, and a shard of new ones with an index over all."""
    old = tuple(_modules(hf_common.read_config(source), set(hf_common.shapes_of(source))).values())
    placed: dict[str, str] = {}
    size = 0
    for path in hf_common.files(source):
        with safe_open(path, "pt") as opened:
            names = list(opened.keys())
            kept = [name for name in names if not name.startswith(old)] if old else names
            if len(kept) == len(names):
                shutil.copyfile(path, directory / path.name)
            elif kept:
                native.write_weights(directory / path.name, {name: opened.get_tensor(name) for name in kept})
        placed |= dict.fromkeys(kept, path.name)
        size += (directory / path.name).stat().st_size if kept else 0
    native.write_weights(directory / SHARD, tensors)
    placed |= dict.fromkeys(tensors, SHARD)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != hf_common.INDEX:
            shutil.copyfile(path, directory / path.name)
    size += (directory / SHARD).stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    (directory / hf_common.INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
