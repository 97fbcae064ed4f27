"""Check a drafter's directory against what the serving engines load, without the engines.

The rules were read in the sources of vLLM 0.33.0, SGLang 0.5.23 and `speculators` 0.9.0 (vLLM <= 0.32 for the MLP speculator
and Medusa); each format's module has its own (`lint`), and this one what they share. vLLM 0.32.0 and `speculators` have run
what passes them, and drafted the same (`make peer-vllm`); SGLang has not.
An *error*: the engine does not load the directory, or loads another function than was trained, mostly without a message. A
*warning*: it loads, and something may be worse than it need be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from specdec import checkpoint, hub
from specdec.checked import first_line, nearest
from specdec.checkpoint import hf_common, native
from specdec.files import read_json_object
from specdec.model.target import is_finite

ENGINES = {
    "vllm": "vLLM 0.32, 0.33",
    "sglang": "SGLang 0.5.23",
    "speculators": "speculators 0.9",
    "vllm_0_32": "vLLM <= 0.9.2 (MLP)",  # which ran the MLP speculator; its class stayed up to 0.32
    "vllm_medusa": "vLLM <= 0.32 (Medusa)",
    "deepspec": "DeepSpec",
}
ALL_ENGINES = tuple(ENGINES)
CURRENT_ENGINES = ("vllm", "sglang", "speculators")
NOT_COMPARED = "not compared"  # the rule of a warning that the names and shapes of a format are not known here
Severity = Literal["error", "warning", "ok"]


@dataclass(frozen=True)
class Finding:
    """One line about one engine. rule: a short name of what was checked; text: why, and what to do."""

    engine: str
    severity: Severity
    rule: str
    text: str


def check(directory: str | Path, target: str | Path | None = None) -> list[Finding]:
    """What each engine would do with a directory. An engine without a finding was not looked at.

    target: directory or name of the target, to compare with. Of its weights only the embedding is read, and only where the
        drafter has one. Raises TargetError if it cannot be read.
    """
    directory = Path(directory).expanduser()
    target_facts = TargetFacts.read(target)
    findings = Findings()
    engines = ALL_ENGINES
    try:
        config = hf_common.read_config(directory)
        if config.get("format") == native.FORMAT:
            text = "a native checkpoint, which specdec alone loads; export it: train/share.py checkpoint=DIR"
            findings.error(ALL_ENGINES, "format", text)
            return findings.findings
        format = checkpoint.format_of(directory, config)
        written_for = {name for names in format.WRITES.values() for name in names.values()}
        engines = tuple(engine for engine in ENGINES if engine in {*CURRENT_ENGINES, *written_for})
        format.lint(directory, config, findings, target_facts)
    except TargetError:
        raise
    except ValueError as error:
        findings.error(ALL_ENGINES, "file", str(error))
    undecided = {each.engine for each in findings.findings if each.severity == "error" or each.rule == NOT_COMPARED}
    for engine in engines:
        if engine not in undecided:
            text = f"{findings.num_tensors} tensors, names and shapes as {ENGINES[engine]} wants them"
            findings.add(engine, "ok", "complete", text)
    return [finding for finding in findings.findings if finding.engine in engines]


def loads(findings: Iterable[Finding]) -> dict[str, bool]:
    """Whether each engine that was looked at loads the drafter as it was trained: nothing was found against it."""
    findings = list(findings)
    engines = {finding.engine for finding in findings}
    refusing = {finding.engine for finding in findings if finding.severity == "error"}
    return {engine: engine not in refusing for engine in ALL_ENGINES if engine in engines}


class TargetError(ValueError):
    """The target cannot be read, which says nothing about the drafter."""


class Findings:
    """The findings of one directory. num_tensors: how many tensors were looked at."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.num_tensors = 0

    def add(self, engines: str | Iterable[str], severity: Severity, rule: str, text: str) -> None:
        for engine in [engines] if isinstance(engines, str) else engines:
            self.findings.append(Finding(engine, severity, rule, text))

    def error(self, engines: str | Iterable[str], rule: str, text: str) -> None:
        self.add(engines, "error", rule, text)

    def warn(self, engines: str | Iterable[str], rule: str, text: str) -> None:
        self.add(engines, "warning", rule, text)


