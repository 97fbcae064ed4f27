"""From logits to probabilities to tokens.

Everything random comes in as uniforms in [0, 1) that are a pure function of (seed, stream, index, column), so a request's
uniforms depend neither on its batch mates nor on its row or the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import gumbel, tree
from specdec.params import GREEDY_BELOW, SamplingParams

# streams: uniforms that verify a draft must be independent of those that sampled it, and of those that seeds come from
VERIFY = 0
DRAFT = 1
SEED = 2

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit words that spreads every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: np.ndarray, stream: int, index: np.ndarray, column: np.ndarray | int) -> np.ndarray:
    """Uniforms in [0, 1), float64 with 53 random bits. The arguments broadcast.

    seed: of the request.
    stream: VERIFY, DRAFT or SEED.
    index: the step, or the output position.
    column: within the step.
    """
    with np.errstate(over="ignore"):
        key = np.asarray(seed, dtype=np.int64).astype(np.uint64)
        for part in (stream, index, column):
            word = np.asarray(part, dtype=np.int64).astype(np.uint64)
            key = _mix((key + _GOLDEN) ^ _mix(word + _GOLDEN))
        return (_mix(key + _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def inverse_cdf(weight_BV: Tensor, u_B: Tensor) -> Tensor:
    """Sample token ids from unnormalised non-negative weights: the first id whose cumulative weight exceeds u * total.

    weight_BV: [..., V]; float64 inside. A token of weight 0 is never returned.
    u_B: [...] in [0, 1).
    """
    cumulative = weight_BV.double().cumsum(-1)
    point = (u_B.to(cumulative.device) * cumulative[..., -1]).unsqueeze(-1)
    token = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    # u * total can round up to the total; the answer then is the last token that has weight
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous()).squeeze(-1)
    return torch.minimum(token, last).clamp(max=weight_BV.shape[-1] - 1)  # a row of NaN stays in range too


def one_hot(token: Tensor, vocab_size: int) -> Tensor:
    """[...] -> [..., V] float32 distributions that put everything on one token."""
    p = torch.zeros(*token.shape, vocab_size, device=token.device)
    return p.scatter_(-1, token.unsqueeze(-1), 1.0)


def finite(max_N: Tensor) -> Tensor:
    """Whether lines of logits define a distribution, by the largest of each: that is nan if any is, +inf if any is, and -inf if
    all are. (Where some are -inf, these tokens are never sampled.)"""
    return max_N.isfinite()


def probs(logits_NV: Tensor, params: list[SamplingParams], row_N: Tensor, max_N: Tensor | None = None) -> Tensor:
    """The distributions of processed logits: temperature, then min-p, top-k and top-p, as vLLM orders them.

    logits_NV: after penalties and bias.
    params: of each row.
    row_N: the row whose parameters a line of logits takes.
    max_N: the largest of each line, if the caller knows it.
    Returns p_NV, float32. A row of temperature 0 is one-hot on the argmax (the lowest id among equals).
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits_NV.device)[row_N].unsqueeze(-1)

    logits_NV = logits_NV.float()
    greedy = [p.greedy for p in params]
    if all(greedy):
        return one_hot(logits_NV.argmax(-1), logits_NV.shape[-1])
    if any(greedy):
        argmax_NV = one_hot(logits_NV.argmax(-1), logits_NV.shape[-1])
    # the maximum goes first, so that a tiny temperature cannot overflow
    max_N = logits_NV.amax(-1) if max_N is None else max_N
    scaled = (logits_NV - max_N.unsqueeze(-1)) / column([1.0 if p.greedy else p.temperature for p in params])
    if any(p.min_p for p in params):
        scaled = scaled.masked_fill(scaled < column([p.min_p for p in params]).log(), -torch.inf)
    if any(p.top_k > 0 for p in params) or any(p.top_p < 1 for p in params):
        scaled = _top_k_top_p(scaled, params, row_N)
    p_NV = scaled.softmax(-1)
    if any(greedy):
        p_NV = torch.where(column([float(g) for g in greedy]).bool(), argmax_NV, p_NV)
    return p_NV


