"""The decode loop: who is decoded when, where an answer ends, what is counted, and what a proposer is given.

The target is mostly a `TableLM`, so that the tokens can be found by hand: `decode_reference` is the loop in words,
without cache, batch or draft. The rest runs on the `tiny` model. Distributions are the matter of test_engine_law.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import specdec.engine
from specdec import hub, method, rejection
from specdec.core import Context, Draft, Proposer, Request, StatelessProposer
from specdec.engine import Engine
from specdec.measure.stats import pool, request_metrics
from specdec.model.target import CausalLM
from support.all_pairs import some_with_all
from support.decoding import TABLE, V, decode_reference, make, outputs, prompts
from support.table import NUM_DRAFT, OF_ALL_KINDS, TableLM, TableProposer, methods, proposer, scheme, schemes

SCHEMES = pytest.mark.parametrize("name", schemes())
METHODS = pytest.mark.parametrize("case", methods())
METHODS_AND_SCHEMES = pytest.mark.parametrize(("case", "name"), some_with_all(methods(), schemes(), OF_ALL_KINDS))
Case = tuple[str, dict[str, Any]]


def cases(*ids: str) -> list[Any]:
    """Those of `methods`."""
    return [case for case in methods() if case.id in ids]


@pytest.fixture(scope="module")
def tiny() -> CausalLM:
    return CausalLM("tiny", "float32", "cpu")


@pytest.fixture(scope="module")
def drafters() -> dict[str, CausalLM]:
    """For `tiny`: one that mostly agrees, and one that hardly ever does."""
    return {"noisy": CausalLM("tiny", "bfloat16", "cpu"), "negated": CausalLM("tiny-qwen3", "float32", "cpu")}


def run(
    target: CausalLM,
    drafting: Proposer,
    name: str,
    requests: list[Request],
    rows: int = 8,
    **options: Any,
) -> list[Request]:
    """Decode under the scheme of that name; returns the same requests, in the order given."""
    engine = Engine(target, drafting, scheme(name), rows, **options)
    finished = list(engine.run(requests))
    assert sorted(r.id for r in finished) == sorted(r.id for r in requests)
    assert not engine.num_running
    assert not engine.waiting
    return requests


def plain(target: CausalLM) -> Proposer:
    return method.build("none", target)


def drafts_of(model: CausalLM, target: CausalLM, num_draft: int = NUM_DRAFT, **settings: Any) -> Proposer:
    return method.build("draft_model", target, model=model, num_speculative_tokens=num_draft, **settings)


def noisy_drafts(target: TableLM = TABLE, **settings: Any) -> Proposer:
    """Right about half of the time."""
    return drafts_of(target.noisy(0.7), target, **settings)


# The loop in words


MANY_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 1.3, "min_p": 0.3},
    {"temperature": 1.1, "min_p": 0.1, "top_k": 4, "top_p": 0.9},
    {"temperature": 0.9, "repetition_penalty": 1.5},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.8, "repetition_penalty": 0.7},
    {"temperature": 0.9, "presence_penalty": 1.2},
    {"temperature": 0.9, "frequency_penalty": 0.6},
    {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": -0.5},
    {"temperature": 0.7, "logit_bias": {0: 1.5, 3: -2.0}},
    {"temperature": 0.0, "logit_bias": {1: 3.0}},
    {"temperature": 0.0, "allowed_token_ids": [1, 4]},
    {"temperature": 0.9, "allowed_token_ids": [0, 2, 3], "repetition_penalty": 1.3, "top_k": 2},
    {
        "temperature": 1.2,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {2: 0.7},
    },
]


def all_params(max_tokens: int, vocab: int = V) -> list[Request]:
    """A request for each line of MANY_PARAMS, side by side in a batch."""
    many = zip(prompts(len(MANY_PARAMS), vocab, seed=8), MANY_PARAMS, strict=True)
    return [make(prompt, i, max_tokens=max_tokens, **params) for i, (prompt, params) in enumerate(many)]


def test_sampling_parameters_mean_what_the_slow_loop_does() -> None:
    requests = run(TABLE, plain(TABLE), "standard", all_params(24))
    assert outputs(requests) == [decode_reference(TABLE.logits_after, r)[0] for r in requests]


def test_sampling_parameters_mean_what_the_slow_loop_does_on_a_model(tiny: CausalLM) -> None:
    def logits_after(tokens: list[int]) -> list[float]:
        cache = tiny.new_cache()
        cache.reserve(1, len(tokens))
        return tiny.prefill(cache, 0, np.array(tokens), 0, 512).logits[0].tolist()

    requests = run(tiny, plain(tiny), "standard", all_params(12, vocab=250))
    assert outputs(requests) == [decode_reference(logits_after, r, tiny.eos_token_ids)[0] for r in requests]


@functools.cache
def plain_with_all_params(name: str) -> list[list[int]]:
    return outputs(run(TABLE, plain(TABLE), name, all_params(24)))


@METHODS
def test_match_gives_what_none_gives_under_every_sampling_parameter(case: Case) -> None:
    requests = run(TABLE, proposer(case, TABLE), "match", all_params(24), rows=9)
    assert outputs(requests) == plain_with_all_params("standard")


@METHODS
def test_gumbel_gives_what_none_gives_under_every_sampling_parameter(case: Case) -> None:
    requests = run(TABLE, proposer(case, TABLE), "gumbel", all_params(24), rows=9)
    assert outputs(requests) == plain_with_all_params("gumbel")


@functools.cache
def greedy_reference(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return decode_reference(TABLE.logits_after, make(prompt, max_tokens=max_tokens, temperature=0.0))[0]


@pytest.mark.parametrize(
    ("case", "name", "temperatures"),
    some_with_all(
        methods(),
        [
            pytest.param(name, temperatures, id=f"{name}-{label}")
            for label, temperatures in (("beside-sampled", [0.0, 1.0]), ("alone", [0.0]))
            for name in schemes()
        ],
        OF_ALL_KINDS,
    ),
)
def test_greedy_gives_what_none_gives(case: Case, name: str, temperatures: list[float]) -> None:
    """Beside rows that are sampled, too: then greedy rows take the way through the distributions."""
    params = [{"max_tokens": 30, "temperature": temperatures[i % len(temperatures)]} for i in range(9)]
    requests = [make(p, i, **params[i]) for i, p in enumerate(prompts(9))]
    run(TABLE, proposer(case, TABLE), name, requests, rows=5)
    for request in requests:
        if request.params.greedy:
            assert request.output_token_ids == greedy_reference(tuple(request.prompt_token_ids), 30)


def sampled_on_a_model() -> list[Request]:
    return [make(p, i, max_tokens=20, temperature=0.8) for i, p in enumerate(prompts(6, 250, 40))]


@pytest.fixture(scope="module")
def plainly_sampled(tiny: CausalLM) -> list[list[int]]:
    return outputs(run(tiny, plain(tiny), "standard", sampled_on_a_model()))


@METHODS
def test_match_gives_what_none_gives_on_a_model(
    case: Case,
    tiny: CausalLM,
    drafters: dict[str, CausalLM],
    plainly_sampled: list[list[int]],
) -> None:
    assert outputs(run(tiny, proposer(case, tiny, **drafters), "match", sampled_on_a_model(), rows=4)) == plainly_sampled


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("case", cases("none", "greedy-noisy", "ngram"))
def test_greedy_gives_what_transformers_generates(
    case: Case, penalty: float, tiny: CausalLM, drafters: dict[str, CausalLM]
) -> None:
    """`repetition_penalty` has the same definition there."""
    reference = hub.load_model(tiny.path, dtype=torch.float32)
    requests = [
        make(p, i, max_tokens=24, temperature=0.0, repetition_penalty=penalty, ignore_eos=True)
        for i, p in enumerate(prompts(4, 250, 30))
    ]
    run(tiny, proposer(case, tiny, **drafters), "standard", requests)
    for request in requests:
        ids = torch.tensor([request.prompt_token_ids])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,
            pad_token_id=258,
        )
        assert request.output_token_ids == out[0, ids.shape[1] :].tolist()


# A request's tokens are its own


RAGGED_CASES = cases("none", "ngram", "probabilistic-noisy", "table", "ragged")


def mixed_requests() -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 4},
        {"temperature": 0.8, "repetition_penalty": 1.3},
        {"temperature": 0.7, "max_tokens": 5},
    ]
    return [make(p, i, **{"max_tokens": 25} | kinds[i % len(kinds)]) for i, p in enumerate(prompts(11))]


@SCHEMES
@pytest.mark.parametrize("case", RAGGED_CASES)
def test_a_seed_gives_the_same_tokens_in_any_company(case: Case, name: str) -> None:
    """Alone, in small batches and large ones, in any order and so in any row."""
    alone = mixed_requests()
    for request in alone:
        run(TABLE, proposer(case, TABLE), name, [request])
    want = outputs(alone)
    rng = np.random.default_rng(5)
    for rows in (1, 3, 8):
        requests = mixed_requests()
        rng.shuffle(requests)  # type: ignore[arg-type]
        run(TABLE, proposer(case, TABLE), name, requests, rows=rows, prefill_chunk_size=rows)
        assert outputs(sorted(requests, key=lambda r: int(r.id))) == want


@SCHEMES
def test_a_seed_gives_the_same_tokens_in_any_company_on_a_model(
    name: str, tiny: CausalLM, drafters: dict[str, CausalLM]
) -> None:
    def requests() -> list[Request]:
        return [make(p, i, max_tokens=16, temperature=0.8) for i, p in enumerate(prompts(6, 250, 40))]

    def drafting() -> Proposer:
        return drafts_of(drafters["noisy"], tiny, draft_sample_method="probabilistic")

    alone = [run(tiny, drafting(), name, [r])[0].output_token_ids for r in requests()]
    assert outputs(run(tiny, drafting(), name, requests(), rows=4)) == alone
    backwards = run(tiny, drafting(), name, requests()[::-1], rows=3)
    assert outputs(backwards[::-1]) == alone


def test_seeds_matter() -> None:
    requests = [make([1, 2], i, temperature=1.0, max_tokens=20) for i in range(10)]
    run(TABLE, noisy_drafts(), "standard", requests)
    assert len({tuple(r.output_token_ids) for r in requests}) == 10
    again = [make([1, 2], 4, temperature=1.0, max_tokens=20) for _ in range(3)]
    for i, request in enumerate(again):
        request.id = f"again-{i}"
    run(TABLE, noisy_drafts(), "standard", again)
    assert outputs(again) == [requests[4].output_token_ids] * 3


# What a proposer is given


class Watching(StatelessProposer):
    """Passes another proposer's drafts on, and holds every context against what is known otherwise."""

    def __init__(self, inner: Proposer, target: TableLM, hidden_layers: tuple[int, ...] = ()) -> None:
        self.inner = inner
        self.target = target
        self.hidden_layers = inner.hidden_layers or hidden_layers
        self.num_speculative_tokens = inner.num_speculative_tokens
        self.needs_logits = bool(self.hidden_layers)
        self.needs_uniforms = inner.needs_uniforms
        self.drafts_trees = inner.drafts_trees
        self.running: dict[int, Request] = {}  # by row
        self.hidden: dict[str, list[torch.Tensor]] = {}  # by request, all states that were handed over
        # by request, for each step: committed tokens, the draft, its budget
        self.steps: dict[str, list[tuple[int, list[int], int]]] = {}
        self.num_ended = 0

    def on_start(self, row: int, request: Request) -> None:
        assert row not in self.running, "the row is taken"
        self.running[row] = request
        self.hidden[request.id] = []
        self.steps[request.id] = []
        self.inner.on_start(row, request)

    def on_finish(self, row: int, hidden: Sequence[torch.Tensor] = ()) -> None:
        del self.running[row]
        self.num_ended += 1
        self.inner.on_finish(row, hidden)

    def on_forward(self, token_N: torch.Tensor, logits_NV: torch.Tensor) -> None:
        assert len(token_N) == len(logits_NV)
        self.inner.on_forward(token_N, logits_NV)

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return self.inner.bytes_to_grow(rows, slots)

    def reserve(self, rows: int, slots: int) -> None:
        self.inner.reserve(rows, slots)

    def propose(self, context: Context) -> Draft:
        assert [self.running[row] for row in context.rows] == context.requests
        for b, request in enumerate(context.requests):
            tokens = context.tokens(b).tolist()
            assert tokens[: len(request.prompt_token_ids)] == request.prompt_token_ids
            assert tokens[-1] == int(context.last_token_B[b])
            assert len(tokens) == context.length_B[b] > len(request.prompt_token_ids)
            if self.hidden_layers:
                assert context.hidden is not None
                assert context.logits_BV is not None
                self.hidden[request.id].append(context.hidden[b])
                # raw, and of the position before the last token
                assert context.logits_BV[b].tolist() == self.target.logits_after(tokens[:-1]).tolist()
        draft = self.inner.propose(context)
        for b, request in enumerate(context.requests):
            drafted = draft.token_BK[b, : draft.length_B[b]].tolist()
            budget = int(context.max_draft_B[b])
            self.steps[request.id].append((int(context.length_B[b]), drafted, budget))
        return draft


