"""K that changes from step to step: output stays the target's, token for token at temperature 0 and in distribution above;
policies decide as documented; costs are what the tables hold."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import method
from specdec.core import Context, Draft, Request, StatelessProposer
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.policy import adaptive, cost_table, profiling
from specdec.policy.adaptive import AcceptanceModel, Adaptive, Scheduled, causal_count, check_schedule, convex_hull
from specdec.policy.cost_table import CostTable
from specdec.speculative_config import SpeculativeConfig
from support.all_pairs import all_pairs, some_with_all
from support.decoding import TABLE, decode_reference, make, outputs, prompts
from support.stretches import TABLE as SMALL
from support.stretches import adverse, decode, drafts_of, misfit
from support.table import NUM_DRAFT, OF_ALL_KINDS, POLICIES, TableLM, costs, methods, policy, proposer, scheme


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM("tiny", "float32", "cpu")


Case = tuple[str, dict[str, Any]]
DRAFTING = [case for case in methods() if case.values[0][0] not in ("none", "extract_hidden_states")]
WHAT = "num_speculative_tokens_per_batch_size"
ROWS = 32  # enough that a step is cheap, few enough that policies draft


# ------------------------------------------------------------------------------------------- output is the target's


def some_requests(count: int, temperature: float) -> list[Request]:
    return [make(p, i, max_tokens=20, temperature=temperature) for i, p in enumerate(prompts(count))]


@cache
def plainly(count: int, temperature: float) -> list[list[int]]:
    return [decode_reference(TABLE.logits_after, request)[0] for request in some_requests(count, temperature)]


@pytest.mark.parametrize(
    ("case", "name", "rows", "temperature", "rejecting"),
    all_pairs(
        DRAFTING,
        ["restless", "scheduled", "both"],
        [pytest.param(*kind, id=kind[-1]) for kind in ((1, 0.0, "standard"), (3, 0.8, "match"), (8, 0.0, "block"))],
    ),
)
def test_output_is_plain_decodings(case: Case, name: str, rows: int, temperature: float, rejecting: str) -> None:
    """Greedy rows under standard and block, sampled ones under match; batches of 1, 3 and 8; rows sit out, and come back."""
    drafting = proposer(case, TABLE)
    engine = Engine(TABLE, drafting, scheme(rejecting), rows, prefill_chunk_size=3, policy=policy(name, drafting, rows))
    requests = some_requests(2 + rows, temperature)
    assert len(list(engine.run(requests))) == len(requests)
    assert outputs(requests) == plainly(2 + rows, temperature)


def sampled_or_remembered() -> list[Any]:
    """Cases whose drafts are no functions of the text, or remember other requests; some of each kind, the rest in the long
    proof."""
    cases = [case for case in DRAFTING if "greedy" not in case.id and "same" not in case.id]
    return [
        pytest.param(*case.values, id=case.id, marks=[] if case.id in OF_ALL_KINDS else pytest.mark.prove) for case in cases
    ]


@pytest.mark.parametrize("case", sampled_or_remembered())
def test_joint_distribution(case: Case) -> None:
    """Lengths chosen by what was accepted, and verified by confidence: the distribution stays what it is. (Of greedy drafters
    the output at temperature 0 and under `match`, above, says as much: their drafts are functions of the text.)"""
    drafting = proposer(case, SMALL)
    deciding = policy("both", drafting, ROWS)
    requests = decode(SMALL, drafting, scheme("standard"), num_requests=160, rows=ROWS, deciding=deciding)
    assert misfit(SMALL, requests) < 1


@pytest.mark.parametrize(("name", "rejecting"), some_with_all(list(POLICIES), ["standard", "block"], ["restless", "prunes"]))
def test_joint_distribution_of_an_adverse_drafter(name: str, rejecting: str) -> None:
    """Probabilistic drafts, rejected somewhere most of the time; and lengths that do change."""
    drafting = adverse(SMALL)
    requests = decode(SMALL, drafting, scheme(rejecting), num_requests=400, rows=ROWS, deciding=policy(name, drafting, ROWS))
    assert misfit(SMALL, requests) < 1
    lengths = {length for request in requests for length in request.stats.drafted}
    assert len(lengths) > 2
    assert (sum(sum(request.stats.trimmed) for request in requests) > 0) == (name in ("restless", "prunes", "both"))


class PrunesByToken(Scheduled):
    """What is forbidden: a token is cut by its own probability."""

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        assert draft.q_BKV is not None
        likely_BK = draft.q_BKV.gather(-1, draft.token_BK.unsqueeze(-1)).squeeze(-1) > 0.4
        return np.minimum(draft.length_B.numpy(), likely_BK.long().cumprod(1).sum(1).numpy())


class ByWhatComesAfter(Scheduled):
    """Forbidden too: whether a token stays hangs on the distribution after it, which was made from it."""

    needs_confidence = True

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        assert draft.confidence_BKF is not None
        return np.where((draft.confidence_BKF[:, -1, 0] > 0.3).numpy(), draft.length_B.numpy(), 0)


@pytest.mark.parametrize("deciding", [PrunesByToken, ByWhatComesAfter])
def test_forbidden_rules_do_not_fit(deciding: type[Scheduled]) -> None:
    drafting = adverse(SMALL)
    rule = deciding([[1, 1, NUM_DRAFT]], NUM_DRAFT)
    assert misfit(SMALL, decode(SMALL, drafting, scheme("standard"), num_requests=400, deciding=rule)) > 1


# ------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], ["must be a list"]),
        (3, ["must be a list"]),
        ([[1, 4]], ["three whole numbers"]),
        ([[1, 4, 5, 6]], ["three whole numbers"]),
        ([[1, 4, 2.0]], ["three whole numbers"]),
        ([[1, 4, True]], ["three whole numbers"]),
        ([[0, 4, 3]], ["below 1"]),
        ([[4, 1, 3]], ["begins after its end"]),
        ([[1, 4, 3], [4, 8, 1]], ["overlap", "begin at 5"]),
        ([[1, 9, 3], [2, 3, 1]], ["overlap"]),
        ([[2, 4, 3]], ["first batch size must be 1", "is 2"]),
        ([[1, 4, -1]], ["K=-1"]),
    ],
)
def test_schedules_that_cannot_be(table: Any, words: list[str], one_line: Any) -> None:
    one_line(lambda: check_schedule(table), WHAT, *words)


def test_a_schedule_is_read_as_vllm_reads_it() -> None:
    """Any order; gaps and the tail have the K before them; K is clamped."""
    table = check_schedule([[9, 16, 0], [1, 2, 7], [5, 6, 2]])
    assert table == [[1, 2, 7], [5, 6, 2], [9, 16, 0]]
    scheduled = Scheduled(table, 5)
    want = [5, 5, 5, 5, 2, 2, 2, 2, 0, 0]
    for num_rows, num_draft in enumerate(want, 1):
        assert scheduled.draft_lengths(np.arange(num_rows), np.full(num_rows, 24)).tolist() == [num_draft] * num_rows
    assert scheduled.draft_lengths(np.arange(100), np.full(100, 24)).max() == 0
    assert scheduled.draft_lengths(np.arange(2), np.array([1, 0])).tolist() == [1, 0]


def test_a_schedule_that_drafts_nothing_decodes_plainly() -> None:
    drafting = drafts_of("noisy", SMALL)
    requests = decode(SMALL, drafting, scheme("standard"), num_requests=9, rows=3, deciding=Scheduled([[1, 8, 0]], 3))
    plain = decode(SMALL, method.build("none", SMALL), scheme("standard"), num_requests=9, rows=3)
    assert outputs(requests) == outputs(plain)
    assert not any(any(request.stats.drafted) for request in requests)


# ------------------------------------------------------------------------------------------- a request's own wish


@pytest.mark.parametrize("request_config", [{"method": "none"}, {"num_speculative_tokens": 0}])
def test_a_request_may_switch_speculation_off(request_config: dict[str, Any]) -> None:
    llm = LLM("tiny", dtype="float32", device="cpu", max_batch_size=3, speculative_config=ngram(3))
    text = "one two three one two three one two"
    with_it, without, less = llm.generate(
        [text] * 3,
        [
            SamplingParams(temperature=0, max_tokens=24, speculative_config=request_config)
            for request_config in (None, request_config, {"num_speculative_tokens": 1})
        ],
        use_tqdm=False,
    )
    drafted = [max(output.request.stats.drafted) for output in (with_it, without, less) if output.request]
    assert drafted == [3, 0, 1]
    assert with_it.outputs[0].token_ids == without.outputs[0].token_ids == less.outputs[0].token_ids


def ngram(num_draft: int | str, **more: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": num_draft, "prompt_lookup_min": 1, "prompt_lookup_max": 3, **more}


@pytest.mark.parametrize(
    ("request_config", "words"),
    [
        ({"method": "ngram"}, ["'ngram'", "only 'none'"]),
        ({"num_speculative_tokens": -1}, ["-1", "from 0 on"]),
        ({"num_speculative_tokens": "auto"}, ["'auto'"]),
        ({"prompt_lookup_max": 2}, ["prompt_lookup_max"]),
    ],
)
def test_wishes_that_cannot_be(request_config: dict[str, Any], words: list[str], one_line: Any) -> None:
    one_line(lambda: SamplingParams(speculative_config=request_config), *words)


def test_lookups_are_weighed_when_they_are_there(tmp_path: Path, target: CausalLM) -> None:
    """Where drafting costs nothing, auto decides by the draft's confidence; where it costs time, before there is a draft."""
    for draft, weighed in ((0.0, True), (0.1, False)):
        costs(adaptive.AUTO_MAX_DRAFT, draft=draft).save(tmp_path / "cost.json")
        plan = SpeculativeConfig(**ngram("auto", cost_table=str(tmp_path / "cost.json"))).resolve()
        drafting, _ = plan.build(target)
        deciding = plan.policy.build(target, drafting, 1)
        assert isinstance(deciding, Adaptive)
        assert (deciding.auto, deciding.prunes, deciding.needs_confidence) == (not weighed, weighed, weighed)