def _top_k_top_p(logits_NV: Tensor, params: list[SamplingParams], row_N: Tensor) -> Tensor:
    """Mask all but the k most likely tokens, and of those all but the smallest set whose mass reaches top_p.

    Ties at the border of top-k stay in, as in vLLM and Hugging Face.
    """
    vocab_size = logits_NV.shape[-1]
    device = logits_NV.device
    sorted_NV, order_NV = logits_NV.sort(-1, descending=True)
    k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=device)[row_N]
    border = sorted_NV.gather(-1, k.unsqueeze(-1) - 1)
    sorted_NV = sorted_NV.masked_fill(sorted_NV < border, -torch.inf)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[row_N].unsqueeze(-1)
    mass_before = sorted_NV.softmax(-1).double().cumsum(-1)
    mass_before = torch.cat([torch.zeros_like(mass_before[..., :1]), mass_before[..., :-1]], -1)
    sorted_NV = sorted_NV.masked_fill((mass_before >= top_p) & (top_p < 1), -torch.inf)
    return torch.full_like(logits_NV, -torch.inf).scatter(-1, order_NV, sorted_NV)


def apply_penalties(
    logits_BJV: Tensor,
    params: list[SamplingParams],
    prompt_BV: Tensor | None,
    output_BV: Tensor | None,
    draft_BK: Tensor,
    length_B: Tensor,
    parent_BK: np.ndarray,
    num_output_B: np.ndarray,
    stop_ids: list[list[int]],
    bad_words: list[list[list[int]]] | None = None,
    outputs: list[np.ndarray] | None = None,
) -> Tensor:
    """Constraints, bias, minimum length and penalties, for every verified position of every row, each with its own prefix.

    The prefix of position 0 is the committed tokens; that of position j has the path to draft token j - 1, too. The repetition
    penalty is that of CTRL (Keskar et al. 2019) over prompt and output; presence and frequency count over the output.

    logits_BJV: raw.
    params: of each row.
    prompt_BV, output_BV: how often each token is in the prompt and in the output so far (None if no row penalises).
    draft_BK: draft tokens.
    length_B: how many of them each row has, on the host.
    parent_BK: of each of them, as in `Draft`; of a chain -1, 0, 1, ...
    num_output_B: output tokens so far.
    stop_ids: tokens of each row that `min_tokens` forbids.
    bad_words: token ids of each row's bad words (None if no row has any).
    outputs: with them, the output tokens so far of each row, on the host.
    """
    device = logits_BJV.device
    num_rows, num_positions = logits_BJV.shape[:2]
    logits_BJV = logits_BJV.to(torch.float32, copy=True)
    on_path_BJK = np.concatenate([np.zeros((num_rows, 1, num_positions - 1), dtype=bool), tree.on_path(parent_BK)], 1)
    depth_BJ = on_path_BJK.sum(2)

    for b, p in enumerate(params):
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=device)
            logits_BJV[b, :, ids] += torch.tensor(list(p.logit_bias.values()), device=device)
        num_missing = p.min_tokens - int(num_output_B[b])
        if num_missing > 0 and stop_ids[b]:
            is_short_J = torch.from_numpy(depth_BJ[b] < num_missing).to(device, non_blocking=True)
            ids = torch.tensor(stop_ids[b], device=device)
            logits_BJV[b, :, ids] = logits_BJV[b][:, ids].masked_fill(is_short_J.unsqueeze(1), -torch.inf)
        if p.allowed_token_ids is not None:
            ids = torch.tensor(p.allowed_token_ids, device=device)
            allowed_JA = logits_BJV[b][:, ids]
            logits_BJV[b] = -torch.inf
            logits_BJV[b, :, ids] = allowed_JA
        if bad_words and bad_words[b]:
            assert outputs is not None
            _forbid_words(logits_BJV[b], bad_words[b], outputs[b], draft_BK[b], on_path_BJK[b])

    if prompt_BV is None or output_BV is None:
        return logits_BJV

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device).unsqueeze(-1)

    repetition = column([p.repetition_penalty for p in params])
    frequency = column([p.frequency_penalty for p in params])
    presence = column([p.presence_penalty for p in params])
    # padding counts for nothing
    on_path_BJK &= (np.arange(num_positions - 1) < length_B.numpy()[:, None])[:, None]
    count_BJK = torch.from_numpy(on_path_BJK).to(device, output_BV.dtype)
    for j in range(num_positions):
        so_far_BV = output_BV.scatter_add(-1, draft_BK * count_BJK[:, j], count_BJK[:, j])
        logits = logits_BJV[:, j]
        seen = (prompt_BV + so_far_BV) > 0
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits_BJV[:, j] = logits - frequency * so_far_BV - presence * (so_far_BV > 0)
    return logits_BJV


