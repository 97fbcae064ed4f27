"""Run configs: YAML files of conf/, composed by Hydra, checked, and handed to a script as a record of `specdec.config.pages`.

`command_line` checks what was typed, `pages` has the records. Only this package and the scripts import Hydra.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel
from yaml import MarkedYAMLError

from specdec import hub, run_dir
from specdec.checked import nearest
from specdec.config import command_line, help
from specdec.files import folder, write_atomically
from specdec.script import fail, is_main_process, one_line

CONF = folder("conf")
INPUT_FILES = ("task.path", "prompts")  # keys whose values are files
NOT_RESUMED = {  # pages whose runs cannot go on, and why
    "load": "a run under load cannot go on, since its clock has stopped",
    "choose": "a run under load cannot go on, since its clock has stopped",
    "profile_cost": "a profile takes a minute, and is not resumed",
    "bench": "a benchmark is not resumed",
}
SHARED = ("eval", "train", "prepare", "extract")  # pages whose work several processes may share
OmegaConf.register_new_resolver("target", command_line.target_name, replace=True)
OmegaConf.register_new_resolver("run_dir", run_dir.default, replace=True)


def launch(page: str, run: Callable[[Any], object], *defaults: str) -> None:
    """Check the command line, compose the config, and call a script's function with its record: once, or for every job of a
    sweep, each with a directory of its own.

    page: the name of a file of conf/, and of its record in `pages.PAGES`
    run: takes the record
    defaults: `key=value` words of the script itself, for keys that the command line does not give

    Ends the program with one line for what is refused.
    """
    if command_line.COMPLETION & set(sys.argv[1:]):
        _complete(page)
        return
    typed = [word.partition("=")[0] for word in sys.argv[1:]]
    sys.argv[1:] += [word for word in defaults if word.partition("=")[0] not in typed]
    if {"--help", "-h"} & set(typed):
        print(help.of_page(CONF, page, run.__globals__["__doc__"], sys.argv[1:]))
        return
    if (started := int(os.environ.get("WORLD_SIZE", 1))) > 1 and page not in SHARED:
        fail(f"torchrun has started {started} processes, and {Path(sys.argv[0]).name} works in one; leave torchrun out")
    try:
        with _plain_errors():
            sys.argv[1:] = command_line.check(CONF, page, sys.argv[1:], partial(_record, page))
    except MarkedYAMLError as error:
        mark = error.problem_mark
        fail(f"{mark.name}, line {mark.line + 1}: not YAML ({error.problem})" if mark else error)
    except (ValueError, RecursionError) as error:
        fail(error)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here; Hydra would print several lines
    command = list(sys.argv)
    sys.argv.append(f"hydra.job.name={Path(sys.argv[0]).stem}")

    def job(composed: DictConfig) -> None:
        sys.argv[:] = command  # what a checkpoint says it was made by
        # here already: of a job that fails, Hydra says so in a line of its own; another launcher carries the error back
        with contextlib.nullcontext() if launcher else one_line(), _plain_errors():
            run(_with_job_directory(_record(page, composed)))

    launcher = command_line.value_of(command, "hydra/launcher")
    if launcher:
        print(f"jobs are started by {launcher}, each with a log in {_logs_of_jobs(command)}", file=sys.stderr)
    with _plain_errors():
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=page)(job)()
        except Exception as error:
            if not type(error).__module__.startswith("submitit."):
                raise
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"a job of {launcher} failed ({reason}); see its log in {_logs_of_jobs(command)}") from None


def _logs_of_jobs(words: list[str]) -> Path:
    return Path(command_line.value_of(words, "hydra.sweep.dir") or ".") / ".submitit"


def _complete(page: str) -> None:
    """Hydra prints the completions of the line in COMP_LINE, or the shell's function that asks for them."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with one_line():
        command_line.check_completion(sys.argv[1:])
        # a line that is no command yet has no completions; an error would be printed into it
        with contextlib.suppress(HydraException, OmegaConfBaseException, KeyError):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=page)(print)()


def compose(page: str, *words: str) -> Any:
    """The record that a script's function takes, for a notebook: `recipe.run(compose("train", "model=tiny"), "eagle")`.

    page: the name of a file of conf/, and of its record in `pages.PAGES`
    words: of the command line, `key=value`; a sweep is a loop around this call

    Raises ValueError, one line, for what is refused.
    """
    from specdec.config import pages

    if page not in pages.PAGES:
        raise ValueError(f"page {page!r}: there is none; {nearest(page, pages.PAGES)}")
    for word in words:
        if word.startswith("-") or re.match(r"\+*hydra\b", word):
            raise ValueError(f"{word}: of the command line alone; give settings of the page, key=value")
    if issubclass(pages.PAGES[page], pages.Decoding):
        words = (*words, *words_of_checkpoint(words))
    with _plain_errors():
        settings = command_line.check(CONF, page, list(words), partial(_record, page))
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return _record(page, hydra.compose(page, settings))


