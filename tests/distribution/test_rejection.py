"""Verification schemes and sampling, held against exact vectors and slow references.

The vectors are tests/vectors/verification.json. Exact distributions come from bisecting the uniforms
(tests/support/distributions.py), so most comparisons are to 1e-12. The simulations beside them check what the exact
distributions take for granted: that each position looks at its own uniform alone.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import gumbel, rejection
from specdec.core import Draft, Verdict
from specdec.params import SamplingParams
from specdec.rejection import build, match, standard, synthetic
from specdec.sampling import DRAFT, VERIFY, apply_penalties, inverse_cdf, one_hot, probs, uniforms
from support.distributions import (
    ALMOST_ONE,
    Distribution,
    Table,
    acceptance_distribution,
    all_drafts,
    chi_square,
    complete,
    completed_joint,
    emitted_distribution,
    extra_token_distribution,
    fits,
    lookup,
    next_probs,
    num_accepted_distribution,
    sequences,
    simulate,
    table,
    table_rows,
    target_joint,
    thresholds,
    tv,
    vectors,
    verdict_distribution,
)
from support.table import scheme as with_settings

VECTORS = vectors()
SCHEMES = ("standard", "block")
MODULES = {name: importlib.import_module(f"specdec.rejection.{name}") for name in rejection.names()}
LOSSLESS = tuple(name for name, module in MODULES.items() if module.lossless)
ROWS = 200_000
EXACT = 1e-12


def parametrize(argument: str, cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    ids = [f"{case['name']}-{case['scheme']}" if "scheme" in case else case["name"] for case in cases]
    return pytest.mark.parametrize(argument, cases, ids=ids)


def close(got: Any, wanted: Any, tolerance: float = EXACT) -> bool:
    got = np.asarray(got, dtype=np.float64)
    wanted = np.asarray(wanted, dtype=np.float64)
    return got.shape == wanted.shape and bool((abs(got - wanted) <= tolerance).all())


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows_of(entries: list[dict[str, Any]]) -> Tensor:
    """[1, n, V] distributions that a vector lists row by row."""
    return double([entry["val"] for entry in entries]).unsqueeze(0)


def one_draft(tokens: list[int], q_BKV: Tensor | None = None) -> Draft:
    return Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), q_BKV)


def noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def random_probs(generator: torch.Generator, *shape: int, sharpness: float = 1.5) -> Tensor:
    """float64 distributions, some near uniform and some near one-hot."""
    logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
    return (logits * (2 * noise(generator, *shape[:-1], 1))).softmax(-1)


def sweep(verify: Any, draft: Draft, p_BJV: Tensor, u_K: list[float], points: int = 12_000) -> Tensor:
    """[V] the distribution of a single draft's extra token, read off midpoints of u[:, K]; exact to 1 / points."""
    u_NJ = double([*u_K, 0.0]).repeat(points, 1)
    u_NJ[:, -1] = (torch.arange(points) + 0.5) / points
    repeat = Draft(
        draft.token_BK.expand(points, -1),
        draft.length_B.expand(points),
        None if draft.q_BKV is None else draft.q_BKV.expand(points, -1, -1),
    )
    token_N = verify(repeat, p_BJV.expand(points, -1, -1), u_NJ).token_B
    assert bool((token_N.diff() >= 0).all()), "no inverse-CDF sample in the order of the ids"
    return torch.bincount(token_N, minlength=p_BJV.shape[-1]).double() / points


def drafts_on(paths: list[list[int]], p_table: Table, q_table: Table) -> tuple[Draft, Tensor]:
    """A row for each path of draft tokens, with the distributions that it meets."""
    q_BKV = torch.stack([table_rows(q_table, tokens[:-1]) for tokens in paths])
    p_BJV = torch.stack([table_rows(p_table, tokens) for tokens in paths])
    return Draft(torch.tensor(paths), torch.full((len(paths),), len(paths[0])), q_BKV), p_BJV


def taken(draft: Draft, p_BJV: Tensor, rows: list[int]) -> tuple[Draft, Tensor]:
    """Some rows, each as often as it is named."""
    q_BKV = None if draft.q_BKV is None else draft.q_BKV[rows]
    return Draft(draft.token_BK[rows], draft.length_B[rows], q_BKV), p_BJV[rows]


def visible(scheme: str, threshold_K: list[float]) -> list[bool]:
    """Which thresholds can decide anything: an earlier 0 ends `standard`, a later 1 carries `block` on."""
    num_draft = len(threshold_K)
    if scheme == "standard":
        return [all(t > 0 for t in threshold_K[:i]) for i in range(num_draft)]
    return [all(t < 1 for t in threshold_K[i + 1 :]) for i in range(num_draft)]


def assert_thresholds(scheme: str, draft: Draft, p_BJV: Tensor, threshold_BK: list[list[float]]) -> None:
    """Decisions flip exactly at the given thresholds: found by bisection, then confirmed on both sides."""
    verify = build(scheme)
    measured_BK = thresholds(verify, draft, p_BJV).tolist()
    rows: list[int] = []
    u_NJ: list[list[float]] = []
    places: list[int] = []
    wanted_N: list[bool] = []
    for b, (measured_K, threshold_K) in enumerate(zip(measured_BK, threshold_BK, strict=True)):
        for i, seen in enumerate(visible(scheme, threshold_K)):
            if not seen:
                continue
            wanted = threshold_K[i]
            assert abs(measured_K[i] - wanted) <= EXACT
            # not at ALMOST_ONE: a threshold of 1 may be that number after rounding
            for u in (0.0, wanted - 1e-9, wanted + 1e-9, (1 + wanted) / 2):
                if 0 <= u < 1:
                    rows.append(b)
                    u_NJ.append([0.0] * i + [u] + [ALMOST_ONE] * (len(measured_K) - i))
                    places.append(i)
                    wanted_N.append(u < wanted)
    assert ((verify(*taken(draft, p_BJV, rows), double(u_NJ)).num_accepted_B > torch.tensor(places)).tolist()) == wanted_N


def steering(num_draft: int, num_accepted: int) -> list[float]:
    """Uniforms that accept exactly that many tokens, where that is possible at all."""
    return [0.0] * num_accepted + [ALMOST_ONE] * (num_draft - num_accepted)


# Chain cases: tables of p and q with everything that follows from them


CHAIN_CASES = VECTORS["chain_cases"]
CHAIN = {case["name"]: case for case in CHAIN_CASES}


def one_hot_rows(q_table: Table) -> bool:
    return all(max(row) == 1 for row in q_table.values())


@functools.cache
def chain_distribution(name: str, scheme: str, deterministic: bool = False) -> Distribution:
    case = CHAIN[name]
    p_table = table(case["p"])
    q_table = table(case["q"])
    return emitted_distribution(build(scheme), p_table, q_table, case["vocab"], case["gamma"], deterministic)


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", CHAIN_CASES)
def test_chain_exact_distribution(case: dict[str, Any], scheme: str) -> None:
    wanted = case["schemes"][scheme]
    gamma = case["gamma"]
    distribution = chain_distribution(case["name"], scheme)
    tau = num_accepted_distribution(distribution, gamma)
    survival = tau.flip(0).cumsum(0).flip(0)  # P(tau >= i)
    assert close(tau, wanted["tau_probs"]["val"])
    assert close(survival[1:], wanted["unconditional_acceptance"]["val"])
    assert close(survival[1:].sum(), wanted["expected_accepted"]["val"])
    assert close(survival.sum(), wanted["expected_emitted"]["val"])
    for i, conditional in enumerate(wanted["conditional_acceptance"]):
        if conditional is not None:
            assert close(survival[i + 1] / survival[i], conditional["val"])
    emitted = {",".join(map(str, tokens)): weight for (_, tokens), weight in distribution.items()}
    assert emitted.keys() == wanted["emitted"].keys()
    for tokens, entry in wanted["emitted"].items():
        assert close(emitted[tokens], entry["val"])


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", CHAIN_CASES)
def test_chain_exactly_lossless(case: dict[str, Any], scheme: str) -> None:
    p_table = table(case["p"])
    vocab = case["vocab"]
    length = case["gamma"] + 1
    joint = completed_joint(chain_distribution(case["name"], scheme), p_table, vocab, length)
    assert case["schemes"][scheme]["output_is_target"]
    assert close(joint, target_joint(p_table, vocab, length))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [name for name in LOSSLESS if MODULES[name].keyed_by == "step"])
@parametrize("case", CHAIN_CASES)
def test_every_scheme_is_exactly_lossless(case: dict[str, Any], name: str, deterministic: bool) -> None:
    """For those that accept below a threshold of u_i alone."""
    p_table = table(case["p"])
    vocab = case["vocab"]
    gamma = case["gamma"]
    q_table = table(case["q"])
    if deterministic:
        q_table = {before: np.eye(vocab)[np.argmax(row)].tolist() for before, row in q_table.items()}
    distribution = emitted_distribution(with_settings(name, gamma), p_table, q_table, vocab, gamma, deterministic)
    assert close(completed_joint(distribution, p_table, vocab, gamma + 1), target_joint(p_table, vocab, gamma + 1))


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", CHAIN_CASES)
def test_chain_simulated(case: dict[str, Any], scheme: str) -> None:
    p_table = table(case["p"])
    q_table = table(case["q"])
    vocab = case["vocab"]
    gamma = case["gamma"]
    num_accepted_B, token_BJ = simulate(build(scheme), p_table, q_table, vocab, gamma, ROWS, seed=1)
    for i, rate in enumerate(case["schemes"][scheme]["unconditional_acceptance"]["val"]):
        measured = float((num_accepted_B > i).double().mean())
        assert abs(measured - rate) <= 4 * math.sqrt(rate * (1 - rate) / ROWS) + EXACT
    expected = case["schemes"][scheme]["expected_accepted"]["val"]
    spread = float(num_accepted_B.double().std()) / math.sqrt(ROWS)
    assert abs(float(num_accepted_B.double().mean()) - expected) <= 4 * spread + EXACT
    assert fits(token_BJ, target_joint(p_table, vocab, gamma + 1), vocab)


