"""A model that computes nan or inf says so in one line, at the first such step; nothing is decoded from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LLM, hub, method, rejection
from specdec.checkpoint import causal_lm
from specdec.core import Policy, Request
from specdec.drafter.base import Init
from specdec.drafter.batch import Sample
from specdec.engine import Engine
from specdec.model.target import CausalLM, is_finite
from specdec.params import SamplingParams
from specdec.policy.adaptive import Adaptive
from specdec.policy.cost_table import CostTable
from specdec.training.features import OnlineFeatures
from support.table import TableLM

NAN = float("nan")
INF = float("inf")
BAD = 4  # the token after which the table has no distribution
VOCAB = 6


def table(bad_logits: list[float]) -> TableLM:
    """From token t to t + 1, almost always; after BAD comes the given line of logits."""
    logits = np.full((VOCAB + 1, VOCAB, VOCAB), -8.0)
    for token in range(VOCAB):
        logits[:, token, (token + 1) % VOCAB] = 8.0
    logits[:, BAD] = bad_logits
    return TableLM(logits, "counting", 64)


def request(name: str, ids: list[int], **params: Any) -> Request:
    return Request(name, ids, SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}))


def engine(
    target: CausalLM, name: str = "none", scheme: str = "standard", rows: int = 3, policy: Policy | None = None, **settings: Any
) -> Engine:
    return Engine(target, method.build(name, target, **settings), rejection.build(scheme), max_batch_size=rows, policy=policy)


SPOILED = {
    "nan": [0.0, NAN, 1.0, 0.0, 0.0, 0.0],
    "inf": [0.0, INF, 1.0, 0.0, 0.0, 0.0],
    "two infs": [INF, INF, 1.0, 0.0, 0.0, 0.0],
    "all -inf": [-INF] * VOCAB,
    "all nan": [NAN] * VOCAB,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.9, "top_k": 4},
    "greedy, penalised": {"repetition_penalty": 1.1},
}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("ngram", {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}),
]


@pytest.mark.parametrize("distribution", SPOILED)
@pytest.mark.parametrize("params", WAYS)
@pytest.mark.parametrize(("name", "settings"), METHODS, ids=["none", "ngram"])
def test_the_first_step_without_a_distribution_ends_the_run(
    distribution: str, params: str, name: str, settings: dict[str, Any], one_line: Callable[..., str]
) -> None:
    """Row b comes to token 4 at its own time; its mates are fine. The line has the request, how far it was, and what to do."""
    target = table(SPOILED[distribution])
    good = [5, 0, 1]
    bad = [0, 1, 2]
    run = engine(target, name, **settings)
    requests = [request("a", good, max_tokens=4), request("b", bad, **WAYS[params]), request("c", good, max_tokens=4)]
    words = ("request b, after 5 tokens", "logits of counting are not finite (nan or inf) in float32", "fetch the model again")
    one_line(lambda: list(run.run(requests)), *words)
    assert not run.num_running, "nobody goes on from what is spoiled"


@pytest.mark.parametrize("params", WAYS)
def test_a_prompt_may_be_all_that_it_takes(params: str, one_line: Callable[..., str]) -> None:
    run = engine(table(SPOILED["nan"]))
    one_line(lambda: list(run.run([request("a", [1, BAD], **WAYS[params])])), "request a, after 2 tokens", "not finite")


@pytest.mark.parametrize("scheme", ["standard", "block", "match"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_token_that_is_never_said_is_no_fault(scheme: str, temperature: float) -> None:
    """-inf for some tokens is a distribution."""
    run = engine(table([-INF, -INF, -INF, -INF, -INF, 3.0]), scheme=scheme)
    (done,) = run.run([request("a", [0, 1, 2], temperature=temperature, max_tokens=4)])
    assert done.output_token_ids == [3, 4, 5, 0]


def test_settings_that_leave_no_token_are_not_the_models_fault(one_line: Callable[..., str]) -> None:
    """Only token 5 can be said, and min_tokens forbids it; a bias and a penalty that overflow."""
    run = engine(table([-INF] * 5 + [3.0]))
    only_5 = {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": [5]}
    words = ("request a, after 5 tokens", "min_tokens, logit_bias and penalties leave no token that can be sampled")
    line = one_line(lambda: list(run.run([request("a", [0, 1, 2], **only_5)])), *words)
    assert "fetch the model" not in line
    run = engine(table([0.0, 1e35, 0.0, 0.0, 0.0, 0.0]))
    one_line(lambda: list(run.run([request("a", [1, 2], repetition_penalty=1e-4)])), "request a", "leave no token")


@pytest.mark.parametrize("scheme", ["standard", "block", "match", "gumbel"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree_topk", [None, 3])
def test_a_node_without_a_token_left_counts_if_it_is_reached(
    scheme: str, temperature: float, tree_topk: int | None, one_line: Callable[..., str]
) -> None:
    """After an `a` nothing may follow, and `b` is by far the likeliest; what is drafted has both, in one order or the other."""
    a, b, other = 64, 65, 67
    lookup = {"num_speculative_tokens": 12, "prompt_lookup_min": 1, "prompt_lookup_max": 1, "tree_topk": tree_topk}
    method = {"method": "ngram", **{key: value for key, value in lookup.items() if value is not None}}

    def outputs(prompt: list[int], bad_words: list[str], settings: dict[str, Any]) -> list[int]:
        config = settings | {"rejection_sample_method": scheme}
        llm = LLM("tiny-llama", dtype="float32", device="cpu", num_threads=1, speculative_config=config)
        params = SamplingParams(
            temperature=temperature, max_tokens=6, allowed_token_ids=[a, b], logit_bias={b: 50.0}, bad_words=bad_words,
            ignore_eos=True, seed=0,
        )  # fmt: skip
        return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)

    reached = ([b, b, other, b, b, other, b, a, other], ["aa", "ab", "bb"])
    for settings in ({"method": "none"}, method):
        failing = partial(outputs, *reached, settings)
        one_line(failing, "request 0, after 1", "leave no token that can be sampled")
    not_reached = ([b, a, other, b, a, other, b, b, other], ["aa", "ab"])
    assert outputs(*not_reached, method) == [b] * 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_min_tokens_forbids_is_looked_at_too(temperature: float, one_line: Callable[..., str]) -> None:
    run = engine(table([0.0, 0.0, 1.0, 0.0, 0.0, NAN]))
    limited = request("a", [0, 1, 2], temperature=temperature, min_tokens=8, stop_token_ids=[5])
    one_line(lambda: list(run.run([limited])), "request a, after 5 tokens", "logits of counting are not finite")


@pytest.fixture(scope="module")
def spoiled() -> CausalLM:
    """A model whose embedding has no numbers for one token: every row that holds it is lost."""
    model = CausalLM("tiny", "float32", "cpu")
    model.embedding.weight.data[BAD] = NAN  # type: ignore[union-attr,index]
    return model


def test_an_engine_goes_on_with_the_next_requests(spoiled: CausalLM, one_line: Callable[..., str]) -> None:
    """A masked slot that holds nan would spoil whoever takes the row next."""
    run = engine(spoiled, rows=2)
    fresh = [r.output_token_ids for r in engine(spoiled, rows=2).run([request("x", [10, 11], max_tokens=6)])]
    one_line(lambda: list(run.run([request("a", [70] * 9, max_tokens=9), request("b", [70, BAD])])), "request b")
    assert [r.output_token_ids for r in run.run([request("x", [10, 11], max_tokens=6)])] == fresh


DRAFTED: dict[str, dict[str, Any]] = {
    "draft_model": {"num_speculative_tokens": 3},
    "draft_model, drawn": {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
    "pard": {"num_speculative_tokens": 3, "pard_token": 1},
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafted", DRAFTED)
def test_a_draft_model_without_numbers(
    spoiled: CausalLM, drafted: str, temperature: float, one_line: Callable[..., str]
) -> None:
    target = CausalLM("tiny-qwen3", "float32", "cpu")
    name = drafted.partition(",")[0]
    run = engine(target, name, model=spoiled, **DRAFTED[drafted])
    requests = [request("a", [70, 71], temperature=temperature), request("b", [70, BAD, 71], temperature=temperature)]
    one_line(lambda: list(run.run(requests)), "request b, after 4 tokens", "drafter's logits", name, "not finite")
    assert len(list(run.run([request("a", [70, 71])]))) == 1, "those whose drafts are numbers go on"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_adaptive_verification_hides_no_drafter_without_numbers(
    spoiled: CausalLM, temperature: float, one_line: Callable[..., str]
) -> None:
    """The policy would verify nothing of such a draft, and nobody would ever hear of it."""
    target = CausalLM("tiny-qwen3", "float32", "cpu")
    costs = CostTable([1, 4], [0, 1, 3], [[0.01, 0.011, 0.013], [0.011, 0.014, 0.02]], [[0.0, 0.001, 0.003]] * 2, {})
    deciding = Adaptive(costs, 3, 3, auto=False, prunes=True, num_confidence_features=1)
    run = engine(target, "draft_model", policy=deciding, model=spoiled, **DRAFTED["draft_model, drawn"])
    requests = [request("a", [70, 71], temperature=temperature), request("b", [70, BAD, 71], temperature=temperature)]
    one_line(lambda: list(run.run(requests)), "request b, after 4 tokens", "drafter's logits", "not finite")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["eagle3", "hybrid"])
def test_a_drafter_without_numbers(name: str, temperature: float, one_line: Callable[..., str]) -> None:
    target = CausalLM("tiny", "float32", "cpu")
    eagle3: Any = method.find("eagle3")
    drafter = eagle3(target, eagle3.init_checkpoint(target, {}, Init()), 2)
    drafter.fc.weight.data[0] = NAN
    run = engine(target)
    run.proposer = drafter
    if name == "hybrid":
        parts = [
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 4},
            {"method": "draft_model", "num_speculative_tokens": 2, "model": str(target.path)},
        ]
        run.proposer = method.build("hybrid", target, num_speculative_tokens=2, proposers=parts)
        run.proposer.components[1].proposer = drafter
        run.proposer.compose()
    who = "draft_model" if name == "hybrid" else "eagle3"
    requests = [request(i, [70, 71, 72], temperature=temperature) for i in "ab"]
    one_line(lambda: list(run.run(requests)), "request a, after 4 tokens", "drafter's logits", who, "not finite")


def test_hidden_states_without_numbers(spoiled: CausalLM, one_line: Callable[..., str]) -> None:
    mask = np.array([False, True, True, True])
    one_line(lambda: OnlineFeatures(spoiled, [1])([Sample("s", np.array([70, BAD, 71, 72]), mask)]), "sample s", "not finite")


# ------------------------------------------------------------------------------------------------- at rest


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for file in hub.tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("read", ["target", "draft model"])
def test_weights_without_numbers(value: float, read: str, copied: Path, one_line: Callable[..., str]) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    load = (lambda: CausalLM(copied, "float32", "cpu")) if read == "target" else (lambda: causal_lm.load(copied))
    one_line(load, str(copied), "model.layers.1.mlp.up_proj.weight holds nan or inf", "fetch the model again")


def test_weights_that_overflow_in_their_dtype(copied: Path, one_line: Callable[..., str]) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    one_line(lambda: CausalLM(copied, "float16", "cpu"), "model.norm.weight holds nan or inf in float16", "more range")
    CausalLM(copied, "float32", "cpu")


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["as in the model", "renamed as it is read"])
def test_integers_where_a_model_has_numbers(prefix: str, copied: Path, one_line: Callable[..., str]) -> None:
    """The header says I32 for what was written as F32."""
    path = copied / "model.safetensors"
    key = f"{prefix}norm.weight"
    save_file({f"{prefix}{k.removeprefix('model.')}": v for k, v in load_file(path).items()}, path, {"format": "pt"})
    CausalLM(copied, "float32", "cpu")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[key]["dtype"] = "I32"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    one_line(lambda: CausalLM(copied, "float32", "cpu"), f"{key} is of type I32", "fetch the model again")


def test_truth_values_are_no_weights(copied: Path, one_line: Callable[..., str]) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(tensors["model.norm.weight"].shape, dtype=torch.bool)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    one_line(lambda: CausalLM(copied, "float32", "cpu"), "model.norm.weight is of type BOOL")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_what_is_finite(dtype: torch.dtype) -> None:
    for count in (1, 7, 64, 4099):
        plain = torch.linspace(-3, 3, count).to(dtype)
        assert is_finite(plain)
        for place in {0, count // 2, count - 1}:
            for value in (NAN,) if dtype == torch.float8_e4m3fn else (NAN, INF, -INF):
                bad = plain.float()
                bad[place] = value
                assert not is_finite(bad.to(dtype))
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.arange(3))
