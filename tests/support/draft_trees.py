"""Distributions of verdicts about trees of draft tokens, on small vocabularies: exact by bisection, and simulated.

As in support/distributions.py, a table maps prefixes to distributions and `verify` is a black box. A *place* is where a verdict
ends: 0 is the last committed token, k + 1 is node k of the draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import tree
from specdec.core import Context, Draft, Request, Verdict
from specdec.drafter.tree import Grower, Level, TreePlan
from specdec.params import SamplingParams
from support.distributions import (
    ALMOST_ONE,
    Distribution,
    Table,
    Verify,
    bisect,
    complete,
    extra_token_distribution,
    repeated,
    sequences,
)

Children = Callable[[Sequence[float], int], list[tuple[tuple[int, ...], float]]]  # of a node, with their probability


# Trees


def likeliest(q_V: Sequence[float], count: int) -> list[tuple[tuple[int, ...], float]]:
    """Of equals the lower id."""
    return [(tuple(sorted(range(len(q_V)), key=lambda v: (-q_V[v], v))[:count]), 1.0)]


def without_replacement(q_V: Sequence[float], count: int) -> list[tuple[tuple[int, ...], float]]:
    """One draw after the other, q renormalised after each."""
    cases = []
    for tokens in itertools.permutations(range(len(q_V)), count):
        probability = 1.0
        left = 1.0
        for token in tokens:
            probability *= q_V[token] / left if q_V[token] else 0.0
            left -= q_V[token]
        cases.append((tokens, probability))
    return [case for case in cases if case[1] > 0]


def with_replacement(q_V: Sequence[float], count: int) -> list[tuple[tuple[int, ...], float]]:
    cases = [
        (tokens, float(torch.tensor(q_V, dtype=torch.float64)[list(tokens)].prod()))
        for tokens in sequences(len(q_V), count).tolist()
    ]
    return [(tuple(tokens), probability) for tokens, probability in cases if probability > 0]


def all_trees(q_table: Table, num_children: Callable[[tuple[int, ...]], int], children: Children) -> tuple[Draft, Tensor]:
    """Every tree that can be drafted, with its probability [B]. Nodes are level by level, siblings in the order of drawing.

    num_children: of the node at the end of a prefix.
    """
    trees: list[tuple[list[int], list[int], float]] = []

    def grow(tokens: list[int], parents: list[int], probability: float, leaves: list[tuple[tuple[int, ...], int]]) -> None:
        if not leaves:
            trees.append((tokens, parents, probability))
            return
        (prefix, place), *rest = leaves
        count = num_children(prefix)
        for chosen, share in children(q_table[prefix], count) if count else [((), 1.0)]:
            nodes = [((*prefix, token), len(tokens) + i) for i, token in enumerate(chosen)]
            grow([*tokens, *chosen], [*parents, *[place] * count], probability * share, [*rest, *nodes])

    grow([], [], 1.0, [((), -1)])
    length_B = torch.tensor([len(tokens) for tokens, _, _ in trees])
    width = int(length_B.max())
    token_BK = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _, _ in trees])
    parent_BK = torch.tensor([parents + [-1] * (width - len(parents)) for _, parents, _ in trees])
    draft = Draft(token_BK, length_B, parent_BK=parent_BK)
    if children is not likeliest:
        draft.q_BKV = draft_rows(q_table, draft)
    return draft, torch.tensor([probability for _, _, probability in trees], dtype=torch.float64)


def branching(*counts: int) -> Callable[[tuple[int, ...]], int]:
    """The same number of children for all nodes of a level."""
    return lambda prefix: counts[len(prefix)] if len(prefix) < len(counts) else 0


def stacked(table: Table) -> Tensor:
    """[X, V] the table, shorter prefixes first; what follows on the prefix of line i begins at line V i + 1."""
    vocab = len(table[()])
    prefixes = itertools.chain(*(itertools.product(range(vocab), repeat=n) for n in range(max(map(len, table)) + 1)))
    return torch.tensor([table[prefix] for prefix in prefixes], dtype=torch.float64)


def tree_rows(table: Table, draft: Draft) -> Tensor:
    """[B, K + 1, V] the distribution after each place."""
    table_XV = stacked(table)
    vocab = table_XV.shape[1]
    parents_BK = torch.from_numpy(draft.parents())
    index_BJ = torch.zeros(len(parents_BK), parents_BK.shape[1] + 1, dtype=torch.int64)
    for k in range(parents_BK.shape[1]):
        above_B = index_BJ.gather(1, parents_BK[:, k : k + 1] + 1).squeeze(1)
        index_BJ[:, k + 1] = vocab * above_B + 1 + draft.token_BK[:, k]
    return table_XV[index_BJ.clamp(max=len(table_XV) - 1)]


def draft_rows(table: Table, draft: Draft) -> Tensor:
    """[B, K, V] the distribution that each node comes from."""
    parents_BK = torch.from_numpy(draft.parents())
    return tree_rows(table, draft)[torch.arange(len(parents_BK)).unsqueeze(1), parents_BK + 1]


def grow(q_table: Table, plan: TreePlan, context: Context, is_sampled: bool) -> Draft:
    """The trees that `Grower` grows for a drafter with this table, and where it asks for them."""
    logits_XV = stacked(q_table).log()
    index_BW = np.zeros((len(context.rows), 1), dtype=np.int64)

    def expand(level: Level) -> Tensor:
        nonlocal index_BW
        index_BW = logits_XV.shape[1] * np.take_along_axis(index_BW, level.place_BW, 1) + 1 + level.token_BW
        return logits_XV[torch.from_numpy(index_BW[np.arange(index_BW.shape[1]) < level.count_B[:, None]])]

    grower = Grower(plan, context, np.full(len(context.rows), plan.depth), is_sampled, lambda token, q: (token, q))
    return grower.grow(logits_XV[:1].expand(len(context.rows), -1), expand)


def context_of(num_rows: int, max_draft: int, uniform_BK: Tensor | None = None, shares_noise: bool = False) -> Context:
    """What a grower reads, at temperature 1."""
    return Context(
        rows=np.arange(num_rows),
        requests=[Request("", [0], SamplingParams(temperature=1.0))] * num_rows,
        token_RL=np.zeros((num_rows, 1), dtype=np.int64),
        length_B=np.ones(num_rows, dtype=np.int64),
        max_draft_B=np.full(num_rows, max_draft),
        last_token_B=torch.zeros(num_rows, dtype=torch.int64),
        uniform_BK=uniform_BK,
        shares_noise=shares_noise,
    )


def static_plan(*counts: int) -> TreePlan:
    """So many children for each node of a level, nodes level by level."""
    shape = [path for n in range(len(counts)) for path in itertools.product(*map(range, counts[: n + 1]))]
    return TreePlan(len(shape), len(counts), max(counts), "static", shape)


def place_of(verdict: Verdict) -> Tensor:
    """[B] where each verdict ends."""
    if verdict.path_BK is None:
        return verdict.num_accepted_B
    return F.pad(verdict.path_BK + 1, (1, 0)).gather(1, verdict.num_accepted_B.unsqueeze(1)).squeeze(1)


# Exact distributions


def node_thresholds(verify: Verify, draft: Draft, p_BJV: Tensor, bits: int = 53) -> Tensor:
    """[B, K] where the decision about each node flips, its ancestors' uniforms at 0 and those of all others just below 1.

    A node that cannot be reached so, since one before it is always accepted or one above it never, reads 0.
    bits: how exactly.
    """
    num_rows, num_nodes = draft.token_BK.shape
    on_path_BKK = torch.from_numpy(tree.on_path(draft.parents()))
    copies, p_NJV = repeated(draft, p_BJV, num_nodes)
    u_NJ = F.pad((~on_path_BKK).flatten(0, 1).double() * ALMOST_ONE, (0, 1), value=0.5)
    watched_N = torch.arange(num_nodes).repeat(num_rows)
    each_N = torch.arange(len(watched_N))
    is_below_NJ = F.pad(on_path_BKK.transpose(1, 2).flatten(0, 1), (1, 0))  # places at or below the node that is watched

    def is_accepted(u_N: Tensor) -> Tensor:
        u_NJ[each_N, watched_N] = u_N
        return is_below_NJ[each_N, place_of(verify(copies, p_NJV, u_NJ))]

    return bisect(is_accepted, num_rows * num_nodes, bits).reshape(num_rows, num_nodes)


def _patterns(verify: Verify, draft: Draft, p_BJV: Tensor, bits: int = 53) -> tuple[Tensor, Tensor, Tensor]:
    """What happens for each way in which the uniforms can fall below or above their thresholds: uniforms [B, S, K], the
    probability [B, S], and the place [B, S]."""
    num_rows, num_nodes = draft.token_BK.shape
    low_SK = sequences(2, num_nodes).bool()
    flip_B1K = node_thresholds(verify, draft, p_BJV, bits).unsqueeze(1)
    u_BSK = torch.where(low_SK, flip_B1K / 2, (1 + flip_B1K) / 2).clamp(max=ALMOST_ONE)
    weight_BS = torch.where(low_SK, flip_B1K, 1 - flip_B1K).prod(-1)
    copies, p_NJV = repeated(draft, p_BJV, len(low_SK))
    place_N = place_of(verify(copies, p_NJV, F.pad(u_BSK.flatten(0, 1), (0, 1), value=0.5)))
    return u_BSK, weight_BS, place_N.reshape(num_rows, -1)


def place_distribution(verify: Verify, draft: Draft, p_BJV: Tensor, bits: int = 53) -> Tensor:
    """[B, K + 1] the exact distribution of the place, for each row's own tree."""
    _, weight_BS, place_BS = _patterns(verify, draft, p_BJV, bits)
    return torch.zeros(p_BJV.shape[:2], dtype=torch.float64).scatter_add_(1, place_BS, weight_BS)


