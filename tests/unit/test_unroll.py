"""Training-time test: which rows take part at which step, and the attention of the unrolled steps against its readable twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.drafter import unroll

# --------------------------------------------------------------------------------------------------- plan


def supervised(lengths: list[int], mask_N: np.ndarray, k: int) -> list[int]:
    """The rows of step k, in words: token p + 2 + k is in the row's document, and was generated."""
    rows = []
    first = 0
    for length in lengths:
        rows += [first + p for p in range(length) if p + 2 + k < length and mask_N[first + p + 2 + k]]
        first += length
    return rows


def check_plan(lengths: list[int], mask_N: np.ndarray, num_steps: int) -> unroll.Plan:
    """Everything that a plan says, against brute force."""
    plan = unroll.plan(np.array(lengths), mask_N, num_steps)
    want = [supervised(lengths, mask_N, k) for k in range(num_steps)]
    assert len(plan.steps) == num_steps
    assert plan.first_N.tolist() == [sum(lengths[:d]) for d, length in enumerate(lengths) for _ in range(length)]
    assert plan.labelled.tolist() == sorted({p + 1 + k for k in range(num_steps) for p in want[k]})
    for k, step in enumerate(plan.steps):
        assert step.rows.tolist() == sorted(set().union(*want[k:])), "rows that are supervised now or later"
        assert step.rows[step.supervised].tolist() == want[k]
        assert plan.labelled[step.labelled].tolist() == [p + 1 + k for p in want[k]], "the position before the predicted token"
        if k == 0:
            assert step.from_prev is None
            assert step.prev_match.tolist() == [-1] * len(want[0])
            continue
        assert step.from_prev is not None
        assert plan.steps[k - 1].rows[step.from_prev].tolist() == step.rows.tolist()
        assert step.prev_match.tolist() == [want[k - 1].index(p) if p in want[k - 1] else -1 for p in want[k]]
    return plan


def test_rows_are_supervised_by_what_was_generated() -> None:
    """Random masks over several documents, some of which are too short to teach anything."""
    rng = np.random.default_rng(0)
    labelled = 0
    for _ in range(300):
        lengths = rng.integers(1, 12, rng.integers(1, 5)).tolist()
        mask_N = rng.random(sum(lengths)) < rng.choice([0.1, 0.5, 0.9, 1.0])
        labelled += len(check_plan(lengths, mask_N, int(rng.integers(1, 9))).labelled)
    assert labelled > 1000


def test_turns_of_a_conversation() -> None:
    """Tokens 5 and 6 answer tokens 0 to 4, token 8 answers token 7: rows 3 and 4, and row 6; row 2 needs two steps."""
    mask_N = np.isin(np.arange(10), [5, 6, 8])
    plan = check_plan([10], mask_N, 3)
    assert [step.rows[step.supervised].tolist() for step in plan.steps] == [[3, 4, 6], [2, 3, 5], [1, 2, 4]]
    assert [step.rows.tolist() for step in plan.steps] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], [1, 2, 4]]
    assert plan.labelled.tolist() == [4, 5, 7]
    assert [step.prev_match.tolist() for step in plan.steps] == [[-1, -1, -1], [-1, 0, -1], [-1, 0, -1]]


@pytest.mark.parametrize(
    ("lengths", "generated"),
    [([9], []), ([4, 6], []), ([1], [0]), ([2], [0, 1]), ([1, 2, 2, 1], [0, 1, 2, 3, 4, 5]), ([5], [0, 1])],
)
def test_nothing_to_learn_from(lengths: list[int], generated: list[int]) -> None:
    """No mask, documents without a row that predicts, and tokens that no row predicts."""
    plan = check_plan(lengths, np.isin(np.arange(sum(lengths)), generated), 3)
    assert len(plan.labelled) == 0
    assert all(len(step.rows) == len(step.supervised) == len(step.labelled) == 0 for step in plan.steps)


def test_a_short_document_takes_part_in_the_steps_that_it_has() -> None:
    plan = check_plan([1, 4, 2], np.ones(7, dtype=bool), 5)
    assert [step.rows.tolist() for step in plan.steps] == [[1, 2], [1], [], [], []]


# ---------------------------------------------------------------------------------------------- attention


