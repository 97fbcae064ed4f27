"""Hold a drafter's directory against what the serving engines load, without the engines.

The rules were read in the sources of vLLM 0.33.0, SGLang 0.5.23 and `speculators` 0.9.0 (vLLM <= 0.32 for the MLP speculator).
vLLM 0.32.0 and `speculators` have run what passes them, and drafted the same (`make peer-vllm`); SGLang has not.
An *error*: the engine does not load the directory, or loads another function than was trained, mostly without a word. A
*warning*: it loads, and something may be worse than it need be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from specdec import checkpoint, hub
from specdec.checked import first_line, nearest
from specdec.checkpoint import causal_lm, hf_common, mlp_speculator, mtp, native, raw_eagle, raw_eagle3
from specdec.files import read_json_object

ENGINES = {
    "vllm": "vLLM 0.32, 0.33",
    "sglang": "SGLang 0.5.23",
    "speculators": "speculators 0.9",
    "vllm_0_32": "vLLM <= 0.32 (MLP)",  # looked at for the MLP speculator alone, which later ones do not have
}
EVERY = tuple(ENGINES)
UNCOMPARED = "not compared"  # the rule of a warning that names and shapes are known to nobody here
TODAY = ("vllm", "sglang", "speculators")
Severity = Literal["error", "warning", "ok"]


@dataclass(frozen=True)
class Finding:
    """One line about one engine. rule: a short name of what was looked at; text: why, and what to do."""

    engine: str
    severity: Severity
    rule: str
    text: str


def check(directory: str | Path, target: str | Path | None = None) -> list[Finding]:
    """What each engine would make of a directory; of one that is not named, nothing is known. target: the target's directory or
    name, to compare with; its weights are not loaded but for the embedding, and only where the drafter has one. Raises
    ValueError for a target that cannot be read."""
    directory, theirs = Path(directory).expanduser(), _Target.of(target)
    findings = Findings()
    engines, tensors = EVERY, {}
    try:
        config = hf_common.read_config(directory)
        if config.get("format") == native.FORMAT:
            findings.error(
                EVERY, "format", "a native checkpoint, which specdec alone loads; export it: train/share.py checkpoint=DIR"
            )
            return findings.findings
        kind = checkpoint.format_of(directory, config).__name__.rpartition(".")[2]
        engines = EVERY if kind == "mlp_speculator" else TODAY
        # of a target with modules, only the modules are looked at
        tensors = mtp.held(directory, config) if kind == "mtp" else hf_common.read_tensors(directory)
        _weights(findings, config, tensors)
        tensors = {key: t.float() if t.is_floating_point() and t.itemsize == 1 else t for key, t in tensors.items()}
        rules: dict[str, Any] = {
            "raw_eagle": _eagle, "raw_eagle3": _eagle3, "speculators": _speculators, "mlp_speculator": _mlp, "mtp": _mtp,
            "causal_lm": _causal_lm,
        }  # fmt: skip
        rules[kind](findings, config, tensors, theirs)
        if kind == "mtp" and mtp.read(directory, config).config["own_lm_head"]:
            text = "shared_head.head is not the target's lm_head, by which engines replace it; train with train_lm_head=false"
            findings.error(("vllm", "sglang"), "lm_head", text)
    except TargetError:
        raise
    except ValueError as error:
        findings.error(EVERY, "file", str(error))
    for engine in engines:
        if engine not in {found.engine for found in findings.findings if found.severity == "error" or found.rule == UNCOMPARED}:
            findings.add(engine, "ok", "whole", f"{len(tensors)} tensors, names and shapes as {ENGINES[engine]} wants them")
    return [found for found in findings.findings if found.engine in engines]


def loads(findings: Iterable[Finding]) -> dict[str, bool]:
    """The verdict for each engine that was looked at: nothing was found that would keep it from loading the drafter as it was
    trained."""
    findings = list(findings)
    named = {found.engine for found in findings}
    bad = {found.engine for found in findings if found.severity == "error"}
    return {engine: engine not in bad for engine in EVERY if engine in named}


class TargetError(ValueError):
    """The target cannot be read, which says nothing about the drafter."""


class Findings:
    """The findings so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, engines: str | Iterable[str], severity: Severity, rule: str, text: str) -> None:
        for engine in [engines] if isinstance(engines, str) else engines:
            self.findings.append(Finding(engine, severity, rule, text))

    def error(self, engines: str | Iterable[str], rule: str, text: str) -> None:
        self.add(engines, "error", rule, text)

    def warn(self, engines: str | Iterable[str], rule: str, text: str) -> None:
        self.add(engines, "warning", rule, text)