def test_a_request_cannot_ask_for_more(one_line: Any) -> None:
    engine = Engine(SMALL, drafts_of("noisy", SMALL), scheme("standard"), 1)
    request = Request("7", [0, 1], SamplingParams(speculative_config={"num_speculative_tokens": 4}))
    one_line(lambda: engine.add(request), "request 7", "num_speculative_tokens=4", "3")


# ------------------------------------------------------------------------------------------- what adapts


def test_acceptance_is_learned() -> None:
    """Of a known distribution with confidence, offsets by position and tokens that were never looked at."""
    rng = np.random.default_rng(0)
    model = AcceptanceModel(6, 1)
    offset = np.array([0.5, 0.0, -0.5])
    for _ in range(80):
        feature_NF = np.stack([rng.normal(size=40), rng.normal(size=40)], 1)
        position_N = rng.integers(0, 3, 40)
        odds_N = 0.3 * feature_NF[:, 0] + 1.1 * feature_NF[:, 1] + offset[position_N]
        model.add(feature_NF, position_N, rng.random(40) < 1 / (1 + np.exp(-odds_N)))
    assert np.abs(model.weight[:2] - [0.3, 1.1]).max() < 0.2
    assert np.abs(model.weight[2:5] - offset).max() < 0.25
    assert np.abs(model.weight[5:] - model.weight[4]).max() < 0.2, "a position that was never reached is like the last that was"
    p_BK = model.predict(np.zeros((1, 3, 2)))[0]
    assert np.abs(p_BK - 1 / (1 + np.exp(-offset))).max() < 0.06


