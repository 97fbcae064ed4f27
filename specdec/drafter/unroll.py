"""Training-time test (EAGLE-3, 2503.01840): which rows take part at each unrolled step, and the attention between the steps.

Row p stands for position p of its document: at step 0 the drafter sees (token p+1, target state p) there and predicts token
p+2; at step k it sees token p+1+k and its own state of step k-1, stands at position p+k, and predicts token p+2+k. A row is
supervised at step k if and only if the target generated token p+2+k. At step k a row attends to the keys of step 0 up to
itself, and to its own keys of steps 1 to k.

A drafter that makes all its tokens at once from mask tokens (PARD, P-EAGLE) has the same rows: its k-th mask token sees what
the row saw and the mask tokens before it. A causal LM that reads tokens alone predicts token p+1+k there: its label_offset is 1.

Shape letters: N tokens of a batch, A rows that take part, H query heads, G key heads, W width of a head. Values may be of
another width than keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERIES = 256  # rows of one block of scores


@dataclass
class Step:
    """One unrolled step.

    rows: [A] the rows that are computed: those that are supervised now or later. kept: [A] where these stood among the rows of
    the step before (None at step 0). supervised: places among the rows. labelled: of each supervised row, its place among the
    labelled positions. prev_match: for each supervised row, its place among the supervised rows of the step before, or -1.
    """

    rows: np.ndarray
    kept: np.ndarray | None
    supervised: np.ndarray
    labelled: np.ndarray
    prev_match: np.ndarray


@dataclass
class Plan:
    """steps, and labelled: [Q] positions (in the batch) whose target law is a label: token labelled+1 was generated."""

    steps: list[Step]
    labelled: np.ndarray
    first_A: np.ndarray  # of every token of the batch, where its document begins


def plan(
    length_B: np.ndarray, mask_N: np.ndarray, num_steps: int, label_offset: int = 2, num_steps_N: np.ndarray | None = None
) -> Plan:
    """Rows of every step for documents of these lengths, laid end to end, and their loss mask.

    label_offset: row p predicts token p + label_offset + k at step k; num_steps_N: the number of steps that a row takes part in, if not in all.
    """
    first_N = np.repeat(np.cumsum(length_B) - length_B, length_B)
    generated = np.flatnonzero(mask_N)
    within = generated - first_N[generated]
    generated, within = generated[within >= label_offset], within[within >= label_offset]
    labelled, predict = [], []
    for k in range(num_steps):
        place = np.flatnonzero(within >= label_offset + k)
        if num_steps_N is not None:
            place = place[num_steps_N[generated[place] - label_offset - k] > k]
        labelled.append(place)
        predict.append(generated[place] - label_offset - k)
    steps: list[Step] = []
    for k in range(num_steps):
        rows = np.unique(np.concatenate(predict[k:]))
        before = -np.ones(len(predict[k]), dtype=np.int64)
        if k and len(predict[k - 1]):
            place = np.searchsorted(predict[k - 1], predict[k]).clip(max=len(predict[k - 1]) - 1)
            before = np.where(predict[k - 1][place] == predict[k], place, -1)
        steps.append(
            Step(
                rows=rows,
                kept=np.searchsorted(steps[-1].rows, rows) if k else None,
                supervised=np.searchsorted(rows, predict[k]),
                labelled=labelled[k],
                prev_match=before,
            )
        )
    return Plan(steps, generated - 1, first_N)


def sample_num_steps(
    names: Sequence[str], length_B: np.ndarray, num_steps: int, ratio: float, least: float, seed: int | str
) -> np.ndarray:
    """[N] the number of steps that each row takes part in, when step k keeps `max(ratio^k, least)` of the rows, and none that
    the step before did not have: COD sub-sampling (PARD, 2504.18583).

    Drawn by the sample's name, so that it does not matter in which batch or process it is. ratio 1 keeps all.
    """
    kept_K = np.maximum(ratio ** np.arange(num_steps), least)
    parts = []
    for name, length in zip(names, length_B.tolist(), strict=True):
        order = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode())).permutation(length)
        parts.append((order[:, None] < np.ceil(kept_K * length)).sum(1))
    return np.concatenate(parts)


def blocks(rows: np.ndarray, first_N: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Cut the rows into pieces of one document each: (first row, last row, first key, last key), ends not included."""
    pieces = []
    borders = np.flatnonzero(np.diff(first_N[rows])) + 1
    for part in np.split(np.arange(len(rows)), borders):
        for a in range(0, len(part), QUERIES):
            piece = part[a : a + QUERIES]
            pieces.append((int(piece[0]), int(piece[-1]) + 1, int(first_N[rows[piece[0]]]), int(rows[piece[-1]]) + 1))
    return pieces


