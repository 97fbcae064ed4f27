"""Hydra's side of the house: check a command line before it runs, turn a config into live objects, keep errors to one line.

Only this file and the scripts import Hydra.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from specdec import method
from specdec.core import nearest

CONF = Path(__file__).resolve().parents[1] / "conf"
_DECIDING = ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "cost_table")  # how much is drafted
_OPEN = ("logit_bias", "template_kwargs", "geometry", "checkpoints", "runs")  # keys whose value is the user's own mapping
_NULLABLE = (  # numbers, or null for no limit
    "limit", "num_threads", "sampling.max_tokens", "train.max_steps", "train.num_epochs", "train.drafter.draft_vocab_size",
    "train.drafter.num_hidden_layers", "train.drafter.inner_dim", "train.drafter.mask_token_id", "train.drafter.pard_token",
    "data.limit", "data.max_length", "num_requests", "max_draft",
)  # fmt: skip


_GOES_ON = "; what had finished is kept, and resume=true goes on with the rest"


def fail(message: object) -> None:
    """End the program with one line on stderr and exit code 1. Of processes that decode together one says it."""
    first = str(message).strip().splitlines()[0] if str(message).strip() else "failed"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from specdec import parallel_state

        if (speaks := parallel_state.is_first_to_fail()) is not None:
            if speaks:  # at once: when the first has ended, torchrun ends the others
                print(f"error: {first}", file=sys.stderr, flush=True)
            sys.exit(1)
    sys.exit(f"error: {first}")


def check_command_line(config_name: str, *defaults: str) -> None:
    """Refuse unknown keys and choices, naming the nearest valid one, before Hydra sees them. Quotes JSON for its grammar.

    defaults: `key=value` arguments of the script itself, for keys that the command line does not give.
    """
    given = {argument.partition("=")[0] for argument in sys.argv[1:]}
    sys.argv[1:] += [argument for argument in defaults if argument.partition("=")[0] not in given]
    sys.argv[1:] = [_quote_json(argument) for argument in sys.argv[1:]]
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # Hydra wants them in front
    flags_with_value = {
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
        "--package",
        "-p",
        "--info",
        "-i",
    }
    words = iter(sys.argv[1:])
    arguments = []
    for word in words:
        if word.startswith("-"):
            if word in flags_with_value:
                next(words, None)
        else:
            arguments.append(word)
    multirun = bool({"-m", "--multirun"} & set(sys.argv[1:]))
    try:
        composed = _check(config_name, arguments, multirun)
        if multirun:
            sys.argv += _sweep_directory(composed, arguments)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        fail(f"{mark.name}, line {mark.line + 1}: not YAML ({error.problem})" if mark else error)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        fail(error)


def _quote_json(argument: str) -> str:
    """`speculative_config={"method": ...}` as a string that Hydra's grammar takes (it has no quoted keys)."""
    key, _, value = argument.partition("=")
    if key.lstrip("+") != "speculative_config" or not value.lstrip().startswith("{"):
        return argument
    try:
        json.loads(value)
    except json.JSONDecodeError:
        if re.match(r"\s*\{\s*\w+\s*:", value):
            return argument  # Hydra's own spelling of a dict
    escaped = re.sub(r"(\\*)'", lambda m: 2 * m[1] + "\\'", value)  # Hydra undoes backslashes before a quote only
    return f"{key}='{escaped}'"