@SCHEMES
@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("case", cases("greedy-noisy", "ragged"))
def test_hidden_states_are_those_of_the_committed_tokens(case: Case, chunk: int, name: str) -> None:
    """Each once and in order, over chunks of a prompt and over rejected drafts. Logits: see `Watching`."""
    layers = (2, 0)
    watching = Watching(proposer(case, TABLE), TABLE, layers)
    requests = mixed_requests()
    for request in requests:
        request.params = request.params.model_copy(update={"max_tokens": 30})
    run(TABLE, watching, name, requests, rows=3, prefill_chunk_size=chunk)
    for request in requests:
        hidden_LTD = torch.cat(watching.hidden[request.id])
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        count = len(hidden_LTD)
        # at the last call, all committed tokens but the last had been processed; a last step of one token makes no call
        assert len(tokens) - 1 - NUM_DRAFT - 2 <= count < len(tokens)
        want_LD = torch.zeros(count, TABLE.hidden_size)
        want_LD[torch.arange(count), torch.tensor(tokens[:count])] = 1
        want_LD[:, -2] = torch.arange(count)
        for t, layer in enumerate(layers):
            want_LD[:, -1] = layer
            assert torch.equal(hidden_LTD[:, t], want_LD)
        length = 0
        for (before, _, _), part in zip(watching.steps[request.id], watching.hidden[request.id], strict=True):
            length += len(part)
            assert length == before - 1, "the states reach up to the token before the last"