@dataclass
class _Target:
    """What is compared with a target, as far as it is known."""

    directory: Path | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    max_position_embeddings: int | None = None

    @classmethod
    def of(cls, name: str | Path | None) -> _Target:
        if name is None:
            return cls()
        try:
            directory = hub.resolve(str(name))
            config = read_json_object(directory / "config.json")  # engines may run a target's code; here nobody does
            inner = config.get("text_config")
            config = inner if isinstance(inner, dict) else config
        except (OSError, ValueError) as error:
            raise TargetError(f"target={name} cannot be read ({first_line(error)})") from None
        keys = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
        return cls(directory, *(config.get(key) for key in keys))

    def embedding(self) -> Tensor | None:
        """Rows of the input embedding, read from the file; None if it has another name than usual."""
        from safetensors import safe_open

        if self.directory is None or not list(self.directory.glob("*.safetensors")):
            return None
        try:
            for path in hf_common.files(self.directory):
                with safe_open(path, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        if name.endswith("embed_tokens.weight"):
                            return opened.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise TargetError(f"target={self.directory} cannot be read ({first_line(error)}); fetch it again") from None
        return None


# ---------------------------------------------------------------------------------------------------------- every format


def _weights(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Values, and the types that the config promises."""
    quantized = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    for name, tensor in tensors.items():
        if not quantized and (tensor.itemsize == 1 or not tensor.is_floating_point()) and name not in ("d2t", "t2d"):
            text = (
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}; weights are bfloat16, float16 or float32: write them so"
            )
            findings.error(EVERY, "dtype", text)
        if not native.is_finite(tensor):
            findings.error(EVERY, "finite", f"{name} holds nan or inf; take another checkpoint")
        values = tensor.float() if tensor.itemsize == 1 else tensor
        if tensor.is_floating_point() and tensor.ndim > 1 and name != "mask_hidden" and not values.any():
            findings.error(EVERY, "finite", f"{name} is all zeros: it was never loaded or trained")
    types = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()})
    if len(types) > 1:
        findings.warn(EVERY, "dtype", f"weights are of several types ({', '.join(types)}); engines cast all to the target's")
    said = config.get("torch_dtype") or config.get("dtype")
    if said is not None and len(types) == 1 and str(said).removeprefix("torch.") != types[0]:
        findings.warn(EVERY, "dtype", f"torch_dtype is {said} and the weights are {types[0]}; write what they are")


def _layer(findings: Findings, layer: dict[str, Any], theirs: _Target) -> dict[str, Any]:
    """The shape of the layer, and what of it must fit the target."""
    longest = layer.get("max_position_embeddings")
    if longest is None:
        findings.warn(TODAY, "positions", "no max_position_embeddings: 2048 is taken; write the target's")
    elif theirs.max_position_embeddings and longest < theirs.max_position_embeddings:
        text = f"max_position_embeddings={longest} is below the target's {theirs.max_position_embeddings}; drafts fail beyond"
        findings.warn(TODAY, "positions", text)
    if not {"rope_theta", "rope_parameters"} & set(layer):
        findings.warn(TODAY, "rope", "no rope_theta or rope_parameters: 10000 is taken; write what it was trained with")
    if theirs.vocab_size not in (None, layer.get("vocab_size")):
        findings.error(TODAY, "vocabulary", f"vocab_size is {layer.get('vocab_size')}, and the target's is {theirs.vocab_size}")
    return hf_common.geometry_of(layer, "config.json")


def depth_of(layer: dict[str, Any]) -> int:
    return hf_common.integer(layer, "num_hidden_layers", "config.json", 1, most=hf_common.DEEPEST)


def _names(
    findings: Findings, tensors: dict[str, Tensor], table: hf_common.Shapes, engines: tuple[str, ...], whole_names: bool = False
) -> None:
    """Names and shapes against a table. vLLM raises for an unknown name, SGLang passes over it; what is missing stays random in
    all of them. whole_names: they have the prefix `model.` that a drafter's must not have."""
    prefixed = [] if whole_names else [name for name in tensors if name.startswith("model.")]
    if prefixed:
        findings.error(
            engines, "prefix", f"{prefixed[0]}: the prefix `model.` is added while loading; write the name without it"
        )
    for name, tensor in tensors.items():
        if name in table:
            if tuple(tensor.shape) != table[name]:
                findings.error(
                    engines, "shape", f"{name} is {list(tensor.shape)}, and config.json asks for {list(table[name])}"
                )
        elif name not in prefixed:
            said = f"unknown tensor {name!r}; {nearest(name, table)}"
            for engine in engines:
                if engine.startswith("vllm") and not name.endswith(".bias"):
                    findings.error(engine, "names", f"{said} (the loader raises)")
                elif name.endswith(".bias") and tensor.any():
                    findings.error(engine, "names", f"{name} is dropped without a word, and is not zero; train without it")
                else:
                    findings.warn(engine, "names", f"{said} (passed over without a word)")
    for name in sorted(set(table) - set(tensors) - {name.removeprefix("model.") for name in prefixed}):
        findings.error(engines, "names", f"the weights lack {name!r}, which would stay random")


def _embedding(findings: Findings, tensors: dict[str, Tensor], hidden: int, vocab: int, theirs: _Target) -> None:
    """None is best: engines share the target's. One that nobody trained spoils every draft."""
    rows = tensors.pop("embed_tokens.weight", None)
    if rows is None:
        return
    if tuple(rows.shape) != (vocab, hidden):
        findings.error(TODAY, "shape", f"embed_tokens.weight is {list(rows.shape)}, and config.json asks for {[vocab, hidden]}")
        return
    if (rows == rows[0]).all():
        findings.error(TODAY, "embedding", "all rows of embed_tokens.weight are the same: it was never loaded; leave it out")
        return
    own = theirs.embedding()
    if own is None:
        text = "embed_tokens.weight is there, and cannot be compared; give target=, or leave it out if it was not trained"
        findings.warn(TODAY, "embedding", text)
    elif own.shape != rows.shape or hf_common.gap(own, rows) > 0.01:
        text = "embed_tokens.weight is not the target's; right only if it was trained, or holds the target's scale (Gemma)"
        findings.warn(("vllm", "speculators"), "embedding", text)
        findings.error("sglang", "embedding", "embed_tokens.weight is not the target's, by which SGLang replaces it")


def _vocabulary(findings: Findings, tensors: dict[str, Tensor], draft: int, vocab: int, engines: tuple[str, ...]) -> None:
    """d2t where, and only where, some tokens cannot be drafted; then with an output layer."""
    if draft == vocab:
        if "d2t" in tensors and "vllm" in engines:
            findings.error(
                "vllm", "d2t", "d2t is there although every token can be drafted: vLLM has no place for it; remove it"
            )
            findings.warn(
                [e for e in engines if e != "vllm"], "d2t", "d2t is there although every token can be drafted; remove it"
            )
        return
    if draft > vocab:
        findings.error(engines, "vocabulary", f"draft_vocab_size={draft} is more than vocab_size={vocab}")
        return
    if "lm_head.weight" not in tensors:
        text = f"draft_vocab_size={draft} of {vocab} without lm_head.weight: the target's whole output layer would be taken"
        findings.error(engines, "lm_head", text)
    if "d2t" not in tensors:
        text = f"draft_vocab_size={draft} of {vocab} without d2t: drafts would be the first {draft} ids; write the offsets"
        findings.error(engines, "d2t", text)
        return
    if tensors["d2t"].is_floating_point():
        findings.error(engines, "d2t", f"d2t is {tensors['d2t'].dtype}; ids are int64")
        return
    if tuple(tensors["d2t"].shape) != (draft,):
        findings.error(engines, "d2t", f"d2t is {list(tensors['d2t'].shape)}, and draft_vocab_size={draft} asks for {[draft]}")
        return
    try:
        hf_common.check_vocabulary({"d2t": tensors["d2t"]}, vocab, "d2t")
    except ValueError as error:
        findings.error(engines, "d2t", str(error).removeprefix("d2t: "))
        return
    if "t2d" in tensors and tuple(tensors["t2d"].shape) != (vocab,):
        findings.error(
            engines, "t2d", f"t2d is {list(tensors['t2d'].shape)}, and the target has {vocab} tokens; write {[vocab]}"
        )
    elif "t2d" in tensors:
        try:
            hf_common.check_vocabulary({key: tensors[key] for key in ("d2t", "t2d")}, vocab, "t2d")
        except ValueError as error:
            passed = [engine for engine in engines if engine != "speculators"]
            findings.error([e for e in engines if e == "speculators"], "t2d", str(error).removeprefix("t2d: "))
            findings.warn(passed, "t2d", str(error).removeprefix("t2d: "))
    elif "speculators" in engines:
        findings.error("speculators", "t2d", "no t2d beside d2t: the package needs both")


# -------------------------------------------------------------------------------------------------------------- EAGLE-1


def _eagle(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], theirs: _Target) -> None:
    config, both = raw_eagle.unwrapped(config), ("vllm", "sglang")
    findings.error("speculators", "format", "speculators has no EAGLE-1 (0.9: eagle3, peagle, mtp and block drafters)")
    for engine, name in raw_eagle.ARCHITECTURES.items():
        accepted = {name} if engine == "sglang" else {name, "EagleLlamaForCausalLM"}
        given = config.get("architectures") or []
        if not accepted & set(given[:1]):
            text = f"architectures is {given}, and {ENGINES[engine]} needs [{name!r}]; export for it by itself"
            findings.error(engine, "architecture", text)
    geometry, hidden, vocab = _layer(findings, config, theirs), config["hidden_size"], config.get("vocab_size") or 0
    if theirs.hidden_size not in (None, hidden):
        findings.error(both, "hidden_size", f"hidden_size is {hidden}, and must be the target's, {theirs.hidden_size}")
    if config.get("num_hidden_layers", 1) != 1:
        findings.warn(both, "layers", f"num_hidden_layers={config['num_hidden_layers']}: only one layer was looked at")
    held = dict(tensors)
    if held.pop("lm_head.weight", None) is not None:
        findings.error(
            "vllm", "lm_head", "lm_head.weight: EagleLlama has no output layer while it loads, and raises; remove it"
        )
        findings.warn("sglang", "lm_head", "lm_head.weight is passed over: SGLang drafts from the target's")
    if held.pop("layers.0.input_layernorm.weight", None) is not None:
        findings.error(
            "vllm", "input_layernorm", "layers.0.input_layernorm.weight: layer 0 has no first norm in EAGLE-1; remove it"
        )
        findings.warn("sglang", "input_layernorm", "layers.0.input_layernorm.weight is passed over")
    bias = held.pop("fc.bias", None)
    if bias is None:
        findings.error("sglang", "fc.bias", "no fc.bias: SGLang's fc has one, which would stay random; write zeros")
    elif bias.any():
        findings.error(
            "vllm", "fc.bias", f"fc.bias of up to {bias.abs().max():.2g} is dropped without a word; train without it"
        )
    _embedding(findings, held, hidden, vocab, theirs)
    _names(findings, held, raw_eagle.shapes(geometry, hidden), both)


# -------------------------------------------------------------------------------------------------------------- EAGLE-3


def _eagle3(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], theirs: _Target) -> None:
    findings.error("speculators", "format", "raw EAGLE-3: speculators reads its own format; export with format=speculators")
    both, nested = ("vllm", "sglang"), config.get("eagle_config") or {}
    tensors = {raw_eagle3.renamed(name): tensor for name, tensor in tensors.items()}
    known = set(raw_eagle3.ARCHITECTURES)
    given = (config.get("architectures") or [None])[0]
    if given not in known | {"LlamaForCausalLM"}:
        findings.error("vllm", "architecture", f"architectures is [{given!r}]; use LlamaForCausalLMEagle3")
    if given != "LlamaForCausalLMEagle3":
        findings.error("sglang", "architecture", f"architectures is [{given!r}]; SGLang knows LlamaForCausalLMEagle3 alone")
    geometry, hidden, vocab = _layer(findings, config, theirs), config["hidden_size"], config.get("vocab_size") or 0
    target_hidden = _target_hidden(findings, config, hidden, theirs, both)
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        findings.error("sglang", "hidden_size", "target_hidden_size is null, which SGLang multiplies; remove the key")

    qwen3 = raw_eagle3.ARCHITECTURES.get(given or "") == "qwen3"
    if any(name.endswith("q_norm.weight") for name in tensors):
        findings.error(
            "sglang", "qwen3", "q_norm and k_norm: SGLang's layer has none, and passes over them; train layer_type=llama"
        )
        if not qwen3:
            findings.error("vllm", "qwen3", f"q_norm and k_norm, and {given} has none; say Eagle3Qwen3ForCausalLM")
    flags = {key: bool(config.get(key)) for key in raw_eagle3.FLAGS}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
    flags["fc_norm"] = flags["fc_norm"] or bool(config.get("use_aux_norm"))
    _flags(findings, config, flags, both)
    if config.get("tie_word_embeddings"):
        findings.error("sglang", "lm_head", "tie_word_embeddings=true: the embedding would be the output layer; write false")
    draft = config.get("draft_vocab_size")
    if "draft_vocab_size" not in config:
        findings.error("sglang", "vocabulary", "no draft_vocab_size: SGLang stops; write null for the target's output layer")
    elif draft is None and "lm_head.weight" in tensors:
        findings.error("sglang", "lm_head", "draft_vocab_size is null: SGLang replaces lm_head by the target's; write its rows")
    elif draft == vocab and "lm_head.weight" not in tensors:
        findings.error(
            "sglang", "lm_head", f"draft_vocab_size={draft} without lm_head.weight, which would stay random; write null"
        )
    draft = vocab if draft is None else draft
    _vocabulary(findings, tensors, draft, vocab, both)

    taps = _layer_ids(findings, config, tensors, target_hidden, theirs)
    peagle = "mask_hidden" in tensors or any(config.get(key) is not None for key in raw_eagle3.MASK_KEYS)
    if peagle:
        _peagle(findings, config, tensors)
        findings.warn(
            "vllm", "parallel_drafting", 'serve it with "parallel_drafting": true, without which vLLM takes it for EAGLE-3'
        )
        findings.error("sglang", "peagle", "P-EAGLE: SGLang drafts one token at a time only; vLLM serves it")
    _rest(findings, config, tensors, geometry, (hidden, target_hidden, vocab, draft, taps), flags, qwen3, both, theirs)


