"""Hydra's side of the house: check a command line before it runs, turn a config into live objects, keep errors to one line.

Only this file and the scripts import Hydra.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from yaml import MarkedYAMLError

from specdec.checked import nearest, short_repr
from specdec.files import parse_json, writing
from specdec.script import fail, one_line

CONF = Path(__file__).resolve().parents[1] / "conf"
POLICY_KEYS = ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "cost_table")  # how much is drafted
FREE_FORM_KEYS = (
    "logit_bias",
    "template_kwargs",
    "geometry",
    "checkpoints",
    "runs",
)  # keys whose value is the user's own mapping
_NUMBER: tuple[Any, str] = (Annotated[int, Field(ge=0)] | None, "a number from 0 on, or null")
_SOME: tuple[Any, str] = (Annotated[int, Field(ge=1)], "a number of at least 1")
_COUNT: tuple[Any, str] = (Annotated[int, Field(ge=1)] | None, "a number of at least 1, or null")
_TEXT: tuple[Any, str] = (Annotated[str, Field(pattern=r"\S")] | None, "text; quote a number or a list that is a name: '\"5\"'")
_NUMBERS: tuple[Any, str] = (list[int] | None, "a list of numbers, such as [2,15,27], or null")
_COUNTS: tuple[Any, str] = (
    Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)],
    "a list of numbers of at least 1",
)
_PATH: tuple[Any, str] = (_TEXT[0], "the path of a file or directory; where that is its name, write {key}=./{value}")
_MAPPING: tuple[Any, str] = (dict[Any, Any] | None, "a mapping, such as {{a: 1}}, or null")
_SEED: tuple[Any, str] = (Annotated[int, Field(ge=-(2**63), lt=2**63)] | None, "a number, an integer of 64 bits")
# What keys must be whose default does not tell: null, or a list. Those of `method`, `rejection`: llm.SpeculativeConfig's.
TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("checkpoint", "revision", "dtype", "target", "serve_target", "push", "draft_model", "data.path", "model.path",
         "model.revision", "model.dtype", "model.device", "logger.entity", "logger.mode", "train.drafter.model",
         "train.drafter.revision"),
        _TEXT,
    ),
    **dict.fromkeys(
        ("cost_table", "trace", "prompts", "synthesize.openings", "out", "acceptance", "eval", "lint", "features.path",
         "task.path"),
        _PATH,
    ),
    **dict.fromkeys(
        ("limit", "data.limit", "num_requests", "max_draft", "cost_context", "max_model_len", "num_speculative_tokens",
         "sampling.max_tokens", "sampling.max_new_tokens", "train.max_steps", "train.drafter.draft_vocab_size",
         "train.drafter.num_hidden_layers", "train.drafter.inner_dim", "train.drafter.num_modules"),
        _COUNT,
    ),
    **dict.fromkeys(
        ("max_batch_size", "prefill_chunk_size", "tensor_parallel_size", "eval.max_batch_size", "max_tokens", "eval.max_tokens",
         "answers.max_tokens", "synthesize.max_tokens", "synthesize.count", "max_matching_ngram_size", "repeats", "context",
         "rounds", "cost_repeats"),
        _SOME,
    ),
    **dict.fromkeys(("sampling.min_new_tokens", "train.drafter.mask_token_id", "train.drafter.pard_token"), _NUMBER),
    **dict.fromkeys(
        ("layer_ids", "features.layer_ids", "train.drafter.layer_ids", "train.drafter.eagle_aux_hidden_state_layer_ids",
         "sampling.stop_token_ids"),
        _NUMBERS,
    ),
    **dict.fromkeys(("threads", "suffix_tokens", "batch_sizes"), _COUNTS),
    **dict.fromkeys(("data.template_kwargs", "train.drafter.geometry", "sampling.logit_bias"), _MAPPING),
    "checkpoints": (_MAPPING[0], "a mapping of methods to drafters, such as {{eagle3: DIR}}, or null"),
    "runs": (_MAPPING[0], "a mapping of names to runs, such as {{a: {{method: ngram}}}}, or null"),
    **dict.fromkeys(("seed", "sampling.seed"), _SEED),
    "num_threads": (Annotated[int, Field(ge=1, le=1024)] | None, "a number of at least 1 and at most 1024, or null"),
    "data.max_length": (Annotated[int, Field(ge=3)] | None, "a number from 3 on (a token is supervised), or null"),
    "train.num_epochs": (Annotated[float, Field(gt=0)] | None, "a number above 0, or null"),
    "train.drafter.zero_first_embedding": (bool | None, "true, false or null"),
    "answers.temperatures": (list[Annotated[float, Field(ge=0)]], "a list of temperatures from 0 on, such as [0.0, 0.7]"),
    "dtypes": (Annotated[list[str], Field(min_length=1)], "a list of types, such as [float32,bfloat16]"),
    "logger.tags": (list[str] | None, "a list of words"),
    "sampling.stop": (list[str] | str | None, "a string, or a list of strings"),
    "speculative_config": (dict[Any, Any] | str | None, "a JSON object, or its text"),
    "num_speculative_tokens_per_batch_size": (list[Any] | str | None, "a list [[first, last, K], ...], or a file with one"),
}  # fmt: skip
_OPTIONS = {  # Hydra's own, with the values that they take
    "--help": None, "-h": None, "--hydra-help": None, "--version": None, "--resolve": None, "--run": None, "-r": None,
    "--multirun": None, "-m": None, "--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}  # fmt: skip


def check_command_line(config_name: str, *defaults: str) -> None:
    """Refuse unknown keys and choices, naming the nearest valid one, before Hydra sees them. Quotes JSON for its grammar.

    defaults: `key=value` arguments of the script itself, for keys that the command line does not give.
    """
    given = {argument.partition("=")[0] for argument in sys.argv[1:]}
    sys.argv[1:] += [argument for argument in defaults if argument.partition("=")[0] not in given]
    sys.argv[1:] = [_quote_json(argument) for argument in sys.argv[1:]]
    multirun = bool({"-m", "--multirun"} & set(sys.argv[1:]))
    try:
        options, arguments = _options_and_settings(sys.argv[1:])
        sys.argv[1:] = options + arguments  # Hydra wants them in this order
        composed = _check(config_name, arguments, multirun)
        if multirun and "out_dir" not in composed:
            raise ValueError("-m: this script writes one thing; call it once for every value")
        if multirun:
            sys.argv += _sweep_directory(composed, arguments)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        fail(f"{mark.name}, line {mark.line + 1}: not YAML ({error.problem})" if mark else error)
    except (ValueError, HydraException, OmegaConfBaseException, RecursionError) as error:
        fail(error)


def _options_and_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that are Hydra's own options, and the settings. Raises ValueError for an option that Hydra
    lacks, or one of its own that would lead past the checks here."""
    found: list[str] = []
    settings: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            settings.append(word)
            continue
        option, equals, value = word.partition("=")
        if option not in _OPTIONS:
            options = [known for known in _OPTIONS if known.startswith("--")]
            raise ValueError(f"unknown option {option!r}; settings are key=value, and options {', '.join(options)}")
        if (values := _OPTIONS[option]) is not None:
            value = value if equals else next(rest, "")
            if value not in values:
                raise ValueError(f"{option}={value}: use one of {', '.join(values)}")
            found += [option, value]
        elif equals:
            raise ValueError(f"{option} takes no value, and has {value!r}; leave it out")
        else:
            found.append(option)
    return found, settings