@dataclass(frozen=True)
class TargetFacts:
    """What is compared with a target, as far as it is known."""

    directory: Path | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    max_position_embeddings: int | None = None

    @classmethod
    def read(cls, name: str | Path | None) -> TargetFacts:
        """The facts of a directory or name; nothing is known of None."""
        if name is None:
            return cls()
        try:
            directory = hub.resolve(str(name))
            # from the file itself: transformers may run code for it
            config = hf_common.text_config(read_json_object(directory / "config.json"))
        except (OSError, ValueError) as error:
            raise TargetError(f"target={name} cannot be read ({first_line(error)})") from None
        keys = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
        return cls(directory, *(config.get(key) for key in keys))

    def embedding(self) -> Tensor | None:
        """Rows of the input embedding, read from the file; None if it has another name than usual."""
        if self.directory is None or not list(self.directory.glob("*.safetensors")):
            return None
        try:
            for path in hf_common.weight_files(self.directory):
                with hf_common.open_weights(path) as file:
                    for name in file.keys():  # noqa: SIM118
                        if name.endswith("embed_tokens.weight"):
                            rows: Tensor = file.get_tensor(name)
                            return rows
        except (OSError, ValueError) as error:
            raise TargetError(f"target={self.directory} cannot be read ({first_line(error)}); fetch it again") from None
        return None


# ------------------------------------------------------------------------------------------------ rules of several formats


def check_weights(config: dict[str, Any], tensors: dict[str, Tensor], findings: Findings) -> dict[str, Tensor]:
    """Check values, and that dtypes are those of the config. Returns the tensors, those of 8 bits as float32."""
    findings.num_tensors = len(tensors)
    quantized = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    for name, tensor in tensors.items():
        if not quantized and (tensor.itemsize == 1 or not tensor.is_floating_point()) and name not in ("d2t", "t2d"):
            dtype = str(tensor.dtype).removeprefix("torch.")
            text = f"{name} is {dtype}; weights are bfloat16, float16 or float32: write them so"
            findings.error(ALL_ENGINES, "dtype", text)
        if not is_finite(tensor):
            findings.error(ALL_ENGINES, "finite", f"{name} holds nan or inf; take another checkpoint")
        values = tensor.float() if tensor.itemsize == 1 else tensor
        if tensor.is_floating_point() and tensor.ndim > 1 and name != "mask_hidden" and not values.any():
            findings.error(ALL_ENGINES, "finite", f"{name} is all zeros: it was never loaded or trained")
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()})
    if len(dtypes) > 1:
        text = f"weights are of several types ({', '.join(dtypes)}); engines cast all to the target's"
        findings.warn(ALL_ENGINES, "dtype", text)
    config_dtype = config.get("torch_dtype") or config.get("dtype")
    if config_dtype is not None and len(dtypes) == 1 and str(config_dtype).removeprefix("torch.") != dtypes[0]:
        text = f"torch_dtype is {config_dtype} and the weights are {dtypes[0]}; write what they are"
        findings.warn(ALL_ENGINES, "dtype", text)
    return {name: t.float() if t.is_floating_point() and t.itemsize == 1 else t for name, t in tensors.items()}


