"""MLP speculator, P-EAGLE and MTP: what is trained is what drafts, the formulas, the loss, training, and modules that a target
ships.

The helpers are those of test_eagle.py and test_train.py, where the same is asked of EAGLE.
"""

from __future__ import annotations

import copy
import json
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import config, hub, method, rejection
from specdec.checkpoint import mtp as shipped
from specdec.checkpoint import native
from specdec.checkpoint.hf_common import Export
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, Draft, Policy, Request
from specdec.drafter import losses, unroll
from specdec.drafter.base import Drafter, Init
from specdec.drafter.batch import Batch, Sample
from specdec.drafter.block import BlockDrafter
from specdec.engine import Engine
from specdec.method.dflash import DFlash
from specdec.method.eagle import Eagle
from specdec.method.eagle3 import Eagle3
from specdec.method.mlp import MLP
from specdec.method.mtp import MTP
from specdec.method.peagle import Objective as Depths
from specdec.method.peagle import PEagle
from specdec.model import fused
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from specdec.training.evaluate import prompts_of
from specdec.training.features import OnlineFeatures
from support.cli import TRAIN, call, rows_of
from support.drafters import REDUCED, ROWS, SAMPLES, VOCAB, InWords, close, decode, gradients, prompts, sample
from support.errors import refused
from support.processes import fork_ranks
from support.table import Restless
from support.targets import SHIPPED, changed, random_target, tensors_of
from support.training import conversations, same, same_rows, state_of, stop_at, train


@dataclass(frozen=True)
class Variant:
    """A drafter: its method, what it is built of, how it begins, its target, and how many tokens it drafts at most."""

    kind: Any
    architecture: dict[str, Any] = field(default_factory=dict)
    init: Init = field(default_factory=Init)
    reduced: bool = False
    target: str = "tiny"
    num_draft: int = 4

    @property
    def vocab_ids(self) -> np.ndarray | None:
        return REDUCED if self.reduced else None


FROZEN = Init(train_lm_head=False)  # the target's output layer
UNTIED = {"tie_weights": False, "n_predict": 4}
VARIANTS = {
    "mlp": Variant(MLP, num_draft=3),
    "mlp-untied-reduced": Variant(MLP, UNTIED, reduced=True),
    "mlp-targets-embedding": Variant(MLP, {"own_embedding": False, "scale_input": False, "n_predict": 4}),
    "mlp-targets-head": Variant(MLP, {"n_predict": 2}, FROZEN, num_draft=2),
    "mlp-targets-parts-gemma2": Variant(MLP, UNTIED | {"own_embedding": False}, FROZEN, target="tiny-gemma2"),
    "mlp-narrow": Variant(MLP, UNTIED | {"inner_dim": 48}, Init(lm_head="random")),
    "mlp-one": Variant(MLP, {"n_predict": 1}, Init(lm_head="random", scale_features=False), num_draft=1),
    "peagle": Variant(PEagle),
    "peagle-2-layers-reduced": Variant(PEagle, {"num_hidden_layers": 2, "mask_token_id": 300}, reduced=True),
    "peagle-norms": Variant(
        PEagle, {"num_hidden_layers": 2, "norm_before_fc": True, "norm_before_residual": True, "layer_type": "qwen3"}
    ),
    "peagle-fc-norm-gemma2": Variant(PEagle, {"fc_norm": True, "norm_output": True}, FROZEN, target="tiny-gemma2"),
    "mtp": Variant(MTP, {}, FROZEN),
    "mtp-targets-state-qwen2": Variant(MTP, {"hidden_feedback": "target"}, target="tiny-qwen2"),
    "mtp-gemma2": Variant(MTP, {"zero_first_embedding": True, "last_hidden_kind": "pre_norm"}, FROZEN, target="tiny-gemma2"),
    "mtp-4-qwen3": Variant(MTP, {"num_modules": 4, "last_hidden_kind": "pre_norm"}, target="tiny-qwen3"),
    "mtp-3-mistral-reduced": Variant(
        MTP, {"num_modules": 3, "zero_first_embedding": True}, reduced=True, target="tiny-mistral", num_draft=3
    ),
    "mtp-4-targets-state-gemma3": Variant(MTP, {"num_modules": 4, "hidden_feedback": "target"}, FROZEN, target="tiny-gemma3"),
    "mtp-2": Variant(MTP, {"num_modules": 2}, FROZEN, num_draft=2),
}
# a method that no list here names, such as one that was just added: as it is built by default
UNLISTED = {
    name: Variant(method.find(name), num_draft=config.read(config.CONF / f"method/{name}.yaml")["num_speculative_tokens"])
    for name in method.names()
    if issubclass(method.find(name), Drafter) and method.find(name) not in (MLP, MTP, PEagle, Eagle, Eagle3)
}
FEW = ["mlp-untied-reduced", "peagle-2-layers-reduced", "mtp", "mtp-4-qwen3", *UNLISTED]
OF = {kind: [name for name, spec in VARIANTS.items() if spec.kind is kind] for kind in (MLP, PEagle, MTP)}


def spec_of(variant: str) -> Variant:
    return (VARIANTS | UNLISTED)[variant]


@cache
def loaded(name: str = "tiny") -> CausalLM:
    """A tiny target whose final norm does something: as new, a norm after it would not tell whether it was there."""
    target = CausalLM(name, "float32", "cpu")
    weight: Any = target.final_norm.weight
    weight += 0.4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(8))
    return target


@cache
def plain(target: str, lengths: tuple[int, ...]) -> list[list[int]]:
    return decode(loaded(target), method.build("none", loaded(target)), prompts(*lengths))


@cache
def statistics(target: str, layers: tuple[int, ...]) -> Tensor:
    return OnlineFeatures(loaded(target), layers)(SAMPLES).hidden(layers)


@cache
def grown(variant: str) -> Checkpoint:
    """A fresh drafter whose weights were moved as if by training: wide, and norms that are not 1."""
    spec = spec_of(variant)
    noise = torch.Generator().manual_seed(4)
    fresh = spec.kind.init_checkpoint(loaded(spec.target), spec.architecture, spec.init, spec.vocab_ids)
    for _, tensor in sorted(fresh.tensors.items()):
        if tensor.is_floating_point():
            tensor += 0.15 * torch.randn(tensor.shape, generator=noise)
    return fresh


def drafter(variant: str, num_draft: int = 1, **more: Any) -> Any:
    spec = spec_of(variant)
    return spec.kind(loaded(spec.target), copy.deepcopy(grown(variant)), num_draft, **more)


def trainable(variant: str, **objective: Any) -> Any:
    """One for training, which scales features where its variant does. P-EAGLE keeps all rows by default."""
    spec = spec_of(variant)
    trained = drafter(variant)
    family: dict[str, Any] = {PEagle: {"num_depths": 4, "down_sample_ratio": 1.0}, MTP: {"ttt_steps": 4}}.get(spec.kind, {})
    settings = family | {"loss": {"ce": 0.5, "nll": 0.5}} | objective
    trained.for_training(spec.kind.objective_type(**settings), spec.init, statistics(spec.target, trained.hidden_layers))
    return trained


def features(trained: Any, samples: list[Sample]) -> Batch:
    return OnlineFeatures(trained.target, trained.hidden_layers)(samples)


def steps_of(trained: Any) -> int:
    return int(trained.num_steps(1.0))


def head_of(trained: Any, k: int, state_ND: Tensor) -> Tensor:
    return trained.head_logits(k, state_ND) if hasattr(trained, "head_logits") else trained.draft_logits(state_ND)


# --------------------------------------------------------------------------- training and drafting agree


@dataclass
class Proposed:
    """One row of one call of `propose`: the committed tokens, what was drafted, and the states and logits of every step."""

    row: int
    tokens: list[int]
    drafted: list[int]
    states: list[Tensor]
    logits: list[Tensor]