def lengths_for(deciding: Adaptive, rows: int, most: int) -> list[int]:
    return deciding.draft_lengths(np.arange(rows), np.full(rows, most)).tolist()


def judged(length_B: list[int], accepted_B: list[int]) -> tuple[np.ndarray, Draft, np.ndarray]:
    width = max(length_B)
    draft = Draft(torch.zeros(len(length_B), width, dtype=torch.int64), torch.tensor(length_B))
    return np.arange(len(length_B)), draft, np.array(accepted_B)


def test_k_follows_what_is_accepted() -> None:
    """Long drafts for a row whose drafts are accepted, short ones for one whose drafts are not; none where they cost more."""
    for dear, want in ((False, "longer"), (True, "nothing")):
        deciding = Adaptive(costs(8, 3.0 if dear else 0.1, 0.5 if dear else 0.02), 8, 2, auto=True, prunes=False)
        for row in range(2):
            deciding.on_start(row)
        for _ in range(40):
            length_B = deciding.draft_lengths(np.arange(2), np.full(2, 8))
            if length_B.any():
                step = judged(length_B.tolist(), [int(length_B[0]), 0])
                deciding.verify_lengths(step[0], step[1])
                deciding.observe(*step)
        good, bad = lengths_for(deciding, 2, 8)
        if want == "longer":
            assert good >= 5
            assert bad <= 1
        else:
            assert good == bad == 0