def test_nobody_asks_for_hidden_states_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TableLM, "_hidden")
    run(TABLE, noisy_drafts(), "standard", [make([1, 2], max_tokens=5)])


@METHODS_AND_SCHEMES
def test_no_draft_is_longer_than_its_budget(case: Case, name: str) -> None:
    """A step emits a token of its own, so the last token of an answer is never worth a draft."""
    watching = Watching(proposer(case, TABLE), TABLE)
    keys = ("max_tokens", "temperature")
    kinds = [dict(zip(keys, kind, strict=True)) for kind in itertools.product([1, 2, 3, 4, 9], [0.0, 1.0])]
    requests = [make(p, i, **kinds[i]) for i, p in enumerate(prompts(10))]
    run(TABLE, watching, name, requests, rows=4)
    assert watching.num_ended == len(requests)
    assert not watching.running
    for request in requests:
        limit = len(request.prompt_token_ids) + request.params.max_tokens
        for before, draft, budget in watching.steps[request.id]:
            left = limit - before - 1
            assert left > 0
            longest = watching.num_speculative_tokens
            assert budget == (longest if watching.drafts_trees else min(longest, left))
            assert len(draft) <= budget
        assert max(request.stats.depths, default=0) <= request.params.max_tokens - 1
        assert len(request.output_token_ids) == request.params.max_tokens


def test_drafts_of_a_custom_class_are_cut_to_the_budget() -> None:
    """It may ignore max_draft_B."""
    drafting = method.build("custom_class", TABLE, model=f"{__name__}.Reckless", num_speculative_tokens=4)
    requests = [make(p, i, max_tokens=i + 1, temperature=1.0) for i, p in enumerate(prompts(6))]
    run(TABLE, drafting, "standard", requests)
    assert [max(r.stats.drafted, default=0) for r in requests] == [0, 0, 1, 2, 3, 4]


