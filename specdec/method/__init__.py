"""Methods: each file is one way to draft, named as vLLM's `method`, with one class that has `propose`.

The class's constructor is the schema of the method's settings; a parameter called `target` receives the target model.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specdec import checkpoint
from specdec.checked import nearest
from specdec.core import Proposer
from specdec.model.target import CausalLM


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


def settings(name: str) -> list[str]:
    """Names of the settings that the method takes."""
    return [p for p in inspect.signature(find(name)).parameters if p != "target"]


def check(name: str, given: Iterable[str]) -> None:
    """Raises ValueError for a setting that the method does not take."""
    for key in given:
        if key not in settings(name):
            advice = nearest(key, settings(name)) if settings(name) else "it takes none"
            raise ValueError(f"method {name!r} takes no setting {key!r}; {advice}")


def is_trained(name: str) -> bool:
    """Whether checkpoints of a method are trained here; the others have none."""
    return name in names() and hasattr(find(name), "for_training")


def of_checkpoint(path: str | Path, revision: str | None = None) -> str:
    """The method that decodes with a checkpoint. Raises ValueError for what is none, and for one that names a method without
    checkpoints: what a downloaded file says must not choose what is imported or run."""
    name = checkpoint.method_of(path, revision)
    if not is_trained(name):
        trained = [known for known in names() if is_trained(known)]
        said = f"{path}: config.json names method {name!r}, which has no checkpoints"
        raise ValueError(f"{said}; {nearest(name, trained)}")
    return name


def build(name: str, target: CausalLM, **kwargs: Any) -> Proposer:
    """Construct a method. Settings that it does not take are a ValueError."""
    check(name, kwargs)
    if "target" in inspect.signature(find(name)).parameters:
        kwargs["target"] = target
    return find(name)(**kwargs)


def build_up_to(most: int, name: str, target: CausalLM, **kwargs: Any) -> Proposer:
    """As `build`, for drafts of so many tokens; of fewer, if the drafter was made for fewer."""
    if not hasattr(find(name), "max_draft_tokens"):
        return build(name, target, num_speculative_tokens=most, **kwargs)
    proposer: Any = build(name, target, num_speculative_tokens=1, **kwargs)
    proposer.num_speculative_tokens = min(most, proposer.max_draft_tokens or most)
    return proposer
