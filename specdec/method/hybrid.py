"""Several proposers in order: the first that drafts anything for a row makes its draft in this step.

Looking up is free where the text repeats itself; a trained drafter covers the rest. The components decide by
their own settings which rows they draft for: `prompt_lookup_min` of n-gram drafting, `min_score` of suffix decoding; a row that
a component drafts nothing for goes to the next one. These decisions read committed tokens only, so the output keeps the
target's distribution whatever the components.

If a component that runs a model drafts trees greedily, it drafts for every row, and what those before it draft is grafted into
its tree: nodes of both in turn, under one root, those with the same path once.

A row's later components see nothing of a step. The target's states that they miss are kept here until they draft for the row,
or are processed meanwhile (`catch_up`) when they become many; tokens are in every context.
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

from specdec import method, tree
from specdec.core import (
    MAX_PENDING_STATES,
    Context,
    Draft,
    MethodFacts,
    Proposer,
    Request,
    StatelessProposer,
    draft_from_lists,
)
from specdec.model.target import CausalLM


class Hybrid(StatelessProposer):
    """Drafts by the first component that drafts anything.

    proposers: mappings of `method` and its settings, in order.
    num_speculative_tokens: of the hybrid, and of a component that has no such setting (fewer, if it was made for fewer).
    model: of the one component that takes a model and names none.

    Raises ValueError, one line, for components that cannot be built.
    """

    name = "hybrid"
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
        names = [settings["method"] for settings in proposers]
        self.num_speculative_tokens = num_speculative_tokens
        self.component_names = tuple(
            name if names.count(name) == 1 else f"{name}-{names[: place + 1].count(name)}" for place, name in enumerate(names)
        )
        self.components: list[Component] = []
        for place, (name, settings) in enumerate(zip(names, proposers, strict=True)):
            settings = {key: value for key, value in settings.items() if key != "method"}
            try:
                if settings.get("num_speculative_tokens") is None:
                    proposer = method.build_up_to(num_speculative_tokens, name, target, **settings)
                else:
                    proposer = method.build(name, target, **settings)
            except ValueError as error:
                raise ValueError(f"proposers[{place}]: {error}") from None
            self.components.append(Component(self.component_names[place], proposer))
        self.vocab_size = target.vocab_size
        self.last_R: dict[int, Component] = {}  # the component that made the row's last draft
        self.compose()

    @staticmethod
    def assign_model(proposers: list[dict[str, Any]], model: Any | None = None) -> list[dict[str, Any]]:
        """The proposers' settings without those that are None, `model` in the one that takes a model and names none. Raises
        ValueError if there is no such proposer, or several."""
        if not proposers:
            raise ValueError("proposers=[]: method 'hybrid' needs at least one; give their methods, in order")
        assigned = [{key: value for key, value in settings.items() if value is not None} for settings in proposers]
        if model is None:
            return assigned

        def takes_model(name: str | None) -> bool:  # without a method, its model says which it is
            return name not in method.names() or "model" in method.settings(name)

        without = [settings for settings in assigned if "model" not in settings and takes_model(settings.get("method"))]
        if len(without) != 1:
            count = f"{len(without)} proposers take" if without else "no proposer takes"
            raise ValueError(
                f"model={model} of method 'hybrid': {count} a model without naming one; write the model into its proposer"
            )
        without[0]["model"] = model
        return assigned

    def compose(self) -> None:
        """What follows from the components."""
        proposers = [component.proposer for component in self.components]
        # each layer once, in the order of the components
        self.hidden_layers = tuple(dict.fromkeys(layer for proposer in proposers for layer in proposer.hidden_layers))
        for component in self.components:
            columns = [self.hidden_layers.index(layer) for layer in component.proposer.hidden_layers]
            component.columns = None if columns == list(range(len(self.hidden_layers))) else columns
        self.needs_logits = any(proposer.needs_logits for proposer in proposers)
        self.needs_uniforms = any(proposer.needs_uniforms for proposer in proposers)
        self.drafts_trees = any(proposer.drafts_trees for proposer in proposers)
        self.max_model_len = min((limit for proposer in proposers if (limit := proposer.max_model_len)), default=None)
        # the last that runs a model: whether a lookup drafts anything depends on the text
        runs_model = [proposer for proposer in proposers if proposer.facts.runs_model]
        self.cost_proposer = runs_model[-1] if runs_model else None
        # it drafts for every row, and lookups are grafted into its trees
        self.grafts = (
            self.cost_proposer is not None and self.cost_proposer.drafts_trees and not self.cost_proposer.needs_uniforms
        )
        # of every component a column that is 1 where the draft is its own, then its features: one regression serves all
        self.first_feature = np.cumsum([0, *(1 + proposer.num_confidence_features for proposer in proposers)]).tolist()
        self.num_confidence_features = self.first_feature[-1]

    # ---------------------------------------------------------------- what the engine calls

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return sum(component.proposer.bytes_to_grow(rows, slots) for component in self.components)

    def reserve(self, rows: int, slots: int) -> None:
        for component in self.components:
            component.proposer.reserve(rows, slots)

    def reset(self) -> None:
        for component in self.components:
            component.proposer.reset()

    def wipe(self) -> None:
        for component in self.components:
            component.proposer.wipe()

    def summarize(self, answers: Sequence[list[int]]) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for component in self.components:
            keys |= component.proposer.summarize(answers)
        return keys

    def on_start(self, row: int, request: Request) -> None:
        self.last_R.pop(row, None)
        for component in self.components:
            component.pending_R[row] = []
            component.num_accepted_prev_R[row] = 0
            component.proposer.on_start(row, request)

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        for component in self.components:
            pending = [states for _, states in component.pending_R.pop(row, [])]
            unread = [*pending, *map(component.states, hidden)] if component.proposer.hidden_layers else ()
            component.proposer.on_finish(row, unread)

    def on_forward(self, token_N: Tensor, logits_NV: Tensor) -> None:
        for component in self.components:
            component.proposer.on_forward(token_N, logits_NV)

    def propose(self, context: Context) -> Draft:
        for component in self.components:
            component.keep_states(context)
        if context.num_accepted_prev_B is not None:
            for row, num_accepted in zip(context.rows.tolist(), context.num_accepted_prev_B.tolist(), strict=True):
                if row in self.last_R:
                    self.last_R.pop(row).num_accepted_prev_R[row] = num_accepted
        drafts: list[tuple[int, np.ndarray, Draft]] = []
        remaining = np.flatnonzero(context.max_draft_B > 0)
        for place, component in enumerate(self.components):
            if self.grafts and component.proposer is self.cost_proposer:
                drafts = self._grafted(context, drafts, component, place)
                remaining = np.setdiff1d(remaining, drafts[0][1])
                continue
            if not len(remaining):
                continue
            draft = component.draft(context, remaining)
            has_draft = draft.length_B.numpy() > 0
            if has_draft.any():
                drafts.append((place, remaining[has_draft], draft.select_rows(np.flatnonzero(has_draft))))
                self.last_R |= dict.fromkeys(context.rows[remaining[has_draft]].tolist(), component)
            remaining = remaining[~has_draft]
        for component in self.components:
            component.catch_up(context)
        return self._join(context, drafts)

    def catch_up(self, context: Context) -> bool:
        for component in self.components:
            component.keep_states(context)
            component.catch_up(context)
        return True

    def _grafted(
        self, context: Context, drafts: list[tuple[int, np.ndarray, Draft]], component: Component, place: int
    ) -> list[tuple[int, np.ndarray, Draft]]:
        """The component's trees of all rows, with the drafts that there are in them."""
        rows = np.flatnonzero(context.max_draft_B > 0)
        tree_draft = component.draft(context, rows)
        lookup = self._join(context, drafts).select_rows(rows)
        self.last_R |= dict.fromkeys(context.rows[rows].tolist(), component)
        host = torch.cat([tree_draft.token_BK, lookup.token_BK], 1).cpu().numpy()  # one read
        token_BK, lookup_BK = np.split(host, [tree_draft.token_BK.shape[1]], 1)
        tree_length_B, lookup_length_B = tree_draft.length_B.numpy(), lookup.length_B.numpy()
        trees = [
            tree.graft(
                lookup_BK[b, : lookup_length_B[b]],
                lookup.parents()[b, : lookup_length_B[b]],
                token_BK[b, : tree_length_B[b]],
                tree_draft.parents()[b, : tree_length_B[b]],
                int(context.max_draft_B[row]),
            )
            for b, row in enumerate(rows)
        ]
        draft = draft_from_lists(
            [tokens for tokens, *_ in trees], context.last_token_B.device, parents=[parents for _, parents, *_ in trees]
        )
        if tree_draft.finite_BK is not None:
            draft.finite_BK = tree_draft.finite_BK.all(1, keepdim=True).expand(draft.token_BK.shape)
        if context.return_confidence:  # those of the component's own nodes; of the others nothing is known
            confidence_BKF = draft.token_BK.new_zeros(
                (*draft.token_BK.shape, component.proposer.num_confidence_features)
            ).float()
            for b, (*_, node_k) in enumerate(trees):
                in_tree = node_k >= 0
                at, node = (torch.from_numpy(x).to(confidence_BKF.device) for x in (np.flatnonzero(in_tree), node_k[in_tree]))
                if tree_draft.confidence_BKF is not None:
                    confidence_BKF[b, at] = tree_draft.confidence_BKF[b, node]
            draft.confidence_BKF = confidence_BKF
        # where a lookup has nodes in it, both drafted
        draft.proposer_B = [
            self.component_names[place] if not (looked_up >= 0).any() else f"{name}+{self.component_names[place]}"
            for (_, _, looked_up, _), name in zip(trees, lookup.proposer_B or [], strict=True)
        ]
        has_draft = draft.length_B.numpy() > 0
        return [(place, rows[has_draft], draft.select_rows(np.flatnonzero(has_draft)))]

    # ---------------------------------------------------------------- one draft of several

    def _join(self, context: Context, drafts: list[tuple[int, np.ndarray, Draft]]) -> Draft:
        """The components' drafts as one.

        drafts: place of the component, rows of the context that its draft is of, and the draft; no row is in two of them.
        A field that one of the drafts has is filled in for the others: their distribution is one-hot, their tokens' logits are
        finite, their tokens a chain.
        """
        num_rows = len(context.rows)
        device = context.last_token_B.device
        width = max((draft.token_BK.shape[1] for _, _, draft in drafts), default=0)
        token_BK = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        length_B = torch.zeros(num_rows, dtype=torch.int64)
        num_model_drafted_B = torch.zeros(num_rows, dtype=torch.int64)
        names = [""] * num_rows
        q_BKV = None
        parent_BK = None
        finite_BK = None
        confidence_BKF = None
        if any(draft.q_BKV is not None for _, _, draft in drafts):
            q_BKV = torch.zeros(num_rows, width, self.vocab_size, device=device)
        if any(draft.parent_BK is not None for _, _, draft in drafts):
            parent_BK = torch.arange(-1, width - 1).repeat(num_rows, 1)
        if any(draft.finite_BK is not None for _, _, draft in drafts):
            finite_BK = torch.ones(num_rows, width, dtype=torch.bool, device=device)
        if context.return_confidence:
            confidence_BKF = torch.zeros(num_rows, width, self.num_confidence_features, device=device)
        for place, rows, draft in drafts:
            row_b = torch.from_numpy(rows)
            at_b = row_b.to(device, non_blocking=True)
            columns = slice(draft.token_BK.shape[1])
            token_BK[at_b, columns] = draft.token_BK
            length_B[row_b] = draft.length_B
            if self.components[place].proposer is self.cost_proposer:
                num_model_drafted_B[row_b] = draft.length_B
            for b, name in zip(rows, draft.proposer_B or [self.component_names[place]] * len(rows), strict=True):
                names[b] = name
            if q_BKV is not None:
                one_hot_or_q = F.one_hot(draft.token_BK, self.vocab_size) if draft.q_BKV is None else draft.q_BKV
                q_BKV[at_b, columns] = one_hot_or_q.to(q_BKV)
            if parent_BK is not None and draft.parent_BK is not None:
                parent_BK[row_b, columns] = draft.parent_BK
            if finite_BK is not None and draft.finite_BK is not None:
                finite_BK[at_b, columns] = draft.finite_BK
            if confidence_BKF is not None:
                first, last = self.first_feature[place : place + 2]
                is_token_bK = torch.arange(draft.token_BK.shape[1]) < draft.length_B.unsqueeze(1)
                confidence_BKF[at_b, columns, first] = is_token_bK.to(confidence_BKF)
                if draft.confidence_BKF is not None:
                    confidence_BKF[at_b, columns, first + 1 : last] = draft.confidence_BKF
        return Draft(token_BK, length_B, q_BKV, parent_BK, confidence_BKF, names, num_model_drafted_B, finite_BK)


