"""The words of a command line, checked before Hydra sees them: options, choices of groups, keys, and what a sweep varies.

A mistake is a ValueError of one line that names the nearest valid option, choice or key. Values are checked by the records of
`specdec.config.pages`: those of a single run when it is composed, those of a sweep here, before its first job starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from specdec import run_dir
from specdec.checked import nearest
from specdec.config import help
from specdec.files import parse_json

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_CONFIGS = ("job", "hydra", "all")
_OPTIONS: dict[str, tuple[str, ...] | None] = {  # Hydra's own, with the values that they take
    "--help": None, "--hydra-help": None, "--version": None, "--resolve": None, "--run": None, "-r": None,
    "--multirun": None, "-m": None, "--cfg": _CONFIGS, "-c": _CONFIGS, "--info": _INFO, "-i": _INFO,
}  # fmt: skip
COMPLETION = {"--shell-completion", "-sc"}
_COMPLETIONS = [f"{action}={shell}" for action in ("install", "uninstall", "query") for shell in ("bash", "fish", "zsh")]


def check_completion(words: list[str]) -> None:
    """Raise ValueError if Hydra has no such shell completion."""
    if len(words) != 2 or words[1] not in _COMPLETIONS:
        raise ValueError(f"{' '.join(words)}: use -sc with one of {', '.join(_COMPLETIONS)}")


def check(conf: Path, page: str, words: list[str], build: Callable[[DictConfig], Any]) -> list[str]:
    """The words of a command line, as Hydra takes them: options first, JSON quoted, a sweep with its directory.

    conf: the directory of YAML files
    page: the name of the script's file there
    words: sys.argv without the script
    build: makes the record of a composed config, or raises ValueError; called for each value of a sweep

    Raises ValueError, or Hydra's own errors, for what is not known.
    """
    options, settings = _options_and_settings([_quote_json(word) for word in words])
    multirun = is_sweep(options)
    overrides = _parse(settings, multirun)
    with initialize_config_dir(str(conf), version_base="1.3"):
        first_job = _check_keys(conf, page, overrides)
        if not multirun:
            return options + settings
        if not {"out_dir", "name"} <= set(map(str, first_job)):
            raise ValueError("-m: this script writes one thing; call it once for every value")
        for job in _jobs([override for override in overrides if not _is_hydras(override)]):
            try:
                build(compose(page, job))
            except InterpolationResolutionError:
                continue  # of what Hydra knows in the job only; the job says what else is wrong
    return options + settings + _sweep_directory(first_job, overrides)


def is_sweep(words: Iterable[str]) -> bool:
    """Whether a command line has several jobs."""
    return bool({"-m", "--multirun"} & set(words))


def value_of(words: Iterable[str], key: str) -> str | None:
    """The value that a command line gives to a key; None if it gives none."""
    return dict(word.partition("=")[::2] for word in words).get(key)


def swept_keys(words: Iterable[str]) -> dict[str, int]:
    """The keys that a sweep varies, and how many values each has."""
    parse = OverridesParser.create().parse_override
    settings = [parse(word) for word in words if "=" in word and not word.startswith("-")]
    swept = [override for override in settings if override.is_sweep_override()]
    return {str(override.input_line).partition("=")[0]: len(_values(override)) for override in swept}


def directory_name(text: str) -> str:
    """Text as a part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


def target_name(name: str, path: object) -> str:
    """What runs of a target are called: the choice of the group, or the last part of the path that was given instead."""
    return name if path is None else directory_name(Path(str(path)).name)


def _options_and_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """The words that are Hydra's own options, and the settings. Raises ValueError for an option that Hydra lacks, or one of its
    own that would lead past the checks here."""
    options: list[str] = []
    settings: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            settings.append(word)
            continue
        option, equals, value = word.partition("=")
        if option not in _OPTIONS:
            known = [name for name in _OPTIONS if name.startswith("--")]
            raise ValueError(f"unknown option {option!r}; settings are key=value, and options {', '.join(known)}")
        if (values := _OPTIONS[option]) is not None:
            value = value if equals else next(rest, "")
            if value not in values:
                raise ValueError(f"{option}={value}: use one of {', '.join(values)}")
            options += [option, value]
        elif equals:
            raise ValueError(f"{option} takes no value, and has {value!r}; leave it out")
        else:
            options.append(option)
    return options, settings


def _quote_json(word: str) -> str:
    """`speculative_config={"method": ...}` as a string that Hydra's grammar takes (it has no quoted keys)."""
    key, _, value = word.partition("=")
    if key.lstrip("+") != "speculative_config" or not value.lstrip().startswith("{"):
        return word
    try:
        parse_json(value, key)
    except ValueError:
        if re.match(r"\s*\{\s*\w+\s*:", value):
            return word  # Hydra's own spelling of a dict
    escaped = re.sub(r"(\\*)'", lambda m: 2 * m[1] + "\\'", value)  # Hydra undoes backslashes before a quote only
    return f"{key}='{escaped}'"