def watched(proposer: Any) -> list[Proposed]:
    """Make a drafter write down what happens while it proposes."""
    proposals: list[Proposed] = []
    steps: list[tuple[Tensor, Tensor]] = []
    name = "head_logits" if hasattr(proposer, "head_logits") else "draft_logits"
    logits_of = getattr(proposer, name)
    propose = proposer.propose

    def kept(*args: Any) -> Tensor:
        logits_BV: Tensor = logits_of(*args)
        steps.append((args[-1].clone(), logits_BV.clone()))
        return logits_BV

    def watching(context: Context) -> Draft:
        steps.clear()
        draft = propose(context)
        lengths = draft.length_B.tolist()
        for b, length in enumerate(lengths):
            if isinstance(proposer, BlockDrafter):  # one call, of all tokens of all rows
                states_and_logits = list(zip(*steps[0], strict=True))[sum(lengths[:b]) :][:length] if steps else []
            else:
                states_and_logits = [(states[b], logits[b]) for states, logits in steps[:length]]
            one = Proposed(int(context.rows[b]), context.tokens(b).tolist(), draft.token_BK[b, :length].tolist(), [], [])
            one.states = [state for state, _ in states_and_logits]
            one.logits = [logits for _, logits in states_and_logits]
            proposals.append(one)
        return draft

    setattr(proposer, name, kept)
    proposer.propose = watching
    return proposals


def hold_to_training(
    trained: Any, num_draft: int, lengths: tuple[int, ...], max_tokens: int = 14, policy: Policy | None = None
) -> list[Proposed]:
    """Every draft of a decoding in a batch, against the unrolled steps over (committed tokens, draft) as a document: the row
    before the last committed token is at step k where draft k is made. States that no row may read are random.

    A verifier that accepts at random accepts and rejects drafts of every length, however good the drafter is."""
    proposer = type(trained)(trained.target, trained.to_checkpoint(), num_draft)
    proposals = watched(proposer)
    rates = [0.8, 0.62, 0.45, 0.3][:num_draft]
    verifier = rejection.build("synthetic", num_draft, synthetic_acceptance_rates=rates)
    engine = Engine(trained.target, proposer, verifier, max_batch_size=3, prefill_chunk_size=64, policy=policy)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(str(i), prompt, params, seed=i) for i, prompt in enumerate(prompts(*lengths))]
    assert len(list(engine.run(requests))) == len(lengths)
    proposals = [one for one in proposals if one.drafted]

    documents = []
    for i, one in enumerate(proposals):
        tokens = np.array([*one.tokens, *one.drafted])
        documents.append(Sample(str(i), tokens, np.arange(len(tokens)) >= len(one.tokens)))
    batch = features(trained, documents)
    first_B = np.cumsum(batch.length_B) - batch.length_B
    row_B = first_B + np.array([len(one.tokens) - 2 for one in proposals])
    for first, row, length in zip(first_B, row_B, batch.length_B, strict=True):
        batch.hidden_NTD[row + 1 : first + length] = 9.0
    compared = 0
    with torch.no_grad():
        plan = trained.plan(batch, steps_of(trained), 0)
        for k, (step, state_AD) in enumerate(zip(plan.steps, trained.unrolled(batch, plan), strict=True)):
            here = [(row, one) for row, one in zip(row_B.tolist(), proposals, strict=True) if len(one.drafted) > k]
            place = np.searchsorted(step.rows, [row for row, _ in here])
            assert step.rows[place].tolist() == [row for row, _ in here]
            state_AD = state_AD[torch.from_numpy(place)]
            for (_, one), state_D, logits_V in zip(here, state_AD, head_of(trained, k, state_AD), strict=True):
                close(one.states[k], state_D, 1e-4, f"state of step {k} after {len(one.tokens)} tokens")
                close(one.logits[k], logits_V, 1e-4, f"logits of step {k} after {len(one.tokens)} tokens")
            compared += len(here)
    assert compared > 2 * len(proposals) or num_draft < 4
    return proposals


def accepted_in(proposals: list[Proposed]) -> set[int]:
    """How many tokens of a draft were accepted, over all that were followed by another one of the same request."""
    lengths = set()
    for i, one in enumerate(proposals):
        n = len(one.tokens)
        after = next((x for x in proposals[i + 1 :] if x.row == one.row), None)
        if after is not None and after.tokens[:n] == one.tokens:
            lengths.add(len(after.tokens) - n - 1)
    return lengths


@pytest.mark.parametrize("name", [name for name in method.names() if issubclass(method.find(name), Drafter)])
def test_a_new_drafter_depends_on_its_seed_alone(name: str) -> None:
    """And not on torch's own generator, which its modules are made with."""
    drafter_class: Any = method.find(name)
    tensors = []
    for state in (1, 2):
        torch.manual_seed(state)
        tensors.append(drafter_class.init_checkpoint(loaded(), {}, drafter_class.init_type(), seed=0).tensors)
    for key, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][key]), key


@pytest.mark.parametrize(
    "variant", [*VARIANTS, *(name for name, spec in UNLISTED.items() if not issubclass(spec.kind, DFlash))]
)
def test_what_is_trained_is_what_drafts(variant: str) -> None:
    """Rows join and leave; drafts of all lengths are made, accepted and rejected. Blocks at anchors: test_dflash.py."""
    num_draft = spec_of(variant).num_draft
    proposals = hold_to_training(trainable(variant), num_draft, (3, 70, 20, 1, 2, 9, 33))
    assert {len(one.drafted) for one in proposals} == set(range(1, num_draft + 1))
    assert accepted_in(proposals) == set(range(num_draft + 1))


