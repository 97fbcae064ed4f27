"""Training data: what is supervised under every kind of chat template, what is read and left out, what is made of it."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec import hub
from specdec.target import CausalLM
from specdec.tasks import DEMO as EVALUATION
from specdec.training import data
from specdec.training.data import Rendered, Sample, UnstableTemplate, load, render

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


def byte_tokenizer(template: str | None, eos: str = "</s>", merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """A token for every byte and for every merge of two, and the special ones."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
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
    trims: bool = False
    eos: str = "</s>"
    multi_turn: bool = True


TEMPLATES = {
    "chatml": Template(CHATML, "<|im_end|>", eos="<|im_end|>"),
    "chatml-other-eos": Template(CHATML, "<|im_end|>"),
    "system": Template(SYSTEM, "<|im_end|>"),
    "llama3": Template(LLAMA3, "<|eot_id|>", trims=True),
    "gemma": Template(GEMMA, "<end_of_turn>", system=False, alternates=True, trims=True),
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
    """Every answer, and nothing else, is supervised, and before each stands exactly what the engine would be given."""
    rendered = render(messages, tokenizer, **kwargs)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    told = [place for place in turns if wanted(messages[place]["content"])]
    assert supervised(tokenizer, rendered) == [wanted(messages[place]["content"]) for place in told]
    assert len(rendered.loss_mask) == len(rendered.token_ids)
    for place, (first, _) in zip(told, spans(rendered), strict=True):
        assert rendered.token_ids[:first] == ids_of(tokenizer, messages[:place], **kwargs)
    if told[-1] == turns[-1]:
        assert spans(rendered)[-1][1] == len(rendered.token_ids), "nothing after the last answer"
    return rendered


# ------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_answers_and_what_ends_them_are_supervised(name: str, case: str) -> None:
    template, messages = TEMPLATES[name], CASES[case]
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
        return template.before + (content.strip() if template.trims else content) + template.end

    check(tokenizer, messages, wanted, **({} if template.multi_turn else {"enable_thinking": False}))


@pytest.mark.embedded
@pytest.mark.parametrize("case", CASES)
def test_of_the_embedded_model_too(case: str) -> None:
    """Its vocabulary has merges, and its template a system prompt of its own."""
    tokenizer = AutoTokenizer.from_pretrained(hub.resolve(hub.DEFAULT))
    check(tokenizer, CASES[case], lambda content: content + "<|im_end|>")


def test_a_template_with_a_system_prompt_keeps_the_one_that_is_given() -> None:
    tokenizer = byte_tokenizer(SYSTEM)
    without, given = (tokenizer.decode(render(CASES[case], tokenizer).token_ids) for case in ("one", "system"))
    assert without.startswith("<|im_start|>system\nYou are of help.<|im_end|>\n<|im_start|>user\n")
    assert given.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "system" not in byte_tokenizer(CHATML).decode(render(CASES["one"], byte_tokenizer(CHATML)).token_ids)


def test_a_token_across_the_border_of_prompt_and_answer_is_not_made() -> None:
    """The prompt is what the engine sees: the answer's first line feed cannot join its last one. Where the next prompt has
    the answer in other tokens, those that lie wholly inside are supervised."""
    tokenizer = byte_tokenizer(CHATML, merges=NEWLINES)
    joined = tokenizer.convert_tokens_to_ids("ĊĊ")
    one = [user("a"), assistant("\nb\n\nc")]
    rendered = check(tokenizer, one, lambda content: content + "<|im_end|>")
    assert rendered.token_ids.count(joined) == 1, "inside the answer they do join"
    whole = tokenizer.apply_chat_template(one, tokenize=True, return_dict=False)
    assert whole.count(joined) == 2, "if all is put to tokens at once, they join across the border"
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
    plain, thinking = CASES["one"], [user("Six sevens?"), assistant("<think>\nsix, seven\n</think>\n\n42")]
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
    whole = render(CASES["two"], tokenizer)
    for length in (0, 1, 20, len(whole.token_ids) - 1, len(whole.token_ids), 10**6):
        assert render(CASES["two"], tokenizer, length) == Rendered(whole.token_ids[:length], whole.loss_mask[:length])


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
    before, closing = data.user_frame(tokenizer)
    text = tokenizer.apply_chat_template([user("Who?")], tokenize=False)
    end = "" if name in ("mistral", "plain") else template.end
    assert text.startswith(before + "Who?" + end)
    assert tokenizer.decode(closing) == end


# ----------------------------------------------------------------------------------------------- reading


def write(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a text or bytes go in as they are."""
    lines = [row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows]
    whole = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(whole) if path.suffix == ".gz" else whole)
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
    assert loaded.said == ""
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
    assert "no chat template" in loaded.said
    assert load(file, tokenizer, VOCAB, max_length=7).samples[0].token_n.tolist() == sample.token_n[:7].tolist()


def test_pretokenised_rows(chatml: Any, tmp_path: Path) -> None:
    ids, mask = [5, 6, 7, 319], [0, 0, 1, 1]
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
    assert "not token ids of the target (0..255)" in loaded.said


MALFORMED: dict[str, tuple[Any, str]] = {
    "not json": ("{", "not a JSON object"),
    "not utf-8": (b'{"messages": "\xff"}', "not a JSON object"),
    "deep": ("[" * 100_000, "not a JSON object"),
    "a list": ([1, 2], "not a JSON object"),
    "a number": ("7", "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "no keys": ({"words": "hello"}, "no messages, conversations, prompt and response, input_ids and loss_mask, or text"),
    "no response": ({"prompt": "hello"}, "no messages, conversations, prompt and response, input_ids and loss_mask, or text"),
    "a text": ({"messages": "hello"}, "messages are not a list of objects"),
    "texts": ({"messages": ["hello"]}, "messages are not a list of objects"),
    "no content": ({"messages": [user("a"), {"role": "assistant"}]}, "a message without role and text content"),
    "no role": ({"messages": [user("a"), {"content": "b"}]}, "a message without role and text content"),
    "role of a kind": ({"messages": [{"role": 1, "content": "b"}]}, "a message without role and text content"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a message without role and text content"),
    "half a pair": ({"messages": [user("a"), assistant("\ud800")]}, "surrogate"),
    "empty": ({"messages": []}, "no assistant turn"),
    "user only": ({"messages": [user("a")]}, "no assistant turn"),
    "prompt half": ({"prompt": 3, "response": "x"}, "a message without role and text content"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_row_is_skipped_counted_and_listed(chatml: Any, tmp_path: Path, kind: str) -> None:
    bad, reason = MALFORMED[kind]
    loaded = load(write(tmp_path / "a.jsonl", [ROWS[0], bad, "", ROWS[1], bad]), chatml, VOCAB)
    assert texts(chatml, loaded) == {key: ANSWERS[key] for key in ("r0", "r1")}
    ((said, count),) = loaded.skipped.items()
    assert reason in said
    assert count == 2
    assert loaded.listed == {said: ["line 2", "line 5"]}
    assert loaded.said == f"2 {said} (first: line 2)"
    with pytest.raises(ValueError, match="no row can be trained on") as error:
        load(write(tmp_path / "b.jsonl", [bad]), chatml, VOCAB)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_rows_that_the_template_refuses_are_counted_with_its_reason(tmp_path: Path) -> None:
    rows = [{"messages": CASES["system"]}, {"messages": CASES["one"]}, {"messages": CASES["user twice"]}]
    loaded = load(write(tmp_path / "a.jsonl", rows), byte_tokenizer(GEMMA), VOCAB)
    assert [sample.id for sample in loaded.samples] == ["line 2"]
    assert loaded.skipped.total() == 2
    assert "System role not supported" in loaded.said
    assert "roles must alternate" in loaded.said


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
        assert data.fingerprint(loaded.samples) == data.fingerprint(plain.samples), source
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
    assert [sample.id for sample in loaded.samples] == ["a", "b", "c"], loaded.said


def test_a_hub_id_is_left_to_datasets(chatml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_hub(name: str, split: str) -> Iterator[Any]:
        asked.append((name, split))
        if name == "org/gone":
            raise ConnectionError("no route\nto host")
        return iter(ROWS)

    monkeypatch.setattr("datasets.load_dataset", from_hub)
    assert texts(chatml, load("org/set", chatml, VOCAB, split="test")) == ANSWERS
    assert asked == [("org/set", "test")]
    with pytest.raises(ValueError, match=r"data.path=org/gone: cannot be read as a dataset \(.*no route\)$"):
        load("org/gone", chatml, VOCAB)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.jsonl.gz", "a/gone.json", "gone", "/gone/gone"])
def test_a_missing_file_is_said(chatml: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"data.path={name}: no such file"):
        load(name, chatml, VOCAB)


def test_a_compressed_file_that_is_cut_short_is_said(chatml: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl.gz", ROWS)
    whole = file.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:-4], b"not gzip", whole[:20] + b"\xff\xff\xff" + whole[23:]):
        file.write_bytes(part)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz") as error:
            load(file, chatml, VOCAB)
        assert len(str(error.value).splitlines()) == 1


def test_line_ends_and_marks_of_other_systems(chatml: Any, tmp_path: Path) -> None:
    """CR LF, a byte order mark, no line end at the last line; and U+2028 inside of a text is no line end."""
    odd = [{**ROWS[0], "messages": [user("a\u2028b"), assistant("Answer 0.")]}, *ROWS[1:]]
    whole = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in odd)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + whole.encode())
    loaded = load(tmp_path / "a.jsonl", chatml, VOCAB)
    assert texts(chatml, loaded) == ANSWERS
    assert not loaded.skipped


# --------------------------------------------------------------------------------- what training makes of it


def sample(name: str, tokens: list[int], mask: list[int]) -> Sample:
    return Sample(name, np.array(tokens, dtype=np.int64), np.array(mask, dtype=bool))


def many(count: int) -> list[Sample]:
    return [sample(f"s{i}", [i, i + 1, i + 2], [0, 0, 1]) for i in range(count)]


def test_what_is_held_out_does_not_depend_on_the_order() -> None:
    samples = many(50)
    train, held = data.held_out(samples, 8)
    assert (len(train), len(held)) == (42, 8)
    assert {s.id for s in train} | {s.id for s in held} == {s.id for s in samples}
    assert [s.id for s in train] == [s.id for s in samples if s.id not in {h.id for h in held}], "their order stays"
    for seed in range(5):
        mixed = random.Random(seed).sample(samples, len(samples))
        assert {s.id for s in data.held_out(mixed, 8)[1]} == {s.id for s in held}
    assert data.held_out(samples, 0) == (samples, [])
    assert {s.id for s in held} <= {s.id for s in data.held_out(samples, 12)[1]}


def test_the_draft_vocabulary_is_the_most_frequent_supervised_tokens() -> None:
    samples = [sample("a", [9, 9, 9, 9, 7, 7, 5], [0, 0, 0, 0, 1, 1, 1]), sample("b", [9, 3, 7, 5, 11], [0, 1, 1, 1, 1])]
    # supervised: 7 three times, 5 twice, 3 and 11 once; 9 never
    assert data.draft_vocabulary(samples, 1, 16).tolist() == [7]
    assert data.draft_vocabulary(samples, 2, 16).tolist() == [5, 7]
    assert data.draft_vocabulary(samples, 3, 16).tolist() == [3, 5, 7], "of equals, the lower"
    assert data.draft_vocabulary(samples, 4, 16).tolist() == [3, 5, 7, 11]
    assert data.draft_vocabulary(samples, 7, 16).tolist() == [0, 1, 2, 3, 5, 7, 11], "filled up with the lowest unseen ones"
    assert data.draft_vocabulary(samples, 16, 16).tolist() == list(range(16))
    assert data.draft_vocabulary([], 3, 16).tolist() == [0, 1, 2]
    assert data.draft_vocabulary(samples, 5, 16).dtype == np.int64
    for size in (17, 0, -1):
        with pytest.raises(ValueError, match=rf"draft_vocab_size={size} is outside 1\.\.16"):
            data.draft_vocabulary(samples, size, 16)


@pytest.mark.parametrize(("count", "batch"), [(10, 2), (10, 3), (7, 7), (5, 8), (1, 3)])
def test_every_epoch_sees_every_sample_once(count: int, batch: int) -> None:
    epochs = 6
    steps = -(-epochs * count // batch)
    seen = [place for step in range(steps) for place in data.picks(step, count, batch, 0)]
    assert all(isinstance(place, int) for place in seen)
    orders = [tuple(seen[i * count : (i + 1) * count]) for i in range(epochs)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(set(orders)) > 1 or count == 1, "in an order of its own"


def test_what_a_step_sees_depends_on_its_number_and_the_seed_alone() -> None:
    forwards = [data.picks(step, 100, 4, 3) for step in range(60)]
    data._order.cache_clear()
    assert [data.picks(step, 100, 4, 3) for step in reversed(range(60))] == forwards[::-1]
    assert [data.picks(step, 100, 4, 4) for step in range(60)] != forwards
    flat = list(itertools.chain(*forwards))
    assert list(itertools.chain(*(data.picks(step, 100, 8, 3) for step in range(30)))) == flat, (
        "the batch size only cuts the row"
    )


def test_the_fingerprint_is_of_tokens_and_masks() -> None:
    base = many(4)
    same = [Sample("other name", s.token_n.copy(), s.mask_n.copy()) for s in base]
    assert data.fingerprint(base) == data.fingerprint(same)
    others = [
        base[:3],
        base[::-1],
        [*base[:3], sample("s3", [3, 4, 6], [0, 0, 1])],
        [*base[:3], sample("s3", [3, 4, 5], [0, 1, 1])],
    ]
    assert len({data.fingerprint(other) for other in [base, *others]}) == 5


# ---------------------------------------------------------------------------------------------- the demo


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@pytest.mark.embedded
def test_the_demo_is_what_its_header_says() -> None:
    """Of the embedded model, large enough to train on, and rendered as evaluation renders it."""
    tokenizer = AutoTokenizer.from_pretrained(hub.resolve(hub.DEFAULT))
    loaded = load(data.DEMO, tokenizer, len(tokenizer))
    assert not loaded.skipped, loaded.said
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
        own = by_id[row["id"]]
        assert own.token_n[: len(prompt)].tolist() == prompt
        assert not own.mask_n[: len(prompt)].any()
        if len(row["messages"]) == 2:
            assert own.mask_n[len(prompt) :].all()
            answer = tokenizer.decode(own.token_n[len(prompt) :], skip_special_tokens=True)
            assert answer == row["messages"][1]["content"]
        assert own.token_n[-1] == tokenizer.eos_token_id or row["finish_reason"] == "length"


def test_the_demo_shares_no_text_with_the_prompts_of_the_evaluation() -> None:
    """No eight words in a row."""

    def runs(text: str) -> set[tuple[str, ...]]:
        own = words(text)
        return {tuple(own[i : i + 8]) for i in range(len(own) - 7)}

    asked = [json.loads(line) for line in Path(EVALUATION).read_text().splitlines()]
    taboo = set().union(*(runs(turn) for row in asked for turn in row["turns"]))
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
    given = {"path": str(path), "max_length": None, "limit": None, "split": "train", "template_kwargs": None}
    whole = data.load_group(given | {"supervise": "all"}, target).samples
    some = data.load_group(given | {"supervise": "generated"}, target).samples
    assert [sample.mask_n.all() for sample in whole] == [True, True]
    assert [sample.mask_n.all() for sample in some] == [True, False]
    assert [a.token_n.tolist() for a in whole] == [b.token_n.tolist() for b in some]
    assert some[0].token_n.tolist() == target.tokenizer("a plain text")["input_ids"]
    with pytest.raises(ValueError, match=r"data\.supervise=every: use generated"):
        data.load_group(given | {"supervise": "every"}, target)