class Reckless(TableProposer):
    def propose(self, context: Context) -> Draft:
        draft = super().propose(context)
        draft.length_B.fill_(self.num_speculative_tokens)
        return draft


class Waiting(TableProposer):
    """Waits, as for another process, and then computes."""

    def propose(self, context: Context) -> Draft:
        time.sleep(0.02)
        return super().propose(context)


def test_cpu_time_is_recorded_beside_wall_time() -> None:
    drafting = method.build("custom_class", TABLE, model=f"{__name__}.Waiting", num_speculative_tokens=2)
    for request in run(TABLE, drafting, "standard", [make(p, i, max_tokens=6) for i, p in enumerate(prompts(3))]):
        request_stats = request.stats
        assert len(request_stats.cpu_s) == len(request_stats.draft_s) > 0
        assert request_stats.prefill_cpu_s > 0
        for draft_s, verify_s, cpu_s, drafted in zip(
            request_stats.draft_s, request_stats.verify_s, request_stats.cpu_s, request_stats.drafted, strict=True
        ):
            assert cpu_s > 0
            if drafted:
                assert cpu_s < draft_s + verify_s - 0.015


@pytest.mark.parametrize("name", ["standard", "block"])
def test_the_padding_of_a_draft_may_be_anything(name: str) -> None:
    """Entries at or beyond the row's length are padding, says Draft."""
    drafting = method.build("custom_class", TABLE, model=f"{__name__}.Padded", num_speculative_tokens=3)
    want = method.build("custom_class", TABLE, model="support.table.TableProposer", num_speculative_tokens=3)
    got = [run(TABLE, proposer, name, mixed_requests()) for proposer in (want, drafting)]
    assert outputs(got[0]) == outputs(got[1])


class Padded(TableProposer):
    def propose(self, context: Context) -> Draft:
        draft = super().propose(context)
        for tokens, length in zip(draft.token_BK, draft.length_B, strict=True):
            tokens[length:] = -1
        return draft


def test_a_drafter_with_a_short_context_stops_for_that_row_only() -> None:
    limit = 16
    k = 3
    drafter = TABLE.noisy(0.7)
    drafter.max_model_len = limit  # which its forward asserts
    watching = Watching(drafts_of(drafter, TABLE, k), TABLE)
    lengths = (2, 9, 15, 16, 17, 30)
    requests = [make([1 + i % 3 for i in range(n)], n, max_tokens=25, temperature=0.0) for n in lengths]
    run(TABLE, watching, "standard", requests, rows=4)
    for request in requests:
        assert request.output_token_ids == decode_reference(TABLE.logits_after, request)[0]
        for before, draft, budget in watching.steps[request.id]:
            # the drafter's cache holds the committed tokens and all of the draft but its last token
            assert len(draft) == min(budget, max(limit - before + 1, 0))
    drafted = {n: sum(r.stats.drafted) for n, r in zip(lengths, requests, strict=True)}
    assert drafted[2] > drafted[9] > drafted[16] == drafted[17] == drafted[30] == 0


# Continuous batching


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("case", cases("none", "probabilistic-noisy", "suffix"))
def test_rows_are_filled_as_they_fall_free(case: Case, rows: int) -> None:
    """More requests than rows, that end at different times; and more that are added meanwhile."""
    engine = Engine(TABLE, proposer(case, TABLE), scheme("match"), rows)
    lengths = [1, 12, 4, 25, 7] * 4
    requests = [make(p, i, max_tokens=lengths[i], temperature=0.8) for i, p in enumerate(prompts(20))]
    queue = requests[7:]
    finished = []
    engine.add(*requests[:7])
    for step in itertools.count(1):
        in_flight = engine.num_running + len(engine.waiting)
        if not in_flight:
            break
        done = engine.step()
        assert engine.num_running + len(done) == min(rows, in_flight), "a row is idle while somebody waits"
        finished += done
        if step % 3 == 0:
            engine.add(*queue[:4])
            del queue[:4]
    assert not queue
    assert sorted(r.id for r in finished) == sorted(r.id for r in requests)
    assert outputs(requests) == [decode_reference(TABLE.logits_after, r)[0] for r in requests]
    assert {size for r in requests for size in r.stats.batch_size} <= set(range(1, rows + 1))


def test_requests_may_be_added_while_others_are_yielded() -> None:
    engine = Engine(TABLE, noisy_drafts(), scheme("match"), 2)
    seen = []
    for request in engine.run([make(p, i, max_tokens=9) for i, p in enumerate(prompts(3))]):
        seen.append(request)
        if len(seen) == 1:  # longer than all before: the caches grow under the running rows
            engine.add(make([5] * 40, 9, max_tokens=60))
    assert {r.id for r in seen} == {"0", "1", "2", "9"}
    assert outputs(seen) == [decode_reference(TABLE.logits_after, r)[0] for r in seen]


def test_the_first_come_is_the_first_served() -> None:
    requests = [make(p, i, max_tokens=4 + i) for i, p in enumerate(prompts(6))]
    engine = Engine(TABLE, plain(TABLE), scheme("standard"), 2)
    assert [r.id for r in engine.run(requests)] == ["0", "1", "2", "3", "4", "5"]