def _parse(settings: list[str], multirun: bool) -> list[Override]:
    """Hydra's view of the settings. Raises ValueError for what is none, and for two spellings of one thing."""
    overrides: list[Override] = []
    for setting in settings:
        if "=" not in setting:
            raise ValueError(f"argument {setting!r} is not of the form key=value")
        try:
            overrides.append(OverridesParser.create().parse_override(setting))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{setting}: is a bracket, brace or quote not closed? Hydra cannot read it ({reason})") from None
        if overrides[-1].is_sweep_override() and not multirun:
            raise ValueError(f"{setting}: several values are a sweep; say -m, or put a list in brackets")
    keys = [override.key_or_group for override in overrides]
    if "speculative_config" in keys:
        from specdec.speculative_config import POLICY_KEYS

        for key in keys:
            if key.split(".")[0] in ("method", "rejection", *POLICY_KEYS):
                raise ValueError(f"{key}= and speculative_config= say the same thing; leave one of them out")
    return overrides


def _check_keys(conf: Path, page: str, overrides: list[Override]) -> DictConfig:
    """Raise ValueError for a choice or a key that there is not; returns the config of the first job, without its settings."""
    groups = [o for o in overrides if (conf / o.key_or_group).is_dir() and not isinstance(o.value(), dict)]
    page_groups = help.groups_of_page(conf, page, {})
    for override in groups:
        if override.key_or_group not in page_groups:
            has = f"its groups: {', '.join(page_groups)}" if page_groups else "it has no groups"
            raise ValueError(f"{override.key_or_group}= is no group of this script; {has} (--help has all keys)")
        choices = [path.stem for path in (conf / override.key_or_group).glob("*.yaml")]
        for choice in _values(override):
            if choice not in (*choices, "null"):
                advice = _as_a_path(override.key_or_group, choice) or nearest(choice, choices)
                raise ValueError(f"{override.key_or_group}={choice}: no such choice; {advice}")
            if override.key_or_group == "experiment" and choice != "null":
                _check_experiment(conf, page, choice)
    hydras = [str(override.input_line) for override in overrides if _is_hydras(override)]
    if hydras:
        _check_hydras(page, hydras)
    known: dict[str, bool] = {}  # a sweep over groups may give keys to some of its jobs only
    composed: list[DictConfig] = []
    for settings in _jobs(groups):
        try:
            composed.append(_choices(conf, page, *settings))
        except MissingConfigException:
            raise ValueError(_no_recipe(conf, settings)) from None
        known |= dict(_keys(composed[-1]))
    for override in overrides:
        if override in groups or _is_hydras(override):
            continue
        added = str(override.input_line).startswith("+")
        value = None if override.is_sweep_override() else override.value()
        for key in _keys_of_setting(override.key_or_group, value, known):
            parent, _, last = key.rpartition(".")
            is_users = known.get(parent, False)
            if is_users and not added:
                raise ValueError(f"{key}= is written {parent}={{{last}: ...}}")
            if key not in known and not is_users:
                elsewhere = _of_another_choice(conf, key) if key.split(".")[0] in known else None
                raise ValueError(elsewhere or f"unknown key {key!r}; {_nearest_key(key, known)}")
    return composed[0]


@lru_cache(maxsize=64)  # a notebook, or a suite of tests, composes the same choices again and again
def _choices(conf: Path, page: str, *settings: str) -> DictConfig:
    """The page with these choices of groups, to be read only. conf: which Hydra was initialized with."""
    return compose(page, list(settings))


def _as_a_path(group: str, choice: str) -> str | None:
    """What to write for a hub id or a file in place of a choice; None for what is neither."""
    if group not in ("model", "task", "data") or ("/" not in choice and not re.search(r"\.(jsonl?|parquet|gz)$", choice)):
        return None
    words = f"model.path={choice}" if group == "model" else f"{group}=jsonl {group}.path={choice}"
    kind = {"model": "hub id or a directory", "task": "file", "data": "file or a hub id"}[group]
    return f"for a {kind} write {words}"


def _check_experiment(conf: Path, page: str, choice: str) -> None:
    """Hydra lets an experiment file add any key; here each must exist already, in the choices that the file makes."""
    written = OmegaConf.load(conf / "experiment" / f"{choice}.yaml")
    assert isinstance(written, DictConfig)
    settings: list[str] = []
    entry: Any
    for entry in written.pop("defaults", None) or []:
        for group, pick in entry.items() if isinstance(entry, DictConfig) else []:
            settings.append(f"{str(group).removeprefix('override ').lstrip('/')}={pick}")
    known = dict(_keys(compose(page, settings)))
    for key, _ in sorted(_keys(written)):
        parts = key.split(".")
        parents = [".".join(parts[:count]) for count in range(1, len(parts))]
        if key not in known and not any(known.get(parent, False) for parent in parents):
            raise ValueError(f"experiment {choice!r}: unknown key {key!r}; {_nearest_key(key, known)}")


def _check_hydras(page: str, settings: list[str]) -> None:
    """Raise what Hydra raises for settings of its own, or ValueError for a launcher that is not installed."""
    try:
        compose(page, settings, return_hydra_config=True)
    except MissingConfigException:
        launcher = value_of(settings, "hydra/launcher")
        if launcher is None:
            raise
        raise ValueError(
            f"hydra/launcher={launcher}: not installed; `pip install specdec-lab[slurm]` brings submitit_slurm, submitit_local"
        ) from None


