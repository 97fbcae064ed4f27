"""Weights & Biases: the `logger` group of the configs, the metrics of a training run, and the results of an evaluation."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from specdec.checked import Checked, first_line
from specdec.files import write_json
from specdec.measure.records import JsonlFile
from specdec.run_dir import WANDB_ID


class Logger(Checked):
    """Keys of the `logger` group. name: `wandb`, or `none` for files alone, which has no other key."""

    what: ClassVar[str] = "logger key"

    name: Literal["none", "wandb"]
    project: str = Field("specdec", min_length=1)
    entity: str | None = Field(None, min_length=1)
    mode: Literal["online", "offline"] | None = None
    tags: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _for_wandb(self) -> Self:
        """What W&B refuses is refused before the run, not when it has ended."""
        if self.name == "none":
            return self
        import wandb

        for key, setting in (("project", "project"), ("entity", "entity"), ("tags", "run_tags")):
            value = getattr(self, key)
            try:
                wandb.Settings(**{setting: value})
            except ValidationError as error:
                raise ValueError(f"logger.{key}={value!r}: {error.errors()[0]['msg']}") from None
            except wandb.Error as error:
                raise ValueError(f"logger.{key}={value!r}: {first_line(error)}") from None
        return self


class Metrics:
    """metrics.jsonl of a training run, and the same numbers in W&B if the logger says so. Rows that a resumed run writes again
    replace the old ones."""

    def __init__(self, out_dir: Path, cfg: dict[str, Any]):
        self.rows = JsonlFile(out_dir / "metrics.jsonl")
        self.run = None
        if cfg["logger"]["name"] == "wandb":
            self.run, self.mode = _wandb_run(cfg, job_type="train")

    def add(self, row: dict[str, Any]) -> None:
        if self.rows.rows and self.rows.rows[-1]["step"] >= row["step"]:
            self.rows.replace_rows([old for old in self.rows.rows if old["step"] < row["step"]])
        self.rows.add(row)
        if self.run is not None:
            self.run.log(dict(_flat(row)), step=row["step"])

    def close(self, summary: dict[str, Any], plots: list[Path]) -> str | None:
        """Returns the mode and the directory of the W&B run, if there is one."""
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


def to_wandb(cfg: dict[str, Any], rows: list[dict[str, Any]], summary: dict[str, Any], plots: list[Path]) -> str:
    """Log a finished run: a table of requests, the summary, the plots. Offline where there is no
    key. Returns the mode and the directory of the W&B run."""
    import wandb

    run, mode = _wandb_run(cfg, job_type="eval")
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


def _wandb_run(cfg: dict[str, Any], job_type: str) -> tuple[Any, str]:
    """The W&B run of a directory: always the same one, by the id in its wandb.json; and its mode."""
    import wandb

    logger = cfg["logger"]
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
            f"logger=wandb: {first_line(error)}; fix that, or use logger.mode=offline; {cfg['out_dir']} is complete"
        ) from None
    return run, mode


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