@parametrize("case", CHAIN_CASES)
def test_chain_match_is_lossless_too(case: dict[str, Any]) -> None:
    p_table = table(case["p"])
    vocab = case["vocab"]
    gamma = case["gamma"]
    _, token_BJ = simulate(build("match"), p_table, table(case["q"]), vocab, gamma, ROWS, seed=2)
    assert fits(token_BJ, target_joint(p_table, vocab, gamma + 1), vocab)


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", CHAIN_CASES)
def test_chain_thresholds_of_each_path(case: dict[str, Any], scheme: str) -> None:
    paths = case["schemes"][scheme]["paths"]
    draft, p_BJV = drafts_on([path["draft"] for path in paths], table(case["p"]), table(case["q"]))
    name = "accept_probs" if scheme == "standard" else "h_i"
    assert_thresholds(scheme, draft, p_BJV, [path[name]["val"] for path in paths])
    assert close(acceptance_distribution(build(scheme), draft, p_BJV), [path["tau_probs"]["val"] for path in paths])


@parametrize("case", CHAIN_CASES)
def test_chain_block_accepts_by_the_cumulative_ratio(case: dict[str, Any]) -> None:
    """P(tau >= i) = E_q[P_i], with P_i as the vectors list it."""
    mean_K = torch.zeros(case["gamma"], dtype=torch.float64)
    for path in case["schemes"]["block"]["paths"]:
        mean_K += path["q_prob"]["val"] * double(path["p_i"]["val"])
    survival = num_accepted_distribution(chain_distribution(case["name"], "block"), case["gamma"]).flip(0).cumsum(0).flip(0)
    assert close(survival[1:], mean_K)


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", CHAIN_CASES)
def test_chain_residuals_of_each_path(case: dict[str, Any], scheme: str) -> None:
    """null in the vectors: there is no residual, because the path never stops there."""
    verify = build(scheme)
    paths = case["schemes"][scheme]["paths"]
    draft, p_BJV = drafts_on([path["draft"] for path in paths], table(case["p"]), table(case["q"]))
    rows, taus, residuals = zip(
        *(
            (b, tau, row["val"])
            for b, path in enumerate(paths)
            for tau, (reached, row) in enumerate(zip(path["tau_probs"]["val"], path["residuals"], strict=True))
            if reached > 0
        ),
        strict=True,
    )
    draft, p_BJV = taken(draft, p_BJV, list(rows))
    u_NK = double([steering(case["gamma"], tau) for tau in taus])
    assert verify(draft, p_BJV, torch.nn.functional.pad(u_NK, (0, 1), value=0.5)).num_accepted_B.tolist() == list(taus)
    assert close(extra_token_distribution(verify, draft, p_BJV, u_NK), residuals)


@parametrize("case", CHAIN_CASES)
def test_chain_order_of_schemes(case: dict[str, Any]) -> None:
    """standard <= block <= the joint overlap of p and q, which nothing lossless can pass."""
    expected = {}
    for scheme in SCHEMES:
        tau = num_accepted_distribution(chain_distribution(case["name"], scheme), case["gamma"])
        expected[scheme] = float((tau * torch.arange(case["gamma"] + 1)).sum())
    assert expected["standard"] <= expected["block"] + EXACT
    assert expected["block"] <= case["joint_overlap_upper_bound"]["total"]["val"] + EXACT
    assert close(expected["block"] - expected["standard"], case["block_gain"]["val"])


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", [case for case in CHAIN_CASES if one_hot_rows(table(case["q"]))])
def test_chain_one_hot_q_may_be_left_out(case: dict[str, Any], scheme: str) -> None:
    with_q = chain_distribution(case["name"], scheme)
    untold = chain_distribution(case["name"], scheme, deterministic=True)
    assert with_q.keys() == untold.keys()
    assert all(close(with_q[key], untold[key]) for key in with_q)


# Deterministic drafts: q is None


DETERMINISTIC = VECTORS["deterministic_cases"]


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", DETERMINISTIC)
def test_deterministic_case(case: dict[str, Any], scheme: str) -> None:
    draft = one_draft(case["draft"])
    p_BJV = rows_of(case["p_rows"])
    verify = build(scheme)
    assert_thresholds(scheme, draft, p_BJV, [case["accept_probs" if scheme == "standard" else "h_i"]["val"]])
    tau = acceptance_distribution(verify, draft, p_BJV)[0]
    assert close(tau, case["tau_probs"]["val"])
    assert close((tau * torch.arange(len(tau))).sum(), case["expected_accepted"]["val"])
    survival = tau.flip(0).cumsum(0).flip(0)
    assert close(survival[1:], case["p_i"]["val"])
    for num_accepted, row in enumerate(case["residuals"]):
        u_K = steering(len(case["draft"]), num_accepted)
        assert int(verify(draft, p_BJV, double([[*u_K, 0.5]])).num_accepted_B) == num_accepted
        assert close(extra_token_distribution(verify, draft, p_BJV, double([u_K]))[0], row["val"])
        assert close(sweep(verify, draft, p_BJV, u_K), row["val"], 1 / 12_000)


@parametrize("case", DETERMINISTIC)
def test_deterministic_match_has_the_same_distribution(case: dict[str, Any]) -> None:
    draft = one_draft(case["draft"])
    p_BJV = rows_of(case["p_rows"])
    num_draft = len(case["draft"])
    points = 60  # every edge of these distributions falls between two midpoints
    grid = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    u_NK = torch.cartesian_prod(*[grid] * num_draft).reshape(-1, num_draft)
    u_NJ = torch.nn.functional.pad(u_NK, (0, 1), value=0.5)
    many = Draft(draft.token_BK.expand(len(u_NJ), -1), draft.length_B.expand(len(u_NJ)))
    num_accepted_N = build("match")(many, p_BJV.expand(len(u_NJ), -1, -1), u_NJ).num_accepted_B
    tau = torch.bincount(num_accepted_N, minlength=num_draft + 1) / len(u_NJ)
    assert close(tau, case["tau_probs"]["val"], 1e-6)


@parametrize("case", DETERMINISTIC)
def test_deterministic_block_equals_standard(case: dict[str, Any]) -> None:
    draft = one_draft(case["draft"])
    p_BJV = rows_of(case["p_rows"])
    assert case["block_equals_standard"]
    distributions = [verdict_distribution(build(scheme), draft, p_BJV) for scheme in SCHEMES]
    assert close(distributions[0], distributions[1])


def test_deterministic_block_equals_standard_on_random_distributions() -> None:
    generator = torch.Generator().manual_seed(3)
    p_BJV = random_probs(generator, 100, 5, 4)
    draft = Draft(torch.randint(4, (100, 4), generator=generator), torch.full((100,), 4))
    distributions = [verdict_distribution(build(scheme), draft, p_BJV) for scheme in SCHEMES]
    assert close(distributions[0], distributions[1])


# Injected uniforms


@pytest.mark.parametrize("scheme", SCHEMES)
@parametrize("case", VECTORS["uniform_vectors"])
def test_injected_uniforms(case: dict[str, Any], scheme: str) -> None:
    wanted = case[scheme]
    verify = build(scheme)
    draft = one_draft(case["draft"], rows_of(case["q_rows"]))
    p_BJV = rows_of(case["p_rows"])
    assert int(verify(draft, p_BJV, double([[*case["uniforms"], 0.5]])).num_accepted_B) == wanted["tau"]
    assert_thresholds(scheme, draft, p_BJV, [wanted["thresholds"]["val"]])
    assert close(sweep(verify, draft, p_BJV, case["uniforms"]), wanted["next_token_dist"]["val"], 1 / 12_000)
    extra = extra_token_distribution(verify, draft, p_BJV, double([case["uniforms"]]))
    assert close(extra[0], wanted["next_token_dist"]["val"])


# Acceptance of match, one position


def match_acceptance(p: list[float], token: int, points: int = 12_000) -> float:
    """The share of u[:, 0] under which a drafted token is accepted, on a grid of midpoints."""
    u_NJ = torch.full((points, 2), 0.5, dtype=torch.float64)
    u_NJ[:, 0] = (torch.arange(points) + 0.5) / points
    draft = Draft(torch.full((points, 1), token), torch.ones(points, dtype=torch.int64))
    return float(build("match")(draft, double(p).expand(points, 2, -1), u_NJ).num_accepted_B.double().mean())


@parametrize("case", VECTORS["exact_match_cases"])
def test_exact_match_case(case: dict[str, Any]) -> None:
    p = case["p"]["val"]
    q = case["q"]["val"]
    independent = sum(weight * match_acceptance(p, token) for token, weight in enumerate(q))
    assert close(independent, case["accept_match_independent_draws"]["val"], 1 / 6_000)
    greedy = match_acceptance(p, int(np.argmax(q)))
    assert close(greedy, case["accept_match_greedy_draft"]["val"], 1 / 6_000)
    for scheme in SCHEMES:
        distribution = emitted_distribution(build(scheme), {(): p, **{(v,): p for v in range(len(p))}}, {(): q}, len(p), 1)
        assert close(num_accepted_distribution(distribution, 1)[1], case["accept_standard"]["val"])


@pytest.mark.parametrize("with_q", [False, True])
def test_match_equals_plain_sampling_token_for_token(with_q: bool) -> None:
    """The same uniforms by position give the same tokens, whatever was drafted."""
    generator = torch.Generator().manual_seed(4)
    vocab = 3
    num_draft = 4
    rows = 4_000
    p_table = {
        tuple(prefix): random_probs(generator, vocab).tolist()
        for length in range(num_draft + 1)
        for prefix in sequences(vocab, length).tolist()
    }
    u_BJ = noise(generator, rows, num_draft + 1)
    plain_BJ = torch.empty(rows, 0, dtype=torch.int64)
    for j in range(num_draft + 1):
        y_B = inverse_cdf(next_probs(p_table, plain_BJ), u_BJ[:, j])
        plain_BJ = torch.cat([plain_BJ, y_B.unsqueeze(-1)], 1)

    token_BK = torch.randint(vocab, (rows, num_draft), generator=generator)
    agree_BK = noise(generator, rows, num_draft) < 0.6  # so that every number of accepted tokens occurs
    token_BK = torch.where(agree_BK, plain_BJ[:, :-1], token_BK)
    length_B = torch.randint(num_draft + 1, (rows,), generator=generator)
    q_BKV = random_probs(generator, rows, num_draft, vocab) if with_q else None
    verdict = build("match")(Draft(token_BK, length_B, q_BKV), lookup(p_table, token_BK), u_BJ)
    emitted_BJ = complete(token_BK, verdict, p_table, u_BJ)
    assert torch.equal(emitted_BJ, plain_BJ)
    assert set(verdict.num_accepted_B.tolist()) == set(range(num_draft + 1))
    assert bool((verdict.num_accepted_B <= length_B).all())