def test_a_row_that_was_given_up_is_tried_again() -> None:
    deciding = Adaptive(costs(4, 3.0, 1.0), 4, 1, auto=True, prunes=False)
    deciding.on_start(0)
    tried = []
    for _ in range(3 * adaptive.EXPLORE_STEPS):
        (length,) = lengths_for(deciding, 1, 4)
        tried.append(length)
        draft = Draft(torch.zeros(1, length, dtype=torch.int64), torch.tensor([length]))
        deciding.verify_lengths(np.array([0]), draft)
        deciding.observe(np.array([0]), draft, np.array([0]))
    assert 2 <= sum(tried) <= 6


@pytest.mark.parametrize("num_siblings", [1, 2, 4])
def test_recent_acceptance_is_that_of_levels(num_siblings: int) -> None:
    """However many siblings a level has: one of them was accepted, or none."""
    deciding = Adaptive(costs(4, 3.0, 1.0), 4, 1, auto=True, prunes=False, drafts_trees=True)
    deciding.on_start(0)
    parent_BK = torch.full((1, num_siblings), -1)
    draft = Draft(torch.arange(num_siblings)[None], torch.tensor([num_siblings]), parent_BK=parent_BK)
    deciding.verify_lengths(np.array([0]), draft)
    deciding.observe(np.array([0]), draft, np.array([1]), np.array([[num_siblings - 1]]))
    assert (deciding.num_accepted_R[0], deciding.num_decided_R[0]) == (1, 1)


def test_verification_that_was_given_up_is_tried_again() -> None:
    deciding = Adaptive(costs(4, 3.0, 0.0), 4, 1, auto=False, prunes=True)
    deciding.on_start(0)
    kept = []
    for _ in range(3 * adaptive.EXPLORE_STEPS):
        draft = Draft(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([4]))
        kept.append(int(deciding.verify_lengths(np.array([0]), draft)[0]))
        deciding.observe(np.array([0]), draft.cut(np.array(kept[-1:])), np.array([0]))
    assert 2 <= sum(kept) <= 8


