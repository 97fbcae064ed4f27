"""The distribution of what the engine puts out above temperature 0, by chi-square: every method and scheme.

The target is a `TableLM`: given the two tokens before it, a stretch of tokens has a distribution that can be written
down. So an answer is cut into stretches, each as long as what a step emits at most, and the counts of (two
tokens before, stretch) are held against that distribution. A stretch begins anywhere in a step and ends in a later
one, maybe after several. Taking many from a request spares prefills, which take most of the time here. Seeds
are fixed.

The tests can fail: broken verifiers, proposers, uniforms and caches go through the same function and do not fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import method, rejection, sampling
from specdec.core import Context, Draft, Proposer, Request, Verdict
from specdec.params import SamplingParams
from specdec.rejection import Verifier, block, match, standard
from support.all_pairs import name_of
from support.distributions import chi_square, emitted_distribution, num_accepted_distribution
from support.stretches import LONG, PARAMS, STRETCH, TABLE, adverse, decode, drafts_of, misfit
from support.table import (
    NUM_DRAFT,
    OF_ALL_KINDS,
    FirstWriteWins,
    TableLM,
    TableProposer,
    joint_distribution,
    methods,
    proposer,
    scheme,
    schemes,
)

# distributions over three tokens where block gains most, and where its details matter
P_OF_BLOCK = [0.35, 0.32, 0.33]
Q_OF_BLOCK = [0.04, 0.83, 0.13]

TIMES = pytest.mark.parametrize("times", [pytest.param(1, id="short"), LONG])


def drafts_from(q: list[float], num_draft: int, target: TableLM) -> Proposer:
    """Draws every token from q."""
    return drafts_of(TableLM.constant(q), target, num_draft=num_draft)


def plain(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens)


def methods_and_schemes() -> list[Any]:
    """Every method with every lossless scheme; the ordinary run takes those that can go wrong apart from each other.

    What a method adds to a scheme are the distributions that it says it drew from, and what it remembers of earlier answers.
    `standard` has all methods that draw or remember; under `block` the kinds are enough. Under `match` and `gumbel`
    test_engine.py holds each method's tokens against plain decoding's, so what is left to see is the law of plain decoding.
    """
    ordinary = {(name, "standard") for name in OF_ALL_KINDS} | {(name, "block") for name in OF_ALL_KINDS}
    ordinary |= {("none", name) for name in ("match", "gumbel")}
    params = []
    for row in methods():
        (case,) = row.values
        draws = case[1].get("draft_sample_method") == "probabilistic"
        remembers = case[0] in ("suffix", "token_recycling")
        for name in schemes():
            wanted = (name_of(row), name) in ordinary or ((draws or remembers) and name == "standard")
            marks = [] if wanted else pytest.mark.prove
            params.append(pytest.param(case, name, id=f"{name_of(row)}-{name}", marks=marks))
    return params


@TIMES
@pytest.mark.parametrize(("case", "name"), methods_and_schemes())
def test_joint_distribution(case: tuple[str, dict[str, Any]], name: str, times: int) -> None:
    requests = decode(TABLE, proposer(case, TABLE), scheme(name), num_requests=400 * times)
    assert misfit(TABLE, requests) < 1
    drafted, accepted = (sum(sum(getattr(r.stats, key)) for r in requests) for key in ("drafted", "accepted"))
    assert (drafted > 0) == (case[0] not in ("none", "extract_hidden_states"))
    if drafted and case[1].get("model") != "same":
        least = 0.05 if name in ("standard", "block", "match") else 0
        assert least < accepted / drafted < 0.95, "drafts that always stand, or never do, try little"


@TIMES
@pytest.mark.parametrize("name", ["standard", "block"])
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.2, "top_k": 2},
        {"temperature": 1.2, "top_p": 0.75},
        {"temperature": 1.2, "min_p": 0.4},
        {"temperature": 0.9, "logit_bias": {0: -1.0, 2: 0.8}},
        {"temperature": 0.9, "repetition_penalty": 1.6},
        {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    ],
    ids=lambda changes: list(changes)[1],
)
def test_joint_distribution_of_sampling_parameters(changes: dict[str, Any], name: str, times: int) -> None:
    """`match` is not here: with every parameter it gives what `none` gives, see test_engine.py."""
    penalises = "penalty" in list(changes)[1]
    params = SamplingParams(**changes, max_tokens=STRETCH if penalises else 16 * STRETCH)
    distribution = joint_distribution(TABLE, [0, 1], params, STRETCH)
    without = joint_distribution(TABLE, [0, 1], SamplingParams(temperature=params.temperature), STRETCH)
    assert float((distribution - without).abs().sum()) / 2 > 0.1, "the parameter hardly matters here"
    num_requests = 1800 if penalises else 400
    assert misfit(TABLE, decode(TABLE, adverse(), scheme(name), params, num_requests * times)) < 1


@TIMES
@pytest.mark.parametrize("name", schemes())
def test_joint_distribution_of_many_rounds(name: str, times: int) -> None:
    """Six tokens of a coin that the drafter has the wrong way round, K = 2: two to six rounds."""
    target = TableLM.constant([0.3, 0.7])
    requests = decode(target, drafts_from([0.7, 0.3], 2, target), scheme(name), plain(6 * 20), 256 * times)
    assert misfit(target, requests, 6) < 1


@TIMES
@pytest.mark.parametrize("name", schemes())
def test_joint_distribution_of_an_adverse_drafter(name: str, times: int) -> None:
    """Sixteen tokens, likeliest where the target's are rarest."""
    weight = np.geomspace(1, 30, 16)
    p = (weight / weight.sum()).tolist()
    q = (weight[::-1] / weight.sum()).tolist()
    target = TableLM.constant(p)
    requests = decode(target, drafts_from(q, 2, target), scheme(name), plain(2 * 40), 256 * times)
    assert misfit(target, requests, 2) < 1


