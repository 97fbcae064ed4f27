"""The behaviour of the decode loop: who is decoded when, where an answer ends, what is counted, what a proposer is told.

The target is mostly a `TableLM`, whose tokens can be found by hand: `slow_decode` is the decode loop in words, without
cache, batch and draft. The rest runs on the `tiny` model, the same way with text and with transformers' own numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from table import (
    NUM_DRAFT,
    OwnLaw,
    TableLM,
    methods,
    proposer,
    reference_law,
    scheme,
    schemes,
)
from transformers import AutoModelForCausalLM

import specdec.engine
from specdec import method, rejection
from specdec.core import Context, Draft, Proposer, Request, SamplingParams, Silent, Verdict
from specdec.engine import EXTRA, Engine
from specdec.rejection import Verifier
from specdec.sampling import VERIFY, uniforms
from specdec.stats import derive, pool, request_metrics
from specdec.target import CausalLM

V = 6
TABLE = TableLM.random(V, seed=3, scale=1.0, max_model_len=128)
SCHEMES = pytest.mark.parametrize("name", schemes())
METHODS = pytest.mark.parametrize("case", methods())
Case = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def tiny() -> CausalLM:
    return CausalLM("tiny", "float32", "cpu")


@pytest.fixture(scope="module")
def drafters() -> dict[str, CausalLM]:
    """For `tiny`: one that mostly agrees, and one that hardly ever does."""
    return {"noisy": CausalLM("tiny", "bfloat16", "cpu"), "negated": CausalLM("tiny-qwen3", "float32", "cpu")}


def prompts(count: int, vocab: int = V, longest: int = 9, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]


def make(prompt: Sequence[int], number: int = 0, **params: Any) -> Request:
    """A request whose seed is 100 + number."""
    return Request(str(number), list(prompt), SamplingParams(**params), seed=100 + number)


def run(
    target: CausalLM, drafting: Proposer, verifier: Verifier | str, requests: list[Request], rows: int = 8, **options: Any
) -> list[Request]:
    """Decode; returns the same requests, in the order given."""
    verifier = scheme(verifier) if isinstance(verifier, str) else verifier
    engine = Engine(target, drafting, verifier, rows, **options)
    finished = list(engine.run(requests))
    assert sorted(r.id for r in finished) == sorted(r.id for r in requests)
    assert not engine.num_running
    assert not engine.waiting
    return requests


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


def plain(target: CausalLM) -> Proposer:
    return method.build("none", target)


def drafts_of(model: CausalLM, target: CausalLM, num_draft: int = NUM_DRAFT, **settings: Any) -> Proposer:
    return method.build("draft_model", target, model=model, num_speculative_tokens=num_draft, **settings)


def noisy_drafts(target: TableLM = TABLE, **settings: Any) -> Proposer:
    """Right about half of the time."""
    return drafts_of(target.noisy(0.7), target, **settings)


# The loop in words


def slow_decode(
    logits_after: Callable[[list[int]], Sequence[float]],
    request: Request,
    eos: Sequence[int] = (),
    max_model_len: int = 10**9,
) -> tuple[list[int], str]:
    """Token for token, with the noise that the engine takes for an answer's n-th token. Returns tokens and why it ended."""
    params, prompt, output = request.params, request.prompt_token_ids, []
    stop_ids = [*(() if params.ignore_eos else eos), *params.stop_token_ids]
    budget = min(params.max_tokens or 10**9, max_model_len - len(prompt))
    while len(output) < budget:
        law = reference_law(logits_after([*prompt, *output]), params, prompt, output, stop_ids)
        u = float(uniforms(np.array(request.seed), VERIFY, np.array(len(output)), EXTRA))
        cumulative = list(itertools.accumulate(law))
        output.append(next(token for token, mass in enumerate(cumulative) if mass > u * cumulative[-1]))
        if output[-1] in stop_ids:
            return output, "stop"
    return output, "length"


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
    requests = run(TABLE, plain(TABLE), "standard", all_params(40))
    assert outputs(requests) == [slow_decode(TABLE.logits_after, r)[0] for r in requests]


