"""`allowed_token_ids`, `bad_words` and log probabilities under speculation: what plain decoding gives, and what transformers
gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import hub, rejection, sampling
from specdec.core import Proposer, Request
from specdec.engine import Engine
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.all_pairs import all_pairs
from support.errors import refused
from support.methods import settings, tiny
from support.stretches import STRETCH, adverse, decode, drafts_of, misfit
from support.table import NUM_DRAFT, TableLM, proposer, scheme, schemes, with_digits

TABLE = TableLM.random(3, scale=0.7)
LETTERS = "abcdef"
PROMPT = "to be or not to be"


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny().tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def text_of(ids: list[int]) -> str:
    return str(tiny().tokenizer.decode(ids))


# ---------------------------------------------------------------------------------------- the distribution


CONSTRAINTS: list[dict[str, Any]] = [
    {"bad_words": ["01", "22", "120"]},
    {"allowed_token_ids": [0, 2], "bad_words": ["00"]},
]


@pytest.mark.parametrize(
    ("drafter", "name", "constraint"),
    all_pairs(
        ["negated", "same", "ngram"], ["standard", "block"], [pytest.param(each, id="-".join(each)) for each in CONSTRAINTS]
    ),
)
def test_joint_distribution_under_constraints(drafter: str, name: str, constraint: dict[str, Any]) -> None:
    """Under `match` and `gumbel` the tokens are those of plain decoding, see below."""
    lookup = {"num_speculative_tokens": NUM_DRAFT, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafting = proposer(("ngram", lookup), TABLE) if drafter == "ngram" else drafts_of(drafter, TABLE)
    params = SamplingParams(temperature=0.8, max_tokens=STRETCH, **constraint)
    requests = decode(with_digits(TABLE), drafting, scheme(name), params, num_requests=1500)
    assert misfit(TABLE, requests) < 1
    assert sum(sum(request.stats.drafted) for request in requests) > 0


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_position_without_tokens_is_no_matter_until_it_is_reached(temperature: float) -> None:
    """After token 0 nothing is left. The target takes 1, the drafter nearly always drafts 0."""
    logits = np.full((3, 2, 2), -20.0)
    logits[..., 1] = 20.0
    target = TableLM(logits)
    params = SamplingParams(temperature=temperature, max_tokens=12, bad_words=["00", "01"])
    for name in schemes():
        for request in decode(with_digits(target), adverse(target), scheme(name), params, num_requests=4):
            assert request.output_token_ids == [1] * 12
            assert sum(request.stats.drafted) > 0
    stuck = SamplingParams(temperature=0, max_tokens=12, bad_words=["00", "01"], logit_bias={0: 100.0})
    refused(
        lambda: decode(with_digits(target), adverse(target), scheme("standard"), stuck, num_requests=1),
        "after 3 tokens",
        "leave no token",
    )


# -------------------------------------------------------------------------------------------- as plain decoding


@cache
def drafting(name: str) -> Proposer:
    """eagle3: random weights that are right now and then."""
    return SpeculativeConfig(**settings(name, tiny())).resolve().build(tiny())[0]


def batch(temperature: float) -> list[Request]:
    """Rows with and without constraints and log probabilities, side by side."""
    letters = ids_of(LETTERS)
    many: list[dict[str, Any]] = [
        {"logprobs": 3, "allowed_token_ids": letters[:3]},
        {"logprobs": 0, "allowed_token_ids": letters, "bad_words": ["ab", "fe", "c"]},
        {},
        {"logprobs": -1, "prompt_logprobs": 2},
        {"logprobs": 1, "min_tokens": 5, "repetition_penalty": 1.2, "bad_words": ["a"]},
        {"allowed_token_ids": letters[:2], "prompt_logprobs": 0},
    ]
    params = [SamplingParams(temperature=temperature, max_tokens=24, **values) for values in many]
    return [Request(str(i), ids_of(PROMPT * (1 + i % 3)), each, seed=i) for i, each in enumerate(params)]


def run(name: str, scheme_name: str, rows: int, temperature: float) -> list[Request]:
    requests = batch(temperature)
    engine = Engine(tiny(), drafting(name), rejection.build(scheme_name), rows, prefill_chunk_size=16)
    assert len(list(engine.run(requests))) == len(requests)
    return requests


@cache
def plain(scheme_name: str, temperature: float) -> list[Request]:
    """Where schemes sample with noise of their own, each has its own plain sampling."""
    return run("none", scheme_name, 1, temperature)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["ngram", "eagle3", "draft_model"])
@pytest.mark.parametrize(("scheme_name", "temperature"), [("standard", 0.0), ("block", 0.0), ("match", 0.8), ("gumbel", 0.3)])
def test_tokens_and_logprobs_are_those_of_plain_decoding(scheme_name: str, temperature: float, name: str, rows: int) -> None:
    requests = run(name, scheme_name, rows, temperature)
    for request, want in zip(requests, plain(scheme_name, temperature), strict=True):
        assert request.output_token_ids == want.output_token_ids
        for key in ("logprobs", "prompt_logprobs"):
            for a, b in zip(getattr(request, key), getattr(want, key), strict=True):
                assert a.token_ids[0] == b.token_ids[0]
                assert a.rank == b.rank
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        params = request.params
        assert len(request.logprobs) == (0 if params.logprobs is None else 24)
        assert len(request.prompt_logprobs) == (0 if params.prompt_logprobs is None else len(request.prompt_token_ids) - 1)
        assert params.allowed_token_ids is None or set(request.output_token_ids) <= set(params.allowed_token_ids)
        assert not any(word in text_of(request.output_token_ids) for word in params.bad_words)
    assert sum(sum(request.stats.accepted) for request in requests) > 0


def test_rows_that_do_not_ask_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "token_logprobs", None)
    engine = Engine(tiny(), drafting("ngram"), rejection.build("standard"), 2)
    (request,) = engine.run([Request("0", ids_of(PROMPT), SamplingParams(temperature=0, max_tokens=4))])
    assert request.logprobs == []


# ------------------------------------------------------------------------------------------------ as transformers


@cache
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        hub.resolve("tiny"), dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )


@torch.no_grad()
def test_logprobs_are_the_log_softmax_of_a_plain_forward() -> None:
    for request in run("ngram", "standard", 4, 0.0):
        ids = [*request.prompt_token_ids, *request.output_token_ids]
        logprob_LV = reference()(torch.tensor([ids])).logits[0].log_softmax(-1)
        num_prompt = len(request.prompt_token_ids)
        for key, first in (("logprobs", num_prompt), ("prompt_logprobs", 1)):
            num_top = getattr(request.params, key)
            for place, got in enumerate(getattr(request, key), start=first):
                want_V = logprob_LV[place - 1]
                assert got.token_ids[0] == ids[place]
                np.testing.assert_allclose(got.logprobs, want_V[got.token_ids], atol=1e-4)
                top_X = want_V.sort(descending=True).values[: None if num_top == -1 else num_top]
                np.testing.assert_allclose(got.logprobs[1:], top_X, atol=1e-4)
                rank = int((want_V >= want_V[ids[place]]).sum())
                assert abs(got.rank - rank) <= int((want_V - want_V[ids[place]]).abs().lt(1e-4).sum()) - 1


@pytest.mark.parametrize("words", [["ab", "dead"], ["ba", "c", "ef"]])
def test_constraints_are_those_of_transformers(words: list[str]) -> None:
    letters = ids_of(LETTERS)
    prompt = ids_of("xyz ") * 3  # none of the words begins in it: there, transformers counts the prompt too
    params = SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=letters, bad_words=words, ignore_eos=True)
    engine = Engine(tiny(), drafting("ngram"), rejection.build("standard"), 2)
    (request,) = engine.run([Request("0", prompt, params)])
    want = reference().generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, bad_words_ids=request.bad_words_token_ids,
        prefix_allowed_tokens_fn=lambda *_: letters, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert request.output_token_ids == want[0, len(prompt) :].tolist()
    assert sum(request.stats.drafted) > 0
    assert request.bad_words_token_ids == [ids_of(word) for word in words]
