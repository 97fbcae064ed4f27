"""A proposer of the user's own: `model="package.module.Class"`.

The class gets the whole context: tokens, hidden states (set `hidden_layers`), the target's last logits (set `needs_logits`),
sampling parameters, and uniforms to draw with (set `needs_uniforms`); it may return the distributions that it drew from. It is
written like any file here, and what it leaves out is as in `specdec.core.StatelessProposer`:

    class Mine:
        def __init__(self, num_speculative_tokens, target): ...      # either argument may be left out
        def propose(self, context) -> Draft | list[list[int]]: ...
        # optional: hidden_layers, needs_logits, needs_uniforms, num_confidence_features, drafts_trees,
        # on_start(row, request), on_finish(row), on_forward(token_N, logits_NV), catch_up(context) -> bool, bytes_to_grow,
        # reserve, reset, wipe
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdec.checked import first_line
from specdec.core import Context, Draft, MethodFacts, Request, StatelessProposer, draft_from_lists
from specdec.model.target import CausalLM


class CustomClass(StatelessProposer):
    """Wraps the user's object: checks what it drafts, and cuts what is too long."""

    facts = MethodFacts(
        runs_model=True,
        model_hint="give the dotted path of your class, 'package.module.Class'",
        check_model=lambda model: find_class(model),
    )

    def __init__(self, target: CausalLM, model: str, num_speculative_tokens: int):
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: at least 1 is needed; method 'none' drafts nothing"
            )
        self.name = model
        self.num_speculative_tokens = num_speculative_tokens
        self.vocab_size = target.vocab_size
        self.inner = load(model, {"num_speculative_tokens": num_speculative_tokens, "target": target})
        self.hidden_layers = tuple(self.inner.hidden_layers)
        self.needs_logits = bool(self.inner.needs_logits)
        self.needs_uniforms = bool(self.inner.needs_uniforms)
        self.drafts_trees = bool(self.inner.drafts_trees)
        self.num_confidence_features = int(self.inner.num_confidence_features)

    def on_start(self, row: int, request: Request) -> None:
        self.inner.on_start(row, request)

    def on_finish(self, row: int, hidden: Sequence[torch.Tensor] = ()) -> None:
        self.inner.on_finish(row)

    def on_forward(self, token_N: torch.Tensor, logits_NV: torch.Tensor) -> None:
        self.inner.on_forward(token_N, logits_NV)

    def catch_up(self, context: Context) -> bool:
        return bool(self.inner.catch_up(context))

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        num_bytes: int = self.inner.bytes_to_grow(rows, slots)
        return num_bytes

    def reserve(self, rows: int, slots: int) -> None:
        self.inner.reserve(rows, slots)

    def reset(self) -> None:
        self.inner.reset()

    def wipe(self) -> None:
        self.inner.wipe()

    def summarize(self, answers: Sequence[list[int]]) -> dict[str, Any]:
        return dict(self.inner.summarize(answers))

    def propose(self, context: Context) -> Draft:
        draft = self.inner.propose(context)
        if not isinstance(draft, Draft):
            drafts = [np.asarray(tokens, dtype=np.int64) for tokens in draft]
            for tokens in drafts:
                if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
                    raise ValueError(
                        f"{self.name}.propose drafted {tokens.tolist()}; the vocabulary is 0..{self.vocab_size - 1}"
                    )
            draft = draft_from_lists(drafts, context.last_token_B.device)
        num_rows = len(context.rows)
        width = draft.token_BK.shape[1]
        if draft.token_BK.shape[0] != num_rows or draft.length_B.shape != (num_rows,):
            raise ValueError(
                f"{self.name}.propose returned {draft.token_BK.shape[0]} drafts for {num_rows} rows; give one per row"
            )
        if int(draft.length_B.max()) > width:
            raise ValueError(f"{self.name}.propose says a draft has {int(draft.length_B.max())} tokens and gives {width}")
        draft.check_tree(f"{self.name}.propose")
        # dropping the end of a draft is safe for losslessness: it does not look at the tokens
        return draft.cut(np.minimum(draft.length_B.cpu().numpy(), context.max_draft_B))


def find_class(path: str) -> Any:
    """Import the class. Raises ValueError, one line, if there is none."""
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"model={path!r} of custom_class must be a dotted path, 'package.module.Class'")
    if os.getcwd() not in sys.path:  # a script has its own folder there, and not the one that it was started in
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"custom_class: cannot import {module_name!r} ({first_line(error)}); is its folder this one, or in PYTHONPATH?"
        ) from error
    if not hasattr(module, class_name):
        raise ValueError(f"custom_class: module {module_name!r} has no class {class_name!r}")
    return getattr(module, class_name)


def load(path: str, available: dict[str, Any]) -> Any:
    """The class, with the defaults of StatelessProposer behind its own methods, constructed with those of `available` that its
    constructor names. Each failure has an error."""
    cls = find_class(path)
    class_name = cls.__name__ if hasattr(cls, "__name__") else path
    try:
        if not issubclass(cls, StatelessProposer):
            cls = type(class_name, (cls, StatelessProposer), {})
        accepted = inspect.signature(cls).parameters
        inner = cls(**{key: value for key, value in available.items() if key in accepted})
    except Exception as error:
        raise ValueError(f"custom_class: {path} could not be constructed ({first_line(error)})") from error
    if not callable(getattr(inner, "propose", None)):
        raise ValueError(f"custom_class: {path} has no callable 'propose'")
    return inner