class Case:
    """Random input of an unrolled step: `num_own` steps after the first."""

    def __init__(
        self, lengths: list[int], share: float, num_step_keys: int, heads: tuple[int, int], width: int = 8, seed: int = 0,
        rows: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        noise = torch.Generator().manual_seed(seed)
        num_tokens = sum(lengths)
        (num_heads, groups) = heads
        self.first_N = np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.rows = np.flatnonzero(rng.random(num_tokens) < share) if rows is None else rows
        self.scaling = width**-0.5
        self.num_step_keys = num_step_keys

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, width, generator=noise, dtype=torch.float64)

        step_inputs = [draw(len(self.rows), groups) for _ in range(2 * num_step_keys)]
        # wide queries and keys, so that the weights are far from even
        self.inputs = [3 * draw(len(self.rows), num_heads), draw(num_tokens, groups), draw(num_tokens, groups), *step_inputs]
        self.upstream = draw(len(self.rows), num_heads)

    def run(self, function: Any, dtype: torch.dtype, inputs: list[Tensor] | None = None) -> list[Tensor]:
        """The value and the gradients of all inputs."""
        inputs_in_dtype = [x.to(dtype, copy=True).requires_grad_() for x in inputs or self.inputs]
        step_keys = inputs_in_dtype[3 : 3 + self.num_step_keys]
        step_values = inputs_in_dtype[3 + self.num_step_keys :]
        out = function(*inputs_in_dtype[:3], step_keys, step_values, self.rows, self.first_N, self.scaling)
        out.backward(self.upstream.to(dtype))
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs_in_dtype]
        return [out.detach(), *grads]

    def named(self) -> Iterator[str]:
        step_names = [f"{what} of step {k + 1}" for what in ("own key", "own value") for k in range(self.num_step_keys)]
        yield from ("value", "query", "step-0 key", "step-0 value", *step_names)


def agree(case: Case) -> None:
    """The efficient attention in float32 is the readable one in float64."""
    exact = case.run(unroll.attention_reference, torch.float64)
    for name, got, want in zip(case.named(), case.run(unroll.attention, torch.float32), exact, strict=True):
        scale = max(want.abs().max().item(), 1.0) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("num_step_keys", range(8))
def test_attention_is_the_readable_one(num_step_keys: int, heads: tuple[int, int]) -> None:
    agree(Case([13, 1, 30, 2, 7], 0.6, num_step_keys, heads, seed=num_step_keys))


def test_attention_of_more_rows_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(Case([unroll.QUERIES + 150, 40], 1.0, 2, (4, 2)))
    monkeypatch.setattr(unroll, "QUERIES", 7)
    agree(Case([40, 7, 8, 3], 0.8, 3, (4, 2)))


@pytest.mark.parametrize("rows", [[0], [4], []])
def test_attention_of_one_row_and_of_none(rows: list[int]) -> None:
    """Short documents leave the last steps of a batch without rows."""
    for num_step_keys in (0, 2):
        agree(Case([6], 1.0, num_step_keys, (4, 2), rows=np.array(rows, dtype=np.int64)))


def test_scores_far_apart_make_no_nan() -> None:
    """One weight is 1 and the others underflow; the largest score may be that of an own key."""
    case = Case([9, 12], 0.7, 2, (4, 2))
    for factor in (40.0, 1000.0):
        inputs = [factor * case.inputs[0], *case.inputs[1:]]
        results = case.run(unroll.attention, torch.float32, inputs)
        assert all(torch.isfinite(x).all() for x in results)
        exact = case.run(unroll.attention_reference, torch.float64, inputs)
        torch.testing.assert_close(results[0].double(), exact[0], rtol=0, atol=1e-3)


def test_the_readable_attention_has_the_right_gradient() -> None:
    case = Case([4, 3], 0.8, 2, (2, 1), width=2)
    assert len(case.rows) > 2

    def function(*tensors: Tensor) -> Tensor:
        step_tensors = tensors[3:]
        return unroll.attention_reference(
            *tensors[:3], list(step_tensors[:2]), list(step_tensors[2:]), case.rows, case.first_N, case.scaling
        )

    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in case.inputs])


@pytest.mark.parametrize("function", [unroll.attention, unroll.attention_reference])
def test_a_row_sees_its_past_and_nothing_else(function: Any) -> None:
    """A perturbed key or value changes the rows at and after it in its document; a row's own keys change that row."""
    case = Case([7, 10, 4], 0.7, 2, (4, 2))
    before = case.run(function, torch.float32)[0]
    for token in (0, 3, 6, 7, 12, 16, 20):
        for which in (1, 2):
            inputs = [x.clone() for x in case.inputs]
            inputs[which][token] += 1
            after = case.run(function, torch.float32, inputs)[0]
            changed = (after != before).flatten(1).any(1).numpy()
            sees = (case.rows >= token) & (case.first_N[case.rows] == case.first_N[token])
            assert changed.tolist() == sees.tolist()
    for which in range(3, 7):
        inputs = [x.clone() for x in case.inputs]
        inputs[which][4] += 1
        changed = (case.run(function, torch.float32, inputs)[0] != before).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [4]
