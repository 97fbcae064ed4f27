"""Token ids of a conversation and its loss mask: which of them the target would generate.

These are the assistant's content or tool calls and the token that ends its turn. They are found by comparing renderings of
growing prefixes of the conversation, not by patterns of a template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.chat.spelling import changed_message
from specdec.chat.template import PLACEHOLDERS, ChatTemplate, Message, common_prefix_length

_TAG = re.compile(r"[<\[][^<>\[\]]*[>\]]")
Span = tuple[int, int]  # from, up to and without


class UnstableTemplate(ValueError):
    """A template that renders an assistant's turn differently once later turns follow, or otherwise than decoding begins it."""


@dataclass(frozen=True)
class Rendered:
    """token_ids of a conversation; loss_mask: 1 where the target would have generated the token; num_merged: earlier answers of
    which a token of the rendering reaches over the border, so that only the tokens inside are supervised; rejected_mask: 1
    where a draft token was rejected when the conversation was made, if that is known."""

    token_ids: list[int]
    loss_mask: list[int]
    num_merged: int = field(default=0, compare=False)
    rejected_mask: list[int] | None = None

    def truncated(self, max_length: int | None) -> Rendered:
        rejected_mask = None if self.rejected_mask is None else self.rejected_mask[:max_length]
        return Rendered(self.token_ids[:max_length], self.loss_mask[:max_length], self.num_merged, rejected_mask)


@dataclass(frozen=True)
class _Turn:
    """An assistant's turn in text. prompt: what decoding begins with; text: prompt and turn; start: where in `text` the
    supervised part begins; num_tail: how many tokens of `text` come after the one that ends the turn."""

    prompt: str
    text: str
    start: int
    num_tail: int

    def tokenize(self, template: ChatTemplate) -> tuple[list[int], list[int], list[int]]:
        """Token ids of (the prompt, what the template inserts before the supervised part, that and the supervised part).

        Where a token reaches over a border that decoding has, the text behind the border is tokenized by itself.
        """
        prompt_ids = template.tokenize(self.prompt)
        joint_ids = template.tokenize(self.text)
        if joint_ids[: len(prompt_ids)] == prompt_ids:
            answer_ids = joint_ids[len(prompt_ids) :]
        else:
            answer_ids = template.tokenize(self.text[len(self.prompt) :])
        inserted_ids: list[int] = []
        if inserted := self.text[len(self.prompt) : self.start]:
            opening_ids = template.tokenize(self.text[: self.start])
            if opening_ids[: len(prompt_ids)] == prompt_ids:
                inserted_ids = opening_ids[len(prompt_ids) :]
            else:
                inserted_ids = template.tokenize(inserted)
            if answer_ids[: len(inserted_ids)] != inserted_ids:
                answer_ids = [*inserted_ids, *template.tokenize(self.text[self.start :])]
        return prompt_ids, inserted_ids, answer_ids[: len(answer_ids) - self.num_tail]

    def end(self, template: ChatTemplate) -> int:
        """Where in `text` the turn ends."""
        offsets = template.offsets(self.text)[: -self.num_tail] if self.num_tail else []
        return offsets[-1][1] if offsets else len(self.text)


def render_turns(messages: Sequence[Message], turns: list[int], template: ChatTemplate) -> Rendered:
    """Tokens and loss mask of a conversation up to the last of the assistant turns at these indices, which are supervised.

    Raises ValueError, one line, if the template does not lead to a turn, UnstableTemplate if a later turn changes one.
    """
    full_text = template.render(messages[: turns[-1] + 1])
    token_ids: list[int] = []
    token_spans: list[Span] = []  # of the supervised tokens of each turn
    text_spans: list[Span] = []  # and of the text that they were made of
    merged: set[int] = set()
    for index in turns:
        text = full_text if index == turns[-1] else template.render(messages[: index + 1])
        turn = _find_turn(messages, index, text, template, single=len(turns) == 1)
        if not full_text.startswith(text):
            raise UnstableTemplate(
                "the chat template renders an assistant turn otherwise once later turns follow; give one sample per turn"
            )
        prompt_ids, inserted_ids, answer_ids = turn.tokenize(template)
        if template.eos.intersection(answer_ids[len(inserted_ids) : -1]):
            if messages[index].get("tool_calls"):
                raise ValueError("a turn with tool calls that the chat template ends before its end")
            raise ValueError("an answer that goes on after a token that ends a generation")

        num_common = common_prefix_length(token_ids, prompt_ids)
        changed = [number for number, span in enumerate(token_spans) if span[1] > num_common]
        if changed:  # an earlier answer has other tokens as part of this prompt
            offsets = template.offsets(turn.prompt)
            for number in changed:
                token_spans[number] = _tokens_inside(token_spans[number], text_spans[number], num_common, offsets)
            merged.update(changed)
        token_spans.append((len(prompt_ids) + len(inserted_ids), len(prompt_ids) + len(answer_ids)))
        text_spans.append((turn.start, len(turn.text) if index == turns[-1] else turn.end(template)))
        token_ids = prompt_ids + answer_ids

    loss_mask = np.zeros(len(token_ids), dtype=np.int64)
    for start, end in token_spans:
        loss_mask[start:end] = 1
    return Rendered(token_ids, loss_mask.tolist(), len(merged))


