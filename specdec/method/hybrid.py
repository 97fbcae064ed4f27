"""Several proposers in order: the first that drafts anything for a row makes its draft in this step.

Looking up is free where the text repeats itself, and a trained drafter is there where it does not. A part's condition is its
own affair: `prompt_lookup_min` of n-gram drafting, `min_score` of suffix decoding; a part that drafts nothing for a row passes
it on. Conditions look at committed tokens only, so the output keeps the target's law whatever the parts.

A part that a row does not come to in a step drafts nothing for it and is told nothing. What it missed of the target's states
is kept here until the row's next turn, or processed meanwhile (`catch_up`) when it becomes much; tokens are in every context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import method
from specdec.core import Context, Draft, MethodFacts, Proposer, Request, StatelessProposer
from specdec.engine import MAX_PENDING_STATES
from specdec.model.target import CausalLM


class Hybrid(StatelessProposer):
    """proposers: mappings of `method` and its settings, in the order in which they are asked; num_speculative_tokens: of the
    whole, and of a part that says none of its own (fewer, if it was made for fewer); model: of the one part that takes a model
    and names none.

    Raises ValueError, one line, for parts that cannot be.
    """

    facts = MethodFacts(composes=True)

    @classmethod
    def example_settings(cls, target: CausalLM, directory: Path) -> dict[str, Any]:
        drafter: Any = method.find("eagle3")
        settings: dict[str, Any] = drafter.example_settings(target, directory)
        return settings

    def __init__(
        self, target: CausalLM, proposers: list[dict[str, Any]], num_speculative_tokens: int, model: Any | None = None
    ) -> None:
        proposers = self.assign_model(proposers, model)
        self.num_speculative_tokens = num_speculative_tokens
        names = [own["method"] for own in proposers]
        self.parts = tuple(
            name if names.count(name) == 1 else f"{name}-{names[: place + 1].count(name)}" for place, name in enumerate(names)
        )
        self.components: list[Component] = []
        self.runs_model = [method.facts(name).runs_model for name in names]
        for place, own in enumerate(proposers):
            settings = dict(own)
            name, most = settings.pop("method"), settings.get("num_speculative_tokens")
            try:
                if most is None:
                    proposer = method.build_up_to(num_speculative_tokens, name, target, **settings)
                else:
                    proposer = method.build(name, target, **settings)
            except ValueError as error:
                raise ValueError(f"proposers[{place}]: {error}") from None
            self.components.append(Component(self.parts[place], proposer))
        self.vocab_size = target.vocab_size
        self.last_R: dict[int, Component] = {}  # who made the row's last draft
        self.compose()

    @staticmethod
    def assign_model(proposers: list[dict[str, Any]], model: Any | None = None) -> list[dict[str, Any]]:
        """The proposers' settings without those that are None, the model in the one that takes a model and names none. Raises
        ValueError if there is none such, or several."""
        if not proposers:
            raise ValueError("proposers=[]: method 'hybrid' needs at least one; give their methods, in order")
        assigned = [{key: value for key, value in given.items() if value is not None} for given in proposers]
        if model is None:
            return assigned

        def takes_model(name: str | None) -> bool:  # without a method, its model says which it is
            return name not in method.names() or "model" in method.settings(name)

        without = [given for given in assigned if "model" not in given and takes_model(given.get("method"))]
        if len(without) != 1:
            found = f"{len(without)} parts take a model and name none" if without else "no part takes a model and names none"
            raise ValueError(f"model={model} of method 'hybrid': {found}; write the model into its part")
        without[0]["model"] = model
        return assigned

    def compose(self) -> None:
        """What follows from the parts."""
        layers = [layer for turn in self.components for layer in turn.proposer.hidden_layers]
        self.hidden_layers = tuple(dict.fromkeys(layers))  # each once, in the order of the parts
        for turn in self.components:
            columns = [self.hidden_layers.index(layer) for layer in turn.proposer.hidden_layers]
            turn.columns = None if columns == list(range(len(self.hidden_layers))) else columns
        self.needs_logits = any(turn.proposer.needs_logits for turn in self.components)
        self.needs_uniforms = any(turn.proposer.needs_uniforms for turn in self.components)
        self.probabilistic = any(getattr(turn.proposer, "probabilistic", False) for turn in self.components)
        # of every part a column that says that the draft is its, then its own numbers: one regression serves all
        self.first_evidence = np.cumsum([0, *(1 + turn.proposer.num_confidence_features for turn in self.components)]).tolist()
        self.num_confidence_features = self.first_evidence[-1]

    @property
    def cost_proposer(self) -> Proposer | None:
        """The part whose drafts take time: the last that runs a model."""
        learned = [turn.proposer for turn, model in zip(self.components, self.runs_model, strict=True) if model]
        return learned[-1] if learned else None

    @property
    def max_model_len(self) -> int | None:
        """The shortest of the parts'."""
        return min((own for turn in self.components if (own := getattr(turn.proposer, "max_model_len", None))), default=None)

    @property
    def return_confidence(self) -> bool:
        return any(turn.proposer.return_confidence for turn in self.components)

    @return_confidence.setter
    def return_confidence(self, wanted: bool) -> None:
        for turn in self.components:
            turn.proposer.return_confidence = wanted

    # ---------------------------------------------------------------- what the engine calls

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return sum(turn.proposer.bytes_to_grow(rows, slots) for turn in self.components)

    def reserve(self, rows: int, slots: int) -> None:
        for turn in self.components:
            turn.proposer.reserve(rows, slots)

    def on_start(self, row: int, request: Request) -> None:
        self.last_R.pop(row, None)
        for turn in self.components:
            turn.kept[row], turn.stood[row] = [], 0
            turn.proposer.on_start(row, request)

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        for turn in self.components:
            kept = [states for _, states in turn.kept.pop(row, [])]
            turn.proposer.on_finish(row, [*kept, *map(turn.own, hidden)] if turn.proposer.hidden_layers else ())

    def propose(self, context: Context) -> Draft:
        for turn in self.components:
            turn.keep(context)
        if context.num_accepted_prev_B is not None:
            for row, stood in zip(context.rows.tolist(), context.num_accepted_prev_B.tolist(), strict=True):
                if row in self.last_R:
                    self.last_R.pop(row).stood[row] = stood
        made: list[tuple[int, np.ndarray, Draft]] = []
        left = np.flatnonzero(context.max_draft_B > 0)
        for place, turn in enumerate(self.components):
            if not len(left):
                break
            draft = turn.draft(context, left)
            drafted = draft.length_B.numpy() > 0
            if drafted.any():
                made.append((place, left[drafted], _of(draft, np.flatnonzero(drafted))))
                self.last_R |= dict.fromkeys(context.rows[left[drafted]].tolist(), turn)
            left = left[~drafted]
        for turn in self.components:
            turn.let_take_in(context)
        return self._joined(context, made)

    def catch_up(self, context: Context) -> bool:
        for turn in self.components:
            turn.keep(context)
            turn.let_take_in(context)
        return True

    # ---------------------------------------------------------------- one draft of several

    def _joined(self, context: Context, made: list[tuple[int, np.ndarray, Draft]]) -> Draft:
        """The parts' drafts, each of other rows, as one. Laws are written down as soon as one part draws."""
        num_rows, device = len(context.rows), context.last_token_B.device
        width = max((draft.token_BK.shape[1] for _, _, draft in made), default=0)
        token_BK = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        length_B, names = torch.zeros(num_rows, dtype=torch.int64), [""] * num_rows
        num_model_drafted_B, cost_proposer = np.zeros(num_rows, dtype=np.int64), self.cost_proposer
        q_BKV = confidence_BKF = finite_BK = None
        if any(draft.finite_BK is not None for _, _, draft in made):
            finite_BK = torch.ones(num_rows, width, dtype=torch.bool, device=device)
        if any(draft.q_BKV is not None for _, _, draft in made):
            q_BKV = torch.zeros(num_rows, width, self.vocab_size, device=device)
        if self.return_confidence:
            confidence_BKF = torch.zeros(num_rows, width, self.num_confidence_features, device=device)
        for place, rows, draft in made:
            at_B, own = torch.from_numpy(rows).to(device, non_blocking=True), slice(draft.token_BK.shape[1])
            length_B[torch.from_numpy(rows)] = draft.length_B
            if self.components[place].proposer is cost_proposer:
                num_model_drafted_B[rows] = draft.length_B.numpy()
            token_BK[at_B, own] = draft.token_BK
            for b in rows:
                names[b] = self.parts[place]
            if draft.finite_BK is not None and finite_BK is not None:
                finite_BK[at_B, own] = draft.finite_BK
            if q_BKV is not None:
                law_BKV = F.one_hot(draft.token_BK, self.vocab_size) if draft.q_BKV is None else draft.q_BKV
                q_BKV[at_B, own] = law_BKV.to(q_BKV)
            if confidence_BKF is not None:
                first, last = self.first_evidence[place : place + 2]
                live_BK = torch.arange(draft.token_BK.shape[1]) < draft.length_B.unsqueeze(1)
                confidence_BKF[at_B, own, first] = live_BK.to(confidence_BKF)
                if draft.confidence_BKF is not None:
                    confidence_BKF[at_B, own, first + 1 : last] = draft.confidence_BKF
        return Draft(token_BK, length_B, q_BKV, None, confidence_BKF, names, num_model_drafted_B, finite_BK)


