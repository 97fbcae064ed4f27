"""A run's files: one JSON line per request as it finishes, and a summary.

Lines are appended and flushed one by one, so an interruption loses only requests that had not finished; `resume` goes on from
there.
"""

from __future__ import annotations

import glob
import json
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec import __version__, hub
from specdec.checked import first_mistake
from specdec.checkpoint import native
from specdec.core import Request
from specdec.files import parse_json, read_json_object, write_atomically, writing
from specdec.measure.stats import RequestStats, RequestTiming, request_metrics
from specdec.measure.tasks import Task, fingerprint, request_id
from specdec.model import arena
from specdec.model.distributed import ProcessGroup
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.prompts import answer_text
from specdec.speculative_config import SpeculativePlan

_LISTS = ("drafted", "accepted", "emitted", "trimmed", "draft_s", "verify_s", "batch_size", "wall_s", "cpu_s", "proposer")
_DRAFTS = ("draft_token_ids", "draft_parents", "accepted_nodes")  # rows that were written before they were recorded lack them
_TIMES = ("queue_s", "time_to_first_token_s", "prefill_s", "prefill_cpu_s", "decode_s")


def run_identity(target: CausalLM, chosen: list[Task], params: SamplingParams, seed: int, scheme: str) -> dict[str, Any]:
    """What runs must have in common to be compared, or to be one run that goes on."""
    return {
        "target": target.name,
        "target_weights": hub.weights_digest(target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": fingerprint(chosen),
        "sampling": params.model_dump(),
        "seed": seed,
        "rejection": scheme,
    }


def drafter_weights(plan: SpeculativePlan) -> dict[str, str]:
    """`hub.weights_digest` of every drafter of a plan, by the name that it has there."""
    return {name: hub.weights_digest(directory) for name, directory in drafter_directories(plan).items()}


def drafter_directories(plan: SpeculativePlan) -> dict[str, Path]:
    """Where the weights of every drafter of a plan are, by the name that it has there."""
    local = lambda name: Path(name).expanduser().is_dir()
    return {name: native.find(name) if local(name) else hub.resolve(name) for name in plan.drafters}


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file, one by one; a last line that was cut short is left out. The file is not changed."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_json(line, str(path))
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a row of ours")
            yield row


def stats_of(row: dict[str, Any]) -> RequestStats:
    """The statistics in a row of `request_record`."""
    drafts = {key: row.get(key, []) for key in _DRAFTS}
    return RequestStats(**{key: row[key] for key in (*_LISTS, *_TIMES)}, **drafts)


def timing_of(row: dict[str, Any]) -> RequestTiming:
    """The timing in a row of a run under load."""
    return RequestTiming(row["arrival_s"], row["added_s"], stats_of(row))


class JsonlFile:
    """The JSON-lines file of one pass over the tasks. Rows of an interrupted run are read first.

    path: of the file.
    keep: hold the rows in memory too.
    """

    def __init__(self, path: Path, keep: bool = True):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._keep = keep
        is_new = not path.exists()
        if not is_new:
            self._recover()
        self._file = path.open("a", encoding="utf-8")
        if is_new:  # of a file of this name that was deleted
            self._remove_parts()
        self.take_parts()
        self.num_recovered = len(self.rows)

    def _recover(self) -> None:
        """Read the rows; a last line that was cut short is dropped. Any other malformed line is a ValueError, and the file is
        not changed."""
        # of a process that was killed in `replace_rows`
        self.path.with_name(f".{self.path.name}.tmp").unlink(missing_ok=True)
        size = 0
        lines = self.path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            is_complete = line.endswith(b"\n")
            try:
                row = parse_json(line, str(self.path))
            except ValueError:
                row = None
            if not isinstance(row, dict) or not is_complete:
                if number < len(lines) or is_complete:
                    raise ValueError(f"{self.path}, line {number}: not a row of ours; move the file away, or mend the line")
                break
            self.rows.append(row)
            size += len(line)
        os.truncate(self.path, size)

    @property
    def answered(self) -> dict[str, list[int]]:
        return {row["id"]: row["output_token_ids"] for row in self.rows}

    @property
    def stats(self) -> dict[str, RequestStats]:
        return {row["id"]: stats_of(row) for row in self.rows}

    @property
    def is_of_several_processes(self) -> bool:
        return 0 < self.num_recovered < len(self.rows)

    def add(self, row: dict[str, Any]) -> None:
        if self._keep:
            self.rows.append(row)
        with writing(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def replace_rows(self, rows: list[dict[str, Any]]) -> None:
        """Have these rows in place of all others, in the file too."""
        self._file.close()
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self.rows = rows
        self._file = self.path.open("a", encoding="utf-8")

    def take_parts(self) -> list[dict[str, Any]]:
        """Take in the rows of the files of other processes (`part`), which are removed. Returns these rows."""
        taken: list[dict[str, Any]] = []
        known = {row.get("id") for row in self.rows}
        for path in self._parts():
            file = JsonlFile(path)
            file.close()
            taken += [row for row in file.rows if row.get("id") not in known]
        if taken:
            self.replace_rows([*self.rows, *taken])
        self._remove_parts()
        return taken

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(part(Path(glob.escape(self.path.name)), "*").name))

    def _remove_parts(self) -> None:
        for path in self._parts():
            path.unlink()

    def sort(self, place_of: dict[str, int]) -> None:
        """Order the rows, by what is the place of their ids; rows without one come first."""
        in_order = sorted(self.rows, key=lambda row: place_of[row["id"]] if "id" in row else -1)
        if in_order != self.rows:
            self.replace_rows(in_order)

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def part(path: Path, number: int | str) -> Path:
    """Where a group of processes writes rows of a run that it shares with others, until the run's own file takes them in."""
    return path.with_name(f".{path.name}.part-{number}")


def open_shared(path: Path, processes: ProcessGroup) -> JsonlFile:
    """The file for the rows of this group of processes; that of the first group is the run's own."""
    number = processes.data_parallel_rank
    return JsonlFile(path if number == 0 else part(path, number))


def request_record(task: Task, turn: int, request: Request, tokenizer: Any, common: dict[str, Any]) -> dict[str, Any]:
    """The row of a finished request. common: what is the same for the whole run, such as method, rejection, K, lossless."""
    stats = request.stats
    metrics = request_metrics(stats)
    return {
        "id": request_id(task, turn),
        "prompt_id": task.id,
        "turn": turn,
        "category": task.category,
        **common,
        "sampling": request.params.model_dump(),
        "seed": request.seed,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "output_token_ids": request.output_token_ids,
        "text": answer_text(request, tokenizer),
        **metrics,
        **{key: getattr(stats, key) for key in (*_LISTS, *_DRAFTS)},
        **{key: getattr(stats, key) for key in _TIMES},
    }


def environment() -> dict[str, Any]:
    """Where a number was measured."""
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": _cpu_model() or device,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "num_threads": torch.get_num_threads(),
        "huge_pages": arena.has_huge_pages(),
    }


