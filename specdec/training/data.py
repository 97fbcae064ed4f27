"""Conversations to tokens and a loss mask; reading a training set; the draft vocabulary; which samples a step sees.

A conversation is rendered by the tokenizer's own template, as evaluation renders it, and the mask covers the tokens that the
target would generate: the assistant's content or tool calls, and the token that ends its turn. They are found by comparing
renderings of growing prefixes, and of messages that differ in one place, not by patterns. Where that does not lead to the
turn, the row is left out and counted, as is one of which the template does not show a message or a call.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import inspect
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specdec.checked import first_line, short_repr

DEMO = Path(__file__).parents[1] / "assets" / "train.jsonl.gz"
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool", "function": "tool",
}  # fmt: skip
# Contents that share neither their first nor their last letter: what two renderings with them have in common is exactly what
# the template puts around a content. Plain letters, which templates that trim or split content leave alone.
_STAND_INS = ("firstspecdecone", "anotherspecdectwo")
# Columns that are no part of a conversation: its name, and what train/prepare.py notes about it.
_METADATA = frozenset(("id", "conversation_id", "category", "temperature", "finish_reason"))
# Columns that token ids are made of, so that a row with both is read whole.
_TEXTS = frozenset(("messages", "conversations", "prompt", "response", "text", "tools", "functions", "system"))


@dataclass(frozen=True)
class Rendered:
    """token_ids of a conversation; loss_mask: 1 where the token is one that the target would have generated; num_merged:
    earlier answers of which a token reaches over the border, so that only the tokens inside are supervised."""

    token_ids: list[int]
    loss_mask: list[int]
    num_merged: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Sample:
    """A rendered conversation with a name. token_n: int64 [n]; mask_n: bool [n], as in `Rendered`; part_of: the conversation,
    where that makes several samples."""

    id: str
    token_n: np.ndarray
    mask_n: np.ndarray
    part_of: str | None = None


@dataclass
class Conversation:
    """Messages as chat templates spell them, the tools that they may call, and the fields of the row that nothing reads."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    unused: set[str] = field(default_factory=set)


class _Refused(ValueError):
    """Messages that a template does not take."""


class UnstableTemplate(ValueError):
    """A template that renders an assistant's turn differently once later turns follow, or otherwise than decoding begins it."""


# ---------------------------------------------------------------- rendering


def render(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    max_length: int | None = None,
    *,
    tools: Any = None,
    eos_token_ids: Iterable[int] | None = None,
    **template_kwargs: Any,
) -> Rendered:
    """Tokens and loss mask of one conversation.

    messages: {"role", "content"} in order, an assistant's with "tool_calls" beside or instead of content; an assistant's turn
    of "weight" 0 is not supervised, and what comes after the last supervised turn is left out. Up to each supervised turn the
    tokens are those of `apply_chat_template(messages before it, add_generation_prompt=True, **template_kwargs)`; only where
    that opens a thinking block, and the one answer has none, the turn begins as the template begins it. What a template puts
    in front of the content by itself, such as an empty thinking block, is not supervised.
    max_length: most tokens; the rest is cut off, which may leave nothing supervised.
    tools: JSON schemas of functions for the template, or their JSON text.
    eos_token_ids: what ends a generation of the target; None: the tokenizer's eos token.
    Raises ValueError, one line, if there is no turn to supervise, or the template refuses the messages or does not show one;
    UnstableTemplate if it renders a turn differently once later ones follow.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages={short_repr(messages)} are not a list of objects")
    conversation = Conversation([_message(message) for message in messages], parse_tools(tools))
    template = _Template(tokenizer, template_kwargs, eos_token_ids)
    spelled = _prepared(conversation, template)
    return _cut(_render(spelled, _supervised(spelled), template), max_length)


def _cut(rendered: Rendered, max_length: int | None) -> Rendered:
    return Rendered(rendered.token_ids[:max_length], rendered.loss_mask[:max_length], rendered.num_merged)


def _supervised(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The places of the turns that are to be learnt."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("no assistant turn")
    weighted = [place for place in turns if messages[place].get("weight", 1)]
    if not weighted:
        raise ValueError("every assistant turn has weight 0")
    return weighted


class _Template:
    """A tokenizer's chat template with its arguments, and what ends a generation of the target (None: the tokenizer's eos)."""

    def __init__(self, tokenizer: Any, kwargs: dict[str, Any], eos_token_ids: Iterable[int] | None = None):
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; give rows with prompt and response, or input_ids and loss_mask"
            )
        self.tokenizer, self.kwargs = tokenizer, dict(kwargs)
        self.knows_eos = eos_token_ids is not None
        tokenizer_eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos = frozenset(tokenizer_eos if eos_token_ids is None else eos_token_ids)

    def text(self, messages: Sequence[dict[str, Any]], generate: bool = False) -> str:
        """What the messages are rendered to; generate: with what begins an answer. Raises ValueError if they are refused."""
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate, **self.kwargs)
        except Exception as error:
            raise _Refused(f"the chat template refuses the messages ({first_line(error)})") from None
        return str(text)

    def around(self, *variants: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """What renderings of messages that differ in one place have in common: (before that place, behind it)."""
        first, second = map(self.text, variants)
        if first == second:
            raise ValueError(f"a message of role {variants[0][-1]['role']!r} that the chat template does not show")
        length = _num_shared(first[::-1], second[::-1])
        return first[: _num_shared(first, second)], first[len(first) - length :]

    def equal(self, text: str, messages: Sequence[dict[str, Any]]) -> bool:
        """Whether the messages are rendered to this text; what is refused is not."""
        with contextlib.suppress(ValueError):
            return self.text(messages) == text
        return False

    def shows(self, messages: list[dict[str, Any]], place: int, text: str, other: dict[str, Any]) -> bool:
        """Whether the rendering would be another than `text` (that of `messages`) with this other message at a place, or, where
        the template refuses that, with none."""
        for variant in ([other], []):
            with contextlib.suppress(ValueError):
                return self.text([*messages[:place], *variant, *messages[place + 1 :]]) != text
        return True

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where in the text each token begins and ends; nothing if the tokenizer does not know."""
        if not getattr(self.tokenizer, "is_fast", False):
            return []
        return list(self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])

    def ends(self, token: int) -> bool:
        """Whether a turn can end with this token."""
        return token in self.eos or _is_special(self.tokenizer, token)


