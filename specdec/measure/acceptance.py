"""The acceptance of a finished run of eval/run.py, from which eval/profile_cost.py proposes how much to draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.measure import records, stats
from specdec.model.target import CausalLM
from specdec.policy import cost_table
from specdec.policy.cost_table import CostTable


@dataclass(frozen=True)
class Acceptance:
    """What `stats.survival` returns for a run.

    survival: P(a step has i draft tokens and all are accepted), for i = 1 .. K.
    draft_share: P(a step has i draft tokens).
    num_steps: steps that these are of.
    """

    survival: list[float]
    draft_share: list[float]
    num_steps: int


@dataclass(frozen=True)
class FinishedRun:
    """summary, rows: summary.json and requests.jsonl of a run of eval/run.py."""

    directory: Path
    summary: dict[str, Any]
    rows: list[dict[str, Any]]

    def acceptance(self, target: CausalLM, drafts_trees: bool) -> Acceptance:
        """ValueError, one line, if the run had another target, chains in place of trees, or no step with a full draft."""
        for key, value in (("target", target.name), ("dtype", str(target.dtype).removeprefix("torch."))):
            if self.summary.get(key) != value:
                raise ValueError(f"acceptance={self.directory}: a run of {key}={self.summary.get(key)!r}, not {value!r}")
        max_model_len = self.summary.get("max_model_len") or target.max_model_len
        budgets = []
        for row in self.rows:
            room = max_model_len - row["num_prompt_tokens"]
            budgets.append(min(room, row["sampling"]["max_tokens"] or room))
        all_stats = [records.stats_of(row) for row in self.rows]
        if all_stats and drafts_trees != (had_trees := any(stats.draft_parents for stats in all_stats)):
            kinds = {True: "trees", False: "chains"}
            raise ValueError(
                f"acceptance={self.directory}: a run with {kinds[had_trees]}, and here drafts are {kinds[drafts_trees]}"
            )
        acceptance = Acceptance(*stats.survival(all_stats, budgets, self.summary["num_speculative_tokens"]))
        if not acceptance.num_steps:
            raise ValueError(f"acceptance={self.directory}: no step of it had a full draft; decode more tokens")
        return acceptance


def read_run(directory: Path, method: str) -> FinishedRun:
    """ValueError, one line, for a directory that holds no finished run, and for a run whose acceptance says nothing about the
    method."""
    key = f"acceptance={directory}"
    if not all((directory / name).is_file() for name in ("summary.json", "requests.jsonl")):
        raise ValueError(f"{key}: not the out_dir of a finished eval/run.py")
    try:
        summary = records.read_summary(directory, "run it again", ("target", "dtype", "method", "num_speculative_tokens"))
        rows = list(records.rows_in(directory / "requests.jsonl"))
        records.check_rows(rows, directory / "requests.jsonl")
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from None
    if summary.get("method") != method:
        raise ValueError(f"{key}: a run of method {summary.get('method')!r}, not {method!r}; give one of the same method")
    settings = summary.get("speculative_config", {})
    for name in ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification"):
        if settings.get(name):
            raise ValueError(f"{key}: its drafts were cut by {name}; give a run without it")
    if settings.get("num_speculative_tokens") == "auto":
        raise ValueError(f"{key}: its K was chosen step by step; give a run with a number as num_speculative_tokens")
    if not summary.get("lossless", True):
        raise ValueError(f"{key}: its acceptance is that of {summary.get('rejection')}, not the drafter's; give a lossless run")
    if not rows:
        raise ValueError(f"{key}: no requests in it")
    return FinishedRun(directory, summary, rows)


def with_schedule(table: CostTable, acceptance: Acceptance, max_draft: int) -> CostTable:
    """The table with a proposed schedule. max_draft: the longest draft of it."""
    schedule = cost_table.best_schedule(table, acceptance.survival, max_draft, acceptance.draft_share)
    entry = {"survival": acceptance.survival, "reach": acceptance.draft_share, "num_steps": acceptance.num_steps}
    return replace(table, schedule=schedule, about={**table.about, "acceptance": entry})
