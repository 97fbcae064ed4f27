"""Training data: what is supervised under every kind of chat template, what is read and left out, what is made of it."""

from __future__ import annotations

import gzip
import inspect
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import hub
from specdec.chat.answers import Rendered, UnstableTemplate
from specdec.chat.conversation import parse_tools
from specdec.chat.template import unread_template_kwargs, user_frame
from specdec.drafter.batch import Sample
from specdec.measure.tasks import DEMO as EVALUATION
from specdec.model.target import CausalLM
from specdec.training import data
from specdec.training.data import load, render
from specdec.training.samples import _permutation, batch_indices, draft_vocabulary, fingerprint, split_validation

Messages = list[dict[str, Any]]
VOCAB = 320

SPECIAL = (
    "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are of help.<|im_end|>\n' }}{% endif %}" + CHATML
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ 'User' if m['role'] == 'user' else 'Assistant' }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
QWEN3 = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content, thought = m.content, '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content.strip('\n') %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
THINK = "<think>\n\n</think>\n\n"


def byte_tokenizer(
    template: str | None, eos: str = "</s>", merges: tuple[tuple[str, str], ...] = (), more: tuple[str, ...] = ()
) -> Any:
    """A token for every byte and for every merge of two, and the special ones, with `more` of them."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *more)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, pad_token="<pad>", chat_template=template
    )


@dataclass(frozen=True)
class Template:
    """A chat template, what ends a turn in it, what it puts before an answer, and what it does not take."""

    text: str
    end: str
    before: str = ""
    system: bool = True
    alternates: bool = False
    strips: bool = False
    eos: str = "</s>"
    multi_turn: bool = True


TEMPLATES = {
    "chatml": Template(CHATML, "<|im_end|>", eos="<|im_end|>"),
    "chatml-other-eos": Template(CHATML, "<|im_end|>"),
    "system": Template(SYSTEM, "<|im_end|>"),
    "llama3": Template(LLAMA3, "<|eot_id|>", strips=True),
    "gemma": Template(GEMMA, "<end_of_turn>", system=False, alternates=True, strips=True),
    "mistral": Template(MISTRAL, "</s>", before=" ", system=False, alternates=True),
    "plain": Template(PLAIN, ""),
    "qwen3": Template(QWEN3, "<|im_end|>", multi_turn=False),
}
NEWLINES = (("Ċ", "Ċ"),)  # a line feed, twice


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


CASES: dict[str, Messages] = {
    "one": [user("How much is 6 times 7?"), assistant("It is 42.")],
    "system": [system("Be brief."), user("Who are you?"), assistant("Nobody.")],
    "two": [user("Hello."), assistant("Good day."), user("Colours?"), assistant("Red, and\n\nblue: ünï ☃.")],
    "repeated": [user("Say yes."), assistant("yes"), user("yes"), assistant("yes"), user("Again, yes"), assistant("yes")],
    "empty": [user("Say nothing."), assistant(""), user("And now?"), assistant("Something.")],
    "empty last": [user("Hello."), assistant("Hi."), user("Say nothing."), assistant("")],
    "user last": [user("Hello."), assistant("Hi."), user("Are you there?")],
    "user twice": [user("Hello."), user("Anyone?"), assistant("Yes."), user("Good."), assistant("Indeed.")],
    "assistant twice": [user("Hello."), assistant("Yes?"), assistant("I am here.")],
    "quoting": [user("Assistant: x\n[INST] y [/INST] z"), assistant("User: [/INST] model\nassistant\n")],
    "line feeds": [user("a\n"), assistant("\nb\n"), user("\n\nc"), assistant("\n\n\nd")],
}


def ids_of(tokenizer: Any, messages: Messages, **kwargs: Any) -> list[int]:
    """What the engine would be given: the messages and the generation prompt, by the tokenizer's own means."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs))


def spans(rendered: Rendered) -> list[tuple[int, int]]:
    """Where supervised tokens begin and end."""
    edge = np.diff([0, *rendered.loss_mask, 0])
    return list(zip(np.flatnonzero(edge == 1).tolist(), np.flatnonzero(edge == -1).tolist(), strict=True))


def supervised(tokenizer: Any, rendered: Rendered) -> list[str]:
    return [tokenizer.decode(rendered.token_ids[a:b], clean_up_tokenization_spaces=False) for a, b in spans(rendered)]


def check(tokenizer: Any, messages: Messages, wanted: Callable[[str], str], **kwargs: Any) -> Rendered:
    """Every answer, and nothing else, is supervised, and before each is exactly what the engine would be given."""
    rendered = render(messages, tokenizer, **kwargs)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    supervised_turns = [place for place in turns if wanted(messages[place]["content"])]
    assert supervised(tokenizer, rendered) == [wanted(messages[place]["content"]) for place in supervised_turns]
    assert len(rendered.loss_mask) == len(rendered.token_ids)
    for place, (first, _) in zip(supervised_turns, spans(rendered), strict=True):
        assert rendered.token_ids[:first] == ids_of(tokenizer, messages[:place], **kwargs)
    if supervised_turns[-1] == turns[-1]:
        assert spans(rendered)[-1][1] == len(rendered.token_ids), "nothing after the last answer"
    return rendered


# ------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_answers_and_what_ends_them_are_supervised(name: str, case: str) -> None:
    template = TEMPLATES[name]
    messages = CASES[case]
    tokenizer = byte_tokenizer(template.text, template.eos)
    roles = [message["role"] for message in messages]
    if "system" in roles and not template.system:
        with pytest.raises(ValueError, match="the chat template refuses the messages"):
            render(messages, tokenizer)
        return
    if template.alternates and any(a == b for a, b in itertools.pairwise(roles)):
        with pytest.raises(ValueError, match=r"refuses the messages \(.*Conversation roles must alternate"):
            render(messages, tokenizer)
        return
    if not template.multi_turn and roles.count("assistant") > 1:
        with pytest.raises(UnstableTemplate):
            render(messages, tokenizer, enable_thinking=False)
        return

    def wanted(content: str) -> str:
        return template.before + (content.strip() if template.strips else content) + template.end

    check(tokenizer, messages, wanted, **({} if template.multi_turn else {"enable_thinking": False}))


@pytest.mark.embedded
@pytest.mark.parametrize("case", CASES)
def test_of_the_embedded_model_too(case: str) -> None:
    """Its vocabulary has merges, and its template a system prompt of its own."""
    tokenizer = hub.load_tokenizer(hub.resolve(hub.DEFAULT))
    check(tokenizer, CASES[case], lambda content: content + "<|im_end|>")


def test_a_template_with_a_system_prompt_keeps_the_one_that_is_given() -> None:
    tokenizer = byte_tokenizer(SYSTEM)
    without, with_system = (tokenizer.decode(render(CASES[case], tokenizer).token_ids) for case in ("one", "system"))
    assert without.startswith("<|im_start|>system\nYou are of help.<|im_end|>\n<|im_start|>user\n")
    assert with_system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "system" not in byte_tokenizer(CHATML).decode(render(CASES["one"], byte_tokenizer(CHATML)).token_ids)


def test_a_token_across_the_border_of_prompt_and_answer_is_not_made() -> None:
    """The prompt is what the engine sees: the answer's first line feed cannot join its last one. Where the next prompt has
    the answer in other tokens, those that lie wholly inside are supervised."""
    tokenizer = byte_tokenizer(CHATML, merges=NEWLINES)
    joined = tokenizer.convert_tokens_to_ids("ĊĊ")
    one = [user("a"), assistant("\nb\n\nc")]
    rendered = check(tokenizer, one, lambda content: content + "<|im_end|>")
    assert rendered.token_ids.count(joined) == 1, "inside the answer they do join"
    merged = tokenizer.apply_chat_template(one, tokenize=True, return_dict=False)
    assert merged.count(joined) == 2, "if all is put to tokens at once, they join across the border"
    two = [*one, user("d"), assistant("e")]
    rendered = render(two, tokenizer)
    assert supervised(tokenizer, rendered) == ["b\n\nc<|im_end|>", "e<|im_end|>"]
    assert rendered.num_merged == 1
    assert rendered.token_ids[: spans(rendered)[-1][0]] == ids_of(tokenizer, two[:3])
    harmless = [user("a"), assistant("b\n"), user("\nc"), assistant("d\n\n")]
    check(tokenizer, harmless, lambda content: content + "<|im_end|>")