def _target_hidden(findings: Findings, config: dict[str, Any], hidden: int, theirs: _Target, engines: tuple[str, ...]) -> int:
    """Width of the states that `fc` reads."""
    said = config.get("target_hidden_size") or hidden
    if theirs.hidden_size not in (None, said):
        text = f"hidden_size is {said}, and the target's {theirs.hidden_size}; write target_hidden_size={theirs.hidden_size}"
        findings.error(engines, "hidden_size", text)
    return int(said)


def _flags(findings: Findings, config: dict[str, Any], flags: dict[str, bool], engines: tuple[str, ...]) -> None:
    """What the same words mean elsewhere."""
    if "norm_before_residual" not in config:
        text = "no norm_before_residual: raw vLLM and speculators take false, vLLM's speculators format true; write it"
        findings.warn(engines, "norm_before_residual", text)
    if flags["norm_before_residual"] and "sglang" in engines:
        text = "norm_before_residual=true: SGLang adds the state without the norm; train with false to share with it"
        findings.error("sglang", "norm_before_residual", text)
    if flags["norm_output"]:
        text = "norm_output=true feeds the normed state back; SpecForge means another thing by it and feeds back the other"
        findings.warn(engines, "norm_output", text)
    if flags["norm_before_fc"] and flags["fc_norm"]:
        findings.error(
            [e for e in engines if e == "speculators"], "norms", "norm_before_fc and fc_norm are both true; it refuses"
        )
        findings.warn(
            [e for e in engines if e != "speculators"], "norms", "norm_before_fc and fc_norm are both true; rarely tried"
        )