def test_the_choice_is_the_best_there_is() -> None:
    """Against all choices of lengths, where their costs are linear."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        rows = int(rng.integers(1, 4))
        most = 3
        verify = rng.uniform(0.05, 0.6)
        draft = rng.uniform(0.0, 0.2)
        deciding = Adaptive(costs(most, verify, draft), most, 8, auto=True, prunes=False)
        survival_BK = rng.random((rows, most)).cumprod(1)
        got_B = deciding._best(survival_BK, np.full(rows, most), rows, drafting=True)
        rate = deciding._rate(rows)

        def gain(length_B: np.ndarray, rate: float = rate, rows: int = rows, deciding: Adaptive = deciding,
                 survival_BK: np.ndarray = survival_BK) -> float:  # fmt: skip
            worth = sum(survival_BK[b, :n].sum() for b, n in enumerate(length_B))
            table = deciding.table
            return float(worth - rate * (table.draft(length_B) + float(table.verify(rows, rows + length_B.sum()))))

        # a round of drafting costs something whoever takes part, so lining up by survival is near the best, not at it
        best = max(gain(np.array(some)) for some in itertools.product(range(most + 1), repeat=rows))
        assert gain(got_B) >= best - 0.15 * abs(best)
        if rows == 1:
            assert gain(got_B) == pytest.approx(best)


def test_a_sampled_token_is_verified_without_looking_past_it() -> None:
    """Whatever comes after a token of its row, and is worth less, it stays in or out."""
    rng = np.random.default_rng(2)
    price_N = np.diff(convex_hull(rng.random(13).cumsum()))
    for _ in range(300):
        survival_BK = rng.random((3, 4)).cumprod(1)
        row = int(rng.integers(3))
        place = int(rng.integers(3))
        other_BK = survival_BK.copy()
        other_BK[row, place + 1 :] = survival_BK[row, place] * rng.random(3 - place).cumprod()
        taken = []
        for worth_BK in (survival_BK, other_BK):
            order = np.argsort(-worth_BK.flatten(), kind="stable")
            count = causal_count(worth_BK.flatten()[order], price_N)
            taken.append({tuple(divmod(int(i), 4)) for i in order[:count]})
        assert ((row, place) in taken[0]) == ((row, place) in taken[1])


def test_convex_hull() -> None:
    assert convex_hull(np.array([0.0, 5.0, 2.0, 3.0, 8.0])).tolist() == [0, 1, 2, 3, 8]
    assert convex_hull(np.array([1.0])).tolist() == [1]
    assert convex_hull(np.array([0.0, 1.0, 3.0])).tolist() == [0, 1, 3]


# ------------------------------------------------------------------------------------------- costs


def test_costs_between_and_beyond_the_points() -> None:
    table = CostTable([1, 4], [0, 2, 4], [[1.0, 3.0, 4.0], [2.0, 8.0, 14.0]], [[0.0, 2.0, 3.0], [0.0, 4.0, 6.0]], {})
    assert [float(table.verify(1, n)) for n in (1, 2, 3, 5, 7)] == [1, 2, 3, 4, 5]
    assert float(table.verify(4, 12)) == 8
    assert float(table.verify(2, 2)) == pytest.approx(1 + 1 / 3)
    assert table.draft([]) == table.draft([0, 0]) == 0
    assert table.draft([2]) == 2
    assert table.draft([4, 4, 4, 4]) == 6
    # the first round is of four rows, the second of one
    assert table.draft([1, 1, 1, 2]) == pytest.approx(2.0 + 1.0)


def test_a_table_is_kept_in_a_file(tmp_path: Path, one_line: Any) -> None:
    table = costs()
    table.save(tmp_path / "cost.json")
    assert cost_table.load(tmp_path / "cost.json") == table
    content = json.loads((tmp_path / "cost.json").read_text())
    for change, word in (
        ({"format": "other"}, "not a file of eval/profile_cost.py"),
        ({"verify_s": [[1.0]]}, "verify_s must be 2 x 4"),
        ({"verify_s": [[float("nan")] * 4] * 2}, "verify_s must be 2 x 4"),
        ({"batch_sizes": [8, 1]}, "batch_sizes must be ascending"),
        ({"draft_lengths": [1, 2, 3, 4]}, "draft_lengths at 0"),
        ({"more": 1}, "more"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(content | change))
        one_line(lambda: cost_table.load(tmp_path / "bad.json"), "bad.json", word)
    one_line(lambda: cost_table.load(tmp_path / "none.json"), "none.json", "cannot be read", "profile_cost")


def test_costs_are_measured_on_the_engine(target: CausalLM) -> None:
    """Of drafts longer than the drafter's own too; never less for more tokens or rows."""
    drafting, _ = SpeculativeConfig(**ngram(2)).resolve().build(target)
    table = profiling.measure(target, drafting, [1, 3], max_draft=5, context=20, repeats=1)
    assert table.batch_sizes == [1, 3]
    assert table.draft_lengths == [0, 1, 2, 3, 5]
    for seconds in (np.array(table.verify_s), np.array(table.draft_s)):
        assert seconds.shape == (2, 5)
        assert (seconds > 0).all()
        assert (np.diff(seconds) >= 0).all()
        assert (np.diff(seconds, axis=0) >= 0).all()


def test_costs_of_a_drafter_with_a_short_context(target: CausalLM, one_line: Any) -> None:
    """Beyond it nothing would be drafted, and drafting would seem free."""
    config = {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}
    drafting, _ = SpeculativeConfig(**config, max_model_len=60).resolve().build(target)
    table = profiling.measure(target, drafting, [1], repeats=1)
    assert table.draft_s[0][3] > 2 * table.draft_s[0][0] + 1e-4
    drafting, _ = SpeculativeConfig(**config, max_model_len=10).resolve().build(target)
    one_line(lambda: profiling.measure(target, drafting, [1]), "max_model_len is 10", "cost_table")


def test_a_table_never_says_nothing() -> None:
    """Rows that were measured faster than fewer rows do not lead to steps that take no time."""
    table = CostTable([2, 4], [0, 3], [[0.010, 0.011], [0.008, 0.009]], [[0.0, 0.001]] * 2, {})
    assert float(table.verify(8, 8)) >= 0.008
    assert float(table.verify(64, 64)) >= 0.008
    assert float(table.verify(1, 1)) >= 0.005