@dataclass(frozen=True)
class _Turn:
    """An assistant's turn in text. prompt: what decoding begins with; text: that and the turn; start: where in `text` the
    supervised part begins; num_tail: how many tokens of `text` come after the one that ends the turn."""

    prompt: str
    text: str
    start: int
    num_tail: int


def _render(messages: Sequence[dict[str, Any]], turns: list[int], template: _Template) -> Rendered:
    """As `render`, supervising the assistant turns at these places only, and ending with the last of them."""
    whole = template.text(messages[: turns[-1] + 1])
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []  # of supervised tokens
    chars: list[tuple[int, int]] = []  # and of the text that they stand for
    merged: set[int] = set()
    for place in turns:
        through = whole if place == turns[-1] else template.text(messages[: place + 1])
        turn = _turn(messages, place, through, template, single=len(turns) == 1)
        if not whole.startswith(through):
            raise UnstableTemplate(
                "the chat template renders an assistant turn otherwise once later turns follow; give one sample per turn"
            )
        prefix = template.ids(turn.prompt)
        joint = template.ids(turn.text)
        # a token may reach over the border that decoding has between prompt and answer: then the answer stands alone
        answer = joint[len(prefix) :] if joint[: len(prefix)] == prefix else template.ids(turn.text[len(turn.prompt) :])
        inserted: list[int] = []
        if opening := turn.text[len(turn.prompt) : turn.start]:
            opened = template.ids(turn.text[: turn.start])
            inserted = opened[len(prefix) :] if opened[: len(prefix)] == prefix else template.ids(opening)
            if answer[: len(inserted)] != inserted:  # a token reaches over this border: likewise
                answer = [*inserted, *template.ids(turn.text[turn.start :])]
        answer = answer[: len(answer) - turn.num_tail]
        if template.eos.intersection(answer[len(inserted) : -1]):
            if messages[place].get("tool_calls"):
                raise ValueError("a turn with tool calls that the chat template ends before its end")
            raise ValueError("an answer that goes on after a token that ends a generation")

        common = _num_shared(token_ids, prefix)
        changed_turns = [number for number, span in enumerate(spans) if span[1] > common]
        if changed_turns:  # an earlier answer has other tokens as part of this prompt
            offsets = template.offsets(turn.prompt)
            for number in changed_turns:
                spans[number] = _tokens_inside(spans[number], chars[number], common, offsets)
            merged.update(changed_turns)
        spans.append((len(prefix) + len(inserted), len(prefix) + len(answer)))
        ends = template.offsets(turn.text)[: -turn.num_tail] if turn.num_tail and place != turns[-1] else []
        chars.append((turn.start, ends[-1][1] if ends else len(turn.text)))
        token_ids = prefix + answer

    loss_mask = np.zeros(len(token_ids), dtype=np.int64)
    for first, last in spans:
        loss_mask[first:last] = 1
    return Rendered(token_ids, loss_mask.tolist(), len(merged))


