"""Method `hybrid`: who drafts for which row, what a part that sat out knows, what is recorded, and what cannot be composed."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import method, rejection
from specdec.core import Context, Draft, Proposer, Request, RequestStats, StatelessProposer, draft_from_lists
from specdec.engine import Engine
from specdec.measure import stats
from specdec.measure.report import run as run_report
from specdec.method.hybrid import Hybrid
from specdec.params import SamplingParams
from specdec.policy import profiling
from specdec.speculative_config import SpeculativeConfig
from support.methods import SLOTS, context, states, text, tiny
from support.table import NUM_DRAFT, TableLM, scheme, with_models

K = {"num_speculative_tokens": NUM_DRAFT}
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3}


def build(*parts: dict[str, Any], target: Any = None, **more: Any) -> Hybrid:
    """With fresh drafters for the target; `tiny` unless given."""
    target = target or tiny()
    proposer = method.build("hybrid", target, **with_models("hybrid", K | {"proposers": list(parts)} | more, target, {}))
    assert isinstance(proposer, Hybrid)
    proposer.reserve(4, SLOTS)
    return proposer


def begin(proposer: Proposer, row: int, prompt: list[int]) -> None:
    proposer.on_start(row, Request(f"r{row}", prompt, SamplingParams(max_tokens=64)))


# -------------------------------------------------------------------------------------------------- conditions


def test_the_first_part_that_drafts_makes_the_draft() -> None:
    """A match of two tokens, of one (which is too short for the first part), and of none."""
    texts = {0: [5, 6, 7, 5, 6], 1: [5, 6, 7, 8, 6], 3: [5, 6, 7, 8, 9]}
    last = {"method": "custom_class", "model": "support.table.Ragged"}
    proposer = build(NGRAM, {"method": "ngram", "prompt_lookup_min": 1}, last)
    draft = proposer.propose(context(proposer, texts))
    assert draft.proposer_B == ["ngram-1", "ngram-2", "custom_class"]
    assert [row[:n].tolist() for row, n in zip(draft.token_BK, draft.length_B, strict=True)] == [[7, 5, 6], [7, 8, 6], [9]]
    texts[3] = [5, 6, 7, 8]
    draft = proposer.propose(context(proposer, texts))
    assert draft.proposer_B == ["ngram-1", "ngram-2", ""]
    assert draft.length_B.tolist() == [3, 3, 0]


def test_a_suffix_part_drafts_from_its_least_score_on() -> None:
    tokens = [9, 1, 2, 3, 1, 2, 4, 1, 2]  # 3 came after one of three, 1 after that: two thirds of a token
    for least, name in ((0.6, "suffix"), (0.7, "custom_class")):
        proposer = build({"method": "suffix", "min_score": least}, {"method": "custom_class", "model": "support.table.Ragged"})
        begin(proposer, 0, tokens[:-1])
        assert proposer.propose(context(proposer, {0: tokens})).proposer_B == [name]


def test_a_part_may_draft_less_than_the_whole() -> None:
    proposer = build(NGRAM | {"num_speculative_tokens": 1}, {"method": "ngram", "prompt_lookup_min": 1})
    draft = proposer.propose(context(proposer, {0: [5, 6, 7, 5, 6], 1: [5, 6, 7, 8, 6]}))
    assert draft.length_B.tolist() == [1, 3]
    draft = proposer.propose(context(proposer, {0: [5, 6, 7, 5, 6], 1: [5, 6, 7, 8, 6]}, max_draft=[3, 2]))
    assert draft.length_B.tolist() == [1, 2]


# ---------------------------------------------------------------------------------------------- mixed batches


def test_probs_are_recorded_where_one_part_draws() -> None:
    texts = {0: text(0, 40), 1: [65, 66, 67, 68, 69]}
    for how in ("greedy", "probabilistic"):
        proposer = build(NGRAM, {"method": "eagle3", "model": "fresh", "draft_sample_method": how})
        for row, tokens in texts.items():
            begin(proposer, row, tokens[:-1])
        draft = proposer.propose(context(proposer, texts, temperature=1.0))
        assert draft.proposer_B == ["ngram", "eagle3"]
        if how == "greedy":
            assert draft.q_BKV is None
            continue
        assert draft.q_BKV is not None
        assert torch.equal(draft.q_BKV[0].argmax(-1), draft.token_BK[0])
        assert torch.equal(draft.q_BKV[0].amax(-1), torch.ones(NUM_DRAFT))
        assert (draft.q_BKV[1].amax(-1) < 0.5).all()
        torch.testing.assert_close(draft.q_BKV.sum(-1), torch.ones(2, NUM_DRAFT))


def test_confidence_has_columns_for_each_part() -> None:
    """Of n-gram: that it drafted, and two numbers; then the same of the drafter, which has one."""
    parts = NGRAM, {"method": "eagle3", "model": "fresh"}
    texts = {0: text(0, 40), 1: [65, 66, 67, 68, 69]}
    alone = []
    for part, row in zip(parts, texts, strict=True):
        proposer: Any = build(part)
        begin(proposer, row, texts[row][:-1])
        alone.append(proposer.propose(context(proposer, {row: texts[row]}, return_confidence=True)).confidence_BKF[0])
    proposer = build(*parts)
    assert proposer.num_confidence_features == 5
    for row, tokens in texts.items():
        begin(proposer, row, tokens[:-1])
    confidence_BKF = proposer.propose(context(proposer, texts, return_confidence=True)).confidence_BKF
    assert torch.equal(confidence_BKF[0], torch.cat([alone[0], torch.zeros(NUM_DRAFT, 2)], 1))
    torch.testing.assert_close(confidence_BKF[1], torch.cat([torch.zeros(NUM_DRAFT, 3), alone[1]], 1))
    assert (confidence_BKF[0, :, 0] == 1).all()
    assert (confidence_BKF[1, :, 3] == 1).all()


def test_every_part_sees_its_own_layers_in_its_own_order() -> None:
    seen: list[tuple[tuple[int, ...], Tensor]] = []

    class Looks(StatelessProposer):
        def __init__(self, layers: tuple[int, ...]) -> None:
            self.num_speculative_tokens = 1
            self.hidden_layers = layers

        def propose(self, context: Context) -> Draft:
            assert context.hidden is not None
            seen.append((self.hidden_layers, context.hidden[0]))
            return draft_from_lists([np.zeros(0, dtype=np.int64) for _ in context.rows])

    proposer = build(*[{"method": "mlp", "model": "fresh"}] * 3)
    for turn, layers in zip(proposer.components, [(3, 1), (1, 2), (3, 1, 2)], strict=True):
        turn.proposer = Looks(layers)
    proposer.compose()
    assert proposer.hidden_layers == (3, 1, 2)
    begin(proposer, 0, [1, 2, 3])
    proposer.propose(context(proposer, {0: [1, 2, 3, 4]}))
    assert [layers for layers, _ in seen] == [(3, 1), (1, 2), (3, 1, 2)]
    for layers, hidden_NTD in seen:
        assert torch.equal(hidden_NTD, states((1, 2, 3), layers))


# --------------------------------------------------------------------------------------- parts that sit out


LEARNED = {name: {"method": name, "model": "fresh"} for name in ("eagle", "eagle3", "mlp", "mtp", "peagle")} | {
    "draft_model": {"method": "draft_model", "model": "same"},
    "pard": {"method": "pard", "model": "same", "pard_token": 5},
}


class Gate(StatelessProposer):
    """Drafts token 1 for a row in chosen steps, and so keeps others from it."""

    num_speculative_tokens = NUM_DRAFT
    open = False

    def propose(self, context: Context) -> Draft:
        return draft_from_lists([np.array([1] if self.open else [], dtype=np.int64) for _ in context.rows])


@pytest.mark.parametrize("name", LEARNED)
def test_a_part_that_sat_out_drafts_as_one_that_never_did(name: str) -> None:
    """Two turns, of which the second's draft is rejected; then it sits out for longer than its states are kept."""
    proposer = build(NGRAM, LEARNED[name])
    tokens = text(3, 30)
    gate = proposer.components[0].proposer = Gate()
    begin(proposer, 0, tokens)
    rng = np.random.default_rng(0)
    with_gate = dict(zip(("ngram", name), (True, False), strict=True))
    for step in range(60):
        gate.open = step not in (0, 1, 20, 59)
        draft = proposer.propose(context(proposer, {0: tokens}))
        assert with_gate[draft.proposer_B[0]] == gate.open  # type: ignore[index]
        drafted = draft.token_BK[0, : draft.length_B[0]].tolist()
        # some drafts are accepted, and then comes a token that nobody drafted; where it sits out, a few tokens at a time
        emitted = drafted[: step % 3] if not gate.open else rng.integers(97, 123, rng.integers(0, 4)).tolist()
        if step == 59:
            break
        tokens = [*tokens, *emitted, int(rng.integers(97, 123))]
    assert len(tokens) < SLOTS
    fresh = build(LEARNED[name])
    begin(fresh, 0, text(3, 30))
    want = fresh.propose(context(fresh, {0: tokens}))
    assert drafted == want.token_BK[0, : want.length_B[0]].tolist()


