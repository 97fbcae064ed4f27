"""Methods: each file is one way to draft, named as vLLM's `method`, with one class that has `propose`.

The class's constructor is the schema of the method's settings; a parameter called `target` receives the target model. What else
other modules need to know of a method is in the class's `facts` (`specdec.core.MethodFacts`).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from specdec import checkpoint, hub
from specdec.checked import nearest
from specdec.core import MethodFacts, Proposer
from specdec.model.target import CausalLM
from specdec.params import PLAIN as PLAIN


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> type:
    """The class of a method. Raises ValueError for an unknown name."""
    if name not in names():
        raise ValueError(f"unknown method {name!r}; {nearest(name, names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [
        c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__ and hasattr(c, "propose")
    ]
    assert len(classes) == 1, f"{module.__name__} must define one class with propose, it has {len(classes)}"
    return classes[0]


def facts(name: str) -> MethodFacts:
    """What other modules need to know of a method. Raises ValueError for an unknown name."""
    method_class: Any = find(name)
    method_facts: MethodFacts = method_class.facts
    return method_facts


def all_facts() -> dict[str, MethodFacts]:
    """The facts of every method, by its name."""
    return {name: facts(name) for name in names()}


# ------------------------------------------------------------------------------------------------ settings


def parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """The settings that the method takes, as parameters of its constructor."""
    return {key: value for key, value in inspect.signature(find(name)).parameters.items() if key != "target"}


def settings(name: str) -> list[str]:
    """Names of the settings that the method takes."""
    return list(parameters(name))


def needs_length(name: str) -> bool:
    """Whether num_speculative_tokens must be given: a method whose drafts end by themselves has None as its default."""
    length = parameters(name).get("num_speculative_tokens")
    return length is not None and length.default is not None


def required(name: str) -> dict[str, str]:
    """Settings that must be given, with the fix for one that is missing."""
    fixes = {"num_speculative_tokens": "give how many tokens to draft per step", "model": model_hint(name)}
    keys = ["num_speculative_tokens"] if needs_length(name) else []
    keys += [key for key, value in parameters(name).items() if value.default is inspect.Parameter.empty and key not in keys]
    return {key: fixes.get(key, f"see conf/method/{name}.yaml") for key in keys}


def model_hint(name: str) -> str:
    """What to give as `model` of a method that needs one."""
    script = facts(name).train_script
    hint = f"give the directory of a drafter that train/{script}.py made (eval/run.py: checkpoint=DIR)"
    return facts(name).model_hint or hint


def check(name: str, keys: Iterable[str]) -> None:
    """Raises ValueError for a setting that the method does not take."""
    for key in keys:
        if key not in settings(name):
            advice = nearest(key, settings(name)) if settings(name) else "it takes none"
            raise ValueError(f"method {name!r} takes no setting {key!r}; {advice}")


def check_model(name: str, model: Any) -> None:
    """Raises ValueError for a `model` that the method cannot use with any target, before the target is loaded."""
    check = facts(name).check_model
    if check is not None:
        check(model)
    elif is_trained(name) and model is not None:
        hub.locate(model, "model")


# -------------------------------------------------------------------------------- which method is meant


def is_trained(name: str) -> bool:
    """Whether checkpoints of a method are trained here; the others have none."""
    return name in names() and facts(name).train_script is not None


def of_checkpoint(path: str | Path, revision: str | None = None) -> str:
    """The method that decodes with a checkpoint. Raises ValueError for what is none, and for one that names a method without
    checkpoints: a downloaded file must not choose what is imported or run."""
    name = checkpoint.method_of(path, revision)
    if not is_trained(name):
        trained = [known for known in names() if is_trained(known)]
        mistake = f"{path}: config.json names method {name!r}, which has no checkpoints"
        raise ValueError(f"{mistake}; {nearest(name, trained)}")
    return name


def of_model(model: str, revision: str | None = None) -> str:
    """The method that a `model` means where no method is given, as vLLM infers it. Raises ValueError for a directory with a
    config.json that is no drafter's."""
    lower = model.lower()
    for name, of_method in all_facts().items():
        if lower in of_method.model_spellings:
            return name
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", model) and not Path(model).exists():
        return "custom_class"
    if any((Path(model).expanduser() / part / "config.json").exists() for part in ("", "best", "last")):
        return of_checkpoint(model, revision)
    for name, of_method in all_facts().items():
        if any(mark in lower for mark in of_method.name_marks):
            return name
    return "draft_model"


def of_alias(name: str) -> str:
    """The method that a name of vLLM's means. Raises ValueError for a name that is neither ours nor vLLM's."""
    if name in names():
        return name
    for known, of_method in all_facts().items():
        if any(fnmatchcase(name, pattern) for pattern in of_method.aliases):
            return known
    raise ValueError(f"unknown method {name!r}; {nearest(name, names())}")


def parallel(name: str) -> str:
    """The method that this one is under parallel_drafting. Raises ValueError for one that drafts token by token only."""
    of_serial = {method.parallel_of: known for known, method in all_facts().items() if method.parallel_of is not None}
    if name not in (*of_serial, *of_serial.values()):
        raise ValueError(f"parallel_drafting=true is for {' and '.join(of_serial)}, not for {name!r}; leave it out")
    return of_serial.get(name, name)


def serial(name: str, model: str) -> str:
    """The method that drafts token by token with a drafter of this one. Raises ValueError if none does."""
    if facts(name).parallel_only:
        raise ValueError(f"parallel_drafting=false, and {model} drafts in one pass only; leave it out")
    return facts(name).parallel_of or name


# ------------------------------------------------------------------------------------------------ building


def build(name: str, target: CausalLM, **kwargs: Any) -> Proposer:
    """Construct a method. Settings that it does not take are a ValueError."""
    check(name, kwargs)
    if "target" in inspect.signature(find(name)).parameters:
        kwargs["target"] = target
    proposer: Proposer = find(name)(**kwargs)
    return proposer


def build_up_to(num_speculative_tokens: int, name: str, target: CausalLM, **kwargs: Any) -> Proposer:
    """As `build`, for drafts of that many tokens; of fewer, if the drafter was made for fewer."""
    if not is_trained(name) or kwargs.keys() & {"tree_topk", "speculative_token_tree"}:
        return build(name, target, num_speculative_tokens=num_speculative_tokens, **kwargs)
    drafter: Any = build(name, target, num_speculative_tokens=1, **kwargs)
    drafter.draft_up_to(num_speculative_tokens)
    proposer: Proposer = drafter
    return proposer
