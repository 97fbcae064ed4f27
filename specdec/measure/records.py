"""A run's directory and what is written there: one JSON line per request as it finishes, and W&B when asked for.

A directory that holds a run is never overwritten. Lines are appended and flushed one by one, so an interruption loses only
requests that had not finished; `resume` goes on from there.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec import __version__, hub, lock, script
from specdec.checked import first_mistake
from specdec.checkpoint import native
from specdec.core import Request
from specdec.files import parse_json, read_json, read_json_object, writing
from specdec.measure.stats import RequestStats, RequestTiming, request_metrics
from specdec.measure.tasks import Task, fingerprint, request_id
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.prompts import answer_text
from specdec.speculative_config import SpeculativePlan

MARKER = "run.json"
LOCK = ".lock"
WANDB_ID = "wandb.json"
_WRITTEN = (  # names that runs write under
    "config.yaml", "summary.json", "requests.jsonl", "baseline.jsonl", "metrics.jsonl", "manifest.json", "left_out.json",
    "run.png", "train.png", "checkpoints", "best", "last", "bench.json", "steps.jsonl", "load.png", "choose.json", "choose.png",
    "cost.json", "cost.png", WANDB_ID,
)  # fmt: skip
_LISTS = ("drafted", "accepted", "emitted", "trimmed", "draft_s", "verify_s", "batch_size", "wall_s", "cpu_s", "proposer")
_TIMES = ("queue_s", "time_to_first_token_s", "prefill_s", "prefill_cpu_s", "decode_s")


def reserve(out_dir: Path, resume: bool, resumes: bool = True) -> None:
    """Lock a directory for this run alone, before anything expensive; `claim` takes it. It is made if there is none, and goes
    again if nothing is written there. Of the processes of one run, the first one does it for all.

    resumes: whether the script can go on with a run. Raises ValueError if another process has the directory, if it holds a run
    and resume is false, or holds none and resume is true.
    """
    if not script.is_main_process():
        return
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"out_dir={out_dir} is a file; give a directory")
    if resume and not (out_dir / MARKER).exists():
        raise ValueError(f"resume=true, but out_dir={out_dir} holds no run; leave resume out")
    if resume or lock.is_free(out_dir / LOCK):
        _refuse_taken(out_dir, resume, resumes)
    lock.acquire(out_dir / LOCK, f"out_dir={out_dir}")
    _refuse_taken(out_dir, resume, resumes)  # now that no other process can come in between


def _refuse_taken(out_dir: Path, resume: bool, resumes: bool) -> None:
    taken = (out_dir / MARKER).exists()
    if taken and not resume:
        go_on = ", or resume=true to go on with it" if resumes else ""
        raise ValueError(f"out_dir={out_dir} already holds a run; give another out_dir={go_on}")
    if not taken and out_dir.is_dir():
        found = sorted(path.name for path in out_dir.iterdir() if path.name in _WRITTEN or path.suffix == ".safetensors")
        if found:
            raise ValueError(f"out_dir={out_dir} holds {found[0]}, which is of no run of ours; give another out_dir=")


def claim(out_dir: Path, resume: bool, identity: dict[str, Any], resumes: bool = True) -> None:
    """Take a directory for a run. identity: what must be the same for a run to be resumed.

    Raises ValueError as `reserve` does, and if what is to be resumed is another run.
    """
    reserve(out_dir, resume, resumes)
    marker = out_dir / MARKER
    if resume:
        try:
            before = read_json(marker)
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise ValueError(f"{marker}: cannot be read, so nothing is known of the run; give another out_dir=")
        changed = sorted(key for key in {*before, *identity} if before.get(key) != json.loads(json.dumps(identity)).get(key))
        if changed:
            key = changed[0]
            was, now = before.get(key), json.loads(json.dumps(identity)).get(key)
            if isinstance(was, dict) and isinstance(now, dict):  # say which of its entries it is
                inner = next(inner for inner in {**was, **now} if was.get(inner) != now.get(inner))
                key, was, now = f"{key}.{inner}", was.get(inner), now.get(inner)
            raise ValueError(f"resume=true, but {key} was {was!r} and is {now!r}; use the same settings or another out_dir=")
    else:
        write_json(marker, identity)
    script.has_results(out_dir, resumes)


def run_identity(
    target: CausalLM, chosen: list[Task], params: SamplingParams, cfg: dict[str, Any], scheme: str
) -> dict[str, Any]:
    """What runs must have in common to be compared, or to be one run that goes on."""
    return {
        "target": target.name,
        "target_weights": hub.weights_digest(target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": fingerprint(chosen),
        "sampling": params.model_dump(),
        "seed": cfg["seed"],
        "rejection": scheme,
    }


def drafter_weights(plan: SpeculativePlan) -> dict[str, str]:
    """`hub.weights_digest` of every drafter of a plan, by the name that it has there."""
    digests = {}
    for name in plan.drafters:
        directory = native.find(name) if Path(name).expanduser().is_dir() else hub.resolve(name)
        digests[name] = hub.weights_digest(directory)
    return digests


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_text(json.dumps(value, indent=1, default=str) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """JsonlFile of a JSON-lines file, one by one, without touching it; a last line that was cut short is left out."""
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
    """The statistics that `request_record` wrote into a row."""
    return RequestStats(**{key: row[key] for key in (*_LISTS, *_TIMES)})


def served_of(row: dict[str, Any]) -> RequestTiming:
    """A row of a run under load, for `stats.serving_metrics`."""
    return RequestTiming(row["arrival_s"], row["added_s"], stats_of(row))


class JsonlFile:
    """The JSON-lines file of one pass over the tasks. keep: hold the rows in memory too."""

    def __init__(self, path: Path, keep: bool = True):
        self.path, self._keep = path, keep
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self._recover()
        self._file = path.open("a", encoding="utf-8")

    def _recover(self) -> None:
        """Read what an interrupted run left; a last line that was cut short is dropped. Any other line that is not ours is a
        ValueError, and nothing is touched."""
        self.path.with_name(f".{self.path.name}.tmp").unlink(missing_ok=True)  # of a process that was killed in `keep`
        good = 0
        lines = self.path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line, str(self.path))
                whole = isinstance(row, dict) and line.endswith(b"\n")
            except ValueError:
                whole = False
            if not whole:
                if number < len(lines) or line.endswith(b"\n"):
                    raise ValueError(f"{self.path}, line {number}: not a row of ours; move the file away, or mend the line")
                break
            self.rows.append(row)
            good += len(line)
        os.truncate(self.path, good)

    @property
    def answered(self) -> dict[str, list[int]]:
        return {row["id"]: row["output_token_ids"] for row in self.rows}

    @property
    def stats(self) -> dict[str, RequestStats]:
        return {row["id"]: stats_of(row) for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        if self._keep:
            self.rows.append(row)
        with writing(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def keep(self, rows: list[dict[str, Any]]) -> None:
        """Forget all other rows, in the file too."""
        self._file.close()
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with writing(self.path):
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            temporary.replace(self.path)
        self.rows, self._file = rows, self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def request_record(task: Task, turn: int, request: Request, tokenizer: Any, common: dict[str, Any]) -> dict[str, Any]:
    """One request's line. common: method, rejection, K, lossless: what is the same for the whole run."""
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
        **{key: getattr(stats, key) for key in _LISTS},
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
    lossless_verdict: str = ""
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
        return self