def test_engines_may_take_turns_with_one_cache() -> None:
    cache = TABLE.new_cache()
    engines = [Engine(TABLE, noisy_drafts(), scheme("match"), rows, cache=cache) for rows in (4, 2)]
    for turn in range(4):
        number = itertools.count(10 * turn)
        requests = [make(p, next(number), max_tokens=10 + 5 * turn) for p in prompts(5, seed=turn)]
        list(engines[turn % 2].run(requests))
        assert outputs(requests) == [decode_reference(TABLE.logits_after, r)[0] for r in requests]


@pytest.mark.parametrize("chunk", [1, 2, 5, 512])
@pytest.mark.parametrize("case", cases("none", "probabilistic-noisy", "suffix"))
def test_a_prompt_in_chunks_is_the_prompt(case: Case, chunk: int) -> None:
    requests = [make(prompts(1, longest=1, seed=n)[0] * n, n, max_tokens=12) for n in (1, 4, 5)]
    requests.append(make(np.random.default_rng(0).integers(0, V, 23).tolist(), max_tokens=12))
    engine = Engine(TABLE, proposer(case, TABLE), scheme("match"), prefill_chunk_size=chunk)
    engine.add(*requests)
    num_reading = 0
    while engine.num_running or engine.waiting:
        engine.step()
        num_reading += bool((engine.state.cached_R < engine.state.num_prompt_R).any())
    assert num_reading == math.ceil(23 / chunk) - 1
    assert outputs(requests) == [decode_reference(TABLE.logits_after, r)[0] for r in requests]


def test_a_long_prompt_does_not_hold_the_others_up() -> None:
    engine = Engine(TABLE, noisy_drafts(), scheme("match"), prefill_chunk_size=2)
    long = make([1, 2, 3] * 20, 0, max_tokens=4)
    short = make([4], 1, max_tokens=10)
    order = []
    for request in engine.run([long, short]):
        order.append(request)
        if request is short:
            assert engine.state.cached_R[0] < 60, "the long prompt is still being read"
    assert order == [short, long]


def test_a_model_reads_a_prompt_in_chunks(tiny: CausalLM) -> None:
    prompt = np.random.default_rng(0).integers(0, 250, 150).tolist()
    answers = []
    for chunk in (512, 64, 7):
        request = make(prompt, max_tokens=12, temperature=0.0)
        answers += outputs(run(tiny, plain(tiny), "standard", [request], prefill_chunk_size=chunk))
    assert answers[0] == answers[1] == answers[2]


# Where an answer ends


ENDINGS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": None},
    {"max_tokens": None, "ignore_eos": True},
    {"max_tokens": 500, "ignore_eos": True},
    {"stop_token_ids": [2]},
    {"stop_token_ids": [2, 5], "ignore_eos": True},
    {"stop_token_ids": [99, -1], "ignore_eos": True},  # what cannot come stops nothing
    {"min_tokens": 8},
    {"min_tokens": 8, "stop_token_ids": [2, 5]},
    {"min_tokens": 12, "max_tokens": 12},
]


def ending_requests(temperature: float) -> list[Request]:
    requests = []
    for i, (prompt, ending) in enumerate(zip(prompts(3 * len(ENDINGS), seed=4), ENDINGS * 3, strict=True)):
        requests.append(make(prompt, i, **{"temperature": temperature, "max_tokens": 20} | ending))
    return requests


def with_eos() -> TableLM:
    target = TableLM.random(V, seed=3)
    target.eos_token_ids = [4, 0]
    return target


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@SCHEMES
@pytest.mark.parametrize("case", cases("none", "greedy-noisy", "probabilistic-same", "suffix", "table"))
def test_answers_end_where_they_should(case: Case, name: str, temperature: float) -> None:
    target = with_eos()
    requests = ending_requests(temperature)
    run(target, proposer(case, target), name, requests, rows=5, max_model_len=40)
    is_plain = scheme(name).keyed_by == "position" or case[0] == "none"
    exact = temperature == 0 or (is_plain and not scheme(name).shares_noise)
    reasons = Counter()
    for request in requests:
        params = request.params
        tokens = request.output_token_ids
        if exact:
            want = decode_reference(target.logits_after, request, target.eos_token_ids, 40)
            assert (tokens, request.finish_reason) == want
        # what follows holds for any tokens
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else target.eos_token_ids)}
        room = 40 - len(request.prompt_token_ids)
        limit = min(params.max_tokens or room, room)
        assert not stops & set(tokens[:-1])
        assert len(tokens) >= params.min_tokens
        assert request.finish_reason == ("stop" if tokens[-1] in stops else "length")
        assert len(tokens) == limit or request.finish_reason == "stop"
        assert request.stop_reason == (tokens[-1] if tokens[-1] in params.stop_token_ids else None)
        assert request.text is None
        reasons[request.finish_reason, request.stop_reason is None, len(tokens) == limit] += 1
    assert len(reasons) >= 4, "endings of every kind"


class Script(TableLM):
    """Says the same text whatever it is given: after a position comes the text's next token."""

    def __init__(self, text: Sequence[int], tokenizer: Any = None) -> None:
        size = 320
        super().__init__(np.broadcast_to(np.float32(0), (size + 1, size, size)), max_model_len=len(text) + 9)
        self.text_L = np.array([*text, *[0] * 9])
        self._tokenizer = tokenizer

    def _logits(self, before_N: np.ndarray, last_N: np.ndarray, slot_N: np.ndarray) -> np.ndarray:
        return np.eye(self.vocab_size, dtype=np.float32)[self.text_L[slot_N + 1]]


PROMPT = "say ST"