def _check(config_name: str, arguments: list[str], multirun: bool) -> DictConfig:
    """Raise ValueError for what is not known; returns the config of the first job."""
    overrides = []
    for argument in arguments:
        if "=" not in argument:
            raise ValueError(f"argument {argument!r} is not of the form key=value")
        overrides.append(OverridesParser.create().parse_override(argument))
        if overrides[-1].is_sweep_override() and not multirun:
            raise ValueError(f"{argument}: several values are a sweep; say -m, or put a list in brackets")
    keys = [override.key_or_group for override in overrides]
    if "speculative_config" in keys:
        for key in keys:
            if key.split(".")[0] in ("method", "rejection", *_DECIDING):
                raise ValueError(f"{key}= and speculative_config= say the same thing; leave one of them out")
    groups = [override for override in overrides if (CONF / override.key_or_group).is_dir()]
    for override in groups:
        choices = [path.stem for path in (CONF / override.key_or_group).glob("*.yaml")]
        for choice in _choices(override):
            if choice not in choices and choice != "null":
                raise ValueError(f"{override.key_or_group}={choice}: no such choice; {nearest(choice, choices)}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for override in groups:
            if override.key_or_group == "experiment":
                for choice in _choices(override):
                    _check_experiment(config_name, choice)
        known: set[str] = set()
        defaults: dict[str, Any] = {}
        # a sweep over groups may give keys to some of its jobs only
        for first in range(max([len(_choices(override)) for override in groups], default=1)):
            picked = [f"{o.key_or_group}={_choices(o)[min(first, len(_choices(o)) - 1)]}" for o in groups]
            try:
                composed = compose(config_name, picked)
            except MissingConfigException:
                raise ValueError(_no_recipe(picked)) from None
            known |= _keys(composed)
            defaults |= {key: OmegaConf.select(composed, key, throw_on_missing=False) for key in known}
    for override in overrides:
        if override in groups or override.key_or_group.startswith("hydra"):
            continue
        value = None if override.is_sweep_override() else override.value()
        for key, inner in _flat(override.key_or_group, value):
            parent = key.rpartition(".")[0]
            if parent.split(".")[-1] in _OPEN and not str(override.input_line).startswith("+"):
                raise ValueError(f"{key}= is written {parent}={{{key.split('.')[-1]}: ...}}")
            if key not in known and parent.split(".")[-1] not in _OPEN:
                raise ValueError(f"unknown key {key!r}; {_nearest_key(key, known)}")
            if not override.is_sweep_override():
                _check_type(key, inner, defaults.get(key))
    return composed


def _no_recipe(picked: list[str]) -> str:
    """A choice leads to a file that is not there: the recipe of a method that has nothing to train."""
    chosen = dict(pick.split("=", 1) for pick in picked)
    trained = sorted(path.stem.removesuffix("_demo") for path in (CONF / "train").glob("*_demo.yaml"))
    return f"method={chosen.get('method')} has nothing to train; use {' or '.join(trained)}"


def _sweep_directory(composed: DictConfig, arguments: list[str]) -> list[str]:
    """Further arguments that put all jobs of a sweep, and Hydra's note of it, into one directory."""
    given = [argument for argument in arguments if argument.startswith("out_dir=")]
    if given:
        return [f"hydra.sweep.dir={given[-1].partition('=')[2]}"]
    parts = [OmegaConf.select(composed, key) for key in ("task.name", "model.name")]
    name = "-".join([*(part for part in parts if part), "sweep", *sorted(_swept(arguments))])
    directory = "outputs/" + re.sub(r"[^A-Za-z0-9._-]+", "_", name)
    return [f"out_dir={directory}", f"hydra.sweep.dir={directory}"]


def _swept(arguments: list[str]) -> set[str]:
    """The keys that a sweep varies."""
    parse = OverridesParser.create().parse_override
    return {a.partition("=")[0] for a in arguments if "=" in a and not a.startswith("-") and parse(a).is_sweep_override()}


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    """A key and its value; where that is a mapping, the keys inside."""
    if not isinstance(value, dict) or key.split(".")[-1] in (*_OPEN, "speculative_config"):
        return [(key, value)]
    return [pair for name, inner in value.items() for pair in _flat(f"{key}.{name}", inner)]


def _check_experiment(config_name: str, choice: str) -> None:
    """Hydra lets an experiment file add any key; here each must exist already, in the choices that the file makes."""
    if choice == "null":
        return
    written = OmegaConf.load(CONF / "experiment" / f"{choice}.yaml")
    assert isinstance(written, DictConfig)
    picks: list[str] = []
    entry: Any
    for entry in written.pop("defaults", None) or []:
        for group, pick in entry.items() if isinstance(entry, DictConfig) else []:
            picks.append(f"{str(group).removeprefix('override ').lstrip('/')}={pick}")
    composed = compose(config_name, picks)
    known = _keys(composed)
    for key in sorted(_keys(written)):
        if key not in known and not any(part in _OPEN for part in key.split(".")[:-1]):
            raise ValueError(f"experiment {choice!r}: unknown key {key!r}; {_nearest_key(key, known)}")
        _check_type(key, OmegaConf.select(written, key), OmegaConf.select(composed, key, throw_on_missing=False))


def _check_type(key: str, value: Any, default: Any) -> None:
    """A number where the default is a number, and so on. A default of null says nothing; an interpolation may be anything."""
    if key == "out_dir" and (not isinstance(value, str) or not value):
        raise ValueError(f"out_dir={value!r} must be the path of a directory")
    if isinstance(default, DictConfig) and not isinstance(value, dict | DictConfig):
        raise ValueError(f"{key}={value!r} must be a mapping, such as {key}={{{next(iter(default), 'name')!s}: ...}}")
    if key == "request_rate":  # load.phases looks
        return
    if key.split(".")[-1] == "num_speculative_tokens" and isinstance(value, str):
        if value != "auto":
            raise ValueError(f"{key}={value!r} must be a number, or auto")
        return
    if key in _NULLABLE:
        default = None if value is None else 0.0 if key == "train.num_epochs" else 0
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float)}
    wanted = kinds.get(type(default))
    if wanted is None or (isinstance(value, str) and value.startswith("${")):
        return
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ValueError(
            f"{key}={value!r} must be {'true or false' if bool in wanted else 'a number'}, like its default {default}"
        )