# Synthetic


SYNTHETIC_RATES = [case for case in VECTORS["synthetic_cases"] if "unconditional" in case]
SYNTHETIC_LENGTHS = [case for case in VECTORS["synthetic_cases"] if "gamma" in case]


def rates_id(case: dict[str, Any]) -> str:
    return str(case.get("unconditional", case.get("from_mean_acceptance_length"))["val"])


@pytest.mark.parametrize("temperature", ["zero", "one"])
@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("case", SYNTHETIC_RATES, ids=rates_id)
def test_synthetic_case(case: dict[str, Any], with_q: bool, temperature: str) -> None:
    """The distribution of acceptance is what was asked for, whatever the target says and however tokens were drawn."""
    rates = case["unconditional"]["val"]
    conditional = case["conditional"]["val"]
    assert close(synthetic.conditional(rates), conditional)
    verify = build("synthetic", len(rates), synthetic_acceptance_rates=rates)
    generator = torch.Generator().manual_seed(5)
    rows = 20
    vocab = 5
    p_BJV = random_probs(generator, rows, len(rates) + 1, vocab)
    argmax_BJ = p_BJV.argmax(-1)
    if temperature == "zero":
        p_BJV = one_hot(argmax_BJ, vocab).double()
    q_BKV = random_probs(generator, rows, len(rates), vocab)
    token_BK = torch.randint(vocab, (rows, len(rates)), generator=generator)
    draft = Draft(token_BK, torch.full((rows,), len(rates)), q_BKV if with_q else None)
    mass_BJV = verdict_distribution(verify, draft, p_BJV)
    tau_BJ = mass_BJV.sum(-1)
    assert close(tau_BJ, double(case["tau_probs"]["val"]).expand(rows, -1))
    expected = (tau_BJ[0] * torch.arange(len(rates) + 1)).sum()
    assert close(expected, case["expected_accepted"]["val"])
    assert close(expected + 1, case["mean_acceptance_length"]["val"])
    if temperature == "zero":
        # the extra token is the argmax
        assert close(mass_BJV.gather(-1, argmax_BJ.unsqueeze(-1)).squeeze(-1), tau_BJ)


@pytest.mark.parametrize("case", SYNTHETIC_LENGTHS, ids=rates_id)
def test_synthetic_profile_of_a_length(case: dict[str, Any]) -> None:
    length = case["from_mean_acceptance_length"]["val"]
    num_draft = case["gamma"]
    rates = synthetic.rates_of_length(length, num_draft)
    assert close(rates, case["min_variance_unconditional"]["val"])
    assert close(sum(rates), case["min_variance_sum"]["val"])
    built = build("synthetic", num_draft, synthetic_acceptance_length=length)
    assert built.params == {"synthetic_acceptance_rates": rates}


@pytest.mark.parametrize(
    ("length", "num_draft", "rates"),
    [
        (2.6, 3, [1, 0.6, 0]),
        (1, 3, [0, 0, 0]),
        (4, 3, [1, 1, 1]),
        (3.5, 4, [1, 1, 0.5, 0]),
        (2.8, 4, [1, 0.8, 0, 0]),
    ],
)
def test_synthetic_profile_is_that_of_vllm(length: float, num_draft: int, rates: list[float]) -> None:
    assert close(synthetic.rates_of_length(length, num_draft), rates)


def test_synthetic_conditional_rates_are_those_of_vllm() -> None:
    assert close(synthetic.conditional([0.9, 0.5, 0.2]), [0.9, 0.5 / 0.9, 0.4])
    assert close(synthetic.conditional([0.9, 0.0, 0.0]), [0.9, 0.0, 0.0])


def test_synthetic_acceptance_that_drafts_allow() -> None:
    """Two drafts of 1 token, one of 2 and one of 3; steps without a draft do not count."""
    assert close(synthetic.reached([0.9, 0.5, 0.2], [7, 2, 1, 1]), 1 + 0.9 + 0.5 * 2 / 4 + 0.2 * 1 / 4)
    assert close(synthetic.reached([1.0, 0.4], [0, 0, 5]), 2.4)


def test_synthetic_rate_of_zero_refuses_a_uniform_of_zero() -> None:
    verify = build("synthetic", 2, synthetic_acceptance_rates=[1.0, 0.0])
    draft = one_draft([0, 0])
    p_BJV = double([[[0.5, 0.5]] * 3])
    for u in (0.0, 0.5, ALMOST_ONE):
        assert int(verify(draft, p_BJV, double([[u, u, 0.5]])).num_accepted_B) == 1


def test_synthetic_short_drafts_keep_the_first_rates() -> None:
    rates = [0.9, 0.6, 0.3]
    verify = build("synthetic", 3, synthetic_acceptance_rates=rates)
    p_BJV = double([[[0.25, 0.75]] * 3] * 2)
    draft = Draft(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 1]))
    wanted = [[0.1, 0.3, 0.6], [0.1, 0.9, 0.0]]
    assert close(acceptance_distribution(verify, draft, p_BJV), wanted)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "exactly one of .* got neither"),
        (
            {"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 4},
            "exactly one of .* got both",
        ),
        ({"synthetic_acceptance_rates": [0.5]}, "has 1 entries"),
        ({"synthetic_acceptance_rates": [0.5, 0.4, 0.3, 0.2]}, "has 4 entries"),
        ({"synthetic_acceptance_rates": [1.5, 0.4, 0.3]}, r"\[0\]=1.5 is outside \[0, 1\]"),
        ({"synthetic_acceptance_rates": [0.5, 0.4, -0.1]}, r"\[2\]=-0.1 is outside \[0, 1\]"),
        ({"synthetic_acceptance_rates": [0.5, float("nan"), 0.1]}, r"\[1\]=nan is outside \[0, 1\]"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.3]}, "rise from 0.5 to 0.6 at position 1"),
        ({"synthetic_acceptance_length": 0.9}, r"=0.9 is outside \[1, num_speculative_tokens \+ 1 = 4\]"),
        ({"synthetic_acceptance_length": 4.1}, r"=4.1 is outside \[1, num_speculative_tokens \+ 1 = 4\]"),
    ],
)
def test_synthetic_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("synthetic", 3, **params)


def test_build_refuses() -> None:
    with pytest.raises(ValueError, match="unknown rejection_sample_method 'blok'; did you mean 'block'"):
        build("blok")
    with pytest.raises(ValueError, match="'block' takes no synthetic_acceptance_rates"):
        build("block", 3, synthetic_acceptance_rates=[1, 1, 1])


def test_plain_sampling_that_a_scheme_compares_with() -> None:
    plain_of = {verifier.name: rejection.of_plain(verifier).name for verifier in verifiers()}
    assert plain_of.pop("gumbel") == "gumbel"
    assert set(plain_of.values()) == {"standard"}


def test_what_the_schemes_say_of_themselves() -> None:
    assert rejection.names() == sorted(rejection.names())
    assert {*SCHEMES, "match", "synthetic"} <= set(rejection.names())
    assert {*SCHEMES, "match"} <= set(LOSSLESS)
    assert not build("synthetic", 1, synthetic_acceptance_rates=[0.5]).lossless
    assert build("match").keyed_by == "position"
    assert build("standard").keyed_by == build("block").keyed_by == "step"


# Variable length: rules that end a draft early
#
# The vectors give values, not rules. These rules reproduce every value, on the tables of the negative cases.


CONTEXT = VECTORS["negative_cases"][0]
P_CONTEXT = table(CONTEXT["p"])
Q_CONTEXT = table(CONTEXT["q"])
LOW_CONFIDENCE = 0.35
HIGH_ENTROPY = 1.5  # bits


def entropy(distribution: list[float]) -> float:
    return -sum(weight * math.log2(weight) for weight in distribution if weight > 0)


def stop_after_low_conf_token(path: tuple[int, ...]) -> int:
    """A token that the drafter found unlikely stays, and ends the draft."""
    for i, token in enumerate(path):
        if Q_CONTEXT[path[:i]][token] < LOW_CONFIDENCE:
            return i + 1
    return len(path)


def stop_on_prefix_entropy(path: tuple[int, ...]) -> int:
    """A position where the drafter is unsure is not drafted. That is known before its token is drawn."""
    for i in range(len(path)):
        if entropy(Q_CONTEXT[path[:i]]) > HIGH_ENTROPY:
            return i
    return len(path)


def no_draft_at_all(path: tuple[int, ...]) -> int:
    return 0


def prune_at_the_token_itself(path: tuple[int, ...]) -> int:
    """Forbidden: a token is dropped for its own probability, so what is verified is no sample of q."""
    return trimmed(path, LOW_CONFIDENCE)


def trimmed(path: tuple[int, ...], floor: float) -> int:
    for i, token in enumerate(path):
        if Q_CONTEXT[path[:i]][token] < floor:
            return i
    return len(path)


LENGTH_RULES = {  # by their names in the vectors
    "stop_after_low_conf_token": stop_after_low_conf_token,
    "stop_on_prefix_entropy": stop_on_prefix_entropy,
    "no_draft_at_all": no_draft_at_all,
    "trim_drawn_token_itself": prune_at_the_token_itself,
}


@parametrize("case", VECTORS["variable_length_cases"])
def test_variable_length_exact(case: dict[str, Any]) -> None:
    gamma = case["gamma_max"]
    rule = LENGTH_RULES[case["name"]]
    distribution = emitted_distribution(build(case["scheme"]), P_CONTEXT, Q_CONTEXT, 3, gamma, length=rule)
    tau = num_accepted_distribution(distribution, gamma)
    assert close((tau * torch.arange(gamma + 1)).sum(), case["expected_accepted"]["val"])
    joint = completed_joint(distribution, P_CONTEXT, 3, gamma + 1)
    wanted = target_joint(P_CONTEXT, 3, gamma + 1)
    if case["output_is_target"]:
        assert close(joint, wanted)
    else:
        assert close(tv(joint, wanted), case["tv_distance_joint"]["val"])
        assert close(joint.reshape(3, -1).sum(1), case["first_token_marginal"]["val"])
        assert close(wanted.reshape(3, -1).sum(1), case["target_first_token"]["val"])


