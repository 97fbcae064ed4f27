"""Distributions of verification schemes on small vocabularies: exact by bisection, statistical by chi-square.

A *table* maps a prefix of token ids to the distribution of the next token: `{(): [...], (0,): [...], (0, 1): [...]}`.
`verify` is any `(draft, p_BJV, u_BJ) -> Verdict`. It is a black box here: only its answers are looked at, so
the same functions measure our schemes and the broken ones that a test must be able to tell from them.
Shape letters are those of specdec/core.py; S counts patterns of accepted and refused positions.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.core import Draft, Verdict
from specdec.sampling import inverse_cdf

Table = dict[tuple[int, ...], list[float]]
Verify = Callable[[Draft, Tensor, Tensor], Verdict]
Distribution = dict[tuple[int, tuple[int, ...]], float]  # (num_accepted, emitted tokens) -> probability
Length = Callable[[tuple[int, ...]], int]  # how many tokens of a full draft path are offered

ALMOST_ONE = 1 - 2.0**-53  # the largest uniform there is


# Reading the vectors


def vectors(name: str = "verification") -> dict[str, Any]:
    return json.loads((Path(__file__).parents[1] / "vectors" / f"{name}.json").read_text())


def table(entry: dict[str, Any]) -> Table:
    """A table as the vectors write it: `{"0,1": {"val": [...]}}`."""
    return {tuple(int(token) for token in key.split(",") if token): row["val"] for key, row in entry.items()}


def table_rows(table: Table, prefix: Sequence[int]) -> Tensor:
    """[len(prefix) + 1, V] float64: the distribution that each token of the prefix meets, then the one after it."""
    return torch.tensor([table[tuple(prefix[:i])] for i in range(len(prefix) + 1)], dtype=torch.float64)


def lookup(table: Table, token_BL: Tensor) -> Tensor:
    """[B, L + 1, V]: `table_rows` of many prefixes at once."""
    return torch.stack([next_probs(table, token_BL[:, :i]) for i in range(token_BL.shape[1] + 1)], 1)


def next_probs(table: Table, token_BL: Tensor) -> Tensor:
    """[B, V] the distribution after each prefix."""
    vocab = len(table[()])
    level = [table[prefix] for prefix in itertools.product(range(vocab), repeat=token_BL.shape[1])]
    return torch.tensor(level, dtype=torch.float64)[code(token_BL, vocab)]


def code(token_BL: Tensor, vocab: int) -> Tensor:
    """[B] the number that a sequence spells in base `vocab`: its place in `sequences`."""
    number_B = torch.zeros(token_BL.shape[0], dtype=torch.int64)
    for column_B in token_BL.unbind(1):
        number_B = number_B * vocab + column_B
    return number_B


def sequences(vocab: int, length: int) -> Tensor:
    """[vocab ** length, length] every sequence of that length, in order."""
    return torch.tensor(list(itertools.product(range(vocab), repeat=length))).reshape(vocab**length, length)


def target_joint(p_table: Table, vocab: int, length: int) -> Tensor:
    """[vocab ** length] the distribution of the first `length` tokens under a table."""
    token_NL = sequences(vocab, length)
    return lookup(p_table, token_NL[:, :-1]).gather(-1, token_NL.unsqueeze(-1)).squeeze(-1).prod(-1)


def tv(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum()) / 2


# Exact distributions


def bisect(holds: Callable[[Tensor], Tensor], size: int, bits: int = 53) -> Tensor:
    """[size] for each entry the u up to which `holds(u)` is true, to that many bits; a uniform has 53."""
    low = torch.zeros(size, dtype=torch.float64)
    high = torch.ones(size, dtype=torch.float64)
    for _ in range(bits):
        middle = (low + high) / 2
        below = holds(middle)
        low = torch.where(below, middle, low)
        high = torch.where(below, high, middle)
    return high


def repeated(draft: Draft, p_BJV: Tensor, times: int) -> tuple[Draft, Tensor]:
    """Every row `times` times in succession."""
    q_BKV = None if draft.q_BKV is None else draft.q_BKV.repeat_interleave(times, 0)
    length_B = draft.length_B.repeat_interleave(times)
    parent_BK = None if draft.parent_BK is None else draft.parent_BK.repeat_interleave(times, 0)
    copies = Draft(draft.token_BK.repeat_interleave(times, 0), length_B, q_BKV, parent_BK)
    return copies, p_BJV.repeat_interleave(times, 0)


def thresholds(verify: Verify, draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K] where the decision at each position flips: it accepts iff its uniform is below.

    Column i is watched with the columns before it at 0 and those after it just below 1. A threshold that
    another one hides (a 0 before it in `standard`, a 1 after it in `block`) cannot be seen; it reads 0 or 1.
    """
    num_rows, num_draft = draft.token_BK.shape
    watched_K = torch.arange(num_draft)
    after_KJ = torch.arange(num_draft + 1) > watched_K.unsqueeze(-1)
    copies, p_NJV = repeated(draft, p_BJV, num_draft)
    u_NJ = (after_KJ.double() * ALMOST_ONE).repeat(num_rows, 1)
    watched_N = watched_K.repeat(num_rows)

    def is_accepted(u_N: Tensor) -> Tensor:
        u_NJ[torch.arange(len(u_N)), watched_N] = u_N
        return verify(copies, p_NJV, u_NJ).num_accepted_B > watched_N

    return bisect(is_accepted, num_rows * num_draft).reshape(num_rows, num_draft)