def _choices(override: Override) -> list[str]:
    value: Any = override.value()
    if override.is_sweep_override() and hasattr(value, "list"):
        return [str(item) for item in value.list]
    return ["null" if value is None else str(value)]


def _keys(config: DictConfig, prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for key in map(str, config):
        keys.add(f"{prefix}{key}")
        node = config._get_node(key) if OmegaConf.is_dict(config) else None
        if isinstance(node, DictConfig) and node._value() is not None:
            keys |= _keys(node, f"{prefix}{key}.")
        if isinstance(node, ListConfig) and node._value() is not None:  # as Hydra has it: method.proposers.0.method
            for place, inner in enumerate(node):
                if isinstance(inner, DictConfig):
                    keys |= _keys(inner, f"{prefix}{key}.{place}.")
    return keys


def _nearest_key(key: str, known: set[str]) -> str:
    """Prefer a key with the same last part, such as `sampling.temperature` for `temperature`."""
    same_end = [k for k in known if k.split(".")[-1] == key.split(".")[-1]]
    if same_end:
        return f"did you mean {min(same_end, key=len)!r}?"
    said = nearest(key, known)
    if said.startswith("did"):
        return said
    last = nearest(key.split(".")[-1], {k.split(".")[-1] for k in known})
    if last.startswith("did"):
        word = last.split("'")[1]
        return f"did you mean {min((k for k in known if k.split('.')[-1] == word), key=len)!r}?"
    top = key.split(".")[0]
    inside = sorted(k for k in known if k.startswith(f"{top}."))
    return f"valid: {', '.join(inside or sorted(k for k in known if '.' not in k))}"


def main(run: Callable[[dict[str, Any]], object], resumes: bool = True) -> Callable[[DictConfig], None]:
    """Wrap a script's function of a plain dict: resolves the config, gives a sweep's jobs directories of their own, and ends
    with one line instead of a traceback for what a user can mend. resumes: whether an interrupted run can go on."""

    def wrapped(cfg: DictConfig) -> None:
        try:
            _name_by_object(cfg)
            plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            _own_directory(plain)
            run(plain)
        except MissingMandatoryValue as error:
            key = re.search(r"full_key: (\S+)", str(error))
            fail(f"{key[1]} is missing; give {key[1]}=..." if key else error)
        except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
            fail(error)
        except (MemoryError, OverflowError) as error:
            fail(f"{type(error).__name__}: {error}; a number is too large for this machine, such as max_batch_size or seed")
        except RuntimeError:
            from specdec import parallel_state

            if parallel_state.another_failed():  # that one has said why
                sys.exit(1)
            raise
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") != "0":  # torchrun interrupts all of its processes
                sys.exit(130)
            print(f"interrupted{_GOES_ON if resumes else ''}", file=sys.stderr)
            sys.exit(130)

    return wrapped


def _name_by_object(cfg: DictConfig) -> None:
    """Where speculative_config is given, the groups say what it says, so that the run's name and its saved config are true."""
    if cfg.get("speculative_config") is None:
        return
    from specdec.llm import SpeculativeConfig

    given = SpeculativeConfig.parse(OmegaConf.to_container(cfg, resolve=True)["speculative_config"])  # type: ignore[call-overload, index]
    with open_dict(cfg):
        cfg.method = {"name": given.resolved_method}
        cfg.rejection = {"name": given.rejection_sample_method}


def _own_directory(cfg: dict[str, Any]) -> None:
    """In a sweep, out_dir gets a folder per job, named by number and overrides."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    # the job's number, and the values that the sweep varies
    swept = _swept(sys.argv[1:])
    here = [o.partition("=")[2] for o in HydraConfig.get().overrides.task if o.partition("=")[0] in swept]
    said = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(here))[:60].strip("_")
    out_dir = Path(cfg["out_dir"]) / f"{HydraConfig.get().job.num}-{said}"
    cfg["out_dir"] = str(out_dir)
    cfg["resume"] = cfg["resume"] and out_dir.exists()  # of an interrupted sweep, some jobs have not begun


def speculative(cfg: dict[str, Any]) -> dict[str, Any] | str:
    """What the config says about the method and the rejection scheme, as vLLM's object: the groups, or the object itself."""
    if cfg["speculative_config"] is not None:
        return cfg["speculative_config"]
    given = {**cfg["method"], **cfg["rejection"], **{key: cfg[key] for key in _DECIDING if cfg.get(key) not in (None, False)}}
    settings = {key: value for key, value in given.items() if value is not None and key != "name"}
    return {**settings, "method": cfg["method"]["name"], "rejection_sample_method": cfg["rejection"]["name"]}


def take_checkpoint(cfg: dict[str, Any]) -> None:
    """checkpoint=DIR is the model of the method that drafts with it."""
    if cfg["speculative_config"] is not None:
        raise ValueError("checkpoint= and speculative_config= say the same thing; put the directory into its key 'model'")
    if "model" not in cfg["method"]:
        raise ValueError(f"checkpoint={cfg['checkpoint']}: method {cfg['method']['name']!r} takes none; leave method= out")
    cfg["method"]["model"] = str(cfg["checkpoint"])


def its_method() -> list[str]:
    """`method=` of the checkpoint on the command line, which says it itself where nobody else does."""
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    paths = given.get("checkpoint", "null").strip("'\"")
    if paths in ("null", "") or {"method", "speculative_config"} & set(given):
        return []
    try:
        swept = {"-m", "--multirun"} & set(given)
        found = {method.of_checkpoint(path.strip()) for path in (paths.split(",") if swept else [paths])}
    except ValueError as error:
        fail(error)
        raise
    if len(found) > 1:
        fail(f"checkpoint={paths}: drafters of several methods ({', '.join(sorted(found))}); sweep over one method's")
    return [f"method={found.pop()}"]


def threads(cfg: dict[str, Any]) -> int:
    """torch threads on the CPU."""
    if cfg["num_threads"] is not None and cfg["num_threads"] < 1:
        raise ValueError(f"num_threads={cfg['num_threads']}: at least 1 is needed; null means 1")
    return int(cfg["num_threads"] or 1)


def model_name(model: dict[str, Any]) -> str:
    """What `specdec.hub.resolve` takes: path, or the name of the size."""
    if model.get("path"):
        return str(model["path"])
    sizes, size = model["sizes"], str(model["size"])
    if size not in sizes:
        raise ValueError(f"model.size={size}: {model['name']} has no such size; {nearest(size, map(str, sizes))}")
    return str(sizes[size])


def save(cfg: dict[str, Any], path: Path) -> None:
    """Write a resolved config, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(cfg)))
    temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
    return loaded
