"""Trees of draft tokens under every scheme, held against exact vectors, and the trees themselves.

The vectors are tests/vectors/trees.json; its `describe` fields say what each is. Left out is what this project does not do:
children drawn with replacement (`iid`; here only as a mistake), `optimum`, which no scheme reaches, and best-first growth that
expands node by node; the file lacks `select_then_chain`, `block_drafters` and tables of Monte Carlo means. Exact distributions
come from bisecting the uniforms (support/draft_trees.py), or from all combinations of the target's own tokens; simulations
beside them check what that takes for granted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import gumbel, method, rejection, sampling, tree
from specdec.core import Context, Draft, StatelessProposer, Verdict
from specdec.drafter.tree import Grower, Level, TreePlan, best_first
from specdec.engine import Engine, HostVerdict
from specdec.model.kv import ForwardBatch, SlotCache, Tree
from specdec.params import SamplingParams
from specdec.rejection import Verifier, block, match, standard
from specdec.sampling import VERIFY, inverse_cdf, uniforms
from support.distributions import (
    Table,
    Verify,
    chi_square,
    completed_joint,
    emitted_distribution,
    fits,
    num_accepted_distribution,
    repeated,
    sequences,
    target_joint,
    tv,
    vectors,
)
from support.draft_trees import (
    Children,
    all_trees,
    branching,
    context_of,
    draft_rows,
    emitted_by_trees,
    grow,
    likeliest,
    node_thresholds,
    place_distribution,
    place_of,
    simulate_trees,
    static_plan,
    tree_rows,
    tree_verdict_distribution,
    with_replacement,
    without_replacement,
)
from support.stretches import PARAMS, TABLE, decode, misfit
from support.table import Restless, TableLM, TokenCache

VECTORS = vectors("trees")
ROWS = 200_000  # where no exact distribution stands beside
FEW_ROWS = 50_000
EXACT = 1e-12
SAMPLED = {"rrs": standard.verify, "traversal": block.verify}  # of the vectors, and the scheme of sampled trees
LOSSLESS = [name for name in rejection.names() if rejection.find(name).lossless]


def numbers(values: Any) -> Any:
    """Fractions as the vectors write them, "a/b", at any depth."""
    if isinstance(values, dict):
        return {key: numbers(value) for key, value in values.items()}
    if isinstance(values, list):
        return [numbers(value) for value in values]
    return float(Fraction(values)) if isinstance(values, str) else values


def table_of(entry: dict[str, Any]) -> Table:
    return {tuple(int(token) for token in key.split(",") if token): numbers(row) for key, row in entry.items()}


P = table_of(VECTORS["two_level"]["p"])
Q = table_of(VECTORS["two_level"]["q"])
DEPTHS = VECTORS["two_level"]["laws"]
SHAPES = {key: tuple(map(int, key.split("x"))) for key in DEPTHS}


def scheme(name: str, num_nodes: int = 3) -> Verifier:
    settings = {"synthetic_acceptance_rates": [0.8 ** (k + 1) for k in range(num_nodes)]} if name == "synthetic" else {}
    return rejection.build(name, num_nodes, **settings)


def close(values: Any, wanted: Any, tolerance: float = EXACT) -> bool:
    values = np.asarray(values, dtype=np.float64)
    wanted = np.asarray(wanted, dtype=np.float64)
    return values.shape == wanted.shape and bool((abs(values - wanted) <= tolerance).all())


def noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def random_probs(generator: torch.Generator, *shape: int) -> Tensor:
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1)


def combinations_of_target_tokens(verify: Verify, draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, J, V] the exact distribution of (place, extra token) of a scheme that samples at every place by inverse CDF: the
    verdicts for all combinations of these tokens."""
    num_rows, num_places, vocab = p_BJV.shape
    token_SJ = sequences(vocab, num_places)
    index_BSJ1 = token_SJ.unsqueeze(-1).expand(num_rows, -1, -1, 1)
    p_BSJV = p_BJV.unsqueeze(1).expand(-1, len(token_SJ), -1, -1)
    u_BSJ = (p_BSJV.cumsum(-1) - p_BSJV / 2).gather(-1, index_BSJ1).squeeze(-1)
    weight_BS = p_BSJV.gather(-1, index_BSJ1).squeeze(-1).prod(-1)
    verdict = verify(*repeated(draft, p_BJV, len(token_SJ)), u_BSJ.flatten(0, 1))
    case_BS = (place_of(verdict) * vocab + verdict.token_B).view(num_rows, -1)
    return torch.zeros(num_rows, num_places * vocab, dtype=torch.float64).scatter_add_(1, case_BS, weight_BS).view_as(p_BJV)


# The distribution of the verdict about a tree


TREES = VECTORS["given_tree"]["cases"]
SCHEME_OF = {  # of the vectors: the scheme, and whether it gets q
    "onehot": [("standard", False), ("block", False)],
    "match": [("match", False), ("match", True), ("gumbel", True)],
    "rrs_norep": [("standard", True)],
    "traversal_norep": [("block", True)],
}
EACH_TREE = pytest.mark.parametrize("case", TREES, ids=lambda case: case["what"])
EACH_RULE = pytest.mark.parametrize(
    ("rule", "name", "with_q"), [(rule, *which) for rule, schemes in SCHEME_OF.items() for which in schemes]
)


def tree_of(case: dict[str, Any], with_q: bool) -> Draft:
    """The vectors count the last committed token as node 0."""
    parent_BK = torch.tensor([case["parent"][1:]]) - 1
    draft = Draft(torch.tensor([case["token"][1:]]), torch.tensor([parent_BK.shape[1]]), parent_BK=parent_BK)
    return replace(draft, q_BKV=draft_rows(Q, draft)) if with_q else draft


def verdicts_of(case: dict[str, Any], rule: str) -> Tensor:
    """[J, V]"""
    mass_JV = torch.zeros(len(case["token"]), 4, dtype=torch.float64)
    for place, entry in numbers(case["verdicts"][rule]).items():
        mass_JV[int(place)] = entry["prob"] * torch.tensor(entry["extra"], dtype=torch.float64)
    return mass_JV


@EACH_TREE
@EACH_RULE
def test_verdict_about_a_tree(case: dict[str, Any], rule: str, name: str, with_q: bool) -> None:
    draft = tree_of(case, with_q)
    p_BJV = tree_rows(P, draft)
    verify = rejection.find(name).verify
    if name == "match":
        mass_BJV = combinations_of_target_tokens(verify, draft, p_BJV)
    elif name == "gumbel":
        return  # no uniform of its is a threshold: simulated below
    else:
        mass_BJV = tree_verdict_distribution(verify, draft, p_BJV)
    assert close(mass_BJV[0], verdicts_of(case, rule))