def test_a_token_across_the_border_of_an_inserted_block_is_not_made_either() -> None:
    """A block that the template puts before the answer stays unsupervised, whatever the answer begins with."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ '<think></think>\n' if m['role'] == 'assistant' }}"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for merges in ((), NEWLINES):
        tokenizer = byte_tokenizer(template, merges=merges)
        for text in ("b", "\nb", "\n\nb\n", ""):
            rendered = render([user("a"), assistant(text)], tokenizer)
            assert supervised(tokenizer, rendered) == [text + "<|im_end|>"], (merges, text)
            prompt = ids_of(tokenizer, [user("a")])
            assert rendered.token_ids[: len(prompt)] == prompt


def test_a_thinking_block_is_supervised_only_if_the_answer_has_it() -> None:
    tokenizer = byte_tokenizer(QWEN3)
    plain = CASES["one"]
    thinking = [user("Six sevens?"), assistant("<think>\nsix, seven\n</think>\n\n42")]
    prompt = ids_of(tokenizer, plain[:1])

    rendered = render(plain, tokenizer)  # the template puts an empty block there by itself
    assert supervised(tokenizer, rendered) == ["It is 42.<|im_end|>"]
    assert rendered.token_ids[: len(prompt)] == prompt
    first = spans(rendered)[0][0]
    assert tokenizer.decode(rendered.token_ids[len(prompt) : first]) == THINK
    same = render(plain, tokenizer, enable_thinking=False)  # the block is part of the prompt
    assert same == rendered
    assert ids_of(tokenizer, plain[:1], enable_thinking=False) == rendered.token_ids[:first]

    check(tokenizer, thinking, lambda content: content + "<|im_end|>")
    with pytest.raises(UnstableTemplate, match="otherwise than its generation prompt"):
        render(thinking, tokenizer, enable_thinking=False)


def test_reasoning_beside_the_content_is_supervised() -> None:
    """The target made it, as it made the answer; the block's opening is part of it, and the prompt is what decoding has."""
    tokenizer = byte_tokenizer(QWEN3)
    thinking = {**assistant("yo"), "reasoning_content": "let me see"}
    for before in ([user("hi")], [system("Be brief."), user("hi")]):
        rendered = render([*before, thinking], tokenizer)
        assert supervised(tokenizer, rendered) == ["<think>\nlet me see\n</think>\n\nyo<|im_end|>"]
        prompt = ids_of(tokenizer, before)
        assert rendered.token_ids[: len(prompt)] == prompt
        assert spans(rendered) == [(len(prompt), len(rendered.token_ids))]
        inside = [*before, assistant("<think>\nlet me see\n</think>\n\nyo")]
        assert rendered == render(inside, tokenizer), "as if it stood in the content"
        empty = [*before, {**assistant("yo"), "reasoning_content": ""}]
        assert render(empty, tokenizer) == render([*before, assistant("yo")], tokenizer), "an empty block is the template's"
    with pytest.raises(UnstableTemplate, match="otherwise than its generation prompt"):
        render([user("hi"), thinking], tokenizer, enable_thinking=False)


def test_reasoning_of_rows_is_supervised(tmp_path: Path) -> None:
    row = {"id": "r", "messages": [user("hi"), {**assistant("yo"), "reasoning_content": "let me see"}]}
    tokenizer = byte_tokenizer(QWEN3)
    loaded = load(write(tmp_path / "a.jsonl", [row]), tokenizer, VOCAB)
    assert not loaded.skipped
    assert texts(tokenizer, loaded) == {"r": "<think>\nlet me see\n</think>\n\nyo<|im_end|>"}


def test_a_template_that_changes_earlier_turns_is_an_error_of_one_line() -> None:
    for kwargs in ({}, {"enable_thinking": False}):
        with pytest.raises(UnstableTemplate, match="once later turns follow; give one sample per turn") as error:
            render(CASES["two"], byte_tokenizer(QWEN3), **kwargs)
        assert isinstance(error.value, ValueError)
        assert len(str(error.value).splitlines()) == 1
    upper = CHATML.replace("{{ message['content'] }}", "{{ message['content'] | upper if loop.last else message['content'] }}")
    with pytest.raises(UnstableTemplate):
        render(CASES["two"], byte_tokenizer(upper))


def test_an_answer_without_a_prompt_is_refused() -> None:
    """A conversation that the assistant begins: with nothing before it, there is nothing that the target would continue."""
    messages = [assistant("Welcome!"), user("Hi."), assistant("Yes?")]
    for template in TEMPLATES.values():
        with pytest.raises(ValueError, match=r"refuses the messages|otherwise"):
            render(messages, byte_tokenizer(template.text))
    check(byte_tokenizer(CHATML), [system("Greet."), *messages], lambda content: content + "<|im_end|>")


def test_without_an_assistant_turn_or_a_template_there_is_nothing_to_render() -> None:
    with pytest.raises(ValueError, match="no assistant turn"):
        render([user("Hello?")], byte_tokenizer(CHATML))
    with pytest.raises(ValueError, match="no chat template; give rows with prompt and response"):
        render(CASES["one"], byte_tokenizer(None))


def test_max_length_cuts_tokens_and_mask_alike() -> None:
    tokenizer = byte_tokenizer(CHATML)
    full = render(CASES["two"], tokenizer)
    for length in (0, 1, 20, len(full.token_ids) - 1, len(full.token_ids), 10**6):
        assert render(CASES["two"], tokenizer, length) == Rendered(full.token_ids[:length], full.loss_mask[:length])


def test_the_messages_are_not_changed_and_may_hold_further_keys() -> None:
    messages = [{**user("a"), "name": "x"}, {**assistant("b"), "weight": 1}]
    before = json.dumps(messages)
    render(messages, byte_tokenizer(CHATML))
    assert json.dumps(messages) == before


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_frame_of_a_user_turn(name: str) -> None:
    """What a target continues when it makes up user turns, and the token that then ends one."""
    template = TEMPLATES[name]
    tokenizer = byte_tokenizer(template.text, template.eos)
    before, closing = user_frame(tokenizer)
    text = tokenizer.apply_chat_template([user("Who?")], tokenize=False)
    end = "" if name in ("mistral", "plain") else template.end
    assert text.startswith(before + "Who?" + end)
    assert tokenizer.decode(closing) == end


# ----------------------------------------------------------------------------------------------- reading


