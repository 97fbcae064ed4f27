"""Typical acceptance, by hand: thresholds, the longest path of a tree, and the token after it."""

from __future__ import annotations

import math

import pytest
import torch

from specdec import rejection
from specdec.core import Draft

# rows of p with their thresholds: min(.09, .3 exp(-H))
SURE = [0.9, 0.06, 0.03, 0.01]  # H = .4149, .3 exp(-H) = .198: .09
FLAT = [0.25, 0.25, 0.25, 0.25]  # H = log 4: .075
WIDE = [0.4, 0.3, 0.22, 0.08]  # H = 1.2629: .0849


def test_the_thresholds_are_those_of_the_comments() -> None:
    entropies = [-sum(x * math.log(x) for x in row) for row in (SURE, FLAT, WIDE)]
    assert [min(0.09, 0.3 * math.exp(-entropy)) for entropy in entropies] == pytest.approx([0.09, 0.075, 0.0849], abs=1e-4)


def verdict(draft: Draft, rows: list[list[list[float]]], u: float = 0.5, **settings: float) -> rejection.Verdict:
    p_BJV = torch.tensor(rows)
    u_BJ = torch.full(p_BJV.shape[:2], u, dtype=torch.float64)
    return rejection.build("typical", **settings)(draft, p_BJV, u_BJ)


def chain(*tokens: int) -> Draft:
    return Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]))


def tree(tokens: list[int], parents: list[int]) -> Draft:
    return Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), parent_BK=torch.tensor([parents]))


@pytest.mark.parametrize(
    ("tokens", "num_accepted"), [((0, 0, 2), 3), ((1, 0, 2), 0), ((0, 3, 3), 2), ((0, 0, 3), 2), ((2, 0, 0), 0)]
)
def test_a_chain(tokens: tuple[int, ...], num_accepted: int) -> None:
    """.06 < .09, .25 > .075, .08 < .0849."""
    got = verdict(chain(*tokens), [[SURE, FLAT, WIDE, SURE]])
    assert got.num_accepted_B.tolist() == [num_accepted]
    assert got.path_BK is None


def test_settings() -> None:
    rows = [[SURE, FLAT]]
    assert verdict(chain(1), rows, posterior_threshold=0.05).num_accepted_B.tolist() == [1]
    assert verdict(chain(1), rows, posterior_threshold=0.5, posterior_alpha=0.08).num_accepted_B.tolist() == [1]
    assert verdict(chain(1), rows, posterior_threshold=0.5).num_accepted_B.tolist() == [0]
    for key in ("posterior_threshold", "posterior_alpha"):
        with pytest.raises(ValueError, match=f"{key}=1 must be above 0 and below 1"):
            rejection.build("typical", **{key: 1})


@pytest.mark.parametrize(("u", "token"), [(0.1, 0), (0.89, 0), (0.91, 1), (0.995, 3)])
def test_the_token_after_a_rejection_is_sampled_from_p(u: float, token: int) -> None:
    """From all of it: the token that was rejected may come, with the chance that it has."""
    got = verdict(chain(1), [[SURE, FLAT]], u)
    assert got.num_accepted_B.tolist() == [0]
    assert got.token_B.tolist() == [token]


def test_a_tree_gives_its_longest_path() -> None:
    """Children of the root 0 and, unlikely, 1; below 0 come 3 and 2, and below 2 again 0. All but 1 are likely enough."""
    draft = tree([0, 1, 3, 2, 0], [-1, -1, 0, 0, 3])
    rows = [[SURE, FLAT, SURE, SURE, WIDE, SURE]]  # after the root, and after each node
    got = verdict(draft, rows, u=0.95)
    assert got.num_accepted_B.tolist() == [3]
    assert got.path_BK is not None
    assert got.path_BK[0, :3].tolist() == [0, 3, 4]
    assert got.token_B.tolist() == [1], "from p after node 4"
    # without it two paths are of length 2, and the first one is taken
    got = verdict(tree([0, 1, 3, 2], [-1, -1, 0, 0]), [rows[0][:5]], u=0.95)
    assert got.num_accepted_B.tolist() == [2]
    assert got.path_BK is not None
    assert got.path_BK[0, :2].tolist() == [0, 2]
    assert got.token_B.tolist() == [1]


def test_nothing_below_a_rejected_node_is_accepted() -> None:
    got = verdict(tree([1, 0, 0], [-1, 0, 1]), [[SURE, SURE, SURE, SURE]], u=0.95)
    assert got.num_accepted_B.tolist() == [0]
    assert got.token_B.tolist() == [1]


def test_at_temperature_0_only_the_likeliest_token_is() -> None:
    one = [0.0, 1.0, 0.0]
    two = [0.0, 0.0, 1.0]
    got = verdict(tree([0, 1, 2, 1], [-1, -1, 1, 1]), [[one, two, two, one, one]])
    assert got.num_accepted_B.tolist() == [2]
    assert got.path_BK is not None
    assert got.path_BK[0, :2].tolist() == [1, 2]
    assert got.token_B.tolist() == [1]
    got = verdict(chain(1, 1), [[one, two, one]])
    assert (got.num_accepted_B.tolist(), got.token_B.tolist()) == ([1], [2])


def test_rows_are_ragged() -> None:
    draft = Draft(torch.tensor([[0, 0], [0, 0], [0, 0]]), torch.tensor([2, 1, 0]))
    assert verdict(draft, [[SURE] * 3] * 3).num_accepted_B.tolist() == [2, 1, 0]
