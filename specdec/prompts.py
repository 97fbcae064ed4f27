"""Prompts and answers as users have them: token ids, conversations, texts, and the seed of each request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch

from specdec import sampling
from specdec.chat.conversation import text_of_parts
from specdec.checked import check_text, first_line, short_repr
from specdec.core import Request
from specdec.params import SamplingParams

MAX_CHARACTER_TOKENS = 4  # bytes of a character in UTF-8
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # as tokenizers with byte fallback name them


class TextPrompt(TypedDict):
    """A prompt as text, as vLLM's class of this name."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, as vLLM's class of this name. prompt: their text, which is only passed on."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


def token_ids(values: Any, key: str) -> list[int]:
    """Token ids as a list of ints.

    values: a list, a tuple, or a one-dimensional array or tensor of integers.
    key: what they are called in error lines.

    Raises ValueError for anything that would have to be cast: text, floats, booleans.
    """
    listed = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else values
    if not isinstance(listed, list | tuple):
        raise ValueError(f"{key}={short_repr(values)} must be a list of token ids")
    ids = []
    for i, value in enumerate(listed):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{key}[{i}]={short_repr(value)} is no token id; ids are integers")
        ids.append(int(value))
    return ids


def render_chat(tokenizer: Any, messages: Any, **options: Any) -> str:
    """The text of a conversation by the tokenizer's chat template, text parts of a message joined. options: of
    `apply_chat_template`, such as `add_generation_prompt`. Raises ValueError, one line, for what is no conversation or holds
    parts that are no text, and where the template fails."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={short_repr(messages)}: a conversation is a list of {{'role': ..., 'content': ...}}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {short_repr(message)} needs a 'role', such as 'user', and 'content'")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ValueError(f"content={short_repr(content)} of a message must be text, or a list of parts")
        if content is None and message["role"] in ("user", "system"):
            raise ValueError(f"message {short_repr(message)} needs 'content'; give its text")
    joined = [m | {"content": text_of_parts(m["content"])} if isinstance(m.get("content"), list) else m for m in messages]
    try:
        text = tokenizer.apply_chat_template(joined, tokenize=False, **options)
    except Exception as error:  # a template can raise anything
        raise ValueError(f"the chat template refuses the messages ({first_line(error)}); correct one of them") from None
    return check_text(str(text), "the conversation")


def answer_text(request: Request, tokenizer: Any) -> str:
    """The text of a finished request; empty under `detokenize=False`. The token that stopped it is left out of the text (not
    of the ids), as in vLLM."""
    if not request.params.detokenize:
        return ""
    if request.text is not None:
        return request.text
    ids = request.output_token_ids
    if request.finish_reason == "stop" and not request.params.include_stop_str_in_output:
        ids = ids[:-1]
    return str(tokenizer.decode(ids, skip_special_tokens=request.params.skip_special_tokens))


def settled_text(output_token_ids: Sequence[int], params: SamplingParams, tokenizer: Any) -> str:
    """The text of an unfinished answer, without what later tokens can still change: the bytes of half a character, and what may
    become a stop string."""
    if not params.detokenize:
        return ""
    count = len(output_token_ids)
    # a run of byte tokens is read as a unit: one that makes no text turns all of them into replacement characters
    while count and BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(int(output_token_ids[count - 1])))):
        count -= 1
    text = str(tokenizer.decode(output_token_ids[:count], skip_special_tokens=params.skip_special_tokens)).rstrip("\ufffd")
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # removes a space once it knows what follows
        place = text.find(" ", max(0, len(text) - 3))
        text = text if place < 0 else text[:place]
    longest = max(map(len, params.stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in params.stop):
            return text[:-length]
    return text


def token_text(token: int, before: Sequence[int], tokenizer: Any) -> str:
    """The text of a token. One that completes a character has the character, one that does not has none.

    before: the tokens before it.
    """
    text = str(tokenizer.decode([token]))
    for count in range(1, min(len(before), MAX_CHARACTER_TOKENS - 1) + 1):
        if not text.endswith("\ufffd"):
            break
        context = list(before[-count:])
        text = str(tokenizer.decode([*context, token]))
        if not text.endswith("\ufffd"):
            text = text.removeprefix(str(tokenizer.decode(context)).rstrip("\ufffd"))
    return "" if text.endswith("\ufffd") else text


def bad_words_token_ids(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of bad words, as vLLM reads them: each without a space in front, and with one where that is as many tokens that
    begin with another one."""
    sequences = []
    for word in words:
        bare, spaced = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (word.lstrip(), f" {word.lstrip()}"))
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return sequences


def derived_seed(seed: int, number: int, answer: int = 0) -> int:
    """The seed of request `number` of a run: distinct per request, the same in every run with that seed. answer: of several
    answers to one prompt."""
    return int(sampling.uniforms(np.array(seed), sampling.SEED, np.array(number), answer) * 2**53)