def write(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a text or bytes go in as they are."""
    lines = [row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows]
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts(tokenizer: Any, loaded: data.Loaded) -> dict[str, str]:
    """By id, the supervised text."""
    return {sample.id: tokenizer.decode(sample.token_n[sample.mask_n]) for sample in loaded.samples}


ROWS = [{"id": f"r{i}", "messages": [user(f"Question {i}?"), assistant(f"Answer {i}.")]} for i in range(5)]
ANSWERS = {f"r{i}": f"Answer {i}.<|im_end|>" for i in range(5)}


@pytest.fixture(scope="module")
def chatml() -> Any:
    return byte_tokenizer(CHATML)


def test_conversations_in_every_spelling(chatml: Any, tmp_path: Path) -> None:
    spelled = [
        {"id": "m", "messages": [user("Q"), assistant("A")]},
        {"conversation_id": "c", "conversations": [user("Q"), assistant("A")]},
        {"id": "s", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"id": "t", "conversations": [{"from": "human", "value": "Q"}, {"from": "chatgpt", "value": "A"}]},
        {"id": "g", "messages": [{"role": "user", "content": "Q"}, {"role": "model", "content": "A"}]},
        {"id": "n", "messages": None, "input_ids": None, "conversations": [{**user("Q"), "from": None}, assistant("A")]},
        {"id": "p", "prompt": "Q", "response": "A"},
        {"id": "l", "prompt": [user("Q")], "response": [assistant("A")]},
        {"messages": [user("Q"), assistant("A")]},
    ]
    loaded = load(write(tmp_path / "a.jsonl", spelled), chatml, VOCAB)
    assert not loaded.skipped
    assert loaded.skipped_note == ""
    assert texts(chatml, loaded) == dict.fromkeys(["m", "c", "s", "t", "g", "n", "p", "l", "line 9"], "A<|im_end|>")
    assert len({tuple(sample.token_n) for sample in loaded.samples}) == 1
    assert all(sample.token_n.dtype == np.int64 and sample.mask_n.dtype == bool for sample in loaded.samples)


def test_a_system_turn_in_sharegpt(chatml: Any, tmp_path: Path) -> None:
    row = {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}
    (sample,) = load(write(tmp_path / "a.jsonl", [row]), chatml, VOCAB).samples
    want = render([system("S"), user("Q"), assistant("A")], chatml)
    assert (sample.token_n.tolist(), sample.mask_n.astype(int).tolist()) == (want.token_ids, want.loss_mask)


def test_prompt_and_response_without_a_chat_template(tmp_path: Path) -> None:
    """As they are, with the token that ends a text."""
    tokenizer = byte_tokenizer(None)
    file = write(tmp_path / "a.jsonl", [{"prompt": "Once ", "response": "upon"}, ROWS[0]])
    loaded = load(file, tokenizer, VOCAB)
    (sample,) = loaded.samples
    assert tokenizer.decode(sample.token_n) == "Once upon</s>"
    assert sample.mask_n.tolist() == [False] * 5 + [True] * 5
    assert "no chat template" in loaded.skipped_note
    assert load(file, tokenizer, VOCAB, max_length=7).samples[0].token_n.tolist() == sample.token_n[:7].tolist()


def test_pretokenised_rows(chatml: Any, tmp_path: Path) -> None:
    ids = [5, 6, 7, 319]
    mask = [0, 0, 1, 1]
    good = [{"input_ids": ids, "loss_mask": mask}, {"input_ids": ids, "loss_mask": [False, False, True, True]}]
    bad_ids = [[5, 6, 7, 320], [-1, 6, 7, 8], [5.0, 6, 7, 8], ["5", 6, 7, 8], [True, 6, 7, 8], [None, 6, 7, 8], "5678", {}, 5]
    bad_masks = [[0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 2, 1], [0, 0, None, 1], [0, 0, "1", 1], "0011", 1]
    rows = [*good, *({"input_ids": bad, "loss_mask": mask} for bad in bad_ids)]
    rows += [{"input_ids": ids, "loss_mask": bad} for bad in bad_masks] + [{"input_ids": ids}]
    rows += [{"input_ids": ids, "loss_mask": [0, 0, 0, 0]}, {"input_ids": [], "loss_mask": []}]
    rows += [{"input_ids": ids, "loss_mask": [1, 1, 0, 0]}]  # nothing drafts the second token: there is no row before it
    loaded = load(write(tmp_path / "a.jsonl", rows), chatml, VOCAB)
    assert [sample.token_n.tolist() for sample in loaded.samples] == [ids, ids]
    assert [sample.mask_n.tolist() for sample in loaded.samples] == [[False, False, True, True]] * 2
    assert dict(loaded.skipped) == {
        "input_ids are not token ids of the target (0..319)": len(bad_ids),
        "loss_mask is not a list of 0 and 1, as long as input_ids": len(bad_masks) + 1,
        "nothing supervised": 3,
    }


def test_tokens_that_the_target_does_not_have_are_refused(chatml: Any, tmp_path: Path) -> None:
    """A tokenizer may hold more tokens than the model has rows for."""
    outside = {"id": "x", "messages": [user("<|im_end|>"), assistant("b")]}
    rows = [outside, {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}]
    loaded = load(write(tmp_path / "a.jsonl", rows), chatml, 256)
    assert [sample.id for sample in loaded.samples] == ["line 2"]
    assert "not token ids of the target (0..255)" in loaded.skipped_note


MALFORMED: dict[str, tuple[Any, str]] = {
    "not json": ("{", "not a JSON object"),
    "not utf-8": (b'{"messages": "\xff"}', "not a JSON object"),
    "deep": ("[" * 100_000, "not a JSON object"),
    "a list": ([1, 2], "not a JSON object"),
    "a number": ("7", "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "no keys": (
        {"words": "hello"},
        "no messages, conversations, prompt and response, instruction and output, input_ids and loss_mask, or text",
    ),
    "no response": (
        {"prompt": "hello"},
        "no messages, conversations, prompt and response, instruction and output, input_ids and loss_mask, or text",
    ),
    "a text": ({"messages": "hello"}, "messages are not a list of objects"),
    "texts": ({"messages": ["hello"]}, "messages are not a list of objects"),
    "no content": ({"messages": [user("a"), {"role": "assistant"}]}, "a message without role and text content"),
    "no role": ({"messages": [user("a"), {"content": "b"}]}, "a message without role and text content"),
    "role of a kind": ({"messages": [{"role": 1, "content": "b"}]}, "a message without role and text content"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a content part of type 'text'"),
    "half a pair": ({"messages": [user("a"), assistant("\ud800")]}, "surrogate"),
    "half a pair in text": ({"text": "\ud800 and more"}, "surrogate"),
    "half a pair in an id": ({"id": "\ud800", "messages": [user("a"), assistant("b")]}, "surrogate"),
    "empty": ({"messages": []}, "no assistant turn"),
    "user only": ({"messages": [user("a")]}, "no assistant turn"),
    "prompt half": ({"prompt": 3, "response": "x"}, "a message without role and text content"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_row_is_skipped_counted_and_listed(chatml: Any, tmp_path: Path, kind: str) -> None:
    bad, reason = MALFORMED[kind]
    loaded = load(write(tmp_path / "a.jsonl", [ROWS[0], bad, "", ROWS[1], bad]), chatml, VOCAB)
    assert texts(chatml, loaded) == {key: ANSWERS[key] for key in ("r0", "r1")}
    ((why, count),) = loaded.skipped.items()
    assert reason in why
    assert count == 2
    assert loaded.skipped_at == {why: ["line 2", "line 5"]}
    assert loaded.skipped_note == f"2 {why} (first: line 2)"
    with pytest.raises(ValueError, match="no row can be trained on") as error:
        load(write(tmp_path / "b.jsonl", [bad]), chatml, VOCAB)
    assert why in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_rows_that_the_template_refuses_are_counted_with_its_reason(tmp_path: Path) -> None:
    rows = [{"messages": CASES["system"]}, {"messages": CASES["one"]}, {"messages": CASES["user twice"]}]
    loaded = load(write(tmp_path / "a.jsonl", rows), byte_tokenizer(GEMMA), VOCAB)
    assert [sample.id for sample in loaded.samples] == ["line 2"]
    assert loaded.skipped.total() == 2
    assert "System role not supported" in loaded.skipped_note
    assert "roles must alternate" in loaded.skipped_note


@pytest.mark.parametrize("rows", [[], [{"messages": [user("a")]}], [{"header": {"target": "x"}}]])
def test_a_file_with_nothing_to_train_on_is_an_error_of_one_line(chatml: Any, tmp_path: Path, rows: list[Any]) -> None:
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match="no row can be trained on") as error:
        load(file, chatml, VOCAB)
    assert len(str(error.value).splitlines()) == 1
    assert str(file) in str(error.value)


def test_a_user_turn_longer_than_max_length_drops_the_row(chatml: Any, tmp_path: Path) -> None:
    long = {"id": "long", "messages": [user("x" * 200), assistant("b")]}
    loaded = load(write(tmp_path / "a.jsonl", [long, *ROWS, long]), chatml, VOCAB, max_length=100)
    assert texts(chatml, loaded) == ANSWERS
    assert dict(loaded.skipped) == {"nothing supervised within max_length=100": 2}
    length = len(render(ROWS[0]["messages"], chatml).token_ids)
    assert {len(s.token_n) for s in load(tmp_path / "a.jsonl", chatml, VOCAB, length - 3).samples} == {length - 3}
    with pytest.raises(ValueError, match="max_length=2: at least 3"):
        load(tmp_path / "a.jsonl", chatml, VOCAB, max_length=2)


def test_a_conversation_whose_template_is_unstable_becomes_a_sample_per_answer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(QWEN3)
    file = write(tmp_path / "a.jsonl", [{"id": "c", "messages": CASES["two"]}, {"id": "d", "messages": CASES["one"]}])
    loaded = load(file, tokenizer, VOCAB, enable_thinking=False)
    assert texts(tokenizer, loaded) == {
        "c/1": "Good day.<|im_end|>",
        "c/2": "Red, and\n\nblue: ünï ☃.<|im_end|>",
        "d": "It is 42.<|im_end|>",
    }
    for sample, before in zip(loaded.samples, (CASES["two"][:1], CASES["two"][:3], CASES["one"][:1]), strict=True):
        prompt = ids_of(tokenizer, before, enable_thinking=False)
        assert sample.token_n[: len(prompt)].tolist() == prompt
        assert sample.mask_n.tolist() == [i >= len(prompt) for i in range(len(sample.token_n))]
    cut = load(file, tokenizer, VOCAB, max_length=70, enable_thinking=False)
    assert [sample.id for sample in cut.samples] == ["c/1", "d"], "a long one is cut for itself"
    assert load(file, tokenizer, VOCAB, limit=2, enable_thinking=False).samples[-1].id == "d", "limit counts rows"


def test_limit_counts_rows_good_or_bad_and_no_header(chatml: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"header": {"target": "t"}}, ROWS[0], "{", *ROWS[1:]])
    loaded = load(file, chatml, VOCAB, limit=3)
    assert [sample.id for sample in loaded.samples] == ["r0", "r1"]
    assert loaded.skipped.total() == 1
    assert loaded.header == {"target": "t"}
    assert len(load(file, chatml, VOCAB, limit=100).samples) == 5
    with pytest.raises(ValueError, match="limit=0: at least 1 row"):
        load(file, chatml, VOCAB, limit=0)


@pytest.mark.parametrize("ids", [["a", "a", "a"], ["a", "a#2", "a"], ["a", "a", "a#2"], ["line 3", "b", None], [1, "1", 1]])
def test_every_sample_has_an_id_of_its_own(chatml: Any, tmp_path: Path, ids: list[Any]) -> None:
    rows = [{**row, "id": name} for row, name in zip(ROWS, ids, strict=False)]
    names = [sample.id for sample in load(write(tmp_path / "a.jsonl", rows), chatml, VOCAB).samples]
    assert len(set(names)) == 3
    assert names[0] == str(ids[0])


def test_ids_of_turns_are_their_own_too(tmp_path: Path) -> None:
    rows = [{"id": "c/1", "messages": CASES["one"]}, {"id": "c", "messages": CASES["two"]}, {"id": "c", **ROWS[1]}]
    rows[2]["id"] = "c/2"
    loaded = load(write(tmp_path / "a.jsonl", rows), byte_tokenizer(QWEN3), VOCAB)
    assert len({sample.id for sample in loaded.samples}) == len(loaded.samples) == 4


def test_compressed_and_other_sources_hold_the_same(chatml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON lines, with gzip, a table saved to disk, one of several splits, and a directory that holds JSON lines."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    plain = load(write(tmp_path / "a.jsonl", ROWS), chatml, VOCAB)
    assert texts(chatml, plain) == ANSWERS
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "table"))
    datasets.DatasetDict({"train": table.select([0]), "test": table}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", ROWS)
    sources = {write(tmp_path / "b.jsonl.gz", ROWS): "train", tmp_path / "table": "train", tmp_path / "splits": "test"}
    for source, split in {**sources, tmp_path / "folder": "train"}.items():
        loaded = load(source, chatml, VOCAB, split=split)
        assert fingerprint(loaded.samples) == fingerprint(plain.samples), source
        assert [sample.id for sample in loaded.samples] == [sample.id for sample in plain.samples]
    with pytest.raises(ValueError, match="cannot be read as a dataset"):
        load(tmp_path / "splits", chatml, VOCAB, split="validation")


def test_columns_that_a_row_of_a_table_lacks_are_not_there(chatml: Any, tmp_path: Path) -> None:
    """A table has every column in every row, and every key in every message: what was not given is null."""
    rows = [
        {"id": "a", "conversations": [{"from": "human", "value": "Q"}, {"role": "assistant", "content": "A"}]},
        {"id": "b", "prompt": "Q", "response": "A"},
        {"id": "d", "prompt": "Q", "response": None},
        {"id": "c", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
    ]
    columns = {
        key: [row.get(key) for row in rows] for key in ("id", "conversations", "prompt", "response", "input_ids", "loss_mask")
    }
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "table"))
    loaded = load(tmp_path / "table", chatml, VOCAB)
    assert [sample.id for sample in loaded.samples] == ["a", "b", "c"], loaded.skipped_note


def test_a_hub_id_is_left_to_datasets(chatml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def from_hub(name: str, config: str | None, split: str, revision: str | None) -> Iterator[Any]:
        calls.append((name, config, split, revision))
        if name == "org/gone":
            raise ConnectionError("no route\nto host")
        return iter(ROWS)

    monkeypatch.setattr("datasets.load_dataset", from_hub)
    assert texts(chatml, load("org/set", chatml, VOCAB, split="test")) == ANSWERS
    assert calls == [("org/set", None, "test", None)]
    with pytest.raises(ValueError, match=r"data.path=org/gone: org/gone cannot be loaded \(.*no route\); give data.path="):
        load("org/gone", chatml, VOCAB)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.jsonl.gz", "a/gone.json", "gone", "/gone/gone"])
def test_a_missing_file_is_said(chatml: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"data.path={name}: no such file"):
        load(name, chatml, VOCAB)


def test_a_compressed_file_that_is_cut_short_is_said(chatml: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl.gz", ROWS)
    content = file.read_bytes()
    for part in (content[: len(content) // 2], content[:-4], b"not gzip", content[:20] + b"\xff\xff\xff" + content[23:]):
        file.write_bytes(part)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz") as error:
            load(file, chatml, VOCAB)
        assert len(str(error.value).splitlines()) == 1


def test_line_ends_and_marks_of_other_systems(chatml: Any, tmp_path: Path) -> None:
    """CR LF, a byte order mark, no line end at the last line; and U+2028 inside of a text is no line end."""
    odd = [{**ROWS[0], "messages": [user("a\u2028b"), assistant("Answer 0.")]}, *ROWS[1:]]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in odd)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    loaded = load(tmp_path / "a.jsonl", chatml, VOCAB)
    assert texts(chatml, loaded) == ANSWERS
    assert not loaded.skipped


# -------------------------------------------------------------------------------------------- tool calls

ROLE = "<|im_start|>{{ m.role }}\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS_FIRST = "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
INSTEAD = (  # the call in place of the content, one at most
    TOOLS_FIRST + "{% for m in messages %}" + ROLE + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>'
    "{% endfor %}" + ASK
)
AFTER = (  # calls behind the content, between tokens of their own
    TOOLS_FIRST + "{% for m in messages %}" + ROLE + "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool>{% endfor %}<|im_end|>\n"
    "{% endfor %}" + ASK
)
CHANNELS = (  # a call and a last answer end otherwise, and an answer in the history otherwise again
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant{% if m.tool_calls %} to=functions."
    "{{ m.tool_calls[0].function.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OPENER = (  # what ends a turn is what opens the next one
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool>{{ call.function.name }}{% for key in call.function.arguments %}"
    "{{ key }}={{ call.function.arguments[key] }};{% endfor %}</tool>{% endfor %}{% elif m.role == 'tool' %}<|observation|>\n"
    "{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT_ARGUMENTS = (  # calls only where there is no content, and their arguments as text
    "{% for m in messages %}{% if m.role == 'assistant' and not m.content %}<|assistant|>{% for call in m.tool_calls %}"
    "{{ '<tool>' + call.function.name + '\n' + call.function.arguments + '</tool>' }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content + eos_token }}{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PYTHON_ARGUMENTS = AFTER.replace(
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
    "{{ call.function.name }} {{ call.function.arguments }}",
)
PLAIN_CALLS = (  # no token ends a turn
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}"
    "({{ call.function.arguments | tojson }})]{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MORE = (
    "<tool>", "</tool>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|end|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|system|>", "<|tool|>", "<think>", "</think>",
)  # fmt: skip
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 3}}}
ARGUMENTS = '{"city": "Köln", "days": 3}'
TOOL = {"role": "tool", "content": "22 degrees"}
SCHEMA = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
WITH_CALLS: dict[str, tuple[str, tuple[str, ...], str, str, str]] = {
    # template, eos tokens, what is supervised of a call, of text and a call, and of an answer to what the call gave
    "instead": (INSTEAD, ("<|im_end|>",), '{"name": "weather", "parameters": %s}<|im_end|>', "", "Warm.<|im_end|>"),
    "after": (
        AFTER, ("<|im_end|>",), '<tool>\n{"name": "weather", "arguments": %s}\n</tool><|im_end|>',
        'Let me see.<tool>\n{"name": "weather", "arguments": %s}\n</tool><|im_end|>', "Warm.<|im_end|>",
    ),
    "other eos": (
        AFTER, ("</s>",), '<tool>\n{"name": "weather", "arguments": %s}\n</tool><|im_end|>',
        'Let me see.<tool>\n{"name": "weather", "arguments": %s}\n</tool><|im_end|>', "Warm.<|im_end|>",
    ),
    "channels": (
        CHANNELS, ("<|return|>", "<|call|>"), " to=functions.weather<|message|>%s<|call|>", "", "Warm.<|return|>",
    ),
    "opener": (
        OPENER, ("<|user|>", "<|observation|>"), "<tool>weathercity=Köln;days=3;</tool><|observation|>",
        "Let me see.<tool>weathercity=Köln;days=3;</tool><|observation|>", "Warm.<|user|>",
    ),
    "opener not of eos": (
        OPENER, ("</s>",), "<tool>weathercity=Köln;days=3;</tool>",
        "Let me see.<tool>weathercity=Köln;days=3;</tool>", "Warm.",
    ),
    "text": (TEXT_ARGUMENTS, ("</s>",), "<tool>weather\n%s</tool></s>", "", "Warm.</s>"),
    "python": (
        PYTHON_ARGUMENTS, ("<|im_end|>",), "<tool>\nweather %s\n</tool><|im_end|>",
        "Let me see.<tool>\nweather %s\n</tool><|im_end|>", "Warm.<|im_end|>",
    ),
    "plain": (PLAIN_CALLS, ("</s>",), "[weather(%s)]", "Let me see.[weather(%s)]", "Warm."),
}  # fmt: skip


def calling(content: str | None, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls or [CALL])}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_tool_call_and_what_ends_it_are_supervised(name: str) -> None:
    """Whatever the template does with a call: what the target would generate from the generation prompt is supervised."""
    template, eos, call, text_and_call, answer = WITH_CALLS[name]
    tokenizer = byte_tokenizer(template, more=MORE)
    ids = tokenizer.convert_tokens_to_ids(list(eos))
    call, text_and_call = (wanted.replace("%s", ARGUMENTS) for wanted in (call, text_and_call))
    before = [user("Warm in Köln?")]
    as_text = {**CALL, "function": {**CALL["function"], "arguments": ARGUMENTS}}
    absent = {key: value for key, value in calling(None).items() if key != "content"}
    flat = calling(None, CALL["function"])
    for message in (calling(None), calling(""), absent, calling(None, as_text), flat):
        rendered = render([*before, message], tokenizer, eos_token_ids=ids)
        assert supervised(tokenizer, rendered) == [call], message
        prompt = ids_of(tokenizer, before)
        assert rendered.token_ids[: len(prompt)] == prompt
        assert spans(rendered)[-1][1] == len(rendered.token_ids)
    if text_and_call:
        rendered = render([*before, calling("Let me see.")], tokenizer, eos_token_ids=ids)
        assert supervised(tokenizer, rendered) == [text_and_call]
    messages = [*before, calling(None), TOOL, assistant("Warm.")]
    rendered = render(messages, tokenizer, eos_token_ids=ids)
    assert supervised(tokenizer, rendered) == [call, answer]
    assert render([*messages, user("Thanks.")], tokenizer, eos_token_ids=ids) == rendered


def test_what_opens_the_next_message_is_the_end_of_a_turn_only_if_the_target_ends_with_it() -> None:
    """It is where the next turn begins, and behind the last one, too."""
    tokenizer = byte_tokenizer(OPENER, more=MORE)
    end, other = tokenizer.convert_tokens_to_ids(["<|user|>", "</s>"])
    two = [user("Hi?"), assistant("Good day."), user("Again?"), assistant("Yes.")]
    rendered = render(two, tokenizer, eos_token_ids=[end])
    assert supervised(tokenizer, rendered) == ["Good day.<|user|>", "Yes.<|user|>"]
    assert rendered.token_ids.count(end) == 3
    rendered = render(two, tokenizer, eos_token_ids=[other])
    assert supervised(tokenizer, rendered) == ["Good day.", "Yes."]
    assert supervised(tokenizer, render(two, tokenizer)) == ["Good day.", "Yes."], "the tokenizer's own is another"
    assert rendered.token_ids.count(end) == 2
    plain = render(CASES["one"], byte_tokenizer(PLAIN), eos_token_ids=[256])
    assert plain == render(CASES["one"], byte_tokenizer(PLAIN)), "no token opens its turns"


def test_the_ends_of_the_target_are_those_of_its_generation_config(tmp_path: Path) -> None:
    """And not only the tokenizer's eos token."""
    tokenizer = byte_tokenizer(OPENER, more=MORE)
    path = write(tmp_path / "a.jsonl", [{"id": "a", "messages": [user("Hi?"), assistant("Good day.")]}])
    config = {"path": str(path), "max_length": None, "limit": None, "split": "train", "template_kwargs": None}
    for eos, wanted in ((["<|user|>", "<|observation|>"], "Good day.<|user|>"), (["</s>"], "Good day.")):
        ids = tokenizer.convert_tokens_to_ids(eos)
        target: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=VOCAB, max_model_len=100, eos_token_ids=ids)
        assert texts(tokenizer, data.load_for(target, **config | {"supervise": "generated"})) == {"a": wanted}