def _layer_ids(
    findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], target_hidden: int, theirs: _Target
) -> int | None:
    """How many layers are tapped, by the ids or else by the columns of `fc`; whether both engines tap the same."""
    top, nested = config.get(raw_eagle3.IDS), (config.get("eagle_config") or {}).get(raw_eagle3.IDS)
    depth = theirs.num_layers
    for where, ids in (("", top), (" in eagle_config", nested)):
        if ids is not None and (not isinstance(ids, list) or not all(isinstance(i, int) for i in ids) or not ids):
            findings.error(("vllm", "sglang"), "layer_ids", f"{raw_eagle3.IDS}{where} is {ids!r}; give a list of layers")
            return None
        if ids is not None and ids != sorted(set(ids)):
            text = f"{raw_eagle3.IDS}{where} is {ids}: engines concatenate ascending and once each; train fc in that order"
            findings.error(("vllm", "sglang"), "layer_ids", text)
    means = top if top is not None else [i + 1 for i in nested] if nested is not None else None
    default = None if depth is None else raw_eagle3.default_ids(depth)
    if means is None:
        if default is not None and not 0 < default[0] < default[1] < default[2]:
            text = f"no {raw_eagle3.IDS}, and the default {default} of {depth} layers is not three of them; write the ids"
            findings.error(("vllm", "sglang"), "layer_ids", text)
        return _taps(findings, config, tensors, target_hidden, 3, set())
    if top is None and means != default:
        text = f"{raw_eagle3.IDS} stands in eagle_config alone, where vLLM takes other layers; write {means} at top level"
        findings.error("vllm", "layer_ids", text)
    if nested is None and top != default:
        text = f"{raw_eagle3.IDS} at top level is not read by SGLang; write {[i - 1 for i in means]} in eagle_config too"
        findings.error("sglang", "layer_ids", text)
    if top is not None and nested is not None and top != [i + 1 for i in nested]:
        text = f"{raw_eagle3.IDS} is {top} and eagle_config's {nested}, which counts outputs and must be one less"
        findings.error("sglang", "layer_ids", text)
    if depth is not None and not 0 <= min(means) <= max(means) <= depth:
        findings.error(("vllm", "sglang"), "layer_ids", f"layers {means} are outside 0..{depth}, the target's")
    if depth is not None and depth in means:
        findings.error("sglang", "layer_ids", f"layer {depth} is the last one's output, which SGLang does not capture")
    if len(means) == 1:
        findings.error(
            "sglang", "layer_ids", "one tapped layer: SGLang runs fc only where its width is not the drafter's; tap two"
        )
    implied = {len(nested)} if nested is not None else {3}
    return _taps(findings, config, tensors, target_hidden, len(means), implied)


