"""Sampling by Gumbel noise that is a function of a uniform and the token: argmax(log p + g), and the k best of them.

With g = -log(t), t exponential, the best token is the one whose arrival t / p is the earliest: an exponential race. The first
of them has the distribution p; the first k are k draws without replacement, in order (Gumbel-top-k, Kool et al. 1903.06059).
Who draws with the same uniform from two distributions gets the same token as often as these overlap: with probability
sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri et al. 2408.07978).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from specdec.compiled import compiled

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of the SplitMix64 finaliser, as in `sampling.uniforms`


def first(weight_NV: Tensor, u_N: Tensor, count: int = 1) -> Tensor:
    """[N, count] the tokens that arrive first, in order; -1 where there are no more tokens of a weight above 0.

    weight_NV: unnormalised, not negative.
    u_N: uniforms in [0, 1), float64; each gives all tokens their times.
    """
    key_N = (u_N.to(weight_NV.device) * 2.0**53).long()
    if weight_NV.device.type != "cpu":
        return first_reference(weight_NV, key_N, count)
    weights = weight_NV.detach().contiguous()
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.float()
    return torch.from_numpy(_first(weights.numpy(), key_N.contiguous().numpy(), _token_words(weights.shape[1]), count))


def first_reference(weight_NV: Tensor, key_N: Tensor, count: int) -> Tensor:
    """The same from the times of all tokens. key_N: int64, the uniforms' 53 bits."""
    vocab_size = weight_NV.shape[-1]
    weight_NV = weight_NV.double()
    arrival_NV = torch.where(weight_NV > 0, times(key_N, vocab_size) / weight_NV, torch.inf)
    arrival_NC, token_NC = arrival_NV.sort(dim=-1, stable=True)
    token_NC = token_NC.masked_fill(arrival_NC.isinf(), -1)[:, :count]
    return torch.nn.functional.pad(token_NC, (0, count - token_NC.shape[1]), value=-1)


def times(key_N: Tensor, vocab_size: int) -> Tensor:
    """[N, V] float64, exponential: minus the logarithm of a uniform that is a hash of key and token."""
    token_V = torch.arange(vocab_size, device=key_N.device)
    hash_NV = _mix(_mix(key_N + _signed(GOLDEN)).unsqueeze(-1) ^ _mix(token_V + _signed(GOLDEN)))
    return -torch.log1p(-((_shift(hash_NV, 11).double() + 0.5) * 2.0**-53))


def _signed(word: int) -> int:
    """A word of 64 bits as torch has it, which knows none without a sign."""
    return word - 2**64 if word >= 2**63 else word


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(FACTORS[0])
    x = (x ^ _shift(x, 27)) * _signed(FACTORS[1])
    return x ^ _shift(x, 31)


@compiled
def _mix_word(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FACTORS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(FACTORS[1])
    return x ^ (x >> np.uint64(31))


@cache
def _token_words(vocab_size: int) -> np.ndarray:
    """[V] uint64: the tokens' part of the hash."""
    return _mix_words(np.arange(vocab_size, dtype=np.uint64))


@compiled
def _mix_words(word_V: np.ndarray) -> np.ndarray:
    mixed_V = np.empty_like(word_V)
    for v in range(len(word_V)):
        mixed_V[v] = _mix_word(word_V[v] + np.uint64(GOLDEN))
    return mixed_V


@compiled
def _first(weight_NV: np.ndarray, key_N: np.ndarray, token_word_V: np.ndarray, count: int) -> np.ndarray:
    """A time is no less than the uniform below it, so most tokens are too late for the podium without a logarithm."""
    token_NC = np.full((len(key_N), count), -1, dtype=np.int64)
    arrival_C = np.empty(count)
    for n in range(len(key_N)):
        arrival_C[:] = np.inf
        key = _mix_word(np.uint64(key_N[n]) + np.uint64(GOLDEN))
        for v in range(weight_NV.shape[1]):
            weight = np.float64(weight_NV[n, v])
            if not weight > 0:
                continue
            word = _mix_word(key ^ token_word_V[v])
            uniform = (np.float64(word >> np.uint64(11)) + 0.5) * 2.0**-53
            if uniform >= arrival_C[count - 1] * weight:
                continue
            arrival = -np.log1p(-uniform) / weight
            place = count
            while place > 0 and arrival < arrival_C[place - 1]:
                place -= 1
            for c in range(count - 1, place, -1):
                arrival_C[c] = arrival_C[c - 1]
                token_NC[n, c] = token_NC[n, c - 1]
            if place < count:
                arrival_C[place] = arrival
                token_NC[n, place] = v
    return token_NC