def test_a_turn_ends_with_the_first_of_the_targets_ends() -> None:
    """Some templates close a content with other special tokens first, or say something between."""
    template = CHATML.replace("<|im_end|>\n", "{{ '<|end|>' if message['role'] == 'assistant' }}<|im_end|>\n")
    tokenizer = byte_tokenizer(template, "<|im_end|>", more=MORE)
    assert supervised(tokenizer, render(CASES["one"], tokenizer)) == ["It is 42.<|end|><|im_end|>"]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert supervised(tokenizer, render(CASES["one"], tokenizer, eos_token_ids=[end])) == ["It is 42.<|end|>"]
    apart = byte_tokenizer(template.replace("'<|end|>'", "'<|end|>that was all'"), "<|im_end|>", more=MORE)
    final = apart.convert_tokens_to_ids("<|im_end|>")
    assert supervised(apart, render(CASES["one"], apart)) == ["It is 42.<|end|>"], "the tokenizer's may be one of several"
    known = render(CASES["one"], apart, eos_token_ids=[final])
    assert supervised(apart, known) == ["It is 42.<|end|>that was all<|im_end|>"]


NOT_SHOWN = {
    "no call": (CHATML.replace("message['content']", "message['content'] or ''"), [calling(None)]),
    "content only": (CHATML, [calling("Let me see.")]),
    "no arguments": (AFTER.replace("'arguments': call.function.arguments", "'arguments': {}"), [calling(None)]),
    "no name": (AFTER.replace("'name': call.function.name,", ""), [calling(None)]),
    "one of two": (AFTER.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"), [calling(None, CALL, CALL)]),
    "in the history": (CHATML, [calling("Let me see."), TOOL, assistant("Warm.")]),
}


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_a_row_whose_call_leaves_no_trace_is_skipped_and_counted(name: str, tmp_path: Path) -> None:
    """It would teach to stop at once, or a conversation that makes no sense."""
    template, turns = NOT_SHOWN[name]
    tokenizer = byte_tokenizer(template, more=MORE)
    row = {"messages": [user("Warm in Köln?"), *turns]}
    loaded = load(write(tmp_path / "a.jsonl", [row, ROWS[0], row]), tokenizer, VOCAB)
    assert [sample.id for sample in loaded.samples] == ["r0"]
    assert dict(loaded.skipped) == {"a tool call that the chat template does not show": 2}
    with pytest.raises(ValueError, match="a tool call that the chat template does not show"):
        render(row["messages"], tokenizer)


def test_a_call_that_cannot_be_told_from_its_surroundings_is_no_answer() -> None:
    """Another turn behind it, one that ends in the middle, and one that the template refuses."""
    before = [user("Warm?")]
    last = AFTER.replace("{% endfor %}" + ASK, "{% endfor %}<|im_start|>system\nCall the tools.<|im_end|>\n" + ASK)
    without_end = last.replace("</tool>{% endfor %}<|im_end|>\n", "</tool>{% endfor %}\n")
    with pytest.raises(UnstableTemplate, match="puts another turn before the end of one"):
        render([*before, calling(None)], byte_tokenizer(without_end, "<|im_end|>", more=MORE))
    parted = AFTER.replace("<tool>", "<|im_end|>\n<|im_start|>call\n<tool>")
    with pytest.raises(ValueError, match="ends before its end"):
        render([*before, calling("Let me see.")], byte_tokenizer(parted, "<|im_end|>", more=MORE))
    with pytest.raises(ValueError, match=r"refuses the messages \(.*one call at once"):
        render([*before, calling(None, CALL, CALL)], byte_tokenizer(INSTEAD))
    nothing = CHATML.replace("{{ message['content'] }}", "{{ message['content'] if message['role'] != 'assistant' }}")
    with pytest.raises(ValueError, match="'assistant' that the chat template does not show"):
        render(CASES["one"], byte_tokenizer(nothing))


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "parameters": {"a": 1}},
        {"function": {"name": "weather", "args": {"a": 1}}},
        {"name": "weather", "input": '{"a": 1}'},
        {"type": "function", "id": "abc", "name": "weather", "arguments": '{"a": 1}'},
    ],
)
def test_arguments_under_every_name_are_shown(call: dict[str, Any]) -> None:
    shown = '<tool>\n{"name": "weather", "arguments": {"a": 1}}\n</tool><|im_end|>'
    tokenizer = byte_tokenizer(AFTER, more=MORE)
    assert supervised(tokenizer, render([user("q"), calling(None, call)], tokenizer)) == [shown]
    template = AFTER.replace(
        "{'name': call.function.name, 'arguments': call.function.arguments} | tojson", "call.function | tojson"
    )
    (text,) = supervised(tokenizer, render([user("q"), calling(None, call)], byte_tokenizer(template, more=MORE)))
    function = json.loads(text.removeprefix("<tool>\n").removesuffix("\n</tool><|im_end|>"))
    assert {**function, "arguments": {"a": 1}} == {"name": "weather", "arguments": {"a": 1}}