def _taps(
    findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], target_hidden: int, taps: int, implied: set[int]
) -> int:
    """Whether `fc` has columns for so many layers, and the engines count as many."""
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else taps * target_hidden
    counted = config.get("num_aux_hidden_states")
    if counted is not None:
        implied = {counted}
    if implied - {taps}:
        text = f"{taps} layers are tapped, and engines count {min(implied - {taps})}; write num_aux_hidden_states={taps}"
        findings.error(("vllm", "sglang"), "num_aux_hidden_states", text)
    if columns != taps * target_hidden:
        text = (
            f"fc.weight reads {columns} values, and {taps} layers of {target_hidden} are {taps * target_hidden}; write the ids"
        )
        findings.error(("vllm", "sglang"), "layer_ids", text)
        return max(1, columns // target_hidden)
    return taps


def _peagle(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if not any(isinstance(config.get(key), int) for key in raw_eagle3.MASK_KEYS):
        text = f"mask_hidden without the mask token's id ({', '.join(raw_eagle3.MASK_KEYS)}); vLLM stops"
        findings.error(("vllm", "speculators"), "mask_token_id", text)
    if "mask_hidden" not in tensors:
        findings.error(("vllm", "speculators"), "mask_hidden", "a mask token's id without mask_hidden [1, 1, layers * width]")


def _rest(
    findings: Findings,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    geometry: dict[str, Any],
    sizes: tuple[int, int, int, int, int | None],
    flags: dict[str, bool],
    qwen3: bool,
    engines: tuple[str, ...],
    theirs: _Target,
) -> None:
    """Names and shapes of an EAGLE-3's tensors; sizes: drafter's width, target's width, vocabulary, draft vocabulary, taps."""
    hidden, target_hidden, vocab, draft, taps = sizes
    held = dict(tensors)
    for name in ("d2t", "t2d"):
        held.pop(name, None)
    num_layers = depth_of(config)
    own = {"geometry": geometry, "num_hidden_layers": num_layers, "draft_vocab_size": draft, **flags}
    own |= {"layer_type": "qwen3" if qwen3 else "llama", "own_lm_head": "lm_head.weight" in held}
    table = raw_eagle3.shapes(own, hidden, taps or 3, "mask_hidden" in held)
    if target_hidden != hidden and taps:
        table |= {
            name: (*shape[:-1], taps * target_hidden)
            for name, shape in table.items()
            if name in ("fc.weight", "input_norm.weight")
        }
        table |= {name: (target_hidden,) for name in table if name.startswith("fc_norm.")}
    for i in range(1, num_layers):
        first, second = f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"
        if second not in held and "sglang" in engines:
            findings.error(
                "sglang", "layers", f"the first norm of layer {i} is called {second} by SGLang; write it under both names"
            )
        if first not in held and second in held:
            findings.error(
                [e for e in engines if e != "sglang"], "layers", f"vLLM calls {second} {first}; write it under both names"
            )
            table.pop(first)
        elif second in held and first in held and not torch.equal(held[first], held[second]):
            findings.error(engines, "layers", f"{first} and {second} differ: vLLM reads one and SGLang the other")
        held.pop(second, None)
    _embedding(findings, held, hidden, vocab, theirs)
    both = tuple(engine for engine in engines if engine != "sglang")
    _names(findings, held, table, both)
    if "sglang" in engines:  # its loader takes names with the prefix too
        _names(findings, {name.removeprefix("model."): tensor for name, tensor in held.items()}, table, ("sglang",))


# ---------------------------------------------------------------------------------------------------------- speculators


def _speculators(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], theirs: _Target) -> None:
    findings.error("sglang", "format", "SGLang does not read the speculators format; export with format=sglang")
    both = ("vllm", "speculators")
    told = config.get("speculators_config")
    told = told if isinstance(told, dict) else {}
    methods, verifier = told.get("proposal_methods") or [{}], told.get("verifier") or {}
    if not isinstance(methods[0].get("speculative_tokens"), int):
        findings.error(both, "keys", "speculators_config.proposal_methods[0].speculative_tokens is missing")
    for key in ("algorithm", "default_proposal_method"):
        if not told.get(key):
            findings.error("speculators", "keys", f"speculators_config.{key} is missing")
    name = verifier.get("name_or_path")
    if not name:
        findings.error("vllm", "verifier", "speculators_config.verifier.name_or_path is missing; write the target's hub id")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith(".") or Path(name).exists():
        text = f"verifier.name_or_path={name!r} is no hub id: `vllm serve DRAFTER` refuses; serve the target, or write its id"
        findings.warn("vllm", "verifier", text)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type") not in ("llama", "qwen3"):
        kind = layer.get("model_type") if isinstance(layer, dict) else layer
        findings.error(both, "keys", f"transformer_layer_config is of type {kind!r}; llama or qwen3 is needed")
        return
    geometry, hidden, vocab = _layer(findings, layer, theirs), layer["hidden_size"], layer.get("vocab_size") or 0
    target_hidden = _target_hidden(findings, config, hidden, theirs, both)
    flags = {key: bool(config.get(key)) for key in raw_eagle3.FLAGS}
    _flags(findings, config, flags, both)
    draft = config.get("draft_vocab_size") or vocab
    _vocabulary(findings, tensors, draft, vocab, both)
    if draft == vocab and "lm_head.weight" not in tensors:
        findings.error(
            "speculators", "lm_head", "no lm_head.weight: with transformers 5.24 it is never initialised; write a copy"
        )
    if "embed_tokens.weight" not in tensors:
        findings.error(
            "speculators", "embedding", "no embed_tokens.weight: with transformers 5.24 it is never initialised; write a copy"
        )
    ids = config.get(raw_eagle3.IDS)
    if ids is not None and (not isinstance(ids, list) or ids != sorted(set(ids))):
        text = f"{raw_eagle3.IDS} is {ids}: engines concatenate ascending and once each; train fc in that order"
        findings.error(both, "layer_ids", text)
    if ids and theirs.num_layers is not None and not 0 <= min(ids) <= max(ids) <= theirs.num_layers:
        findings.error(both, "layer_ids", f"layers {ids} are outside 0..{theirs.num_layers}, the target's")
    taps = len(ids) if isinstance(ids, list) and ids else 3
    if config["speculators_model_type"] == "peagle":
        _peagle(findings, config | {"mask_token_id": config.get("mask_token_id")}, tensors)
        if not isinstance(config.get("mask_token_id"), int):
            findings.error(both, "mask_token_id", "peagle without mask_token_id")
    elif "mask_hidden" in tensors:
        findings.error("vllm", "mask_hidden", "mask_hidden in an eagle3 drafter; say speculators_model_type peagle")
    for i in range(1, depth_of(layer)):
        if f"layers.{i}.hidden_norm.weight" in tensors:
            findings.warn(
                "speculators", "layers", f"layers.{i}.hidden_norm.weight is passed over; it is SGLang's name for a norm"
            )
    sizes = (hidden, target_hidden, vocab, draft, taps)
    qwen3 = layer["model_type"] == "qwen3"
    _rest(findings, layer, tensors, geometry, sizes, flags, qwen3, both, theirs)


# --------------------------------------------------------------------------------------------------------------- MLP


def _mlp(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], theirs: _Target) -> None:
    text = "the MLP speculator is gone: vLLM has its class up to 0.32, and the V0 engine that ran it up to 0.9.2"
    findings.error("vllm", "format", text)
    findings.error(("sglang", "speculators"), "format", "there is no MLP speculator")
    old = ("vllm_0_32",)
    hidden, vocab = (hf_common.integer(config, key, "config.json") for key in ("emb_dim", "vocab_size"))
    heads = hf_common.integer(config, "n_predict", "config.json", most=hf_common.DEEPEST)
    if theirs.hidden_size not in (None, hidden):
        findings.error(old, "hidden_size", f"emb_dim is {hidden}, and the target's width is {theirs.hidden_size}")
    if theirs.vocab_size not in (None, vocab):
        findings.error(old, "vocabulary", f"vocab_size is {vocab}, and the target's is {theirs.vocab_size}")
    if len(config.get("top_k_tokens_per_head") or []) != heads:
        findings.error(old, "keys", f"top_k_tokens_per_head must have n_predict={heads} entries; nobody reads their values")
    if "max_position_embeddings" not in config:
        findings.warn(old, "positions", "no max_position_embeddings: vLLM takes 2048 for the drafter (vllm#6294)")
    own = {
        "n_predict": heads, "inner_dim": config.get("inner_dim") or hidden, "tie_weights": bool(config.get("tie_weights")),
        "own_embedding": True, "own_lm_head": True, "draft_vocab_size": vocab,
    }  # fmt: skip
    held = {name.removeprefix(mlp_speculator.PREFIX): tensor for name, tensor in tensors.items()}
    if own["tie_weights"]:
        try:
            mlp_speculator.drop_copies(held, heads, "config.json")
        except ValueError as error:
            findings.error(old, "tied", str(error).removeprefix("config.json: "))
    _names(findings, held, mlp_speculator.shapes(own, hidden), old)


