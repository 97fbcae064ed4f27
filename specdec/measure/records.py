"""A run's directory and what is written there: one JSON line per request as it finishes, and W&B when asked for.

A directory that holds a run is never overwritten. Lines are appended and flushed one by one, so an interruption loses only
requests that had not finished; `resume` goes on from there.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationError

from specdec import __version__, hub, lock, script
from specdec.checked import Checked, first_line
from specdec.checkpoint import native
from specdec.core import Request
from specdec.files import parse_json, read_json, writing
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
    script.keeps(out_dir, resumes)


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


class Logger(Checked):
    """Keys of the `logger` group. name: `wandb`, or `none` for files alone, which has no other key."""

    what: ClassVar[str] = "logger key"

    name: Literal["none", "wandb"]
    project: str = Field("specdec", min_length=1)
    entity: str | None = Field(None, min_length=1)
    mode: Literal["online", "offline"] | None = None
    tags: list[str] = Field(default_factory=list)


def check_logger(logger: dict[str, Any]) -> None:
    """Raise ValueError, one line, for what W&B would refuse when the run has ended."""
    for key, value in Logger(**logger).model_dump().items():
        if logger["name"] == "wandb" and key in ("project", "entity", "tags"):
            import wandb

            try:
                wandb.Settings(**{"run_tags" if key == "tags" else key: value})
            except ValidationError as error:
                raise ValueError(f"logger.{key}={value!r}: {error.errors()[0]['msg']}") from None
            except wandb.Error as error:
                raise ValueError(f"logger.{key}={value!r}: {first_line(error)}") from None


class Metrics:
    """metrics.jsonl of a training run, and the same numbers in W&B when asked for. JsonlFile that a resumed run makes again replace
    the old ones."""

    def __init__(self, out_dir: Path, logger: dict[str, Any], cfg: dict[str, Any]):
        self.rows = JsonlFile(out_dir / "metrics.jsonl")
        self.run = None
        if logger["name"] == "wandb":
            self.run, self.mode = _wandb_run(logger, cfg, job_type="train")

    def add(self, row: dict[str, Any]) -> None:
        if self.rows.rows and self.rows.rows[-1]["step"] >= row["step"]:
            self.rows.keep([old for old in self.rows.rows if old["step"] < row["step"]])
        self.rows.add(row)
        if self.run is not None:
            self.run.log(dict(_flat(row)), step=row["step"])

    def close(self, summary: dict[str, Any], plots: list[Path]) -> str | None:
        """Returns where W&B keeps the run, if it does."""
        self.rows.close()
        if self.run is None:
            return None
        import wandb

        self.run.log({path.stem: wandb.Image(str(path)) for path in plots})
        for key, value in _flat(summary):
            self.run.summary[key] = value
        self.run.finish()
        return f"{self.mode}, {self.run.dir}"


def _flat(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, number or text); the entries of a list, which are per position, become key/1, key/2, ..."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{inner}", v) for inner, v in _flat(value))
        elif isinstance(value, list):
            yield from ((f"{key}/{place}", v) for place, v in enumerate(value, 1) if v is not None)
        elif value is not None:
            yield key, value


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


def to_wandb(
    logger: dict[str, Any], cfg: dict[str, Any], rows: list[dict[str, Any]], summary: dict[str, Any], plots: list[Path]
) -> str:
    """Log a finished run: a table of requests, the summary, the plots. Offline where there is no key. Returns where it went."""
    import wandb

    run, mode = _wandb_run(logger, cfg, job_type="eval")
    columns: list[Any] = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    table = wandb.Table(columns=columns, data=[[row[key] for key in columns] for row in rows])
    images = {path.stem: wandb.Image(str(path)) for path in plots}
    run.log({"requests": table, **images})
    for key, value in summary["overall"].items():
        if isinstance(value, int | float | str | None):
            run.summary[key] = value
    run.summary["by_category"] = {name: numbers for name, numbers in summary["categories"].items()}
    run.finish()
    return f"{mode}, {run.dir}"


def _wandb_run(logger: dict[str, Any], cfg: dict[str, Any], job_type: str) -> tuple[Any, str]:
    """A run of W&B: of a directory always the same one, whose id is kept there."""
    import wandb

    mode: Any = logger["mode"] or ("online" if _has_wandb_key() else "offline")
    try:
        run = wandb.init(
            id=_wandb_id(Path(cfg["out_dir"]) / WANDB_ID),
            resume="allow",
            project=logger["project"],
            entity=logger["entity"],
            name=cfg["name"],
            job_type=job_type,
            tags=logger["tags"],
            config=cfg,
            dir=cfg["out_dir"],
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
    except wandb.Error as error:
        raise ValueError(
            f"logger=wandb: {first_line(error)}; mend that, or use logger.mode=offline; the files in {cfg['out_dir']} are whole"
        ) from None
    return run, mode


def _wandb_id(path: Path) -> str:
    """The id in a file, which is made if there is none."""
    if not path.exists():
        write_json(path, {"id": os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)})
    try:
        return str(json.loads(path.read_text())["id"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: holds no id of a W&B run; remove it to begin another run there") from None


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path.home() / ".netrc"
    return netrc.exists() and "wandb" in netrc.read_text()
