"""Rejection schemes: each file is one scheme, named as vLLM's `rejection_sample_method`.

A file has `lossless` (whether the output has the target's distribution), `keyed_by` ("step" or "position": what its uniforms
are a function of), and `verify(draft, p_BJV, u_BJ, **params) -> Verdict`, a pure function. p is what tokens are sampled from,
after temperature, top-k, top-p and penalties: at temperature 0 it is one-hot. A lossless scheme accepts a token with p = 1: the
engine relies on it where all rows are greedy. Row 0 of p comes after the last committed token, row i + 1 after draft token i,
of a tree too (`Draft.parent_BK`). By step, `u[:, :K]` decide acceptance of draft tokens 0..K-1 and `u[:, K]` samples the extra
token by inverse CDF, whatever the row's own draft length is. By position, `u[:, j]` samples at row j; with
`shares_noise = True` drafters draw with these uniforms, too.

A scheme with settings has `check(num_speculative_tokens, **settings)`, whose arguments they are, with their types: they become
keys of `SpeculativeConfig`. It refuses bad values before a run and returns the `params` of `verify`. If some have no default,
`EXAMPLE` has values of them for tests. `fixed_length = True`: they are for one K, so K cannot be `auto`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from specdec.checked import nearest
from specdec.core import Verdict


@dataclass(frozen=True)
class Verifier:
    """A scheme with its parameters bound."""

    name: str
    lossless: bool
    keyed_by: str
    verify: Callable[..., Verdict]
    params: dict[str, Any] = field(default_factory=dict)
    shares_noise: bool = False

    def __call__(self, draft: Any, p_BJV: Any, u_BJ: Any) -> Verdict:
        return self.verify(draft, p_BJV, u_BJ, **self.params)


def of_plain(verifier: Verifier) -> Verifier:
    """The scheme under which plain sampling draws the tokens that a scheme's output may be compared with."""
    return verifier if verifier.shares_noise else build("standard")


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Any:
    """The module of a scheme. Raises ValueError for an unknown name."""
    if name == "fly":
        raise ValueError(f"rejection_sample_method 'fly' is not built yet; built: {', '.join(names())}")
    if name not in names():
        raise ValueError(f"unknown rejection_sample_method {name!r}; {nearest(name, names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    for attribute in ("lossless", "keyed_by", "verify"):
        if not hasattr(module, attribute):
            raise ValueError(f"{module.__file__} has no {attribute}, which every scheme has; add it ({__name__} lists them)")
    if module.keyed_by not in ("step", "position"):
        raise ValueError(f"{module.__file__}: keyed_by={module.keyed_by!r} must be 'step' or 'position'")
    return module


def settings(name: str) -> list[str]:
    """The settings that a scheme takes: fields of SpeculativeConfig."""
    module = find(name)
    return list(inspect.signature(module.check).parameters)[1:] if hasattr(module, "check") else []


def all_settings() -> dict[str, Any]:
    """The settings of all schemes, with their types."""
    return {key: get_type_hints(find(name).check)[key] for name in names() for key in settings(name)}


def has_fixed_length(name: str) -> bool:
    """Whether the settings of a scheme are for one K."""
    return getattr(find(name), "fixed_length", False)


def shares_noise(name: str) -> bool:
    """Whether drafters draw with the uniforms of the target."""
    return getattr(find(name), "shares_noise", False)


def build(name: str, num_speculative_tokens: int = 0, **params: Any) -> Verifier:
    """The scheme of that file name. Raises ValueError for an unknown name or parameters that the scheme refuses."""
    module = find(name)
    for key in sorted(set(params) - set(settings(name))):
        raise ValueError(f"rejection_sample_method={name!r} takes no {key}; remove it")
    if hasattr(module, "check"):
        for key, parameter in list(inspect.signature(module.check).parameters.items())[1:]:
            if parameter.default is parameter.empty and key not in params:
                raise ValueError(f"rejection_sample_method={name!r} needs {key}; give it")
        params = module.check(num_speculative_tokens, **params)
    return Verifier(name, module.lossless, module.keyed_by, module.verify, params, shares_noise(name))