@parametrize("case", VECTORS["variable_length_cases"])
def test_variable_length_simulated(case: dict[str, Any]) -> None:
    """The test that passes for the allowed rules fails for the forbidden one."""
    gamma = case["gamma_max"]
    rule = LENGTH_RULES[case["name"]]
    verify = build(case["scheme"])
    num_accepted_B, token_BJ = simulate(verify, P_CONTEXT, Q_CONTEXT, 3, gamma, ROWS, seed=6, length=rule)
    spread = float(num_accepted_B.double().std()) / math.sqrt(ROWS)
    measured = float(num_accepted_B.double().mean())
    assert abs(measured - case["expected_accepted"]["val"]) <= 4 * spread + EXACT
    assert fits(token_BJ, target_joint(P_CONTEXT, 3, gamma + 1), 3) == case["output_is_target"]


def test_one_hot_drafts_may_be_trimmed_by_any_rule() -> None:
    """The token of a deterministic drafter is a function of the prefix, so nothing about it is news."""
    q_table = {prefix: one_hot(torch.tensor(row).argmax(), 3).tolist() for prefix, row in Q_CONTEXT.items()}
    wanted = target_joint(P_CONTEXT, 3, 4)
    lengths = set()
    for scheme, floor in itertools.product(SCHEMES, (0.45, 0.55, 0.65, 0.75)):

        def rule(path: tuple[int, ...], floor: float = floor) -> int:
            return trimmed(path, floor)

        draft, _ = all_drafts(q_table, 3, 3, one_hot=True, length=rule)
        lengths.add(int(draft.length_B))
        distribution = emitted_distribution(build(scheme), P_CONTEXT, q_table, 3, 3, one_hot=True, length=rule)
        assert close(completed_joint(distribution, P_CONTEXT, 3, 4), wanted)
    assert len(lengths) > 1


# Negative cases: broken verifiers, which the tests above must catch


NEGATIVE = {case["name"]: case for case in VECTORS["negative_cases"]}


def ratios(draft: Draft, p_BJV: Tensor) -> Tensor:
    return standard.target_p(draft, p_BJV) / standard.draft_q(draft, p_BJV)


def block_prefix(draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K] P_i, clipped at every step."""
    column = torch.ones(len(p_BJV), dtype=torch.float64)
    prefix = []
    for ratio_B in ratios(draft, p_BJV).unbind(1):
        column = (column * ratio_B).clamp(max=1.0)
        prefix.append(column)
    return torch.stack(prefix, 1)


def block_thresholds(draft: Draft, p_BJV: Tensor, prefix_BK: Tensor) -> Tensor:
    """[B, K] h_i for full-length probabilistic drafts."""
    inside_BK = prefix_BK[:, :-1]
    mass_BK = (inside_BK.unsqueeze(-1) * p_BJV[:, 1:-1] - draft.q_BKV[:, 1:]).clamp(min=0).sum(-1)
    upper_BK = mass_BK + 1 - inside_BK
    h_BK = torch.where(upper_BK > 0, mass_BK / upper_BK, 1.0)
    return torch.cat([h_BK, prefix_BK[:, -1:]], 1)


def last_success(accept_BK: Tensor) -> Tensor:
    return (accept_BK * torch.arange(1, accept_BK.shape[1] + 1)).amax(-1)


def first_failure(accept_BK: Tensor) -> Tensor:
    return accept_BK.long().cumprod(-1).sum(-1)


def finish(
    draft: Draft,
    p_BJV: Tensor,
    u_BJ: Tensor,
    tau_B: Tensor,
    prefix_BK: Tensor | None = None,
) -> Verdict:
    """End with the residual, scaled by P_tau if the P_i are given."""
    scale_B = None
    if prefix_BK is not None:
        prefix_BJ = torch.nn.functional.pad(prefix_BK, (1, 0), value=1.0)
        scale_B = prefix_BJ[torch.arange(len(tau_B)), tau_B]
    return Verdict(tau_B, inverse_cdf(standard.residual(draft, p_BJV, tau_B, scale_B), u_BJ[:, -1]))


def block_in_the_open(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Not a mutant: the rule that the mutants below bend, written with the same pieces."""
    prefix_BK = block_prefix(draft, p_BJV)
    tau_B = last_success(u_BJ[:, :-1] < block_thresholds(draft, p_BJV, prefix_BK))
    return finish(draft, p_BJV, u_BJ, tau_B, prefix_BK)


