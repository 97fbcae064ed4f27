"""Prompts and answers as users have them: token ids, conversations, texts, and the seed of each request."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specdec import sampling
from specdec.checked import check_text, first_line, short_repr
from specdec.core import Request


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
    """The text of a conversation by the tokenizer's chat template. options: of `apply_chat_template`, such as
    `add_generation_prompt`. Raises ValueError, one line, for what is no conversation, and where the template fails."""
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
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:  # a template can raise anything
        raise ValueError(f"the chat template refuses the messages ({first_line(error)}); correct one of them") from None
    return check_text(str(text), "the conversation")


def answer_text(request: Request, tokenizer: Any) -> str:
    """The text of a finished request. The token that stopped it is left out of the text (not of the ids), as in vLLM."""
    if request.text is not None:
        return request.text
    ids = request.output_token_ids
    if request.finish_reason == "stop" and not request.params.include_stop_str_in_output:
        ids = ids[:-1]
    return str(tokenizer.decode(ids, skip_special_tokens=request.params.skip_special_tokens))


def derived_seed(seed: int, number: int) -> int:
    """The seed of request `number` of a run: distinct per request, the same in every run with that seed."""
    return int(sampling.uniforms(np.array(seed), sampling.SEED, np.array(number), 0) * 2**53)