def _is_hydras(override: Override) -> bool:
    """Whether it is of Hydra's own config, such as `hydra/launcher=` and `hydra.verbose=`."""
    return re.match(r"hydra\b", override.key_or_group) is not None


def _values(override: Override) -> list[str]:
    """The values of an override as text: one, or those of a sweep."""
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    value: Any = override.value()
    return ["null" if value is None else str(value)]


def _jobs(overrides: list[Override]) -> Iterator[list[str]]:
    """The first job of a sweep, and for each further value of each key one that has this value: settings that do not sweep."""
    setting = lambda override, value: f"{override.input_line.partition('=')[0]}={value}"
    swept = {place: _values(override) for place, override in enumerate(overrides) if override.is_sweep_override()}
    first = [
        setting(override, swept[place][0]) if place in swept else str(override.input_line)
        for place, override in enumerate(overrides)
    ]
    yield first
    for place, values in swept.items():
        for value in values[1:]:
            yield [*first[:place], setting(overrides[place], value), *first[place + 1 :]]


def _no_recipe(conf: Path, settings: list[str]) -> str:
    """A choice leads to a file that is not there: the recipe of a method that has nothing to train."""
    trained = sorted(path.stem.removesuffix("_demo") for path in (conf / "train").glob("*_demo.yaml"))
    return f"method={value_of(settings, 'method')} has nothing to train; use {' or '.join(trained)}"


def _sweep_directory(first_job: DictConfig, overrides: list[Override]) -> list[str]:
    """Further words that put all jobs of a sweep, and Hydra's note of it, into one directory."""
    settings = [str(override.input_line) for override in overrides]
    if (typed := value_of(settings, "out_dir")) is not None:
        return [f"hydra.sweep.dir={typed}"]
    task, *model = (OmegaConf.select(first_job, key) for key in ("task.name", "model.name", "model.path"))
    name = "-".join([*([task] if task else []), target_name(*model), "sweep", *sorted(swept_keys(settings))])
    typed_name = value_of(settings, "name") if "name" not in swept_keys(settings) else None
    resumes = [o.value() for o in overrides if o.key_or_group == "resume" and not o.is_sweep_override()]
    resume = resumes[-1:] == [True]
    directory = run_dir.default(directory_name(typed_name or name), resume)
    if resume and not Path(directory).is_dir():
        raise ValueError(f"resume=true, but out_dir={directory} holds no sweep; leave resume out")
    return [f"out_dir={directory}", f"hydra.sweep.dir={directory}"]


def _keys(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every key in dotted form, and whether it is null, so that its value may be a mapping with keys of the user's own."""
    for key in map(str, config):
        node = config._get_node(key)
        yield f"{prefix}{key}", node is not None and node._value() is None
        if isinstance(node, DictConfig) and node._value() is not None:
            yield from _keys(node, f"{prefix}{key}.")
        if isinstance(node, ListConfig) and node._value() is not None:  # as Hydra has it: method.proposers.0.method
            for place, entry in enumerate(node):
                if isinstance(entry, DictConfig):
                    yield from _keys(entry, f"{prefix}{key}.{place}.")


def _keys_of_setting(key: str, value: Any, known: dict[str, bool]) -> Iterator[str]:
    """The key of a setting; where it is a group and its value a mapping, the keys inside."""
    if not isinstance(value, dict) or not value or known.get(key, False):
        yield key
        return
    for name, inner in value.items():
        yield from _keys_of_setting(f"{key}.{name}", inner, known)


def _of_another_choice(conf: Path, key: str) -> str | None:
    """The error line for a key that another choice of its group has; None if none has it."""
    group, _, name = key.partition(".")
    takers = [path.stem for path in (conf / group).glob("*.yaml") if name in _written(path)]
    takers.sort(key=lambda choice: (choice != "jsonl", choice))  # the one for what has no name first
    return f"{key} is a key of {group}={' or '.join(takers)}; choose that, or leave the key out" if takers else None


def _written(path: Path) -> set[str]:
    """The keys of a YAML file, also those that have no value yet."""
    return {str(key) for key in OmegaConf.load(path)}


def _nearest_key(key: str, known: Iterable[str]) -> str:
    """Prefer a key with the same last part, such as `sampling.temperature` for `temperature`."""
    last_part = lambda name: name.split(".")[-1]
    same_end = [name for name in known if last_part(name) == last_part(key)]
    if same_end:
        return f"did you mean {min(same_end, key=len)!r}?"
    advice = nearest(key, known)
    if advice.startswith("did"):
        return advice
    by_last_part = nearest(last_part(key), {last_part(name) for name in known})
    if by_last_part.startswith("did"):
        word = by_last_part.split("'")[1]
        return f"did you mean {min((name for name in known if last_part(name) == word), key=len)!r}?"
    top = key.split(".")[0]
    inside = sorted(name for name in known if name.startswith(f"{top}."))
    return f"valid: {', '.join(inside or sorted(name for name in known if '.' not in name))}"
