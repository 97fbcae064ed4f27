"""Stretches of many answers held against the joint distribution of a table model by chi-square."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdec.core import Policy, Proposer, Request
from specdec.engine import Engine
from specdec.params import SamplingParams
from specdec.rejection import Verifier
from support.distributions import chi_square, code
from support.table import NUM_DRAFT, TableLM, joint_distribution, proposer

# a step of many rows costs little more than one of few; fewer than there are requests, so that rows are reused
ROWS = 250


STRETCH = NUM_DRAFT + 1


# of several lengths and with the same end, so that the rows of a batch are out of step; with the same set of
# tokens, so that penalties take them for the same
PROMPTS = [[0, 1], [1, 0, 1], [1, 0, 0, 0, 1]]


PARAMS = SamplingParams(temperature=0.8, max_tokens=16 * STRETCH)


TABLE = TableLM.random(3, scale=0.7)


LONG = pytest.param(10, id="long", marks=pytest.mark.prove)


def decode(
    target: TableLM,
    drafting: Proposer,
    verifier: Verifier,
    params: SamplingParams = PARAMS,
    num_requests: int = 400,
    rows: int = ROWS,
    deciding: Policy | None = None,
) -> list[Request]:
    """Run that many requests, each with a seed of its own. There are more than rows, so rows are reused."""
    engine = Engine(target, drafting, verifier, rows, prefill_chunk_size=2, policy=deciding)
    requests = [Request(str(i), PROMPTS[i % len(PROMPTS)], params, seed=i) for i in range(num_requests)]
    assert sum(1 for _ in engine.run(requests)) == num_requests
    return requests


def misfit(target: TableLM, requests: list[Request], stretch: int = STRETCH) -> float:
    """Chi-square of the joint distribution of (two tokens before, stretch), over its threshold. Below 1 it fits."""
    vocab = target.vocab_size
    params = requests[0].params
    penalises = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    assert params.max_tokens == stretch or not penalises, "with penalties the distribution depends on more"
    # with the last two of the prompt, every stretch has two tokens before it
    token_BL = torch.tensor([[*r.prompt_token_ids[-2:], *r.output_token_ids] for r in requests])
    token_NL = token_BL.unfold(1, stretch + 2, stretch).flatten(0, 1)
    count_CX = torch.bincount(code(token_NL, vocab), minlength=vocab ** (stretch + 2)).view(vocab**2, -1)
    pairs = itertools.product(range(vocab), repeat=2)
    probs_CX = torch.stack([joint_distribution(target, pair, params, stretch) for pair in pairs])
    # pairs after which the distribution is the same count as one
    probs_CX, same_C = probs_CX.unique(dim=0, return_inverse=True)
    count_CX = torch.zeros_like(probs_CX, dtype=torch.int64).index_add_(0, same_C, count_CX)
    statistic, threshold = chi_square(count_CX, count_CX.sum(1, keepdim=True) * probs_CX)
    return statistic / max(threshold, 1.0)


def drafts_of(
    model: str | TableLM,
    target: TableLM,
    how: str = "probabilistic",
    num_draft: int = NUM_DRAFT,
) -> Proposer:
    settings = {"model": model, "num_speculative_tokens": num_draft, "draft_sample_method": how}
    return proposer(("draft_model", settings), target)


def adverse(target: TableLM = TABLE) -> Proposer:
    """Draws from a distribution that is nearly the contrary of the target's: most drafts are rejected somewhere."""
    return drafts_of("negated", target)