def test_a_call_without_arguments_has_an_empty_object() -> None:
    tokenizer = byte_tokenizer(AFTER, more=MORE)
    for arguments in ("", " ", None, {}):
        rendered = render([user("q"), calling(None, {"name": "weather", "arguments": arguments})], tokenizer)
        assert supervised(tokenizer, rendered) == ['<tool>\n{"name": "weather", "arguments": {}}\n</tool><|im_end|>']


def test_fields_of_a_call_that_the_template_does_not_show_are_named(tmp_path: Path) -> None:
    call = {"id": "x", "index": 0, "function": {"name": "weather", "arguments": {"a": 1}, "comment": "now"}}
    rows = [{"messages": [user("q"), calling(None, call)]}]
    loaded = load(write(tmp_path / "a.jsonl", rows), byte_tokenizer(AFTER, more=MORE), VOCAB)
    assert dict(loaded.unused) == {"messages.tool_calls.index": 1, "messages.tool_calls.function.comment": 1}


def test_an_answer_that_goes_on_after_its_end_is_left_out(chatml: Any) -> None:
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(ValueError, match="an answer that goes on after a token that ends a generation"):
        render([user("q"), assistant("a<|im_end|>b")], chatml, eos_token_ids=[end])


def test_flat_tools_lose_their_type() -> None:
    flat = {"type": "function", "name": "weather", "parameters": {}}
    assert parse_tools([flat]) == [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_arguments_of_the_template_must_be_its_own(chatml: Any) -> None:
    thinking = byte_tokenizer(CHATML + "{% if enable_thinking %}<think>{% endif %}")
    kwargs = {"enable_thinking": False, "enable_thinkin": False}
    assert unread_template_kwargs(thinking, kwargs, "data.template_kwargs") == ["data.template_kwargs.enable_thinkin"]
    for name in ("tools", "tokenize", "messages", *inspect.signature(load).parameters):
        with pytest.raises(ValueError, match=f"'{name}'"):
            unread_template_kwargs(chatml, {name: 1}, "data.template_kwargs")


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "cut short": (
        calling(None, {"name": "f", "arguments": '{"a": 1'}),
        "a tool call whose arguments are neither an object nor",
    ),
    "a list": (calling(None, {"name": "f", "arguments": "[1, 2]"}), "a tool call whose arguments are neither an object nor"),
    "only a lost field": (
        {**assistant(""), "tool_call": {"a": 1}},
        "an assistant turn whose only content, tool_call, the chat",
    ),
    "no list": ({**calling(None), "tool_calls": {"a": 1}}, "tool_calls are not a list"),
    "text": (calling(None, "weather"), "a tool call without the name of a function"),
    "no name": (calling(None, {"function": {"arguments": {}}}), "a tool call without the name of a function"),
    "number": (calling(None, {"name": "f", "arguments": 3}), "a tool call whose arguments are neither an object nor JSON text"),
    "of a user": ({**calling("x"), "role": "user"}, "a message of role 'user' with tool calls, which only an assistant makes"),
    "half a pair": (calling(None, {"name": "f", "arguments": {"a": "\ud800"}}), "half of a surrogate pair, which is no text"),
    "neither": ({"role": "assistant", "content": None}, "a message without role and text content"),
    "empty": ({**calling(None), "tool_calls": []}, "a message without role and text content"),
    "not JSON": ({"from": "function_call", "value": "weather()"}, "a message of role 'function_call' that is not JSON"),
    "weight": ({**assistant("a"), "weight": 0.5}, "a message of weight 0.5; 0 and 1 are known"),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_a_malformed_call_is_skipped_and_counted(kind: str, tmp_path: Path) -> None:
    message, reason = BAD_CALLS[kind]
    tokenizer = byte_tokenizer(AFTER, more=MORE)
    loaded = load(write(tmp_path / "a.jsonl", [ROWS[0], {"messages": [user("a"), message]}]), tokenizer, VOCAB)
    assert [sample.id for sample in loaded.samples] == ["r0"]
    assert list(loaded.skipped.values()) == [1]
    assert loaded.skipped_note.startswith(f"1 {reason}")


# ----------------------------------------------------------------------- fields, roles, messages that are lost


def test_the_tools_of_a_row_reach_the_template(tmp_path: Path) -> None:
    """As a list, as JSON text, without the wrapping, and under the name that they had before."""
    tokenizer = byte_tokenizer(AFTER, more=MORE)
    messages = [user("Warm?"), calling(None)]
    spelled = {
        "list": {"tools": [SCHEMA]},
        "text": {"tools": json.dumps([SCHEMA])},
        "flat": {"tools": [SCHEMA["function"]]},
        "flat text": {"tools": json.dumps([SCHEMA["function"]])},
        "one": {"tools": SCHEMA},
        "functions": {"functions": [SCHEMA["function"]]},
    }
    rows = [{"id": name, "messages": messages, **fields} for name, fields in spelled.items()]
    loaded = load(write(tmp_path / "a.jsonl", rows), tokenizer, VOCAB)
    assert not loaded.skipped
    assert not loaded.unused
    prompt = ids_of(tokenizer, messages[:1], tools=[SCHEMA])
    assert '"properties"' in tokenizer.decode(prompt)
    for sample in loaded.samples:
        assert sample.token_n[: len(prompt)].tolist() == prompt, sample.id
        assert sample.token_n.tolist() == loaded.samples[0].token_n.tolist()
    assert render(messages, tokenizer, tools=json.dumps([SCHEMA])).token_ids == loaded.samples[0].token_n.tolist()
    none = [{"messages": messages, "tools": value} for value in (None, [], "", "[]")]
    loaded = load(write(tmp_path / "b.jsonl", none), tokenizer, VOCAB)
    assert {tuple(sample.token_n) for sample in loaded.samples} == {tuple(render(messages, tokenizer).token_ids)}
    bad = [{"messages": messages, "tools": value} for value in ("weather", "[1]", [1], 3)]
    loaded = load(write(tmp_path / "c.jsonl", [*none, *bad]), tokenizer, VOCAB)
    assert dict(loaded.skipped) == {"tools are not JSON": 1, "tools are not a list of objects": 3}


def test_null_in_a_table_was_not_given_and_in_json_lines_it_was(tmp_path: Path) -> None:
    """A table has every key of every call and schema in each."""
    tokenizer = byte_tokenizer(AFTER, more=MORE)
    rows = [
        {"id": name, "messages": [user("a"), calling(None, {"name": "f", "arguments": arguments})]}
        for name, arguments in (("x", {"x": "1", "y": None}), ("y", {"x": None, "y": "2"}))
    ]
    plain = texts(tokenizer, load(write(tmp_path / "a.jsonl", rows), tokenizer, VOCAB))
    assert '"arguments": {"x": "1", "y": null}}' in plain["x"]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "table"))
    table = texts(tokenizer, load(tmp_path / "table", tokenizer, VOCAB))
    assert '"arguments": {"x": "1"}}' in table["x"]
    assert '"arguments": {"y": "2"}}' in table["y"]