# ------------------------------------------------------------------------------------------------- modules of the target


def _mtp(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], theirs: _Target) -> None:
    both, kind = ("vllm", "sglang"), str(config.get("text_config", config).get("model_type"))
    findings.error(
        "speculators", "format", "modules inside a target: the package fine-tunes them, and reads them from the target"
    )
    if not kind.startswith(MTP_TYPES):
        text = (
            f"model_type {kind!r} has no class for prediction modules ({', '.join(MTP_TYPES)} and others have); specdec "
            "decodes with them, and train/eagle.py trains what engines load for such a target"
        )
        findings.error(both, "model_type", text)
        return
    key, count = mtp.count_of(config)
    there = len(mtp.traces(config, set(tensors)))
    if not count:
        findings.error(both, key, f"no {key} in config.json: the modules would not be looked for")
    elif count != there:
        findings.error(both, key, f"{key}={count} in config.json, and the weights hold {there}; write what is there")
    try:
        table, optional = mtp.shapes(config, there)
    except ValueError as error:
        findings.warn(both, UNCOMPARED, f"names and shapes of the modules were not compared: {error}")
    else:
        if any(name.endswith("mlp.experts.gate_up_proj") for name in tensors):
            findings.warn(both, UNCOMPARED, "experts in one tensor: their names and shapes were not compared")
            tensors = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
            table = {name: shape for name, shape in table.items() if ".mlp.experts." not in name}
        _names(findings, tensors, {name: table[name] for name in table if name in tensors or name not in optional}, both, True)
    told = (config.get(hf_common.OURS) or {}).get("mtp", {})
    zero = not kind.startswith(("qwen3_next", "qwen3_5"))
    for name, value in (("last_hidden_kind", "post_norm"), ("hidden_feedback", "own"), ("zero_first_embedding", zero)):
        if told.get(name, value) != value:
            text = f"trained with {name}={told[name]}, and the engines' {kind} has {value}; train it so"
            findings.error(both, name, text.replace("True", "true").replace("False", "false"))


