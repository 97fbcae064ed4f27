"""DFlash: who sees what, that training and drafting compute the same, and that a draft depends on nothing it must not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.drafter import anchors, unroll
from specdec.drafter.anchors import BlockAttention
from specdec.drafter.base import Init
from specdec.drafter.batch import Batch, Sample
from specdec.method.dflash import DFlash, Objective
from specdec.training.features import OnlineFeatures
from support.drafters import REDUCED, SAMPLES, close, decodes_as_plain, shaken
from support.methods import context, text, tiny

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "block_drafters.json").read_text())
FROZEN = Init(train_lm_head=False)
VARIANTS: dict[str, dict[str, Any]] = {
    "fill-in": {},
    "anchor": {"sample_from_anchor": True, "layer_type": "llama"},
    "causal": {"causal": True},
    "window": {"sliding_window": 5, "sliding_window_non_causal": True},
    "mixed": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "causal-window": {"causal": True, "sliding_window": 5, "sample_from_anchor": True},
}
EVERY = pytest.mark.parametrize("name", VARIANTS)
BLOCK = 5


def drafter(name: str, num_speculative_tokens: int = 3, is_reduced: bool = False, **settings: Any) -> DFlash:
    architecture = {"block_size": BLOCK, "num_hidden_layers": 2, "num_aux_hidden_states": 2} | VARIANTS[name]
    return shaken(DFlash, tiny(), architecture, REDUCED if is_reduced else None, num_speculative_tokens, **settings)


# ------------------------------------------------------------------------------------------- who sees what


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_query_sees_what_it_should(is_causal: bool) -> None:
    vector = VECTORS["dflash_training_mask"]
    anchor_A = np.array([1, 3])
    attention = BlockAttention(anchor_A, np.zeros(6, dtype=np.int64), 3, is_causal)
    visible = attention.visible()
    for query in vector["queries"]:
        row = visible[query["offset"] * 2 + query["block"]]
        assert np.flatnonzero(row[:6]).tolist() == query["context"]
        # the vector has block by block what lies here token by token
        keys = [6 + 3 * (place % 2) + place // 2 for place in np.flatnonzero(row[6:])]
        assert sorted(keys) == query["block_keys_causal" if is_causal else "block_keys"]
        assert anchor_A[query["block"]] + query["offset"] == query["position"]


def test_a_step_has_the_label_that_it_should() -> None:
    """Token k of a block drafts token anchor + k, or one further on if the anchor drafts too: step k has the same label."""
    vector = VECTORS["dflash_training_mask"]
    for labels, most, first in ((vector["labels_fill_in"], 2, 1), (vector["labels_from_anchor"], 3, 0)):
        mask_N = np.ones(6, dtype=bool)
        num_steps_N = np.zeros(6, dtype=np.int64)
        num_steps_N[[1, 3]] = anchors.num_steps(["a"], np.array([6]), mask_N, most, 9, 0)[[1, 3]]
        plan = unroll.plan(np.array([6]), mask_N, most, 1, num_steps_N)
        for b, anchor in enumerate((1, 3)):
            for k, step in enumerate(plan.steps):
                place = {int(row): i for i, row in enumerate(step.rows[step.supervised])}.get(anchor)
                label = None if place is None else int(plan.labelled[step.labelled[place]]) + 1
                assert label == labels[b][first + k]


def test_anchors_are_generated_tokens_before_generated_ones() -> None:
    """None is the first of its document, whose context would be empty; no block goes on beyond what was generated."""
    mask_N = np.array([1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=bool)  # a of 8, b of 4
    count_N = anchors.num_steps(["a", "b"], np.array([8, 4]), mask_N, 2, 9, 0)
    assert count_N.tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 0, 2, 1, 0]
    many = np.ones(400, dtype=bool)
    few = anchors.num_steps(["a"], np.array([400]), many, 3, 7, "x")
    assert (few > 0).sum() == 7
    both = anchors.num_steps(["b", "a"], np.array([400, 400]), np.concatenate([many, many]), 3, 7, "x")
    assert both[400:].tolist() == few.tolist(), "by the sample's name, whatever is beside it"
    assert (anchors.num_steps(["a"], np.array([400]), many, 3, 7, "y") != few).any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 40])
def test_attention_is_its_reference(is_causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "WINDOW_KEYS", 20)
    generator = torch.Generator().manual_seed(1)
    first_N = np.repeat([0, 9, 16], [9, 7, 4])
    anchor_A = np.array([1, 2, 8, 12, 19])

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = [random(20, 2), random(20, 2), random(15, 2), random(15, 2), random(15, 4)]
    out = []
    for way in ("attend", "attend_reference"):
        attention = BlockAttention(anchor_A, first_N, 3, is_causal)
        attention.write_context(0, *tensors[:2])
        attention.write_kv(0, *tensors[2:4])
        result = getattr(attention, way)(0, tensors[4], 0.3, window)
        out.append([result, *torch.autograd.grad((result * torch.arange(8)).sum(), tensors)])
    for fast, slow in zip(*out, strict=True):
        close(fast, slow, 1e-6)


# ------------------------------------------------------------------------------------------- trained as it drafts


def of_batch(samples: list[Sample], layers: tuple[int, ...]) -> Batch:
    return OnlineFeatures(tiny(), layers)(samples)


@EVERY
def test_what_is_trained_is_what_drafts(name: str) -> None:
    """Every block of every sample: the states of training give the logits of drafting after the anchor."""
    trained = drafter(name, 1)
    trained.for_training(Objective(), FROZEN)
    batch = of_batch(SAMPLES, trained.hidden_layers)
    most = trained.num_steps(0.0)
    plan = trained.plan(batch, most, 0)
    with torch.no_grad():
        states = trained.unrolled(batch, plan)
    drafting = drafter(name, most)
    drafting.reserve(1, 400)
    checked = 0
    for place in plan.steps[0].rows[::3]:
        first = plan.first_N[place]
        tokens = batch.token_N[first : place + 1].tolist()
        drafting.wipe()
        asking = replace(context(drafting, {0: tokens}), hidden=[batch.hidden(drafting.hidden_layers)[first:place]])
        logits, layout = drafting.block_logits(asking, np.array([most]))
        assert layout.drafted_at[1].tolist() == list(range(most))
        for k, step in enumerate(plan.steps):
            row = np.flatnonzero(step.rows == place)
            if len(row):
                close(logits[k], trained.draft_logits(states[k][row[0]]), 2e-5)
                checked += 1
    assert checked > 20


@EVERY
def test_a_block_depends_on_what_is_before_it_alone(name: str) -> None:
    """Not on the anchor's own state, nor on any later token or state, nor on another document."""
    trained = drafter(name, 1)
    trained.for_training(Objective(), FROZEN)
    batch = of_batch(SAMPLES[:2], trained.hidden_layers)
    plan = trained.plan(batch, trained.num_steps(0.0), 0)
    anchor = int(plan.steps[0].rows[len(plan.steps[0].rows) // 2])
    assert batch.hidden_NTD is not None
    changed = replace(batch, hidden_NTD=batch.hidden_NTD.clone(), token_N=batch.token_N.clone())
    assert changed.hidden_NTD is not None
    changed.hidden_NTD[anchor:] += 1.0
    changed.token_N[anchor + 1 :] = 7
    changed.hidden_NTD[: plan.first_N[anchor]] -= 1.0
    nearer = replace(batch, hidden_NTD=batch.hidden_NTD.clone())
    assert nearer.hidden_NTD is not None
    nearer.hidden_NTD[anchor - 1] += 1.0
    with torch.no_grad():
        before, after, other = (trained.unrolled(each, plan) for each in (batch, changed, nearer))
    for k, step in enumerate(plan.steps):
        for row in np.flatnonzero(step.rows == anchor):
            assert torch.equal(before[k][row], after[k][row])
            assert not torch.equal(before[k][row], other[k][row]), "the state right before the anchor is seen"


def record(new: DFlash) -> dict[str, Any]:
    """What the body of the drafter reads, from now on."""
    seen: dict[str, Any] = {}
    body = new.body

    def recorded(token_N: Tensor, position_N: Tensor, attention: Any) -> Tensor:
        seen.update(token=token_N.tolist(), position=position_N.tolist(), batch=attention.of[0].batch)
        return body(token_N, position_N, attention)

    new.body = recorded  # type: ignore[method-assign]
    return seen


def test_the_places_of_a_block_are_those_of_the_vector() -> None:
    vector = VECTORS["dflash_decoding"]
    length, most = vector["L"], vector["K"]
    for name, key in (("fill-in", "fill_in"), ("anchor", "from_anchor")):
        new = drafter(name, most)
        new.reserve(1, 64)
        seen = record(new)
        tokens = text(1, length)
        _, layout = new.block_logits(context(new, {0: tokens}), np.array([most]))
        want = vector[key]
        assert seen["position"] == want["position"]
        assert seen["token"] == [tokens[-1], *[new.mask_token_id] * (len(want["token"]) - 1)]
        assert layout.query_N.tolist() == want["logits_at_slots"]
        last = want["position"][-1]
        assert seen["batch"].visible_BMS(None)[0].sum(1).tolist() == [last + 1] * len(want["position"])


# ------------------------------------------------------------------------------------------- decoding


@EVERY
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_output_is_plain_decodings(name: str, batch_size: int) -> None:
    decodes_as_plain(partial(drafter, name), batch_size)


@EVERY
def test_a_row_drafts_the_same_in_any_company(name: str) -> None:
    alone = drafter(name, 4)
    alone.reserve(1, 300)
    together = drafter(name, 4)
    together.reserve(6, 300)
    texts = {0: text(1, 30), 2: text(2, 4), 5: text(3, 90)}
    drafts = together.propose(context(together, texts, [4, 2, 4]))
    for place, (row, most) in enumerate(zip(texts, (4, 2, 4), strict=True)):
        alone.wipe()
        one = drafter(name, 4)
        one.reserve(1, 300)
        draft = one.propose(context(one, {0: texts[row]}, [most]))
        assert draft.token_BK[0].tolist() == drafts.token_BK[place, :most].tolist()


@EVERY
def test_a_shorter_draft_is_the_beginning_of_a_longer_one(name: str) -> None:
    """As at the end of a request, where fewer tokens are left: the masks of a block see each other, and all stay."""
    drafts = []
    for most in (1, 2, 4):
        new = drafter(name, 4)
        new.reserve(1, 300)
        logits, layout = new.block_logits(context(new, {0: text(1, 30)}), np.array([most]))
        assert (layout.num_places, len(logits)) == (4 + new.first_offset, most)
        drafts.append(logits)
    assert torch.equal(drafts[0], drafts[2][:1])
    assert torch.equal(drafts[1], drafts[2][:2])


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ({"block_size": 1}, ("block_size", "2")),
        ({"block_size": 5000}, ("block_size=5000", "4096")),
        ({"mask_token_id": 320}, ("mask_token_id=320", "0..319")),
        ({"aux_hidden_state_layer_ids": [1, 9]}, ("layer 9", "0..4")),
        ({"aux_hidden_state_layer_ids": []}, ("at least one layer",)),
        ({"layer_types": ["full_attention"]}, ("1 layers", "num_hidden_layers=5")),
        ({"layer_types": ["sliding_attention"] * 5}, ("sliding_window",)),
    ],
)
def test_mistakes_are_one_line(architecture: dict[str, Any], words: tuple[str, ...], one_line: Any) -> None:
    one_line(lambda: DFlash.init_checkpoint(tiny(), architecture, FROZEN), *words)


def test_a_block_longer_than_trained_is_refused(one_line: Any) -> None:
    one_line(lambda: drafter("fill-in", 5), "num_speculative_tokens=5", "4", "lower it")
    assert drafter("anchor", 5).max_draft_tokens == 5