def test_a_system_column_is_a_message_in_front(chatml: Any, tmp_path: Path) -> None:
    rows = [
        {"id": "column", "system": "Be brief.", "messages": CASES["one"]},
        {"id": "both", "system": "Be brief.", "messages": [system("Be brief."), *CASES["one"]]},
        {"id": "prompt", "system": "Be brief.", "prompt": CASES["one"][0]["content"], "response": CASES["one"][1]["content"]},
        {"id": "empty", "system": "", "messages": [system("Be brief."), *CASES["one"]]},
        {"id": "other", "system": "Be long.", "messages": [system("Be brief."), *CASES["one"]]},
    ]
    loaded = load(write(tmp_path / "a.jsonl", rows), chatml, VOCAB)
    wanted = render([system("Be brief."), *CASES["one"]], chatml).token_ids
    assert {sample.id: sample.token_n.tolist() for sample in loaded.samples} == dict.fromkeys(
        ["column", "both", "prompt", "empty"], wanted
    )
    assert dict(loaded.skipped) == {"a system column beside another system message": 1}
    assert not loaded.unused
    bare = byte_tokenizer(None)
    row = {"system": "Be brief.", "prompt": "Hello?", "response": "Hi."}
    (sample,) = load(write(tmp_path / "b.jsonl", [row]), bare, VOCAB).samples
    assert bare.decode(sample.token_n) == "Be brief.\n\nHello?Hi.</s>", "as evaluation puts it"


def test_roles_of_tools_in_every_spelling(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(AFTER, more=MORE)
    call = {"name": "weather", "arguments": CALL["function"]["arguments"]}
    two = [{"name": "weather", "arguments": {"city": "Bonn"}}, call]
    rows = [
        {"id": "a", "messages": [user("Warm?"), calling(None), TOOL, assistant("Yes.")]},
        {"id": "b", "conversations": [
            {"from": "human", "value": "Warm?"}, {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "22 degrees"}, {"from": "gpt", "value": "Yes."},
        ]},
        {"id": "c", "messages": [
            user("Warm?"), {"role": "assistant", "content": None, "function_call": {**call, "arguments": ARGUMENTS}},
            {"role": "function_response", "content": "22 degrees"}, assistant("Yes."),
        ]},
        {"id": "d", "messages": [user("Warm?"), calling(None, *two)]},
        {"id": "e", "conversations": [
            {"from": "human", "value": "Warm?"}, {"from": "function_call", "value": json.dumps(two)}
        ]},
    ]  # fmt: skip
    loaded = load(write(tmp_path / "a.jsonl", rows), tokenizer, VOCAB)
    assert not loaded.skipped
    by_id = {sample.id: (sample.token_n.tolist(), sample.mask_n.tolist()) for sample in loaded.samples}
    assert by_id["a"] == by_id["b"] == by_id["c"]
    assert by_id["d"] == by_id["e"]
    assert "<|im_start|>tool\n22 degrees" in tokenizer.decode(by_id["a"][0])


def test_a_turn_of_weight_nought_is_history(chatml: Any, tmp_path: Path) -> None:
    one = {**assistant("Good day."), "weight": 0}
    two = {**assistant("Yes."), "weight": 1}
    rows = [
        {"id": "first", "messages": [user("Hi?"), one, user("Again?"), two]},
        {"id": "last", "messages": [user("Hi?"), two, user("Again?"), one]},
        {"id": "none", "messages": [user("Hi?"), one]},
        {"id": "false", "messages": [user("Hi?"), {**two, "weight": True}, user("Again?"), {**two, "weight": False}]},
    ]
    loaded = load(write(tmp_path / "a.jsonl", rows), chatml, VOCAB)
    assert texts(chatml, loaded) == dict.fromkeys(["first", "last", "false"], "Yes.<|im_end|>")
    assert "Good day.<|im_end|>" in chatml.decode(loaded.samples[0].token_n), "it stays in the conversation"
    assert dict(loaded.skipped) == {"every assistant turn has weight 0": 1}
    assert not loaded.unused
    of_user = {"messages": [{**user("Hi?"), "weight": 1}, two]}
    assert dict(load(write(tmp_path / "b.jsonl", [of_user]), chatml, VOCAB).unused) == {"messages.weight": 1}


ONLY_TWO = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message.role in ('user', 'assistant') %}"
)
LATE = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'system' or message == messages[0] %}"
)
DEFAULT = SYSTEM.replace("You are of help.", "Be brief.")


def test_a_message_that_the_template_does_not_show_is_lost_and_the_row_left_out(tmp_path: Path) -> None:
    """The conversation that would be learnt is not the one that was given."""
    rows = [
        {"id": "tool", "messages": [user("Hi?"), assistant("Let me see."), TOOL, assistant("Yes.")]},
        {"id": "system", "messages": [system("Be brief."), user("Hi?"), assistant("Yes.")]},
        {"id": "critic", "messages": [user("Hi?"), {"role": "critic", "content": "Bad."}, assistant("Yes.")]},
        {"id": "after", "messages": [user("Hi?"), assistant("Yes."), TOOL]},
        {"id": "empty", "messages": [system(" "), user("Hi?"), assistant("Yes.")]},
    ]
    loaded = load(write(tmp_path / "a.jsonl", rows), byte_tokenizer(ONLY_TWO), VOCAB)
    assert [sample.id for sample in loaded.samples] == ["after", "empty"]
    reason = "a message of role {!r} that the chat template does not show"
    assert dict(loaded.skipped) == {reason.format(role): 1 for role in ("tool", "system", "critic")}
    with pytest.raises(ValueError, match="'system' that the chat template does not show"):
        render(rows[1]["messages"], byte_tokenizer(ONLY_TWO))
    late = [{"id": "late", "messages": [user("Hi?"), system("Be brief."), assistant("Yes.")]}, rows[1]]
    loaded = load(write(tmp_path / "b.jsonl", late), byte_tokenizer(LATE), VOCAB)
    assert [sample.id for sample in loaded.samples] == ["system"]
    loaded = load(tmp_path / "a.jsonl", byte_tokenizer(CHATML), VOCAB)
    assert not loaded.skipped, "a role that it does not know is shown like any other"
    loaded = load(tmp_path / "b.jsonl", byte_tokenizer(DEFAULT), VOCAB)
    assert not loaded.skipped, "the system message that it has by itself is not lost when it is given"
    valued = CHATML.replace("message['content'] }}", "message['content'] if message['content'] != 'Hi?' else '' }}")
    with pytest.raises(ValueError, match="'user' that the chat template does not show"):
        render(rows[1]["messages"], byte_tokenizer(valued))