@EACH_TREE
@EACH_RULE
def test_verdict_about_a_tree_simulated(case: dict[str, Any], rule: str, name: str, with_q: bool) -> None:
    draft, p_BJV = repeated(tree_of(case, with_q), tree_rows(P, tree_of(case, with_q)), FEW_ROWS)
    verdict = rejection.find(name).verify(draft, p_BJV, noise(torch.Generator().manual_seed(1), *p_BJV.shape[:2]))
    count = torch.bincount(4 * place_of(verdict) + verdict.token_B, minlength=p_BJV[0].numel())
    statistic, threshold = chi_square(count, verdicts_of(case, rule))
    assert statistic < threshold


@EACH_TREE
def test_thresholds_of_traversal(case: dict[str, Any]) -> None:
    draft = tree_of(case, True)
    threshold_J = F.pad(node_thresholds(block.verify, draft, tree_rows(P, draft))[0], (1, 0), value=1.0)
    for place, entry in numbers(case["verdicts"]["traversal_norep"]).items():
        assert close(threshold_J[int(place)], entry["threshold"])


# Two levels: how many tokens are accepted, over all trees that can be drafted


def accepted_depths(mass_BJV: Tensor, draft: Draft, weight_B: Tensor, depth: int) -> Tensor:
    """[depth + 1]"""
    place_J = torch.from_numpy(np.pad(tree.depths(draft.parents()) + 1, ((0, 0), (1, 0))))
    mass_BJ = mass_BJV.sum(-1) if mass_BJV.dim() == 3 else mass_BJV
    return torch.zeros(depth + 1, dtype=torch.float64).scatter_add_(
        0, place_J.flatten(), (mass_BJ * weight_B.unsqueeze(1)).flatten()
    )


@pytest.mark.parametrize(
    ("rule", "key"), [("rrs", key) for key in DEPTHS] + [("traversal", key) for key in ("1x1", "2x1", "1x2")]
)
def test_two_levels_sampled(rule: str, key: str) -> None:
    draft, weight_B = all_trees(Q, branching(*SHAPES[key]), without_replacement)
    place_BJ = place_distribution(SAMPLED[rule], draft, tree_rows(P, draft))
    assert close(accepted_depths(place_BJ, draft, weight_B, 2), numbers(DEPTHS[key][f"norep_{rule}"]["depth_probs"]))


@pytest.mark.parametrize("key", DEPTHS)
def test_two_levels_likeliest(key: str) -> None:
    draft, weight_B = all_trees(Q, branching(*SHAPES[key]), likeliest)
    p_BJV = tree_rows(P, draft)
    for verify in (standard.verify, block.verify):
        mass_BJV = tree_verdict_distribution(verify, draft, p_BJV)
        assert close(accepted_depths(mass_BJV, draft, weight_B, 2), numbers(DEPTHS[key]["topk_onehot"]["depth_probs"]))
    mass_BJV = combinations_of_target_tokens(match.verify, draft, p_BJV)
    assert close(accepted_depths(mass_BJV, draft, weight_B, 2), numbers(DEPTHS[key]["topk_match"]["depth_probs"]))


@pytest.mark.parametrize("key", ["1x1", "2x1", "1x2"])
def test_two_levels_sampled_match(key: str) -> None:
    draft, weight_B = all_trees(Q, branching(*SHAPES[key]), without_replacement)
    mass_BJV = combinations_of_target_tokens(match.verify, draft, tree_rows(P, draft))
    assert close(accepted_depths(mass_BJV, draft, weight_B, 2), numbers(DEPTHS[key]["norep_match"]["depth_probs"]))


@pytest.mark.parametrize(
    ("entry", "verify", "counts", "children"),
    [
        ("norep_rrs_2x1", standard.verify, (2, 1), without_replacement),
        ("norep_traversal_2x1", block.verify, (2, 1), without_replacement),
        ("topk_2x2", standard.verify, (2, 2), likeliest),
        ("topk_2x2", block.verify, (2, 2), likeliest),
    ],
)
def test_two_levels_emitted(entry: str, verify: Verify, counts: tuple[int, ...], children: Children) -> None:
    """Every path with every extra token; completed by the target, the joint distribution is the target's."""
    draft, weight_B = all_trees(Q, branching(*counts), children)
    distribution = emitted_by_trees(tree_verdict_distribution(verify, draft, tree_rows(P, draft)), draft, weight_B)
    emitted = {f"{','.join(map(str, tokens[:-1]))}|{tokens[-1]}": weight for (_, tokens), weight in distribution.items()}
    wanted = numbers(VECTORS["two_level"][f"full_law_{entry}"])
    assert emitted.keys() == wanted.keys()
    assert all(close(emitted[key], wanted[key]) for key in wanted)
    assert close(completed_joint(distribution, P, 4, 3), target_joint(P, 4, 3))