def _quote_json(argument: str) -> str:
    """`speculative_config={"method": ...}` as a string that Hydra's grammar takes (it has no quoted keys)."""
    key, _, value = argument.partition("=")
    if key.lstrip("+") != "speculative_config" or not value.lstrip().startswith("{"):
        return argument
    try:
        parse_json(value, key)
    except ValueError:
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
            if key.split(".")[0] in ("method", "rejection", *POLICY_KEYS):
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
            if own := [str(o.input_line) for o in overrides if _is_hydras(o)]:
                compose(config_name, own, return_hydra_config=True)
            try:
                composed = compose(config_name, picked)
            except MissingConfigException:
                raise ValueError(_no_recipe(picked)) from None
            known |= _keys(composed)
            defaults |= {key: OmegaConf.select(composed, key, throw_on_missing=False) for key in known}
    for override in overrides:
        if override in groups or _is_hydras(override):
            continue
        value = None if override.is_sweep_override() else override.value()
        for each in _swept_values(override):
            _check_type(override.key_or_group, each, defaults.get(override.key_or_group), config_name)
        for key, inner in _flat(override.key_or_group, value):
            parent = key.rpartition(".")[0]
            if parent.split(".")[-1] in FREE_FORM_KEYS and not str(override.input_line).startswith("+"):
                raise ValueError(f"{key}= is written {parent}={{{key.split('.')[-1]}: ...}}")
            if key not in known and parent.split(".")[-1] not in FREE_FORM_KEYS:
                raise ValueError(f"unknown key {key!r}; {_nearest_key(key, known)}")
            if not override.is_sweep_override():
                _check_type(key, inner, defaults.get(key), config_name)
    return composed