# Broken ones, which must not fit


def resample_from_p(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """`standard` that forgets what a rejection says about the token."""
    verdict = standard.verify(draft, p_BJV, u_BJ)
    p_BV = p_BJV[torch.arange(len(p_BJV)), verdict.num_accepted_B]
    return Verdict(verdict.num_accepted_B, sampling.inverse_cdf(p_BV, u_BJ[:, -1]))


def accept_too_much(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """`standard` that accepts up to 1.4 p / q."""
    return standard.verify(draft, p_BJV, torch.cat([u_BJ[:, :-1] / 1.4, u_BJ[:, -1:]], 1))


def block_without_p_tau(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """`block` whose residual is that of `standard`."""
    verdict = block.verify(draft, p_BJV, u_BJ)
    residual_BV = standard.residual(draft, p_BJV, verdict.num_accepted_B)
    return Verdict(verdict.num_accepted_B, sampling.inverse_cdf(residual_BV, u_BJ[:, -1]))


def match_with_a_second_look(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """`match` that draws the extra token anew, and so may draw what it has just refused."""
    num_accepted_B = match.verify(draft, p_BJV, u_BJ).num_accepted_B
    p_BV = p_BJV[torch.arange(len(p_BJV)), num_accepted_B]
    return Verdict(num_accepted_B, sampling.inverse_cdf(p_BV, (u_BJ[:, 0] * 7919) % 1))


@pytest.mark.parametrize(
    ("verify", "keyed_by"),
    [(resample_from_p, "step"), (accept_too_much, "step"), (match_with_a_second_look, "position")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_verifiers_do_not_fit(verify: Callable[..., Verdict], keyed_by: str) -> None:
    assert misfit(TABLE, decode(TABLE, adverse(), Verifier("broken", True, keyed_by, verify))) > 1


@pytest.mark.parametrize(
    ("verify", "keyed_by", "fits"),
    [
        (block.verify, "step", True),
        (block_without_p_tau, "step", False),
        # uniforms of a position that a round looked at and did not commit are not independent in the next round
        (block.verify, "position", False),
    ],
    ids=["sound", "no-p-tau", "by-position"],
)
def test_broken_block_verifiers_do_not_fit(verify: Callable[..., Verdict], keyed_by: str, fits: bool) -> None:
    """On distributions for which the scale of the residual matters (over two tokens it never does)."""
    target = TableLM.constant(P_OF_BLOCK)
    drafting = drafts_from(Q_OF_BLOCK, 2, target)
    verifier = Verifier("maybe", True, keyed_by, verify)
    assert (misfit(target, decode(target, drafting, verifier, plain(3 * 120), 128), 3) < 1) == fits


@pytest.mark.parametrize("name", ["standard", "block"])
def test_uniforms_used_twice_do_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coin of `test_joint_distribution_of_many_rounds`, which fits there."""
    monkeypatch.setattr(sampling, "DRAFT", sampling.VERIFY)
    target = TableLM.constant([0.3, 0.7])
    requests = decode(target, drafts_from([0.7, 0.3], 2, target), scheme(name), plain(6 * 20), 256)
    assert misfit(target, requests, 6) > 1


class WrongProbs(TableProposer):
    """Says that it drew from a sharper distribution than it did."""

    def propose(self, context: Context) -> Draft:
        draft = super().propose(context)
        assert draft.q_BKV is not None
        draft.q_BKV = (3 * draft.q_BKV.log()).softmax(-1)
        return draft


class Peeking(TableProposer):
    """Takes a token back if it is not to its liking: the length then tells what the token was."""

    def propose(self, context: Context) -> Draft:
        draft = super().propose(context)
        liked_BK = draft.token_BK != 1
        draft.length_B = draft.length_B.minimum(liked_BK.long().cumprod(-1).sum(-1))
        return draft


@pytest.mark.parametrize("name", ["standard", "block"])
@pytest.mark.parametrize("proposing", [WrongProbs, Peeking])
def test_broken_proposers_do_not_fit(proposing: type, name: str) -> None:
    model = f"{__name__}.{proposing.__name__}"
    drafting = method.build("custom_class", TABLE, model=model, num_speculative_tokens=NUM_DRAFT)
    assert misfit(TABLE, decode(TABLE, drafting, scheme(name))) > 1


def test_rejected_tokens_that_stay_in_the_cache_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request per row, so that nothing else wants overwriting: `none` does not notice, a drafter does."""
    target = TableLM.random(3, scale=0.7)
    params = PARAMS.model_copy(update={"max_tokens": 60 * STRETCH})

    def of(drafting: Proposer) -> float:
        return misfit(target, decode(target, drafting, scheme("standard"), params, 64))

    monkeypatch.setattr(target, "new_cache", FirstWriteWins)
    assert of(method.build("none", target)) < 1
    assert of(adverse()) > 1
    monkeypatch.undo()
    assert of(adverse()) < 1


# How much is accepted


def accepted_of_full_drafts(requests: list[Request], num_draft: int) -> np.ndarray:
    """Accepted tokens of every step with a full draft. Whether it is full was known before it was drawn."""
    steps = [step for r in requests for step in zip(r.stats.drafted, r.stats.accepted, strict=True)]
    return np.array([accepted for drafted, accepted in steps if drafted == num_draft])


def test_acceptance_is_what_the_distributions_say() -> None:
    """K = 2, distributions without context: the accepted length has a distribution, too. Block beats standard beats match."""
    p = P_OF_BLOCK
    q = Q_OF_BLOCK
    prefixes = [prefix for n in range(3) for prefix in itertools.product(range(3), repeat=n)]
    tables = dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q)
    overlap = sum(a * b for a, b in zip(p, q, strict=True))
    distribution = {"match": torch.tensor([1 - overlap, overlap * (1 - overlap), overlap**2])}
    distribution |= {
        name: num_accepted_distribution(emitted_distribution(scheme(name), *tables, 3, 2), 2) for name in ("standard", "block")
    }

    target = TableLM.constant(p)
    mean = {}
    for name, probs_J in distribution.items():
        requests = decode(target, drafts_from(q, 2, target), scheme(name), plain(300), 64)
        accepted = accepted_of_full_drafts(requests, 2)
        statistic, threshold = chi_square(torch.from_numpy(np.bincount(accepted, minlength=3)), probs_J)
        assert statistic < threshold, name
        mean[name] = accepted.mean()
        assert abs(mean[name] - float(probs_J @ torch.arange(3.0, dtype=probs_J.dtype))) < 0.03, name
    assert mean["match"] + 0.1 < mean["standard"] < mean["block"] - 0.01


@pytest.mark.parametrize("name", schemes())
@pytest.mark.parametrize("how", ["probabilistic", "greedy"])
def test_a_drafter_that_is_the_target(how: str, name: str) -> None:
    """Where q is p, everything is accepted if the drafter's cache is right at every step: at temperature 0, and by two schemes
    at any."""
    temperature = 0.8 if how == "probabilistic" else 0.0
    params = SamplingParams(temperature=temperature, max_tokens=40)
    requests = decode(TABLE, drafts_of("same", TABLE, how), scheme(name), params, 40, rows=8)
    accepted = [r.stats.accepted == r.stats.drafted for r in requests]
    if temperature == 0 or name in ("standard", "block"):
        assert all(accepted)
    if temperature > 0 and name == "match":
        assert not all(accepted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.8, 0.5, 0.2]}, [0.8, 0.5, 0.2]),
        ({"synthetic_acceptance_length": 2.4}, [1.0, 0.4, 0.0]),
    ],
    ids=["rates", "length"],
)
def test_synthetic_rates_are_reached(changes: dict[str, Any], rates: list[float], temperature: float) -> None:
    """Whatever the drafter is worth: one that is the target, one that is its contrary."""
    params = SamplingParams(temperature=temperature, max_tokens=100)
    verifier = rejection.build("synthetic", NUM_DRAFT, **changes)
    for drafter in ("same", "negated"):
        requests = decode(TABLE, drafts_of(drafter, TABLE), verifier, params, 512, rows=512)
        accepted = accepted_of_full_drafts(requests, NUM_DRAFT)
        assert len(accepted) > 15_000
        reached = [(accepted > i).mean() for i in range(NUM_DRAFT)]
        assert np.abs(np.array(reached) - rates).max() < 1e-2