def answer(tiny: CausalLM, text: str, num_draft: int, wrong_every: int = 0, **params: Any) -> Request:
    """What comes of a target that says this, with drafts of which every so-manyth token is wrong. Greedy."""
    encode = functools.partial(tiny.tokenizer.encode, add_special_tokens=False)
    ids = encode(PROMPT + text)
    drafted = [token + 1 if wrong_every and i % wrong_every == 0 else token for i, token in enumerate(ids)]
    target = Script(ids, tiny.tokenizer)
    drafting = drafts_of(Script(drafted), target, num_draft) if num_draft else plain(target)
    limit = {"max_tokens": len(ids) - len(encode(PROMPT)), "temperature": 0.0}
    request = make(encode(PROMPT), **limit | params)
    return run(target, drafting, "standard", [request])[0]


SOME_DRAFTS = [(0, 0), (1, 0), (4, 0), (7, 0), (5, 3), (3, 2)]
DRAFTS = pytest.mark.parametrize(("num_draft", "wrong_every"), SOME_DRAFTS)
KEEP = {"include_stop_str_in_output": True}
SPECIAL = {"skip_special_tokens": False}


@DRAFTS
@pytest.mark.parametrize(
    ("text", "params", "kept", "generated", "reason"),
    [
        ("hello STOP world", {"stop": "STOP"}, "hello ", "hello STOP", "STOP"),
        ("hello STOP", {"stop": "STOP"}, "hello ", "hello STOP", "STOP"),
        ("STOP it", {"stop": ["STOP"]}, "", "STOP", "STOP"),
        ("hello STOP", {"stop": "STOP"} | KEEP, "hello STOP", "hello STOP", "STOP"),
        ("one two three", {"stop": ["three", "two"]}, "one ", "one two", "two"),
        # of two that the same token completes, the one that begins first
        ("one two three", {"stop": ["o th", "two th"]}, "one ", "one two th", "two th"),
        # of a character of several bytes, each a token, the last completes it
        ("ja, 日本だ", {"stop": "本"}, "ja, 日", "ja, 日本", "本"),
        ("naïve, naïf", {"stop": "ïf"}, "naïve, na", "naïve, naïf", "ïf"),
        # the prompt ends with "ST", which is no part of the answer
        ("OP, STOP", {"stop": "STOP"}, "OP, ", "OP, STOP", "STOP"),
        ("hello", {"stop": ["STOP", "hellos"]}, None, "hello", None),
        ("hello STOP", {"stop": "STOP", "max_tokens": 9}, None, "hello STO", None),
        # special tokens are not part of the text, unless they are asked for
        ("ab</s>cd STOP", {"stop": "bc"}, "a", "ab</s>c", "bc"),
        ("ab</s>cd STOP", {"stop": ["bc", "TO"]} | SPECIAL, "ab</s>cd S", "ab</s>cd STO", "TO"),
    ],
)
def test_stop_strings(
    text: str,
    params: dict[str, Any],
    kept: str | None,
    generated: str,
    reason: str | None,
    num_draft: int,
    wrong_every: int,
    tiny: CausalLM,
) -> None:
    """kept: the answer's text; said: what its tokens say, the last of which completes the string."""
    request = answer(tiny, text, num_draft, wrong_every, **params)
    assert request.text == kept
    assert tiny.tokenizer.decode(request.output_token_ids, skip_special_tokens=False) == generated
    assert request.finish_reason == ("length" if reason is None else "stop")
    assert request.stop_reason == reason
    assert sum(request.stats.emitted) + 1 == len(request.output_token_ids)
    assert all(a <= e <= a + 1 for a, e in zip(request.stats.accepted, request.stats.emitted, strict=True))


@DRAFTS
def test_stop_tokens_and_stop_strings(num_draft: int, wrong_every: int, tiny: CausalLM) -> None:
    """The one that comes first counts."""
    stop_id = tiny.tokenizer.encode("x")[0]
    request = answer(tiny, "axb STOP", num_draft, wrong_every, stop="b", stop_token_ids=[stop_id])
    assert tiny.tokenizer.decode(request.output_token_ids) == "ax"
    assert (request.text, request.finish_reason, request.stop_reason) == (None, "stop", stop_id)
    request = answer(tiny, "axb STOP", num_draft, wrong_every, stop="a", stop_token_ids=[stop_id])
    assert (request.text, request.finish_reason, request.stop_reason) == ("", "stop", "a")


@DRAFTS
def test_min_tokens_holds_off_stop_strings(num_draft: int, wrong_every: int, tiny: CausalLM) -> None:
    """One that is complete before is passed over, as in vLLM."""
    request = answer(tiny, "a. b. c. d.", num_draft, wrong_every, stop=".", min_tokens=6)
    assert len(request.output_token_ids) == 8
    assert request.text == "a. b. c"


def test_a_row_forgets_the_text_of_the_request_before(tiny: CausalLM) -> None:
    """Else the first token of the next answer would pass for old text."""
    encode = functools.partial(tiny.tokenizer.encode, add_special_tokens=False)
    target = Script(encode(PROMPT + "one STOP, two STOP, three"), tiny.tokenizer)
    params = {"max_tokens": 20, "temperature": 0.0}
    requests = [make(encode(PROMPT), i, stop=s, **params) for i, s in enumerate(["none", "STOP", "o"])]
    run(target, plain(target), "standard", requests, rows=1)
    assert [request.text for request in requests] == [None, "one ", ""]