def check_layer(layer: dict[str, Any], findings: Findings, target: TargetFacts) -> dict[str, Any]:
    """Check what of a layer's config must fit the target. Returns the layer's geometry."""
    max_positions = layer.get("max_position_embeddings")
    if max_positions is None:
        findings.warn(CURRENT_ENGINES, "positions", "no max_position_embeddings: 2048 is taken; write the target's")
    elif target.max_position_embeddings and max_positions < target.max_position_embeddings:
        limit = target.max_position_embeddings
        text = f"max_position_embeddings={max_positions} is below the target's {limit}; drafts fail beyond"
        findings.warn(CURRENT_ENGINES, "positions", text)
    if not {"rope_theta", "rope_parameters"} & set(layer):
        text = "no rope_theta or rope_parameters: 10000 is taken; write what it was trained with"
        findings.warn(CURRENT_ENGINES, "rope", text)
    if target.vocab_size not in (None, layer.get("vocab_size")):
        text = f"vocab_size is {layer.get('vocab_size')}, and the target's is {target.vocab_size}"
        findings.error(CURRENT_ENGINES, "vocabulary", text)
    return hf_common.geometry_of(layer, "config.json")


def check_names(
    tensors: dict[str, Tensor],
    table: hf_common.Shapes,
    findings: Findings,
    engines: tuple[str, ...],
    may_have_prefix: bool = False,
) -> None:
    """Check names and shapes. vLLM raises for an unknown name, SGLang ignores it; what is missing stays random in both.

    tensors: of the directory.
    table: name and shape of every tensor that must be there.
    engines: the findings are about these.
    may_have_prefix: false for a drafter, whose names must not begin with `model.`.
    """
    prefixed = [] if may_have_prefix else [name for name in tensors if name.startswith("model.")]
    if prefixed:
        text = f"{prefixed[0]}: the prefix `model.` is added while loading; write the name without it"
        findings.error(engines, "prefix", text)
    for name, tensor in tensors.items():
        if name in table:
            if tuple(tensor.shape) != table[name]:
                text = f"{name} is {list(tensor.shape)}, and config.json asks for {list(table[name])}"
                findings.error(engines, "shape", text)
        elif name not in prefixed:
            text = f"unknown tensor {name!r}; {nearest(name, table)}"
            for engine in engines:
                if engine.startswith("vllm") and not name.endswith(".bias"):
                    findings.error(engine, "names", f"{text} (the loader raises)")
                elif name.endswith(".bias") and tensor.any():
                    findings.error(engine, "names", f"{name} is dropped silently, and is not zero; train without it")
                else:
                    findings.warn(engine, "names", f"{text} (ignored silently)")
    for name in sorted(set(table) - set(tensors) - {name.removeprefix("model.") for name in prefixed}):
        findings.error(engines, "names", f"the weights lack {name!r}, which would stay random")


def check_embedding(tensors: dict[str, Tensor], hidden: int, vocab: int, findings: Findings, target: TargetFacts) -> None:
    """Check and remove an embedding. Best is to have none: engines share the target's; an untrained one spoils every draft.

    tensors: of the directory, changed in place.
    hidden, vocab: shape of the embedding, [vocab, hidden].
    """
    rows = tensors.pop("embed_tokens.weight", None)
    if rows is None:
        return
    if tuple(rows.shape) != (vocab, hidden):
        text = f"embed_tokens.weight is {list(rows.shape)}, and config.json asks for {[vocab, hidden]}"
        findings.error(CURRENT_ENGINES, "shape", text)
        return
    if (rows == rows[0]).all():
        text = "all rows of embed_tokens.weight are the same: it was never loaded; leave it out"
        findings.error(CURRENT_ENGINES, "embedding", text)
        return
    target_rows = target.embedding()
    if target_rows is None:
        text = "embed_tokens.weight is there, and cannot be compared; give target=, or leave it out if it was not trained"
        findings.warn(CURRENT_ENGINES, "embedding", text)
    elif target_rows.shape != rows.shape or _relative_difference(target_rows, rows) > 0.01:
        text = "embed_tokens.weight is not the target's; right only if it was trained, or holds the target's scale (Gemma)"
        findings.warn(("vllm", "speculators"), "embedding", text)
        findings.error("sglang", "embedding", "embed_tokens.weight is not the target's, by which SGLang replaces it")


def _relative_difference(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tensors over their largest value."""
    scale = max(a.abs().max().item(), b.abs().max().item())
    return (a.float() - b.float()).abs().max().item() / (scale or 1.0)
