"""A conversation in the spelling that a chat template shows.

Templates differ in the form of a tool call (arguments as a mapping or as JSON text, an empty content as "" or null) and in the
fields that they read. The form is found by rendering: if a change of a message or a call leaves the rendering as it is, it is
not shown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.chat.conversation import EMPTY_VALUES, Conversation, arguments_object
from specdec.chat.template import PLACEHOLDERS, ChatTemplate, Message, TemplateRefusal


def supervised_turns(messages: Sequence[Message]) -> list[int]:
    """The indices of the assistant turns to learn from: those whose weight is not 0."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("no assistant turn")
    weighted = [index for index in turns if messages[index].get("weight", 1)]
    if not weighted:
        raise ValueError("every assistant turn has weight 0")
    return weighted


def spelled_for(conversation: Conversation, template: ChatTemplate) -> Conversation:
    """The conversation in the first spelling of which the template shows every message and tool call; the names of fields that
    it does not show are added to `unused`.

    Raises ValueError, one line, if the template refuses the messages, or does not show one or a tool call.
    """
    end = supervised_turns(conversation.messages)[-1] + 1
    failure: ValueError | None = None
    for messages in _spellings(conversation.messages):
        try:
            for index in range(end):
                if messages[index].get("tool_calls"):
                    _check_calls(messages[: index + 1], template)
            break
        except ValueError as error:
            failure = error if failure is None or isinstance(failure, TemplateRefusal) else failure
    else:
        assert failure is not None
        raise failure

    text = template.render(messages[:end])
    unused = _unused_in_messages(messages, end, text, template)
    if conversation.tools and template.ignores_tools(text, messages[:end]):
        unused.add("tools")
    return Conversation(messages, conversation.tools, conversation.unused | unused)


def _unused_in_messages(messages: list[Message], end: int, text: str, template: ChatTemplate) -> set[str]:
    """Names of the fields of the messages before `end` that their rendering `text` does not show. Raises ValueError if a
    content is not shown."""
    # one rendering proves of most contents that they are shown; the others are tested one by one
    marks = [f"{PLACEHOLDERS[0]}{index}x" for index in range(end)]
    marked = [
        {**message, "content": mark} if message["content"] else message for message, mark in zip(messages, marks, strict=False)
    ]
    marked_text = ""
    with contextlib.suppress(ValueError):
        marked_text = template.render(marked)
    unused: set[str] = set()
    for index, message in enumerate(messages[:end]):
        content = (message["content"] or "").strip()
        is_assistant = message["role"] == "assistant"
        fields = {key for key in message if message[key] not in EMPTY_VALUES} - {"role", "content", "tool_calls"}
        fields -= {"weight"} if is_assistant or not message.get("weight") else set()
        is_shown = not content or (marks[index] in marked_text and content in text)
        if is_shown and not fields and not message.get("tool_calls"):
            continue
        # an answer is looked for in the rendering that ends with it: later turns may drop its thoughts
        history = messages[: index + 1] if is_assistant else messages[:end]
        history_text = text if len(history) == end else template.render(history)
        variants = [{**message, "content": variant} for variant in (marks[index], "")]
        if content and not all(template.shows(history, index, history_text, variant) for variant in variants):
            if not message.get("tool_calls"):
                raise ValueError(f"a message of role {message['role']!r} that the chat template does not show")
            unused.add("messages.content beside tool_calls")
        for name in fields:
            variant = {key: value for key, value in message.items() if key != name}
            if not template.shows(history, index, history_text, variant):
                if is_assistant and not content and not message.get("tool_calls"):
                    raise ValueError(f"an assistant turn whose only content, {name}, the chat template does not show")
                unused.add(f"messages.{name}")
        if message.get("tool_calls"):
            unused |= _unused_in_calls(history, history_text, template)
    return unused


def _unused_in_calls(messages: list[Message], text: str, template: ChatTemplate) -> set[str]:
    """Names of the fields of the last message's tool calls that its rendering `text` does not show, beside those of every
    call."""
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


def _check_calls(messages: list[Message], template: ChatTemplate) -> None:
    """Raises ValueError unless the tool calls of the last message are in its rendering, as JSON or text and not as Python."""
    message = messages[-1]
    calls = message["tool_calls"]
    text = template.render(messages)
    if message["content"] is None and "None" in text:
        empty = template.render([*messages[:-1], {**message, "content": ""}])
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
        renamed = {**call, "function": {**function, "name": PLACEHOLDERS[function["name"] == PLACEHOLDERS[0]]}}
        if "id" in call:  # it may hold the name; its length may matter
            renamed["id"] = "".join("b" if letter == "a" else "a" for letter in str(call["id"]))
        variants = [renamed]
        if arguments_object(arguments):
            variants.append(_with_arguments(call, _changed_arguments(call, PLACEHOLDERS[0])))
        for variant in variants:
            changed = {**message, "tool_calls": [*calls[:number], variant, *calls[number + 1 :]]}
            if not template.shows(messages, len(messages) - 1, text, changed):
                raise ValueError("a tool call that the chat template does not show")


def _spellings(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages in the forms that templates take of tool calls: arguments as a mapping or as JSON text, an empty content
    as it is or as the other of null and ""."""
    if not any(message.get("tool_calls") for message in messages):
        yield messages
        return
    for as_text in (False, True):
        for swap_empty in (False, True):
            spelled = []
            for message in messages:
                if calls := message.get("tool_calls"):
                    message = {**message, "tool_calls": [_spelled_call(call, as_text) for call in calls]}
                    if swap_empty and not message["content"]:
                        message["content"] = "" if message["content"] is None else None
                spelled.append(message)
            yield spelled


def _spelled_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not as_text:
        arguments = arguments_object(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def changed_message(message: Message, text: str) -> Message:
    """The message with another content, or other arguments to its tool calls."""
    calls = message.get("tool_calls")
    changed = {**message, "content": text} if message["content"] or not calls else dict(message)
    if calls:
        changed["tool_calls"] = [_with_arguments(call, _changed_arguments(call, text)) for call in calls]
    return changed


def _changed_arguments(call: dict[str, Any], text: str) -> Any:
    """Other arguments for a tool call, of the same types."""
    arguments = arguments_object(call["function"]["arguments"])
    if not isinstance(arguments, dict):
        return {text: text}
    changed = {key: _changed_value(value, text) for key, value in arguments.items()}
    return {text: text} if changed == arguments else changed


def _changed_value(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _changed_value(inner, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [_changed_value(inner, text) for inner in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value)(len(text))  # 15 and 17, whose last digits differ
    return text if isinstance(value, str) else value


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """The call with other arguments, in the form that its arguments have: a mapping, or JSON text."""
    if isinstance(call["function"]["arguments"], str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