def _tokens_inside(token_span: Span, text_span: Span, num_common: int, offsets: Sequence[Span]) -> Span:
    """The tokens of a prompt that lie inside an earlier answer's text; without offsets, those of the answer's tokens that come
    before index `num_common`, from which on the prompt has other tokens."""
    if not offsets:
        return token_span[0], max(token_span[0], num_common)
    inside = [i for i, (start, end) in enumerate(offsets) if text_span[0] <= start < end <= text_span[1]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _find_turn(messages: Sequence[Message], index: int, text: str, template: ChatTemplate, single: bool) -> _Turn:
    """The assistant's turn at an index.

    text: the rendering up to and with it.
    single: it makes a sample by itself, and may begin otherwise than the generation prompt, where that has a thinking block.
    """
    history = messages[:index]
    message = messages[index]
    calls = message.get("tool_calls")
    # what the template puts around a content, and behind this message's content or calls, with its other fields
    head, content_closing = template.surroundings(
        *([*history, {"role": "assistant", "content": placeholder}] for placeholder in PLACEHOLDERS)
    )
    closing = content_closing
    if set(message) - {"role", "content", "weight"}:
        _, closing = template.surroundings(*([*history, changed_message(message, other)] for other in PLACEHOLDERS))
    prompt, turn_text, start = _start_of_turn(template, history, message, head, text, closing, single)
    if calls:  # the variants may have more in common with each other than with this one, as the brackets of an empty list
        num_common = common_prefix_length(text[::-1], closing[::-1])
        rest = closing[: len(closing) - num_common]
        closing = closing[len(closing) - num_common :]
        differs = any(template.can_end_turn(token) for token in template.tokenize(rest))
    else:
        differs = not text.endswith(closing)
    if differs:
        raise UnstableTemplate("the chat template closes an answered turn otherwise than one with another content")

    closing_ids = template.tokenize(closing)
    special = [i for i, token in enumerate(closing_ids) if template.can_end_turn(token)]
    # calls are followed by what closes them; a content by its end at once, if the target's own ends are not known
    candidates = [i for nth, i in enumerate(special) if i == special[0] + nth or calls or template.knows_eos]
    ends = [i for i in candidates if closing_ids[i] in template.eos]
    if not ends and (opening := _generated_opening(messages, index, template)):
        return _Turn(prompt, turn_text + opening, start, 0)
    if not ends and calls:  # as a turn without calls ends, else what closes the calls
        content_end = [token for token in template.tokenize(content_closing) if template.can_end_turn(token)][:1]
        ends = [i for i in special if closing_ids[i] in content_end] or special[-1:]
    ends = ends or special
    if ends:  # a template may render something else there, such as a last system message
        suffix_ids = template.tokenize(template.generation_suffix(history))
        opening_ids = [token for token in suffix_ids if template.can_end_turn(token)]
        if opening_ids and opening_ids[0] in closing_ids[: ends[0]]:
            raise UnstableTemplate("the chat template puts another turn before the end of one")
        return _Turn(prompt, turn_text, start, len(closing_ids) - ends[0] - 1)
    if not turn_text.endswith(content_closing):
        raise UnstableTemplate("the chat template closes a turn with tool calls otherwise than one without")
    end = len(turn_text) - len(content_closing)
    return _Turn(prompt, turn_text[:end], start, 0)  # no token ends it: it ends with the content


def _start_of_turn(
    template: ChatTemplate,
    history: Sequence[Message],
    message: Message,
    head: str,
    text: str,
    closing: str,
    single: bool,
) -> tuple[str, str, int]:
    """(prompt, prompt and turn, where in that the supervised text begins).

    history: the messages before the turn.
    message: the turn.
    head: what the template puts in front of a content, with all that comes before it.
    text: the rendering of the conversation up to and with this turn.
    closing: the end of `text`, behind the content.
    single: as in `_find_turn`.
    """
    prompt = template.render(history, generate=True)
    calls = message.get("tool_calls")
    content = "" if calls else message["content"].strip()
    dropped = ""  # the front of the content: some templates take a thinking block away, which the target generates
    if content and text.startswith(head):
        shown = text[len(head) : len(text) - len(closing)].strip()
        front = content[: len(content) - len(shown)].strip() if content.endswith(shown) else ""
        dropped = "" if head.rstrip().endswith(front) else front
    if text.startswith(prompt) and not dropped:
        is_inserted = text.startswith(head) and head[len(prompt) :].strip()
        return prompt, text, len(head) if is_inserted else len(prompt)

    # the prompt may have a thinking block that the turn lacks: open, for the target to think, or closed, for it not to
    reference = text if calls else head
    num_common = common_prefix_length(prompt, reference)
    fork = max((tag.start() for tag in _TAG.finditer(prompt) if tag.start() <= num_common), default=0)
    fork = num_common if num_common == len(reference) else fork
    block = prompt[fork:]
    tags = _TAG.findall(block)
    suffix = template.generation_suffix(history)
    if single and dropped and not block:
        if not prompt.rstrip().endswith([dropped, *_TAG.findall(dropped)][-1]):
            return prompt, prompt + content + closing, len(prompt)
    elif single and not dropped and text.startswith(head) and suffix and head.endswith(suffix):
        return prompt, prompt + text[len(head) :], len(prompt)  # only what came before is rendered otherwise
    elif single and block.strip() and (not suffix or fork > len(prompt) - len(suffix)):
        if len(tags) < 2 and content and content.startswith(block.strip()):
            thought = content[len(block.strip()) :].removeprefix(block[len(block.rstrip()) :])
            return prompt, prompt + thought + closing, len(prompt)
        if len(tags) < 2 and dropped:
            return prompt, prompt + content + closing, len(prompt)
        start = len(head) if text.startswith(head) else fork
        if len(tags) < 2 and (calls or start == len(head)):
            return text[:start], text, start
        if (calls or start == len(head)) and not dropped and not (content and content.startswith(tags[0])):
            turn_text = prompt + text[start if block.endswith(text[fork:start]) else fork :]
            return prompt, turn_text, len(turn_text) - len(text) + start
    raise UnstableTemplate(
        "the chat template renders an answered turn otherwise than its generation prompt and the content; "
        "keep the token ids when generating, as train/prepare.py does"
    )


def _generated_opening(messages: Sequence[Message], index: int, template: ChatTemplate) -> str:
    """The text up to and with the token that opens the message after a turn, if the target generates that token to end the
    turn; else empty."""
    calls = messages[index].get("tool_calls")
    bare = {key: value for key, value in messages[index].items() if key in ("role", "content", "tool_calls")}
    if not calls:
        bare["content"] = PLACEHOLDERS[0]  # without thoughts, which may go when a turn follows
    following: Message = {"role": "user", "content": PLACEHOLDERS[1]}
    if index + 1 < len(messages):
        following = messages[index + 1]
    elif calls:
        following = {"role": "tool", "name": calls[0]["function"]["name"], "content": PLACEHOLDERS[1]}
        following |= {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
    try:
        text = template.render([*messages[:index], bare])
        continued = template.render([*messages[:index], bare, following])
    except ValueError:  # nothing may follow, so nothing opens
        return ""
    added = template.tokenizer.added_tokens_decoder
    openers = [str(added[token]) for token in template.eos if token in added]
    addition = continued[len(text) :] if continued.startswith(text) else ""
    opener = next((token for token in openers if addition.lstrip().startswith(token)), "")
    return addition[: addition.index(opener) + len(opener)]