@dataclass
class Component:
    """A proposer of a hybrid, and what it has not seen yet.

    columns: which of the hybrid's states it reads; None: all of them.
    pending_R: by cache row, states that it has not read, as (first position, [n, T, D]).
    num_accepted_prev_R: by cache row, how much of its own last draft was accepted.
    """

    name: str
    proposer: Proposer
    columns: list[int] | None = None
    pending_R: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)
    num_accepted_prev_R: dict[int, int] = field(default_factory=dict)

    def states(self, hidden_NTD: Tensor) -> Tensor:
        """The states that it reads."""
        return hidden_NTD if self.columns is None else hidden_NTD[:, self.columns]

    def keep_states(self, context: Context) -> None:
        """Keep the context's states. Of states that come twice for a position, the later ones count."""
        if not self.proposer.hidden_layers:
            return
        assert context.hidden is not None
        for row, length, hidden_NTD in zip(context.rows.tolist(), context.length_B.tolist(), context.hidden, strict=True):
            first = length - 1 - len(hidden_NTD)
            before = [(start, states[: first - start]) for start, states in self.pending_R[row] if start < first]
            self.pending_R[row] = [*before, (first, self.states(hidden_NTD))]

    def draft(self, context: Context, place_B: np.ndarray) -> Draft:
        """Its draft for these rows of the context."""
        max_draft = self.proposer.num_speculative_tokens
        max_draft_B = np.minimum(context.max_draft_B, max_draft)
        if context.max_depth_B is not None and not self.proposer.drafts_trees:
            max_draft_B = np.minimum(max_draft_B, context.max_depth_B)
        inner_context = self._context_for(context, place_B, max_draft_B)
        if inner_context.uniform_BK is not None:
            inner_context.uniform_BK = inner_context.uniform_BK[:, :max_draft]
        return self.proposer.propose(inner_context)

    def catch_up(self, context: Context) -> None:
        """Of rows that it has not drafted for in long the states are processed, or else put into one piece."""
        if not self.proposer.hidden_layers:
            return
        num_pending = [sum(len(states) for _, states in self.pending_R[row]) for row in context.rows.tolist()]
        late = np.flatnonzero(np.array(num_pending) > MAX_PENDING_STATES)
        if not len(late):
            return
        inner_context = self._context_for(context, late, np.zeros_like(context.max_draft_B))
        if not self.proposer.catch_up(inner_context):
            assert inner_context.hidden is not None
            lengths = inner_context.length_B.tolist()
            for row, length, hidden_NTD in zip(inner_context.rows.tolist(), lengths, inner_context.hidden, strict=True):
                self.pending_R[row] = [(length - 1 - len(hidden_NTD), hidden_NTD)]

    def _context_for(self, context: Context, place_B: np.ndarray, max_draft_B: np.ndarray) -> Context:
        """These rows of the context, with all states that it has not read, which are read then."""
        inner_context = replace(context, hidden=None, max_draft_B=max_draft_B).select_rows(place_B)
        rows = inner_context.rows.tolist()
        if inner_context.num_accepted_prev_B is not None:
            inner_context.num_accepted_prev_B = np.array([self.num_accepted_prev_R[row] for row in rows])
        if self.proposer.hidden_layers:
            inner_context.hidden = [torch.cat([states for _, states in self.pending_R[row]]) for row in rows]
            for row in rows:
                self.pending_R[row] = []
        return inner_context
