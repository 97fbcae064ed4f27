"""Medusa: which token a head is for, trees against all paths of the marginals, and both layouts of its checkpoints."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec import checkpoint, hub, rejection
from specdec.checkpoint import lint, native
from specdec.checkpoint.native import Checkpoint
from specdec.core import Draft, Request
from specdec.drafter.base import Init
from specdec.drafter.tree import read_shape
from specdec.engine import Engine
from specdec.method.medusa import Medusa
from specdec.params import SamplingParams
from specdec.training.features import OnlineFeatures
from support.drafters import REDUCED, SAMPLES, VOCAB, close, decode, plain, prompts
from support.methods import context, tiny

HIDDEN = 64
FROZEN = Init(train_lm_head=False)
ONE_HEAD = {"original_lm_head": True}
VARIANTS: dict[str, tuple[dict[str, Any], Init, bool]] = {
    "own": ({}, Init(), False),
    "deep-reduced": ({"num_heads": 4, "num_hidden_layers": 2, "medusa_fc_bias": False}, Init(), True),
    "one": (ONE_HEAD, Init(), False),
    "one-reduced": (ONE_HEAD | {"num_heads": 4}, Init(), True),
    "targets": (ONE_HEAD, FROZEN, False),
}
EVERY = pytest.mark.parametrize("name", VARIANTS)


@cache
def _grown(name: str) -> Checkpoint:
    architecture, init, is_reduced = VARIANTS[name]
    new = Medusa.init_checkpoint(tiny(), architecture, init, REDUCED if is_reduced else None)
    generator = torch.Generator().manual_seed(3)
    for _, tensor in sorted((new.tensors or {}).items()):
        if tensor.is_floating_point():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return new


def grown(name: str) -> Checkpoint:
    """A drafter whose weights were moved as if by training."""
    drafter = _grown(name)
    return replace(drafter, tensors=dict(drafter.tensors or {}), config=dict(drafter.config), target=dict(drafter.target))


@cache
def reference() -> Any:
    """The target as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(hub.tiny(), dtype=torch.float32, use_safetensors=True, trust_remote_code=False)


@torch.no_grad()
def states_of(tokens: list[int]) -> Tensor:
    """[n, D] what the target's output layer reads."""
    states: Tensor = reference().model(torch.tensor([tokens])).last_hidden_state[0]
    return states


def state_after(tokens: list[int]) -> Tensor:
    """[1, D] at the last token."""
    return states_of(tokens)[-1:]


def logits_in_words(drafter: Checkpoint, k: int, state: Tensor) -> Tensor:
    """[N, draft vocabulary] of head k."""
    tensors = drafter.tensors or {}
    for i in range(drafter.config["num_hidden_layers"]):
        out = state @ tensors[f"blocks.{k}.layers.{i}.weight"].T
        if drafter.config["medusa_fc_bias"]:
            out = out + tensors[f"blocks.{k}.layers.{i}.bias"]
        state = state + out / (1 + torch.exp(-out))
    weight = tensors.get("lm_head.weight", tensors.get(f"lm_heads.{k}.weight"))
    return state @ (tiny().head_rows()[0] if weight is None else weight).T


def ids(drafter: Checkpoint) -> Tensor:
    """Target ids of the draft vocabulary."""
    d2t = (drafter.tensors or {}).get("d2t")
    return torch.arange(VOCAB) if d2t is None else d2t + torch.arange(len(d2t))


# ------------------------------------------------------------------------------------------- heads and labels


@EVERY
@torch.no_grad()
def test_a_new_drafter_begins_as_the_targets_output_layer(name: str) -> None:
    architecture, init, is_reduced = VARIANTS[name]
    new = Medusa.init_checkpoint(tiny(), architecture, init, REDUCED if is_reduced else None)
    drafter = Medusa(tiny(), new, 1)
    state = state_after([97, 98, 99])
    want = reference().lm_head(state)[:, ids(new)]
    for k in range(new.config["num_heads"]):
        close(drafter.head_logits(k, drafter.step(k, state)), want, 1e-4)