def test_no_field_of_a_row_is_dropped_unseen(chatml: Any, tmp_path: Path) -> None:
    named = byte_tokenizer(CHATML.replace("{{ message['role'] }}", "{{ message['role'] }} {{ message.name }}"))
    rows = [
        {"id": "a", "source": "web", "messages": [{**user("a"), "name": "Ann"}, {**assistant("b"), "refusal": "no"}]},
        {"id": "b", "source": "web", "score": 3, "category": "chat", "conversations": CASES["one"], "messages": CASES["one"]},
        {"id": "c", "messages": CASES["one"], "tools": [SCHEMA], "score": 0},
        {"id": "d", "text": "plain", "url": "x"},
        {"id": "e", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "messages": CASES["one"], "labels": [1, 2, 3]},
        {"id": "f", "messages": [user("a"), {**assistant("b"), "reasoning_content": "hm"}], "empty": [], "null": None},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    loaded = load(path, chatml, VOCAB)
    assert not loaded.skipped
    fields = {"source": 2, "score": 2, "conversations": 1, "tools": 1, "url": 1, "labels": 1}
    messages = {"messages.name": 1, "messages.refusal": 1, "messages.reasoning_content": 1}
    assert dict(loaded.unused) == fields | messages
    (note,) = loaded.notes
    assert note.startswith("fields that are not used: ")
    for field, count in loaded.unused.items():
        assert f"{field} ({count} rows)" in note
    assert "messages.name" not in load(path, named, VOCAB).unused, "a template that shows it uses it"
    shown = [user("a"), calling("Let me see.")]
    loaded = load(write(tmp_path / "b.jsonl", [{"messages": shown}]), byte_tokenizer(INSTEAD), VOCAB)
    assert dict(loaded.unused) == {"messages.content beside tool_calls": 1}
    loaded = load(write(tmp_path / "c.jsonl", [*ROWS, "{", {**ROWS[0], "id": "z", "x": 1}]), chatml, VOCAB)
    assert loaded.notes == ["1 rows were left out: 1 not a JSON object (first: line 6)", "fields that are not used: x (1 rows)"]


# ------------------------------------------------------------------------------- borders, thinking blocks

TAGS = (
    "{% for m in messages %}[{{ m.role | upper }}]{{ m.content }}[/{{ m.role | upper }}]{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)


def test_of_an_earlier_answer_the_tokens_wholly_inside_are_supervised() -> None:
    """Tags in plain text join what they enclose; the last answer is as the target generates it."""
    messages = [user("Hi?"), assistant("Hello!"), user("More?"), assistant("Well!"), user("And?"), assistant("Enough!")]
    for merges, first, second in (
        ((), "Hello!", "Well!"),
        ((("!", "["),), "Hello", "Well"),  # behind
        ((("]", "H"),), "ello!", "Well!"),  # in front
        ((("!", "["), ("]", "H"), ("]", "W")), "ello", "ell"),
    ):
        tokenizer = byte_tokenizer(TAGS, merges=merges)
        rendered = render(messages, tokenizer)
        assert supervised(tokenizer, rendered) == [first, second, "Enough!"], merges
        assert rendered.num_merged == (first != "Hello!") + (second != "Well!")
        prompt = ids_of(tokenizer, messages[:-1])
        assert rendered.token_ids[: len(prompt)] == prompt
    nothing = byte_tokenizer(TAGS, merges=(("]", "!"),))
    assert supervised(nothing, render([user("a"), assistant("!"), user("b"), assistant("c")], nothing)) == ["c"]


def test_earlier_answers_with_a_token_across_their_border_are_counted(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TAGS, merges=(("!", "["),))
    rows = [{"id": i, "messages": [user("a"), assistant("b!"), user("c"), assistant("d")]} for i in range(3)]
    loaded = load(write(tmp_path / "a.jsonl", rows), tokenizer, VOCAB)
    assert loaded.num_merged == 3
    (note,) = loaded.notes
    assert note.startswith("3 earlier answers have a token that reaches over their border")


OPEN = (  # the prompt opens a block; an answer's own is taken away
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
EMPTY = (  # the prompt opens a block; an answer without one has an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>{% endif %}{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CLOSED = OPEN.replace("<|assistant|><think>\n{% endif %}", "<|assistant|><think>\n</think>\n{% endif %}")


@pytest.mark.parametrize("template", ["open", "empty", "closed"])
def test_a_prompt_with_a_thinking_block_makes_a_sample_of_each_answer(template: str, tmp_path: Path) -> None:
    text = {"open": OPEN, "empty": EMPTY, "closed": CLOSED}[template]
    end = "<|im_end|>" if template == "empty" else "</s>"
    tokenizer = byte_tokenizer(text, end, more=MORE)
    rows = [{"id": "one", "messages": CASES["one"]}, {"id": "two", "messages": CASES["two"]}]
    loaded = load(write(tmp_path / "a.jsonl", rows), tokenizer, VOCAB)
    assert not loaded.skipped
    answers = ["It is 42.", "Good day.", "Red, and\n\nblue: ünï ☃."]
    assert texts(tokenizer, loaded) == dict(zip(["one", "two/1", "two/2"], [a + end for a in answers], strict=True))
    befores = [CASES["one"][:1], CASES["two"][:1], CASES["two"][:3]]
    for sample, before in zip(loaded.samples, befores, strict=True):
        samples = {
            "open": ids_of(tokenizer, before)[:-2],  # no block: the target would not have written one
            "empty": [*ids_of(tokenizer, before)[:-1], tokenizer.convert_tokens_to_ids("</think>")],
            "closed": ids_of(tokenizer, before),
        }[template]
        first = int(np.flatnonzero(sample.mask_n)[0])
        assert sample.token_n[:first].tolist() == samples
        assert sample.mask_n[first:].all()
    with pytest.raises(UnstableTemplate, match="otherwise than its generation prompt"):
        render(CASES["two"], tokenizer)
    assert render(CASES["one"], tokenizer).token_ids == loaded.samples[0].token_n.tolist()


def test_thoughts_that_the_prompt_opened_are_supervised(tmp_path: Path) -> None:
    """With the sign that opens them in the content, without it, or in a field of their own; not if the prompt closed them."""
    open_ = byte_tokenizer(OPEN, more=MORE)
    empty = byte_tokenizer(EMPTY, "<|im_end|>", more=MORE)
    before = [user("Six sevens?")]
    for content in ("<think>\nsix, seven\n</think>\n\n42", "six, seven\n</think>\n\n42"):
        rendered = render([*before, assistant(content)], open_)
        assert supervised(open_, rendered) == ["six, seven\n</think>\n\n42</s>"], content
        assert rendered.token_ids[: spans(rendered)[0][0]] == ids_of(open_, before)
    rendered = render([*before, {**assistant("42"), "reasoning_content": "six, seven"}], empty)
    assert supervised(empty, rendered) == ["six, seven\n</think>\n42<|im_end|>"]
    assert rendered.token_ids[: spans(rendered)[0][0]] == ids_of(empty, before)
    two = [
        *before,
        assistant("<think>\nsix, seven\n</think>\n\n42"),
        user("Sure?"),
        assistant("<think>\nyes\n</think>\n\nYes."),
    ]
    loaded = load(write(tmp_path / "a.jsonl", [{"id": "a", "messages": two}]), open_, VOCAB)
    assert texts(open_, loaded) == {"a/1": "six, seven\n</think>\n\n42</s>", "a/2": "yes\n</think>\n\nYes.</s>"}
    closed = byte_tokenizer(CLOSED, more=MORE)
    with pytest.raises(UnstableTemplate, match="otherwise than its generation prompt"):
        render(two[:2], closed)
    unasked = byte_tokenizer(OPEN.replace("<think>\n{% endif %}", "{% endif %}"), more=MORE)
    rendered = render(two[:2], unasked)
    assert supervised(unasked, rendered) == ["<think>\nsix, seven\n</think>\n\n42</s>"], "what the template takes away"


def test_a_call_after_a_prompt_that_opens_a_block(tmp_path: Path) -> None:
    ask = "<|im_start|>assistant\n<think>\n{% endif %}"
    tokenizer = byte_tokenizer(AFTER.replace("<|im_start|>assistant\n{% endif %}", ask), "<|im_end|>", more=MORE)
    row = {"id": "a", "messages": [user("Warm?"), calling(None), TOOL, assistant("Yes.")]}
    loaded = load(write(tmp_path / "a.jsonl", [row]), tokenizer, VOCAB)
    call = f'<tool>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool><|im_end|>'
    assert texts(tokenizer, loaded) == {"a/1": call, "a/2": "Yes.<|im_end|>"}


def test_no_length_is_refused_and_not_taken_for_any(tmp_path: Path) -> None:
    target: Any = SimpleNamespace(tokenizer=byte_tokenizer(CHATML), vocab_size=VOCAB, max_model_len=100, eos_token_ids=[257])
    config = {"path": str(write(tmp_path / "a.jsonl", ROWS)), "limit": None, "split": "train", "template_kwargs": None}
    for length in (0, -1, 2):
        with pytest.raises(ValueError, match=rf"data\.max_length={length}: at least 3 tokens"):
            data.load_for(target, **config | {"supervise": "generated", "max_length": length})
    assert len(data.load_for(target, **config | {"supervise": "generated", "max_length": None}).samples) == len(ROWS)


def test_the_frame_of_a_user_turn_that_is_not_there_is_refused() -> None:
    refusing = byte_tokenizer(CHATML.replace("{% for", "{{ raise_exception('no') }}{% for", 1))
    with pytest.raises(ValueError, match=r"refuses the messages \(.*no\)"):
        user_frame(refusing)
    blind = byte_tokenizer(CHATML.replace("{{ message['content'] }}", ""))
    with pytest.raises(ValueError, match="'user' that the chat template does not show"):
        user_frame(blind)


# --------------------------------------------------------------------------------- what training makes of it


def sample(name: str, tokens: list[int], mask: list[int]) -> Sample:
    return Sample(name, np.array(tokens, dtype=np.int64), np.array(mask, dtype=bool))


def many(count: int) -> list[Sample]:
    return [sample(f"s{i}", [i, i + 1, i + 2], [0, 0, 1]) for i in range(count)]


def test_what_is_held_out_does_not_depend_on_the_order() -> None:
    samples = many(50)
    train, held = split_validation(samples, 8)
    assert (len(train), len(held)) == (42, 8)
    assert {s.id for s in train} | {s.id for s in held} == {s.id for s in samples}
    assert [s.id for s in train] == [s.id for s in samples if s.id not in {h.id for h in held}], "their order stays"
    for seed in range(5):
        mixed = random.Random(seed).sample(samples, len(samples))
        assert {s.id for s in split_validation(mixed, 8)[1]} == {s.id for s in held}
    assert split_validation(samples, 0) == (samples, [])
    assert {s.id for s in held} <= {s.id for s in split_validation(samples, 12)[1]}


def test_the_draft_vocabulary_is_the_most_frequent_supervised_tokens() -> None:
    samples = [sample("a", [9, 9, 9, 9, 7, 7, 5], [0, 0, 0, 0, 1, 1, 1]), sample("b", [9, 3, 7, 5, 11], [0, 1, 1, 1, 1])]
    # supervised: 7 three times, 5 twice, 3 and 11 once; 9 never
    assert draft_vocabulary(samples, 1, 16).tolist() == [7]
    assert draft_vocabulary(samples, 2, 16).tolist() == [5, 7]
    assert draft_vocabulary(samples, 3, 16).tolist() == [3, 5, 7], "of equals, the lower"
    assert draft_vocabulary(samples, 4, 16).tolist() == [3, 5, 7, 11]
    assert draft_vocabulary(samples, 7, 16).tolist() == [0, 1, 2, 3, 5, 7, 11], "filled up with the lowest unseen ones"
    assert draft_vocabulary(samples, 16, 16).tolist() == list(range(16))
    assert draft_vocabulary([], 3, 16).tolist() == [0, 1, 2]
    assert draft_vocabulary(samples, 5, 16).dtype == np.int64
    for size in (17, 0, -1):
        with pytest.raises(ValueError, match=rf"draft_vocab_size={size} is outside 1\.\.16"):
            draft_vocabulary(samples, size, 16)


@pytest.mark.parametrize(("count", "batch"), [(10, 2), (10, 3), (7, 7), (5, 8), (1, 3)])
def test_every_epoch_sees_every_sample_once(count: int, batch: int) -> None:
    epochs = 6
    steps = -(-epochs * count // batch)
    seen = [place for step in range(steps) for place in batch_indices(step, count, batch, 0)]
    assert all(isinstance(place, int) for place in seen)
    orders = [tuple(seen[i * count : (i + 1) * count]) for i in range(epochs)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(set(orders)) > 1 or count == 1, "in an order of its own"


def test_what_a_step_sees_depends_on_its_number_and_the_seed_alone() -> None:
    forwards = [batch_indices(step, 100, 4, 3) for step in range(60)]
    _permutation.cache_clear()
    assert [batch_indices(step, 100, 4, 3) for step in reversed(range(60))] == forwards[::-1]
    assert [batch_indices(step, 100, 4, 4) for step in range(60)] != forwards
    flat = list(itertools.chain(*forwards))
    assert list(itertools.chain(*(batch_indices(step, 100, 8, 3) for step in range(30)))) == flat, (
        "the batch size only cuts the row"
    )


def test_the_fingerprint_is_of_tokens_and_masks() -> None:
    base = many(4)
    same = [Sample("other name", s.token_n.copy(), s.mask_n.copy()) for s in base]
    assert fingerprint(base) == fingerprint(same)
    others = [
        base[:3],
        base[::-1],
        [*base[:3], sample("s3", [3, 4, 6], [0, 0, 1])],
        [*base[:3], sample("s3", [3, 4, 5], [0, 1, 1])],
    ]
    assert len({fingerprint(other) for other in [base, *others]}) == 5


# ---------------------------------------------------------------------------------------------- the demo


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def test_tokens_of_another_tokenizer_are_not_taken(chatml: Any, tmp_path: Path) -> None:
    """Of a file that train/prepare.py wrote for another target: ids that are in range, and another text."""
    rows = [{"id": f"r{i}", "messages": [user("Quite so?"), assistant(f"Answer {i}.")]} for i in range(3)]
    sources = load(write(tmp_path / "text.jsonl", rows), chatml, VOCAB).samples
    for shift, is_retokenized in ((0, False), (1, True)):
        tokens = [
            row | {"input_ids": ((sample.token_n + shift) % VOCAB).tolist(), "loss_mask": sample.mask_n.astype(int).tolist()}
            for row, sample in zip(rows, sources, strict=True)
        ]
        loaded = load(write(tmp_path / f"{shift}.jsonl", [{"header": {"target": "x"}}, *tokens]), chatml, VOCAB)
        assert loaded.is_retokenized == is_retokenized
        assert any("another tokenizer" in note for note in loaded.notes) == is_retokenized
        assert [sample.token_n.tolist() for sample in loaded.samples] == [sample.token_n.tolist() for sample in sources]


@pytest.mark.embedded
def test_the_demo_is_what_its_header_says() -> None:
    """Of the embedded model, large enough to train on, and rendered as evaluation renders it."""
    tokenizer = hub.load_tokenizer(hub.resolve(hub.DEFAULT))
    loaded = load(data.DEMO, tokenizer, len(tokenizer))
    assert not loaded.skipped, loaded.skipped_note
    header = loaded.header
    assert header is not None
    assert header["target"] == hub.DEFAULT
    assert {"made_by", "dtype", "revision", "chat_template_sha256", "prompts", "synthesize", "answers", "seed"} <= set(header)
    assert header["prompts"]["count"] == len(loaded.samples) >= 1000
    assert sum(int(s.mask_n.sum()) for s in loaded.samples) >= 150_000
    by_id = {s.id: s for s in loaded.samples}
    with gzip.open(data.DEMO, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][1:]
    assert len(by_id) == len(rows)
    for row in rows:
        prompt = ids_of(tokenizer, row["messages"][:1])
        sources = by_id[row["id"]]
        assert sources.token_n[: len(prompt)].tolist() == prompt
        assert not sources.mask_n[: len(prompt)].any()
        if len(row["messages"]) == 2:
            assert sources.mask_n[len(prompt) :].all()
            answer = tokenizer.decode(sources.token_n[len(prompt) :], skip_special_tokens=True)
            assert answer == row["messages"][1]["content"]
        assert sources.token_n[-1] == tokenizer.eos_token_id or row["finish_reason"] == "length"


def test_the_demo_shares_no_text_with_the_prompts_of_the_evaluation() -> None:
    """No eight words in a row."""

    def runs(text: str) -> set[tuple[str, ...]]:
        tokens = words(text)
        return {tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)}

    prompts = [json.loads(line) for line in Path(EVALUATION).read_text().splitlines()]
    taboo = set().union(*(runs(turn) for row in prompts for turn in row["turns"]))
    assert len(taboo) > 1000
    with gzip.open(data.DEMO, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][1:]
    for row in rows:
        for message in row["messages"]:
            shared = runs(message["content"]) & taboo
            assert not shared, f"{row['id']}: {' '.join(min(shared))}"


def test_plain_text_and_everything_can_be_supervised(tmp_path: Path) -> None:
    """Text of which every token counts, and conversations of which every token shall count."""
    target = CausalLM("tiny", "float32", "cpu")
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "a plain text"}) + "\n" + json.dumps({"prompt": "p", "response": "rest"}) + "\n")
    config = {"path": str(path), "max_length": None, "limit": None, "split": "train", "template_kwargs": None}
    all_supervised = data.load_for(target, **config | {"supervise": "all"}).samples
    some = data.load_for(target, **config | {"supervise": "generated"}).samples
    assert [sample.mask_n.all() for sample in all_supervised] == [True, True]
    assert [sample.mask_n.all() for sample in some] == [True, False]
    assert [a.token_n.tolist() for a in all_supervised] == [b.token_n.tolist() for b in some]
    assert some[0].token_n.tolist() == target.tokenizer("a plain text")["input_ids"]
    with pytest.raises(ValueError, match=r"data\.supervise=every: use generated"):
        data.load_for(target, **config | {"supervise": "every"})
