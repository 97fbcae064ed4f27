"""Rows of data sets as conversations: messages, tool calls and tools in the form that chat templates take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from specdec.chat.template import PLACEHOLDERS, ChatTemplate, Message

ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool", "function": "tool",
}  # fmt: skip
# Columns that are no part of a conversation: its name, and what train/prepare.py notes about it.
METADATA = frozenset(("id", "conversation_id", "category", "temperature", "finish_reason"))
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Conversation:
    """messages: as chat templates take them; tools: schemas of the functions that they may call; unused: names of the row's
    fields that nothing reads."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unused: frozenset[str] = frozenset()

    def with_unused(self, names: Iterable[str]) -> Conversation:
        """With further names of fields that nothing reads."""
        return replace(self, unused=self.unused.union(names))


def conversation_of(row: Any) -> Conversation:
    """The conversation of a row. Raises ValueError with the reason if there is none."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    used = {"messages" if "messages" in row else "conversations", "system", "tools" if row.get("tools") else "functions"}
    turns = row.get("messages", row.get("conversations"))
    if turns is None and row.get("prompt") is None and "instruction" in row and "output" in row:
        used |= {"instruction", "input", "output"}
        turns = [{"role": "user", "content": alpaca_prompt(row)}, {"role": "assistant", "content": row["output"]}]
    if turns is None:
        prompt = row.get("prompt")
        response = row.get("response")
        if prompt is None or response is None:
            forms = "prompt and response, instruction and output, input_ids and loss_mask, or text"
            raise ValueError(f"no messages, conversations, {forms}")
        used |= {"prompt", "response"}
        turns = [*(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])]
        turns += response if isinstance(response, list) else [{"role": "assistant", "content": response}]
    if not isinstance(turns, list) or not all(isinstance(message, dict) for message in turns):
        raise ValueError("messages are not a list of objects")
    messages = [parse_message(message) for message in turns]
    if system := row.get("system"):
        system_message = parse_message({"role": "system", "content": system})
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, system_message)
        elif messages[0]["content"] != system:
            raise ValueError("a system column beside another system message")
    return Conversation(messages, parse_tools(row.get("tools") or row.get("functions")), unused_fields(row, used))


def alpaca_prompt(row: dict[str, Any]) -> Any:
    """The user turn of an Alpaca row: its instruction, and its input below."""
    instruction = row["instruction"]
    text = row.get("input")
    return f"{instruction}\n\nInput:\n{text}" if isinstance(text, str) and text.strip() else instruction


def _turns_alone(row: Any) -> tuple[Any, set[str]]:
    """The user turns of a row that has no answers, and their columns; no columns if it has a conversation, or no turns."""
    if not isinstance(row, dict):
        return None, set()
    if "turns" in row:
        return row["turns"], {"turns"}
    if {key for key, value in row.items() if value is not None} & {"messages", "conversations", "response", "output"}:
        return None, set()
    prompt, columns = prompt_of(row)
    return [prompt], columns


def prompt_of(row: dict[str, Any]) -> tuple[Any, set[str]]:
    """The one prompt of a row that has it in a column of its own, and the columns that it is of; None if there is none."""
    column = next((name for name in ("prompt", "question", "instruction") if name in row), None)
    if column == "instruction":
        return alpaca_prompt(row), {"instruction", "input"}
    if column is None or not isinstance(row[column], str):
        return None, set()
    return row[column], {column}


def text_of_parts(content: Any) -> Any:
    """The text of a list of OpenAI's content parts; anything else as it is. Raises ValueError for a part that is no text."""
    if not isinstance(content, list) or not content:
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"a content part of type {kind!r}; only text parts are read")
        texts.append(text)
    return "".join(texts)


def conversation_without_answers(row: Any, tokenizer: Any) -> Conversation:
    """The prompts of a row: a leading system message and the user turns (`turns`, one prompt, or a conversation without its
    answers), and the tools.

    Raises ValueError with the reason if there are none, or a message would be lost.
    """
    turns, columns = _turns_alone(row)
    if columns:
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError("turns are not a list of texts")
        other = {key: row[key] for key in row if key not in (*columns, "messages")}
        conversation = conversation_of(other | {"messages": [{"role": "user", "content": turn} for turn in turns]})
        unused = conversation.unused | unused_fields(row, {*other, *columns})
    else:
        conversation = conversation_of(row)
        unused = conversation.unused
    prompts: list[Message] = []
    for index, message in enumerate(conversation.messages):
        if message["role"] == "user" or (message["role"] == "system" and index == 0):
            prompts.append({"role": message["role"], "content": message["content"]})
            unused |= {f"messages.{key}" for key in unused_fields(message, ("role", "content"))}
        elif message["role"] != "assistant":
            raise ValueError(f"a message of role {message['role']!r} between the turns, which would be lost")
    turns = [message["content"] for message in prompts if message["role"] == "user"]
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError("turns are not a list of texts")
    check_unicode([row.get("id"), row.get("category")])
    tools = conversation.tools
    conversation = Conversation(prompts, tools, unused)
    if not tokenizer.chat_template:
        return conversation.with_unused(["tools"] if tools else [])
    template = ChatTemplate(tokenizer, tools=tools)
    first = prompts[: len(prompts) - len(turns) + 1]
    template.render(first, generate=True)
    text = template.render(first)
    if len(first) == 2 and not template.shows(first, 0, text, {**first[0], "content": PLACEHOLDERS[0]}):
        raise ValueError("a message of role 'system' that the chat template does not show")
    return conversation.with_unused(["tools"] if tools and template.ignores_tools(text, first) else [])