def test_states_of_a_row_that_sits_out_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 32
    for module in ("engine", "method.hybrid"):
        monkeypatch.setattr(f"specdec.{module}.MAX_PENDING_STATES", limit)
    target = tiny()
    kept = 0
    proposer = build(NGRAM, {"method": "eagle3", "model": "fresh"}, target=target)
    gate = proposer.components[0].proposer = Gate()
    gate.open = True
    turn = proposer.components[1]
    engine = Engine(target, proposer, scheme("standard"), max_batch_size=2, prefill_chunk_size=64)
    requests = [
        Request(str(i), text(i, 40), SamplingParams(temperature=0, max_tokens=3 * limit, ignore_eos=True)) for i in range(2)
    ]
    engine.add(*requests)
    steps = 0
    while engine.num_running or engine.waiting:
        engine.step()
        steps += 1
        held = [sum(len(part) for _, part in kept_states) for kept_states in turn.pending_R.values()]
        kept = max(kept, *held, 0) if held else kept
        if steps == 2 * limit:
            gate.open = False
    assert limit // 2 < kept <= limit + NUM_DRAFT + 1
    assert not turn.pending_R, "a row that is free holds nothing"
    assert set(requests[0].stats.proposer) == {"ngram", "eagle3", ""}


# -------------------------------------------------------------------------------------------------- records