# What has a class for its modules in vLLM 0.33 and SGLang 0.5.23, and names them as one of our two namings.
MTP_TYPES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5")


# ------------------------------------------------------------------------------------------------------------ draft models


def _causal_lm(findings: Findings, config: dict[str, Any], tensors: dict[str, Tensor], theirs: _Target) -> None:
    both, mask = ("vllm", "sglang"), causal_lm.mask_token(config)
    findings.error("speculators", "format", "a model that stands on its own; the package has no such drafters")
    vocab, longest = config.get("vocab_size"), config.get("max_position_embeddings")
    if theirs.vocab_size not in (None, vocab):
        findings.error(
            both, "vocabulary", f"vocab_size is {vocab}, and the target's is {theirs.vocab_size}; they must be equal"
        )
    if theirs.max_position_embeddings and longest and longest < theirs.max_position_embeddings:
        text = f"max_position_embeddings={longest} is below the target's {theirs.max_position_embeddings}; no drafts beyond"
        findings.warn(both, "positions", text)
    if not config.get("tie_word_embeddings") and not any(name.endswith("lm_head.weight") for name in tensors):
        findings.error(both, "lm_head", "no lm_head.weight, and tie_word_embeddings is not true: drafts would be random")
    key, count = mtp.count_of(config)
    if count and str(config.get("model_type")).startswith(MTP_TYPES):
        text = f"{key}={count} in config.json, and the weights hold no module: they were dropped; fetch the model again"
        findings.error(both, key, text)
    try:
        table, optional = causal_lm.shapes(config)
    except ValueError as error:
        findings.warn(both, UNCOMPARED, f"names and shapes were not compared: {error}")
    else:
        held = {name: tensor for name, tensor in tensors.items() if "rotary_emb." not in name}  # of older files; idle
        _names(findings, held, {name: table[name] for name in table if name in held or name not in optional}, both, True)
    if mask is None:
        return
    findings.error("sglang", "pard", "PARD drafts with mask tokens, which SGLang does not; vLLM serves it")
    if not isinstance(mask, int) or not 0 <= mask < (vocab or 0):
        findings.error("vllm", "pard_token", f"pard_token={mask!r} is no token of 0..{(vocab or 0) - 1}")
    text = 'serve it with "parallel_drafting": true, without which vLLM takes it for a draft model of one token at a time'
    findings.warn("vllm", "parallel_drafting", text)