@DRAFTS
def test_a_stop_string_may_be_of_many_tokens(num_draft: int, wrong_every: int, tiny: CausalLM) -> None:
    """Special tokens have no text, and any number of them may be within a stop string."""
    request = answer(tiny, "say S" + "<pad>" * 30 + "TOP, and more", num_draft, wrong_every, stop="STOP")
    assert (request.text, request.finish_reason) == ("say ", "stop")


# What is counted


@pytest.mark.parametrize(
    ("case", "name"), some_with_all(methods(), [*schemes(), *sorted({*rejection.names()} - {*schemes()})], OF_ALL_KINDS)
)
def test_counts(case: Case, name: str) -> None:
    """Every step against what was drafted and what came of it, counted anew."""
    target = with_eos()
    watching = Watching(proposer(case, target), target)
    requests = ending_requests(0.9)
    run(target, watching, name, requests, rows=12, max_model_len=40)
    recount: Counter[tuple[int, int]] = Counter()
    num_nodes = 0
    num_cut = 0
    for request in requests:
        stats = request.stats
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        place = len(request.prompt_token_ids) + 1  # the token that prefill gives belongs to no step
        limit = min(len(request.prompt_token_ids) + (request.params.max_tokens or 40), 40)
        calls = iter(watching.steps.get(request.id, []))
        chains = [list(range(-1, drafted - 1)) for drafted in stats.drafted]
        parents_of = stats.draft_parents or chains  # empty where no draft of the request was a tree
        steps = zip(stats.drafted, stats.accepted, stats.emitted, stats.draft_token_ids, parents_of, strict=True)
        for step, (drafted, accepted, emitted, draft_token_ids, parents) in enumerate(steps):
            before = place
            draft = []
            budget = min(watching.num_speculative_tokens, limit - place - 1)
            if watching.drafts_trees and budget:  # paths are limited by what may still be emitted, and nodes are not
                budget = watching.num_speculative_tokens
            if budget:  # else the proposer has nothing to do
                before, draft, num_accepted_prev = next(calls)
                assert num_accepted_prev == budget
            assert (before, len(draft)) == (place, drafted)
            assert list(draft) == draft_token_ids
            place += emitted
            paths = [node_path(parents, node) for node in range(len(draft))]
            same = [[draft[k] for k in path] == tokens[before : before + len(path)] for path in paths]
            num_accepted = max((len(path) for path, is_same in zip(paths, same, strict=True) if is_same), default=0)
            if stats.draft_parents:
                assert accepted == 0 or paths[stats.accepted_nodes[step][-1]] == stats.accepted_nodes[step]
            # what follows a rejection may be the token that was rejected; under these schemes it is not
            assert accepted <= num_accepted, name
            assert accepted == num_accepted or name not in ("standard", "match")
            cut = emitted == accepted
            assert emitted == accepted + (not cut)
            assert not cut or (place == len(tokens) and request.finish_reason == "stop")
            num_cut += cut
            recount[max(map(len, paths), default=0), accepted] += 1
            num_nodes += drafted
        assert place == len(tokens)
        assert not list(calls)
        assert sum(stats.emitted) + 1 == len(request.output_token_ids)
        assert len(stats.draft_s) == len(stats.verify_s) == len(stats.batch_size) == len(stats.emitted)
        assert request_metrics(stats)["num_output_tokens"] == len(request.output_token_ids)
    if case[0] == "draft_model" and case[1]["model"] == "same":
        assert num_cut > 0, "some answers end within a draft"

    metrics = pool([request.stats for request in requests])
    histogram = np.array(metrics["acceptance_histogram"])
    assert {tuple(place): histogram[tuple(place)] for place in np.argwhere(histogram).tolist()} == recount
    drafts = [pair for pair in recount.elements() if pair[0]]
    assert metrics["num_steps"] == recount.total()
    assert metrics["num_drafts"] == len(drafts)
    assert metrics["num_draft_tokens"] == num_nodes
    assert metrics["num_accepted_tokens"] == sum(accepted for _, accepted in drafts)
    assert metrics["num_output_tokens"] == sum(len(r.output_token_ids) for r in requests)
    if drafts:
        assert metrics["mean_acceptance_length"] == 1 + np.mean([accepted for _, accepted in drafts])
        for i, rate in enumerate(metrics["acceptance_rate_per_position"]):
            assert rate == np.mean([accepted > i for _, accepted in drafts])


def node_path(parents: list[int], node: int) -> list[int]:
    """The nodes of a tree from the root to this one."""
    return [*node_path(parents, parents[node]), node] if node >= 0 else []