def _tokens_inside(
    span: tuple[int, int], chars: tuple[int, int], common: int, offsets: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The tokens of a prompt that lie wholly inside of an earlier answer's text; without offsets, those of the answer's own
    that stand before `common`, where the tokens begin to be others."""
    if not offsets:
        return span[0], max(span[0], common)
    inside = [i for i, (first, last) in enumerate(offsets) if chars[0] <= first < last <= chars[1]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _turn(messages: Sequence[dict[str, Any]], place: int, through: str, template: _Template, single: bool) -> _Turn:
    """The assistant's turn at this place.

    through: the rendering up to and with it.
    single: it makes a sample of its own, and may begin otherwise than the generation prompt, where that has a thinking block.
    """
    history = messages[:place]
    message = messages[place]
    calls = message.get("tool_calls")
    # what stands around a content by itself, and behind this message's content or calls, with its other fields
    head, plain_closing = template.around(*([*history, {"role": "assistant", "content": text}] for text in _STAND_INS))
    closing = plain_closing
    if set(message) - {"role", "content", "weight"}:
        _, closing = template.around(*([*history, _varied(message, text)] for text in _STAND_INS))
    prompt, text, start = _start_of_turn(template, history, message, head, through, closing, single)
    if calls:  # the variants may have more in common with each other than with this one, as the brackets of an empty list
        num_shared = _num_shared(through[::-1], closing[::-1])
        rest = closing[: len(closing) - num_shared]
        closing = closing[len(closing) - num_shared :]
        differs = any(template.ends(token) for token in template.ids(rest))
    else:
        differs = not through.endswith(closing)
    if differs:
        raise UnstableTemplate("the chat template closes an answered turn otherwise than one with another content")

    closing_ids = template.ids(closing)
    special = [i for i, token in enumerate(closing_ids) if template.ends(token)]
    # calls are followed by what closes them; a content by its end at once, if the target's own ends are not known
    candidates = [i for nth, i in enumerate(special) if i == special[0] + nth or calls or template.knows_eos]
    ends = [i for i in candidates if closing_ids[i] in template.eos]
    if not ends and (opener := _opener(messages, place, template)):
        return _Turn(prompt, text + opener, start, 0)
    if not ends and calls:  # as a turn without calls ends, else what closes the calls
        plain_end = [token for token in template.ids(plain_closing) if template.ends(token)][:1]
        ends = [i for i in special if closing_ids[i] in plain_end] or special[-1:]
    ends = ends or special
    if ends:  # a template may render something else there, such as a last system message
        opening_ids = [token for token in template.ids(_generation_suffix(template, history)) if template.ends(token)]
        if opening_ids and opening_ids[0] in closing_ids[: ends[0]]:
            raise UnstableTemplate("the chat template puts another turn before the end of one")
        return _Turn(prompt, text, start, len(closing_ids) - ends[0] - 1)
    if not text.endswith(plain_closing):
        raise UnstableTemplate("the chat template closes a turn with tool calls otherwise than one without")
    return _Turn(prompt, text[: len(text) - len(plain_closing)], start, 0)  # no token ends it: it ends with the content


def _generation_suffix(template: _Template, history: Sequence[dict[str, Any]]) -> str:
    """What the template adds for an answer to begin; nothing if it adds nothing, or adds it always."""
    text = template.text(history)
    prompt = template.text(history, generate=True)
    return prompt[len(text) :] if prompt.startswith(text) else ""


_TAG = re.compile(r"[<\[][^<>\[\]]*[>\]]")


def _start_of_turn(
    template: _Template,
    history: Sequence[dict[str, Any]],
    message: dict[str, Any],
    head: str,
    through: str,
    closing: str,
    single: bool,
) -> tuple[str, str, int]:
    """(prompt, prompt and turn, where in that the supervised text begins).

    head: what the template puts in front of a content, with all that comes before it.
    through: what it makes of the conversation with this turn; closing: the end of that, behind the content.
    """
    prompt = template.text(history, generate=True)
    calls = message.get("tool_calls")
    content = "" if calls else message["content"].strip()
    dropped = ""  # the front of the content: some templates take a thinking block away, which the target generates
    if content and through.startswith(head):
        shown = through[len(head) : len(through) - len(closing)].strip()
        front = content[: len(content) - len(shown)].strip() if content.endswith(shown) else ""
        dropped = "" if head.rstrip().endswith(front) else front
    if through.startswith(prompt) and not dropped:
        inserted = through.startswith(head) and head[len(prompt) :].strip()
        return prompt, through, len(head) if inserted else len(prompt)

    # the prompt may have a thinking block that the turn lacks: open, for the target to think, or closed, for it not to
    reference = through if calls else head
    num_shared = _num_shared(prompt, reference)
    fork = max((tag.start() for tag in _TAG.finditer(prompt) if tag.start() <= num_shared), default=0)
    fork = num_shared if num_shared == len(reference) else fork
    block = prompt[fork:]
    tags = _TAG.findall(block)
    suffix = _generation_suffix(template, history)
    if single and dropped and not block:
        if not prompt.rstrip().endswith([dropped, *_TAG.findall(dropped)][-1]):
            return prompt, prompt + content + closing, len(prompt)
    elif single and not dropped and through.startswith(head) and suffix and head.endswith(suffix):
        return prompt, prompt + through[len(head) :], len(prompt)  # only what came before is rendered otherwise
    elif single and block.strip() and (not suffix or fork > len(prompt) - len(suffix)):
        if len(tags) < 2 and content and content.startswith(block.strip()):
            thought = content[len(block.strip()) :].removeprefix(block[len(block.rstrip()) :])
            return prompt, prompt + thought + closing, len(prompt)
        if len(tags) < 2 and dropped:
            return prompt, prompt + content + closing, len(prompt)
        start = len(head) if through.startswith(head) else fork
        if len(tags) < 2 and (calls or start == len(head)):
            return through[:start], through, start
        if (calls or start == len(head)) and not dropped and not (content and content.startswith(tags[0])):
            text = prompt + through[start if block.endswith(through[fork:start]) else fork :]
            return prompt, text, len(text) - len(through) + start
    raise UnstableTemplate(
        "the chat template renders an answered turn otherwise than its generation prompt and the content; "
        "keep the token ids when generating, as train/prepare.py does"
    )


def _opener(messages: Sequence[dict[str, Any]], place: int, template: _Template) -> str:
    """The token that opens the message after this turn, if the target generates it to end the turn; else nothing."""
    calls = messages[place].get("tool_calls")
    bare = {key: value for key, value in messages[place].items() if key in ("role", "content", "tool_calls")}
    if not calls:
        bare["content"] = _STAND_INS[0]  # without thoughts, which may go when a turn follows
    following: dict[str, Any] = {"role": "user", "content": _STAND_INS[1]}
    if place + 1 < len(messages):
        following = messages[place + 1]
    elif calls:
        following = {"role": "tool", "name": calls[0]["function"]["name"], "content": _STAND_INS[1]}
        following |= {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
    try:
        text = template.text([*messages[:place], bare])
        continued = template.text([*messages[:place], bare, following])
    except ValueError:  # nothing may follow, so nothing opens
        return ""
    added = template.tokenizer.added_tokens_decoder
    openers = [str(added[token]) for token in template.eos if token in added]
    addition = continued[len(text) :] if continued.startswith(text) else ""
    opener = next((token for token in openers if addition.lstrip().startswith(token)), "")
    return addition[: addition.index(opener) + len(opener)]


def _varied(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message with another content, or other arguments to its tool calls."""
    calls = message.get("tool_calls")
    varied = {**message, "content": text} if message["content"] or not calls else dict(message)
    if calls:
        varied["tool_calls"] = [_with_arguments(call, _varied_arguments(call, text)) for call in calls]
    return varied


def _varied_arguments(call: dict[str, Any], text: str) -> Any:
    """Other arguments for a tool call, of the same types."""
    arguments = _parsed(call["function"]["arguments"])
    if not isinstance(arguments, dict):
        return {text: text}
    varied = {key: _varied_value(value, text) for key, value in arguments.items()}
    return {text: text} if varied == arguments else varied


def _varied_value(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _varied_value(inner, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [_varied_value(inner, text) for inner in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value)(len(text))  # 15 and 17, whose last digits differ
    return text if isinstance(value, str) else value


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """The call with other arguments, in the form that it has them in: a mapping, or JSON text."""
    if isinstance(call["function"]["arguments"], str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _parsed(arguments: Any) -> Any:
    """Arguments as a mapping, where they are the JSON text of one."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _num_shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements two sequences begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


_NOTHING: tuple[Any, ...] = (None, "", [], {})


def _prepared(conversation: Conversation, template: _Template) -> list[dict[str, Any]]:
    """The messages in the spelling that the template shows; it is given the tools. Fields that it does not show are added to
    `conversation.unused`. Raises ValueError, one line, if it refuses the messages, or does not show one or a tool call."""
    if conversation.tools:
        template.kwargs["tools"] = conversation.tools
    end = _supervised(conversation.messages)[-1] + 1
    failure: ValueError | None = None
    for messages in _spellings(conversation.messages):
        try:
            for place in range(end):
                if messages[place].get("tool_calls"):
                    _check_calls(messages[: place + 1], template)
            break
        except ValueError as error:
            failure = error if failure is None or isinstance(failure, _Refused) else failure
    else:
        assert failure is not None
        raise failure

    rendering = template.text(messages[:end])
    if conversation.tools:
        toolless = _Template(template.tokenizer, {**template.kwargs, "tools": None})
        if toolless.equal(rendering, messages[:end]):
            conversation.unused.add("tools")
    # one rendering proves of most contents that they are shown; the others are tested one by one
    marks = [f"{_STAND_INS[0]}{place}x" for place in range(end)]
    marked = [
        {**message, "content": mark} if message["content"] else message for message, mark in zip(messages, marks, strict=False)
    ]
    marked_rendering = ""
    with contextlib.suppress(ValueError):
        marked_rendering = template.text(marked)
    for place, message in enumerate(messages[:end]):
        content = (message["content"] or "").strip()
        is_assistant = message["role"] == "assistant"
        fields = {key for key in message if message[key] not in _NOTHING} - {"role", "content", "tool_calls"}
        fields -= {"weight"} if is_assistant or not message.get("weight") else set()
        is_shown = not content or (marks[place] in marked_rendering and content in rendering)
        if is_shown and not fields and not message.get("tool_calls"):
            continue
        # a turn's own rendering has more of it than that with later ones, which may drop thoughts
        part = messages[: place + 1] if is_assistant else messages[:end]
        text = rendering if len(part) == end else template.text(part)
        variants = [{**message, "content": variant} for variant in (marks[place], "")]
        if content and not all(template.shows(part, place, text, variant) for variant in variants):
            if not message.get("tool_calls"):
                raise ValueError(f"a message of role {message['role']!r} that the chat template does not show")
            conversation.unused.add("messages.content beside tool_calls")
        for field_name in fields:
            without = {key: value for key, value in message.items() if key != field_name}
            if not template.shows(part, place, text, without):
                if is_assistant and not content and not message.get("tool_calls"):
                    raise ValueError(f"an assistant turn whose only content, {field_name}, the chat template does not show")
                conversation.unused.add(f"messages.{field_name}")
        if message.get("tool_calls"):
            conversation.unused |= _unused_in_calls(part, text, template)
    return messages


def _unused_in_calls(messages: list[dict[str, Any]], text: str, template: _Template) -> set[str]:
    """Fields of the last message's tool calls, beside what makes a call, that its rendering `text` does not show."""
    message = messages[-1]
    unused = set()
    for number, call in enumerate(message["tool_calls"]):
        function = call["function"]
        variants = {key: {**call, key: None} for key in set(call) - {"type", "function", "id", "tool_call_id"}}
        for key in set(function) - {"name", "arguments"}:
            variants[f"function.{key}"] = {**call, "function": {k: v for k, v in function.items() if k != key}}
        for name, variant in variants.items():
            calls = list(message["tool_calls"])
            calls[number] = {key: value for key, value in variant.items() if value is not None}
            changed = {**message, "tool_calls": calls}
            if not template.shows(messages, len(messages) - 1, text, changed):
                unused.add(f"messages.tool_calls.{name}")
    return unused


def unread_template_kwargs(tokenizer: Any, kwargs: dict[str, Any], key: str, template: str | None = None) -> list[str]:
    """The arguments of a chat template that it does not read, by name. Raises ValueError for those that are not the user's to
    give.

    key: what the arguments are called where they were given; template: one in place of the tokenizer's own.
    """
    parameters = {*inspect.signature(tokenizer.apply_chat_template).parameters, *inspect.signature(load).parameters}
    own = (parameters | {"messages"}) - {"documents"}
    templates = tokenizer.chat_template if template is None else template
    text = "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""
    for name in kwargs:
        if name in own:
            raise ValueError(f"{key}: {name!r} is not an argument of the chat template's own; leave it out")
    return [f"{key}.{name}" for name in kwargs if not re.search(rf"\b{re.escape(str(name))}\b", text)]


def _check_calls(messages: list[dict[str, Any]], template: _Template) -> None:
    """Raises ValueError unless the tool calls of the last message are in its rendering, as JSON or text and not as Python."""
    message = messages[-1]
    calls = message["tool_calls"]
    text = template.text(messages)
    if message["content"] is None and "None" in text:
        empty = template.text([*messages[:-1], {**message, "content": ""}])
        if text.count("None") > empty.count("None"):
            raise ValueError("the chat template writes None for a content of null")
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, dict):
            python_text = str(arguments)
            json_text = json.dumps(arguments, ensure_ascii=False)
        else:
            python_text = json.dumps(arguments)[1:-1]  # with the quotation marks escaped, as for a text within JSON
            json_text = arguments
        if python_text != json_text and python_text in text:
            raise ValueError("the chat template writes the arguments of a tool call in the notation of Python")
        renamed = {**call, "function": {**function, "name": _STAND_INS[function["name"] == _STAND_INS[0]]}}
        if "id" in call:  # it may hold the name; its length may matter
            renamed["id"] = "".join("b" if letter == "a" else "a" for letter in str(call["id"]))
        variants = [renamed]
        if _parsed(arguments):
            variants.append(_with_arguments(call, _varied_arguments(call, _STAND_INS[0])))
        for variant in variants:
            changed = {**message, "tool_calls": [*calls[:number], variant, *calls[number + 1 :]]}
            if not template.shows(messages, len(messages) - 1, text, changed):
                raise ValueError("a tool call that the chat template does not show")


def _spellings(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages in the forms that templates expect of tool calls: arguments as a mapping or as JSON text, an empty content
    as it is or as the other of null and no text."""
    if not any(message.get("tool_calls") for message in messages):
        yield messages
        return
    for as_text in (False, True):
        for swap_empty in (False, True):
            spelled = []
            for message in messages:
                if calls := message.get("tool_calls"):
                    message = {**message, "tool_calls": [_spelled(call, as_text) for call in calls]}
                    if swap_empty and not message["content"]:
                        message["content"] = "" if message["content"] is None else None
                spelled.append(message)
            yield spelled


def _spelled(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not as_text:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def user_frame(tokenizer: Any) -> tuple[str, list[int]]:
    """What the chat template puts in front of a first user turn, and the special token that ends one (a list: there may be
    none). Raises ValueError, one line, if the template does not take or show one."""
    template = _Template(tokenizer, {})
    before, closing = template.around(*([{"role": "user", "content": text}] for text in _STAND_INS))
    return before, [token for token in template.ids(closing) if _is_special(tokenizer, token)][:1]


def _is_special(tokenizer: Any, token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or bool(added is not None and added.special)


# ---------------------------------------------------------------- reading


@dataclass
class Loaded:
    """What a source held. skipped: how many rows were left out, by reason; listed: where they were; unused: how many rows had a
    field that nothing read; num_merged: as in `Rendered`."""

    samples: list[Sample] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    listed: dict[str, list[str]] = field(default_factory=dict)
    header: dict[str, Any] | None = None
    unused: Counter[str] = field(default_factory=Counter)
    num_merged: int = 0

    def skip(self, where: str, reason: str) -> None:
        self.skipped[reason] += 1
        self.listed.setdefault(reason, []).append(where)

    @property
    def said(self) -> str:
        """The rows that were left out, in a line; empty if there are none."""
        kinds = [f"{count} {reason} (first: {self.listed[reason][0]})" for reason, count in self.skipped.most_common()]
        return "; ".join(kinds)

    @property
    def notes(self) -> list[str]:
        """A line for each kind of thing that was given and does not train."""
        notes = []
        if self.skipped:
            notes.append(f"{self.skipped.total()} rows were left out: {self.said}")
        if self.unused:
            notes.append(unused_note(self.unused))
        if self.num_merged:
            notes.append(
                f"{self.num_merged} earlier answers have a token that reaches over their border, which is not supervised; "
                "those inside are"
            )
        return notes


def unused_note(unused: Counter[str]) -> str:
    """Fields of rows that nothing read, in a line."""
    return "fields that are not used: " + ", ".join(f"{name} ({count} rows)" for name, count in unused.most_common())


def load(
    source: str | Path,
    tokenizer: Any,
    vocab_size: int,
    max_length: int | None = None,
    limit: int | None = None,
    split: str = "train",
    *,
    eos_token_ids: Iterable[int] | None = None,
    **template_kwargs: Any,
) -> Loaded:
    """Read a training set: a JSON-lines file (.jsonl, .jsonl.gz), a datasets directory, or a hub id.

    A row is a conversation (`conversations` or `messages`, with role/content or from/value), or `prompt` and `response`, or
    `input_ids` and `loss_mask`, or plain `text`, of which every token is supervised; `id` is optional. A conversation may have
    `tools` (JSON schemas, or their JSON text) and `system`, a message in front. A row that cannot be used is skipped and
    counted, and so is a field that nothing reads. A conversation whose template changes earlier turns, or begins a turn
    otherwise than decoding, becomes one sample per assistant turn.
    limit: most rows to read; eos_token_ids: as in `render`. Raises ValueError, one line, if nothing usable is left.
    """
    if max_length is not None and max_length < 3:
        raise ValueError(f"data.max_length={max_length}: at least 3 tokens are needed to supervise one")
    if limit is not None and limit < 1:
        raise ValueError(f"data.limit={limit}: at least 1 row is needed")
    loaded, names, taken, num_rows = Loaded(), Counter[str](), set[str](), 0
    for where, row in rows(source, split):
        if num_rows == limit:
            break
        if isinstance(row, dict) and set(row) == {"header"} and loaded.header is None:
            loaded.header = row["header"]
            continue
        num_rows += 1
        try:
            parts, unused = _rendered(row, tokenizer, vocab_size, max_length, eos_token_ids, template_kwargs)
        except ValueError as error:
            loaded.skip(where, str(error))
            continue
        loaded.unused.update(sorted(unused))
        loaded.num_merged += sum(part.num_merged for part in parts)
        name = str(row.get("id", row.get("conversation_id", where)))
        for turn, part in enumerate(parts, 1):
            if max(part.token_ids, default=0) >= vocab_size:
                loaded.skip(where, f"text with tokens that are not token ids of the target (0..{vocab_size - 1})")
                continue
            mask_n = np.array(part.loss_mask, dtype=bool)
            if not mask_n[2:].any():
                loaded.skip(where, "nothing supervised" + (f" within max_length={max_length}" if max_length else ""))
                continue
            base = own = f"{name}/{turn}" if len(parts) > 1 else name
            while own in taken:  # also by a row whose given id looks like a made one
                names[base] += 1
                own = f"{base}#{names[base] + 1}"
            taken.add(own)
            part_of = where if len(parts) > 1 else None
            loaded.samples.append(Sample(own, np.array(part.token_ids, dtype=np.int64), mask_n, part_of))
    if not loaded.samples:
        raise ValueError(f"{source}: no row can be trained on ({loaded.said or 'it is empty'})")
    return loaded


def load_group(given: dict[str, Any], target: Any) -> Loaded:
    """`load` with the keys of the `data` group; no sample is longer than the target can see. supervise: `generated`, or `all`,
    whoever wrote it."""
    most, supervise = target.max_model_len, given["supervise"]
    if supervise not in ("generated", "all"):
        raise ValueError(f"data.supervise={supervise}: use generated (what the target would say) or all (every token)")
    max_length = most if given["max_length"] is None else min(given["max_length"], most)
    unread = unread_template_kwargs(target.tokenizer, given["template_kwargs"] or {}, "data.template_kwargs")
    loaded = load(
        given["path"] or DEMO,
        target.tokenizer,
        target.vocab_size,
        max_length,
        given["limit"],
        given["split"],
        eos_token_ids=target.eos_token_ids,
        **(given["template_kwargs"] or {}),
    )
    loaded.unused.update(dict.fromkeys(unread, len(loaded.samples)))
    if supervise == "all":
        loaded.samples = [replace(sample, mask_n=np.ones_like(sample.mask_n)) for sample in loaded.samples]
    return loaded


def rows(source: str | Path, split: str) -> Iterator[tuple[str, Any]]:
    """(place, row) of everything in the source; a line that is not JSON comes as its error's text."""
    path = Path(source).expanduser()
    if path.is_file():
        opened: Any = gzip.open if path.suffix == ".gz" else open
        try:
            with opened(path, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        try:
                            row = json.loads(line)
                        except (ValueError, RecursionError):
                            row = None
                        yield f"line {number}", _given(row)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"data.path={source}: cannot be read, or is cut short ({first_line(error)})") from None
        return
    if not path.is_dir() and (path.suffix in (".jsonl", ".json", ".gz") or str(source).count("/") != 1):
        raise ValueError(f"data.path={source}: no such file or directory, and not a hub id (org/name)")
    import datasets

    try:
        if path.is_dir() and (path / "state.json").exists():
            table: Any = datasets.load_from_disk(str(path))
        elif path.is_dir() and (path / "dataset_dict.json").exists():
            table = datasets.load_from_disk(str(path))[split]
        else:
            table = datasets.load_dataset(str(source), split=split)
    except Exception as error:
        raise ValueError(f"data.path={source}: cannot be read as a dataset ({first_line(error)})") from None
    for number, row in enumerate(table):
        yield f"row {number}", _given(row, deep=True)


def _given(row: Any, deep: bool = False) -> Any:
    """A table has every column in every row, and every key in every message; null says that it was not given. deep: in
    objects within the row, too, such as the arguments of a call and schemas of tools, where JSON lines mean what they say."""
    if deep and isinstance(row, list):
        return [_given(value, deep) for value in row]
    if not isinstance(row, dict):
        return row
    return {key: _given(value, deep) if deep else value for key, value in row.items() if value is not None}


def conversation_of(row: Any) -> Conversation:
    """The conversation of a row, as chat templates spell it. Raises ValueError with the reason if there is none."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    used = {"messages" if "messages" in row else "conversations", "system", "tools" if row.get("tools") else "functions"}
    turns = row.get("messages", row.get("conversations"))
    if turns is None:
        prompt = row.get("prompt")
        response = row.get("response")
        if prompt is None or response is None:
            raise ValueError("no messages, conversations, prompt and response, input_ids and loss_mask, or text")
        used |= {"prompt", "response"}
        turns = [*(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])]
        turns += response if isinstance(response, list) else [{"role": "assistant", "content": response}]
    if not isinstance(turns, list) or not all(isinstance(message, dict) for message in turns):
        raise ValueError("messages are not a list of objects")
    messages = [_message(message) for message in turns]
    if system := row.get("system"):
        system_message = _message({"role": "system", "content": system})
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, system_message)
        elif messages[0]["content"] != system:
            raise ValueError("a system column beside another system message")
    return Conversation(messages, parse_tools(row.get("tools") or row.get("functions")), _unused(row, used))


def prompts_of(row: Any, tokenizer: Any) -> Conversation:
    """A leading system message and the user turns of a row (`turns`, or a conversation of which the answers are left out), with
    its tools. Raises ValueError with the reason if there are none, or a message would be lost."""
    if isinstance(row, dict) and "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError("turns are not a list of texts")
        other = {key: row[key] for key in row if key not in ("turns", "messages")}
        conversation = conversation_of(other | {"messages": [{"role": "user", "content": turn} for turn in turns]})
        conversation.unused |= _unused(row, {*other, "turns"})
    else:
        conversation = conversation_of(row)
    prompts: list[dict[str, Any]] = []
    for place, message in enumerate(conversation.messages):
        if message["role"] == "user" or (message["role"] == "system" and place == 0):
            prompts.append({"role": message["role"], "content": message["content"]})
            conversation.unused |= {f"messages.{key}" for key in _unused(message, ("role", "content"))}
        elif message["role"] != "assistant":
            raise ValueError(f"a message of role {message['role']!r} between the turns, which would be lost")
    turns = [message["content"] for message in prompts if message["role"] == "user"]
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError("turns are not a list of texts")
    _check_text([row.get("id"), row.get("category")])
    conversation.messages = prompts
    if not tokenizer.chat_template:
        conversation.unused |= {"tools"} if conversation.tools else set()
        return conversation
    template = _Template(tokenizer, {"tools": conversation.tools})
    first = prompts[: len(prompts) - len(turns) + 1]
    template.text(first, generate=True)
    text = template.text(first)
    if len(first) == 2 and not template.shows(first, 0, text, {**first[0], "content": _STAND_INS[0]}):
        raise ValueError("a message of role 'system' that the chat template does not show")
    if conversation.tools and _Template(tokenizer, {}).equal(text, first):
        conversation.unused.add("tools")
    return conversation


def _unused(row: dict[str, Any], used: Iterable[str]) -> set[str]:
    return {key for key, value in row.items() if key not in _METADATA and key not in used and value not in _NOTHING}


def _message(raw: Any) -> dict[str, Any]:
    """A message as chat templates spell it: role, content, tool_calls, and what else it has. Raises ValueError with the
    reason if it has no role, or neither content nor calls."""
    if not isinstance(raw, dict):
        raise ValueError("messages are not a list of objects")
    message = _given(raw)
    for key, other in (("role", "from"), ("content", "value")):
        if key not in message and other in message:
            message[key] = message.pop(other)
    role = message.get("role")
    content = message.get("content")
    calls = message.pop("tool_calls", None) or []
    if role == "function_call" and not calls:  # the content is the JSON text of one call or of several
        try:
            calls, content = json.loads(content), None
        except (ValueError, TypeError, RecursionError):
            raise ValueError("a message of role 'function_call' that is not JSON") from None
        calls = calls if isinstance(calls, list) else [calls]
    elif "function_call" in message and not calls:
        calls = [message.pop("function_call")]
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and calls)):
        raise ValueError("a message without role and text content")
    message = {**message, "role": _ROLES.get(role, role), "content": content}
    if calls:
        if message["role"] != "assistant":
            raise ValueError(f"a message of role {role!r} with tool calls, which only an assistant makes")
        if not isinstance(calls, list):
            raise ValueError("tool_calls are not a list")
        message["tool_calls"] = [_call(call) for call in calls]
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"a message of weight {message['weight']!r}; 0 and 1 are known")
    _check_text(message)
    return message


def _call(raw: Any) -> dict[str, Any]:
    """A tool call as chat templates spell it: {"type", "function": {"name", "arguments"}}, perhaps with an id."""
    if isinstance(raw, dict) and "function" not in raw:  # flat, as the Responses API has it
        own = {key: raw[key] for key in ("id", "tool_call_id") if key in raw}
        raw = {**own, "function": {key: value for key, value in raw.items() if key not in (*own, "type")}}
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call without the name of a function")
    function = dict(function)
    other = next((key for key in ("parameters", "args", "input") if key in function), None)
    if "arguments" not in function and other is not None:
        function["arguments"] = function.pop(other)
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):  # of a function that takes none
        arguments = {}
    if not isinstance(_parsed(arguments), dict):
        raise ValueError("a tool call whose arguments are neither an object nor JSON text of one")
    return {"type": "function", **_given(raw), "function": {**function, "arguments": arguments}}


def parse_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Tools as chat templates expect them: a list of {"type", "function": schema}; None if there are none."""
    if isinstance(raw, str) and raw.strip():
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            raise ValueError("tools are not JSON") from None
    if raw in _NOTHING or (isinstance(raw, str) and not raw.strip()):
        return None
    tools = raw if isinstance(raw, list) else [raw]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools are not a list of objects")
    _check_text(tools)
    flat = lambda tool: {key: value for key, value in tool.items() if (key, value) != ("type", "function")}
    return [tool if "name" not in tool else {"type": "function", "function": flat(tool)} for tool in tools]


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise ValueError("objects that are nested too deeply") from None


def _rendered(
    row: Any,
    tokenizer: Any,
    vocab_size: int,
    max_length: int | None,
    eos_token_ids: Iterable[int] | None,
    kwargs: dict[str, Any],
) -> tuple[list[Rendered], set[str]]:
    """(the samples of a row, its fields that nothing reads)."""
    if isinstance(row, dict):
        _check_text([row.get(key) for key in ("id", "conversation_id", "text")])
    if isinstance(row, dict) and "input_ids" in row:
        return [_pretokenized(row, vocab_size, max_length)], _unused(row, {"input_ids", "loss_mask", *_TEXTS})
    if isinstance(row, dict) and isinstance(row.get("text"), str) and not {"messages", "conversations", "prompt"} & set(row):
        ids = tokenizer(row["text"])["input_ids"][:max_length]
        return [Rendered(ids, [1] * len(ids))], _unused(row, {"text"})
    conversation = conversation_of(row)
    messages = conversation.messages
    if not tokenizer.chat_template and isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        *before, question, response = (message["content"] for message in messages)
        prefix = list(tokenizer("\n\n".join([*before, question]))["input_ids"])
        answer = [*tokenizer(response, add_special_tokens=False)["input_ids"]]
        answer = [*answer, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        rendered = Rendered([*prefix, *answer], [0] * len(prefix) + [1] * len(answer))
        return [_cut(rendered, max_length)], conversation.unused | ({"tools"} if conversation.tools else set())
    template = _Template(tokenizer, kwargs, eos_token_ids)
    messages = _prepared(conversation, template)
    turns = _supervised(messages)
    try:
        parts = [_render(messages, turns, template)]
    except UnstableTemplate:
        if len(turns) == 1:
            raise
        parts = [_render(messages, [place], template) for place in turns]
    return [_cut(part, max_length) for part in parts], conversation.unused


def _pretokenized(row: dict[str, Any], vocab_size: int, max_length: int | None) -> Rendered:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ValueError(f"input_ids are not token ids of the target (0..{vocab_size - 1})")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
        raise ValueError("loss_mask is not a list of 0 and 1, as long as input_ids")
    return Rendered(ids[:max_length], [int(value) for value in mask[:max_length]])


# ---------------------------------------------------------------- what training makes of it


def held_out(samples: Iterable[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out) samples: about `count` held out, whole conversations. The choice hangs on names only, so it stays
    when a set is put in another order."""
    samples = list(samples)
    name = lambda sample: sample.part_of or sample.id
    by_hash = sorted(samples, key=lambda sample: zlib.crc32(name(sample).encode()))
    chosen = {name(sample) for sample in by_hash[:count]}
    return [s for s in samples if name(s) not in chosen], [s for s in samples if name(s) in chosen]


def fingerprint(samples: Iterable[Sample]) -> str:
    """A hash of tokens and masks, for telling whether two runs had the same data."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.token_n.tobytes())
        digest.update(sample.mask_n.tobytes())
    return digest.hexdigest()[:16]


def draft_vocabulary(samples: Iterable[Sample], size: int, vocab_size: int) -> np.ndarray:
    """[size] int64, ascending: the tokens that a drafter with a reduced vocabulary can draft.

    The most frequent supervised ones (of equals, the lower id); where fewer were seen, the lowest unseen ids fill up.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size={size} is outside 1..{vocab_size}, the target's vocabulary")
    count_V = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        count_V += np.bincount(sample.token_n[sample.mask_n], minlength=vocab_size)
    by_count = np.lexsort((np.arange(vocab_size), -count_V))  # unseen tokens have equal counts, so they come by id
    return np.sort(by_count[:size])


def mask_token(samples: Iterable[Sample], tokenizer: Any, vocab_size: int, given: int | None = None) -> int:
    """A token that may stand for one that is not there yet: one that the samples never have, in prompts or answers.

    tokenizer: None if there is none; vocab_size: rows of the embedding. Without `given`: the lowest id beyond the tokenizer's
    own, else a reserved special token that no conversation would bring, else the highest id that does not occur. Raises
    ValueError, one line, if `given` occurs or is out of range, or no id is free.
    """
    seen_V, first = np.zeros(vocab_size, dtype=bool), ""
    for sample in samples:
        seen_V[sample.token_n] = True
        if given is not None and not first and (sample.token_n == given).any():
            first = sample.id
    if given is not None:
        if not 0 <= given < vocab_size:
            raise ValueError(f"mask token {given} is outside 0..{vocab_size - 1}, the rows of the embedding; null chooses one")
        if first:
            raise ValueError(f"mask token {given} occurs in sample {first}; give an id that the data never has, or null")
        return given
    known: set[int] = set() if tokenizer is None else {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}
    beyond = [token for token in range(max(known, default=vocab_size) + 1, vocab_size) if not seen_V[token]]
    if beyond:
        return beyond[0]
    taken: set[int] = set()
    if known:
        roles = (getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk"))
        taken = {*_template_ids(tokenizer), *(token for token in roles if token is not None)}
        added = {token: str(own) for token, own in tokenizer.added_tokens_decoder.items() if own.special}
        free = [token for token in sorted(added) if token < vocab_size and token not in taken and not seen_V[token]]
        reserved = [token for token in free if "reserved" in added[token] or "unused" in added[token]]
        if free:
            return max(reserved or free)
    rest = [token for token in np.flatnonzero(~seen_V).tolist() if token not in taken]
    if not rest:
        raise ValueError(f"every one of the {vocab_size} tokens occurs in the data; none is left to be the mask token")
    return int(rest[-1])


def _template_ids(tokenizer: Any) -> list[int]:
    """Tokens that the chat template brings by itself."""
    turns = [{"role": role, "content": _STAND_INS[0]} for role in ("system", "user", "assistant")]
    for messages in (turns, turns[1:]) if tokenizer.chat_template else ():
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # some know no system turn
            continue
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return []


def batch_indices(step: int, num_samples: int, batch_size: int, seed: int) -> list[int]:
    """The samples of optimiser step `step` (from 0): a function of these numbers alone, so there is no state to save.

    Every epoch runs over all samples in an order of its own.
    """
    places = range(step * batch_size, (step + 1) * batch_size)
    return [int(_order(seed, place // num_samples, num_samples)[place % num_samples]) for place in places]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)