@pytest.mark.parametrize("class_name", ["Wide", "Stubborn"])
def test_a_class_of_ones_own_may_ignore_the_limit(class_name: str, target: CausalLM) -> None:
    """Under every policy, and while costs are measured."""
    for more in ({"num_speculative_tokens": "auto"}, {"num_speculative_tokens": 3, "enable_adaptive_verification": True}):
        config = {"method": "custom_class", "model": f"{__name__}.{class_name}", **more}
        llm = LLM("tiny", dtype="float32", device="cpu", max_batch_size=2, speculative_config=config)
        outputs = llm.generate(["ab", "cde"], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        plain = LLM("tiny", dtype="float32", device="cpu").generate(
            ["ab", "cde"], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False
        )
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


class Wide:
    def propose(self, context: Context) -> list[list[int]]:
        return [[1] * 12 for _ in context.rows]


class Stubborn:
    def propose(self, context: Context) -> Draft:
        rows = len(context.rows)
        return Draft(torch.ones(rows, 9, dtype=torch.int64), torch.full((rows,), 9))


def test_noise_is_taken_out_of_costs() -> None:
    assert profiling.trimmed_mean([5.0, 1.0, 2.0, 90.0]) == 1.5
    assert profiling.isotonic([1.0, 2.0, 2.0, 5.0]) == [1, 2, 2, 5]
    assert profiling.isotonic([4.0, 1.0, 1.0, 5.0]) == [2, 2, 2, 5]
    assert profiling.isotonic([3.0, 2.0, 1.0]) == [2, 2, 2]


def test_the_best_schedule() -> None:
    """Verification that gets dear with the batch: long drafts for one row, none for many."""
    table = CostTable([1, 8], [0, 4], [[1.0, 1.1], [1.0, 9.0]], [[0.0, 0.1], [0.0, 0.1]], {})
    schedule = cost_table.best_schedule(table, [0.8, 0.6, 0.4, 0.3], 4)
    assert schedule[0][:2] == [1, schedule[0][1]]
    assert schedule[0][2] == 4
    assert schedule[-1][1:] == [8, 0]
    assert [entry[2] for entry in schedule] == sorted((entry[2] for entry in schedule), reverse=True)
    assert check_schedule(schedule) == schedule


# ------------------------------------------------------------------------------------------- settings


def test_auto_takes_what_the_drafter_can(target: CausalLM) -> None:
    for settings, most in (
        (ngram("auto"), adaptive.AUTO_MAX_DRAFT),
        ({"method": "suffix", "num_speculative_tokens": "auto"}, 24),
    ):
        plan = SpeculativeConfig(**settings).resolve()
        drafting, _ = plan.build(target)
        assert drafting.num_speculative_tokens == most
        assert isinstance(plan.policy.build(target, drafting, 1), Adaptive)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ngram("auto", **{WHAT: [[1, 4, 3]]}), ["auto", WHAT]),
        (ngram("many"), ["num_speculative_tokens='many'"]),
        (ngram(3, **{WHAT: [[2, 4, 3]]}), ["first batch size must be 1"]),
        (ngram(3, **{WHAT: "no/such.json"}), ["no/such.json", "cannot be read"]),
        (ngram(3, cost_table="no/such.json"), ["cost_table is for"]),
        (ngram("auto", cost_table="no/such.json"), ["no/such.json", "cannot be read"]),
        ({"method": "none", "enable_adaptive_verification": True}, ["'none' drafts nothing", "enable_adaptive_verification"]),
        ({"method": "none", "num_speculative_tokens": "auto"}, ["'none' drafts nothing", "auto"]),
        (
            ngram("auto", rejection_sample_method="synthetic", synthetic_acceptance_length=2.0),
            ["auto", "synthetic acceptance needs a number"],
        ),
    ],
)
def test_settings_that_cannot_be(config: dict[str, Any], words: list[str], target: CausalLM, one_line: Any) -> None:
    one_line(lambda: SpeculativeConfig.parse(config).resolve().build(target), *words)


