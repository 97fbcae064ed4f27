"""Draft models with another vocabulary: which tokens are the same, the exact vector, the distribution of the engine's output,
equality with plain decoding, and what is refused.

Tokenizers are made on the spot. The tests can fail: distributions that lose mass, or put it in other places, do not fit.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import hub, method, rejection, sampling
from specdec.core import Draft, Request
from specdec.drafter.shared_vocab import SharedVocab, intersect
from specdec.drafter.token_bytes import BYTES, Spelling, ids_by_bytes, spelling_of
from specdec.engine import Engine
from specdec.measure import tasks
from specdec.method.draft_model import DraftModel
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.cli import call
from support.distributions import completed_joint, emitted_distribution, fits, simulate, target_joint, tv, vectors
from support.methods import context, tiny_prompts
from support.stretches import LONG, TABLE, decode, misfit
from support.table import NUM_DRAFT, TableLM, scheme, schemes
from support.targets import loaded

VECTOR = vectors()["hetero_vocab_cases"][0]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SHOWN = {byte: character for character, byte in BYTES.items()}
BOTH = pytest.mark.parametrize("name", ["draft_model", "pard"])
HOW = pytest.mark.parametrize("how", ["greedy", "probabilistic"])


# Tokenizers: ids are places in the list


def finished(backend: Tokenizer, special: Sequence[str], names: dict[str, str]) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def byte_level(tokens: Sequence[str], special: Sequence[str] = (), **names: str) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it. names: unk_token and its like."""
    backend = Tokenizer(models.BPE(vocab=numbered(tokens), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return finished(backend, special, names)


def sentencepiece(tokens: Sequence[str], special: Sequence[str] = (), **names: str) -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it."""
    unk = names.get("unk_token")
    backend = Tokenizer(models.BPE(vocab=numbered(tokens), merges=[], byte_fallback=True, unk_token=unk))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return finished(backend, special, names)


def of_tokenizer(model: TableLM, tokenizer: Any) -> TableLM:
    model._tokenizer = tokenizer
    return model


def model_with(tokenizer: Any, size: int | None = None) -> TableLM:
    """A model of which only the vocabulary matters."""
    return of_tokenizer(TableLM.constant([1.0] * (len(tokenizer) if size is None else size)), tokenizer)


def pairs(target: Any, draft: Any) -> dict[int, int]:
    """Target id -> draft id, whatever replaces the rest."""
    if draft.unk_token is None:
        draft.add_special_tokens({"unk_token": "<anything else>"})
    vocabulary = intersect(model_with(target), model_with(draft))
    return dict(zip(vocabulary.target_I.tolist(), vocabulary.draft_I.tolist(), strict=True))


# ------------------------------------------------------------------------------------------ what tokens mean


def test_the_characters_of_bytes_are_those_of_the_library() -> None:
    assert set(BYTES) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTES.values()) == list(range(256))
    assert [BYTES[character] for character in "Ġ!~Ċĉ¡ÿ"] == [0x20, 0x21, 0x7E, 0x0A, 0x09, 0xA1, 0xFF]
    for text in ("é ü\n\t ~ 你好 🙂", "\x00\x7f\xa0\xad"):
        (piece,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert bytes(BYTES[character] for character in piece[0]) == text.encode()


def test_byte_level_tokens_are_their_bytes() -> None:
    tokens = ["Ġthe", "the", "Ċ", "ĊĊ", "Ã©", "ł", "ĠĠ", "<0x0A>", "âĸģa", "▁a"]
    want = [b" the", b"the", b"\n", b"\n\n", "é".encode(), b"\xa0", b"  ", b"<0x0A>", "▁a".encode(), "▁a".encode()]
    decoded = ids_by_bytes(byte_level(tokens), len(tokens))
    assert decoded == {text: i for i, text in enumerate(want) if i != 9}, "the last is the one before in another spelling"


def test_sentencepiece_tokens_are_their_text() -> None:
    tokens = ["▁the", "the", "\n", "é", "<0xC3>", "<0x0A>", "▁", "▁▁", "Ċ", "Ġthe", "a▁b", "<0xZZ>", "<0x0a>x"]
    want = [b" the", b"the", b"\n", "é".encode(), b"\xc3", None, b" ", b"  ", "Ċ".encode(), "Ġthe".encode(), b"a b", b"<0xZZ>"]
    decoded = ids_by_bytes(sentencepiece(tokens), len(tokens))
    assert decoded == {text: i for i, text in enumerate(want) if text is not None} | {b"<0x0a>x": 12}


def test_other_ways_to_say_it_in_a_tokenizers_json() -> None:
    """Metaspace with any mark, as decoder or as pre-tokenizer alone; a prefix space that is stripped is no part of a token."""
    vocab = numbered(["_a", "b", "<0x0A>"])
    for decoder, splitter in (
        (decoders.Metaspace(replacement="_"), None),
        (None, pre_tokenizers.Metaspace(replacement="_")),
        (decoders.Sequence([decoders.Metaspace(replacement="_"), decoders.Fuse()]), pre_tokenizers.Metaspace(replacement="_")),
    ):
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        if decoder is not None:
            backend.decoder = decoder
        if splitter is not None:
            backend.pre_tokenizer = splitter
        decoded = ids_by_bytes(PreTrainedTokenizerFast(tokenizer_object=backend), 3)
        assert decoded == {b" a": 0, b"b": 1, b"<0x0A>": 2}, "without byte fallback <0x0A> is text"
    backend = Tokenizer(models.BPE(vocab=numbered(["▁a", "<0x0A>"]), merges=[]))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    assert ids_by_bytes(PreTrainedTokenizerFast(tokenizer_object=backend), 2) == {b" a": 0, b"\n": 1}
    backend.decoder = None
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    assert spelling_of(PreTrainedTokenizerFast(tokenizer_object=backend)) == Spelling(byte_level=True)


class Slow:
    """A tokenizer without a backend. a: how it writes the first token of " a"."""

    def __init__(self, tokens: Sequence[str], a: str | None) -> None:
        self.tokens = list(tokens)
        self.a = a

    def get_vocab(self) -> dict[str, int]:
        return numbered(self.tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert text == " a"
        assert not add_special_tokens
        return [] if self.a is None else [self.tokens.index(self.a)]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokens[i] for i in ids]


@pytest.mark.parametrize(
    ("tokens", "a", "want"),
    [
        (["Ġa", "Ċ", "é"], "Ġa", {b" a": 0, b"\n": 1, b"\xe9": 2}),
        (["▁a", "Ċ", "é"], "▁a", {b" a": 0, "Ċ".encode(): 1, "é".encode(): 2}),
        (["_a", "Ċ"], "_a", {b" a": 0, "Ċ".encode(): 1}),
        (["Ġ", "a", "Ċ"], "Ġ", {b" ": 0, b"a": 1, b"\n": 2}),  # the space is a token of its own
        (["▁", "a"], None, {b" ": 0, b"a": 1}),
        ([" a", "a", "<0x0A>"], " a", {b" a": 0, b"a": 1, b"<0x0A>": 2}),  # one byte token is text
        ([*BYTE_TOKENS, "▁a", "a"], "▁a", {**{bytes([i]): i for i in range(256)}, b" a": 256, b"a": 257}),
    ],
    ids=["byte-level", "sentencepiece", "other", "alone", "unknown", "plain", "byte-tokens"],
)
def test_without_a_backend_a_probe_tells(tokens: list[str], a: str | None, want: dict[bytes, int]) -> None:
    assert ids_by_bytes(Slow(tokens, a), len(tokens)) == want


def test_special_tokens_are_their_names() -> None:
    """And never text, neither their own nor another token's."""
    ours = byte_level(["<s>", "a", "<eos>"], ["</s>", "<pad>"], eos_token="</s>")
    draft_tokenizer = sentencepiece(
        ["<s>", "a", "</s>", "<pad>"], ["<s>", "<eos>", "<pad>"], bos_token="<s>", eos_token="<eos>"
    )
    assert ids_by_bytes(ours, 5) == {b"<s>": 0, b"a": 1, b"<eos>": 2, "</s>": 3, "<pad>": 4}
    assert ids_by_bytes(draft_tokenizer, 5) == {"<s>": 0, b"a": 1, b"</s>": 2, "<pad>": 3, "<eos>": 4}
    assert pairs(ours, draft_tokenizer) == {1: 1, 4: 3}
    # a token that plays a role is special, though its entry does not say so
    plain = byte_level(["a", "<end>"])
    assert ids_by_bytes(plain, 2) == {b"a": 0, b"<end>": 1}
    plain.eos_token = "<end>"
    assert ids_by_bytes(plain, 2) == {b"a": 0, "<end>": 1}


def test_added_tokens_that_are_not_special_are_text() -> None:
    ours = byte_level(["a", "Ã©"])
    draft_tokenizer = sentencepiece(["é", "<think>", "▁▁"])
    ours.add_tokens([AddedToken("<think>", special=False), AddedToken("ü", special=False)])
    draft_tokenizer.add_tokens([AddedToken("\n\n", special=False), AddedToken("ü", special=False)])
    assert ids_by_bytes(ours, 4) == {b"a": 0, "é".encode(): 1, b"<think>": 2, "ü".encode(): 3}
    assert ids_by_bytes(draft_tokenizer, 5) == {"é".encode(): 0, b"<think>": 1, b"  ": 2, b"\n\n": 3, "ü".encode(): 4}
    assert pairs(ours, draft_tokenizer) == {1: 0, 2: 1, 3: 4}


def test_of_duplicates_the_first_ordinary_one_counts() -> None:
    """Byte tokens come first in every SentencePiece vocabulary, and `<0x61>` is what a model with an `a` never says."""
    ours = sentencepiece(["<0x61>", "<0x62>", "▁c", "a", " c"])
    assert ids_by_bytes(ours, 5) == {b"a": 3, b"b": 1, b" c": 2}
    assert pairs(ours, byte_level(["b", "Ġc", "a"])) == {3: 2, 1: 0, 2: 1}
    assert pairs(byte_level(["b", "Ġc", "a"]), ours) == {2: 3, 0: 1, 1: 2}
    twice = intersect(
        model_with(ours),
        of_tokenizer(TableLM.constant([1.0] * 5), sentencepiece(["▁c", " c", "<0x61>", "a", "x"], unk_token="x")),
    )
    assert len(set(twice.target_I.tolist())) == len(set(twice.draft_I.tolist())) == 2


def test_ids_without_a_row_and_rows_without_a_token() -> None:
    """A model's vocabulary may be larger than its tokenizer's (padding) or smaller; nothing maps to what is not there."""
    tokenizer = byte_level(["a", "b", "c"], ["<x>"], unk_token="<x>")
    assert ids_by_bytes(tokenizer, 2) == {b"a": 0, b"b": 1}
    assert ids_by_bytes(tokenizer, 10) == {b"a": 0, b"b": 1, b"c": 2, "<x>": 3}
    vocabulary = intersect(model_with(tokenizer, 8), model_with(byte_level(["c", "b", "u"], unk_token="u"), 6))
    assert dict(zip(vocabulary.target_I.tolist(), vocabulary.draft_I.tolist(), strict=True)) == {1: 1, 2: 0}
    assert vocabulary.to_draft_ids_host(np.arange(8)).tolist() == [2, 1, 0, 2, 2, 2, 2, 2]
    q_NV = vocabulary.to_target_vocab(torch.tensor([0]), torch.tensor([[0.25, 0.75]]))[1]
    assert q_NV is not None
    assert q_NV.tolist() == [[0, 0.25, 0.75, 0, 0, 0, 0, 0]]
    assert vocabulary.shared_logits(torch.arange(6.0).unsqueeze(0)).tolist() == [[1, 0]]
    assert (vocabulary.share_of([1, 1, 2, 0]), vocabulary.share_of([])) == (0.75, None)
    assert vocabulary.coverage([[1, 1], [2, 0]]) == {
        "num_shared": 2, "share_of_vocabulary": 0.25, "num_emitted": 4, "share_of_emitted": 0.75,
    }  # fmt: skip


def test_an_unk_beyond_the_models_rows_is_none() -> None:
    draft = model_with(byte_level(["a", "b", "e", "u"], unk_token="u", eos_token="e"), 3)
    assert intersect(model_with(byte_level(["a", "z"])), draft).to_draft_ids_host(np.array([0, 1])).tolist() == [0, 2]


# ---------------------------------------------------------------------------------- what replaces the rest


def test_the_unk_token_may_have_id_0(capsys: Any) -> None:
    draft = model_with(byte_level(["<unk>", "a", "<eos>"], ["<unk>", "<eos>"], unk_token="<unk>", eos_token="<eos>"))
    vocabulary = intersect(model_with(byte_level(["z", "a"])), draft)
    assert vocabulary.to_draft_ids_host(np.array([0, 1, 0])).tolist() == [0, 1, 0]
    assert vocabulary.to_draft_ids(torch.tensor([1, 1])).tolist() == [1, 1]
    assert "no unk token" not in capsys.readouterr().err


def test_without_unk_the_eos_token_with_a_warning(capsys: Any) -> None:
    draft = model_with(byte_level(["<eos>", "a"], ["<eos>"], eos_token="<eos>"))
    assert intersect(model_with(byte_level(["z", "a"])), draft).to_draft_ids_host(np.array([0, 1])).tolist() == [0, 1]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "eos" in line]
    assert line.startswith("warning: ")
    assert all(word in line for word in ("no unk token", "1 tokens", "eos token 0"))


def refused(action: Any, *words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        action()
    message = str(caught.value)
    assert "\n" not in message, message
    assert all(word in message for word in words), message


def test_without_unk_and_eos_nothing_replaces_the_rest(capsys: Any) -> None:
    target = model_with(byte_level(["z", "a"]))
    draft = model_with(byte_level(["a", "b"]))
    refused(lambda: intersect(target, draft), "lacks 1 tokens", "no unk or eos", "set unk_token")
    # where nothing is missing nothing has to replace it
    assert intersect(model_with(byte_level(["b", "a"])), draft).to_draft_ids_host(np.array([0, 1])).tolist() == [1, 0]


def test_no_shared_token_is_an_error_and_few_a_warning(capsys: Any) -> None:
    target = model_with(byte_level(["z", "y", "x"]))
    refused(lambda: intersect(target, model_with(byte_level(["a", "b"]))), "share none of 3 and 2 tokens", "related vocabulary")

    def warnings(count: int) -> list[str]:
        tokens = [f"t{i}" for i in range(200)]
        intersect(model_with(byte_level(tokens)), model_with(byte_level([*tokens[:count], "u"], unk_token="u")))
        return capsys.readouterr().err.splitlines()

    assert len(warnings(100)) == 1
    warned, line = warnings(99)
    assert warned.startswith("warning: ")
    assert "share 99 tokens, fewer than 100" in warned
    assert line.startswith("vocabulary: ")
    assert "99 of the 200 tokens" in line
    assert "(49.5%)" in line
    assert "demo data" not in line, "the text has no token of this vocabulary"


# ------------------------------------------------------------------------------------------------ the vector


def test_the_vector_of_verification_json() -> None:
    """q over the intersection, how much of it is accepted, and that the target's distribution comes out. Against it: drafts
    from the whole draft vocabulary, whose tokens outside are never accepted; and a q that was not renormalised."""
    p = VECTOR["p"]["val"]
    q = VECTOR["q_draft"]["val"]
    vocabulary = intersect(
        model_with(byte_level(VECTOR["target_vocab"])), model_with(byte_level(VECTOR["draft_vocab"], unk_token="e"))
    )
    num = 200_000
    u = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits_BI = vocabulary.shared_logits(torch.tensor(q).log().expand(num, -1))
    token_B, q_BV = vocabulary.to_target_vocab(*sampling.sample(logits_BI, torch.ones(num), u)[:2])
    assert q_BV is not None
    assert q_BV[0].numpy() == pytest.approx(np.array(VECTOR["q_tli"]["val"]), abs=1e-7)
    mass_V = torch.bincount(token_B, minlength=4) / num
    assert mass_V.numpy() == pytest.approx(np.array(VECTOR["q_tli"]["val"]), abs=5e-3), (
        "drawn from the distribution that is recorded"
    )

    p_table = {(): p} | {(token,): p for token in range(4)}
    q_table = {(): VECTOR["q_tli"]["val"]}
    standard = scheme("standard")
    for name in ("standard", "block"):
        distribution = emitted_distribution(scheme(name), p_table, q_table, 4, 1)
        accepted = sum(weight for (count, _), weight in distribution.items() if count)
        assert accepted == pytest.approx(VECTOR["accept_tli"]["val"], abs=1e-12)
        assert tv(completed_joint(distribution, p_table, 4, 1), target_joint(p_table, 4, 1)) < 1e-12
        assert VECTOR["tli_output_is_target"]
    _, tokens = simulate(scheme("match"), p_table, q_table, 4, 1)
    assert fits(tokens, target_joint(p_table, 4, 2), 4)

    # the union: ids of both vocabularies side by side, distributions as they are
    union = list(dict.fromkeys([*VECTOR["target_vocab"], *VECTOR["draft_vocab"]]))
    p_union, q_union = (
        [dict(zip(VECTOR[names], distribution, strict=True)).get(token, 0.0) for token in union]
        for names, distribution in (("target_vocab", p), ("draft_vocab", q))
    )
    tables = {(): p_union} | {(token,): p_union for token in range(6)}, {(): q_union}
    distribution = emitted_distribution(standard, *tables, 6, 1)
    accepted = sum(weight for (count, _), weight in distribution.items() if count)
    assert accepted == pytest.approx(VECTOR["accept_union"]["val"], abs=1e-12)

    # drawn from the renormalised distribution, judged by the raw one
    raw_V = torch.tensor(
        [q[VECTOR["draft_vocab"].index(t)] if t in VECTOR["draft_vocab"] else 0.0 for t in VECTOR["target_vocab"]]
    )

    def by_raw_q(draft: Draft, p_BJV: torch.Tensor, u_BJ: torch.Tensor) -> Any:
        assert draft.q_BKV is not None
        return standard(dataclasses.replace(draft, q_BKV=raw_V.to(draft.q_BKV).expand_as(draft.q_BKV)), p_BJV, u_BJ)

    wrong = completed_joint(emitted_distribution(by_raw_q, p_table, q_table, 4, 1), p_table, 4, 1)
    assert wrong.numpy() == pytest.approx(np.array(VECTOR["wrong_unnormalised_q"]["output"]["val"]), abs=1e-6)
    assert tv(wrong, target_joint(p_table, 4, 1)) == pytest.approx(VECTOR["wrong_unnormalised_q"]["tv"]["val"], abs=1e-6)


# ----------------------------------------------------------------------------------- through the whole engine

OURS = byte_level(["a", "Ġb", "Ċ"])  # of TABLE
# "a" is 3, " b" is 1; a newline is not there, and read as 0; the other two are what it often wants to say
DRAFT_TOKENIZER = sentencepiece(["<unk>", "▁b", "x", "a", "yy"], ["<unk>"], unk_token="<unk>")


@cache
def small(name: str) -> TableLM:
    """Models of THEIRS."""
    return of_tokenizer(TableLM.random(5, seed=int(name), scale=1.0), DRAFT_TOKENIZER)


def of_other_vocabulary(name: str, how: str, draft: CausalLM, target: CausalLM = TABLE, num_draft: int = NUM_DRAFT) -> Any:
    if isinstance(target, TableLM) and target._tokenizer is None:
        target._tokenizer = OURS
    more = {"pard_token": 4} if name == "pard" else {}
    return method.build(
        name,
        target,
        model=draft,
        num_speculative_tokens=num_draft,
        draft_sample_method=how,
        use_heterogeneous_vocab=True,
        **more,
    )


@pytest.fixture(autouse=True)
def _table_has_no_tokenizer() -> Any:
    """TABLE is other tests' too."""
    yield
    TABLE._tokenizer = None


@pytest.mark.parametrize("times", [pytest.param(1, id="short"), LONG])
@pytest.mark.parametrize("rule", ["standard", "block"])
@HOW
@BOTH
def test_joint_distribution(name: str, how: str, rule: str, times: int) -> None:
    requests = decode(TABLE, of_other_vocabulary(name, how, small("3")), scheme(rule), num_requests=400 * times)
    assert misfit(TABLE, requests) < 1
    drafted, accepted = (sum(sum(getattr(r.stats, key)) for r in requests) for key in ("drafted", "accepted"))
    assert 0.05 < accepted / drafted < 0.95


@pytest.mark.parametrize("rule", ["match", "gumbel"])
@HOW
@BOTH
def test_sampling_is_plain_sampling(name: str, how: str, rule: str) -> None:
    outputs = []
    for drafting in (method.build("none", TABLE), of_other_vocabulary(name, how, small("3"))):
        requests = decode(TABLE, drafting, scheme(rule), num_requests=40)
        outputs.append({request.id: request.output_token_ids for request in requests})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("mistake", ["mass outside", "own ids", "distribution of the whole"])
def test_broken_distributions_do_not_fit(mistake: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SharedVocab.to_target_vocab

    def to_target_vocab(self: SharedVocab, draft_N: torch.Tensor, q_NI: torch.Tensor) -> Any:
        token_N, q_NV = right(self, draft_N, q_NI)
        assert q_NV is not None
        if mistake == "own ids":  # two draft ids at the place of one
            return token_N, q_NV.roll(1, 1)
        if mistake == "mass outside":
            return token_N, q_NV * 0.5
        return token_N, (q_NV + 1) / 4

    monkeypatch.setattr(SharedVocab, "to_target_vocab", to_target_vocab)
    requests = decode(TABLE, of_other_vocabulary("draft_model", "probabilistic", small("3")), scheme(rule))
    assert misfit(TABLE, requests) > 1


def renamed(target: TableLM) -> TableLM:
    """The target with its ids in another order, and two tokens more, which it would far rather say."""
    place = np.array([3, 1, 0])
    table = np.full((6, 5, 5), 9.0)
    before = np.r_[place, 5]
    table[np.ix_(before, place, place)] = target.table
    tokenizer = sentencepiece(["\n", "▁b", "<unk>", "a", "yy"], ["<unk>"], unk_token="<unk>")
    return of_tokenizer(TableLM(table, "renamed"), tokenizer)


@pytest.mark.parametrize("rule", schemes())
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@BOTH
def test_the_target_under_other_names_is_always_right(name: str, temperature: float, rule: str) -> None:
    """So context goes in and drafts come out under the right names at every step, and nothing outside the intersection has
    mass. `pard`: the first token alone, which has no mask token before it."""
    num_draft = NUM_DRAFT if name == "draft_model" else 1
    drafting = of_other_vocabulary(name, "probabilistic", renamed(TABLE), num_draft=num_draft)
    params = SamplingParams(temperature=temperature, max_tokens=40)
    requests = decode(TABLE, drafting, rejection.build(rule, num_draft), params, 40, rows=8)
    accepted = [r.stats.accepted == r.stats.drafted for r in requests]
    assert all(sum(r.stats.drafted) > 10 for r in requests)
    if temperature == 0 or rule in ("standard", "block"):
        assert all(accepted)
    if temperature > 0 and rule == "match":
        assert not all(accepted)


@HOW
@BOTH
def test_drafts_and_probs_and_confidence_are_of_shared_tokens(name: str, how: str) -> None:
    """A draft model that would say `x` two times in three: what it says is " b", three times as likely as "a"."""
    q = [0.02, 0.24, 0.64, 0.08, 0.02]
    drafting = of_other_vocabulary(name, how, of_tokenizer(TableLM.constant(q), DRAFT_TOKENIZER))
    assert isinstance(drafting, DraftModel)
    drafting.reserve(2, 64)
    texts = {0: [0, 1, 2, 2], 1: [2, 2]}
    for row, ids in texts.items():
        drafting.on_start(row, Request(str(row), ids[:-1], SamplingParams()))
    for temperature in (0.0, 1.0, 0.5):
        draft = drafting.propose(context(drafting, texts, temperature=temperature, return_confidence=True))
        odds = 3 ** (1 / (temperature or 1))
        if temperature == 0 or how == "greedy":
            assert draft.token_BK.tolist() == [[1, 1, 1]] * 2
        assert set(draft.token_BK.flatten().tolist()) <= {0, 1}
        assert draft.confidence_BKF is not None
        assert draft.confidence_BKF.numpy() == pytest.approx(np.full((2, 3, 1), np.log(odds)), abs=1e-4)
        if how == "probabilistic":
            distribution = np.array([0, 1, 0] if temperature == 0 else [1 / (1 + odds), odds / (1 + odds), 0])
            assert draft.q_BKV is not None
            assert draft.q_BKV.numpy() == pytest.approx(np.broadcast_to(distribution, (2, 3, 3)), abs=1e-6)
        else:
            assert draft.q_BKV is None


def test_what_the_draft_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token for one, so positions are the target's; a token that it lacks is its unk."""
    draft = small("3")
    read: list[list[int]] = []
    forward = TableLM.forward

    def listening(self: TableLM, cache: Any, token_N: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if self is draft:
            read.append(token_N.tolist())
        return forward(self, cache, token_N, *rest, **more)

    monkeypatch.setattr(TableLM, "forward", listening)
    for name, want in (("draft_model", [[3, 0, 1], [0, 3], [None], [None]]), ("pard", [[3, 0, 1], [0, 3, 4, 4]])):
        read.clear()
        drafting = of_other_vocabulary(name, "greedy", draft)
        drafting.reserve(1, 32)
        drafting.on_start(0, Request("0", [0, 2, 1], SamplingParams()))
        out = drafting.propose(context(drafting, {0: [0, 2, 1, 2, 0]}))
        if name == "draft_model":
            draft_ids = [{0: 3, 1: 1}[token] for token in out.token_BK[0, :2].tolist()]
            want = [*want[:2], *([token] for token in draft_ids)]
        assert read == want, name


# --------------------------------------------------------------------------------------- models of transformers


@cache
def directory(kind: str) -> Path:
    """A draft model whose tokenizer writes bytes as SentencePiece does: `renamed` is tiny-llama itself with its rows in that
    order, so it is right as long as the target says bytes; `random` is of another architecture, and nearly never right."""
    out = Path(tempfile.mkdtemp()) / kind
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1) if chr(c) != "q"]  # "q" stays a byte token
    tokens = ["<unk>", *letters, *BYTE_TOKENS, "▁the"]
    tokenizer = sentencepiece(tokens, ["<unk>", "</s>", "<end>"], unk_token="<unk>", eos_token="</s>")
    model = hub.load_model(hub.resolve("tiny" if kind == "renamed" else "tiny-qwen3"), dtype=torch.float32)
    target_vocab = loaded("tiny-llama").tokenizer.get_vocab()
    size = len(tokenizer)
    draft_id_of = {i: target_vocab[SHOWN[byte]] for byte, i in enumerate_bytes(tokenizer)} | {
        tokenizer.convert_tokens_to_ids("</s>"): 257
    }
    spare = iter(sorted(set(range(320)) - set(draft_id_of.values())))
    order = torch.tensor([draft_id_of[i] if i in draft_id_of else next(spare) for i in range(size)])
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.weight = torch.nn.Parameter(part.weight[order].clone())
    model.config.vocab_size = size
    model.config.pard_token = size - 1
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def enumerate_bytes(tokenizer: Any) -> list[tuple[int, int]]:
    """(byte, id) of the token of each byte."""
    decoded = ids_by_bytes(tokenizer, len(tokenizer))
    return [(byte, decoded[bytes([byte])]) for byte in range(256)]


# of the ids of tiny-llama that no token has, it says some all the time; here it keeps to what can be drafted
BYTES_ONLY = dict.fromkeys((256, *range(258, 320)), -1e6)


def answers(engine: Engine, **params: Any) -> tuple[list[list[int]], float]:
    """Answers to `tiny_prompts`, and the share of drafts that was accepted."""
    params_of_request = SamplingParams(**{"temperature": 0, "max_tokens": 16} | params)
    requests = [Request(str(i), ids, params_of_request, seed=i) for i, ids in enumerate(tiny_prompts())]
    assert sum(1 for _ in engine.run(requests)) == len(requests)
    drafted, accepted = (sum(sum(getattr(r.stats, key)) for r in requests) for key in ("drafted", "accepted"))
    return [request.output_token_ids for request in requests], accepted / max(drafted, 1)


@cache
def plainly(bytes_only: bool) -> list[list[int]]:
    target = loaded("tiny-llama")
    engine = Engine(target, method.build("none", target), rejection.build("standard"), max_batch_size=1)
    return answers(engine, logit_bias=BYTES_ONLY if bytes_only else None)[0]


@pytest.mark.parametrize("kind", ["renamed", "random"])
@HOW
@BOTH
def test_greedy_decoding_is_plain_decoding(name: str, how: str, kind: str) -> None:
    target = loaded("tiny-llama")
    config = {"method": name, "model": str(directory(kind)), "num_speculative_tokens": 3, "use_heterogeneous_vocab": True}
    proposer, verifier = SpeculativeConfig(**config, draft_sample_method=how).resolve().build(target)
    assert isinstance(proposer, DraftModel)
    assert proposer.vocabulary is not None
    assert proposer.vocabulary.size == 257, "all bytes, and </s>"
    # every size where most drafts are refused and rows are soon out of step
    for batch_size in (1, 3, 8) if (how, kind) == ("greedy", "random") else (3,):
        engine = Engine(target, proposer, verifier, max_batch_size=batch_size, prefill_chunk_size=64)
        output, num_accepted = answers(engine, logit_bias=BYTES_ONLY if kind == "renamed" else None)
        assert output == plainly(kind == "renamed"), f"batch size {batch_size}"
        if kind == "renamed" and name == "draft_model":
            assert num_accepted == 1
        else:
            assert num_accepted < 0.5
    lacked = proposer.vocabulary.share_of([token for ids in plainly(False) for token in ids])
    assert lacked is not None
    assert lacked < 0.9, "of what the target says by itself, much is read as unk"


def test_match_is_plain_sampling() -> None:
    target = loaded("tiny-llama")
    outputs = []
    draft = {
        "method": "draft_model", "model": str(directory("renamed")), "num_speculative_tokens": 3,
        "use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic", "rejection_sample_method": "match",
    }  # fmt: skip
    for config in ({"method": "none"}, draft):
        engine = Engine(target, *SpeculativeConfig(**config).resolve().build(target), max_batch_size=3)
        outputs.append(answers(engine, temperature=0.8)[0])
    assert outputs[0] == outputs[1]


def test_a_run_says_how_much_can_be_drafted(tmp_path: Path) -> None:
    done = call(
        "run", "model=tiny", "limit=2", "sampling.max_tokens=8", f"out_dir={tmp_path / 'out'}",
        "method=draft_model", f"method.model={directory('random')}", "method.use_heterogeneous_vocab=true", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    ids = [token for row in rows for token in row["output_token_ids"]]
    assert summary["vocabulary"] == {
        "num_shared": 257, "share_of_vocabulary": 257 / 320, "num_emitted": len(ids),
        "share_of_emitted": sum(token < 256 or token == 257 for token in ids) / len(ids),
    }  # fmt: skip
    assert summary["lossless_said"].startswith("yes")
    (line,) = [line for line in done.out.splitlines() if line.startswith("vocabulary: ")]
    assert f"{summary['vocabulary']['share_of_emitted']:.2%} of the {len(ids)} tokens" in line
    (line,) = [line for line in done.err.splitlines() if line.startswith("vocabulary: ")]
    assert "257 of the 320 tokens of tiny" in line
    assert "the demo data's answers, an estimate, 100.0%" in line


# ------------------------------------------------------------------------------------------------ what is refused


def test_vocabularies_of_two_sizes_need_the_key() -> None:
    target = loaded("tiny-llama")
    config = {"method": "draft_model", "model": str(directory("random")), "num_speculative_tokens": 3}
    words = ("a vocabulary of 285", "one of 320", "must be equal", "use_heterogeneous_vocab=true")
    for more in ({}, {"use_heterogeneous_vocab": False}, {"use_heterogeneous_vocab": None}):
        refused(lambda more=more: SpeculativeConfig(**config, **more).resolve().build(target), *words)


def test_the_key_is_for_draft_models() -> None:
    target = loaded("tiny-llama")
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
    refused(
        lambda: SpeculativeConfig(**config, use_heterogeneous_vocab=True).resolve().build(target),
        "use_heterogeneous_vocab=true", "draft_model, pard", "'ngram'", "leave it out",
    )  # fmt: skip
    assert SpeculativeConfig(**config, use_heterogeneous_vocab=False).resolve().build(target)[0].num_speculative_tokens == 3
    refused(lambda: SpeculativeConfig(**config, use_heterogeneous_vocab="yes"), "use_heterogeneous_vocab='yes'", "boolean")


@BOTH
def test_what_is_trained_has_the_targets_vocabulary(name: str) -> None:
    target = loaded("tiny-llama")
    method_class: Any = method.find(name)
    checkpoint = method_class.init_checkpoint(
        target, {"num_hidden_layers": 1, **({"pard_token": 1} if name == "pard" else {})}, None
    )
    refused(
        lambda: method_class(target, checkpoint, 3, use_heterogeneous_vocab=True),
        "use_heterogeneous_vocab=true",
        "leave it out",
    )
    with pytest.raises(ValueError, match=r"they must be equal$"):
        method_class.init_checkpoint(target, {"model": str(directory("random"))}, None)


def test_a_mask_token_is_an_id_of_the_draft_model() -> None:
    target = of_tokenizer(TableLM.random(3), OURS)
    draft = small("3")
    config: dict[str, Any] = {"model": draft, "num_speculative_tokens": 3, "use_heterogeneous_vocab": True}
    assert method.build("pard", target, **config, pard_token=4).num_speculative_tokens == 3
    refused(lambda: method.build("pard", target, **config, pard_token=5), "pard_token=5", "0..4")


# ---------------------------------------------------------------------------------------------- the real ones


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("name", "size", "count", "num_special"),
    [(hub.DEFAULT, 49152, 49152, 17), pytest.param("gemma-3-270m", 262144, 262034, 6249, marks=pytest.mark.prove)],
)
def test_meanings_are_what_the_tokenizer_decodes(name: str, size: int, count: int, num_special: int) -> None:
    tokenizer = hub.load_tokenizer(hub.resolve(name))
    decoded = ids_by_bytes(tokenizer, size)
    backend = tokenizer.backend_tokenizer
    assert (len(decoded), sum(isinstance(meaning, str) for meaning in decoded)) == (count, num_special)
    for meaning, i in decoded.items():
        text = backend.decode([i], skip_special_tokens=False)
        assert text == (meaning if isinstance(meaning, str) else meaning.decode(errors="replace"))


@pytest.mark.embedded
@pytest.mark.prove
@pytest.mark.parametrize(("name", "other"), [("gemma-3-270m", hub.DEFAULT), (hub.DEFAULT, "gemma-3-270m")])
def test_smollm2_and_gemma_draft_for_each_other(name: str, other: str) -> None:
    """Byte-level BPE and SentencePiece: greedy output is the target's own."""
    target = loaded(name)
    outputs = []
    num_accepted = []
    chosen = [task.turns[0] for task in tasks.load(tasks.DEMO, 3)]
    prompts = [tasks.prompt_ids(target.tokenizer, [turn], []) for turn in chosen]
    drafting = method.build("draft_model", target, model=loaded(other), num_speculative_tokens=3, use_heterogeneous_vocab=True)
    assert isinstance(drafting, DraftModel)
    assert drafting.vocabulary is not None
    assert drafting.vocabulary.size == 46145
    for proposer, batch_size in ((method.build("none", target), 1), (drafting, 1), (drafting, 3)):
        engine = Engine(target, proposer, rejection.build("standard"), max_batch_size=batch_size)
        requests = [Request(str(i), ids, SamplingParams(temperature=0, max_tokens=16)) for i, ids in enumerate(prompts)]
        assert sum(1 for _ in engine.run(requests)) == len(requests)
        outputs.append([request.output_token_ids for request in requests])
        num_accepted.append(sum(sum(request.stats.accepted) for request in requests))
    assert outputs[1:] == [outputs[0]] * 2
    assert num_accepted[1] == num_accepted[2] > 0


# ------------------------------------------------------- a draft model that is said to have the target's vocabulary


def beside(tmp_path: Path, change: Any) -> Path:
    """A copy of the tiny model whose tokenizer was changed."""
    directory = tmp_path / "draft"
    shutil.copytree(hub.tiny(), directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    change(tokenizer)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def turned(tokenizer: dict[str, Any]) -> None:
    """Every id is the token after it."""
    names = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokenizer["model"]["vocab"] = {name: i for i, name in enumerate(names[1:] + names[:1])}


@BOTH
def test_one_size_and_another_tokenizer_is_refused(name: str, tmp_path: Path, one_line: Any) -> None:
    """Nothing would ever be accepted, and nothing would say why."""
    directory = beside(tmp_path, turned)
    config = {"method": name, "model": str(directory), "num_speculative_tokens": 2}
    config |= {"pard_token": 300} if name == "pard" else {}
    target = loaded("tiny-llama")
    message = one_line(
        lambda: SpeculativeConfig(**config).resolve().build(target), str(directory), target.name, "use_heterogeneous_vocab=true"
    )
    assert "256 ids are other tokens, such as 0" in message
    assert SpeculativeConfig(**config, use_heterogeneous_vocab=True).resolve().build(target)[0].vocabulary.size == 259


def test_two_tokens_that_changed_places_are_enough(tmp_path: Path, one_line: Any) -> None:
    def swapped(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    config = {"method": "draft_model", "model": str(beside(tmp_path, swapped)), "num_speculative_tokens": 2}
    one_line(
        lambda: SpeculativeConfig(**config).resolve().build(loaded("tiny-llama")),
        "2 ids are other tokens",
        "which is 'b' and 'a'",
    )


def test_special_tokens_may_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they do between fine-tunes of one model, whose names for the same reserved ids are others."""

    def renamed(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 259, "content": "<|im_end|>"})

    config = {"method": "draft_model", "model": str(beside(tmp_path, renamed)), "num_speculative_tokens": 2}
    SpeculativeConfig(**config).resolve().build(loaded("tiny-llama"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: 1 special or unused ids of the draft model")
    assert "such as 259, which is '<|im_end|>' and None" in line


def test_equal_tokenizers_are_not_spoken_of(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"method": "draft_model", "model": "tiny-qwen3", "num_speculative_tokens": 2}
    SpeculativeConfig(**config).resolve().build(loaded("tiny-llama"))
    assert capsys.readouterr().err == ""


def test_a_model_without_a_tokenizer_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = beside(tmp_path, lambda tokenizer: None)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / name).unlink(missing_ok=True)
    SpeculativeConfig(method="draft_model", model=str(directory), num_speculative_tokens=2).resolve().build(
        loaded("tiny-llama")
    )
    assert capsys.readouterr().err == ""


def test_training_compares_tokenizers_too(tmp_path: Path, one_line: Any) -> None:
    directory = beside(tmp_path, turned)
    one_line(
        lambda: DraftModel.load_checkpoint(loaded("tiny-llama"), str(directory), None), "256 ids are other tokens", "train one"
    )