@dataclass
class Component:
    """A part, and what it has not seen yet. columns: which of all states are its own, None for all of them; kept: by cache row,
    in parts of (first position, [n, T, D]); stood: by cache row, how much of the part's own last draft stood."""

    name: str
    proposer: Proposer
    columns: list[int] | None = None
    kept: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)
    stood: dict[int, int] = field(default_factory=dict)

    def own(self, hidden_NTD: Tensor) -> Tensor:
        return hidden_NTD if self.columns is None else hidden_NTD[:, self.columns]

    def keep(self, context: Context) -> None:
        """Note the states that have come. Asked twice about the same tokens, the later states count."""
        if not self.proposer.hidden_layers:
            return
        assert context.hidden is not None
        for row, length, hidden_NTD in zip(context.rows.tolist(), context.length_B.tolist(), context.hidden, strict=True):
            first = length - 1 - len(hidden_NTD)
            before = [(at, states[: first - at]) for at, states in self.kept[row] if at < first]
            self.kept[row] = [*before, (first, self.own(hidden_NTD))]

    def draft(self, context: Context, place_B: np.ndarray) -> Draft:
        """The part's draft for these rows of the context."""
        most = self.proposer.num_speculative_tokens
        given = self._given(context, place_B, np.minimum(context.max_draft_B, most))
        if given.uniform_BK is not None:
            given.uniform_BK = given.uniform_BK[:, :most]
        return self.proposer.propose(given)

    def let_take_in(self, context: Context) -> None:
        """Of rows that have sat out for long the states are processed, or else put into one piece."""
        if not self.proposer.hidden_layers:
            return
        kept = [sum(len(states) for _, states in self.kept[row]) for row in context.rows.tolist()]
        long_B = np.flatnonzero(np.array(kept) > MAX_PENDING_STATES)
        if not len(long_B):
            return
        given = self._given(context, long_B, np.zeros_like(context.max_draft_B))
        if not self.proposer.catch_up(given):
            assert given.hidden is not None
            for row, length, hidden_NTD in zip(given.rows.tolist(), given.length_B.tolist(), given.hidden, strict=True):
                self.kept[row] = [(length - 1 - len(hidden_NTD), hidden_NTD)]

    def _given(self, context: Context, place_B: np.ndarray, max_draft_B: np.ndarray) -> Context:
        """What the part may look at: these rows, with all states since its last turn, which are handed over."""
        given = replace(context, hidden=None, max_draft_B=max_draft_B).select_rows(place_B)
        if given.num_accepted_prev_B is not None:
            given.num_accepted_prev_B = np.array([self.stood[row] for row in given.rows.tolist()])
        if self.proposer.hidden_layers:
            given.hidden = [torch.cat([states for _, states in self.kept[row]]) for row in given.rows.tolist()]
            for row in given.rows.tolist():
                self.kept[row] = []
        return given


def _of(draft: Draft, place_B: np.ndarray) -> Draft:
    """The drafts of some rows."""
    if len(place_B) == len(draft.length_B):
        return draft
    at_B = torch.from_numpy(place_B)
    there_B = at_B.to(draft.token_BK.device, non_blocking=True)
    q_BKV = None if draft.q_BKV is None else draft.q_BKV[there_B]
    confidence_BKF = None if draft.confidence_BKF is None else draft.confidence_BKF[there_B]
    finite_BK = None if draft.finite_BK is None else draft.finite_BK[there_B]
    return Draft(draft.token_BK[there_B], draft.length_B[at_B], q_BKV, confidence_BKF=confidence_BKF, finite_BK=finite_BK)