def tree_verdict_distribution(verify: Verify, draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K + 1, V] the exact distribution of (place, extra token), for each row's own tree.

    Exact for schemes in which a node that can still be accepted is decided by its own uniform and a threshold, and where the
    extra token's distribution depends on the place alone.
    """
    u_BSK, weight_BS, place_BS = _patterns(verify, draft, p_BJV)
    weight_BJ = torch.zeros(p_BJV.shape[:2], dtype=torch.float64).scatter_add_(1, place_BS, weight_BS)
    # the likeliest pattern that ends in each place stands for all of them
    is_here_BJS = place_BS.unsqueeze(1) == torch.arange(p_BJV.shape[1]).unsqueeze(1)
    pattern_BJ = torch.where(is_here_BJS, weight_BS.unsqueeze(1), -1.0).argmax(-1)
    row_N, place_N = torch.nonzero(weight_BJ > 1e-14, as_tuple=True)
    selected = draft.select_rows(row_N.numpy()) if len(row_N) != len(weight_BJ) else draft
    extra_NV = extra_token_distribution(verify, selected, p_BJV[row_N], u_BSK[row_N, pattern_BJ[row_N, place_N]])
    mass_BJV = torch.zeros_like(p_BJV)
    mass_BJV[row_N, place_N] = weight_BJ[row_N, place_N].unsqueeze(-1) * extra_NV
    return mass_BJV


def emitted_by_trees(mass_BJV: Tensor, draft: Draft, weight_B: Tensor) -> Distribution:
    """(num_accepted, emitted tokens) -> probability, from the distributions of verdicts about trees and their weights."""
    distribution: Distribution = {}
    parents_BK = draft.parents()
    for b, place, token in torch.nonzero(mass_BJV > 1e-14).tolist():
        tokens = [token]
        node = place - 1
        while node >= 0:
            tokens.insert(0, int(draft.token_BK[b, node]))
            node = int(parents_BK[b, node])
        key = (len(tokens) - 1, tuple(tokens))
        distribution[key] = distribution.get(key, 0.0) + float(mass_BJV[b, place, token] * weight_B[b])
    return distribution


# Simulation


def simulate_trees(
    verify: Verify, p_table: Table, draft: Draft, generator: torch.Generator, u_BJ: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step for each row's tree: num_accepted_B, and tokens of the accepted path, completed by the target.

    u_BJ: uniforms of the verification; None: independent ones.
    """

    def noise(width: int) -> Tensor:
        return torch.rand(len(draft.length_B), width, generator=generator, dtype=torch.float64)

    verdict = verify(draft, tree_rows(p_table, draft), noise(draft.token_BK.shape[1] + 1) if u_BJ is None else u_BJ)
    assert verdict.path_BK is not None
    height = max(map(len, p_table))
    token_BK = draft.token_BK.gather(1, verdict.path_BK)[:, :height]
    return verdict.num_accepted_B, complete(
        F.pad(token_BK, (0, height - token_BK.shape[1])), verdict, p_table, noise(height + 1)
    )