@EVERY
def test_a_head_is_for_its_own_token(name: str) -> None:
    """The loss is sum .8^k -log q_k(token p + 2 + k), q_k of the target's state of token p, over supervised tokens."""
    drafter = grown(name)
    trained = Medusa(tiny(), drafter, 1)
    trained.for_training(Medusa.objective_type(), VARIANTS[name][1])
    batch = OnlineFeatures(tiny(), trained.hidden_layers)(SAMPLES)
    place = {token: i for i, token in enumerate(ids(drafter).tolist())}
    want = 0.0
    with torch.no_grad():
        for sample in SAMPLES:
            tokens = sample.token_n.tolist()
            states = states_of(tokens)
            for k in range(drafter.config["num_heads"]):
                logprobs = logits_in_words(drafter, k, states).log_softmax(-1)
                for p in range(len(tokens) - 2 - k):
                    token = tokens[p + 2 + k]
                    if sample.mask_n[p + 2 + k] and token in place:
                        want -= 0.8**k * logprobs[p, place[token]].item()
        loss, _ = trained.loss(batch)
    assert loss.item() == pytest.approx(want, rel=1e-4)


@EVERY
def test_every_head_learns_and_frozen_rows_do_not(name: str) -> None:
    init = VARIANTS[name][1]
    trained = Medusa(tiny(), grown(name), 1)
    trained.for_training(Medusa.objective_type(loss={"ce": 0.5, "tv": 0.5}), init)
    loss, _ = trained.loss(OnlineFeatures(tiny(), trained.hidden_layers)(SAMPLES))
    loss.backward()
    for key, parameter in trained.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key
    assert any("head" in key for key, _ in trained.named_parameters()) == init.train_lm_head


@EVERY
def test_a_chain_is_the_likeliest_token_of_each_head(name: str) -> None:
    drafter = grown(name)
    texts = {0: [97, 98, 99, 100], 2: [101] * 9, 3: [102, 103]}
    num_heads = drafter.config["num_heads"]
    proposer = Medusa(tiny(), drafter, num_heads)
    draft = proposer.propose(context(proposer, texts, [num_heads, 0, 2]))
    assert draft.length_B.tolist() == [num_heads, 0, 2]
    for b, (row, length) in enumerate(zip(texts, draft.length_B.tolist(), strict=True)):
        state = state_after(texts[row][:-1])
        want = [int(ids(drafter)[logits_in_words(drafter, k, state).argmax()]) for k in range(length)]
        assert draft.token_BK[b, :length].tolist() == want


# ------------------------------------------------------------------------------------------- trees


def paths_of(draft: Draft, b: int) -> list[tuple[int, ...]]:
    """The tokens down to each node, in order."""
    paths: list[tuple[int, ...]] = []
    assert draft.parent_BK is not None
    for k in range(int(draft.length_B[b])):
        parent = int(draft.parent_BK[b, k])
        paths.append((*(paths[parent] if parent >= 0 else ()), int(draft.token_BK[b, k])))
    return paths


@EVERY
def test_a_tree_has_the_likeliest_of_all_paths(name: str) -> None:
    """Of the products of the heads' probabilities; rows of several limits in one batch."""
    drafter = grown(name)
    texts = {0: [97, 98, 99, 100], 1: [101] * 9, 4: [102, 103]}
    limits = [14, 0, 5]
    proposer = Medusa(tiny(), drafter, 14, tree_topk=3)
    draft = proposer.propose(context(proposer, texts, limits))
    draft.check_tree("medusa")
    assert draft.length_B.tolist() == limits
    depth = drafter.config["num_heads"]
    for b, (row, limit) in enumerate(zip(texts, limits, strict=True)):
        state = state_after(texts[row][:-1])
        marginals = [logits_in_words(drafter, k, state)[0].log_softmax(-1).topk(3) for k in range(depth)]
        scores = {}
        for length in range(1, min(depth, limit) + 1):
            for ranks in itertools.product(range(3), repeat=length):
                path = tuple(int(ids(drafter)[marginals[k].indices[rank]]) for k, rank in enumerate(ranks))
                scores[path] = sum(marginals[k].values[rank].item() for k, rank in enumerate(ranks))
        likeliest = sorted(scores, key=lambda path: -scores[path])[:limit]
        assert paths_of(draft, b) == likeliest