def simulate_grown(name: str, counts: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """num_accepted_B and tokens: trees that a `Grower` draws, verified as the engine does, with uniforms by position where the
    scheme wants that."""
    verifier = scheme(name)
    generator = torch.Generator().manual_seed(seed)
    plan = static_plan(*counts)
    position_BD = noise(generator, FEW_ROWS, 3)  # as the target samples them
    drafting_BK = (
        F.pad(position_BD, (0, plan.num_nodes)) if verifier.shares_noise else noise(generator, FEW_ROWS, plan.num_nodes)
    )
    draft = grow(Q, plan, context_of(FEW_ROWS, plan.num_nodes, drafting_BK, verifier.shares_noise), is_sampled=True)
    depth_BJ = torch.from_numpy(np.pad(tree.depths(draft.parents()) + 1, ((0, 0), (1, 0))))
    u_BJ = position_BD.gather(1, depth_BJ) if verifier.keyed_by == "position" else None
    return simulate_trees(verifier, P, draft, generator, u_BJ)


@pytest.mark.parametrize("key", ["2x1", "2x2"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_two_levels_of_grown_trees(name: str, key: str) -> None:
    num_accepted_B, token_BJ = simulate_grown(name, SHAPES[key], seed=2)
    rule = {"standard": "norep_rrs", "block": "norep_traversal", "match": "norep_match"}.get(name)
    entry = DEPTHS[key][rule] if rule else VECTORS["gumbel_match"]["two_level"][key]
    statistic, threshold = chi_square(torch.bincount(num_accepted_B, minlength=3), torch.tensor(numbers(entry["depth_probs"])))
    assert statistic < threshold
    assert fits(token_BJ, target_joint(P, 4, 3), 4)


@pytest.mark.parametrize("key", ["1x1", "1x2"])
def test_two_levels_of_shared_noise(key: str) -> None:
    num_accepted_B, token_BJ = simulate_grown("gumbel", SHAPES[key], seed=3)
    wanted = torch.tensor(numbers(VECTORS["gumbel_match"]["two_level"][key]["depth_probs"]))
    statistic, threshold = chi_square(torch.bincount(num_accepted_B, minlength=3), wanted)
    assert statistic < threshold
    assert fits(token_BJ, target_joint(P, 4, 3), 4)


# One level


@pytest.mark.parametrize("count", ["1", "2", "3", "4"])
@pytest.mark.parametrize("case", VECTORS["one_level"]["cases"], ids=lambda case: case["p"][0])
def test_one_level(case: dict[str, Any], count: str) -> None:
    wanted = numbers(case["K"][count])
    p_table = {(): numbers(case["p"])}
    q_table = {(): numbers(case["q"])}

    def acceptance(measure: Callable[[Verify, Draft, Tensor], Tensor], verify: Verify, children: Children) -> float:
        draft, weight_B = all_trees(q_table, branching(int(count)), children)
        return float(1 - accepted_depths(measure(verify, draft, tree_rows(p_table, draft)), draft, weight_B, 1)[0])

    for verify in SAMPLED.values():  # which differ from the second level on
        assert close(acceptance(place_distribution, verify, without_replacement), wanted["norep_rrs"])
        assert close(acceptance(place_distribution, verify, likeliest), wanted["topk_onehot"])
    assert close(acceptance(combinations_of_target_tokens, match.verify, likeliest), wanted["topk_onehot"])
    assert close(acceptance(combinations_of_target_tokens, match.verify, without_replacement), wanted["norep_match"])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", VECTORS["gumbel_match"]["one_level"], ids=lambda case: case["p"][0])
def test_one_level_of_shared_noise(case: dict[str, Any], count: int) -> None:
    p_V = torch.tensor(numbers(case["p"]), dtype=torch.float64)
    q_V = torch.tensor(numbers(case["q"]), dtype=torch.float64)
    vocab = len(p_V)
    u_B1 = noise(torch.Generator().manual_seed(4), ROWS, 1)
    token_BC = gumbel.first(q_V.expand(ROWS, -1), u_B1[:, 0], count)
    draft = Draft(token_BC, torch.full((ROWS,), count), parent_BK=torch.full_like(token_BC, -1))
    verdict = scheme("gumbel")(draft, p_V.expand(ROWS, count + 1, -1), u_B1.expand(-1, count + 1))
    accepted_B = verdict.num_accepted_B == 1
    emitted_B = torch.where(accepted_B, token_BC.gather(1, verdict.path_BK[:, :1]).squeeze(1), verdict.token_B)
    wanted = numbers(case[f"k{count}"])
    by_token_V = torch.tensor(wanted["by_token"], dtype=torch.float64)
    assert close(by_token_V.sum(), wanted["accept"])
    counts = torch.bincount(emitted_B + vocab * accepted_B, minlength=2 * vocab)
    statistic, threshold = chi_square(counts, torch.cat([(p_V - by_token_V).clamp(min=0), by_token_V]))
    assert statistic < threshold


# Chains, more tables, pruning


def tables_of_seed(seed: int, vocab: int, depth: int) -> tuple[Table, Table]:
    """p and q by the generator that `chain_equalities` describes."""
    state = seed

    def weights() -> list[float]:
        nonlocal state
        weight_V = []
        for _ in range(vocab):
            state = (1103515245 * state + 12345) % 2**31
            weight_V.append((state >> 16) % 6 + 1)
        return [weight / sum(weight_V) for weight in weight_V]

    prefixes = [prefix for n in range(depth + 1) for prefix in itertools.product(range(vocab), repeat=n)]
    rows = [(prefix, weights(), weights()) for prefix in prefixes]
    return {prefix: p for prefix, p, _ in rows}, {prefix: q for prefix, _, q in rows}


def expected_accepted(verify: Verify, p_table: Table, q_table: Table, counts: tuple[int, ...], bits: int = 53) -> float:
    """Of sampled trees."""
    draft, weight_B = all_trees(q_table, branching(*counts), without_replacement)
    place_BJ = place_distribution(verify, draft, tree_rows(p_table, draft), bits)
    depth_D = accepted_depths(place_BJ, draft, weight_B, len(counts))
    return float(depth_D @ torch.arange(len(counts) + 1.0, dtype=torch.float64))


@pytest.mark.parametrize("case", VECTORS["chain_equalities"]["cases"], ids=lambda case: f"seed{case['seed']}")
def test_chains_written_as_trees(case: dict[str, Any]) -> None:
    p_table, q_table = tables_of_seed(case["seed"], case["V"], case["depth"])
    for name in ("standard", "block"):
        verify = rejection.find(name).verify
        wanted = numbers(case[name])
        chains = num_accepted_distribution(
            emitted_distribution(verify, p_table, q_table, case["V"], case["depth"]), case["depth"]
        )
        assert close(chains @ torch.arange(case["depth"] + 1.0, dtype=torch.float64), wanted)
        assert close(expected_accepted(verify, p_table, q_table, (1,) * case["depth"]), wanted)


def test_tables_of_a_seed_are_those_of_the_vectors() -> None:
    for table, wanted in zip(tables_of_seed(7, 4, 2), (P, Q), strict=True):
        assert table.keys() == wanted.keys()
        assert all(close(table[prefix], wanted[prefix]) for prefix in wanted)


@pytest.mark.parametrize(
    "row",
    [row for row in VECTORS["headroom"]["rows"] if row["mode"] == "norep" and sum(row["branching"]) < 4],
    ids=lambda row: "x".join(map(str, row["branching"])),
)
def test_means_over_tables(row: dict[str, Any]) -> None:
    """Four decimals in the vectors."""
    counts = tuple(row["branching"])
    tables = [tables_of_seed(seed, 3, len(counts)) for seed in range(1, 9)]
    for key, verify in (("recursive_rejection", standard.verify), ("traversal", block.verify)):
        assert abs(np.mean([expected_accepted(verify, *each, counts, bits=20) for each in tables]) - row[key]) < 6e-5


def test_pruning_by_q_alone_is_allowed() -> None:
    def num_children(prefix: tuple[int, ...]) -> int:
        return 0 if len(prefix) == 2 else 2 if max(Q[prefix]) < 1 / 2 else 1

    draft, weight_B = all_trees(Q, num_children, without_replacement)
    assert len(draft.length_B.unique()) > 1
    wanted = numbers(VECTORS["allowed_pruning"]["expected"])
    distribution = emitted_by_trees(tree_verdict_distribution(standard.verify, draft, tree_rows(P, draft)), draft, weight_B)
    assert close(num_accepted_distribution(distribution, 2) @ torch.arange(3.0, dtype=torch.float64), wanted)
    assert close(completed_joint(distribution, P, 4, 3), target_joint(P, 4, 3))


# Wrong rules, and one check that tells them from ours


def output_is_targets(verify: Verify, counts: tuple[int, ...], children: Children) -> bool:
    """Chi-square of the joint distribution of three tokens."""
    return fits(simulate_output(verify, counts, children)[1], target_joint(P, 4, 3), 4)


def simulate_output(verify: Verify, counts: tuple[int, ...], children: Children) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    draft, weight_B = all_trees(Q, branching(*counts), children)
    row_N = torch.multinomial(weight_B, ROWS, replacement=True, generator=generator)
    return simulate_trees(verify, P, draft.select_rows(row_N.numpy()), generator)


def chain_of(draft: Draft, p_BJV: Tensor, u_BJ: Tensor, node_BK: Tensor) -> tuple[Draft, Tensor, Tensor]:
    """A path of each row's tree alone, with its probabilities and uniforms."""
    row_B1 = torch.arange(len(node_BK)).unsqueeze(1)
    assert draft.q_BKV is not None
    chain = Draft(draft.token_BK[row_B1, node_BK], torch.full((len(node_BK),), node_BK.shape[1]), draft.q_BKV[row_B1, node_BK])
    return chain, p_BJV[row_B1, F.pad(node_BK + 1, (1, 0))], torch.cat([u_BJ[row_B1, node_BK], u_BJ[:, -1:]], 1)


def longest(verdicts: list[Verdict], paths: list[list[int]]) -> Verdict:
    """The first of those that accept most."""
    best_B = torch.stack([verdict.num_accepted_B for verdict in verdicts], 1).argmax(1)
    row_B = torch.arange(len(best_B))
    num_accepted_B = torch.stack([verdict.num_accepted_B for verdict in verdicts], 1)[row_B, best_B]
    return Verdict(num_accepted_B, torch.stack([v.token_B for v in verdicts], 1)[row_B, best_B], torch.tensor(paths)[best_B])


def longest_of_chains(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    paths = [[0, 2], [1, 3]]
    node_PBK = torch.tensor(paths).unsqueeze(1).expand(-1, len(u_BJ), -1)
    return longest([standard.verify(*chain_of(draft, p_BJV, u_BJ, node_BK)) for node_BK in node_PBK], paths)


def target_token_per_path(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Nodes that paths share sample once for each of them, and the extra token anew."""
    paths = [[0, 2], [0, 3], [1, 4], [1, 5]]
    generator = torch.Generator().manual_seed(6)
    verdicts = []
    for path in paths:
        chain = Draft(draft.token_BK[:, path], torch.full((len(u_BJ),), 2))
        places = [0, *(node + 1 for node in path)]
        verdicts.append(match.verify(chain, p_BJV[:, places], noise(generator, len(u_BJ), 3)))
    return extra_token_from_p(longest(verdicts, paths), p_BJV, u_BJ[:, -1])


def one_hot_children_with_q(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    return standard.verify(replace(draft, q_BKV=draft_rows(Q, draft)), p_BJV, u_BJ)


def extra_token_from_p(verdict: Verdict, p_BJV: Tensor, u_B: Tensor) -> Verdict:
    p_BV = p_BJV[torch.arange(len(p_BJV)), place_of(verdict)]
    return Verdict(verdict.num_accepted_B, inverse_cdf(p_BV, u_B), verdict.path_BK)


def match_with_a_second_look(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    return extra_token_from_p(match.verify(draft, p_BJV, u_BJ), p_BJV, (u_BJ * 7919).sum(1) % 1)


def residual_is_p(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    return extra_token_from_p(standard.verify(draft, p_BJV, u_BJ), p_BJV, u_BJ[:, -1])


def q_keeps_rejected_tokens(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    with mock.patch.object(standard, "without", lambda q_BV, _: q_BV.double()):
        return standard.verify(draft, p_BJV, u_BJ)


def likelier_child_alone(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Of two equally likely ones, that of the lower id."""
    assert draft.q_BKV is not None
    q_BK = draft.q_BKV.gather(2, draft.token_BK.unsqueeze(2)).squeeze(2) - 1e-9 * draft.token_BK
    first_B = q_BK[:, :2].argmax(1)
    second_B = 2 + 2 * first_B + q_BK[:, 2:].view(-1, 2, 2)[torch.arange(len(q_BK)), first_B].argmax(1)
    path_BK = torch.stack([first_B, second_B], 1)
    verdict = standard.verify(*chain_of(draft, p_BJV, u_BJ, path_BK))
    return Verdict(verdict.num_accepted_B, verdict.token_B, path_BK)


def hsd_one_position_off(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Both tokens by the ratio of the first, else the first always; the residual has the ratios of the first position."""
    assert draft.q_BKV is not None
    row_B = torch.arange(len(u_BJ))
    ratio_BV = p_BJV[:, 0] / draft.q_BKV[:, 0]
    accepts_both_B = u_BJ[:, 1] < ratio_BV[row_B, draft.token_BK[:, 0]]
    residual_BV = draft.q_BKV[:, 1] * (ratio_BV - 1).clamp(min=0)
    extra_BV = torch.where(accepts_both_B.unsqueeze(1), p_BJV[:, 2], residual_BV)
    path_BK = torch.arange(2).expand(len(u_BJ), -1)
    return Verdict(1 + accepts_both_B.long(), inverse_cdf(extra_BV, u_BJ[:, -1]), path_BK)


MUTANTS: dict[str, tuple[Verify, tuple[int, ...], Children]] = {
    "independent_chains_longest_wins": (longest_of_chains, (2, 1), with_replacement),
    "posterior_drawn_per_path": (target_token_per_path, (2, 2), likeliest),
    "topk_with_softmax_q": (one_hot_children_with_q, (2, 2), likeliest),
    "match_walk_fresh_extra": (match_with_a_second_look, (2, 2), likeliest),
    "norep_drawn_iid_judged": (q_keeps_rejected_tokens, (2, 2), without_replacement),
    "iid_drawn_norep_judged": (standard.verify, (2, 2), with_replacement),
    "onehot_residual_is_p": (residual_is_p, (2, 2), likeliest),
    "sampled_then_pruned_by_own_probability": (likelier_child_alone, (2, 2), without_replacement),
    "capped_hsd_off_by_one": (hsd_one_position_off, (1, 1), without_replacement),
}
NEGATIVE = VECTORS["negative_cases"]["cases"]
# whose decision about a node has no threshold of its own, and one of too many trees
SIMULATED = [
    "independent_chains_longest_wins",
    "posterior_drawn_per_path",
    "match_walk_fresh_extra",
    "iid_drawn_norep_judged",
]


def test_every_negative_case_has_its_mutant() -> None:
    assert MUTANTS.keys() == NEGATIVE.keys()


def assert_is_mutant(name: str, accepted: float, joint: Tensor, tolerance: float) -> None:
    case = NEGATIVE[name]
    wanted = target_joint(P, 4, 3)
    assert close(accepted, case["expected_accepted"], tolerance)
    assert close(tv(joint.view(4, -1).sum(1), wanted.view(4, -1).sum(1)), case["tv_first_token"], tolerance)
    assert close(tv(joint, wanted), case["tv_joint"], tolerance)


@pytest.mark.parametrize("name", [name for name in NEGATIVE if name not in SIMULATED])
def test_mutant_has_the_distribution_of_the_vectors(name: str) -> None:
    """So each mutant makes the mistake that its name says, and no other."""
    verify, counts, children = MUTANTS[name]
    draft, weight_B = all_trees(Q, branching(*counts), children)
    distribution = emitted_by_trees(tree_verdict_distribution(verify, draft, tree_rows(P, draft)), draft, weight_B)
    accepted = num_accepted_distribution(distribution, 2) @ torch.arange(3.0, dtype=torch.float64)
    assert_is_mutant(name, float(accepted), completed_joint(distribution, P, 4, 3), EXACT)


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_mutant_has_the_distribution_of_the_vectors(name: str) -> None:
    num_accepted_B, token_BJ = simulate_output(*MUTANTS[name])
    joint = torch.bincount(token_BJ @ torch.tensor([16, 4, 1]), minlength=64) / ROWS
    assert_is_mutant(name, float(num_accepted_B.double().mean()), joint, 4 / math.sqrt(ROWS))


@pytest.mark.parametrize("name", NEGATIVE)
def test_mutant_is_caught(name: str) -> None:
    assert not output_is_targets(*MUTANTS[name])


@pytest.mark.parametrize(("counts", "children"), [((2, 2), likeliest), ((2, 2), without_replacement)])
@pytest.mark.parametrize("name", LOSSLESS)
def test_ours_pass_where_mutants_are_caught(name: str, counts: tuple[int, ...], children: Children) -> None:
    assert output_is_targets(scheme(name), counts, children)


# Any batch


def random_batch(seed: int, num_nodes: int = 5, vocab: int = 6, num_rows: int = 4_000) -> tuple[Draft, Tensor, Tensor]:
    """Trees, chains and nothing, of all lengths. A drafted token is likely enough to be accepted."""
    generator = torch.Generator().manual_seed(seed)
    p_BJV = random_probs(generator, num_rows, num_nodes + 1, vocab)
    parent_BK = (noise(generator, num_rows, num_nodes) * (torch.arange(num_nodes) + 1)).long() - 1
    parent_BK[::5] = torch.arange(num_nodes) - 1
    length_B = torch.randint(num_nodes + 1, (num_rows,), generator=generator)
    q_BKV = random_probs(generator, num_rows, num_nodes, vocab)
    near_BKV = (draft_p(p_BJV, parent_BK) + q_BKV) / 2
    token_BK = inverse_cdf(near_BKV, noise(generator, num_rows, num_nodes))
    return Draft(token_BK, length_B, near_BKV, parent_BK), p_BJV, noise(generator, num_rows, num_nodes + 1)


def draft_p(p_BJV: Tensor, parent_BK: Tensor) -> Tensor:
    """[B, K, V] the target's distribution where each node stands."""
    return p_BJV[torch.arange(len(p_BJV)).unsqueeze(1), parent_BK + 1]


def emitted(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """The tokens of each row."""
    path_BK = torch.arange(draft.token_BK.shape[1]).expand_as(draft.token_BK) if verdict.path_BK is None else verdict.path_BK
    token_BJ = F.pad(draft.token_BK.gather(1, path_BK), (0, 1)).scatter(
        1, verdict.num_accepted_B.unsqueeze(1), verdict.token_B.unsqueeze(1)
    )
    return [tokens[: count + 1] for tokens, count in zip(token_BJ.tolist(), verdict.num_accepted_B.tolist(), strict=True)]


def test_synthetic_accepts_along_the_longest_path() -> None:
    """Whatever comes first: node 0 is a leaf, and 1, 3, 4 go on below its sibling. The second row ends at node 2."""
    parent_BK = torch.tensor([[-1, -1, 1, 1, 3], [-1, 0, 0, 7, 7]])
    draft = Draft(torch.arange(5).repeat(2, 1), torch.tensor([5, 3]), parent_BK=parent_BK)
    p_BJV = torch.full((2, 6, 9), 1 / 9)
    verdict = scheme("synthetic", 5)(draft, p_BJV, torch.zeros(2, 6, dtype=torch.float64))
    assert [tokens[:-1] for tokens in emitted(draft, verdict)] == [[1, 3, 4], [0, 1]]
    u_BJ = torch.zeros(2, 6, dtype=torch.float64)
    u_BJ[:, 3] = 0.9  # the coin of node 3, and of no node of the second row
    assert [tokens[:-1] for tokens in emitted(draft, scheme("synthetic", 5)(draft, p_BJV, u_BJ))] == [[1], [0, 1]]


EACH_SCHEME = pytest.mark.parametrize("name", rejection.names())
# a tree under `synthetic` takes no account of q
EACH_SCHEME_WITH_Q = pytest.mark.parametrize(
    ("name", "with_q"),
    [(name, with_q) for name in rejection.names() for with_q in (False, True) if name in LOSSLESS or not with_q],
)


def columns(verifier: Verifier, u_BJ: Tensor, count: int) -> Tensor:
    """The uniforms of a narrower draft: by step the last one samples the extra token."""
    return u_BJ[:, : count + 1] if verifier.keyed_by == "position" else torch.cat([u_BJ[:, :count], u_BJ[:, -1:]], 1)


@EACH_SCHEME_WITH_Q
def test_a_chain_written_as_a_tree(name: str, with_q: bool) -> None:
    """With the same uniforms. `block` sums in another order there, which these uniforms do not notice; without q it verifies
    a tree as `standard` does."""
    draft, p_BJV, u_BJ = random_batch(7)
    chain = replace(draft, parent_BK=None, q_BKV=draft.q_BKV if with_q else None)
    parent_BK = torch.from_numpy(tree.chain(*draft.token_BK.shape))
    verdict = scheme("standard" if name == "block" and not with_q else name, 5)(chain, p_BJV, u_BJ)
    as_tree = scheme(name, 5)(replace(chain, parent_BK=parent_BK), p_BJV, u_BJ)
    assert torch.equal(verdict.num_accepted_B, as_tree.num_accepted_B)
    assert torch.equal(verdict.token_B, as_tree.token_B)
    assert emitted(chain, verdict) == emitted(chain, as_tree)
    assert len(verdict.num_accepted_B.unique()) > 3


@EACH_SCHEME_WITH_Q
def test_a_row_is_what_it_is_alone(name: str, with_q: bool) -> None:
    """Rows of one length, without the padding that the others bring; what is a chain, as one."""
    draft, p_BJV, u_BJ = random_batch(8)
    draft = draft if with_q else replace(draft, q_BKV=None)
    verifier = scheme(name, 5)
    before = p_BJV.clone()
    together = verifier(draft, p_BJV, u_BJ)
    assert torch.equal(p_BJV, before), "inputs are not to be written"
    emitted_B = emitted(draft, together)
    for count in range(draft.token_BK.shape[1] + 1):
        row_N = torch.nonzero(draft.length_B == count).squeeze(1)
        few = draft.select_rows(row_N.numpy()).cut(np.full(len(row_N), count))
        arguments = (p_BJV[row_N, : count + 1], columns(verifier, u_BJ[row_N], count))
        assert emitted(few, verifier(few, *arguments)) == [emitted_B[b] for b in row_N]
        if name != "block":  # whose sums have another order
            is_chain_N = (few.parents() == tree.chain(*few.token_BK.shape)).all(1)
            chains = replace(few.select_rows(np.flatnonzero(is_chain_N)), parent_BK=None)
            verdict = verifier(chains, *(x[torch.from_numpy(is_chain_N)] for x in arguments))
            assert emitted(chains, verdict) == [emitted_B[b] for b in row_N[torch.from_numpy(is_chain_N)]]


@EACH_SCHEME_WITH_Q
def test_padding_is_never_read(name: str, with_q: bool) -> None:
    draft, p_BJV, u_BJ = random_batch(9)
    draft = draft if with_q else replace(draft, q_BKV=None)
    is_padding_BK = torch.arange(draft.token_BK.shape[1]) >= draft.length_B.unsqueeze(1)
    garbage_BK = torch.tensor([10**9, -7, 3, 4, 10**9]).expand_as(draft.token_BK)
    spoiled = replace(
        draft,
        token_BK=draft.token_BK.masked_fill(is_padding_BK, 10**9),
        parent_BK=torch.where(is_padding_BK, garbage_BK, draft.parent_BK),
        q_BKV=None if draft.q_BKV is None else draft.q_BKV.masked_fill(is_padding_BK.unsqueeze(-1), torch.nan),
    )
    spoiled_BJV = p_BJV.masked_fill(F.pad(is_padding_BK, (1, 0)).unsqueeze(-1), torch.nan)
    verifier = scheme(name, 5)
    assert emitted(spoiled, verifier(spoiled, spoiled_BJV, u_BJ)) == emitted(draft, verifier(draft, p_BJV, u_BJ))
    assert (spoiled.parents() == draft.parents()).all()


@pytest.mark.parametrize("name", ["standard", "block"])
def test_every_node_may_have_a_distribution_of_its_own(name: str) -> None:
    """As of a lookup's tree beside drafts that are sampled: each child is certain, and none was drawn from its sibling's q."""
    rows = 100_000
    p_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    token_BK = torch.tensor([[0, 1]]).expand(rows, 2)
    q_BKV = sampling.one_hot(token_BK, 3)
    draft = Draft(token_BK, torch.full((rows,), 2), q_BKV, torch.full((rows, 2), -1))
    verdict = scheme(name, 2)(draft, p_V.expand(rows, 3, 3), noise(torch.Generator().manual_seed(11), rows, 3))
    assert verdict.path_BK is not None
    first_B = torch.where(verdict.num_accepted_B > 0, token_BK.gather(1, verdict.path_BK[:, :1])[:, 0], verdict.token_B)
    torch.testing.assert_close(first_B.bincount(minlength=3) / rows, p_V.float(), atol=0.006, rtol=0)


@pytest.mark.parametrize("name", ["standard", "block"])
def test_what_is_certain_is_accepted_whatever_q_is(name: str) -> None:
    """At temperature 0, beside rows that are sampled: p and q are one-hot, and differ, and the second child is the target's."""
    one_hot_V = sampling.one_hot(torch.tensor([1, 0]), 3)
    draft = Draft(torch.tensor([[0, 1]]), torch.tensor([2]), one_hot_V[1].expand(1, 2, 3), torch.tensor([[-1, -1]]))
    verdict = scheme(name, 2)(draft, one_hot_V[0].expand(1, 3, 3), torch.full((1, 3), 0.999, dtype=torch.float64))
    assert verdict.path_BK is not None
    assert (verdict.num_accepted_B.tolist(), verdict.path_BK[0, 0].item()) == ([1], 1)


@pytest.mark.parametrize("name", [name for name in rejection.names() if name not in ("typical", "synthetic")])
def test_the_second_of_two_equal_siblings_changes_nothing(name: str) -> None:
    """Of a deterministic tree; nor does what hangs on it. (Two lossy schemes take the longest path, through either.)"""
    draft, p_BJV, u_BJ = random_batch(10)
    generator = torch.Generator().manual_seed(10)
    num_rows, num_nodes = draft.token_BK.shape
    token_BK = torch.rand(num_rows, p_BJV.shape[2], generator=generator).argsort(1)[:, :num_nodes]  # all different
    full_B = torch.full((num_rows,), num_nodes)
    single = Draft(token_BK, full_B, parent_BK=draft.parent_BK)
    copied_B1 = torch.randint(num_nodes, (num_rows, 1), generator=generator)
    twice = Draft(
        torch.cat([token_BK, token_BK.gather(1, copied_B1), token_BK[:, :1]], 1),
        full_B + 2,
        parent_BK=torch.cat(
            [single.parent_BK, single.parent_BK.gather(1, copied_B1), torch.full_like(copied_B1, num_nodes)], 1
        ),
    )
    verifier = scheme(name, num_nodes + 2)
    twice_BJV = torch.cat([p_BJV, random_probs(generator, num_rows, 2, p_BJV.shape[2])], 1)
    twice_BJ = torch.cat([u_BJ[:, :num_nodes], noise(generator, num_rows, 2), u_BJ[:, -1:]], 1)
    if verifier.keyed_by == "position":
        twice_BJ = torch.cat([u_BJ, noise(generator, num_rows, 2)], 1)
    assert emitted(twice, verifier(twice, twice_BJV, twice_BJ)) == emitted(single, verifier(single, p_BJV, u_BJ))


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("with_q", [False, True])
def test_a_greedy_target_follows_its_argmax(name: str, with_q: bool) -> None:
    draft, p_BJV, u_BJ = random_batch(11)
    argmax_BJ = p_BJV.argmax(-1)
    one_hot_BJV = F.one_hot(argmax_BJ, p_BJV.shape[2]).double()
    draft = replace(draft, q_BKV=draft_p(one_hot_BJV, draft.parent_BK) if with_q else None)
    if with_q:
        assert draft.q_BKV is not None
        draft.token_BK = draft.q_BKV.argmax(-1)
    assert emitted(draft, scheme(name)(draft, one_hot_BJV, u_BJ)) == emitted(draft, match.compare(draft, argmax_BJ))


# Growing trees


BUILT = VECTORS["tree_building"]
Q_BUILDING = table_of(BUILT["q"])


def prefixes(draft: Draft) -> list[tuple[int, ...]]:
    """Of the nodes of the first row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_BK[0].tolist(), draft.parents()[0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def built_tree(entry: dict[str, Any]) -> Draft:
    """The vectors count the last committed token as node 0."""
    token_BK = torch.tensor([entry["token"][1:]])
    return Draft(token_BK, torch.tensor([token_BK.shape[1]]), parent_BK=torch.tensor([entry["parent"][1:]]) - 1)


def scores(q_table: Table, paths: list[tuple[int, ...]]) -> list[float]:
    return [sum(math.log(q_table[path[:i]][token]) for i, token in enumerate(path)) for path in paths]


@pytest.mark.parametrize("name", [name for name in BUILT if name.startswith("eagle2")])
def test_beam(name: str) -> None:
    topk, expansions, num_nodes = (int(part[1:]) for part in name.split("_")[1:])
    plan = TreePlan(num_nodes, expansions + 1, topk, "beam")
    paths = prefixes(grow(Q_BUILDING, plan, context_of(1, num_nodes), is_sampled=False))
    wanted = prefixes(built_tree(BUILT[name]))
    assert sorted(paths) == sorted(wanted)
    assert close(scores(Q_BUILDING, wanted), BUILT[name]["score"][1:])
    assert scores(Q_BUILDING, paths) == sorted(scores(Q_BUILDING, paths), reverse=True), "ours are in the order of their scores"
    assert close(sum(map(math.exp, scores(Q_BUILDING, paths))), BUILT[name]["sum_of_probabilities"])


def test_best_first() -> None:
    """By itself, and as a drafter grows it. Nodes are in the order of the vectors."""
    entry = BUILT["factored_N6"]
    marginals = {prefix: Q_BUILDING[(0,) * len(prefix)] for prefix in Q_BUILDING}
    logprob_DV = np.log([Q_BUILDING[(0,) * depth] for depth in range(3)])
    token_DV = np.argsort(-logprob_DV, 1)
    depth_K, rank_K, parent_K = best_first(np.take_along_axis(logprob_DV, token_DV, 1), 6)
    assert token_DV[depth_K, rank_K].tolist() == entry["token"][1:]
    assert (depth_K + 1).tolist() == entry["depth"][1:]
    assert (parent_K + 1).tolist() == entry["parent"][1:]
    draft = grow(marginals, TreePlan(6, 3, 6, "best_first"), context_of(1, 6), is_sampled=False)
    assert prefixes(draft) == prefixes(built_tree(entry))
    assert close(scores(marginals, prefixes(draft)), entry["score"][1:])


@pytest.mark.parametrize("name", [name for name in BUILT if name not in ("describe", "q")])
def test_paths_of_a_tree(name: str) -> None:
    draft = built_tree(BUILT[name])
    parent_BK = draft.parents()
    assert (tree.depths(parent_BK) + 1).tolist() == [BUILT[name]["depth"][1:]]
    assert tree.on_path(parent_BK).astype(int).tolist() == [[row[1:] for row in BUILT[name]["ancestor_or_self"][1:]]]
    leaves = [place - 1 for place in (max(path) for path in BUILT[name]["retrieve"])]
    assert tree.height(parent_BK, np.array([parent_BK.shape[1]])) == max(BUILT[name]["depth"])
    for leaf, path in zip(leaves, BUILT[name]["retrieve"], strict=True):
        count_B, node_BK = tree.path_to(torch.from_numpy(parent_BK), torch.tensor([leaf]))
        assert (node_BK[0, : int(count_B)] + 1).tolist() == [place for place in path if place > 0]


def test_a_node_is_not_there_without_its_parent() -> None:
    """A sure child has its parent's score."""
    trap = VECTORS["tie_trap"]
    plan = TreePlan(trap["N"], 3, 2, "beam")
    q_table = {prefix: trap["q"][""] for prefix in [(), (0,), (1,), *itertools.product(range(2), repeat=2)]}
    paths = prefixes(grow(q_table, plan, context_of(1, trap["N"]), is_sampled=False))
    assert [",".join(map(str, path)) for path in paths] == trap["expected"]


# Slots


SLOTS = VECTORS["mask_and_slots"]


@pytest.mark.parametrize("by_path", [False, True], ids=["by-index", "first-path-first"])
@pytest.mark.parametrize("window", [None, 4])
def test_visible_slots(window: int | None, by_path: bool) -> None:
    """The vectors have nodes in the order of their index; ours begin with the first path."""
    first = SLOTS["L"] - 1
    parent_BM = np.array([SLOTS["parent"]])
    num_tokens = parent_BM.shape[1]
    slot_M = np.array(SLOTS["slot"])
    if by_path:
        slot_M[1:] = SLOTS["L"] + tree.slots(parent_BM[:, 1:] - 1, np.array([num_tokens - 1]))[0]
        assert slot_M.tolist() == [9, 10, 12, 11, 13, 14]
    cache = SlotCache([(1, 4)], torch.float32, torch.device("cpu"))
    cache.reserve(1, 32)
    batch = ForwardBatch(cache, 0, np.array([first]), np.array([num_tokens]), Tree(parent_BM), slot_M[None])
    assert batch.position_N.tolist() == SLOTS["position"]
    wanted = SLOTS["visible_full" if window is None else f"visible_window_{window}"]
    visible_MS = batch.visible_BMS(window)[0]
    begin_N, slot_X = batch.forward_slots(window)
    for m, slots in enumerate(wanted):
        moved = sorted(slot if slot < first else int(slot_M[slot - first]) for slot in slots)
        assert torch.nonzero(visible_MS[m]).flatten().tolist() == moved
        assert sorted(slot_X[begin_N[m] : begin_N[m + 1]].tolist()) == [slot for slot in moved if slot >= first]


def engine_moves(lengths: list[int], parents: list[list[int]], paths: list[list[int]]) -> list[list[list[int]]]:
    """By row, (from, to) of the slots that the engine moves. The vectors count the last committed token as node 0."""
    width = max(map(len, parents)) - 1
    length_B = torch.tensor([len(row) - 1 for row in parents])
    parent_BK = torch.tensor([[parent - 1 for parent in row[1:]] + [-1] * (width + 1 - len(row)) for row in parents])
    draft = Draft(torch.zeros_like(parent_BK), length_B, parent_BK=parent_BK)
    count_B = np.array([len(path) for path in paths])  # with the extra token
    path_BK = np.array([[node - 1 for node in path[1:]] + [0] * (width + 1 - len(path)) for path in paths])
    verdict = HostVerdict(count_B - 1, np.zeros(len(paths)), draft.token_BK.numpy(), path_BK)
    moves: list[list[list[int]]] = [[] for _ in paths]

    def move(row_N: Tensor, from_slot_N: Tensor, to_slot_N: Tensor) -> None:
        for row, *slots in torch.stack([row_N, from_slot_N, to_slot_N], 1).tolist():
            moves[row].append(slots)

    engine = SimpleNamespace(cache=SimpleNamespace(move=move), state=SimpleNamespace(to_device=torch.from_numpy))
    Engine._move_accepted(engine, np.arange(len(paths)), np.array(lengths), draft, verdict, count_B)  # type: ignore[arg-type]
    return moves


def test_moves_of_accepted_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = SLOTS["ragged"]
    arguments = (ragged["lengths"], ragged["parents"], ragged["accepted_paths"])
    assert engine_moves(*arguments) == [[[12, 10], [14, 11]], [], []]
    # the first path moves nothing; the vectors' slots have it at 10 and 12
    assert engine_moves([SLOTS["L"]], [SLOTS["parent"]], [[0, 1, 3]]) == [[]]
    monkeypatch.setattr(tree, "slots", lambda parent_BK, length_B: np.tile(np.arange(parent_BK.shape[1]), (len(parent_BK), 1)))
    assert engine_moves(*arguments) == ragged["moves"]
    assert engine_moves([SLOTS["L"]], [SLOTS["parent"]], [SLOTS["accepted_path"]]) == [SLOTS["moves"]]


# Gumbel noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_first_equals_its_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(12)
    weight_NV = random_probs(generator, 3_000, 9).to(dtype)
    weight_NV[::3] = weight_NV[::3].masked_fill(noise(generator, 1_000, 9) < 0.6, 0.0)
    weight_NV[1::3] = (4 * weight_NV[1::3]).round() / 4  # equal ones
    weight_NV[::100] = 0.0
    weight_NV[1::100] *= 1e-30  # of which some are too small for a time
    u_N = noise(generator, 3_000)
    u_N[:5] = 0.0
    key_N = (u_N * 2.0**53).long()
    for count in (1, 2, 3, 9, 12):
        token_NC = gumbel.first(weight_NV, u_N, count)
        assert torch.equal(token_NC, gumbel.first_reference(weight_NV, key_N, count))
        num_tokens_N = (weight_NV > 0).sum(1).clamp(max=count)
        assert torch.equal((token_NC >= 0).sum(1), num_tokens_N)
        assert bool(((token_NC >= 0) == (torch.arange(count) < num_tokens_N.unsqueeze(1))).all()), "-1 comes last"


@pytest.mark.parametrize("first", [gumbel.first, lambda p, u, count: gumbel.first_reference(p, (u * 2.0**53).long(), count)])
def test_first_is_exact_in_distribution(first: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """With uniforms of neighbouring positions, as requests have them; the first, and ordered pairs."""
    p_V = torch.tensor(Q[(0,)], dtype=torch.float64)
    u_N = torch.from_numpy(uniforms(np.array(3), VERIFY, np.arange(ROWS), -1))
    token_N2 = first(p_V.expand(ROWS, -1), u_N, 2)
    pair_VV = torch.zeros(4, 4, dtype=torch.float64)
    for tokens, probability in without_replacement(Q[(0,)], 2):
        pair_VV[tokens] = probability
    for count, wanted in (
        (torch.bincount(token_N2[:, 0], minlength=4), p_V),
        (torch.bincount(token_N2 @ torch.tensor([4, 1]), minlength=16), pair_VV),
    ):
        statistic, threshold = chi_square(count, wanted)
        assert statistic < threshold


# Through the engine


class GrowingProposer(StatelessProposer):
    """Grows trees over distributions that depend on the depth and the token before."""

    drafts_trees = True
    name = "growing"

    def __init__(self, vocab_size: int, plan: TreePlan, is_sampled: bool):
        generator = torch.Generator().manual_seed(13)
        self.logits_DVV = 1.2 * torch.randn(plan.depth, vocab_size, vocab_size, generator=generator)
        self.plan = plan
        self.num_speculative_tokens = plan.num_nodes
        self.is_sampled = is_sampled
        self.needs_uniforms = is_sampled

    def propose(self, context: Context) -> Draft:
        def expand(level: Level) -> Tensor:
            return self.logits_DVV[level.depth + 1, torch.from_numpy(level.token_N)]

        assert context.max_depth_B is not None
        grower = Grower(self.plan, context, context.max_depth_B, self.is_sampled, lambda token, q: (token, q))
        return grower.grow(self.logits_DVV[0, context.last_token_B], expand)


SHAPE = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (0, 0, 1)]
PLANS = {
    "sampled": (TreePlan(len(SHAPE), 3, 2, "static", SHAPE), True),
    "beam": (TreePlan(6, 3, 2, "beam"), False),
}


def growing(how: str) -> GrowingProposer:
    return GrowingProposer(TABLE.vocab_size, *PLANS[how])


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_joint_distribution(name: str, how: str) -> None:
    requests = decode(TABLE, growing(how), scheme(name), num_requests=200)
    assert misfit(TABLE, requests) < 1
    accepted = np.concatenate([request.stats.accepted for request in requests])
    assert set(accepted) == {0, 1, 2, 3}
    if rejection.find(name).keyed_by == "position":
        plain = decode(TABLE, method.build("none", TABLE), scheme(name), num_requests=200)
        assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]


@pytest.mark.parametrize("name", LOSSLESS)
def test_joint_distribution_of_pruned_trees(name: str) -> None:
    """The first nodes of a tree, as many as lots have it; also none."""
    drafting = growing("sampled")
    policy = Restless(drafting.num_speculative_tokens)
    assert misfit(TABLE, decode(TABLE, drafting, scheme(name), num_requests=200, deciding=policy)) < 1


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_greedy_tokens(name: str, how: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    requests = decode(TABLE, growing(how), scheme(name), params, 20, rows=8)
    plain = decode(TABLE, method.build("none", TABLE), scheme(name), params, 20, rows=8)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]


@pytest.mark.parametrize(
    ("how", "verify"),
    [("sampled", residual_is_p), ("beam", residual_is_p)],
)
def test_broken_verifiers_do_not_fit(how: str, verify: Verify) -> None:
    assert misfit(TABLE, decode(TABLE, growing(how), Verifier("broken", True, "step", verify))) > 1


def test_accepted_tokens_that_are_not_moved_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenCache, "move", lambda *_: None)
    assert misfit(TABLE, decode(TABLE, growing("beam"), scheme("match"), PARAMS)) > 1


def test_a_table_processes_a_tree_as_its_paths() -> None:
    """The target of the tests above: logits of a node are those after its path."""
    target = TableLM.random(5)
    cache = target.new_cache()
    cache.reserve(1, 16)
    prompt = [3, 1, 4]
    target.forward(cache, torch.tensor(prompt[:-1]), np.array([0]), np.array([2]))
    parent_BM = np.array([[-1, 0, 0, 1, 2, 3]])
    token_M = torch.tensor([prompt[-1], 2, 0, 1, 1, 4])
    logits_MV = target.forward(cache, token_M, np.array([2]), np.array([6]), visibility=Tree(parent_BM)).logits
    on_path_MM = tree.on_path(parent_BM)[0]
    for m in range(6):
        path = [*prompt[:-1], *token_M[torch.from_numpy(on_path_MM[m])].tolist()]
        assert np.array_equal(logits_MV[m], target.logits_after(path))