def _is_hydras(override: Override) -> bool:
    """Whether it is of Hydra's own config, such as `hydra/launcher=` and `hydra.verbose=`."""
    return re.match(r"hydra\b", override.key_or_group) is not None


def _swept_values(override: Override) -> list[Any]:
    """The values of a sweep that lists them."""
    value: Any = override.value() if override.is_sweep_override() else None
    return [getattr(each, "text", each) for each in getattr(value, "list", None) or []]


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
    if not isinstance(value, dict) or not value or key.split(".")[-1] in (*FREE_FORM_KEYS, "speculative_config"):
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
        if key not in known and not any(part in FREE_FORM_KEYS for part in key.split(".")[:-1]):
            raise ValueError(f"experiment {choice!r}: unknown key {key!r}; {_nearest_key(key, known)}")
        value = OmegaConf.select(written, key)
        plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        _check_type(key, plain, OmegaConf.select(composed, key, throw_on_missing=False), config_name)


def _check_type(key: str, value: Any, default: Any, config_name: str) -> None:
    """Raise ValueError unless a value is what its key must be: by TYPES, by the schema of methods, or of the kind of its
    default. An interpolation may be anything."""
    said = f"{key}={short_repr(value)}"
    if isinstance(value, str) and value.startswith("${"):
        return
    if key == "out_dir" and (not isinstance(value, str) or not value.strip()):
        raise ValueError(f"{said} must be the path of a directory")
    if key == "request_rate":  # load.phases looks
        return
    group, _, name = key.partition(".")
    if group in ("method", "rejection") and name in (schema := _speculative_fields()) and value is not None:
        wanted = schema[name]
        if name == "num_speculative_tokens":
            with_auto = config_name != "train"
            wanted = wanted if with_auto else int
            if isinstance(value, str) and not (with_auto and value == "auto"):
                raise ValueError(f"{said} must be a number{', or auto' if with_auto else ''}")
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{said} must not be empty; leave the key out, or give null")
        _hold(said, value, wanted, "like the setting of this name in vLLM's --speculative-config")
    elif key in TYPES:
        wanted, what = TYPES[key]
        _hold(said, value, wanted, what.format(key=key, value=value if isinstance(value, int | float) else "NAME"))
    elif isinstance(default, DictConfig):
        if not isinstance(value, dict | DictConfig):
            raise ValueError(f"{said} must be a mapping, such as {key}={{{next(iter(default), 'name')!s}: ...}}")
    elif isinstance(default, ListConfig):
        if not isinstance(value, list):
            raise ValueError(f"{said} must be a list, such as {key}=[...]")
    elif isinstance(default, bool | int | float):
        wanted, what = (bool, "true or false") if isinstance(default, bool) else (type(default), "a number")
        _hold(said, value, wanted, f"{what}, like its default {default}")
    elif isinstance(default, str) and name not in ("name", "size") and key != "name":
        _hold(said, value, Annotated[str, Field(pattern=r"\S")], f"text, like its default {default}")