def resample_from_p_on_reject(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    tau_B = build("standard")(draft, p_BJV, u_BJ).num_accepted_B
    return Verdict(tau_B, inverse_cdf(p_BJV[torch.arange(len(tau_B)), tau_B], u_BJ[:, -1]))


def block_stop_at_first_failure(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    prefix_BK = block_prefix(draft, p_BJV)
    tau_B = first_failure(u_BJ[:, :-1] < block_thresholds(draft, p_BJV, prefix_BK))
    return finish(draft, p_BJV, u_BJ, tau_B, prefix_BK)


def block_joint_ratio_clipped_only_once(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    prefix_BK = ratios(draft, p_BJV).cumprod(-1).clamp(max=1.0)
    tau_B = last_success(u_BJ[:, :-1] < block_thresholds(draft, p_BJV, prefix_BK))
    return finish(draft, p_BJV, u_BJ, tau_B, prefix_BK)


def block_residual_without_p_tau(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    return finish(draft, p_BJV, u_BJ, build("block")(draft, p_BJV, u_BJ).num_accepted_B)


def greedy_draft_verified_with_softmax_q(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    soft_BKV = lookup(Q_CONTEXT, draft.token_BK[:, :-1])
    return build("standard")(Draft(draft.token_BK, draft.length_B, soft_BKV), p_BJV, u_BJ)


def draft_temperature_mismatch(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    sharp_BKV = draft.q_BKV**2 / (draft.q_BKV**2).sum(-1, keepdim=True)
    return build("standard")(Draft(draft.token_BK, draft.length_B, sharp_BKV), p_BJV, u_BJ)


def product_of_uniforms_toy_g2(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    product_BK = ratios(draft, p_BJV).clamp(max=1.0).cumprod(-1)
    return finish(draft, p_BJV, u_BJ, last_success(product_BK >= u_BJ[:, :-1].cumprod(-1)))


def retrospective_verification_schedule(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    length_B = (draft.token_BK[:, 0] == 0).long()  # looks at the token that it drops
    return build("standard")(Draft(draft.token_BK, length_B, draft.q_BKV), p_BJV, u_BJ)


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (
        resample_from_p_on_reject,
        block_stop_at_first_failure,
        block_joint_ratio_clipped_only_once,
        greedy_draft_verified_with_softmax_q,
        draft_temperature_mismatch,
        product_of_uniforms_toy_g2,
        retrospective_verification_schedule,
    )
} | {
    "block_residual_without_p_tau_toy": block_residual_without_p_tau,
    "block_residual_without_p_tau_v4": block_residual_without_p_tau,
}
# whose acceptance at a position looks at the uniforms of others, so that there is no exact distribution by bisection
ENTANGLED = "product_of_uniforms_toy_g2"


def negative_tables(case: dict[str, Any]) -> tuple[Table, Table, int, int]:
    """p, q, vocabulary and gamma of a negative case. The retrospective one is context-free: one row each."""
    if "gamma" in case:
        p_table = table(case["p"])
        q_table = table(case["q"])
        return p_table, q_table, len(p_table[()]), case["gamma"]
    p = case["p"]["val"]
    q = case["q"]["val"]
    return {(): p, (0,): p, (1,): p}, {(): q}, 2, 1


def test_every_negative_case_has_its_mutant() -> None:
    assert MUTANTS.keys() == NEGATIVE.keys()


@pytest.mark.parametrize("name", [name for name in NEGATIVE if name != ENTANGLED])
def test_mutant_has_the_distribution_of_the_vectors(name: str) -> None:
    """So each mutant makes the mistake that its name says, and no other."""
    case = NEGATIVE[name]
    p_table, q_table, vocab, gamma = negative_tables(case)
    distribution = emitted_distribution(MUTANTS[name], p_table, q_table, vocab, gamma)
    joint = completed_joint(distribution, p_table, vocab, gamma + 1)
    wanted = target_joint(p_table, vocab, gamma + 1)
    marginals = [(joint.reshape(vocab**n, -1).sum(1), wanted.reshape(vocab**n, -1).sum(1)) for n in (1, 2)]
    assert close(marginals[0][0], case["first_token"]["val"])
    assert close(marginals[0][1], case["target_first_token"]["val"])
    assert close(tv(*marginals[0]), case["tv_first_token"]["val"])
    if "tv_joint" in case:
        assert close(tv(*marginals[1]), case["tv_first_two"]["val"])
        assert close(tv(joint, wanted), case["tv_joint"]["val"])


def test_mutant_product_of_uniforms_has_the_distribution_of_the_vectors() -> None:
    case = NEGATIVE[ENTANGLED]
    rows = 1_000_000
    p_table, q_table, vocab, gamma = negative_tables(case)
    num_accepted_B, token_BJ = simulate(MUTANTS[ENTANGLED], p_table, q_table, vocab, gamma, rows, seed=7)
    for k, rate in enumerate(case["tau_probs_float"]):
        measured = float((num_accepted_B == k).double().mean())
        assert abs(measured - rate) <= 4 * math.sqrt(rate * (1 - rate) / rows)
    first = torch.bincount(token_BJ[:, 0], minlength=vocab) / rows
    assert close(first, case["first_token_float"], 4 * 0.5 / math.sqrt(rows))
    joint = torch.bincount(token_BJ @ torch.tensor([4, 2, 1]), minlength=8) / rows
    assert abs(tv(joint, target_joint(p_table, vocab, 3)) - case["tv_joint_float"]) <= 2e-3
    expected = float(num_accepted_B.double().mean())
    assert abs(expected - case["expected_accepted_float"]) <= 4 / math.sqrt(rows)
    assert expected > case["block_expected_accepted"]["val"] + 0.3  # more than any lossless scheme can


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NEGATIVE)
def test_ours_are_exactly_lossless_where_mutants_are_not(name: str, scheme: str) -> None:
    p_table, q_table, vocab, gamma = negative_tables(NEGATIVE[name])
    distribution = emitted_distribution(build(scheme), p_table, q_table, vocab, gamma)
    assert close(completed_joint(distribution, p_table, vocab, gamma + 1), target_joint(p_table, vocab, gamma + 1))


@functools.cache
def ours_fit(name: str, scheme: str) -> bool:
    """On the tables of a negative case."""
    p_table, q_table, vocab, gamma = negative_tables(NEGATIVE[name])
    _, token_BJ = simulate(build(scheme), p_table, q_table, vocab, gamma, 2 * ROWS, seed=8)
    return fits(token_BJ, target_joint(p_table, vocab, gamma + 1), vocab)


@pytest.mark.parametrize("name", NEGATIVE)
def test_chi_square_tells_a_mutant_from_ours(name: str) -> None:
    """One test, both ways: ours pass on the tables of the case, the mutant fails if its joint distribution is off."""
    p_table, q_table, vocab, gamma = negative_tables(NEGATIVE[name])
    wanted = target_joint(p_table, vocab, gamma + 1)
    # cases on the same tables differ in their mutants alone
    first = next(other for other in NEGATIVE if negative_tables(NEGATIVE[other]) == (p_table, q_table, vocab, gamma))
    assert all(ours_fit(first, scheme) for scheme in SCHEMES)
    _, token_BJ = simulate(MUTANTS[name], p_table, q_table, vocab, gamma, 2 * ROWS, seed=8)
    # Over two tokens the residual of `block` is on the same one token with p_tau or without: no output tells.
    undetectable = name == "block_residual_without_p_tau_toy"
    assert undetectable == (NEGATIVE[name].get("tv_joint", {"val": 1})["val"] == 0)
    assert fits(token_BJ, wanted, vocab) == undetectable


def test_residual_without_p_tau_is_not_detectable_over_two_tokens() -> None:
    """The mutant and ours agree in the distribution of every draft's verdict: both residuals are on one token."""
    p_table, q_table, vocab, gamma = negative_tables(NEGATIVE["block_residual_without_p_tau_toy"])
    draft, _ = all_drafts(q_table, vocab, gamma)
    p_BJV = lookup(p_table, draft.token_BK)
    ours = verdict_distribution(build("block"), draft, p_BJV)
    assert close(ours, verdict_distribution(block_residual_without_p_tau, draft, p_BJV))


def test_injected_uniforms_catch_a_residual_without_p_tau() -> None:
    """p = (7, 7, 3, 3) / 20, q = (5, 1, 7, 7) / 20, draft (2, 2), one accepted: P_1 = 3 / 7.

    P_1 p - q is positive on token 1 alone, p - q is (2, 6) / 20 on tokens 0 and 1. No residual row of
    a chain case and no uniform vector depends on P_tau, hence this one, by hand.
    """
    p_table, q_table, _, _ = negative_tables(NEGATIVE["block_residual_without_p_tau_v4"])
    draft = one_draft([2, 2], table_rows(q_table, [2]).unsqueeze(0))
    p_BJV = table_rows(p_table, [2, 2]).unsqueeze(0)
    u_K = [0.0, 0.9]
    distributions = ((build("block"), [0, 1, 0, 0]), (block_residual_without_p_tau, [0.25, 0.75, 0, 0]))
    for verify, wanted in distributions:
        assert int(verify(draft, p_BJV, double([[*u_K, 0.5]])).num_accepted_B) == 1
        assert close(sweep(verify, draft, p_BJV, u_K), wanted, 1 / 12_000)
        assert close(extra_token_distribution(verify, draft, p_BJV, double([u_K]))[0], wanted)


def test_block_equals_the_open_reference() -> None:
    """The readable block above, and ours: the same verdict for the same uniforms."""
    generator = torch.Generator().manual_seed(9)
    p_BJV = random_probs(generator, 50_000, 5, 4)
    q_BKV = random_probs(generator, 50_000, 4, 4)
    token_BK = inverse_cdf(q_BKV, noise(generator, 50_000, 4))
    draft = Draft(token_BK, torch.full((50_000,), 4), q_BKV)
    u_BJ = noise(generator, 50_000, 5)
    ours = build("block")(draft, p_BJV, u_BJ)
    reference = block_in_the_open(draft, p_BJV, u_BJ)
    assert torch.equal(ours.num_accepted_B, reference.num_accepted_B)
    assert torch.equal(ours.token_B, reference.token_B)


# Properties


def test_block_accepts_at_least_as_much_as_standard() -> None:
    """On random tables, exactly; and exactly as much as sum_i E_q[P_i] allows."""
    generator = torch.Generator().manual_seed(10)
    for vocab, gamma in ((2, 4), (3, 3), (5, 2)):
        tables = 40
        num_paths = vocab**gamma
        token_BK = sequences(vocab, gamma).repeat(tables, 1)
        table_B = torch.arange(tables).repeat_interleave(num_paths)
        p_rows = []
        q_rows = []
        for i in range(gamma + 1):  # one distribution per prefix of a table, for all the paths that begin with it
            prefix_B = torch.arange(num_paths).repeat(tables) // vocab ** (gamma - i)
            p_rows.append(random_probs(generator, tables, vocab**i, vocab)[table_B, prefix_B])
            q_rows.append(random_probs(generator, tables, vocab**i, vocab)[table_B, prefix_B])
        p_BJV = torch.stack(p_rows, 1)
        q_BKV = torch.stack(q_rows[:-1], 1)
        draft = Draft(token_BK, torch.full((len(token_BK),), gamma), q_BKV)
        weight_B = standard.draft_q(draft, p_BJV).prod(-1)

        def mean(value_B: Tensor, weight_B: Tensor = weight_B, tables: int = tables) -> Tensor:
            return (value_B * weight_B).reshape(tables, -1).sum(-1)

        accepted = {}
        for scheme in SCHEMES:
            tau_BJ = acceptance_distribution(build(scheme), draft, p_BJV)
            accepted[scheme] = mean((tau_BJ * torch.arange(gamma + 1)).sum(-1))
        bound = mean(block_prefix(draft, p_BJV).sum(-1))
        assert bool((accepted["block"] >= accepted["standard"] - EXACT).all())
        assert bool((accepted["block"] > accepted["standard"] + 1e-4).any())
        assert close(accepted["block"], bound)


def ragged_batch(seed: int) -> tuple[Draft, Tensor, Tensor]:
    """Rows of every length, with rubbish where their drafts have ended."""
    rows = 3_000
    num_draft = 4
    vocab = 5
    generator = torch.Generator().manual_seed(seed)
    p_BJV = random_probs(generator, rows, num_draft + 1, vocab)
    q_BKV = random_probs(generator, rows, num_draft, vocab)
    token_BK = inverse_cdf(q_BKV, noise(generator, rows, num_draft))
    length_B = torch.arange(rows) % (num_draft + 1)
    padding_BK = torch.arange(num_draft) >= length_B.unsqueeze(-1)
    q_BKV = q_BKV.masked_fill(padding_BK.unsqueeze(-1), torch.nan)
    p_BJV[:, 1:] = p_BJV[:, 1:].masked_fill(padding_BK.unsqueeze(-1), torch.nan)
    return Draft(token_BK, length_B, q_BKV), p_BJV, noise(generator, rows, num_draft + 1)


def verifiers() -> list[Any]:
    """Of all schemes, for drafts of 4 tokens."""
    rates = [0.9, 0.7, 0.6, 0.2]
    others = [with_settings(name, len(rates)) for name in rejection.names() if name != "synthetic"]
    return [*others, build("synthetic", len(rates), synthetic_acceptance_rates=rates)]


@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("verify", verifiers(), ids=lambda verify: verify.name)
def test_short_row_equals_a_run_of_its_own(verify: Any, with_q: bool) -> None:
    draft, p_BJV, u_BJ = ragged_batch(11)
    q_BKV = draft.q_BKV if with_q else None
    together = verify(Draft(draft.token_BK, draft.length_B, q_BKV), p_BJV, u_BJ)
    assert bool((together.num_accepted_B <= draft.length_B).all())
    for k in range(draft.token_BK.shape[1] + 1):
        mine = draft.length_B == k
        my_q_BKV = None if q_BKV is None else q_BKV[mine, :k]
        alone = Draft(draft.token_BK[mine, :k], draft.length_B[mine], my_q_BKV)
        # `match` reads the column of the position after the draft, the others the one of the extra token
        extra_BJ = u_BJ[mine, k : k + 1] if verify.keyed_by == "position" else u_BJ[mine, -1:]
        verdict = verify(alone, p_BJV[mine, : k + 1], torch.cat([u_BJ[mine, :k], extra_BJ], 1))
        assert torch.equal(verdict.num_accepted_B, together.num_accepted_B[mine])
        assert torch.equal(verdict.token_B, together.token_B[mine])


@pytest.mark.parametrize("verify", verifiers(), ids=lambda verify: verify.name)
def test_verdict_does_not_depend_on_batch_mates(verify: Any) -> None:
    draft, p_BJV, u_BJ = ragged_batch(12)
    together = verify(draft, p_BJV, u_BJ)
    order = torch.randperm(len(u_BJ), generator=torch.Generator().manual_seed(12))[:500]
    few = Draft(draft.token_BK[order], draft.length_B[order], draft.q_BKV[order])
    some = verify(few, p_BJV[order], u_BJ[order])
    assert torch.equal(some.num_accepted_B, together.num_accepted_B[order])
    assert torch.equal(some.token_B, together.token_B[order])


@pytest.mark.parametrize("verify", verifiers(), ids=lambda verify: verify.name)
def test_nothing_drafted_is_plain_sampling(verify: Any) -> None:
    generator = torch.Generator().manual_seed(13)
    p_BJV = random_probs(generator, 1_000, 1, 7)
    u_BJ = noise(generator, 1_000, 1)
    draft = Draft(torch.empty(1_000, 0, dtype=torch.int64), torch.zeros(1_000, dtype=torch.int64))
    verdict = verify(draft, p_BJV, u_BJ)
    assert not verdict.num_accepted_B.any()
    wanted_B = gumbel.first(p_BJV[:, 0], u_BJ[:, 0])[:, 0] if verify.shares_noise else inverse_cdf(p_BJV[:, 0], u_BJ[:, 0])
    assert torch.equal(verdict.token_B, wanted_B)


@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("name", LOSSLESS)
def test_greedy_target_takes_the_longest_match(name: str, with_q: bool) -> None:
    """At temperature 0 every lossless scheme is the same function, and so is `match.compare`."""
    generator = torch.Generator().manual_seed(14)
    rows = 5_000
    num_draft = 4
    vocab = 6
    argmax_BJ = torch.randint(vocab, (rows, num_draft + 1), generator=generator)
    q_BKV = random_probs(generator, rows, num_draft, vocab)
    token_BK = inverse_cdf(q_BKV, noise(generator, rows, num_draft))
    token_BK = torch.where(noise(generator, rows, num_draft) < 0.7, argmax_BJ[:, :-1], token_BK)
    length_B = torch.randint(num_draft + 1, (rows,), generator=generator)
    draft = Draft(token_BK, length_B, q_BKV if with_q else None)
    verdict = with_settings(name, num_draft)(draft, one_hot(argmax_BJ, vocab), noise(generator, rows, num_draft + 1))
    for b, (tokens, wanted) in enumerate(zip(token_BK.tolist(), argmax_BJ.tolist(), strict=True)):
        longest = 0
        while longest < int(length_B[b]) and tokens[longest] == wanted[longest]:
            longest += 1
        assert int(verdict.num_accepted_B[b]) == longest, "a token with p = 1 is accepted, one with p = 0 is not"
        assert int(verdict.token_B[b]) == wanted[longest]
    fast = match.compare(draft, argmax_BJ)
    assert torch.equal(fast.num_accepted_B, verdict.num_accepted_B)
    assert torch.equal(fast.token_B, verdict.token_B)


def test_residual_without_mass_falls_back_to_p() -> None:
    p_BJV = double([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]])
    for q_BKV in (p_BJV[:, :1], double([[[0.6, 0.3, 0.2]]])):  # equal, and over p everywhere by rounding
        left = standard.residual(one_draft([0], q_BKV), p_BJV, torch.tensor([0]))
        assert torch.equal(left[0], p_BJV[0, 0])
    certain = double([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    left = standard.residual(one_draft([0]), certain, torch.tensor([0]))
    assert torch.equal(left[0], certain[0, 0])


@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("name", LOSSLESS)
def test_token_without_mass_is_never_emitted(name: str, with_q: bool) -> None:
    """Half of each distribution is 0 in turn, at uniforms of 0, just below 1, and between."""
    generator = torch.Generator().manual_seed(15)
    rows = 20_000
    num_draft = 3
    vocab = 6
    p_BJV = random_probs(generator, rows, num_draft + 1, vocab)
    p_BJV = p_BJV * (noise(generator, *p_BJV.shape) < 0.5)
    p_BJV[..., 2] += 1e-3
    p_BJV = p_BJV / p_BJV.sum(-1, keepdim=True)
    q_BKV = random_probs(generator, rows, num_draft, vocab)
    token_BK = inverse_cdf(q_BKV, noise(generator, rows, num_draft))
    u_BJ = noise(generator, rows, num_draft + 1)
    edge_BJ = torch.randint(3, u_BJ.shape, generator=generator)
    u_BJ = torch.where(edge_BJ == 0, 0.0, torch.where(edge_BJ == 1, ALMOST_ONE, u_BJ))
    draft = Draft(token_BK, torch.full((rows,), num_draft), q_BKV if with_q else None)
    verdict = with_settings(name, num_draft)(draft, p_BJV, u_BJ)
    accepted_BK = torch.arange(num_draft) < verdict.num_accepted_B.unsqueeze(-1)
    p_BK = p_BJV[:, :-1].gather(-1, token_BK.unsqueeze(-1)).squeeze(-1)
    assert bool((p_BK[accepted_BK] > 0).all())
    assert bool((p_BJV[torch.arange(rows), verdict.num_accepted_B, verdict.token_B] > 0).all())


@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_uniform_of_zero_does_not_accept_the_impossible(name: str, with_q: bool, position: int) -> None:
    """u < a with u = 0 and a = 0. What follows an impossible token cannot bring it back either."""
    p_BJV = double([[[0.5, 0.5, 0.0]] * 4])
    tokens = [0, 0, 0]
    tokens[position] = 2
    q_BKV = double([[[0.4, 0.3, 0.3]] * 3]) if with_q else None
    verdict = with_settings(name, 3)(one_draft(tokens, q_BKV), p_BJV, torch.zeros(1, 4, dtype=torch.float64))
    assert int(verdict.num_accepted_B) <= position
    assert int(verdict.token_B) != 2


@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_token_that_only_the_target_gives_mass_is_accepted(scheme: str, u: float) -> None:
    """x ~ q cannot have q(x) = 0, but rounding may: p / q is then infinite, not an error."""
    draft = one_draft([2], double([[[0.5, 0.5, 0.0]]]))
    verdict = build(scheme)(draft, double([[[0.6, 0.2, 0.2]] * 2]), double([[u, 0.5]]))
    assert int(verdict.num_accepted_B) == 1


@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_token_that_nobody_gives_mass_falls(scheme: str, u: float) -> None:
    draft = one_draft([2], double([[[0.5, 0.5, 0.0]]]))
    verdict = build(scheme)(draft, double([[[0.8, 0.2, 0.0]] * 2]), double([[u, 0.5]]))
    assert int(verdict.num_accepted_B) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_uniforms_just_below_one(scheme: str) -> None:
    """They refuse all that can be refused: what is accepted is as likely under the target as under the drafter."""
    generator = torch.Generator().manual_seed(16)
    p_BJV = random_probs(generator, 5_000, 2, 4)
    q_BKV = random_probs(generator, 5_000, 1, 4)
    draft = Draft(inverse_cdf(q_BKV, noise(generator, 5_000, 1)), torch.ones(5_000, dtype=torch.int64), q_BKV)
    u_BJ = torch.full((5_000, 2), ALMOST_ONE, dtype=torch.float64)
    verdict = build(scheme)(draft, p_BJV, u_BJ)
    liked_B = (standard.target_p(draft, p_BJV) >= standard.draft_q(draft, p_BJV))[:, 0]
    assert torch.equal(verdict.num_accepted_B == 1, liked_B)
    assert bool(((verdict.token_B >= 0) & (verdict.token_B < 4)).all())


@pytest.mark.parametrize("scale", [1 - 1e-6, 1 + 1e-6])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_float32_probs_that_do_not_quite_sum_to_one(scheme: str, scale: float) -> None:
    verify = build(scheme)

    def rounded(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
        q_BKV = None if draft.q_BKV is None else draft.q_BKV.float()
        return verify(Draft(draft.token_BK, draft.length_B, q_BKV), p_BJV.float() * scale, u_BJ)

    for case in CHAIN_CASES:
        p_table = table(case["p"])
        vocab = case["vocab"]
        gamma = case["gamma"]
        distribution = emitted_distribution(rounded, p_table, table(case["q"]), vocab, gamma)
        joint = completed_joint(distribution, p_table, vocab, gamma + 1)
        assert tv(joint, target_joint(p_table, vocab, gamma + 1)) < 1e-5
        tau = num_accepted_distribution(distribution, gamma)
        wanted = case["schemes"][scheme]["tau_probs"]["val"]
        assert close(tau.flip(0).cumsum(0), double(wanted).flip(0).cumsum(0), 1e-5)


# Uniforms that verify a draft must be independent of those that drew it, and of those that verified the step before


NARROW_VOCAB = 16
NARROW_DRAFT = 2


@functools.cache
def narrow_probs() -> tuple[Tensor, Tensor]:
    """q has the negated logits of p, so that most drafts are refused and the residual carries the output."""
    logits_V = torch.linspace(-1.2, 1.2, NARROW_VOCAB, dtype=torch.float64)
    logits_V = logits_V[torch.randperm(NARROW_VOCAB, generator=torch.Generator().manual_seed(17))]
    return logits_V.softmax(-1), (-logits_V).softmax(-1)


def narrow_tokens(scheme: str, verify_stream: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """One step of `rows` requests with seeds of their own: num_accepted_B and completed tokens [B, K + 1]."""
    p_V, q_V = narrow_probs()
    seed_B1 = np.arange(rows)[:, None]
    column_J = np.arange(NARROW_DRAFT + 1)
    draw_BK = torch.from_numpy(uniforms(seed_B1, DRAFT, 0, column_J[:-1]))
    token_BK = inverse_cdf(q_V.expand(rows, NARROW_DRAFT, -1), draw_BK)
    draft = Draft(token_BK, torch.full((rows,), NARROW_DRAFT), q_V.expand(rows, NARROW_DRAFT, -1))
    u_BJ = torch.from_numpy(uniforms(seed_B1, verify_stream, 0, column_J))
    verdict = build(scheme)(draft, p_V.expand(rows, NARROW_DRAFT + 1, -1), u_BJ)
    p_table = {
        prefix: p_V.tolist()
        for length in range(NARROW_DRAFT + 1)
        for prefix in itertools.product(range(NARROW_VOCAB), repeat=length)
    }
    fresh_BJ = torch.from_numpy(uniforms(seed_B1, VERIFY, 1, column_J))
    return verdict.num_accepted_B, complete(token_BK, verdict, p_table, fresh_BJ)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_narrow_adversarial_distribution(scheme: str) -> None:
    p_V, q_V = narrow_probs()
    num_accepted_B, token_BJ = narrow_tokens(scheme, VERIFY)
    for position in range(NARROW_DRAFT + 1):
        statistic, threshold = chi_square(torch.bincount(token_BJ[:, position], minlength=NARROW_VOCAB), p_V)
        assert statistic < threshold
    if scheme == "standard":
        rate = float(torch.minimum(p_V, q_V).sum())
        measured = float((num_accepted_B > 0).double().mean())
        assert abs(measured - rate) <= 4 * math.sqrt(rate * (1 - rate) / ROWS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_narrow_adversarial_distribution_sees_shared_noise(scheme: str) -> None:
    """The same test with the uniforms of the draft used again for its verdict: it must fail."""
    _, token_BJ = narrow_tokens(scheme, DRAFT)
    counts = torch.bincount(token_BJ[:, 0], minlength=NARROW_VOCAB)
    statistic, threshold = chi_square(counts, narrow_probs()[0])
    assert statistic > 5 * threshold


def generate(verify: rejection.Verifier, keyed_by: str, p: list[float], q: list[float], num_tokens: int) -> Tensor:
    """[B, num_tokens] through repeated steps of two draft tokens; p and q do not look at the context."""
    rows = 32_768
    num_draft = 2
    columns = np.arange(3)
    p_BJV = double(p).expand(rows, num_draft + 1, -1)
    q_BKV = double(q).expand(rows, num_draft, -1)
    seed_B1 = np.arange(rows)[:, None]
    row_B = torch.arange(rows)
    token_BL = torch.zeros(rows, num_tokens + num_draft + 1, dtype=torch.int64)
    count_B = torch.zeros(rows, dtype=torch.int64)
    step = 0
    while int(count_B.min()) < num_tokens:
        start_B = count_B.clamp(max=num_tokens)  # a finished row goes on in the spare columns, unread
        if keyed_by == "position":
            u_BJ = uniforms(seed_B1, VERIFY, start_B.numpy()[:, None] + columns, 0)
        else:
            u_BJ = uniforms(seed_B1, VERIFY, step, columns)
        token_BK = inverse_cdf(q_BKV, torch.from_numpy(uniforms(seed_B1, DRAFT, step, columns[:-1])))
        draft = Draft(token_BK, torch.full((rows,), num_draft), q_BKV)
        verdict = verify(draft, p_BJV, torch.from_numpy(u_BJ))
        for k in range(num_draft):
            accepted_B = k < verdict.num_accepted_B
            token_BL[row_B[accepted_B], start_B[accepted_B] + k] = token_BK[accepted_B, k]
        token_BL[row_B, start_B + verdict.num_accepted_B] = verdict.token_B
        count_B += verdict.num_accepted_B + 1
        step += 1
    return token_BL[:, :num_tokens]


def independent_joint(p: list[float], num_tokens: int) -> Tensor:
    joint = torch.ones(1, dtype=torch.float64)
    for _ in range(num_tokens):
        joint = torch.outer(joint, double(p)).flatten()
    return joint


MANY_STEPS = {
    "opposed": ([0.3, 0.7], [0.7, 0.3], 6),
    "v4": ([0.35, 0.35, 0.15, 0.15], [0.25, 0.05, 0.35, 0.35], 3),  # here h_1 of `block` is neither 0 nor 1
}


@pytest.mark.parametrize("distributions", MANY_STEPS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_many_steps_keep_the_joint_distribution(name: str, distributions: str) -> None:
    p, q, num_tokens = MANY_STEPS[distributions]
    verify = with_settings(name, 2)
    token_BL = generate(verify, verify.keyed_by, p, q, num_tokens)
    assert fits(token_BL, independent_joint(p, num_tokens), len(p))


def test_block_keyed_by_position_is_biased() -> None:
    """Why `block` is keyed by step: it looks at uniforms of positions that it does not commit, and would meet
    them again in the next step. The other schemes stop looking at the first refusal.
    """
    p, q, num_tokens = MANY_STEPS["v4"]
    assert not fits(generate(build("block"), "position", p, q, num_tokens), independent_joint(p, num_tokens), len(p))


# The chi-square rule itself


def test_chi_square_accepts_a_sample_and_refuses_a_shift() -> None:
    generator = torch.Generator().manual_seed(18)
    distribution = random_probs(generator, 50)
    token_B = inverse_cdf(distribution.expand(ROWS, -1), noise(generator, ROWS))
    statistic, threshold = chi_square(torch.bincount(token_B, minlength=50), distribution)
    assert threshold == 49 + 10 * math.sqrt(98)
    assert statistic < 100
    shifted = distribution.clone()
    shifted[0] += 0.02
    statistic, threshold = chi_square(torch.bincount(token_B, minlength=50), shifted / shifted.sum())
    assert statistic > threshold


def test_chi_square_merges_rare_bins_and_refuses_the_impossible() -> None:
    rare = double([0.5, 0.49] + [0.001] * 10)
    _, threshold = chi_square(torch.tensor([500, 490] + [1] * 10), rare)
    assert threshold == 2 + 10 * math.sqrt(4)  # ten bins that expect 1 are one that expects 10
    statistic, threshold = chi_square(torch.tensor([50, 49, 1]), double([0.5, 0.49, 0.01]))
    assert threshold == 1 + 10 * math.sqrt(2)  # what expects 1 in all joins the next
    assert statistic < 0.1
    assert chi_square(torch.tensor([99, 1]), double([1.0, 0.0]))[0] == math.inf
    statistic, threshold = chi_square(torch.tensor([100, 0]), double([1.0, 0.0]))
    assert statistic == 0 < threshold


# Sampling: inverse_cdf


def test_inverse_cdf_edges() -> None:
    weight_V = double([1.0, 1.0, 2.0])
    u_B = double([0.0, math.nextafter(0.25, 0), 0.25, math.nextafter(0.5, 0), 0.5, 0.75, ALMOST_ONE])
    assert inverse_cdf(weight_V.expand(7, -1), u_B).tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_inverse_cdf_skips_zero_weights() -> None:
    weight_V = double([0.0, 1.0, 0.0, 0.0, 3.0, 0.0])
    u_B = double([0.0, 0.1, math.nextafter(0.25, 0), 0.25, 0.9, ALMOST_ONE])
    assert inverse_cdf(weight_V.expand(6, -1), u_B).tolist() == [1, 1, 1, 4, 4, 4]


def test_inverse_cdf_near_one_where_the_product_rounds_up() -> None:
    """u * total may round to the total, and float32 weights may not sum to what they should."""
    generator = torch.Generator().manual_seed(19)
    u_B = torch.full((2_000,), ALMOST_ONE, dtype=torch.float64)
    size_B1 = 10 ** (40 * torch.rand(2_000, 1, generator=generator) - 20)
    weight_BV = size_B1 * torch.rand(2_000, 33, generator=generator)
    weight_BV[:, 20:] = 0
    assert bool((inverse_cdf(weight_BV, u_B) == 19).all())
    smallest = torch.full((1, 3), 5e-324, dtype=torch.float64)
    assert inverse_cdf(smallest, double([ALMOST_ONE])).tolist() == [2]


def test_inverse_cdf_counts_in_float64() -> None:
    """In float32 a cumulative sum over a real vocabulary loses the rare tokens."""
    vocab = 150_000
    weight_V = torch.full((vocab,), 1e-8)
    weight_V[0] = 1.0
    point = np.array([0.0, 1 - 1e-4, ALMOST_ONE])
    cumulative = np.cumsum(weight_V.numpy().astype(np.float64))
    wanted = np.searchsorted(cumulative, point * cumulative[-1], side="right")
    assert inverse_cdf(weight_V.expand(3, -1), torch.from_numpy(point)).tolist() == wanted.tolist()
    assert 1 < wanted[1] < wanted[2] == vocab - 1


def test_inverse_cdf_distribution_scale_and_shape() -> None:
    distribution = double([0.125, 0.0, 0.5, 0.375])
    grid = (torch.arange(8_000, dtype=torch.float64) + 0.5) / 8_000
    token_B = inverse_cdf(distribution.expand(8_000, -1), grid)
    assert close(torch.bincount(token_B, minlength=4) / 8_000, distribution, 1e-7)
    for scale in (1e-30, 2.0**-20, 3.0, 1e30):
        assert torch.equal(inverse_cdf((distribution * scale).expand(8_000, -1), grid), token_B)
    shaped = inverse_cdf(distribution.expand(4, 20, 100, -1), grid.reshape(4, 20, 100))
    assert torch.equal(shaped, token_B.reshape(4, 20, 100))
    assert int(inverse_cdf(distribution, double(0.3))) == 2


def test_inverse_cdf_of_nan_stays_in_range() -> None:
    """vLLM's samplers promise as much: a broken row may be nonsense, it must not take the batch down."""
    token_B = inverse_cdf(torch.full((2, 5), torch.nan), double([0.3, ALMOST_ONE]))
    assert bool((token_B < 5).all())


# Sampling: uniforms


def test_uniforms_are_uniform() -> None:
    u = uniforms(np.arange(1_000)[:, None], VERIFY, 3, np.arange(200))
    assert u.dtype == np.float64
    assert u.shape == (1_000, 200)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / u.size)
    assert abs(u.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / u.size)
    statistic, threshold = chi_square(
        torch.bincount(torch.from_numpy((u.ravel() * 1_000).astype(np.int64)), minlength=1_000),
        torch.full((1_000,), 1e-3),
    )
    assert statistic < threshold
    low_bits = (u * 2.0**53).astype(np.int64) & 1023
    statistic, threshold = chi_square(
        torch.bincount(torch.from_numpy(low_bits.ravel()), minlength=1_024), torch.full((1_024,), 1 / 1_024)
    )
    assert statistic < threshold


def test_uniforms_of_different_places_are_independent() -> None:
    """Neighbours along every argument, and arguments swapped: pairs fill the square evenly."""
    n = 200_000
    many = np.arange(200_000)
    pairs = {
        "columns": (uniforms(many, VERIFY, 5, 0), uniforms(many, VERIFY, 5, 1)),
        "streams": (uniforms(many, VERIFY, 5, 0), uniforms(many, DRAFT, 5, 0)),
        "steps": (uniforms(many, VERIFY, 5, 0), uniforms(many, VERIFY, 6, 0)),
        "seeds": (uniforms(many, VERIFY, 5, 0), uniforms(many + 1, VERIFY, 5, 0)),
        "column and step": (uniforms(7, VERIFY, many, 1), uniforms(7, VERIFY, many + 1, 0)),
        "steps of one seed": (uniforms(7, VERIFY, many, 0), uniforms(7, VERIFY, many + 1, 0)),
        "columns of one seed": (uniforms(7, VERIFY, 0, many), uniforms(7, VERIFY, 0, many + 1)),
        "seed and step": (uniforms(many, VERIFY, 3, 0), uniforms(3, VERIFY, many, 0)),
        "sign of the seed": (uniforms(many + 1, VERIFY, 5, 0), uniforms(-many - 1, VERIFY, 5, 0)),
    }
    for name, (a, b) in pairs.items():
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(n), name
        cell = (a * 20).astype(np.int64) * 20 + (b * 20).astype(np.int64)
        counts = torch.bincount(torch.from_numpy(cell), minlength=400)
        statistic, threshold = chi_square(counts, torch.full((400,), 1 / 400))
        assert statistic < threshold, name


def test_uniforms_do_not_depend_on_the_shape_of_the_call() -> None:
    seeds = np.array([-(2**63), -1, 0, 1, 2**63 - 1])
    steps = np.array([0, 9, 2**40])
    columns = np.arange(4)
    batch = uniforms(seeds[:, None, None], DRAFT, steps[:, None], columns)
    assert batch.shape == (5, 3, 4)
    assert len(np.unique(batch)) == batch.size
    for (i, seed), (j, step), (k, column) in itertools.product(
        enumerate(seeds.tolist()), enumerate(steps.tolist()), enumerate(columns.tolist())
    ):
        assert uniforms(seed, DRAFT, step, column) == batch[i, j, k]
        assert uniforms(np.int64(seed), DRAFT, np.int64(step), np.int64(column)) == batch[i, j, k]
    assert np.array_equal(uniforms(seeds.astype(np.int64)[:, None], DRAFT, 0, columns), batch[:, 0])


# Sampling: probs against a reference that goes token by token


def probs_reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, then min-p, top-k and top-p, each on what the one before left over."""
    vocab = len(logits)
    if params.temperature == 0:
        return np.eye(vocab)[int(np.argmax(logits))]
    scaled = logits.astype(np.float64) / params.temperature
    distribution = np.exp(scaled - scaled.max())
    distribution /= distribution.sum()
    distribution[distribution < params.min_p * distribution.max()] = 0
    if params.top_k > 0:
        border = sorted(distribution, reverse=True)[min(params.top_k, vocab) - 1]
        distribution[distribution < border] = 0
    distribution /= distribution.sum()
    kept = np.zeros(vocab)
    mass = 0.0
    for token in sorted(range(vocab), key=lambda v: -distribution[v]):
        if mass >= params.top_p and params.top_p < 1:
            break
        kept[token] = distribution[token]
        mass += distribution[token]
    return kept / kept.sum()


PROBS_PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 0.01},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1_000},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0},
    {"temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.2},
]


def assert_probs(params: list[SamplingParams], row_N: Tensor, logits_NV: Tensor) -> None:
    p_NV = probs(logits_NV, params, row_N)
    assert p_NV.dtype == torch.float32
    for n, b in enumerate(row_N.tolist()):
        wanted = probs_reference(logits_NV[n].numpy(), params[b])
        assert (p_NV[n].numpy()[wanted == 0] == 0).all(), params[b]
        assert (p_NV[n].numpy()[wanted > 1e-37] > 0).all(), params[b]  # below is the end of float32
        assert np.allclose(p_NV[n].numpy(), wanted, rtol=1e-4, atol=1e-6), params[b]


@pytest.mark.parametrize("values", PROBS_PARAMS, ids=str)
def test_probs_of_one_kind_of_row(values: dict[str, Any]) -> None:
    logits_NV = 3 * torch.randn(20, 33, generator=torch.Generator().manual_seed(20))
    assert_probs([SamplingParams(**values)], torch.zeros(20, dtype=torch.int64), logits_NV)


@pytest.mark.parametrize("vocab", [3, 33])
def test_probs_of_mixed_rows(vocab: int) -> None:
    """Every kind of row in one call, several lines each and out of order: no row leaks into another."""
    generator = torch.Generator().manual_seed(21)
    params = [SamplingParams(**values) for values in PROBS_PARAMS]
    row_N = torch.randint(len(params), (200,), generator=generator)
    assert_probs(params, row_N, 3 * torch.randn(200, vocab, generator=generator))


def test_probs_keeps_masked_tokens_out() -> None:
    generator = torch.Generator().manual_seed(22)
    logits_NV = torch.randn(len(PROBS_PARAMS), 10, generator=generator)
    logits_NV[:, [0, 3, 4, 9]] = -torch.inf
    params = [SamplingParams(**values) for values in PROBS_PARAMS]
    p_NV = probs(logits_NV, params, torch.arange(len(params)))
    assert not p_NV[:, [0, 3, 4, 9]].any()
    assert bool(torch.isfinite(p_NV).all())
    assert close(p_NV.sum(-1), torch.ones(len(params)), 1e-6)


def test_probs_ties() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    row_N = torch.zeros(1, dtype=torch.int64)
    assert probs(logits_NV, [SamplingParams(temperature=0)], row_N).tolist() == [[0, 1, 0, 0, 0]]
    kept = probs(logits_NV, [SamplingParams(top_k=2)], row_N)  # ties at the border of top-k stay
    assert close(kept, [[0, 1 / 3, 1 / 3, 0, 1 / 3]], 1e-6)
    assert int((probs(logits_NV, [SamplingParams(top_p=1e-6)], row_N) > 0).sum()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probs_of_half_precision_logits(dtype: torch.dtype) -> None:
    logits_NV = (3 * torch.randn(20, 33, generator=torch.Generator().manual_seed(23))).to(dtype)
    params = [SamplingParams(temperature=0.8, top_p=0.9)]
    row_N = torch.zeros(20, dtype=torch.int64)
    assert torch.equal(probs(logits_NV, params, row_N), probs(logits_NV.float(), params, row_N))


# Sampling: apply_penalties against a reference that recounts every prefix from scratch


def apply_penalties_reference(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], stop_ids: list[int]
) -> np.ndarray:
    """One position, whose output so far is `output` (draft tokens before it included)."""
    logits = logits.astype(np.float64).copy()
    count = Counter(output)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[stop_ids] = -np.inf
    for token in range(len(logits)):
        if token in prompt or token in output:
            logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
        logits[token] -= params.frequency_penalty * count[token] + params.presence_penalty * (token in output)
    return logits


ADJUST_PARAMS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.3, "presence_penalty": -1.1, "repetition_penalty": 1.1},
    {"logit_bias": {2: 5.0, 7: -100.0}},
    {"min_tokens": 8},
    {"min_tokens": 10, "repetition_penalty": 1.2, "logit_bias": {1: -2.0, 0: 3.0}, "presence_penalty": 0.5},
]


def penalties_batch(
    num_draft: int,
) -> tuple[Tensor, list[SamplingParams], list[list[int]], list[list[int]], Draft]:
    """Rows of every kind, a few tokens of vocabulary so that drafts repeat prompt, output and themselves."""
    generator = torch.Generator().manual_seed(24)
    vocab = 12
    params = [SamplingParams(**values, max_tokens=64) for values in ADJUST_PARAMS for _ in range(4)]
    rows = len(params)
    logits_BJV = 2 * torch.randn(rows, num_draft + 1, vocab, generator=generator)
    prompts = [torch.randint(vocab, (b % 4,), generator=generator).tolist() for b in range(rows)]
    outputs = [torch.randint(vocab, (b % 9,), generator=generator).tolist() for b in range(rows)]
    token_BK = torch.randint(vocab // 3, (rows, num_draft), generator=generator)
    length_B = torch.randint(num_draft + 1, (rows,), generator=generator)
    return logits_BJV, params, prompts, outputs, Draft(token_BK, length_B)


def counted(lists: list[list[int]], vocab: int) -> Tensor:
    count_BV = torch.zeros(len(lists), vocab, dtype=torch.int64)
    for count_V, tokens in zip(count_BV, lists, strict=True):
        for token in tokens:
            count_V[token] += 1
    return count_BV


@pytest.mark.parametrize("num_draft", [0, 4])
def test_penalties_counts_the_draft_before_each_position(num_draft: int) -> None:
    logits_BJV, params, prompts, outputs, draft = penalties_batch(num_draft)
    prompt_BV = counted(prompts, 12)
    output_BV = counted(outputs, 12)
    before = logits_BJV.clone()
    stop_ids = [[b % 12, 11] for b in range(len(params))]
    num_output_B = np.array([len(output) for output in outputs])
    kept = output_BV.clone()
    rest = (draft.token_BK, draft.length_B, draft.parents(), num_output_B, stop_ids)
    adjusted_BJV = apply_penalties(logits_BJV, params, prompt_BV, output_BV, *rest)
    assert torch.equal(logits_BJV, before), "inputs are not to be written"
    assert torch.equal(output_BV, kept), "inputs are not to be written"
    for b, p in enumerate(params):
        for j in range(int(draft.length_B[b]) + 1):
            so_far = outputs[b] + draft.token_BK[b, :j].tolist()
            wanted = apply_penalties_reference(logits_BJV[b, j].numpy(), p, prompts[b], so_far, stop_ids[b])
            assert np.allclose(adjusted_BJV[b, j].numpy(), wanted, rtol=1e-5, atol=1e-5), (b, j)


def test_penalties_without_penalties_needs_no_counts() -> None:
    """Bias and minimum length alone, with None for the counts, equal the same rows with counts."""
    logits_BJV, params, prompts, outputs, draft = penalties_batch(4)
    mild = [b for b, p in enumerate(params) if p.repetition_penalty == 1 and not p.presence_penalty]
    mild = [b for b in mild if not params[b].frequency_penalty]
    stop_ids = [[3, 11] for _ in mild]
    num_output_B = np.array([len(outputs[b]) for b in mild])
    rest = (
        [params[b] for b in mild],
        draft.token_BK[mild],
        draft.length_B[mild],
        draft.parents()[mild],
        num_output_B,
        stop_ids,
    )
    counts = (counted([prompts[b] for b in mild], 12), counted([outputs[b] for b in mild], 12))
    bare = apply_penalties(logits_BJV[mild], rest[0], None, None, *rest[1:])
    assert torch.equal(bare, apply_penalties(logits_BJV[mild], rest[0], *counts, *rest[1:]))
    assert not torch.equal(bare, logits_BJV[mild])
