"""The model card of a shared drafter, and the commands that serve it."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import checkpoint, hub, method
from specdec.checkpoint import hf_common, lint, native
from specdec.checkpoint.native import Checkpoint
from specdec.sharing.measured import Measurement

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
UNKNOWN_TARGET = "TARGET"  # in commands, for what the reader must fill in


@dataclass(frozen=True)
class Shared:
    """What is shared, for whom and under which names.

    drafter: the checkpoint.
    format: vllm, sglang, speculators or native.
    count: how many tokens to draft.
    out: the directory that is written.
    repository: of the hub, if it is uploaded.
    serve_target: the name under which the target is served, if that is not the checkpoint's.
    """

    drafter: Checkpoint
    format: str
    count: int
    out: str
    repository: str | None = None
    serve_target: str | None = None

    @property
    def target_name(self) -> str:
        """What people call the target."""
        return self.serve_target or hf_common.public_name(self.drafter) or UNKNOWN_TARGET

    def target_in_command(self, is_local: bool) -> str:
        """The target in a serve command: a hub id or a directory, since engines do not know embedded names. is_local: for this
        machine; in a card, UNKNOWN_TARGET replaces a directory."""
        name = self.drafter.target.get("name") or ""
        if self.format == native.NAME or self.serve_target is not None:
            return self.target_name
        directory = Path(name).expanduser() if name else None
        if directory is not None and not directory.is_dir():
            if HUB_ID.fullmatch(name):
                return str(name)
            is_cached = name in hub.EMBEDDED and (hub.cache_dir() / name).is_dir()
            directory = hub.resolve(name) if is_cached or name.startswith(("tiny", "random-")) else None
        return str(directory) if is_local and directory is not None else UNKNOWN_TARGET

    def serve_command(self, engine: str, is_local: bool) -> str:
        """The command that serves the drafter. engine: one that loads what was written; is_local: on this machine."""
        facts = method.facts(self.drafter.method)
        path = self.repository or (self.out if is_local else Path(self.out).name)
        name = shlex.quote(path)
        if engine == native.NAME:
            target = shlex.quote(self.target_in_command(is_local))
            return f"python eval/run.py method={self.drafter.method} checkpoint={name} model.path={target}"
        target = name if facts.served_in_target else shlex.quote(self.target_in_command(is_local))
        if engine == "sglang":
            command = f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {facts.serving['sglang']}"
            if facts.served_in_target:
                return command
            return (
                f"{command} --speculative-draft-model-path {name} --speculative-num-steps {self.count} "
                f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {self.count + 1}"
            )
        if engine not in ("vllm", "speculators"):
            return f"# see how {engine} serves a drafter; this one is {name}"
        settings: dict[str, Any] = {"method": facts.serving["vllm"]}  # vLLM serves the speculators format too
        if not facts.served_in_target:
            settings["model"] = path
        settings["num_speculative_tokens"] = self.count
        if facts.parallel_of is not None:
            settings["parallel_drafting"] = True
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(settings))}"

    def engines(self, directory: Path) -> list[str]:
        """The engines that load what was written: the one it was written for, and the other of vLLM and SGLang where the lint
        finds nothing against it."""
        if self.format not in ("vllm", "sglang"):
            return [self.format]
        name = self.drafter.method
        verdict = lint.loads(lint.check(directory))
        candidates = [engine for engine in ("vllm", "sglang") if engine in method.facts(name).serving]
        return [engine for engine in candidates if verdict[checkpoint.lint_engine(name, engine)]]


def model_card(
    shared: Shared, directory: Path, measurement: Measurement | None, provenance: dict[str, Any], note: str | None
) -> str:
    """README.md of what is shared.

    directory: with the files that were written.
    measurement: the drafter's acceptance, if it was measured.
    provenance: where the drafter comes from.
    note: a line about the measurement.
    """
    drafter = shared.drafter
    target = shared.target_name
    facts = method.facts(drafter.method)
    target_facts = ", ".join(f"{key} {value}" for key, value in drafter.target.items() if key != "name")
    target_text = f"{target} ({target_facts})" if target_facts else target
    fits_any = "hf_config" in drafter.config  # a draft model, which reads nothing but tokens
    fit = "Any target with this vocabulary will do." if fits_any else "It is right for that target alone."
    lines = ["---", *([f"base_model: {target}"] if HUB_ID.fullmatch(target) else [])]
    lines += ["tags:", "- speculative-decoding", f"- {drafter.method}", "---", ""]
    lines += [f"# {drafter.method} drafter for {target}", "", f"Drafts tokens that {target_text} verifies. {fit}", ""]
    lines += ["## Serve", ""]
    for engine in shared.engines(directory):
        lines += ["```", shared.serve_command(engine, is_local=False), "```", ""]
    if shared.format != native.NAME:
        if not facts.served_in_target and shared.target_in_command(is_local=False) == UNKNOWN_TARGET:
            name = f"the directory or hub id of {target}" if target != UNKNOWN_TARGET else "your target"
            lines += [f"{UNKNOWN_TARGET}: {name}.", ""]
        if facts.serving_note is not None:
            lines += [facts.serving_note, ""]
    lines += ["## Acceptance", "", *_acceptance(measurement), *([note] if note else []), "", "## Drafter", ""]
    lines += [f"- {key}: {value}" for key, value in drafter.config.items() if key not in ("geometry", "hf_config")]
    lines += [f"- {key}: {value}" for key, value in (drafter.config.get("geometry") or {}).items()]
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            lines.append(f"- {path.name}: sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}")
    identity = provenance.get("identity") or {}
    origin = {
        "trained with": " ".join(provenance.get("command") or []) or "not told; imported",
        "step": provenance.get("step"),
        "data": identity.get("data"),
        "seed": identity.get("seed"),
        "code": provenance.get("git_revision"),
        "torch": provenance.get("torch"),
        "written with": " ".join(provenance["shared"]["command"]),
    }
    lines += ["", "## Provenance", ""]
    lines += [f"- {key}: {value}" for key, value in origin.items() if value is not None]
    return "\n".join([*lines, "", "More in provenance.json.", ""])


def _acceptance(measurement: Measurement | None) -> list[str]:
    """What was measured, as lines of the card."""
    if measurement is None:
        return ["Not measured. Measure it: `python eval/run.py`, and share again with `eval=` its directory."]
    conditions = ", ".join(f"{key} {value}" for key, value in measurement.conditions.items() if value is not None)
    lines = [
        f"Measured by {measurement.source}: {conditions}.",
        "",
        "| prompts | mean acceptance length | tokens per step | acceptance per position | speedup |",
        "|---|---|---|---|---|",
    ]
    for name, row in {**measurement.categories, "all": measurement.overall}.items():
        rates = " ".join(f"{rate:.2f}" for rate in row.get("acceptance_rate_per_position") or [] if rate is not None)
        length, tokens, speedup = (_number(row.get(key)) for key in ("mean_acceptance_length", "tokens_per_step", "speedup"))
        lines.append(f"| {' | '.join([name, length, tokens, rates or '-', speedup])} |")
    lines += ["", "Mean acceptance length counts the bonus token, over steps with a draft."]
    if measurement.lossless:
        lines.append(f"Lossless: {measurement.lossless}.")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