@cache
def decoded() -> list[RequestStats]:
    target = TableLM.random(3, scale=0.7)
    proposer = build(NGRAM, {"method": "eagle3", "model": "fresh-reduced"}, target=target)
    engine = Engine(target, proposer, scheme("standard"), max_batch_size=3)
    params = SamplingParams(temperature=0.8, max_tokens=40)
    requests = [Request(str(i), [0, 1, 2, i % 3], params, seed=i) for i in range(7)]
    # one that asks for no drafts at all, and one that is through at once
    params = [{"speculative_config": {"num_speculative_tokens": 0}, "max_tokens": 9}, {"max_tokens": 1}, {"max_tokens": 2}]
    requests += [Request(f"x{i}", [1, 2, 1], SamplingParams(**params_of_request)) for i, params_of_request in enumerate(params)]
    return [request.stats for request in engine.run(requests)]


def test_records_by_proposer_sum_up_to_the_whole() -> None:
    total = stats.pool(decoded())
    parts = stats.by_proposer(decoded())
    assert set(parts) == {"ngram", "eagle3", "none"}
    for request_stats in decoded():
        assert len(request_stats.proposer) == len(request_stats.drafted)
    for key in ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert sum(part[key] for part in parts.values()) == total[key], key
    assert parts["none"]["num_drafts"] == 0
    assert parts["ngram"]["num_drafts"] == parts["ngram"]["num_steps"] > 0
    assert sum(part["output_share"] for part in parts.values()) == pytest.approx(1)


def test_the_summary_has_them_for_composed_methods_only() -> None:
    run = {str(i): request_stats for i, request_stats in enumerate(decoded())}
    category_of = {name: "a" if int(name) < 4 else "b" for name in run}
    summary = run_report.summarize(run, {}, category_of, None)
    for numbers in (summary["overall"], *summary["categories"].values()):
        assert sum(part["num_steps"] for part in numbers["proposers"].values()) == numbers["num_steps"]
    assert run_report.tables(summary | {"busy": []}, "title")[2].row_count == 3
    plain = RequestStats()
    plain.add(3, 2, 3, 0.1, 0.2, 1)
    assert stats.by_proposer([plain]) == {}
    assert "proposers" not in run_report.summarize({"0": plain}, {}, {"0": "a"}, None)["overall"]


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["needs proposers", "conf/method/hybrid.yaml"]),
        ({"proposers": []}, ["proposers=[]", "at least one"]),
        ({"proposers": [NGRAM, {"method": "ngrm"}]}, ["proposers[1]", "unknown method 'ngrm'", "did you mean 'ngram'"]),
        ({"proposers": [NGRAM | {"promt_lookup_min": 2}]}, ["proposers[0]", "did you mean 'prompt_lookup_min'"]),
        ({"proposers": [{"method": "hybrid", "proposers": [NGRAM]}]}, ["proposers[0]", "a hybrid inside a hybrid"]),
        ({"proposers": [NGRAM | {"min_score": 1.0}]}, ["proposers[0]", "'ngram' takes no setting 'min_score'"]),
        (
            {"proposers": [{"method": "suffix", "prompt_lookup_min": 2}]},
            ["proposers[0]", "'suffix' takes no setting 'prompt_lookup_min'"],
        ),
        ({"proposers": [{"method": "none"}]}, ["proposers[0]", "'none' drafts nothing"]),
        ({"proposers": [{"method": "extract_hidden_states"}]}, ["proposers[0]", "drafts nothing"]),
        ({"proposers": [NGRAM, {}]}, ["proposers[1]", "neither method nor model", "checkpoint=DIR"]),
        ({"proposers": [NGRAM, {"method": "eagle3"}]}, ["proposers[1]", "'eagle3' needs model"]),
        ({"proposers": [NGRAM], "model": "here"}, ["model=here", "no proposer takes a model"]),
        ({"proposers": [{"method": "eagle3"}, {"method": "mlp"}], "model": "here"}, ["model=here", "2 proposers take a model"]),
        ({"proposers": [NGRAM | {"num_speculative_tokens": 9}]}, ["proposers[0]", "=9 is over the 3 of hybrid", "lower it"]),
        ({"proposers": [NGRAM | {"num_speculative_tokens": 0}]}, ["proposers[0]", "num_speculative_tokens=0"]),
        ({"proposers": [NGRAM | {"prompt_lookup_min": "2"}]}, ["proposers[0]", "prompt_lookup_min='2'"]),
        ({"proposers": [NGRAM | {"rejection_sample_method": "block"}]}, ["proposers[0]", "is not a proposer's"]),
        ({"proposers": [NGRAM], "prompt_lookup_min": 2}, ["'hybrid' takes no setting 'prompt_lookup_min'"]),
    ],
)
def test_what_cannot_be_composed(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SpeculativeConfig(method="hybrid", **K | config).resolve().build(tiny())
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_without_a_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="needs num_speculative_tokens"):
        SpeculativeConfig(method="hybrid", proposers=[NGRAM]).resolve().build(tiny())


