"""Several proposers in order: the first that drafts anything for a row makes its draft in this step.

Looking up is free where the text repeats itself, and a trained drafter is there where it does not. A part's condition is its
own affair: `prompt_lookup_min` of n-gram drafting, `min_score` of suffix decoding; a part that drafts nothing for a row passes
it on. Conditions look at committed tokens only, so the output keeps the target's law whatever the parts.

A part that a row does not come to in a step drafts nothing for it and is told nothing. What it missed of the target's states
is kept here until the row's next turn, or processed meanwhile (`take_in`) when it becomes much; tokens are in every context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import method
from specdec.core import Context, Draft, Proposer, Request, Silent
from specdec.engine import LONG_OUT
from specdec.model.target import CausalLM


class Hybrid(Silent):
    """proposers: mappings of `method` and its settings, in the order in which they are asked; num_speculative_tokens: of the
    whole, and of a part that says none of its own (fewer, if it was made for fewer); model: of the one part that takes a model
    and names none.

    Raises ValueError, one line, for parts that cannot be.
    """

    def __init__(
        self, target: CausalLM, proposers: list[dict[str, Any]], num_speculative_tokens: int, model: Any | None = None
    ) -> None:
        proposers = with_model(proposers, model)
        self.num_speculative_tokens = num_speculative_tokens
        names = [own["method"] for own in proposers]
        self.parts = tuple(
            name if names.count(name) == 1 else f"{name}-{names[: place + 1].count(name)}" for place, name in enumerate(names)
        )
        self.turns: list[Turn] = []
        self.takes_model = ["model" in method.settings(name) for name in names]
        for place, own in enumerate(proposers):
            settings = dict(own)
            name, most = settings.pop("method"), settings.get("num_speculative_tokens")
            refuse(name)
            try:
                if most is None:
                    proposer = method.build_up_to(num_speculative_tokens, name, target, **settings)
                elif most > num_speculative_tokens:
                    raise ValueError(f"num_speculative_tokens={most} is over the whole's {num_speculative_tokens}; lower it")
                else:
                    proposer = method.build(name, target, **settings)
            except ValueError as error:
                raise ValueError(f"proposers[{place}]: {error}") from None
            self.turns.append(Turn(self.parts[place], proposer))
        self.vocab_size = target.vocab_size
        self.last_R: dict[int, Turn] = {}  # who made the row's last draft
        self.compose()

    def compose(self) -> None:
        """What follows from the parts."""
        layers = [layer for turn in self.turns for layer in turn.proposer.hidden_layers]
        self.hidden_layers = tuple(dict.fromkeys(layers))  # each once, in the order of the parts
        for turn in self.turns:
            columns = [self.hidden_layers.index(layer) for layer in turn.proposer.hidden_layers]
            turn.columns = None if columns == list(range(len(self.hidden_layers))) else columns
        self.needs_logits = any(turn.proposer.needs_logits for turn in self.turns)
        self.needs_noise = any(turn.proposer.needs_noise for turn in self.turns)
        self.probabilistic = any(getattr(turn.proposer, "probabilistic", False) for turn in self.turns)
        # of every part a column that says that the draft is its, then its own numbers: one regression serves all
        self.first_evidence = np.cumsum([0, *(1 + turn.proposer.num_evidence for turn in self.turns)]).tolist()
        self.num_evidence = self.first_evidence[-1]

    @property
    def costly(self) -> Proposer | None:
        """The part whose drafts take time: the last that takes a model."""
        learned = [turn.proposer for turn, model in zip(self.turns, self.takes_model, strict=True) if model]
        return learned[-1] if learned else None

    @property
    def max_model_len(self) -> int | None:
        """The shortest of the parts'."""
        return min((own for turn in self.turns if (own := getattr(turn.proposer, "max_model_len", None))), default=None)

    @property
    def gives_evidence(self) -> bool:
        return any(turn.proposer.gives_evidence for turn in self.turns)

    @gives_evidence.setter
    def gives_evidence(self, wanted: bool) -> None:
        for turn in self.turns:
            turn.proposer.gives_evidence = wanted

    # ---------------------------------------------------------------- what the engine calls

    def more_bytes(self, rows: int, slots: int) -> int:
        return sum(turn.proposer.more_bytes(rows, slots) for turn in self.turns)

    def reserve(self, rows: int, slots: int) -> None:
        for turn in self.turns:
            turn.proposer.reserve(rows, slots)

    def begin(self, row: int, request: Request) -> None:
        self.last_R.pop(row, None)
        for turn in self.turns:
            turn.kept[row], turn.stood[row] = [], 0
            turn.proposer.begin(row, request)

    def end(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        for turn in self.turns:
            kept = [states for _, states in turn.kept.pop(row, [])]
            turn.proposer.end(row, [*kept, *map(turn.own, hidden)] if turn.proposer.hidden_layers else ())

    def propose(self, context: Context) -> Draft:
        for turn in self.turns:
            turn.keep(context)
        if context.stood_B is not None:
            for row, stood in zip(context.rows.tolist(), context.stood_B.tolist(), strict=True):
                if row in self.last_R:
                    self.last_R.pop(row).stood[row] = stood
        made: list[tuple[int, np.ndarray, Draft]] = []
        left = np.flatnonzero(context.max_draft_B > 0)
        for place, turn in enumerate(self.turns):
            if not len(left):
                break
            draft = turn.draft(context, left)
            drafted = draft.length_B.numpy() > 0
            if drafted.any():
                made.append((place, left[drafted], _of(draft, np.flatnonzero(drafted))))
                self.last_R |= dict.fromkeys(context.rows[left[drafted]].tolist(), turn)
            left = left[~drafted]
        for turn in self.turns:
            turn.let_take_in(context)
        return self._joined(context, made)

    def take_in(self, context: Context) -> bool:
        for turn in self.turns:
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
        paid_B, costly = np.zeros(num_rows, dtype=np.int64), self.costly
        q_BKV = evidence_BKF = finite_BK = None
        if any(draft.finite_BK is not None for _, _, draft in made):
            finite_BK = torch.ones(num_rows, width, dtype=torch.bool, device=device)
        if any(draft.q_BKV is not None for _, _, draft in made):
            q_BKV = torch.zeros(num_rows, width, self.vocab_size, device=device)
        if self.gives_evidence:
            evidence_BKF = torch.zeros(num_rows, width, self.num_evidence, device=device)
        for place, rows, draft in made:
            at_B, own = torch.from_numpy(rows).to(device, non_blocking=True), slice(draft.token_BK.shape[1])
            length_B[torch.from_numpy(rows)] = draft.length_B
            if self.turns[place].proposer is costly:
                paid_B[rows] = draft.length_B.numpy()
            token_BK[at_B, own] = draft.token_BK
            for b in rows:
                names[b] = self.parts[place]
            if draft.finite_BK is not None and finite_BK is not None:
                finite_BK[at_B, own] = draft.finite_BK
            if q_BKV is not None:
                law_BKV = F.one_hot(draft.token_BK, self.vocab_size) if draft.q_BKV is None else draft.q_BKV
                q_BKV[at_B, own] = law_BKV.to(q_BKV)
            if evidence_BKF is not None:
                first, last = self.first_evidence[place : place + 2]
                live_BK = torch.arange(draft.token_BK.shape[1]) < draft.length_B.unsqueeze(1)
                evidence_BKF[at_B, own, first] = live_BK.to(evidence_BKF)
                if draft.evidence_BKF is not None:
                    evidence_BKF[at_B, own, first + 1 : last] = draft.evidence_BKF
        return Draft(token_BK, length_B, q_BKV, None, evidence_BKF, names, paid_B, finite_BK)


@dataclass
class Turn:
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
        long_B = np.flatnonzero(np.array(kept) > LONG_OUT)
        if not len(long_B):
            return
        given = self._given(context, long_B, np.zeros_like(context.max_draft_B))
        if not self.proposer.take_in(given):
            assert given.hidden is not None
            for row, length, hidden_NTD in zip(given.rows.tolist(), given.length_B.tolist(), given.hidden, strict=True):
                self.kept[row] = [(length - 1 - len(hidden_NTD), hidden_NTD)]

    def _given(self, context: Context, place_B: np.ndarray, max_draft_B: np.ndarray) -> Context:
        """What the part may look at: these rows, with all states since its last turn, which are handed over."""
        given = replace(context, hidden=None, max_draft_B=max_draft_B).of(place_B)
        if given.stood_B is not None:
            given.stood_B = np.array([self.stood[row] for row in given.rows.tolist()])
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
    evidence_BKF = None if draft.evidence_BKF is None else draft.evidence_BKF[there_B]
    finite_BK = None if draft.finite_BK is None else draft.finite_BK[there_B]
    return Draft(draft.token_BK[there_B], draft.length_B[at_B], q_BKV, evidence_BKF=evidence_BKF, finite_BK=finite_BK)


def refuse(name: str | None) -> None:
    """Raises ValueError for a method that can be no part."""
    if name == "hybrid":
        raise ValueError("a hybrid inside a hybrid; write its parts into the list itself")
    if name in ("none", "extract_hidden_states"):
        raise ValueError(f"method {name!r} drafts nothing; leave it out")


def with_model(proposers: list[dict[str, Any]], model: Any | None = None) -> list[dict[str, Any]]:
    """The parts' settings without those that are None, the model in the one part that takes one and names none. Raises
    ValueError if there is no such part, or several."""
    if not proposers:
        raise ValueError("proposers=[]: method 'hybrid' needs at least one part; give their methods, in order")
    given = [{key: value for key, value in own.items() if value is not None} for own in proposers]
    if model is None:
        return given

    def takes_model(name: str | None) -> bool:  # a part without a method is what its model says
        return name not in method.names() or "model" in method.settings(name)

    without = [own for own in given if "model" not in own and takes_model(own.get("method"))]
    if len(without) != 1:
        found = f"{len(without)} parts take a model and name none" if without else "no part takes a model and names none"
        raise ValueError(f"model={model} of method 'hybrid': {found}; write the model into its part")
    without[0]["model"] = model
    return given