class UnrolledAttention:
    """`specdec.model.attention.Attention` of one pass over the steps of a plan. A row reads the keys of step 0, every token's,
    up to its own place, and its own keys of the later steps.

    kernel: `attention`, or `attention_reference`.
    """

    def __init__(self, plan: Plan, kernel: Any = None):
        self.plan = plan
        self.kernel = attention if kernel is None else kernel
        self.step = 0
        self.keys: dict[int, list[Tensor]] = {}  # by layer, step by step
        self.values: dict[int, list[Tensor]] = {}

    def next_step(self, kept_A: Tensor | None) -> None:
        """kept_A: places, among the rows of the step before, of the rows that take part; None: all of them do."""
        self.step += 1
        if kept_A is not None:
            for memory in (*self.keys.values(), *self.values.values()):
                memory[1:] = [x[kept_A] for x in memory[1:]]

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        self.keys.setdefault(layer, []).append(key_NGW)
        self.values.setdefault(layer, []).append(value_NGW)

    def attend(
        self,
        layer: int,
        query_AHW: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert sliding_window is None
        assert softcap is None
        first_N = self.plan.first_A
        # a layer that is not the last computes every row at step 0, since the next one reads all of them
        every = not self.step and len(query_AHW) == len(first_N)
        rows = np.arange(len(first_N)) if every else self.plan.steps[self.step].rows
        keys = self.keys[layer]
        values = self.values[layer]
        scaling = scaling or query_AHW.shape[-1] ** -0.5
        return self.kernel(query_AHW, keys[0], values[0], keys[1:], values[1:], rows, first_N, scaling)


def attention(
    query_AHW: Tensor, key_NGW: Tensor, value_NGW: Tensor, own_key: list[Tensor], own_value: list[Tensor],
    rows: np.ndarray, first_N: np.ndarray, scaling: float,
) -> Tensor:  # fmt: skip
    """[A, H, W]. key_NGW, value_NGW: of step 0, every token of the batch; own_key, own_value: [A, G, W] of steps 1 .. k.

    Keeps no scores for the backward pass: they are made again, block by block. `attention_reference` is the same in plain words.
    """
    return _Attention.apply(query_AHW, key_NGW, value_NGW, rows, first_N, scaling, *own_key, *own_value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Any, first_N: Any, scaling: float, *own: Tensor
    ) -> Any:
        num_rows, num_heads, width = query.shape
        groups = key.shape[1]
        q = (query * scaling).view(
            num_rows, groups, num_heads // groups, width
        )  # query heads that share a key head side by side
        steps = len(own) // 2
        own_key, own_value = own[:steps], own[steps:]
        # the row's own keys: one score per step
        own_score = [(q * k.unsqueeze(2)).sum(-1).float() for k in own_key]
        out, lse = q.new_empty((*q.shape[:3], value.shape[2])), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        row_A = torch.from_numpy(rows).to(q.device)
        for a, b, first, last in blocks(rows, first_N):
            score = _scores(q[a:b], key[first:last], row_A[a:b] - first)
            top = score.amax(-1)
            for own_s in own_score:
                top = torch.maximum(top, _fold(own_s[a:b]))
            weight = (score - top.unsqueeze(-1)).exp_()
            total = weight.sum(-1)
            part = torch.matmul(weight.to(value.dtype), value[first:last].transpose(0, 1)).float()
            for own_s, v in zip(own_score, own_value, strict=True):
                own_w = (_fold(own_s[a:b]) - top).exp()
                total = total + own_w
                part += own_w.unsqueeze(-1) * _fold(v[a:b].unsqueeze(2).expand(-1, -1, q.shape[2], -1)).float()
            out[a:b] = _unfold(part / total.unsqueeze(-1), b - a).to(out.dtype)
            lse[a:b] = _unfold(top + total.log(), b - a)
        ctx.save_for_backward(query, key, value, out, lse, *own)
        ctx.rest = rows, first_N, scaling
        return out.view(num_rows, num_heads, value.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse, *own = ctx.saved_tensors
        rows, first_N, scaling = ctx.rest
        num_rows, num_heads, width = query.shape
        groups, steps = key.shape[1], len(own) // 2
        q = (query * scaling).view(num_rows, groups, num_heads // groups, width)
        grad = grad.reshape(out.shape).to(q.dtype)
        centre = (grad.float() * out.float()).sum(-1)  # what softmax takes off every weight's gradient
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        grad_key = torch.zeros(key.shape, dtype=torch.float32, device=q.device)
        grad_value = torch.zeros(value.shape, dtype=torch.float32, device=q.device)
        row_A = torch.from_numpy(rows).to(q.device)
        for a, b, first, last in blocks(rows, first_N):
            score = _scores(q[a:b], key[first:last], row_A[a:b] - first)
            weight = (score - _fold(lse[a:b]).unsqueeze(-1)).exp_()
            own_grad, v_block = _fold(grad[a:b]), value[first:last].transpose(0, 1)
            grad_value[first:last] += torch.matmul(weight.to(grad.dtype).transpose(1, 2), own_grad).transpose(0, 1)
            slope = torch.matmul(own_grad, v_block.transpose(1, 2)).float()
            slope = slope.sub_(_fold(centre[a:b]).unsqueeze(-1)).mul_(weight).to(q.dtype)
            grad_q[a:b] = _unfold(torch.matmul(slope, key[first:last].transpose(0, 1)), b - a)
            grad_key[first:last] += torch.matmul(slope.transpose(1, 2), _fold(q[a:b])).transpose(0, 1)
        grad_own_key, grad_own_value = [], []
        for k, v in zip(own[:steps], own[steps:], strict=True):
            weight = ((q * k.unsqueeze(2)).sum(-1).float() - lse).exp()
            slope = weight * ((grad * v.unsqueeze(2)).sum(-1).float() - centre)
            grad_q += slope.unsqueeze(-1) * k.unsqueeze(2)
            grad_own_key.append((slope.unsqueeze(-1) * q).sum(2).to(k.dtype))
            grad_own_value.append((weight.unsqueeze(-1) * grad).sum(2).to(v.dtype))
        grad_query = (grad_q * scaling).view(query.shape).to(query.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None, *grad_own_key, *grad_own_value


def _fold(x_AGR: Tensor) -> Tensor:
    """[A, G, R, ...] -> [G, A * R, ...]: one matrix of rows for every key head."""
    return x_AGR.transpose(0, 1).flatten(1, 2)


def _unfold(x: Tensor, num_rows: int) -> Tensor:
    """The inverse of `_fold`."""
    return x.unflatten(1, (num_rows, -1)).transpose(0, 1)


def _scores(q_AGRW: Tensor, key_SGW: Tensor, place_A: Tensor) -> Tensor:
    """[G, A * R, S] float32 scores; the keys after a row's own place are out of its sight."""
    score = torch.matmul(_fold(q_AGRW), key_SGW.permute(1, 2, 0)).float()
    hidden_AS = torch.arange(key_SGW.shape[0], device=score.device) > place_A.unsqueeze(1)
    return score.masked_fill_(hidden_AS.repeat_interleave(q_AGRW.shape[2], 0), float("-inf"))


def attention_reference(
    query_AHW: Tensor, key_NGW: Tensor, value_NGW: Tensor, own_key: list[Tensor], own_value: list[Tensor],
    rows: np.ndarray, first_N: np.ndarray, scaling: float,
) -> Tensor:  # fmt: skip
    """`attention` with one dense mask over all keys of all steps: [A, N + A * k]."""
    num_rows, num_tokens, repeat = len(rows), len(first_N), query_AHW.shape[1] // key_NGW.shape[1]
    row_A, first_A, token_N = torch.from_numpy(rows), torch.from_numpy(first_N[rows]), torch.arange(num_tokens)
    sees_step_0 = (token_N <= row_A.unsqueeze(1)) & (token_N >= first_A.unsqueeze(1))
    sees_own = torch.eye(num_rows, dtype=torch.bool).repeat(1, len(own_key))
    mask = torch.cat([sees_step_0, sees_own], 1).to(query_AHW.device)
    keys = torch.cat([key_NGW, *own_key]).repeat_interleave(repeat, 1)
    values = torch.cat([value_NGW, *own_value]).repeat_interleave(repeat, 1)
    score = torch.einsum("ahw,khw->hak", query_AHW * scaling, keys)
    weight = score.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hak,khw->ahw", weight, values)


def masked_attention(sliding_window: int | None, softcap: float | None) -> Any:
    """`attention` for layers that look back a number of positions only, or bend their scores: with masks, and autograd
    keeps the scores. Without both it computes what `attention` does."""

    def kernel(
        query_AHW: Tensor, key_NGW: Tensor, value_NGW: Tensor, own_key: list[Tensor], own_value: list[Tensor],
        rows: np.ndarray, first_N: np.ndarray, scaling: float,
    ) -> Tensor:  # fmt: skip
        depth, repeat, device = len(own_key), query_AHW.shape[1] // key_NGW.shape[1], query_AHW.device
        least = -(2**62) if sliding_window is None else depth - sliding_window  # places behind the row that are too far back
        out = [query_AHW[:0, :, :1].expand(-1, -1, value_NGW.shape[2])]
        for a, b, first, last in blocks(rows, first_N):
            behind = torch.arange(first, last, device=device) - torch.from_numpy(rows[a:b]).to(device).unsqueeze(1)
            seen = (behind <= 0) & (behind > least)
            keys, values = (x[first:last].repeat_interleave(repeat, 1) for x in (key_NGW, value_NGW))
            score = torch.einsum("ahw,khw->hak", query_AHW[a:b] * scaling, keys)
            near = [i for i in range(depth) if sliding_window is None or depth - 1 - i < sliding_window]
            own = [(query_AHW[a:b] * scaling * own_key[i][a:b].repeat_interleave(repeat, 1)).sum(-1).t() for i in near]
            score = torch.cat([score, *(x.unsqueeze(-1) for x in own)], -1).float()
            if softcap is not None:
                score = torch.tanh(score / softcap) * softcap
            seen = torch.cat([seen, seen.new_ones(b - a, len(near))], 1)
            weight = score.masked_fill(~seen, float("-inf")).softmax(-1).to(values.dtype)
            part = torch.einsum("hak,khw->ahw", weight[..., : last - first], values)
            for place, i in enumerate(near, last - first):
                part = part + weight[..., place].t().unsqueeze(-1) * own_value[i][a:b].repeat_interleave(repeat, 1)
            out.append(part)
        return torch.cat(out)

    return kernel