def _cpu_model() -> str | None:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    lines = [line for line in path.read_text().splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else None


class Numbers(BaseModel):
    """What is read of the numbers of a category, or of all requests; there are more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    mean_acceptance_length: float | None = None
    acceptance_rate_per_position: list[float | None] | None = None
    tokens_per_step: float | None = None
    decode_tokens_per_s: float | None = None
    draft_s_per_step: float | None = None
    verify_s_per_step: float | None = None
    speedup: float | None = None
    speedup_interval: list[float] | None = Field(None, min_length=2, max_length=2)
    speedup_cpu: float | None = None
    speedup_model: float | None = None
    efficiency: float | None = None


class Summary(BaseModel):
    """What is read of a summary.json of eval/run.py; there is more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    target: str = ""
    dtype: str = ""
    prompts: str = ""
    sampling: dict[str, Any] = {}
    seed: int = 0
    method: str = ""
    speculative_config: dict[str, Any] = {}
    num_speculative_tokens: int = 0
    rejection: str = ""
    lossless: bool = True
    lossless_short: str = ""
    lossless_verdict: str = Field("", alias="lossless_said")
    max_batch_size: int = 1
    max_model_len: int | None = None
    prefill_chunk_size: int = 1
    environment: dict[str, Any] = {}
    busy: list[str] = []
    overall: Numbers = Numbers()
    categories: dict[str, Numbers] = {}


class RequestRow(BaseModel):
    """What is read of a row of requests.jsonl; there is more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    id: str
    category: str
    num_prompt_tokens: int
    output_token_ids: list[int]
    sampling: dict[str, Any]
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    trimmed: list[int]
    batch_size: list[int]
    draft_s: list[float]
    verify_s: list[float]
    wall_s: list[float]
    cpu_s: list[float]
    proposer: list[str]
    draft_token_ids: list[list[int]] = []
    draft_parents: list[list[int]] = []
    accepted_nodes: list[list[int]] = []
    queue_s: float
    time_to_first_token_s: float
    prefill_s: float
    prefill_cpu_s: float
    decode_s: float

    @model_validator(mode="after")
    def _steps(self) -> RequestRow:
        steps = ("drafted", "accepted", "emitted", "trimmed", "batch_size", "draft_s", "verify_s", "wall_s", "cpu_s")
        if len({len(getattr(self, key)) for key in steps}) > 1 or len(self.proposer) not in (0, len(self.drafted)):
            raise ValueError(f"its lists ({', '.join(steps)}) are not of one length")
        if self.draft_token_ids and list(map(len, self.draft_token_ids)) != self.drafted:
            raise ValueError("draft_token_ids must have as many tokens for each step as drafted says")
        if self.draft_parents and list(map(len, self.draft_parents)) != self.drafted:
            raise ValueError("draft_parents must have as many nodes for each step as drafted says")
        if self.accepted_nodes and list(map(len, self.accepted_nodes)) != self.accepted:
            raise ValueError("accepted_nodes must have as many nodes for each step as accepted says")
        return self


def check_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Raise ValueError, one line with the row's number, for a row that eval/run.py did not write: one without a key, or with a
    value of another type."""
    for number, row in enumerate(rows, 1):
        _check(RequestRow, row, f"{path}, line {number}", "move the file away, or mend the line")


def read_summary(directory: Path, fix: str, keys: Iterable[str] = ("overall",), numbers: Iterable[str] = ()) -> dict[str, Any]:
    """The summary.json of a finished run of eval/run.py.

    directory: out_dir of the run.
    fix: the end of the error lines.
    keys: that must be there.
    numbers: that must be there overall and in every category.

    Raises ValueError, one line, for a file that is missing, malformed, or lacks a key.
    """
    path = directory / "summary.json"
    summary = read_json_object(path, fix)
    _check(Summary, summary, path, fix)
    parts = {"overall": summary.get("overall", {}), **{f"categories.{k}": v for k, v in summary.get("categories", {}).items()}}
    missing = [key for key in keys if key not in summary]
    missing += [f"{name}.{key}" for name, part in parts.items() for key in numbers if key not in part]
    if missing:
        raise ValueError(f"{path} lacks {missing[0]!r}; {fix}")
    return summary


def check_numbers(row: dict[str, Any], where: str) -> None:
    """Raise ValueError, one line that begins with `where`, for a row of metrics with values of other types."""
    _check(Numbers, row, where, "it was altered")


def _check(record: type[BaseModel], values: dict[str, Any], where: Path | str, fix: str) -> None:
    try:
        record.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {first_mistake(error)}; {fix}") from None