def test_sampling_parameters_mean_what_the_slow_loop_does_on_a_model(tiny: CausalLM) -> None:
    def logits_after(tokens: list[int]) -> list[float]:
        cache = tiny.new_cache()
        cache.reserve(1, len(tokens))
        return tiny.prefill(cache, 0, np.array(tokens), 0, 512).logits[0].tolist()

    requests = run(tiny, plain(tiny), "standard", all_params(12, vocab=250))
    assert outputs(requests) == [slow_decode(logits_after, r, tiny.eos_token_ids)[0] for r in requests]


@METHODS
def test_match_gives_what_none_gives_under_every_sampling_parameter(case: Case) -> None:
    want = outputs(run(TABLE, plain(TABLE), "standard", all_params(40)))
    requests = run(TABLE, proposer(case, TABLE), "match", all_params(40), rows=5)
    assert outputs(requests) == want


@SCHEMES
@METHODS
def test_greedy_gives_what_none_gives(case: Case, name: str) -> None:
    """Beside rows that are sampled, too, which take another path through the laws."""
    for temperatures in ([0.0], [0.0, 1.0]):
        requests = [make(p, i, max_tokens=30, temperature=t) for (i, p), t in _across(temperatures, 9)]
        run(TABLE, proposer(case, TABLE), name, requests, rows=4)
        greedy = [r for r in requests if r.params.greedy]
        assert outputs(greedy) == [slow_decode(TABLE.logits_after, r)[0] for r in greedy]


def _across(temperatures: list[float], count: int) -> Any:
    return zip(enumerate(prompts(count)), itertools.cycle(temperatures), strict=False)


