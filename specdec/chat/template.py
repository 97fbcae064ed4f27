"""A tokenizer's chat template, observed through its renderings.

What a template puts around a content, and whether it shows a field, is found by comparing renderings of messages that differ
in one place. Nothing here parses the template.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.checked import first_line

Message = dict[str, Any]

# Contents that share neither their first nor their last letter: what two renderings with them have in common is exactly what
# the template puts around a content. Plain letters, which templates that trim or split content leave alone.
PLACEHOLDERS = ("firstspecdecone", "anotherspecdectwo")
# Arguments that `training.data.load` and this module pass themselves, so that a user's template_kwargs cannot have them.
RESERVED_KWARGS = frozenset(
    (
        *("messages", "source", "tokenizer", "vocab_size", "max_length", "limit", "eos_token_ids", "template_kwargs"),
        *("split", "config", "revision", "files", "columns"),
    )
)


class TemplateRefusal(ValueError):
    """Messages that a template does not take."""


class ChatTemplate:
    """A tokenizer's chat template with its arguments.

    tools: schemas of the functions that may be called, for the template.
    eos_token_ids: what ends a generation of the target; None: the tokenizer's eos token.
    """

    def __init__(
        self,
        tokenizer: Any,
        kwargs: dict[str, Any] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        eos_token_ids: Iterable[int] | None = None,
    ):
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; give rows with prompt and response, or input_ids and loss_mask"
            )
        self.tokenizer = tokenizer
        self.kwargs = {**(kwargs or {}), **({"tools": tools} if tools else {})}
        self.knows_eos = eos_token_ids is not None
        tokenizer_eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos = frozenset(tokenizer_eos if eos_token_ids is None else eos_token_ids)

    def render(self, messages: Sequence[Message], generate: bool = False, **changes: Any) -> str:
        """The text of the messages.

        generate: with what begins an answer; changes: other arguments of the template.
        Raises ValueError if the template refuses the messages.
        """
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        arguments = {**self.kwargs, **changes}
        try:
            text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate, **arguments)
        except Exception as error:
            raise TemplateRefusal(f"the chat template refuses the messages ({first_line(error)})") from None
        return str(text)

    def generation_suffix(self, history: Sequence[Message]) -> str:
        """What the template adds for an answer to begin; empty if it adds nothing, or adds it always."""
        text = self.render(history)
        prompt = self.render(history, generate=True)
        return prompt[len(text) :] if prompt.startswith(text) else ""

    def surroundings(self, *variants: Sequence[Message]) -> tuple[str, str]:
        """(prefix, suffix) that the renderings of two message lists have in common; the lists differ in one place."""
        first, second = map(self.render, variants)
        if first == second:
            raise ValueError(f"a message of role {variants[0][-1]['role']!r} that the chat template does not show")
        suffix_length = common_prefix_length(first[::-1], second[::-1])
        return first[: common_prefix_length(first, second)], first[len(first) - suffix_length :]

    def ignores_tools(self, text: str, messages: Sequence[Message]) -> bool:
        """Whether `text`, the rendering of the messages with tools, is that without tools, too."""
        with contextlib.suppress(ValueError):
            return self.render(messages, tools=None) == text
        return False

    def shows(self, messages: list[Message], index: int, text: str, variant: Message) -> bool:
        """Whether the rendering changes from `text` (that of `messages`) if the message at an index is replaced by the variant,
        or, where the template refuses that, left out."""
        for replacement in ([variant], []):
            with contextlib.suppress(ValueError):
                return self.render([*messages[:index], *replacement, *messages[index + 1 :]]) != text
        return True

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of each token in the text; empty if the tokenizer does not give offsets."""
        if not getattr(self.tokenizer, "is_fast", False):
            return []
        return list(self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])

    def can_end_turn(self, token: int) -> bool:
        return token in self.eos or is_special(self.tokenizer, token)


def is_special(tokenizer: Any, token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or bool(added is not None and added.special)


def user_frame(tokenizer: Any) -> tuple[str, list[int]]:
    """(text in front of a first user turn, the special token that ends one, as a list of one or none).

    Raises ValueError, one line, if the template does not take or show a user turn.
    """
    template = ChatTemplate(tokenizer)
    prefix, suffix = template.surroundings(*([{"role": "user", "content": text}] for text in PLACEHOLDERS))
    return prefix, [token for token in template.tokenize(suffix) if is_special(tokenizer, token)][:1]


def token_ids_of_template(tokenizer: Any) -> list[int]:
    """Tokens that the chat template brings by itself, beside those of three placeholder messages."""
    turns = [{"role": role, "content": PLACEHOLDERS[0]} for role in ("system", "user", "assistant")]
    for messages in (turns, turns[1:]) if tokenizer.chat_template else ():
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # some templates refuse a system message
            continue
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return []


def unread_template_kwargs(tokenizer: Any, kwargs: dict[str, Any], key: str, template: str | None = None) -> list[str]:
    """The names of those arguments that a chat template does not read, each with `key` in front.

    key: the setting that holds the arguments.
    template: a template in place of the tokenizer's own.
    Raises ValueError for an argument that is not the user's to give.
    """
    parameters = {*inspect.signature(tokenizer.apply_chat_template).parameters, *RESERVED_KWARGS} - {"documents"}
    templates = tokenizer.chat_template if template is None else template
    text = "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""
    for name in kwargs:
        if not isinstance(name, str):
            raise ValueError(f"{key}: {name!r} is no name of an argument; give text")
        if name in parameters:
            raise ValueError(f"{key}: {name!r} is not an argument of the chat template's own; leave it out")
    return [f"{key}.{name}" for name in kwargs if not re.search(rf"\b{re.escape(str(name))}\b", text)]


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements two sequences begin with alike; compares by bisection, a slice at a time."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