def _forbid_words(
    logits_JV: Tensor, words: list[list[int]], output: np.ndarray, draft_K: Tensor, on_path_JK: np.ndarray
) -> None:
    """The last token of each word gets -inf where the tokens before it are the word's others. In place.

    words: token ids.
    output: output tokens so far; the prompt's do not count, as in vLLM.
    on_path_JK: which draft tokens come before each position.
    """
    device = logits_JV.device
    longest = max(map(len, words)) - 1
    tail = output[len(output) - min(longest, len(output)) :]
    padded = np.concatenate([np.full(longest - len(tail), -1), tail])  # -1: no token
    text = torch.cat([torch.from_numpy(padded).to(device, non_blocking=True), draft_K])
    place = np.arange(longest)
    last_JN = [np.concatenate([place, longest + np.flatnonzero(path_K)])[path_K.sum() :] for path_K in on_path_JK]
    before_JN = text[torch.from_numpy(np.stack(last_JN)).to(device, non_blocking=True)]  # the last tokens before each position
    for word in words:
        length = len(word) - 1
        if not length:
            logits_JV[:, word[-1]] = -torch.inf
            continue
        completes_J = (before_JN[:, longest - length :] == torch.tensor(word[:-1], device=device)).all(-1)
        logits_JV[:, word[-1]].masked_fill_(completes_J, -torch.inf)


def token_logprobs(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log probabilities of tokens and of the likeliest ones, on the host: ids [N, 1 + num_top], the token first, their log
    probabilities, and the rank [N] of the token among all (1: no other is likelier), as vLLM counts it.

    logits_NV: raw.
    token_N: ids.
    """
    logprob_NV = logits_NV.float().log_softmax(-1)
    token_N1 = token_N.unsqueeze(-1)
    chosen_N1 = logprob_NV.gather(-1, token_N1)
    rank_N1 = (logprob_NV >= chosen_N1).sum(-1, keepdim=True)
    top_NX, id_NX = logprob_NV.topk(num_top, -1)
    host = torch.cat([x.double() for x in (token_N1, id_NX, chosen_N1, top_NX, rank_N1)], 1).cpu().numpy()  # one read
    width = 1 + num_top
    return host[:, :width].astype(np.int64), host[:, width : 2 * width], host[:, -1].astype(np.int64)


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor | None,
    to_target_vocab: Callable[..., Any] | None = None,
    shares_noise: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """How every drafter samples: [B] tokens, their distribution [B, V], and the largest logits (see `finite`).

    uniform_B: draws from softmax(logits / T); None: the argmax at every temperature, whose distribution is one-hot and not
        returned.
    to_target_vocab: maps tokens and distributions over a draft vocabulary to the target's.
    shares_noise: draw with Gumbel noise, that of the target's tokens; else by inverse CDF.
    """
    max_B, argmax_B = logits_BV.max(-1)  # the first of equals, as argmax; which is slow in bfloat16 on a CPU
    q_BV = None
    token_B = argmax_B
    if uniform_B is not None:
        q_BV = draft_distribution(logits_BV, temperature_B, argmax_B)
        token_B = argmax_B if shares_noise else inverse_cdf(q_BV, uniform_B)
    if to_target_vocab is not None:
        token_B, q_BV = to_target_vocab(token_B, q_BV)
    if shares_noise and q_BV is not None and uniform_B is not None:
        token_B = gumbel.first(q_BV, uniform_B)[:, 0]
    return token_B, q_BV, max_B


def draft_distribution(logits_BV: Tensor, temperature_B: Tensor, argmax_B: Tensor) -> Tensor:
    """[B, V] softmax(logits / T); at temperature 0 one-hot."""
    temperature_B1 = temperature_B.unsqueeze(1)
    tempered_BV = logits_BV.float() / temperature_B1.clamp(min=GREEDY_BELOW)
    return torch.where(temperature_B1 < GREEDY_BELOW, one_hot(argmax_B, logits_BV.shape[-1]), tempered_BV.softmax(-1))


def share_log_odds(count: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Log-odds of the shares `count / total`, float32; half a case is added on either side, so that 1 of 1 is no certainty."""
    return np.log((count + 0.5) / (total - count + 0.5)).astype(np.float32)


def log_odds(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """[B] of the likeliest token under softmax(logits / T), or softmax(logits) at temperature 0; float32, within -40..40."""
    temperature_B1 = torch.where(temperature_B < GREEDY_BELOW, 1.0, temperature_B).unsqueeze(1)
    logits_BV = logits_BV.float() / temperature_B1
    log_p = logits_BV.amax(-1) - logits_BV.logsumexp(-1)
    return (log_p - torch.log1p(-log_p.exp().clamp(max=1 - 2**-24))).clamp(-40, 40)