def _hold(said: str, value: Any, wanted: Any, what: str) -> None:
    """Raise ValueError, one line, unless a value is of a type as pydantic knows them: strictly, with finite numbers."""
    try:
        TypeAdapter(wanted, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        limit = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise ValueError(f"{said} must be {what} ({limit})") from None


def _speculative_fields() -> dict[str, Any]:
    """Type of every key that a method or a rejection scheme can have."""
    from specdec.speculative_config import SpeculativeConfig

    return {name: field.annotation for name, field in SpeculativeConfig.model_fields.items()}


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


def launch(config_name: str, run: Callable[[dict[str, Any]], object], *defaults: str) -> None:
    """Check the command line, compose the config, and call a script's function with it as a plain dict: once, or for every job
    of a sweep, each with a directory of its own.

    config_name: a page of conf/; defaults: as `check_command_line` takes them. Raises ValueError, one line, for what Hydra
    refuses.
    """
    check_command_line(config_name, *defaults)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here; Hydra would print several lines
    given = list(sys.argv)
    sys.argv.append(f"hydra.job.name={Path(sys.argv[0]).stem}")

    def job(cfg: DictConfig) -> None:
        sys.argv[:] = given  # what a checkpoint says it was made by
        with one_line(), _plain_errors():  # here already: of a job that fails, Hydra says so in a line of its own
            _name_by_object(cfg)
            plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            _check_name(plain)
            _set_job_dir(plain)
            run(plain)

    with _plain_errors():
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What Hydra and OmegaConf refuse is a ValueError of one line."""
    try:
        yield
    except MissingMandatoryValue as error:
        key = re.search(r"full_key: (\S+)", str(error))
        raise ValueError(f"{key[1]} is missing; give {key[1]}=..." if key else str(error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from None


def _check_name(cfg: dict[str, Any]) -> None:
    """A run's name is the last part of its directory, unless that is given: it must not lead anywhere else."""
    name = cfg.get("name")
    if name is None:
        return
    if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", name) or len(name.encode()) > 200:
        raise ValueError(
            f"name={name!r} is no name of a directory: no slash, not '..', at most 200 bytes; out_dir= takes any path"
        )


def _name_by_object(cfg: DictConfig) -> None:
    """Where speculative_config is given, the groups say what it says, so that the run's name and its saved config are true."""
    if cfg.get("speculative_config") is None:
        return
    from specdec.speculative_config import SpeculativeConfig

    given = SpeculativeConfig.parse(OmegaConf.to_container(cfg, resolve=True)["speculative_config"])  # type: ignore[call-overload, index]
    with open_dict(cfg):
        cfg.method = {"name": given.infer_method()}
        cfg.rejection = {"name": given.rejection_sample_method}


def _set_job_dir(cfg: dict[str, Any]) -> None:
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
    from specdec.measure import records

    # of an interrupted sweep, some jobs have not begun
    cfg["resume"] = cfg["resume"] and (out_dir / records.MARKER).exists()


def speculative(cfg: dict[str, Any]) -> dict[str, Any] | str:
    """What the config says about the method and the rejection scheme, as vLLM's object: the groups, or the object itself."""
    if cfg["speculative_config"] is not None:
        return cfg["speculative_config"]
    given = {**cfg["method"], **cfg["rejection"], **{key: cfg[key] for key in POLICY_KEYS if cfg.get(key) not in (None, False)}}
    settings = {key: value for key, value in given.items() if value is not None and key != "name"}
    return {**settings, "method": cfg["method"]["name"], "rejection_sample_method": cfg["rejection"]["name"]}


def apply_checkpoint(cfg: dict[str, Any]) -> None:
    """checkpoint=DIR is the model of the method that drafts with it."""
    if cfg["speculative_config"] is not None:
        raise ValueError("checkpoint= and speculative_config= say the same thing; put the directory into its key 'model'")
    if "model" not in cfg["method"]:
        raise ValueError(f"checkpoint={cfg['checkpoint']}: method {cfg['method']['name']!r} takes none; leave method= out")
    cfg["method"]["model"] = str(cfg["checkpoint"])


def method_of_checkpoint() -> list[str]:
    """`method=` of the checkpoint on the command line, which says it itself where nobody else does."""
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    paths = given.get("checkpoint", "null").strip("'\"")
    if paths in ("null", "") or {"method", "speculative_config"} & set(given):
        return []
    from specdec import method

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
    if model.get("path") is not None:
        return str(model["path"])
    if "sizes" not in model:
        raise ValueError(
            f"model.path=null: {model['name']} has no sizes to choose from; give a directory, or leave the key out"
        )
    sizes, size = model["sizes"], str(model["size"])
    if size not in sizes:
        raise ValueError(f"model.size={size}: {model['name']} has no such size; {nearest(size, map(str, sizes))}")
    return str(sizes[size])


def save(cfg: dict[str, Any], path: Path) -> None:
    """Write a resolved config, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(cfg)))
        temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
    return loaded
