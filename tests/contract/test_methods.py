"""Methods on their own: n-gram by its vectors and its rule, and the contract of every file in conf/method."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import method
from specdec.core import Context, Draft, Proposer, Request
from specdec.drafter.trainable import TrainableDrafter
from specdec.method.extract_hidden_states import ExtractHiddenStates
from specdec.method.ngram import Ngram, count_followers, count_followers_reference, find_match, find_match_reference
from specdec.method.ngram_gpu import NgramGpu
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.methods import HANDED, METHODS, SLOTS, context, settings, text, tiny

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "drafters.json").read_text())


def drafts(proposer: Proposer, texts: dict[int, list[int]], **more: Any) -> list[list[int]]:
    draft = proposer.propose(context(proposer, texts, **more))
    return [row[:n].tolist() for row, n in zip(draft.token_BK, draft.length_B, strict=True)]


# ------------------------------------------------------------------------------------------------- n-gram


@pytest.mark.parametrize("case", VECTORS["ngram_vllm"])
def test_ngram_vectors(case: dict[str, Any]) -> None:
    bounds = {"prompt_lookup_min": case["min_n"], "prompt_lookup_max": case["max_n"]}
    assert drafts(Ngram(case["k"], **bounds), {0: case["tokens"]}) == [case["draft"]]
    on_device = NgramGpu(tiny(), case["k"], **bounds)
    on_device.reserve(1, SLOTS)
    assert drafts(on_device, {0: case["tokens"]}) == [case["draft"]]


@pytest.mark.parametrize("find", [find_match, find_match_reference])
def test_leftmost_or_latest(find: Any) -> None:
    tokens = np.array([1, 2, 7, 1, 2, 8, 3, 1, 2])
    assert find(tokens, 1, 3, False) == 2
    assert find(tokens, 1, 3, True) == 5
    longer_first = np.array([5, 2, 9, 1, 2, 8, 4, 2, 6, 1, 2])
    assert find(longer_first, 1, 3, False) == 5, "two tokens that agree beat one, wherever they stand"
    assert find(longer_first, 1, 3, True) == 5
    assert find(tokens, 3, 3, False) == len(tokens), "no earlier occurrence of three"
    assert find(np.array([4]), 1, 3, False) == 1


@pytest.mark.parametrize("latest", [False, True])
def test_ngram_is_its_rule_in_words(latest: bool) -> None:
    rng = np.random.default_rng(0)
    matched = 0
    for _ in range(1500):
        tokens = rng.integers(0, rng.integers(1, 5), rng.integers(1, 40))
        low = int(rng.integers(1, 5))
        high = low + int(rng.integers(0, 4))
        want = find_match_reference(tokens, low, high, latest)
        assert find_match(tokens, low, high, latest) == want, (tokens, low, high)
        matched += want < len(tokens)
    assert matched > 500


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 7}, (7, 7)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_ngram_bounds_as_in_vllm(settings: dict[str, int], bounds: tuple[int, int]) -> None:
    proposer = Ngram(3, **settings)
    assert (proposer.prompt_lookup_min, proposer.prompt_lookup_max) == bounds
    assert not proposer.prompt_lookup_latest


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_speculative_tokens": 0}, ("num_speculative_tokens=0", "at least 1")),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 0}, ("prompt_lookup_min=0", "1 <= min")),
        (
            {"num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            ("prompt_lookup_min=4", "prompt_lookup_max=3", "min <= max"),
        ),
    ],
)
def test_ngram_errors(settings: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Ngram(**settings)
    assert all(word in str(caught.value) for word in words), caught.value


def test_ngram_drafts_are_ragged_and_within_the_budget() -> None:
    proposer = Ngram(4, prompt_lookup_min=1, prompt_lookup_max=3)
    texts = {0: [1, 2, 3, 4, 1, 2], 2: [5, 6, 7], 3: [1, 2, 3, 4, 9, 8, 7, 1, 2]}
    assert drafts(proposer, texts) == [[3, 4, 1, 2], [], [3, 4, 9, 8]]
    assert drafts(proposer, texts, max_draft=[2, 4, 0]) == [[3, 4], [], []]


@pytest.mark.parametrize("latest", [False, True])
def test_ngram_on_the_device_drafts_the_same(latest: bool) -> None:
    """Ragged batches that grow by a few tokens at a time, some rows sitting out; confidence too."""
    rng = np.random.default_rng(2)
    drafted = 0
    for _ in range(60):
        low = int(rng.integers(1, 4))
        settings = {"prompt_lookup_min": low, "prompt_lookup_max": low + int(rng.integers(4)), "prompt_lookup_latest": latest}
        k = int(rng.integers(1, 6))
        vocab = int(rng.integers(1, 6))
        plain = Ngram(k, **settings)
        device = NgramGpu(tiny(), k, **settings)
        device.reserve(5, 20)
        device.reserve(5, SLOTS)
        texts = {row: rng.integers(0, vocab, rng.integers(1, 30)).tolist() for row in range(5)}
        for row, tokens in texts.items():
            device.on_start(row, Request("", tokens, SamplingParams()))
        for _ in range(8):
            rows = np.flatnonzero(rng.random(5) < 0.7).tolist() or [2]
            max_draft = rng.integers(0, k + 1, len(rows)).tolist()
            now = context(plain, {row: texts[row] for row in rows}, max_draft, return_confidence=True)
            want = plain.propose(now)
            got = device.propose(now)
            assert torch.equal(got.length_B, want.length_B)
            live_BK = torch.arange(want.token_BK.shape[1]) < want.length_B.unsqueeze(1)
            assert torch.equal(got.token_BK[live_BK], want.token_BK[live_BK])
            assert got.confidence_BKF is not None
            torch.testing.assert_close(got.confidence_BKF, want.confidence_BKF)
            drafted += int(live_BK.sum())
            for row in rows:
                texts[row] = [*texts[row], *rng.integers(0, vocab, rng.integers(1, 5)).tolist()]
    assert drafted > 500


def test_followers_are_counted_as_in_words() -> None:
    rng = np.random.default_rng(1)
    several = 0
    for _ in range(1500):
        tokens = rng.integers(0, rng.integers(1, 5), rng.integers(2, 40))
        high = int(rng.integers(1, 5))
        num_draft = int(rng.integers(0, 6))
        after = find_match(tokens, 1, high, bool(rng.integers(2)))
        num_draft = min(num_draft, len(tokens) - after)
        n, count_K, of_K = count_followers(tokens, after, num_draft, high)
        assert (n, count_K.tolist(), of_K.tolist()) == count_followers_reference(tokens, after, num_draft, high)
        assert ((count_K >= 1) & (count_K <= of_K)).all(), "the place that is drafted from is among them"
        several += bool((of_K > count_K).any())
    assert several > 300


def test_ngram_confidence() -> None:
    """7 came after (1, 2) once, 8 twice; the leftmost match drafts 7 and what came after it."""
    proposer = Ngram(2, prompt_lookup_min=2, prompt_lookup_max=2)
    text = [1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2]
    assert proposer.propose(context(proposer, {0: text})).confidence_BKF is None, "nobody asked"
    texts = {0: text, 1: [4, 5], 2: [5, 5, 6, 5, 5]}
    draft = proposer.propose(context(proposer, texts, return_confidence=True))
    assert draft.length_B.tolist() == [2, 0, 2]
    assert draft.confidence_BKF is not None
    assert draft.confidence_BKF[1].count_nonzero() == 0
    want = torch.log(torch.tensor([[1.5 / 2.5, 1.5 / 0.5], [1.5 / 0.5, 1.5 / 0.5]]))
    torch.testing.assert_close(draft.confidence_BKF[[0, 2], :, 0], want)
    assert (draft.confidence_BKF[[0, 2], :, 1] == 2 - 3).all()


def test_unknown_settings_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="no setting 'prompt_lookup_mix'; did you mean 'prompt_lookup_"):
        method.build("ngram", tiny(), num_speculative_tokens=3, prompt_lookup_mix=1)
    with pytest.raises(ValueError, match="unknown method 'sufix'; did you mean 'suffix'"):
        method.find("sufix")


# ----------------------------------------------------------------------------------------------- contract

Make = Callable[[], Proposer]
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
VARIANTS = [
    *((name, {}) for name in METHODS),
    *((name, PROBABILISTIC) for name in METHODS if "draft_sample_method" in method.settings(name)),
    ("hybrid", PROBABILISTIC),
]


@cache
def settings_of(name: str) -> dict[str, Any]:
    return settings(name, tiny())


def build(name: str, **more: Any) -> Proposer:
    """A method as its YAML has it, on `tiny`; where it needs a model, `tiny` itself or an untrained drafter for it."""
    speculative = copy.deepcopy(settings_of(name))
    if name == "hybrid" and more.pop("draft_sample_method", None):
        speculative["proposers"][1]["draft_sample_method"] = "probabilistic"
    proposer, _ = SpeculativeConfig(**speculative | more).resolve().build(tiny())
    proposer.reserve(4, SLOTS)
    # the target has processed every token once: who learns from its logits knows the same whatever the rows
    vocab_size = tiny().vocab_size
    logits_VV = torch.rand(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0))
    proposer.on_forward(torch.arange(vocab_size), logits_VV)
    return proposer


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join([variant[0], *variant[1].values()]))
def make(request: pytest.FixtureRequest) -> Make:
    name, more = request.param
    return lambda: build(name, **more)


@pytest.mark.parametrize("name", [name for name in METHODS if method.is_trained(name)])
def test_a_trained_method_keeps_the_contract_of_training(name: str) -> None:
    assert isinstance(build(name), TrainableDrafter)


TEXTS = {0: text(0, 40), 1: text(1, 23), 3: text(3, 61)}  # row 2 is free


def begin(proposer: Proposer, row: int, prompt: list[int]) -> None:
    proposer.on_start(row, Request(f"r{row}", prompt, SamplingParams(max_tokens=64)))
    HANDED.setdefault(proposer, {})[row] = 0


def check(proposer: Proposer, context: Context) -> Draft:
    """What every draft must be."""
    draft = proposer.propose(context)
    num_rows = len(context.rows)
    num_draft = draft.token_BK.shape[1]
    assert draft.token_BK.shape == (num_rows, num_draft)
    assert draft.token_BK.dtype == draft.length_B.dtype == torch.int64
    assert draft.token_BK.device == context.last_token_B.device
    assert draft.length_B.device.type == "cpu", "lengths decide shapes: the host must not wait for them"
    assert draft.length_B.shape == (num_rows,)
    length_B = draft.length_B.numpy()
    assert (length_B >= 0).all()
    assert (length_B <= np.minimum(context.max_draft_B, num_draft)).all()
    live_BK = torch.arange(num_draft) < draft.length_B.unsqueeze(1)
    live_N = draft.token_BK[live_BK]
    assert ((live_N >= 0) & (live_N < tiny().vocab_size)).all()
    assert draft.parent_BK is None or proposer.drafts_trees
    draft.check_tree(proposer.name)
    if draft.q_BKV is not None:
        assert draft.q_BKV.shape == (num_rows, num_draft, tiny().vocab_size)
        q_NV = draft.q_BKV[live_BK].double()
        assert (q_NV >= 0).all()
        torch.testing.assert_close(q_NV.sum(-1), torch.ones_like(q_NV[:, 0]), rtol=0, atol=1e-5)
        assert (q_NV.gather(1, live_N.unsqueeze(1)) > 0).all(), "drawn from q, so q of it is not 0"
    return draft


def test_room_is_counted_before_it_is_taken(make: Make) -> None:
    proposer = make()  # with room for 4 rows
    assert proposer.bytes_to_grow(4, SLOTS) == 0
    begin(proposer, 0, TEXTS[0][:-1])
    want = drafts(proposer, {0: TEXTS[0]})
    more = proposer.bytes_to_grow(6, 4 * SLOTS)
    assert more == 0 or more > proposer.bytes_to_grow(6, 2 * SLOTS) > 0
    proposer.reserve(6, 4 * SLOTS)
    assert proposer.bytes_to_grow(6, 4 * SLOTS) == 0
    assert drafts(proposer, {0: TEXTS[0]}) == want, "growing keeps what a running request has"


def test_a_draft_is_well_formed(make: Make) -> None:
    """One row, rows with a gap between them, budgets that differ, and no budget at all."""
    proposer = make()
    drafted = 0
    for row, tokens in TEXTS.items():
        begin(proposer, row, tokens[:-1])
    k = proposer.num_speculative_tokens
    for rows in ([0], [0, 1, 3], [1, 3], [3]):
        texts = {row: TEXTS[row] for row in rows}
        for max_draft in ([k] * len(rows), [k, min(k, 1), 0][: len(rows)], [0] * len(rows)):
            for temperature in (0.0, 0.8):
                draft = check(proposer, context(proposer, texts, max_draft, temperature))
                drafted += int(draft.length_B.sum())
    expects = k > 0 and not isinstance(proposer, ExtractHiddenStates)
    assert (drafted > 0) == expects, "on text that repeats itself, who drafts at all drafts something"


def test_at_temperature_zero_q_is_one_hot(make: Make) -> None:
    proposer = make()
    begin(proposer, 0, TEXTS[0][:-1])
    draft = check(proposer, context(proposer, {0: TEXTS[0]}))
    if draft.q_BKV is not None:
        q_KV = draft.q_BKV[0, : draft.length_B[0]]
        assert torch.equal(q_KV.amax(-1), torch.ones(len(q_KV)))


def test_confidence_changes_no_draft(make: Make) -> None:
    """It comes for those who asked for it only, as many numbers as the method says, and 0 where no token is."""
    plain = make()
    telling = make()
    for proposer in (plain, telling):
        for row, tokens in TEXTS.items():
            begin(proposer, row, tokens[:-1])
    for temperature in (0.0, 0.8):
        without = check(plain, context(plain, TEXTS, temperature=temperature))
        draft = check(telling, context(telling, TEXTS, temperature=temperature, return_confidence=True))
        assert without.confidence_BKF is None
        assert torch.equal(draft.length_B, without.length_B)
        live_BK = torch.arange(draft.token_BK.shape[1]) < draft.length_B.unsqueeze(1)
        assert torch.equal(draft.token_BK[live_BK], without.token_BK[live_BK])
        if telling.num_confidence_features and live_BK.any():
            assert draft.confidence_BKF is not None
            assert draft.confidence_BKF.shape == (*draft.token_BK.shape, telling.num_confidence_features)
            assert draft.confidence_BKF.isfinite().all()
        else:
            assert draft.confidence_BKF is None or not draft.confidence_BKF.count_nonzero()


def test_proposing_twice_is_proposing_once(make: Make) -> None:
    """The context is the same and holds the uniforms, so nothing else may count."""
    proposer = make()
    begin(proposer, 0, TEXTS[0][:-1])
    same_context = context(proposer, {0: TEXTS[0]}, temperature=0.7)
    before = same_context.token_RL.copy()
    first = check(proposer, same_context)
    second = check(proposer, same_context)
    assert torch.equal(first.token_BK, second.token_BK)
    assert torch.equal(first.length_B, second.length_B)
    assert (same_context.token_RL == before).all(), "a proposer does not write into the engine's tokens"


def test_a_row_drafts_the_same_alone_and_in_company(make: Make) -> None:
    alone = []
    together = make()
    for row, tokens in TEXTS.items():
        fresh_proposer = make()
        for proposer in (fresh_proposer, together):
            begin(proposer, row, tokens)
        alone += drafts(fresh_proposer, {row: tokens})
    assert drafts(together, TEXTS) == alone


def test_a_rejected_draft_leaves_no_trace(make: Make) -> None:
    """A proposer repairs its state: after rejections it drafts as one that is asked for the first time."""
    tokens = TEXTS[1]
    proposer = make()
    begin(proposer, 0, tokens)
    for step in range(6):
        draft = drafts(proposer, {0: tokens})[0]
        # what the target says: every third step it agrees with a drafted token, then it says something else
        tokens = [*tokens, *draft[: step % 3 == 2], 100 + step]
    fresh = make()
    begin(fresh, 0, TEXTS[1])
    assert drafts(proposer, {0: tokens}) == drafts(fresh, {0: tokens})


def test_an_accepted_draft_is_gone_on_from(make: Make) -> None:
    """The same where every drafted token was accepted and the bonus followed."""
    tokens = TEXTS[1]
    proposer = make()
    begin(proposer, 0, tokens)
    for step in range(4):
        tokens = [*tokens, *drafts(proposer, {0: tokens})[0], 100 + step]
    fresh = make()
    begin(fresh, 0, TEXTS[1])
    assert drafts(proposer, {0: tokens}) == drafts(fresh, {0: tokens})


def test_a_row_serves_one_request_after_another(make: Make) -> None:
    """The second request of a row drafts as if it were the first. A method may remember responses (`suffix`),
    so the two requests have no token in common."""
    first = text(5, 40)
    second = [token - 64 for token in text(6, 33)]
    fresh = make()
    used = make()
    begin(used, 0, first[:30])
    for length in (31, 34, 40):
        check(used, context(used, {0: first[:length]}))
    used.on_finish(0)
    for proposer in (fresh, used):
        begin(proposer, 0, second[:-1])
    assert drafts(used, {0: second}) == drafts(fresh, {0: second})
    used.on_finish(0)


# -------------------------------------------------------------------------------------------- draft model


def test_a_target_that_drafts_for_itself_drafts_what_it_would_say() -> None:
    proposer = build("draft_model")
    tokens = text(8, 20)
    begin(proposer, 0, tokens)
    drafted = drafts(proposer, {0: tokens})[0]
    for _ in range(proposer.num_speculative_tokens):
        cache = tiny().new_cache()
        cache.reserve(1, SLOTS)
        out = tiny().prefill(cache, 0, np.array(tokens), 0, chunk=512)
        tokens = [*tokens, int(out.logits[0].argmax())]
    assert drafted == tokens[20:]


def test_a_row_past_the_drafters_context_stops_drafting_alone() -> None:
    """The drafter sees length + K - 1 tokens at most; so 29 of its 30 taken leave room for two drafts."""
    proposer = build("draft_model", num_speculative_tokens=4, max_model_len=30)
    texts = {row: text(row, length) for row, length in enumerate([20, 29, 30, 45])}
    for row, tokens in texts.items():
        begin(proposer, row, tokens[:-1])
    draft = check(proposer, context(proposer, texts))
    assert draft.length_B.tolist() == [4, 2, 1, 0]


def test_probabilistic_drafts_follow_the_q_that_they_record() -> None:
    """Noise in even steps over [0, 1) gives every token as often as q says, in token-id order."""
    proposer = build("draft_model", draft_sample_method="probabilistic")
    tokens = text(9, 20)
    steps = 200
    begin(proposer, 0, tokens)
    seen = []
    for i in range(steps):
        same_context = context(proposer, {0: tokens}, max_draft=[1], temperature=1.0)
        same_context.uniform_BK = torch.full_like(same_context.uniform_BK, (i + 0.5) / steps)
        draft = check(proposer, same_context)
        seen.append(int(draft.token_BK[0, 0]))
    assert seen == sorted(seen)
    share_V = torch.bincount(torch.tensor(seen), minlength=tiny().vocab_size) / steps
    assert draft.q_BKV is not None
    assert (share_V - draft.q_BKV[0, 0]).abs().max() <= 1 / steps + 1e-6