def _patterns(verify: Verify, draft: Draft, p_BJV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What happens for each way in which the uniforms can fall below or above their thresholds.

    Returns u_BSK (a representative), weight_BS (its probability) and num_accepted_BS.
    """
    num_rows, num_draft = draft.token_BK.shape
    low_SK = sequences(2, num_draft).bool()
    flip_BSK = thresholds(verify, draft, p_BJV).unsqueeze(1)
    u_BSK = torch.where(low_SK, flip_BSK / 2, (1 + flip_BSK) / 2).clamp(max=ALMOST_ONE)
    weight_BS = torch.where(low_SK, flip_BSK, 1 - flip_BSK).prod(-1)
    copies, p_NJV = repeated(draft, p_BJV, len(low_SK))
    u_NJ = torch.nn.functional.pad(u_BSK.flatten(0, 1), (0, 1), value=0.5)
    return u_BSK, weight_BS, verify(copies, p_NJV, u_NJ).num_accepted_B.reshape(num_rows, -1)


def acceptance_distribution(verify: Verify, draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K + 1] the exact distribution of the number of accepted tokens, for each row's own draft."""
    _, weight_BS, num_accepted_BS = _patterns(verify, draft, p_BJV)
    return weight_BS.new_zeros(p_BJV.shape[:2]).scatter_add_(1, num_accepted_BS, weight_BS)


def extra_token_distribution(verify: Verify, draft: Draft, p_BJV: Tensor, u_BK: Tensor) -> Tensor:
    """[B, V] the exact distribution of the extra token, given the uniforms that decide acceptance.

    The extra token is an inverse-CDF sample in the order of the ids, so where it steps up as u[:, K] grows
    gives its distribution.
    """
    num_rows = u_BK.shape[0]
    vocab = p_BJV.shape[-1]
    copies, p_NJV = repeated(draft, p_BJV, vocab - 1)
    u_NK = u_BK.repeat_interleave(vocab - 1, 0)
    token_N = torch.arange(vocab - 1).repeat(num_rows)

    def at_most(u_N: Tensor) -> Tensor:
        return verify(copies, p_NJV, torch.cat([u_NK, u_N.unsqueeze(-1)], 1)).token_B <= token_N

    edge_BV = bisect(at_most, len(token_N)).reshape(num_rows, vocab - 1)
    return torch.nn.functional.pad(edge_BV, (1, 0)).diff(dim=-1, append=edge_BV.new_ones(num_rows, 1))


def verdict_distribution(verify: Verify, draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K + 1, V] the exact distribution of (num_accepted, extra token), for each row's own draft."""
    u_BSK, weight_BS, num_accepted_BS = _patterns(verify, draft, p_BJV)
    copies, p_NJV = repeated(draft, p_BJV, u_BSK.shape[1])
    extra_BSV = extra_token_distribution(verify, copies, p_NJV, u_BSK.flatten(0, 1)).unflatten(0, weight_BS.shape)
    index_BSV = num_accepted_BS.unsqueeze(-1).expand_as(extra_BSV)
    return torch.zeros_like(p_BJV).scatter_add_(1, index_BSV, weight_BS.unsqueeze(-1) * extra_BSV)


def all_drafts(
    q_table: Table, vocab: int, gamma: int, one_hot: bool = False, length: Length | None = None
) -> tuple[Draft, Tensor]:
    """Every draft path that can be drawn, with its probability [B].

    one_hot: hand over no q, as a deterministic drafter does; then q_table must be one-hot.
    length: offer only the first so many tokens of a path; what is beyond them is padding.
    """
    token_BK = sequences(vocab, gamma)
    q_BKV = lookup(q_table, token_BK[:, :-1])
    weight_B = q_BKV.gather(-1, token_BK.unsqueeze(-1)).squeeze(-1).prod(-1)
    possible_B = weight_B > 0
    token_BK = token_BK[possible_B]
    q_BKV = q_BKV[possible_B]
    weight_B = weight_B[possible_B]
    assert not one_hot or len(weight_B) == 1, "a deterministic drafter draws one path only"
    length_B = torch.tensor([length(tuple(x)) if length else gamma for x in token_BK.tolist()])
    return Draft(token_BK, length_B, None if one_hot else q_BKV), weight_B


def emitted_distribution(
    verify: Verify,
    p_table: Table,
    q_table: Table,
    vocab: int,
    gamma: int,
    one_hot: bool = False,
    length: Length | None = None,
) -> Distribution:
    """The exact distribution of (num_accepted, emitted tokens), over drafts drawn from q_table and uniforms.

    Exact for every scheme whose position i looks at u_i alone and accepts below a threshold: `standard`,
    `block` and `synthetic` do; `match` (an interval of u_i) does not. one_hot and length: see `all_drafts`.
    """
    draft, weight_B = all_drafts(q_table, vocab, gamma, one_hot, length)
    mass_BJV = verdict_distribution(verify, draft, lookup(p_table, draft.token_BK)) * weight_B[:, None, None]
    distribution: Distribution = {}
    for path, mass_JV in zip(draft.token_BK.tolist(), mass_BJV.tolist(), strict=True):
        for num_accepted, mass_V in enumerate(mass_JV):
            for token, weight in enumerate(mass_V):
                if weight > 1e-14:  # below is the rounding of the bisection
                    key = (num_accepted, (*path[:num_accepted], token))
                    distribution[key] = distribution.get(key, 0.0) + weight
    return distribution


def num_accepted_distribution(distribution: Distribution, gamma: int) -> Tensor:
    """[gamma + 1] P(exactly k accepted) out of an `emitted_distribution`."""
    tau = torch.zeros(gamma + 1, dtype=torch.float64)
    for (num_accepted, _), weight in distribution.items():
        tau[num_accepted] += weight
    return tau


def completed_joint(distribution: Distribution, p_table: Table, vocab: int, length: int) -> Tensor:
    """[vocab ** length] the distribution of the first `length` tokens, the target going on after what a step emitted.

    A scheme is lossless on these tables exactly if this equals `target_joint`.
    """
    joint = torch.zeros(vocab**length, dtype=torch.float64)
    token_NL = sequences(vocab, length)
    p_NL = lookup(p_table, token_NL[:, :-1]).gather(-1, token_NL.unsqueeze(-1)).squeeze(-1)
    for (_, tokens), weight in distribution.items():
        tokens = tokens[:length]
        begins = (token_NL[:, : len(tokens)] == torch.tensor(tokens)).all(-1)
        joint += torch.where(begins, weight * p_NL[:, len(tokens) :].prod(-1), 0.0)
    return joint


# Simulation


def simulate(
    verify: Verify,
    p_table: Table,
    q_table: Table,
    vocab: int,
    gamma: int,
    rows: int = 200_000,
    seed: int = 0,
    one_hot: bool = False,
    length: Length | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of `rows` requests in one call: num_accepted_B, and emitted tokens completed by the target.

    Returns [B] and [B, gamma + 1]. This sees what `emitted_distribution` takes for granted, and it works for `match`.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    token_BK = torch.empty(rows, 0, dtype=torch.int64)
    for _ in range(gamma):
        next_B = inverse_cdf(next_probs(q_table, token_BK), noise(rows))
        token_BK = torch.cat([token_BK, next_B.unsqueeze(-1)], 1)
    length_B = torch.full((rows,), gamma)
    if length is not None:
        length_by_code = torch.tensor([length(tuple(x)) for x in sequences(vocab, gamma).tolist()])
        length_B = length_by_code[code(token_BK, vocab)]
    q_BKV = None if one_hot else lookup(q_table, token_BK[:, :-1])
    verdict = verify(Draft(token_BK, length_B, q_BKV), lookup(p_table, token_BK), noise(rows, gamma + 1))
    return verdict.num_accepted_B, complete(token_BK, verdict, p_table, noise(rows, gamma + 1))


def complete(token_BK: Tensor, verdict: Verdict, p_table: Table, u_BJ: Tensor) -> Tensor:
    """[B, K + 1] accepted tokens, the extra token, and from there on samples of the target."""
    emitted_BJ = torch.nn.functional.pad(token_BK, (0, 1))
    for j in range(emitted_BJ.shape[1]):
        fresh_B = inverse_cdf(next_probs(p_table, emitted_BJ[:, :j]), u_BJ[:, j])
        after_B = torch.where(j == verdict.num_accepted_B, verdict.token_B, fresh_B)
        emitted_BJ[:, j] = torch.where(j < verdict.num_accepted_B, emitted_BJ[:, j], after_B)
    return emitted_BJ


def chi_square(observed_counts: Tensor, expected_probs: Tensor) -> tuple[float, float]:
    """(statistic, threshold): a sample fits the distribution iff statistic < threshold = df + 10 * sqrt(2 * df).

    That is about ten standard deviations (vLLM's rule), so a fit never fails by chance. Bins that expect
    fewer than 5 are merged into one; a count where the distribution has no mass makes the statistic infinite.
    """
    observed = observed_counts.double().flatten()
    probs = expected_probs.double().flatten()
    if bool((observed[probs <= 0] > 0).any()):
        return math.inf, 0.0
    expected, order = (probs / probs.sum() * observed.sum())[probs > 0].sort()
    observed = observed[probs > 0][order]
    small = int((expected < 5).sum())
    if small and float(expected[:small].sum()) < 5:
        small += 1  # the rare ones together are still too few: the rarest of the others joins them
    if small:
        expected = torch.cat([expected[:small].sum().reshape(1), expected[small:]])
        observed = torch.cat([observed[:small].sum().reshape(1), observed[small:]])
    df = max(len(expected) - 1, 1)
    return float(((observed - expected) ** 2 / expected).sum()), df + 10 * math.sqrt(2 * df)


def fits(observed_tokens: Tensor, expected_probs: Tensor, vocab: int) -> bool:
    """Do sequences [B, L] have the joint distribution [vocab ** L]? By `chi_square`."""
    counts = torch.bincount(code(observed_tokens, vocab), minlength=len(expected_probs))
    statistic, threshold = chi_square(counts, expected_probs)
    return statistic < threshold