@METHODS
def test_match_gives_what_none_gives_on_a_model(case: Case, tiny: CausalLM, drafters: dict[str, CausalLM]) -> None:
    def requests() -> list[Request]:
        return [make(p, i, max_tokens=20, temperature=0.8) for i, p in enumerate(prompts(6, 250, 40))]

    want = outputs(run(tiny, plain(tiny), "standard", requests()))
    assert outputs(run(tiny, proposer(case, tiny, **drafters), "match", requests(), rows=4)) == want


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("case", [case for case in methods() if case.id in ("none", "greedy-noisy", "ngram")])
def test_greedy_gives_what_transformers_generates(
    case: Case, penalty: float, tiny: CausalLM, drafters: dict[str, CausalLM]
) -> None:
    """`repetition_penalty` has the same definition there."""
    theirs = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)
    requests = [
        make(p, i, max_tokens=24, temperature=0.0, repetition_penalty=penalty, ignore_eos=True)
        for i, p in enumerate(prompts(4, 250, 30))
    ]
    run(tiny, proposer(case, tiny, **drafters), "standard", requests)
    for request in requests:
        ids = torch.tensor([request.prompt_token_ids])
        out = theirs.generate(
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


RAGGED_CASES = [case for case in methods() if case.id in ("none", "ngram", "probabilistic-noisy", "own-law", "ragged")]


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
    alone = {r.id: r.output_token_ids for r in mixed_requests() for _ in [run(TABLE, proposer(case, TABLE), name, [r])]}
    rng = np.random.default_rng(5)
    for rows in (1, 3, 8):
        requests = mixed_requests()
        rng.shuffle(requests)  # type: ignore[arg-type]
        run(TABLE, proposer(case, TABLE), name, requests, rows=rows, prefill_chunk_size=rows)
        assert {r.id: r.output_token_ids for r in requests} == alone


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


# What a proposer is told


class Watching(Silent):
    """Passes another proposer's drafts on, and holds every context against what is known otherwise."""

    def __init__(self, inner: Proposer, target: TableLM, hidden_layers: tuple[int, ...] = ()) -> None:
        self.inner, self.target, self.hidden_layers = inner, target, hidden_layers
        self.num_speculative_tokens = inner.num_speculative_tokens
        self.needs_logits = bool(hidden_layers)
        self.running: dict[int, Request] = {}  # by row
        self.hidden: dict[str, list[torch.Tensor]] = {}  # by request, all states that were handed over
        self.steps: dict[str, list[tuple[int, list[int], int]]] = {}  # by request: tokens before, draft, budget
        self.num_ended = 0

    def begin(self, row: int, request: Request) -> None:
        assert row not in self.running, "the row is taken"
        self.running[row] = request
        self.hidden[request.id], self.steps[request.id] = [], []
        self.inner.begin(row, request)

    def end(self, row: int) -> None:
        del self.running[row]
        self.num_ended += 1
        self.inner.end(row)

    def more_bytes(self, rows: int, slots: int) -> int:
        return self.inner.more_bytes(rows, slots)

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
            own, budget = draft.token_BK[b, : draft.length_B[b]].tolist(), int(context.max_draft_B[b])
            self.steps[request.id].append((int(context.length_B[b]), own, budget))
        return draft


@SCHEMES
@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("case", [case for case in methods() if case.id in ("none", "greedy-noisy", "ragged")])
def test_hidden_states_are_those_of_the_committed_tokens(case: Case, chunk: int, name: str) -> None:
    """Each once and in order, over chunks of a prompt and over what is accepted and rejected. And the last logits."""
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
        # at the last call, all committed tokens but the last had been processed
        assert len(tokens) - 1 - NUM_DRAFT - 1 <= count < len(tokens)
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
    asked = []
    forward = TableLM.forward
    monkeypatch.setattr(TableLM, "forward", lambda *args, **kw: asked.append((args, kw)) or forward(*args, **kw))
    run(TABLE, plain(TABLE), "standard", [make([1, 2], max_tokens=5)])
    assert len(asked) == 5
    assert not any(kw.get("hidden_layers", ()) or (len(args) > 7 and args[7]) for args, kw in asked)


@SCHEMES
@METHODS
def test_no_draft_is_longer_than_its_budget(case: Case, name: str) -> None:
    """A step emits a token of its own, so the last token of an answer is never worth a draft."""
    watching = Watching(proposer(case, TABLE), TABLE)
    kinds = itertools.product([1, 2, 3, 4, 9], [0.0, 1.0])
    requests = [make(p, i, max_tokens=n, temperature=t) for (i, p), (n, t) in zip(enumerate(prompts(10)), kinds, strict=True)]
    run(TABLE, watching, name, requests, rows=4)
    assert watching.num_ended == len(requests)
    assert not watching.running
    for request in requests:
        limit = len(request.prompt_token_ids) + request.params.max_tokens
        for before, draft, budget in watching.steps[request.id]:
            assert budget == min(watching.num_speculative_tokens, limit - before - 1)
            assert len(draft) <= budget
        assert len(request.output_token_ids) == request.params.max_tokens


def test_drafts_of_a_custom_class_are_cut_to_the_budget() -> None:
    """It may ignore max_draft_B."""
    drafting = method.build("custom_class", TABLE, model=f"{__name__}.Reckless", num_speculative_tokens=4)
    requests = [make(p, i, max_tokens=i + 1, temperature=1.0) for i, p in enumerate(prompts(6))]
    run(TABLE, drafting, "standard", requests)
    assert [max(r.stats.drafted, default=0) for r in requests] == [0, 0, 1, 2, 3, 4]


class Reckless(OwnLaw):
    def propose(self, context: Context) -> Draft:
        draft = super().propose(context)
        draft.length_B.fill_(self.num_speculative_tokens)
        return draft


def test_a_drafter_with_a_short_context_stops_for_that_row_only() -> None:
    limit, k = 16, 3
    drafter = TABLE.noisy(0.7)
    drafter.max_model_len = limit  # which its forward asserts
    watching = Watching(drafts_of(drafter, TABLE, k), TABLE)
    lengths = (2, 9, 15, 16, 17, 30)
    requests = [make([1 + i % 3 for i in range(n)], n, max_tokens=25, temperature=0.0) for n in lengths]
    run(TABLE, watching, "standard", requests, rows=4)
    for request in requests:
        assert request.output_token_ids == slow_decode(TABLE.logits_after, request)[0]
        for before, draft, budget in watching.steps[request.id]:
            # the drafter's cache holds the committed tokens and all of the draft but its last token
            assert len(draft) == min(budget, max(limit - before + 1, 0))
    drafted = {n: sum(r.stats.drafted) for n, r in zip(lengths, requests, strict=True)}
    assert drafted[2] > drafted[9] > drafted[16] == drafted[17] == drafted[30] == 0


# Continuous batching


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("case", [case for case in methods() if case.id in ("none", "probabilistic-noisy", "suffix")])
def test_rows_are_filled_as_they_fall_free(case: Case, rows: int) -> None:
    """More requests than rows, that end at different times; and more that are added meanwhile."""
    engine = Engine(TABLE, proposer(case, TABLE), scheme("match"), rows)
    kinds = itertools.cycle([1, 12, 4, 25, 7])
    requests = [make(p, i, max_tokens=n, temperature=0.8) for (i, p), n in zip(enumerate(prompts(20)), kinds, strict=False)]
    engine.add(*requests[:7])
    finished, num_added, num_steps = [], 7, 0
    while engine.waiting or engine.num_running:
        in_flight = num_added - len(finished)
        done = engine.step()
        assert engine.num_running + len(done) == min(rows, in_flight), "a row stood empty while somebody waited"
        finished += done
        num_steps += 1
        if num_steps % 3 == 0 and num_added < 20:
            engine.add(*requests[num_added : num_added + 4])
            num_added = min(num_added + 4, 20)
    assert sorted(r.id for r in finished) == sorted(r.id for r in requests)
    assert outputs(requests) == [slow_decode(TABLE.logits_after, r)[0] for r in requests]
    assert max(size for r in requests for size in r.stats.batch_size) == min(rows, 8 if rows == 8 else rows)


def test_requests_may_be_added_while_others_are_yielded() -> None:
    engine = Engine(TABLE, noisy_drafts(), scheme("match"), 2)
    first, more = [make(p, i, max_tokens=9) for i, p in enumerate(prompts(3))], [make([5] * 40, 9, max_tokens=60)]
    seen = []
    for request in engine.run(first):
        seen.append(request)
        if len(seen) == 1:
            engine.add(*more)  # longer than all before: the caches grow under the running rows
    assert {r.id for r in seen} == {"0", "1", "2", "9"}
    assert outputs(seen) == [slow_decode(TABLE.logits_after, r)[0] for r in seen]


def test_engines_may_take_turns_with_one_cache() -> None:
    cache = TABLE.new_cache()
    engines = [Engine(TABLE, noisy_drafts(), scheme("match"), rows, cache=cache) for rows in (4, 2)]
    for turn in range(4):
        requests = [make(p, 10 * turn + i, max_tokens=10 + 5 * turn) for i, p in enumerate(prompts(5, seed=turn))]
        list(engines[turn % 2].run(requests))
        assert outputs(requests) == [slow_decode(TABLE.logits_after, r)[0] for r in requests]


def test_a_prompt_in_chunks_is_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while a long prompt is read, the others go on."""
    lengths = (1, 4, 5, 23)
    requests = {}
    for chunk in (1, 2, 5, 512):
        requests[chunk] = [make((prompts(1, V, 1) * n)[0] * n, n, max_tokens=12, temperature=0.9) for n in lengths]
        for request in requests[chunk]:
            rng = np.random.default_rng(int(request.id))
            request.prompt_token_ids = rng.integers(0, V, int(request.id)).tolist()
        engine, parts = Engine(TABLE, noisy_drafts(), scheme("match"), prefill_chunk_size=chunk), Counter()
        engine.add(*requests[chunk])
        steps_of_long = 0
        while engine.num_running or engine.waiting:
            engine.step()
            reading = engine.cached_R < engine.prompt_R
            steps_of_long += bool(reading.any())
            parts[int(reading.sum())] += 1
        assert steps_of_long == math.ceil(23 / chunk) - 1
        if chunk == 1:
            assert len(requests[chunk][0].stats.emitted) > 0
    want = [slow_decode(TABLE.logits_after, r)[0] for r in requests[512]]
    assert all(outputs(got) == want for got in requests.values())


def test_a_model_reads_a_prompt_in_chunks(tiny: CausalLM) -> None:
    long = np.random.default_rng(0).integers(0, 250, 150).tolist()
    answers = [
        run(tiny, plain(tiny), "standard", [make(long, max_tokens=12, temperature=0.0)], prefill_chunk_size=chunk)
        for chunk in (512, 64, 7)
    ]
    assert answers[0][0].output_token_ids == answers[1][0].output_token_ids == answers[2][0].output_token_ids