def check_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Raise ValueError, one line with the row's number, for a row that eval/run.py did not write: one that lacks a key, or has
    a value of another type."""
    for number, row in enumerate(rows, 1):
        _hold(RequestRow, row, f"{path}, line {number}", "move the file away, or mend the line")


def read_summary(directory: Path, fix: str, keys: Iterable[str] = ("overall",), numbers: Iterable[str] = ()) -> dict[str, Any]:
    """The summary.json of a finished run of eval/run.py. keys: those that must be there; numbers: those that must be there
    overall and in every category. Raises ValueError, one line that ends with `fix`, for one that is not there, not whole, or
    of other types than are written."""
    path = directory / "summary.json"
    summary = read_json_object(path, fix)
    _hold(Summary, summary, path, fix)
    parts = {"overall": summary.get("overall", {}), **{f"categories.{k}": v for k, v in summary.get("categories", {}).items()}}
    lacking = [key for key in keys if key not in summary]
    lacking += [f"{part}.{key}" for part, own in parts.items() for key in numbers if key not in own]
    if lacking:
        raise ValueError(f"{path} lacks {lacking[0]!r}; {fix}")
    return summary


def check_numbers(row: dict[str, Any], where: str) -> None:
    """Raise ValueError, one line that begins with `where`, for a row of metrics whose numbers are none."""
    _hold(Numbers, row, where, "it was altered")


def _hold(record: type[BaseModel], values: dict[str, Any], where: Path | str, fix: str) -> None:
    try:
        record.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {first_mistake(error)}; {fix}") from None
