"""Weights & Biases: the `logger` group of the configs, and the run of a directory, which is logged while it goes on."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from specdec.checked import Checked, first_line
from specdec.files import write_json
from specdec.measure.records import JsonlFile
from specdec.params import PLAIN
from specdec.run_dir import WANDB_ID

# of a finished request, while a run goes on
LIVE = ("mean_acceptance_length", "draft_acceptance_rate", "decode_tokens_per_s", "time_to_first_token_s", "queue_s")


class Logger(Checked):
    """Keys of the `logger` group. name: `wandb`, or `none` for files alone, which has no other key."""

    what: ClassVar[str] = "logger key"

    name: Literal["none", "wandb"]
    project: str = Field("specdec", min_length=1)
    entity: str | None = Field(None, min_length=1)
    group: str | None = Field(None, min_length=1)
    mode: Literal["online", "offline"] | None = None
    tags: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _for_wandb(self) -> Self:
        """What W&B refuses is refused before the run, not when it has ended."""
        if self.name == "none":
            return self
        import wandb

        for key, setting in (("project", "project"), ("entity", "entity"), ("group", "run_group"), ("tags", "run_tags")):
            value = getattr(self, key)
            try:
                wandb.Settings(**{setting: value})
            except ValidationError as error:
                raise ValueError(f"logger.{key}={value!r}: {error.errors()[0]['msg']}") from None
            except wandb.Error as error:
                raise ValueError(f"logger.{key}={value!r}: {first_line(error)}") from None
        return self


class WandbRun:
    """The W&B run of a directory, always the same one, by the id in its wandb.json. Without `logger=wandb` nothing is logged.

    Offline where there is no key.

    cfg: the config of the run, resolved.
    job_type: `train`, `eval`, ...; the prefix of its metrics.

    Raises ValueError, one line, for what W&B refuses.
    """

    def __init__(self, cfg: Mapping[str, Any], job_type: str):
        self._job_type = job_type
        self._run: Any = None
        if cfg["logger"]["name"] != "wandb":
            return
        import wandb

        logger = cfg["logger"]
        mode: Any = logger["mode"] or ("online" if _has_wandb_key() else "offline")
        self.mode = mode
        try:
            self._run = wandb.init(
                id=_wandb_id(Path(cfg["out_dir"]) / WANDB_ID),
                resume="allow",
                project=logger["project"],
                entity=logger["entity"],
                group=logger.get("group"),
                name=cfg["name"],
                job_type=job_type,
                tags=logger["tags"],
                config=dict(cfg),
                dir=cfg["out_dir"],
                mode=mode,
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            raise ValueError(f"logger=wandb: {first_line(error)}; fix that, or use logger.mode=offline") from None

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Metrics of this moment; keys without a prefix get that of the job."""
        if self._run is not None:
            self._run.log({f"{'' if '/' in key else f'{self._job_type}/'}{key}": x for key, x in _flat(metrics)}, step=step)

    def log_request(self, row: Mapping[str, Any]) -> None:
        """A request that has finished: a row of `records.request_record`. Plain decoding's have a prefix of their own."""
        prefix = f"{self._job_type}/plain" if row["method"] == PLAIN else self._job_type
        self.log({f"{prefix}/{key}": row.get(key) for key in LIVE if row.get(key) is not None})

    def finish(
        self,
        summary: Mapping[str, Any],
        files: Sequence[Path],
        rows: Sequence[Mapping[str, Any]] = (),
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        """End the run, and say where it is.

        summary: numbers, also those of mappings and lists inside, for the run's own summary.
        files: plots, to be seen, and all else as an artifact.
        rows: of requests, for a table.
        prompts: of `tasks.prompt_texts`, for that table.
        """
        if self._run is None:
            return
        import wandb

        run = self._run
        if rows:
            texts = prompts or {}
            columns: list[Any] = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
            data = [[*(row[key] for key in columns), texts.get(f"{row['prompt_id']}/{row['turn']}")] for row in rows]
            run.log({"requests": wandb.Table(columns=[*columns, "prompt"], data=data)})
        run.log({path.stem: wandb.Image(str(path)) for path in files if path.suffix == ".png"})
        others = [path for path in files if path.suffix != ".png" and path.exists()]
        if others:
            artifact = wandb.Artifact(f"{self._job_type}-{run.id}", type="results")
            for path in others:
                artifact.add_file(str(path))
            run.log_artifact(artifact)
        for key, value in _flat(summary):
            run.summary[f"{self._job_type}/{key}"] = value
        directory = Path(run.dir).parent
        run.finish()
        upload = f"; `wandb sync {directory}` uploads it" if self.mode == "offline" else ""
        print(f"wandb: {self.mode}, {directory}{upload}")  # not wrapped, so that it can be copied


class Metrics:
    """metrics.jsonl of a training run, and the same numbers in its W&B run: `train/`, `val/` for losses on held-out samples,
    `eval/` for decoding. Rows that a resumed run writes again replace the old ones.

    out_dir: of the run.
    wandb_run: of the run.
    """

    def __init__(self, out_dir: Path, wandb_run: WandbRun):
        self.rows = JsonlFile(out_dir / "metrics.jsonl")
        self._wandb_run = wandb_run

    def add(self, row: dict[str, Any]) -> None:
        if self.rows.rows and self.rows.rows[-1]["step"] >= row["step"]:
            self.rows.replace_rows([old for old in self.rows.rows if old["step"] < row["step"]])
        self.rows.add(row)
        self._wandb_run.log({_prefixed(key): value for key, value in row.items()}, step=row["step"])


def _prefixed(key: str) -> str:
    """The name in W&B of a metric of training."""
    if key.startswith("val_"):
        return f"val/{key.removeprefix('val_')}"
    return f"{'eval' if 'acceptance' in key else 'train'}/{key}"


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, number or text); the entries of a list, which are per position, become key/1, key/2, ..."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{inner}", v) for inner, v in _flat(value))
        elif isinstance(value, list):
            numbered = {str(place): v for place, v in enumerate(value, 1)}
            yield from ((f"{key}/{inner}", v) for inner, v in _flat(numbered))
        elif value is not None:
            yield key, value


def _wandb_id(path: Path) -> str:
    """The id in a file; a new one if there is no file."""
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