def parse_message(raw: Any) -> Message:
    """A message as chat templates take it: role, content, tool_calls, and its other fields.

    Raises ValueError with the reason if it has no role, or neither content nor calls.
    """
    if not isinstance(raw, dict):
        raise ValueError("messages are not a list of objects")
    message = drop_nulls(raw)
    for key, alias in (("role", "from"), ("content", "value")):
        if key not in message and alias in message:
            message[key] = message.pop(alias)
    role = message.get("role")
    content = text_of_parts(message.get("content"))
    calls = message.pop("tool_calls", None) or []
    if role == "function_call" and not calls:  # the content is the JSON text of one call or of several
        try:
            calls = json.loads(content)
        except (ValueError, TypeError, RecursionError):
            raise ValueError("a message of role 'function_call' that is not JSON") from None
        content = None
        calls = calls if isinstance(calls, list) else [calls]
    elif "function_call" in message and not calls:
        calls = [message.pop("function_call")]
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and calls)):
        raise ValueError("a message without role and text content")
    message = {**message, "role": ROLES.get(role, role), "content": content}
    if calls:
        if message["role"] != "assistant":
            raise ValueError(f"a message of role {role!r} with tool calls, which only an assistant makes")
        if not isinstance(calls, list):
            raise ValueError("tool_calls are not a list")
        message["tool_calls"] = [parse_call(call) for call in calls]
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"a message of weight {message['weight']!r}; 0 and 1 are known")
    check_unicode(message)
    return message


def parse_call(raw: Any) -> dict[str, Any]:
    """A tool call as chat templates take it: {"type", "function": {"name", "arguments"}}, perhaps with an id."""
    if isinstance(raw, dict) and "function" not in raw:  # flat, as the Responses API has it
        ids = {key: raw[key] for key in ("id", "tool_call_id") if key in raw}
        raw = {**ids, "function": {key: value for key, value in raw.items() if key not in (*ids, "type")}}
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call without the name of a function")
    function = dict(function)
    alias = next((key for key in ("parameters", "args", "input") if key in function), None)
    if "arguments" not in function and alias is not None:
        function["arguments"] = function.pop(alias)
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):  # of a function without parameters
        arguments = {}
    if not isinstance(arguments_object(arguments), dict):
        raise ValueError("a tool call whose arguments are neither an object nor JSON text of one")
    return {"type": "function", **drop_nulls(raw), "function": {**function, "arguments": arguments}}


def parse_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Tools as chat templates take them: a list of {"type", "function": schema}; None if there are none."""
    if isinstance(raw, str) and raw.strip():
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            raise ValueError("tools are not JSON") from None
    if raw in EMPTY_VALUES or (isinstance(raw, str) and not raw.strip()):
        return None
    tools = raw if isinstance(raw, list) else [raw]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools are not a list of objects")
    check_unicode(tools)
    schema_of = lambda tool: {key: value for key, value in tool.items() if (key, value) != ("type", "function")}
    return [tool if "name" not in tool else {"type": "function", "function": schema_of(tool)} for tool in tools]


def arguments_object(arguments: Any) -> Any:
    """The arguments of a call as a mapping, if they are the JSON text of one; others unchanged."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def drop_nulls(value: Any, deep: bool = False) -> Any:
    """A row or message without its null fields: a table has every column in every row, and every key in every message.

    deep: also in objects within the row, such as the arguments of a call and schemas of tools. In JSON lines a null there is
    a value.
    """
    if deep and isinstance(value, list):
        return [drop_nulls(element, deep) for element in value]
    if not isinstance(value, dict):
        return value
    return {key: drop_nulls(inner, deep) if deep else inner for key, inner in value.items() if inner is not None}


def unused_fields(row: dict[str, Any], used: Iterable[str]) -> frozenset[str]:
    """The names of fields that hold something and are neither used nor metadata."""
    return frozenset(key for key, value in row.items() if key not in METADATA and key not in used and value not in EMPTY_VALUES)


def unused_note(unused: Counter[str]) -> str:
    """The fields of rows that nothing reads, in a line."""
    return "fields that are not used: " + ", ".join(f"{name} ({count} rows)" for name, count in unused.most_common())


def check_unicode(value: Any) -> None:
    """Raises ValueError for a value with text that cannot be encoded, or that is nested too deeply."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise ValueError("objects that are nested too deeply") from None