class Noting(StatelessProposer):
    """Drafts in the steps whose text has the right length, and compares what it is given with the record."""

    num_speculative_tokens = NUM_DRAFT

    def __init__(self, name: str, every: int) -> None:
        self.name = name
        self.every = every
        self.num_accepted = Counter[int]()

    def propose(self, context: Context) -> Draft:
        assert context.num_accepted_prev_B is not None
        for request, num_accepted in zip(context.requests, context.num_accepted_prev_B.tolist(), strict=True):
            accepted = [a for who, a in zip(request.stats.proposer, request.stats.accepted, strict=True) if who == self.name]
            assert num_accepted == (accepted[-1] if accepted else 0)
            self.num_accepted[num_accepted] += 1
        counts = np.where(context.length_B % self.every == 0, np.minimum(context.max_draft_B, 3), 0)
        return draft_from_lists([np.full(count, 7) for count in counts])


def test_a_part_sees_what_was_accepted_of_its_own_drafts() -> None:
    """By lot, with two parts that take turns and steps without any draft."""
    proposer = build(NGRAM, LEARNED["draft_model"])
    parts = [Noting("ngram", 3), Noting("draft_model", 2)]
    for turn, part in zip(proposer.components, parts, strict=True):
        turn.proposer = part
    verifier = rejection.build("synthetic", NUM_DRAFT, synthetic_acceptance_rates=[0.8, 0.5, 0.3])
    engine = Engine(tiny(), proposer, verifier, max_batch_size=2)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    assert len(list(engine.run([Request(str(i), text(3 + i, 12), params, seed=i) for i in range(6)]))) == 6
    assert all(set(part.num_accepted) == {0, 1, 2, 3} for part in parts)


def test_a_part_drafts_as_much_as_it_can() -> None:
    """A drafter that was made for fewer tokens than the whole's K drafts these, unless it was given another number."""
    mlp = LEARNED["mlp"] | {"model": "fresh"}
    for most in (2, 5):
        proposer = build(NGRAM, mlp, num_speculative_tokens=most)
        assert [turn.proposer.num_speculative_tokens for turn in proposer.components] == [most, min(most, 3)]
    with pytest.raises(ValueError, match=r"proposers\[1\]: num_speculative_tokens=4, .* n_predict=3"):
        build(NGRAM, mlp | {"num_speculative_tokens": 4}, num_speculative_tokens=5)


def test_drafts_of_the_model_part_are_counted() -> None:
    """Costs are of the part that takes a model; a lookup's drafts cost nothing."""
    proposer = build(NGRAM, LEARNED["eagle3"])
    assert proposer.cost_proposer is proposer.components[1].proposer
    for row in range(2):
        begin(proposer, row, [5, 6, 7, 5])
    draft = proposer.propose(context(proposer, {0: [5, 6, 7, 5, 6], 1: [5, 6, 7, 8, 9]}))
    assert draft.proposer_B == ["ngram", "eagle3"]
    assert draft.num_model_drafted_B is not None
    assert draft.num_model_drafted_B.tolist() == [0, int(draft.length_B[1])]
    assert draft.scatter_rows(np.array([0, 2]), 3).num_model_drafted_B.tolist() == [0, 0, int(draft.length_B[1])]  # type: ignore[union-attr]
    assert build(NGRAM, {"method": "ngram", "prompt_lookup_min": 1}).cost_proposer is None
    table = profiling.measure(tiny(), proposer, [1], context=20, repeats=1)
    assert table.draft_s[0][-1] > 1e-4 + 2 * table.draft_s[0][0]