def test_a_file_may_hold_the_schedule(tmp_path: Path, target: CausalLM, one_line: Any) -> None:
    costs().save(tmp_path / "without.json")
    CostTable(**{**vars(costs()), "schedule": [[1, 2, 3], [3, 8, 1]]}).save(tmp_path / "with.json")
    plan = SpeculativeConfig(**ngram(3, **{WHAT: str(tmp_path / "with.json")})).resolve()
    drafting, _ = plan.build(target)
    deciding = plan.policy.build(target, drafting, 8)
    assert isinstance(deciding, Scheduled)
    assert deciding.draft_lengths(np.arange(4), np.full(4, 3)).tolist() == [1] * 4
    config = SpeculativeConfig(**ngram(3, **{WHAT: str(tmp_path / "without.json")}))
    one_line(config.resolve, "without.json", "holds no schedule")


def test_a_table_of_something_else_is_refused(tmp_path: Path, target: CausalLM, one_line: Any) -> None:
    for about, words in (
        ({"target": "other"}, ["target=other", "here it is tiny"]),
        ({"method": "eagle3"}, ["method=eagle3", "ngram"]),
        ({"drafts": "trees"}, ["drafts=trees", "here it is chains"]),
    ):
        CostTable(**{**vars(costs()), "about": about}).save(tmp_path / "cost.json")
        plan = SpeculativeConfig(**ngram("auto", cost_table=str(tmp_path / "cost.json"))).resolve()
        drafting, _ = plan.build(target)
        one_line(lambda plan=plan, drafting=drafting: plan.policy.build(target, drafting, 1), *words, "profile_cost")


def test_confidence_is_of_the_distribution_and_not_of_the_token() -> None:
    """Of a drawn draft: the log-odds of the likeliest token, at the request's temperature."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Watching(Adaptive):
        def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
            assert draft.confidence_BKF is not None
            assert draft.q_BKV is not None
            seen.append((draft.confidence_BKF[..., 0], draft.q_BKV.amax(-1)))
            return super().verify_lengths(rows, draft)

    drafting = adverse(SMALL)
    deciding = Watching(costs(), NUM_DRAFT, 1, auto=False, prunes=True, num_confidence_features=1)
    decode(SMALL, drafting, scheme("standard"), num_requests=2, rows=1, deciding=deciding)
    for odds_BK, top_BK in seen:
        assert torch.allclose(odds_BK.sigmoid(), top_BK, atol=1e-5)


def test_rows_that_sit_out_are_not_in_the_context() -> None:
    """And what they missed comes with their next turn; states that wait for long are offered to the drafter."""
    handed: dict[int, list[Tensor]] = {0: [], 1: []}
    taken: list[int] = []

    class Mine(StatelessProposer):
        num_speculative_tokens = 2
        hidden_layers = (1,)

        def propose(self, context: Context) -> list[list[int]]:
            assert context.hidden is not None
            assert (context.max_draft_B > 0).all()
            for row, states in zip(context.rows.tolist(), context.hidden, strict=True):
                handed[row].append(states)
            return [[0] for _ in context.rows]

        def catch_up(self, context: Context) -> bool:
            assert context.hidden is not None
            taken.extend(len(states) for states in context.hidden)
            for row, states in zip(context.rows.tolist(), context.hidden, strict=True):
                handed[row].append(states)
            return True

    class EverySecond(Scheduled):
        step = 0

        def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
            self.step += 1
            return np.where(rows == self.step // 40 % 2, np.minimum(most_B, 1), 0)

    target = TableLM.random(3)
    wrapped = wrap(Mine(), target)
    engine = Engine(target, wrapped, scheme("standard"), 2, policy=EverySecond([[1, 2, 2]], 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.MAX_PENDING_STATES", 16)
        requests = [Request(str(i), [0, 1], SamplingParams(temperature=0, max_tokens=120)) for i in range(2)]
        assert len(list(engine.run(requests))) == 2
    for row, request in enumerate(requests):
        states_LD = torch.cat(handed[row])[:, 0]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        assert states_LD[:, -2].tolist() == list(range(len(states_LD))), "each position once, in order"
        assert states_LD[:, :3].argmax(1).tolist() == tokens[: len(states_LD)]
    assert taken
    assert max(taken) <= 16 + 3


def wrap(proposer: Any, target: TableLM) -> Any:
    """A CustomClass around an object that is there already."""
    wrapped = method.build("custom_class", target, model="support.table.Ragged", num_speculative_tokens=2)
    wrapped.inner, wrapped.hidden_layers = proposer, proposer.hidden_layers  # type: ignore[attr-defined]
    return wrapped