@pytest.mark.parametrize("variant", ["mlp-untied-reduced", "peagle-2-layers-reduced", "mtp", "mtp-4-qwen3", "mtp-2"])
def test_drafts_go_on_when_rows_sat_out(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some for so long that the drafter has to take in their states."""
    monkeypatch.setattr("specdec.engine.MAX_PENDING_STATES", 2)
    num_draft = spec_of(variant).num_draft
    hold_to_training(trainable(variant), num_draft, (3, 70, 20, 1, 2, 9, 33), 30, Restless(num_draft))


@pytest.mark.parametrize("variant", ["peagle-2-layers-reduced", "mtp", "mtp-4-qwen3", "mtp-3-mistral-reduced"])
def test_drafts_go_on_from_a_long_prompt(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs of a prompt come in pieces: of 16 here, so that prompts end before, at and behind their borders."""
    for module in ("specdec.drafter.autoregressive", "specdec.method.mtp"):
        monkeypatch.setattr(f"{module}.PREFILL_CHUNK", 16)
    hold_to_training(trainable(variant), spec_of(variant).num_draft, (16, 17, 18, 19, 20, 21, 22, 34, 70), 6)


@pytest.mark.parametrize("variant", ["mlp", "peagle-2-layers-reduced", "mtp-4-qwen3"])
def test_output_is_the_targets(variant: str) -> None:
    """Under a lossless verifier, with a budget that ends within the drafter's context and one that does not."""
    spec = spec_of(variant)
    lengths = (3, 40, 20, 2, 9)
    for more in ({}, {"max_model_len": 24}, {"draft_sample_method": "probabilistic"}):
        proposer = drafter(variant, spec.num_draft, **more)
        proposals = watched(proposer)
        assert decode(loaded(spec.target), proposer, prompts(*lengths)) == plain(spec.target, lengths)
        beyond = [one for one in proposals if len(one.tokens) >= 26]
        assert beyond
        assert any(one.drafted for one in beyond) == ("max_model_len" not in more)


# ------------------------------------------------------------------------------------------- the formulas


def rms_normed(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("variant", OF[MLP])
def test_an_mlp_head_is_its_formula(variant: str) -> None:
    """s_i = gelu(ln_i(proj_i(s_{i-1}) + w_e / w_s emb_i(x_i))): what IBM's code does, with the tensors of the checkpoint."""
    spec = spec_of(variant)
    checkpoint = grown(variant)
    trained = drafter(variant)
    weights = checkpoint.tensors
    config = checkpoint.config
    n = config["n_predict"]
    inner = config["inner_dim"]
    tied = config["tie_weights"]
    batch = features(trained, [SAMPLES[0]])
    count = len(batch.token_N) - n - 1
    state = loaded(spec.target).final_norm(batch.hidden_NTD[:count, -1])
    if config["scale_input"]:
        state = rms_normed(state) / math.sqrt(2)
    w_s = 0.5 ** (0.5 / n)
    w_e = math.sqrt((1 - w_s**2) * inner / 2)
    with torch.no_grad():
        plan = unroll.plan(batch.length_B, np.ones_like(batch.mask_N), n)
        unrolled = trained.unrolled(batch, plan)
        for i in range(n):
            token_N = batch.token_N[1 + i : 1 + i + count]
            of = 0 if tied else i
            has_embedding = config["own_embedding"]
            embedded = weights[f"emb.{of}.weight"][token_N] if has_embedding else trained.target.embedding(token_N)
            x = state @ weights[f"proj.{min(i, 1) if tied else i}.weight"].t() + w_e / w_s * embedded
            x = rms_normed(x) * weights[f"ln.{of}.weight"] + weights[f"ln.{of}.bias"]
            state = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
            head = weights[f"head.{of}.weight"] if config["own_lm_head"] else trained.target.head_rows()[0]
            close(unrolled[i][:count], state, 1e-4, f"head {i}")
            close(trained.head_logits(i, unrolled[i][:count]), state @ head.t(), 1e-4, f"logits of head {i}")


def test_the_weights_of_an_mlp_in_numbers() -> None:
    """By hand, for three heads 64 wide: w_s = 0.5^(1/6) = 0.890899, w_e = sqrt((1 - 0.793701) 32) = 2.569354."""
    assert drafter("mlp").embedding_weight == pytest.approx(2.569354 / 0.890899, rel=1e-5)
    assert drafter("mlp-narrow").embedding_weight == pytest.approx(math.sqrt((1 - 0.5**0.25) * 24) / 0.5**0.125, rel=1e-6)


class Placed(InWords):
    """The first layer of EAGLE-3 and ordinary ones after it, over rows at any positions that see what a matrix says."""

    def __init__(self, checkpoint: Checkpoint, position_N: Tensor, sees_NN: Tensor) -> None:
        super().__init__(checkpoint)
        self.position_N = position_N
        self.sees_NN = sees_NN

    def rotated(self, x_NHW: Tensor) -> Tensor:
        half = x_NHW.shape[-1] // 2
        speed = self.shape["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        angle = self.position_N.view(-1, 1, 1) * speed
        a = x_NHW[..., :half]
        b = x_NHW[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attention(self, x: Tensor, name: str) -> Tensor:
        width = self.shape["head_dim"]
        q, k, v = (self.linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, width)) for part in "qkv")
        if self.config["layer_type"] == "qwen3":
            q = self.norm(q, f"{name}.q_norm")
            k = self.norm(k, f"{name}.k_norm")
        repeat = q.shape[1] // k.shape[1]
        q = self.rotated(q)
        k = self.rotated(k).repeat_interleave(repeat, 1)
        v = v.repeat_interleave(repeat, 1)
        score = torch.einsum("qhw,khw->hqk", q, k) / width**0.5
        weight = score.masked_fill(~self.sees_NN, float("-inf")).softmax(-1)
        return self.linear(torch.einsum("hqk,khw->qhw", weight, v).flatten(1), f"{name}.o_proj")

    def states(self, embedding: Tensor, hidden_NTD: Tensor) -> Tensor:
        self.config = self.config | {"norm_output": False}
        g = self.eagle3(embedding, hidden_NTD)[1]
        for i in range(1, self.config["num_hidden_layers"]):
            u = g + self.attention(self.norm(g, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attn")
            g = u + self.mlp(self.norm(u, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp")
        return self.norm(g, "norm")


@pytest.mark.parametrize("variant", OF[PEagle])
def test_depths_are_one_dense_masked_pass(variant: str) -> None:
    """Every row at every depth, with one matrix that says who sees whom: a mask place sees the tokens of its document up to
    its row, and the mask places of its own row at lesser depths. Two documents; which rows are computed is COD's affair."""
    checkpoint = grown(variant)
    depths = 4
    for ratio in (1.0, 0.7):
        trained = drafter(variant)
        trained.objective = Depths(num_depths=depths, down_sample_ratio=ratio, down_sample_ratio_min=0.2)
        batch = features(trained, [SAMPLES[0], SAMPLES[1]])
        count = len(batch.token_N)
        row = torch.arange(count).repeat(depths)
        depth = torch.arange(depths).repeat_interleave(count)
        first = torch.from_numpy(np.repeat(np.cumsum(batch.length_B) - batch.length_B, batch.length_B)).repeat(depths)
        same_document = first[:, None] == first
        tokens_before = (depth == 0) & (row <= row[:, None])
        sees_masks = (row == row[:, None]) & (depth > 0) & (depth <= depth[:, None])
        words = Placed(checkpoint, row - first + depth, same_document & (tokens_before | sees_masks))
        token_N = torch.where(depth == 0, batch.token_N.roll(-1).repeat(depths), trained.mask_token_id)
        taps = batch.hidden(trained.hidden_layers)
        masks = checkpoint.tensors["mask_hidden"].view(1, *taps.shape[1:]).repeat(count * (depths - 1), 1, 1)
        with torch.no_grad():
            want = words.states(trained.target.embedding(token_N), torch.cat([taps, masks])).unflatten(0, (depths, count))
            plan = trained.plan(batch, depths, 3)
            states = trained.unrolled(batch, plan)
        sizes = [len(step.rows) for step in plan.steps]
        assert sizes == sorted(sizes, reverse=True)
        assert 0 < sizes[-1] < sizes[0]
        for d, (step, state) in enumerate(zip(plan.steps, states, strict=True)):
            close(state, want[d, torch.from_numpy(step.rows)], 1e-4, f"depth {d}")


def test_what_a_pass_of_peagle_is_fed() -> None:
    """vLLM's golden layout (tests/v1/spec_decode/test_eagle.py): two requests, three drafts each. Ours has no padding, so its
    place for a rejected token is left out."""
    proposer = drafter("peagle-2-layers-reduced", 3)
    proposer.reserve(2, 64)
    mask = proposer.mask_token_id
    fed = []
    kept = []
    step = proposer.step
    forward_pairs = proposer.forward_pairs

    def feeding(embedding: Tensor, hidden: Tensor, position: Tensor, *more: Any) -> Any:
        fed.append((embedding, hidden, position))
        return step(embedding, hidden, position, *more)

    def keeping(*args: Any) -> Any:
        kept.append(args[-1].tolist())
        return forward_pairs(*args)

    proposer.step = feeding
    proposer.forward_pairs = keeping
    token_RL = np.zeros((2, 64), dtype=np.int64)
    token_RL[0, 5:9] = [10, 11, 12, 100]
    token_RL[1, 10:15] = [20, 21, 22, 23, 200]
    taps = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0))
    taps = taps[:, : len(proposer.hidden_layers)]
    context = Context(
        rows=np.array([0, 1]), requests=[], token_RL=token_RL, length_B=np.array([9, 15]), max_draft_B=np.array([3, 3]),
        last_token_B=torch.tensor([100, 200]), uniform_BK=None, hidden=list(taps.split([3, 4])), logits_BV=None,
    )  # fmt: skip
    context.requests = [Request(str(i), [1], SamplingParams(temperature=0)) for i in range(2)]
    draft = proposer.propose(context)
    assert draft.token_BK.shape == (2, 3)
    assert len(fed) == 1, "one pass"
    embedding, hidden, position = fed[0]
    ids = [11, 12, 100, mask, mask, 21, 22, 23, 200, mask, mask]
    assert torch.equal(embedding, proposer.target.embedding(torch.tensor(ids)))
    assert position.tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert kept == [[2, 3, 4, 8, 9, 10]]
    with torch.no_grad():
        learned = proposer.fuse(proposer.mask_hidden.view(1, *taps.shape[1:]))
        pairs = proposer.fuse(taps)
    close(hidden, torch.cat([pairs[:3], learned, learned, pairs[3:], learned, learned]), 1e-6)


class ModuleInWords:
    """MTP: eh_proj(cat[enorm(embedding), hnorm(h)]), transformers' own decoder layer with eager attention, norm."""

    def __init__(self, target: CausalLM, weights: dict[str, Tensor], layer: Any, kind: str = "full_attention") -> None:
        self.target = target
        self.weights = weights
        self.layer = layer
        self.kind = kind

    @classmethod
    def of(cls, target: CausalLM, tensors: dict[str, Tensor], i: int) -> ModuleInWords:
        """Module i of a checkpoint of ours."""
        weights = {name.removeprefix(f"mtp.{i}."): x for name, x in tensors.items() if name.startswith(f"mtp.{i}.")}
        config = copy.deepcopy(target.config)
        config._attn_implementation = "eager"
        config.attn_logit_softcapping = None
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * target.num_layers
        last = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=target.num_layers - 1)
        layer = type(fused.plain_layer(target.model.get_decoder().layers[last]))(config, last).eval()
        layer.load_state_dict({name.removeprefix("block."): x for name, x in weights.items() if name.startswith("block.")})
        return cls(target, weights, layer, kinds[last])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        gemma = self.target.config.model_type.startswith(("gemma", "qwen3_next"))
        return rms_normed(x, self.target.config.rms_norm_eps) * (1 + weight if gemma else weight)

    def __call__(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        count = len(hidden)
        parts = self.norm(embedding, self.weights["enorm.weight"]), self.norm(hidden, self.weights["hnorm.weight"])
        x = (torch.cat(parts, 1) @ self.weights["eh_proj.weight"].t()).unsqueeze(0)
        rotary = self.target.model.get_decoder().rotary_emb
        kind = (self.kind,) if self.target.config.model_type == "gemma3_text" else ()
        future = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = self.layer(x, position_embeddings=rotary(x, torch.arange(count)[None], *kind), attention_mask=future)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], self.weights["norm.weight"])


def mtp_states(
    config: dict[str, Any], modules: list[ModuleInWords], token_N: Tensor, last_ND: Tensor, row: int, steps: int
) -> list[Tensor]:
    """[D] at one row of one document, for every step. One module goes on behind the row with what it said itself; of several,
    each runs over all rows up to it."""
    num_modules = len(modules)
    target = modules[0].target
    if config["last_hidden_kind"] == "post_norm":
        last_ND = modules[0].norm(last_ND, target.final_norm.weight)
    embedding = target.embedding(token_N[1 : row + 2])
    target_last = last_ND[: row + 1]
    hidden = target_last
    states = []
    for k in range(steps):
        if num_modules > 1:
            embedding = target.embedding(token_N[1 + k : row + 2 + k])
        elif k:
            embedding = torch.cat([embedding, target.embedding(token_N[row + 1 + k : row + 2 + k])])
        fed = embedding.clone()
        if config["zero_first_embedding"]:
            fed[0] = 0
        out = modules[k if num_modules > 1 else 0](fed, hidden)
        states.append(out[-1])
        if num_modules > 1:
            hidden = out if config["hidden_feedback"] == "own" else target_last
        else:
            hidden = torch.cat([hidden, (out if config["hidden_feedback"] == "own" else target_last)[-1:]])
    return states


@pytest.mark.parametrize("variant", OF[MTP])
def test_an_mtp_module_is_its_formula(variant: str) -> None:
    checkpoint = grown(variant)
    trained = drafter(variant)
    spec = spec_of(variant)
    modules = [ModuleInWords.of(trained.target, checkpoint.tensors, i) for i in range(checkpoint.config["num_modules"])]
    batch = features(trained, [SAMPLES[1], SAMPLES[0]])
    with torch.no_grad():
        plan = unroll.plan(batch.length_B, np.ones_like(batch.mask_N), spec.num_draft)
        states = trained.unrolled(batch, plan)
        for row in (0, 1, 30):  # of the second document
            want = mtp_states(checkpoint.config, modules, batch.token_N[17:], batch.hidden_NTD[17:, -1], row, spec.num_draft)
            for k, (step, state) in enumerate(zip(plan.steps, states, strict=True)):
                got = state[step.rows.tolist().index(17 + row)]
                close(got, want[k], 1e-4, f"row {row}, step {k}")
                head = (
                    checkpoint.tensors["lm_head.weight"] if checkpoint.config["own_lm_head"] else trained.target.head_rows()[0]
                )
                close(trained.draft_logits(got[None])[0], want[k] @ head.t(), 1e-4, f"logits at row {row}, step {k}")


# --------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_readable_one_and_every_parameter_learns(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, sums and the gradient of every parameter; none of them is zero."""
    trained = trainable(variant)
    spec = spec_of(variant)
    batch = features(trained, SAMPLES)
    batch.weight_B = np.array([1.0, 0.5, 1.0, 2.0])
    loss, sums, grads = gradients(trained, batch)
    assert not [name for name, grad in grads.items() if not grad.abs().sum()]
    assert {name for name, p in trained.named_parameters() if not p.requires_grad} == set()
    assert any("head" in name for name in grads) == (spec.init.train_lm_head or spec.reduced)
    assert [float(x) for x in sums[:, ROWS]] == [
        sum(int(s.mask_n[2 + k :].sum()) for s in SAMPLES) for k in range(steps_of(trained))
    ]
    monkeypatch.setattr(losses, "distill", losses.distill_reference)
    if spec.kind is not MLP:
        monkeypatch.setattr(trained, "unrolled", partial(trained.unrolled, kernel=unroll.attention_reference))
    close((loss, sums, grads), gradients(trained, batch), 1e-5)


@pytest.mark.parametrize("variant", ["peagle-norms", "mtp", "mtp-4-qwen3"])
def test_readable_attention_gives_the_same_states(variant: str) -> None:
    trained = trainable(variant)
    batch = features(trained, SAMPLES)
    plan = trained.plan(batch, steps_of(trained), 0)
    with torch.no_grad():
        close(trained.unrolled(batch, plan), trained.unrolled(batch, plan, kernel=unroll.attention_reference), 1e-5)


@pytest.mark.parametrize("variant", ["mlp-untied-reduced", "mlp", "mlp-targets-head"])
def test_the_loss_of_an_mlp_is_the_sum_over_its_heads(variant: str) -> None:
    """In words: -log q(x) of every head at every supervised token that it can draft, unweighted."""
    trained = trainable(variant, loss={"nll": 1.0})
    batch = features(trained, SAMPLES)
    want = 0.0
    plan = trained.plan(batch, steps_of(trained), 0)
    place = {token: i for i, token in enumerate(REDUCED.tolist() if spec_of(variant).reduced else range(VOCAB))}
    with torch.no_grad():
        for k, (step, state) in enumerate(zip(plan.steps, trained.unrolled(batch, plan), strict=True)):
            distribution = trained.head_logits(k, state).log_softmax(-1)
            for i in step.supervised.tolist():
                token = int(batch.token_N[step.rows[i] + 2 + k])
                if token in place:
                    want -= distribution[i, place[token]].item()
        loss, sums = trained.loss(batch)
    assert loss.item() == pytest.approx(want, rel=1e-5)
    assert sums.loss_K.sum().item() == pytest.approx(want, rel=1e-5)
    assert len(sums.loss_K) == trained.config["n_predict"]


@pytest.mark.parametrize("variant", FEW)
def test_a_focus_is_so_many_copies_of_its_tokens(variant: str) -> None:
    """With a weight of 3, loss and gradients are those of all tokens and twice those of the rejected ones; sums of hits and
    overlaps know nothing of it."""
    more = {"confidence": 0} if variant == "dspark" else {}
    trained = trainable(variant, focus="rejected", focus_weight=3.0, **more)
    batch = features(trained, SAMPLES)
    assert not batch.rejected_N.any()
    plain = gradients(trained, batch)
    batch.rejected_N = np.random.default_rng(1).random(len(batch.mask_N)) < 0.3
    focused = gradients(trained, batch)
    trained.objective = trained.objective.model_copy(update={"focus_weight": 0.0})
    others = gradients(trained, batch)
    close(focused[0] - plain[0], 2 * (plain[0] - others[0]), 1e-4)
    for name, grad in plain[2].items():
        close(focused[2][name] - grad, 2 * (grad - others[2][name]), 1e-3, name)
    assert (focused[0] - plain[0]).abs() > 0.1
    assert torch.equal(focused[1][:, 1:4], plain[1][:, 1:4])


@pytest.mark.parametrize("variant", ["mlp", "peagle", "mtp", "mtp-4-qwen3", *UNLISTED])
def test_e2e_tv_is_minus_the_expected_number_of_accepted_tokens(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every parameter the gradient, against autograd through the products of acceptances."""
    trained = trainable(variant, loss={"tv": 1.0}, weighting="e2e_tv", **({"confidence": 0} if variant == "dspark" else {}))
    monkeypatch.setattr(type(trained.objective), "weights", lambda self, num_steps: [1.0] * num_steps)
    batch = features(trained, SAMPLES)
    _, sums, grads = gradients(trained, batch)
    plan = trained.plan(batch, steps_of(trained), 0)
    teacher = trained.teacher(batch, plan)
    p_QV = (teacher.state_QD @ teacher.weight_VD.T).softmax(-1)
    heads = trained.heads()
    expected = torch.zeros(())
    overlap = []
    reached = torch.ones(0)
    for k, (step, state_AD) in enumerate(zip(plan.steps, trained.unrolled(batch, plan, 0), strict=True)):
        head_VD = heads[min(k, len(heads) - 1)]
        head_VD = teacher.weight_VD if head_VD is None else head_VD
        accepted = torch.minimum(p_QV[step.labelled], (state_AD[step.supervised] @ head_VD.T).softmax(-1)).sum(-1)
        before = torch.ones_like(accepted)
        if k:
            before = torch.where(torch.from_numpy(step.prev_match >= 0), reached[step.prev_match], before)
        reached = before * accepted
        expected = expected + reached.sum()
        overlap.append(accepted.sum().item())
    trained.zero_grad()
    (-expected).backward()
    want = {name: p.grad for name, p in trained.named_parameters() if p.requires_grad}
    close(grads, want, 1e-4)
    assert sums[:, 2].tolist() == pytest.approx(overlap, rel=1e-4)


def test_the_steps_of_mtp_weigh_one_together() -> None:
    """.51, .31 and .18 (FastMTP); with a module for every token, all the modules together, whatever ttt_steps says."""
    spec = MTP.objective_type()
    assert spec.weights(3) == pytest.approx([0.51, 0.306, 0.184], abs=1e-3)
    assert sum(spec.weights(3)) == pytest.approx(1)
    assert spec.weights(1) == spec.weights(3)[:1], "while one step is unrolled, it weighs what it will weigh"
    for variant, count in (("mtp-4-qwen3", 4), ("mtp-2", 2), ("mtp", 3)):
        trained = trainable(variant, ttt_steps=3)
        batch = features(trained, SAMPLES)
        loss, sums = trained.loss(batch)
        weights = trained.objective.weights(steps_of(trained))
        assert len(weights) == len(sums.loss_K) == count
        assert sum(weights) == pytest.approx(1)
        assert loss.item() == pytest.approx(sum(w * x for w, x in zip(weights, sums.loss_K.tolist(), strict=True)), rel=1e-5)
        assert weights[1] / weights[0] == pytest.approx(0.6)


@pytest.mark.parametrize("variant", FEW)
def test_a_batch_is_the_sum_of_its_samples(variant: str) -> None:
    """Packed or alone, loss, sums and gradients are the same, also where rows are drawn (COD): by a sample's name."""
    more = {"down_sample_ratio": 0.6} if spec_of(variant).kind is PEagle else {}
    trained = trainable(variant, **more)
    batched = gradients(trained, features(trained, SAMPLES), seed=5)
    alone = [gradients(trained, features(trained, [one]), seed=5) for one in SAMPLES]
    close(batched[0], sum(one[0] for one in alone), 1e-5, "loss")
    close(batched[1], sum(one[1] for one in alone), 1e-5, "sums")
    close(batched[2], {name: sum(one[2][name] for one in alone) for name in batched[2]}, 1e-5)


@pytest.mark.parametrize("variant", FEW)
def test_padding_changes_nothing_and_masked_samples_add_nothing(variant: str) -> None:
    trained = trainable(variant)
    want = gradients(trained, features(trained, SAMPLES))
    padded = [
        replace(one, token_n=np.r_[one.token_n, np.full(n, 258)], mask_n=np.r_[one.mask_n, np.zeros(n, dtype=bool)])
        for one, n in zip(SAMPLES, (1, 7, 0, 30), strict=True)
    ]
    close(gradients(trained, features(trained, padded)), want, 1e-5)
    for samples in ([SAMPLES[2]], [sample("short", 2, [(0, 2)]), sample("one", 1, [(0, 1)])]):
        loss, sums, grads = gradients(trained, features(trained, samples))
        assert loss == 0
        assert not sums.any()
        assert all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("variant", FEW)
def test_documents_that_end_before_the_steps_do(variant: str) -> None:
    trained = trainable(variant)
    short = [sample(f"short {n}", n, [(0, n)]) for n in (3, 5, 4)]
    loss, sums, grads = gradients(trained, features(trained, short))
    assert loss > 0
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert sums[:, ROWS].tolist() == [6, 3, 1, *[0] * len(sums)][: len(sums)]


@pytest.mark.parametrize(
    "variant", ["mlp-untied-reduced", "peagle-2-layers-reduced", "mtp", "mtp-4-qwen3", "mtp-4-targets-state-gemma3"]
)
def test_a_row_sees_neither_the_future_nor_other_documents(variant: str) -> None:
    """What may change a row of position p at step k, and nothing else does: tokens up to p + 1 + k (P-EAGLE: p + 1; an MLP:
    from p + 1 on) and the target's states up to p (an MLP: of p) of its own document."""
    trained = trainable(variant)
    kind = spec_of(variant).kind
    batch = features(trained, [SAMPLES[0], SAMPLES[1], SAMPLES[0]])
    plan = unroll.plan(batch.length_B, np.ones_like(batch.mask_N), 3 if kind is PEagle else steps_of(trained))
    first_N = torch.from_numpy(plan.first_N)
    with torch.no_grad():
        want = trained.unrolled(batch, plan)
        for place in (0, 1, 23, 39, 40, 41, 56, 57, 60):
            token_N = batch.token_N.clone()
            hidden_NTD = batch.hidden_NTD.clone()
            token_N[place] = (token_N[place] + 1) % VOCAB
            hidden_NTD[place] *= -2.0
            by_token = trained.unrolled(replace(batch, token_N=token_N), plan)
            by_state = trained.unrolled(replace(batch, hidden_NTD=hidden_NTD), plan)
            for k, step in enumerate(plan.steps):
                row_A = torch.from_numpy(step.rows)
                inside = first_N[row_A] == first_N[place]
                last = row_A + 1 + (0 if kind is PEagle else k)
                sees_token = inside & (last >= place) & bool(place != first_N[place])
                sees_state = inside & (row_A >= place)
                if kind is MLP:
                    sees_token = sees_token & (row_A < place)
                    sees_state = row_A == place
                if variant == "mtp-4-targets-state-gemma3":  # module k is given tokens from 1 + k on, and nothing of others
                    sees_token &= bool(place - first_N[place] >= 1 + k)
                assert (by_token[k] != want[k]).any(1).tolist() == sees_token.tolist(), (place, k)
                assert (by_state[k] != want[k]).any(1).tolist() == sees_state.tolist(), (place, k)


@pytest.mark.parametrize(("ratio", "least"), [(0.7, 0.2), (0.5, 0.0), (1.0, 0.2), (0.1, 0.5)])
def test_depths_keep_their_share_of_rows(ratio: float, least: float) -> None:
    """Depth k has ceil(max(ratio^k, least) n) rows of n, all of which depth k - 1 had; drawn by name and seed, not by place."""
    lengths = np.array([40, 1, 17, 100])
    names = ["a", "b", "c", "d"]
    num_steps_N = unroll.sample_num_steps(names, lengths, 8, ratio, least, 3)
    for name, part in zip(names, np.split(num_steps_N, np.cumsum(lengths)[:-1]), strict=True):
        kept = [int((part > k).sum()) for k in range(8)]
        assert kept == [math.ceil(max(ratio**k, least) * len(part) - 1e-9) for k in range(8)]
        assert kept[0] == len(part), "every row takes part in the first"
        assert np.array_equal(part, unroll.sample_num_steps([name], np.array([len(part)]), 8, ratio, least, 3))
    twins = [unroll.sample_num_steps([name], np.array([100]), 8, ratio, least, 3) for name in ("d", "e")]
    assert np.array_equal(*twins) == (ratio == 1.0), "samples differ"
    other = unroll.sample_num_steps(names, lengths, 8, ratio, least, 4)
    assert np.array_equal(other, num_steps_N) == (ratio == 1.0)
    plan = unroll.plan(lengths, np.random.default_rng(0).random(lengths.sum()) < 0.6, 8, 2, num_steps_N)
    for k, step in enumerate(plan.steps):
        assert (num_steps_N[step.rows] > k).all()
        if k:
            assert np.isin(step.rows, plan.steps[k - 1].rows).all()
            assert np.array_equal(plan.steps[k - 1].rows[step.from_prev], step.rows)


def test_the_rows_of_depths_are_sampled_anew_in_every_step_of_a_run() -> None:
    trained = trainable("peagle", down_sample_ratio=0.5)
    batch = features(trained, SAMPLES)
    rows = [trained.plan(batch, 4, seed).steps[3].rows.tolist() for seed in ("0 1", "0 1", "0 2")]
    assert rows[0] == rows[1] != rows[2]
    assert trained.loss(batch, seed="0 1")[0] != trained.loss(batch, seed="0 2")[0]


def test_mask_hidden_begins_as_what_is_usual() -> None:
    """The mean of the target's states; one that was trained before is left as it is."""
    spec = VARIANTS["peagle"]
    trained = drafter("peagle")
    taps = statistics(spec.target, trained.hidden_layers)
    trained.for_training(Depths(), Init(), taps, warm_start=True)
    close(trained.mask_hidden, grown("peagle").tensors["mask_hidden"], 1e-6)
    trained.for_training(Depths(), Init(), taps)
    close(trained.mask_hidden.flatten(), taps.flatten(1).mean(0), 1e-5)


# ----------------------------------------------------------------------------------------------- training

RUN = [sample(f"s{i}", 10 + 5 * (i % 6), [(4 + i % 3, 40)]) for i in range(14)]


def fitted(out_dir: Path, trained: Any, **more: Any) -> Any:
    return train(
        out_dir, drafter=trained, source=OnlineFeatures(trained.target, trained.hidden_layers, 1 << 28), samples=RUN, **more
    )


@pytest.mark.parametrize("variant", FEW)
def test_stopped_and_resumed_equals_straight(variant: str, tmp_path: Path) -> None:
    """20 steps are 10 and 10: loss, learning rate, weights, moments. The target is bit for bit what it was, and what was saved
    drafts as what was trained."""
    spec = spec_of(variant)
    how = {"max_steps": 20, "warmup_ratio": 0.2}
    more = {"down_sample_ratio": 0.6} if spec.kind is PEagle else {}
    target = loaded(spec.target)
    before = {name: x.clone() for name, x in target.model.state_dict().items()} | {"head": target.head_rows()[0].clone()}
    straight = fitted(tmp_path / "straight", trainable(variant, **more), **how)
    trained = trainable(variant, **more)
    first = fitted(tmp_path / "parts", trained, more={"advance": stop_at(10, signal.SIGTERM)}, **how)
    assert (first.result["interrupted"], first.result["step"]) == (True, 10)
    trained = trainable(variant, **more)
    second = fitted(tmp_path / "parts", trained, more={"resume": True}, **how)
    same(second.weights, straight.weights, 1e-7)
    same(state_of(tmp_path / "parts" / "last"), state_of(tmp_path / "straight" / "last"), 1e-7)
    same_rows(first.rows + second.rows, straight.rows)
    initial = trainable(variant).state_dict()
    assert not any(
        torch.equal(initial[name], x) for name, x in straight.weights.items() if name not in ("d2t", "feature_scale")
    )
    after = target.model.state_dict() | {"head": target.head_rows()[0]}
    assert all(torch.equal(x, after[name]) for name, x in before.items())

    drafted = []
    for model in (trained.to_checkpoint(), str(tmp_path / "parts" / "last")):
        proposer = spec.kind(target, model, spec.num_draft)
        proposals = watched(proposer)
        decode(target, proposer, prompts(20, 7), 8)
        drafted.append([one.drafted for one in proposals])
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("variant", FEW)
def test_micro_batches_do_not_matter(variant: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_steps": 2, "global_batch_size": 8, "lr": 1e-4}
    more = {"down_sample_ratio": 0.6} if spec_of(variant).kind is PEagle else {}
    at_once = fitted(tmp_path / "8", trainable(variant, **more), micro_batch_size=8, **how)
    parts = fitted(tmp_path / "3", trainable(variant, **more), micro_batch_size=3, **how)
    same(parts.weights, at_once.weights)
    same_rows(parts.rows, at_once.rows)


WORKER = """
import json, runpy, sys
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Every family: metrics and weights are those of one process at the same global batch."""
    path = conversations(tmp_path / "tiny.jsonl")
    common = [
        "model=tiny", "model.dtype=float32", "model.device=cpu", "data=jsonl", f"data.path={path}", "data.held_out=2",
        "train.max_steps=4", "train.global_batch_size=4", "train.micro_batch_size=1", "train.mixed_precision=no",
        "train.log_every=1", "train.eval_every=4", "train.save_every=4", "eval.num_prompts=1", "eval.max_tokens=6",
    ]  # fmt: skip
    jobs = {
        "mlp": ["mlp", "train.drafter.draft_vocab_size=100"],
        "mtp": ["mtp", "train.drafter.draft_vocab_size=null", "train.drafter.num_modules=2", "method.num_speculative_tokens=2"],
        "peagle": ["eagle", "method=peagle", "train.drafter.draft_vocab_size=100", "train.drafter.num_hidden_layers=2"],
    }
    (tmp_path / "worker.py").write_text(WORKER)
    commands = [
        [str(TRAIN / f"{script}.py"), *more, *common, f"out_dir={tmp_path / name}-2", *sharding]
        for (name, (script, *more)), sharding in zip(jobs.items(), ([], [], ["train.sharding=fsdp"]), strict=True)
    ]
    done = fork_ranks(tmp_path / "worker.py", json.dumps(commands), cwd=tmp_path)
    assert done.code == 0, done.err
    for name, (script, *more) in jobs.items():
        alone = call(script, *more, *common, f"out_dir={tmp_path / name}", cwd=tmp_path, folder=TRAIN)
        assert alone.code == 0, alone.err
        same_rows(rows_of(tmp_path / f"{name}-2" / "metrics.jsonl"), rows_of(tmp_path / name / "metrics.jsonl"))
        same(state_of(tmp_path / f"{name}-2" / "last"), state_of(tmp_path / name / "last"))
        assert native.load(tmp_path / name).method == name


# ------------------------------------------------------------------------- modules that a target ships


@pytest.fixture(scope="module")
def ships(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("ships")
    return lambda name: random_target(name, root)


@cache
def target_at(directory: Path) -> CausalLM:
    return CausalLM(directory, "float32", "cpu")


def by_transformers(directory: Path, scratch: Path, count: int) -> list[Any]:
    """The modules' layers, loaded by transformers: in a copy of the directory they are the target's last ones."""
    config = json.loads((directory / "config.json").read_text())
    tensors = tensors_of(directory)
    config["num_hidden_layers"] += count
    if "layer_types" in config:
        config["layer_types"] += ["full_attention"] * count
    for key in list(tensors):
        if key.startswith("mtp.layers.0."):
            tensors[key.replace("mtp.layers.0.", "model.layers.3.")] = tensors.pop(key)
    save_file(tensors, scratch / "model.safetensors", {"format": "pt"})
    (scratch / "config.json").write_text(json.dumps(config))
    model = hub.load_model(scratch, dtype=torch.float32, attn_implementation="eager").eval()
    return list(model.model.layers[3:])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_target_drafts_with_the_modules_that_it_ships(name: str, ships: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a model. Output is plain decoding's and Hugging Face's; states are those of the formula around the layer that
    transformers makes of the published tensors; what is trained is what drafts."""
    directory = ships(name)
    count = SHIPPED[name][2]
    target = target_at(directory)
    lengths = (3, 40, 20, 2, 9)
    qwen = name.startswith("qwen")
    num_draft = count if count > 1 else 3
    proposer, _ = SpeculativeConfig(method="mtp", num_speculative_tokens=num_draft).resolve().build(target)
    proposals = watched(proposer)
    output = decode(target, proposer, prompts(*lengths))
    assert output == decode(target, method.build("none", target), prompts(*lengths))
    assert {len(one.drafted) for one in proposals} == set(range(1, num_draft + 1))
    reference = hub.load_model(directory, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, answer in zip(prompts(*lengths), output, strict=True):
        ids = torch.tensor([prompt])
        how = {"do_sample": False, "max_new_tokens": 14, "min_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}
        assert reference.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist() == answer

    tensors = tensors_of(directory)
    modules = []
    for i, layer in enumerate(by_transformers(directory, tmp_path, count)):
        prefix = f"model.layers.{3 + i}."
        keys = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if qwen:
            prefix = "mtp."
            keys = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        ours = zip(("enorm", "hnorm", "eh_proj", "norm"), keys, strict=True)
        modules.append(ModuleInWords(target, {f"{o}.weight": tensors[f"{prefix}{k}.weight"] for o, k in ours}, layer))
    config = {"last_hidden_kind": "post_norm", "hidden_feedback": "own", "zero_first_embedding": not qwen}
    trained = MTP(target, None, 1)
    assert {key: trained.config[key] for key in config} == config
    batch = features(trained, [SAMPLES[0]])
    with torch.no_grad():
        plan = unroll.plan(batch.length_B, np.ones_like(batch.mask_N), num_draft)
        states = trained.unrolled(batch, plan)
        for row in (0, 30):
            want = mtp_states(config, modules, batch.token_N, batch.hidden_NTD[:, -1], row, num_draft)
            for k, (step, state) in enumerate(zip(plan.steps, states, strict=True)):
                close(state[step.rows.tolist().index(row)], want[k], 1e-4, f"row {row}, step {k}")
    trained.for_training(MTP.objective_type(), FROZEN)
    hold_to_training(trained, num_draft, (3, 40, 20, 2, 9))


def merged(checkpoint: Checkpoint, directory: Path, target: CausalLM) -> dict[str, Tensor]:
    """All tensors of the directory that is written."""
    directory.mkdir()
    shipped.write(checkpoint, directory, Export("vllm", target))
    tensors = tensors_of(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    return tensors


@pytest.mark.parametrize("name", SHIPPED)
def test_tuned_modules_go_back_into_their_target(name: str, ships: Callable[[str], Path], tmp_path: Path) -> None:
    """Untouched ones come back byte for byte, tuned ones under the same names; the directory is still the target."""
    directory = ships(name)
    count = SHIPPED[name][2]
    target = target_at(directory)
    before = tensors_of(directory)
    copies = {key for key in before if key.endswith(("shared_head.head.weight", "layers.3.embed_tokens.weight"))}
    copies |= {key for key in before if key.endswith("layers.4.embed_tokens.weight")}
    untouched = merged(shipped.read(directory), tmp_path / "same", target)
    assert untouched.keys() == before.keys() - copies, "what engines share with the target is left out"
    for key, tensor in untouched.items():
        assert tensor.dtype == before[key].dtype
        assert tensor.numpy().tobytes() == before[key].numpy().tobytes(), key

    trained = MTP(target, str(directory), 1)
    trained.for_training(MTP.objective_type(), FROZEN, warm_start=True)
    fitted(tmp_path / "run", trained, max_steps=3, lr=1e-2)
    saved = native.load(tmp_path / "run" / "last")
    tuned = merged(saved, tmp_path / "tuned", target)
    assert tuned.keys() == untouched.keys()
    ours = {key for key in tuned if key.startswith(("mtp.", "model.layers.3.", "model.layers.4."))}
    assert all(torch.equal(tuned[key], before[key]) for key in tuned.keys() - ours)
    changed = {key for key in ours if not torch.equal(tuned[key], before[key])}
    assert ours - changed <= {key for key in ours if "e_score_correction_bias" in key or ".mlp.experts." in key}
    again = shipped.read(tmp_path / "tuned")
    assert again.config == shipped.read(directory).config
    assert saved.tensors is not None
    assert again.tensors is not None
    assert again.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(again.tensors[key], tensor) for key, tensor in saved.tensors.items())
    assert hub.load_config(tmp_path / "tuned").num_nextn_predict_layers == count
    model, loading_info = hub.load_model(tmp_path / "tuned", dtype=torch.float32, output_loading_info=True)
    assert not loading_info["missing_keys"]
    ids = torch.tensor(prompts(12))
    original = hub.load_model(directory, dtype=torch.float32)
    assert torch.equal(model(ids).logits, original(ids).logits)
    other = CausalLM(tmp_path / "tuned", "float32", "cpu")
    assert merged(saved, tmp_path / "twice", other).keys() == tuned.keys()
    proposer = method.build("mtp", other, num_speculative_tokens=1)
    assert decode(other, proposer, prompts(9), 6) == decode(target, method.build("none", target), prompts(9), 6)


def test_a_targets_modules_are_tuned_by_the_script(ships: Callable[[str], Path], tmp_path: Path) -> None:
    """train/mtp.py with checkpoint= the target's directory; in the published recipe's words."""
    directory = ships("deepseek-moe")
    how = [
        f"model.path={directory}", f"checkpoint={directory}", "train=mtp", "model.dtype=float32", "model.device=cpu",
        "data=jsonl", f"data.path={conversations(tmp_path / 'tiny.jsonl')}", "data.held_out=2", "train.num_epochs=null",
        "train.max_steps=2", "train.global_batch_size=2", "train.mixed_precision=no", "train.eval_every=2",
        "eval.num_prompts=1", "eval.max_tokens=6",
    ]  # fmt: skip
    done = call("mtp", *how, f"out_dir={tmp_path / 'run'}", cwd=tmp_path, folder=TRAIN)
    assert done.code == 0, done.err
    tuned = native.load(tmp_path / "run")
    assert tuned.config == shipped.read(directory).config
    assert merged(tuned, tmp_path / "merged", target_at(directory))
    other = ("train.drafter.zero_first_embedding=false", f"out_dir={tmp_path / 'other'}")
    refused = call("mtp", *how, *other, cwd=tmp_path, folder=TRAIN)
    assert refused.code == 1
    assert "give train.drafter.zero_first_embedding=true to start from it" in refused.err


def test_a_parallel_drafter_knows_how_deep_it_was_trained() -> None:
    """P-EAGLE: in its checkpoint, in training and in drafting."""
    target = loaded("tiny-llama")
    drafter = PEagle(target, PEagle.init_checkpoint(target, {}, Init()), 3)
    with pytest.raises(ValueError, match=r"num_speculative_tokens=3.*num_depths=2; lower it"):
        drafter.for_training(Depths(num_depths=2), Init())
    drafter.for_training(Depths(num_depths=4), Init())
    checkpoint = drafter.to_checkpoint()
    assert checkpoint.config["num_depths"] == 4
    PEagle(target, checkpoint, 4)
    with pytest.raises(ValueError, match="num_speculative_tokens=5 is over the 4 that"):
        PEagle(target, checkpoint, 5)


def test_a_config_that_was_altered_is_one_line() -> None:
    target = loaded("tiny-llama")
    checkpoint = MLP.init_checkpoint(target, {}, Init())
    for change, words in (({"draft_vocab_size": None}, "draft_vocab_size=None"), ({"inner_dim": 10**12}, "cannot be built")):
        with pytest.raises(ValueError, match=words) as caught:
            MLP(target, replace(checkpoint, config=checkpoint.config | change), 3)
        assert "\n" not in str(caught.value)


def test_text_is_continued_where_everything_is_supervised() -> None:
    """The prompts that decode while training: up to what is supervised, or the beginning of a text that is so from its first
    token."""
    chat, text, long = (
        Sample("c", np.arange(9), np.arange(9) > 4),
        *(Sample(str(n), np.arange(n), np.ones(n, dtype=bool)) for n in (20, 500)),
    )
    assert [len(prompt) for prompt in prompts_of([chat, text, long], 3)] == [5, 10, 64]


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def test_modules_that_are_not_whole_are_refused(ships: Callable[[str], Path], tmp_path: Path) -> None:
    """Dropped by transformers, one of two missing, one key renamed, an embedding that was trained."""
    complete = ships("deepseek-moe")
    two = ships("deepseek-2-moe")
    qwen = ships("qwen3-next-moe")
    model = hub.load_model(complete, dtype=torch.float32)
    model.save_pretrained(tmp_path / "dropped")
    target = CausalLM(tmp_path / "dropped", "float32", "cpu")
    refused(lambda: method.build("mtp", target, num_speculative_tokens=1), "dropped", "speaks of 1", "they were dropped")

    key = "model.layers.3.self_attn.o_proj.weight"
    expert = "model.layers.3.mlp.experts.2.up_proj.weight"
    cases: dict[str, tuple[Path, Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
        "renamed": (complete, lambda x: renamed(x, key, key.replace("o_proj", "out_proj")), ("self_attn.out_proj.weight",)),
        "lacks": (complete, lambda x: x.pop(key), ("lack", "self_attn.o_proj.weight")),
        "renamed-norm": (qwen, lambda x: renamed(x, "mtp.norm.weight", "mtp.norms.weight"), ("norms.weight",)),
        "expert": (complete, lambda x: x.pop(expert), ("lack", "experts.2.up_proj.weight")),
        "experts": (
            complete,
            lambda x: renamed(x, expert, expert.replace("2.up", "7.up")),
            ("lack", "experts.2.up_proj.weight"),
        ),
        "one": (two, lambda x: renamed(x, "model.layers.4.enorm.weight", "model.layers.4.norm_e.weight"), ("2", "1 can be")),
        "embedding": (
            complete,
            lambda x: x["model.layers.3.embed_tokens.weight"].add_(0.1),
            ("embed_tokens", "not the target's"),
        ),
        "shape": (
            complete,
            lambda x: x.update({"model.layers.3.eh_proj.weight": torch.zeros(32, 32)}),
            ("eh_proj", "[32, 32]"),
        ),
    }
    for name, (source, change, words) in cases.items():
        directory = changed(source, tmp_path / name, change)
        refused(lambda source=source, directory=directory: MTP(target_at(source), str(directory), 1), str(directory), *words)
    cut = (complete / "model.safetensors").read_bytes()[:-100]
    directory = changed(complete, tmp_path / "cut", lambda x: None)
    (directory / "model.safetensors").write_bytes(cut)
    refused(lambda: MTP(target_at(complete), str(directory), 1), str(directory), "cannot be read")


def test_an_output_layer_of_its_own_is_kept_and_used(ships: Callable[[str], Path], tmp_path: Path) -> None:
    """DeepSeek's shared_head.head, where it was trained: its logits are its own. Engines replace it, so it is not written."""
    source = ships("deepseek-moe")
    key = "model.layers.3.shared_head.head.weight"
    directory = changed(source, tmp_path / "own", lambda x: x[key].add_(torch.randn(320, 32) * 0.3))
    target = target_at(directory)
    spec = load_file(directory / "model.safetensors")[key]
    proposer = MTP(target, None, 3)
    assert proposer.config["own_lm_head"]
    state = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        close(proposer.draft_logits(state), state @ spec.t(), 1e-5)
    refused(lambda: merged(proposer.to_checkpoint(), tmp_path / "again", target), "output layer of its own", "engines replace")
    assert not MTP(target_at(source), None, 3).config["own_lm_head"]
    both = changed(ships("deepseek-2-moe"), tmp_path / "both", lambda x: x[key].add_(0.1))
    refused(lambda: MTP(target_at(both), None, 2), str(both), "output layers of their own", "one at a time")


# --------------------------------------------------------------------------------------------- mistakes


def test_drafters_that_cannot_be_are_one_line() -> None:
    target = loaded()
    narrow = {"inner_dim": 48}
    refused(lambda: MLP.init_checkpoint(target, narrow, FROZEN), "inner_dim=48", "output layer", "train_lm_head=true")
    refused(lambda: MLP.init_checkpoint(target, narrow, Init()), "48 wide", "64 wide", "lm_head=random")
    refused(
        lambda: MLP.init_checkpoint(target, narrow | {"own_embedding": False}, Init(lm_head="random")),
        "own_embedding",
        "48",
        "64",
    )
    refused(lambda: PEagle.init_checkpoint(target, {"mask_token_id": 320}, Init()), "mask_token_id=320", "0..319")
    refused(lambda: PEagle.init_checkpoint(target, {"mask_token_id": -1}, Init()), "mask_token_id=-1")
    refused(lambda: MTP.init_checkpoint(target, {"num_module": 2}, Init()), "train.drafter key", "did you mean 'num_modules'")
    refused(lambda: MLP.init_checkpoint(target, {"n_heads": 2}, Init()), "train.drafter key 'n_heads'")
    refused(lambda: PEagle.objective_type(num_depth=2), "train.objective key", "did you mean 'num_depths'")
    refused(lambda: MTP.objective_type(ttt_step=2), "did you mean 'ttt_steps'")
    refused(lambda: MLP.objective_type(ttt_steps=2), "unknown train.objective key 'ttt_steps'")
    refused(lambda: PEagle.objective_type(down_sample_ratio=1.5), "down_sample_ratio=1.5")
    refused(lambda: MLP.init_checkpoint(target, {"n_predict": 0}, Init()), "n_predict=0")
    refused(lambda: MTP.init_checkpoint(target, {"last_hidden_kind": "post"}, Init()), "last_hidden_kind='post'", "post_norm")


@pytest.mark.parametrize("variant", ["mlp", "peagle", "mtp-2"])
def test_checkpoints_that_do_not_fit_are_one_line(variant: str, tmp_path: Path) -> None:
    spec = spec_of(variant)
    checkpoint = grown(variant)
    target = loaded()
    if spec.kind is not PEagle:
        more = {MLP: "n_predict=3", MTP: "each of 2 tokens"}[spec.kind]
        refused(lambda: drafter(variant, spec.num_draft + 1), f"num_speculative_tokens={spec.num_draft + 1}", more)
    refused(lambda: spec.kind(loaded("tiny-gemma2"), checkpoint, 1), "tiny (", "tiny-gemma2", "gemma2")
    other = {MLP: PEagle, PEagle: MTP, MTP: MLP}[spec.kind]
    refused(lambda: other(target, checkpoint, 1), f"method {spec.kind.name!r}", f"not {other.name!r}")
    native.save(tmp_path, checkpoint, {}, "")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    refused(lambda: spec.kind(target, str(tmp_path), 1), str(tmp_path), "model.safetensors cannot be read")
    tensors = dict(checkpoint.tensors)
    key = sorted(tensors)[0]
    tensors[f"{key}s"] = tensors.pop(key)
    refused(lambda: spec.kind(target, replace(checkpoint, tensors=tensors), 1), f"{key}s", f"did you mean {key!r}")
    if spec.kind is not MTP:
        refused(lambda: spec.kind(target, None, 1), "needs model")
    else:
        refused(lambda: spec.kind(target, None, 1), "it ships none", "train/mtp.py")


@pytest.mark.parametrize(
    ("variant", "key", "value", "words"),
    [
        ("peagle", "mask_token_id", 999, ("mask_token_id=999", "0..319")),
        ("peagle", "mask_token_id", None, ("mask_token_id=None",)),
        ("mlp-targets-embedding", "inner_dim", 48, ("inner_dim=48", "own_embedding=false")),
        ("mtp-2", "num_modules", 3, ("lack", "mtp.2.")),
        ("mtp-2", "num_modules", 1, ("unknown tensor 'mtp.1.",)),
    ],
)
def test_configs_that_were_altered_are_one_line(variant: str, key: str, value: Any, words: tuple[str, ...]) -> None:
    checkpoint = copy.deepcopy(grown(variant))
    checkpoint.config[key] = value
    refused(lambda: spec_of(variant).kind(loaded(), checkpoint, 1), *words)