def test_tokens_after_a_stop_are_not_accepted() -> None:
    """A draft of five that all are right, of which the second ends the answer."""
    text = [7, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    target = Script(text)
    target.eos_token_ids = [3]
    drafting = drafts_of(Script(text), target, 5)
    request = run(target, drafting, "standard", [make(text[:1], max_tokens=9, temperature=0.0)])[0]
    assert request.output_token_ids == [1, 2, 3]
    assert (request.stats.drafted, request.stats.accepted, request.stats.emitted) == ([5], [2], [2])
    assert request.stats.draft_token_ids == [[2, 3, 4, 5, 6]], "the last three too, which nobody checked"


# What is refused


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([1] * 40, {}, "the prompt has 40 tokens, and max_model_len=40 leaves no room"),
        ([1] * 99, {}, "the prompt has 99 tokens, and max_model_len=40 leaves no room"),
        ([1, V, 2], {}, f"token id {V} is outside the vocabulary 0..{V - 1}"),
        ([1, -1, 2], {}, f"token id -1 is outside the vocabulary 0..{V - 1}"),
        ([1], {"logit_bias": {V: 1.0}}, f"token id {V} is outside the vocabulary 0..{V - 1}"),
    ],
)
def test_requests_that_cannot_be_decoded(prompt: list[int], params: dict[str, Any], message: str) -> None:
    """One line that names the request; none of those that came with it is taken."""
    engine = Engine(TABLE, plain(TABLE), scheme("standard"), max_model_len=40)
    with pytest.raises(ValueError, match=f"^request 7: .*{re.escape(message)}[^\n]*$"):
        engine.add(make([1], 1), make(prompt, 7, **params))
    assert not engine.waiting
    longest = make([1] * 39, max_tokens=None)
    assert list(engine.run([longest])) == [longest]
    assert len(longest.output_token_ids) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: at least 1 is needed"),
        ({"max_batch_size": -2}, "max_batch_size=-2: at least 1 is needed"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size=0: at least 1 is needed"),
        ({"max_model_len": 1}, "max_model_len=1 is outside 2..128"),
        ({"max_model_len": 129}, "max_model_len=129 is outside 2..128"),
    ],
)
def test_engines_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(TABLE, plain(TABLE), scheme("standard"), **options)


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are target and drafter, and the rows and slots that are needed and not there yet."""
    per_slot = 2 * 8  # two caches of int64
    monkeypatch.setattr(specdec.engine, "free_memory", lambda device: 3 * 30 * per_slot)
    engine = Engine(TABLE, noisy_drafts(), scheme("standard"), 8)
    fits = [make([1], i, max_tokens=29) for i in range(3)]
    advice = "lower max_batch_size, max_model_len or max_tokens"
    with pytest.raises(ValueError, match=rf"3 rows x 31 slots.*; {advice}"):
        engine.add(*fits[:2], make([1], 5, max_tokens=30))
    assert not engine.waiting
    assert len(list(engine.run(fits))) == 3
    monkeypatch.setattr(specdec.engine, "free_memory", lambda device: 0)
    assert len(list(engine.run([make([1], i, max_tokens=29) for i in range(3)]))) == 3
    with pytest.raises(ValueError, match="4 rows x 30 slots"):
        engine.add(*[make([1], i, max_tokens=29) for i in range(4)])


# After something went wrong


def breaks_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises at that call (counted from 0), and never again."""
    counter = itertools.count()

    def breaking(*args: Any, **kwargs: Any) -> Any:
        if next(counter) == call:
            raise RuntimeError("broken")
        return function(*args, **kwargs)

    return breaking


@pytest.mark.parametrize(("case", "where"), some_with_all(methods(), ["forward", "propose", "verify"], OF_ALL_KINDS))
def test_an_engine_that_is_cleared_goes_on(case: Case, where: str) -> None:
    """After an exception in the middle of things, and after a caller who lost interest."""
    target = copy.copy(TABLE)
    watching = Watching(proposer(case, target), target)
    verifier = scheme("match")
    if where == "propose":
        if case[0] == "none":
            return  # which nobody asks
        watching.propose = breaks_at(2, watching.propose)  # type: ignore[method-assign]
    elif where == "verify":
        verifier = dataclasses.replace(verifier, verify=breaks_at(7, verifier.verify))
    else:
        target.forward = breaks_at(8, target.forward)  # type: ignore[method-assign]
    engine = Engine(target, watching, verifier, 3)
    with pytest.raises(RuntimeError, match="broken"):
        list(engine.run([make(p, i, max_tokens=20, temperature=0.9) for i, p in enumerate(prompts(8))]))
    assert engine.num_running
    for _ in range(2):
        engine.abort_all()
        assert not watching.running, "a request that left its row has told its proposer"
        assert not engine.num_running
        assert not engine.waiting
        # other requests under other names, most of them shorter than what the rows held
        again = [make(p, 50 + i, max_tokens=9, temperature=0.9) for i, p in enumerate(prompts(5, seed=9))]
        first = next(iter(engine.run(again)))
        assert first.output_token_ids == decode_reference(TABLE.logits_after, first)[0]
    engine.abort_all()
    last = [make(p, 90 + i, max_tokens=9, temperature=0.9) for i, p in enumerate(prompts(5, seed=10))]
    list(engine.run(last))
    assert outputs(last) == [decode_reference(TABLE.logits_after, r)[0] for r in last]


@METHODS
def test_an_engine_is_cleared_that_broke_at_a_first_token(case: Case) -> None:
    """The proposer knows of the request by then, and must hear that it is gone."""
    verifier = scheme("match")
    verifier = dataclasses.replace(verifier, verify=breaks_at(0, verifier.verify))
    watching = Watching(proposer(case, TABLE), TABLE)
    engine = Engine(TABLE, watching, verifier, 3)
    with pytest.raises(RuntimeError, match="broken"):
        list(engine.run([make([1, 2], max_tokens=5)]))
    engine.abort_all()
    assert not watching.running
    assert len(list(engine.run([make([1, 2], max_tokens=5)]))) == 1


def test_a_proposer_is_not_told_of_the_end_of_what_did_not_begin() -> None:
    """The prompt of the second request of a row breaks."""
    target = copy.copy(TABLE)
    target.forward = breaks_at(5, target.forward)  # type: ignore[method-assign]
    watching = Watching(plain(target), target)
    engine = Engine(target, watching, scheme("match"), 1)
    with pytest.raises(RuntimeError, match="broken"):
        list(engine.run([make([1, 2], i, max_tokens=5) for i in range(2)]))
    engine.abort_all()
    assert watching.num_ended == 1
