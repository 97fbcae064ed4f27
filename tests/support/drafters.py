"""Samples, comparisons and readable formulas for trained drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import method, rejection
from specdec.checkpoint.native import Checkpoint
from specdec.core import Policy, Request
from specdec.drafter.autoregressive import AutoregressiveDrafter
from specdec.drafter.base import Init
from specdec.drafter.batch import Batch, Sample
from specdec.drafter.losses import LossSums
from specdec.engine import Engine
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from support.targets import loaded

VOCAB = 320  # of the tiny models


ROWS = [field.name for field in fields(LossSums)].index("rows_K")  # column of a table of sums
REDUCED = np.r_[10:200:2, 200:320]  # target ids of a draft vocabulary


def sample(name: str, length: int, spans: list[tuple[int, int]]) -> Sample:
    rng = np.random.default_rng([length, *name.encode()])
    mask_n = np.zeros(length, dtype=bool)
    for a, b in spans:
        mask_n[a:b] = True
    return Sample(name, rng.integers(0, VOCAB, length), mask_n)


SAMPLES = [
    sample("two turns", 40, [(10, 20), (25, 40)]),
    sample("all", 17, [(0, 17)]),
    sample("a prompt", 9, []),
    sample("longer", 90, [(30, 88)]),
]


def shaken(
    drafter_type: Any,
    target: CausalLM,
    architecture: dict[str, Any],
    vocab_ids: np.ndarray | None,
    num_speculative_tokens: int,
    **settings: Any,
) -> Any:
    """A drafter with the target's output layer unless it has a draft vocabulary, and with weights moved as if by training."""
    new = drafter_type.init_checkpoint(target, architecture, Init(train_lm_head=False), vocab_ids)
    generator = torch.Generator().manual_seed(3)
    for key, tensor in sorted(new.tensors.items()):
        if tensor.is_floating_point():
            tensor += (1.0 if "markov" in key else 0.1) * torch.randn(tensor.shape, generator=generator)
    return drafter_type(target, new, num_speculative_tokens, **settings)


def gradients(trained: AutoregressiveDrafter, batch: Batch, **more: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, sums, and the gradient of every trainable parameter."""
    trained.zero_grad()
    loss, sums = trained.loss(batch, **more)
    loss.backward()
    grads = {}
    for name, parameter in trained.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.grad is not None:
            grads[name] = parameter.grad.clone()
    return loss.detach(), sums.table(), grads


def close(got: Any, want: Any, tolerance: float = 1e-5, what: str = "") -> None:
    """Tensors, or nested dicts and sequences of them, to a tolerance of their largest value."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            close(got[key], want[key], tolerance, f"{what} {key}")
    elif isinstance(want, list | tuple):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            close(a, b, tolerance, f"{what} [{i}]")
    elif want.numel():
        scale = want.abs().max().item()
        assert torch.isfinite(got).all(), what
        gap = (got - want).abs().max().item()
        assert gap <= tolerance * max(scale, 1e-3), (what, gap, scale)


def decode(
    target: CausalLM,
    proposer: Any,
    prompts: list[list[int]],
    max_tokens: int = 14,
    max_batch_size: int = 3,
    temperature: float = 0,
    policy: Policy | None = None,
) -> list[list[int]]:
    engine = Engine(target, proposer, rejection.build("standard"), max_batch_size, prefill_chunk_size=64, policy=policy)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(str(i), prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    assert len(list(engine.run(requests))) == len(prompts)
    return [request.output_token_ids for request in requests]


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(97, 123, length).tolist() for length in lengths]


@cache
def plain(target: str, lengths: tuple[int, ...], max_tokens: int = 14) -> list[list[int]]:
    return decode(loaded(target), method.build("none", loaded(target)), prompts(*lengths), max_tokens)


def decodes_as_plain(make: Callable[..., Any], batch_size: int) -> None:
    """Chains over all tokens, and trees over some, decode what plain decoding does. make: of the tiny target's drafter, from
    num_speculative_tokens, is_reduced and settings of trees."""
    lengths = (3, 40, 9, 70, 2, 5, 21, 33)
    for is_reduced, settings in ((False, {}), (True, {"tree_topk": 2, "tree_depth": 3, "num_speculative_tokens": 6})):
        new = make(**{"num_speculative_tokens": 4, "is_reduced": is_reduced} | settings)
        assert decode(new.target, new, prompts(*lengths), max_batch_size=batch_size) == plain("tiny", lengths)


class InWords:
    """A drafter's first step over one document, written down from the formulas with the tensors of its checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.tensors is not None
        self.tensors = checkpoint.tensors
        self.config = checkpoint.config
        self.shape = checkpoint.config["geometry"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + self.shape["rms_norm_eps"]).sqrt()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].t()

    def rotated(self, x_NHW: Tensor) -> Tensor:
        num_tokens = len(x_NHW)
        half = x_NHW.shape[-1] // 2
        speed = self.shape["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(num_tokens).view(-1, 1, 1) * speed
        a = x_NHW[..., :half]
        b = x_NHW[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attention(self, x: Tensor, name: str) -> Tensor:
        width = self.shape["head_dim"]
        q, k, v = (self.linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, width)) for part in "qkv")
        if self.config.get("layer_type") == "qwen3":
            q = self.norm(q, f"{name}.q_norm")
            k = self.norm(k, f"{name}.k_norm")
        repeat = q.shape[1] // k.shape[1]
        q = self.rotated(q)
        k = self.rotated(k).repeat_interleave(repeat, 1)
        v = v.repeat_interleave(repeat, 1)
        score = torch.einsum("qhw,khw->hqk", q, k) / width**0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weight = score.masked_fill(future, float("-inf")).softmax(-1)
        return self.linear(torch.einsum("hqk,khw->qhw", weight, v).flatten(1), f"{name}.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def eagle3(self, embedding: Tensor, hidden_NTD: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_NTD.flatten(1)
        if self.config["norm_before_fc"]:
            x = self.norm(x, "input_norm")
        if self.config["fc_norm"]:
            x = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(x.chunk(hidden_NTD.shape[1], 1))], 1)
        g = self.linear(x, "fc")
        normed = self.norm(g, "layers.0.hidden_norm")
        both = torch.cat([self.norm(embedding, "layers.0.input_layernorm"), normed], 1)
        u = (normed if self.config["norm_before_residual"] else g) + self.attention(both, "layers.0.self_attn")
        g = u + self.mlp(self.norm(u, "layers.0.post_attention_layernorm"), "layers.0.mlp")
        out = self.norm(g, "norm")
        return out, out if self.config["norm_output"] else g

    def eagle(self, embedding: Tensor, last_ND: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(torch.cat([embedding, last_ND], 1), "fc")
        u = x + self.attention(x, "layers.0.self_attn")
        state = u + self.mlp(self.norm(u, "layers.0.post_attention_layernorm"), "layers.0.mlp")
        return state, state
