"""What is known of a drafter beside its weights: its measured acceptance, and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import method
from specdec.checkpoint import native
from specdec.files import read_json_object
from specdec.measure import records

STATISTICS = ("mean_acceptance_length", "tokens_per_step", "acceptance_rate_per_position", "speedup")


@dataclass(frozen=True)
class Measurement:
    """Acceptance of a drafter.

    source: what measured it.
    conditions: target, dtype, rejection, num_speculative_tokens and sampling, as far as they are known.
    overall: STATISTICS over all prompts.
    categories: the same for each category of prompts.
    lossless: whether the output is that of the target, in words.
    """

    source: str
    conditions: dict[str, Any]
    overall: dict[str, Any]
    categories: dict[str, dict[str, Any]]
    lossless: str | None = None


def of_evaluation(directory: Path, checkpoint: Path, method_name: str) -> Measurement:
    """The numbers of an eval/run.py. Raises ValueError, one line, unless it has finished and was of this drafter.

    directory: its out_dir.
    checkpoint: directory of the drafter, resolved.
    method_name: of the drafter.
    """
    fix = "give the out_dir of an eval/run.py that has finished"
    summary = records.read_summary(directory, fix)
    if "mean_acceptance_length" not in summary["overall"]:
        raise ValueError(f"{directory / 'summary.json'} holds no acceptance; {fix}")
    if summary.get("method") != method_name:
        raise ValueError(
            f"eval={directory} is of method {summary.get('method')!r}, and {checkpoint} is {method_name!r}; give its own run"
        )
    settings = summary.get("speculative_config")
    settings = settings if isinstance(settings, dict) else {}
    ships_in_target = method.facts(method_name).served_in_target
    model = settings.get("model") or (summary.get("target") if ships_in_target else None)
    if not _is_same(str(model), settings.get("revision"), checkpoint):
        raise ValueError(f"eval={directory} is of the drafter {model}, and the checkpoint is {checkpoint}; give its own run")
    return Measurement(
        "eval/run.py",
        {key: summary.get(key) for key in ("target", "dtype", "rejection", "num_speculative_tokens", "sampling")},
        _statistics(summary["overall"]),
        {name: _statistics(row) for name, row in (summary.get("categories") or {}).items()},
        summary.get("lossless_said"),
    )


def _is_same(model: str, revision: str | None, checkpoint: Path) -> bool:
    """Whether a model is the checkpoint: by its own directory, a link to it, or that of its training run."""
    try:
        directory = Path(model).expanduser().resolve()
        return directory == checkpoint.parent.parent or native.find(model, revision).resolve() == checkpoint
    except ValueError:
        return False


def of_training(checkpoint: Path) -> Measurement | None:
    """The numbers that a training run measured for its checkpoint on validation prompts; None where there are none."""
    metrics = checkpoint.parent.parent / "metrics.jsonl"
    if not metrics.exists() or not (checkpoint / "provenance.json").exists():
        return None
    provenance = read_provenance(checkpoint)
    step = provenance.get("step")
    rows = records.rows_in(metrics)
    row = next((row for row in rows if row.get("step") == step and "mean_acceptance_length" in row), None)
    if row is None:
        return None
    records.check_numbers(row, f"{metrics}, step {step}")
    identity = provenance.get("identity") or {}
    conditions = {
        "target": identity.get("target"),
        "dtype": identity.get("dtype"),
        "num_speculative_tokens": (identity.get("eval") or {}).get("num_speculative_tokens"),
    }
    return Measurement(f"train/, held-out prompts, step {step}", conditions, _statistics(row), {})


def _statistics(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in STATISTICS}


def read_provenance(checkpoint: Path) -> dict[str, Any]:
    """provenance.json of a checkpoint; empty where there is none. Raises ValueError for one that training did not write."""
    path = checkpoint / "provenance.json"
    fix = "the checkpoint is not complete"
    provenance = read_json_object(path, fix) if path.exists() else {}
    identity = provenance.get("identity")
    if not isinstance(identity, dict | None) or not isinstance((identity or {}).get("eval"), dict | None):
        raise ValueError(f"{path}: identity is no object as training writes it; {fix}")
    return provenance


def without_directories(value: Any) -> Any:
    """A JSON value with absolute paths cut to their last part: directories of this machine are nobody else's business."""
    if isinstance(value, dict):
        return {key: without_directories(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_directories(inner) for inner in value]
    return re.sub(r"(?<![\w.:/-])(~|/)[^\s,\]}'\"]*/", "", value) if isinstance(value, str) else value