def words_of_checkpoint(words: Sequence[str] | None = None) -> list[str]:
    """What the checkpoint on a command line says where nothing else does: `method=`, and the target as `model.path=`. words: of
    the command line; None: of this process's. Raises ValueError, one line, for a checkpoint that cannot say it."""
    words = sys.argv[1:] if words is None else words
    value = (command_line.value_of(words, "checkpoint") or "null").strip("'\"")
    if value in ("null", ""):
        return []
    paths = [path.strip() for path in (value.split(",") if command_line.is_sweep(words) else [value])]
    chosen: list[str] = []
    for path in paths:
        hub.locate(path, "checkpoint")
    from specdec import checkpoint, method

    if all(command_line.value_of(words, key) is None for key in ("method", "speculative_config")):
        methods = {method.of_checkpoint(path) for path in paths}
        if len(methods) > 1:
            several = ", ".join(sorted(methods))
            raise ValueError(f"checkpoint={value}: drafters of several methods ({several}); sweep over one method's")
        chosen.append(f"method={methods.pop()}")
    if not any(re.match(r"(model|model\.path|model\.size|experiment)=", word) for word in words):
        targets = {checkpoint.target_of(path) for path in paths}
        if len(targets) == 1 and (target := targets.pop()) not in (None, hub.DEFAULT):
            chosen.append(f"model.path='{target}'")
    return chosen


def is_typed(key: str) -> bool:
    """Whether the command line chooses a value of a key, or an experiment, which may. Where there is none (`compose`), all
    values are chosen."""
    from hydra.core.hydra_config import HydraConfig

    return not HydraConfig.initialized() or any(
        command_line.value_of(sys.argv[1:], name) is not None for name in (key, "experiment")
    )


def plain(record: BaseModel) -> dict[str, Any]:
    """A record as a mapping with the keys that its YAML has."""
    return record.model_dump(exclude_unset=True)


def save(record: BaseModel, path: Path) -> None:
    """Write a resolved config, whole or not at all."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(plain(record))))


def read(path: Path) -> dict[str, Any]:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
    return loaded


def _record(page: str, composed: DictConfig) -> Any:
    """The record of a composed config. Raises ValueError, one line, for a value that its key cannot have."""
    _check_paths(page, composed)
    from specdec.config import pages  # imports torch: a mistyped key and a path are found before

    if composed.get("speculative_config") is not None:
        _name_by_object(composed)
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return pages.PAGES[page](**values)


def _check_paths(page: str, composed: DictConfig) -> None:
    """Raise ValueError for a directory that is taken, or a file or model that is not there, before anything large is
    imported."""
    directory = composed.get("out_dir")
    resume = composed.get("resume")  # of pages that make a run; where it is refused, the record says why
    is_run = isinstance(resume, bool) and not (resume and page in NOT_RESUMED)
    if is_run and isinstance(directory, str) and directory.strip() and not command_line.is_sweep(sys.argv[1:]):
        run_dir.check(Path(directory), bool(resume), page not in NOT_RESUMED)
    for key in ("checkpoint", "model.path"):
        value = OmegaConf.select(composed, key)
        if isinstance(value, str) and value.strip():
            hub.locate(value, key.partition(".")[0])
    for key in INPUT_FILES:
        value = OmegaConf.select(composed, key)
        if isinstance(value, str) and value.strip() and not Path(value).exists():
            raise ValueError(f"{key}={value}: no such file")


def _name_by_object(composed: DictConfig) -> None:
    """The groups name what speculative_config names, so that the run's name and its saved config are true."""
    from specdec.speculative_config import SpeculativeConfig

    values: Any = OmegaConf.to_container(composed, resolve=True)
    speculative = SpeculativeConfig.parse(values["speculative_config"])
    with open_dict(composed):
        composed.method = {"name": speculative.infer_method()}
        composed.rejection = {"name": speculative.rejection_sample_method}


def _with_job_directory(record: Any) -> Any:
    """In a sweep, out_dir gets a folder per job, named by its number and the values that the sweep varies; a line says which
    job begins."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return record
    swept = command_line.swept_keys(sys.argv[1:])
    words = [word for word in HydraConfig.get().overrides.task if word.partition("=")[0] in swept]
    values = [word.partition("=")[2] for word in words]
    number = int(HydraConfig.get().job.num)
    if is_main_process():
        print(f"job {number + 1} of {math.prod(swept.values())}: {' '.join(words)}", file=sys.stderr)
    folder = f"{number}-{command_line.directory_name('-'.join(values))[:60].strip('_')}"
    out_dir = Path(record.out_dir) / folder
    # of an interrupted sweep, some jobs have not begun
    resume = record.resume and (out_dir / run_dir.MARKER).exists()
    changed: dict[str, Any] = {"out_dir": str(out_dir), "resume": resume}
    if getattr(record, "logger", None) is not None and record.logger.name == "wandb" and record.logger.group is None:
        group = "-".join(Path(record.out_dir).parts[-2:])
        changed["logger"] = record.logger.model_copy(update={"group": group})
    return record.model_copy(update=changed)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What Hydra and OmegaConf refuse is a ValueError of one line."""
    try:
        yield
    except MissingMandatoryValue as error:
        key = re.search(r"full_key: (\S+)", str(error))
        raise ValueError(f"{key[1]} is missing; give {key[1]}=..." if key else str(error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        override = str(error).removeprefix("Error merging override ").strip()
        if override != str(error) and error.__cause__ is not None:
            reason = str(error.__cause__).splitlines()[0]
            raise ValueError(f"{override} must be of the kind of its default ({reason})") from None
        raise ValueError(str(error)) from None