@EVERY
def test_a_static_tree_has_the_ranks_that_it_is_given(name: str) -> None:
    drafter = grown(name)
    text = "[(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]"
    proposer = Medusa(tiny(), drafter, 8, speculative_token_tree=text)
    draft = proposer.propose(context(proposer, {0: [97, 98, 99], 1: [104, 105]}))
    for b, state in enumerate((state_after([97, 98]), state_after([104]))):
        order = [logits_in_words(drafter, k, state)[0].argsort(descending=True) for k in range(3)]
        want = [tuple(int(ids(drafter)[order[k][rank]]) for k, rank in enumerate(ranks)) for ranks in read_shape(text)]
        assert paths_of(draft, b) == want


@pytest.mark.parametrize(
    "settings",
    [
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
        {"num_speculative_tokens": 12, "tree_topk": 4},
        {"num_speculative_tokens": 6, "tree_topk": 2, "tree_depth": 2},
        {"num_speculative_tokens": 4, "speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0)]"},
        {"num_speculative_tokens": 9, "tree_topk": 3, "draft_sample_method": "probabilistic"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["own", "one-reduced", "targets"])
def test_output_is_the_targets(name: str, settings: dict[str, Any]) -> None:
    lengths = (3, 40, 20, 2, 9)
    proposer = Medusa(tiny(), grown(name), **settings)
    assert decode(tiny(), proposer, prompts(*lengths)) == plain("tiny", lengths)


@pytest.mark.parametrize("settings", [{"num_speculative_tokens": 3}, {"num_speculative_tokens": 9, "tree_topk": 3}], ids=str)
def test_typical_acceptance_at_temperature_0_is_greedy_text(settings: dict[str, Any]) -> None:
    lengths = (3, 40, 20)
    engine = Engine(tiny(), Medusa(tiny(), grown("own"), **settings), rejection.build("typical"), 3, prefill_chunk_size=64)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    requests = [Request(str(i), prompt, params, seed=i) for i, prompt in enumerate(prompts(*lengths))]
    assert len(list(engine.run(requests))) == 3
    assert [request.output_token_ids for request in requests] == plain("tiny", lengths)


def test_what_cannot_be_is_one_line(one_line: Any) -> None:
    one_line(lambda: Medusa(tiny(), grown("own"), 4), "num_speculative_tokens=4", "num_heads=3")
    one_line(lambda: Medusa(tiny(), grown("own"), 9, tree_topk=2, tree_depth=4), "4 deep", "lower tree_depth to 3")
    one_line(lambda: Medusa(tiny(), grown("own"), 9, tree_topk=2, tree_builder="beam"), "best_first and static")
    one_line(lambda: Medusa.init_checkpoint(tiny(), {"num_head": 2}, Init()), "did you mean 'num_heads'")
    altered = grown("own")
    altered.config["num_heads"] = 4
    one_line(lambda: Medusa(tiny(), altered, 1), "lack", "blocks.3")


# ------------------------------------------------------------------------------------------- checkpoints


def written(directory: Path, name: str, engine: str = "vllm") -> Path:
    directory.mkdir(exist_ok=True)
    checkpoint.write(grown(name), directory, engine, tiny())
    return directory


def edited(directory: Path, change: Callable[[dict[str, Tensor]], Any] | None = None, **keys: Any) -> Path:
    """Change tensors in place, and keys of config.json, None meaning that it goes."""
    if change is not None:
        held = load_file(directory / "model.safetensors")
        change(held)
        save_file(held, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if keys.get(key, 0) is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def same(got: Checkpoint, want: Checkpoint) -> None:
    assert (got.method, got.config) == (want.method, want.config)
    assert got.tensors is not None
    assert want.tensors is not None
    assert got.tensors.keys() == want.tensors.keys()
    for key, tensor in got.tensors.items():
        assert torch.equal(tensor, want.tensors[key]), key


@pytest.mark.parametrize("name", ["own", "one", "one-reduced", "targets"])
def test_vllms_layout_comes_back(name: str, tmp_path: Path) -> None:
    came = checkpoint.load(written(tmp_path, name))
    same(came, grown(name))
    assert came.target == grown(name).target
    assert set(came.copies or {}) == ({"lm_head.weight"} if name == "targets" else set())
    config = json.loads((tmp_path / "config.json").read_text())
    held = load_file(tmp_path / "model.safetensors")
    num_heads = grown(name).config["num_heads"]
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == ("medusa", num_heads, 1)
    assert config["truncated_vocab_size"] == (len(REDUCED) if name == "one-reduced" else VOCAB)
    assert config["original_lm_head"] == ("lm_head.weight" in held) == (name != "own")
    if name == "one-reduced":
        assert held["token_map"].tolist() == REDUCED.tolist()
    assert lint.loads(lint.check(tmp_path, "tiny")) == {
        "vllm": False, "sglang": False, "speculators": False, "vllm_medusa": True,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["own", "one", "targets"])
def test_the_authors_layout_comes_back(name: str, tmp_path: Path) -> None:
    """Where heads share an output layer, each gets it."""
    drafter = grown(name)
    came = checkpoint.load(written(tmp_path, name, "medusa"))
    assert came.config == drafter.config | {"original_lm_head": False, "own_lm_head": True}
    state = state_after([97, 98, 99])
    assert came.tensors is not None
    # a tensor in a mapped file lies at any address, and the last bits of a product may depend on that
    copied = replace(came, tensors={key: x.clone() for key, x in came.tensors.items()})
    for k in range(3):
        assert torch.equal(logits_in_words(copied, k, state), logits_in_words(drafter, k, state))
    held = load_file(tmp_path / "model.safetensors")
    assert set(held) == {f"{k}.{part}" for k in range(3) for part in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert lint.loads(lint.check(tmp_path, "tiny"))["vllm_medusa"]


def test_a_published_directory_is_read(tmp_path: Path) -> None:
    """Width and vocabulary are those of the weights; names with and without `medusa_heads.`."""
    written(tmp_path, "own", "medusa")
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "version": "2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    same(checkpoint.load(tmp_path), grown("own"))
    assert checkpoint.load(tmp_path).target == {"hidden_size": HIDDEN, "vocab_size": VOCAB, "name": "lmsys/vicuna-7b-v1.3"}
    assert checkpoint.method_of(tmp_path) == "medusa"
    held = load_file(tmp_path / "medusa_lm_head.safetensors")
    save_file({f"medusa_heads.{key}": x for key, x in held.items()}, tmp_path / "medusa_lm_head.safetensors")
    same(checkpoint.load(tmp_path), grown("own"))
    rules = {one.rule for one in lint.check(tmp_path) if one.engine == "vllm_medusa" and one.severity == "error"}
    assert rules == {"hidden_size", "names"}, "the width is not told, and the biases are dropped"


def test_pickled_heads_are_refused(tmp_path: Path, one_line: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.1.weight": 1}))
    one_line(lambda: checkpoint.load(tmp_path), "medusa_lm_head.pt refused", "convert to safetensors")


def test_rows_that_token_map_leaves_out_are_dropped(tmp_path: Path) -> None:
    """As in vLLM: an output layer may have all rows."""
    drafter = grown("one-reduced")
    full = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    edited(written(tmp_path, "one-reduced"), lambda held: held.update({"lm_head.weight": full}))
    assert drafter.tensors is not None
    drafter.tensors["lm_head.weight"] = full[torch.from_numpy(REDUCED)]
    same(checkpoint.load(tmp_path), drafter)
    assert lint.loads(lint.check(tmp_path))["vllm_medusa"]


def test_a_shared_head_may_be_the_first_ones(tmp_path: Path) -> None:
    edited(written(tmp_path, "one"), lambda held: held.update({"lm_heads.0.weight": held.pop("lm_head.weight")}))
    same(checkpoint.load(tmp_path), grown("one"))


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path, one_line: Any) -> None:
    one_line(lambda: written(tmp_path, "deep-reduced"), f"{len(REDUCED)} of {VOCAB}", "original_lm_head=true")
    one_line(lambda: written(tmp_path, "one-reduced", "medusa"), f"{len(REDUCED)} of {VOCAB}", "format=vllm")
    one_line(lambda: checkpoint.write(grown("targets"), tmp_path, "vllm"), "give target=")
    one_line(lambda: written(tmp_path, "own", "sglang"), "no medusa drafters")


MISTAKES: dict[str, tuple[str, Any, dict[str, Any], tuple[str, ...]]] = {
    "a head too few": ("own", None, {"num_heads": 4}, ("lack 'blocks.3",)),
    "a head too many": ("own", None, {"num_heads": 2}, ("unknown tensor 'blocks.2",)),
    "a layer too few": ("own", None, {"num_hidden_layers": 2}, ("lack 'blocks.0.layers.1",)),
    "no bias": ("own", None, {"medusa_fc_bias": False}, ("unknown tensor", "bias")),
    "heads beyond limits": ("own", None, {"num_heads": 10**9}, ("num_heads", "1..1000")),
    "no token_map": ("one-reduced", lambda held: held.pop("token_map"), {}, ("lack 'token_map'",)),
    "ids beyond": ("one-reduced", lambda held: held["token_map"].add_(200), {}, ("token_map", "0..319")),
    "ids twice": ("one-reduced", lambda held: held["token_map"].zero_(), {}, ("different tokens",)),
    "a draft vocabulary of another size": ("one-reduced", None, {"truncated_vocab_size": 9}, ("token_map must be 9 ids",)),
    "one over all": ("own", None, {"truncated_vocab_size": 999}, ("truncated_vocab_size", "1..320")),
    "another width": ("own", None, {"hidden_size": 32}, ("64", "32")),
    "an option": ("own", None, {"medusa_dropout": 0.5}, ("unknown option medusa_dropout",)),
    "a scale of logits": ("own", None, {"logit_scale": 2.0}, ("logit_scale=2.0",)),
    "a name twice": ("own", lambda held: held.update({"0.1.weight": torch.ones(VOCAB, HIDDEN)}), {}, ("two names",)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_directory_that_does_not_fit_is_one_line(mistake: str, tmp_path: Path, one_line: Any) -> None:
    name, change, keys, words = MISTAKES[mistake]
    edited(written(tmp_path, name), change, **keys)
    one_line(lambda: checkpoint.load(tmp_path), *words)


RULES: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "bias that is dropped": ("own", None, {"medusa_fc_bias": False}, "names"),
    "a head that is missing": ("own", lambda held: held.pop("lm_heads.2.weight"), {}, "names"),
    "a name that is ignored": ("own", lambda held: held.update(extra=torch.ones(2, 2)), {}, "names"),
    "zeros": ("own", lambda held: held["blocks.0.layers.0.weight"].zero_(), {}, "finite"),
    "no token_map": ("one-reduced", lambda held: held.pop("token_map"), {}, "token_map"),
    "rows of each head": ("own", None, {"truncated_vocab_size": 100}, "token_map"),
    "no width": ("own", None, {"hidden_size": None}, "hidden_size"),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_lint_finds(rule: str, tmp_path: Path) -> None:
    name, change, keys, rule_name = RULES[rule]
    edited(written(tmp_path, name), change, **keys)
    assert (rule_name, "error") in {(one.rule, one.severity) for one in lint.check(tmp_path) if one.engine == "vllm_medusa"}


def test_the_native_format_comes_back(tmp_path: Path) -> None:
    native.save(tmp_path, grown("deep-reduced"), {}, "")
    same(checkpoint.load(tmp_path), grown("deep-reduced"))
