"""Training sets: rows of files and data sets to samples of tokens and a loss mask.

A conversation is rendered by the tokenizer's own template, as evaluation renders it, and the mask covers the tokens that the
target would generate (`specdec.chat`). A row where that is not possible, or of which the template does not show a message or a
call, is left out and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specdec.chat.answers import Rendered, UnstableTemplate, render_turns
from specdec.chat.conversation import (
    METADATA,
    Conversation,
    check_unicode,
    conversation_of,
    drop_nulls,
    parse_message,
    parse_tools,
    unused_fields,
    unused_note,
)
from specdec.chat.spelling import spelled_for, supervised_turns
from specdec.chat.template import ChatTemplate, Message, unread_template_kwargs
from specdec.checked import short_repr
from specdec.drafter.batch import Sample
from specdec.files import ASSETS
from specdec.model.target import CausalLM
from specdec.rows import hub_rows, local_rows

DEMO = ASSETS / "train.jsonl.gz"
PRETOKENIZED = frozenset(("input_ids", "loss_mask", "rejected_mask"))
# Columns that input_ids are tokenized from: of a row with input_ids they are not unused.
TEXT_COLUMNS = frozenset(("messages", "conversations", "prompt", "response", "text", "tools", "functions", "system"))


@dataclass
class Loaded:
    """What a source holds.

    skipped: how many rows are left out, by reason; skipped_at: where they are.
    unused: how many rows have a field that nothing reads.
    num_merged: as in `Rendered`.
    is_retokenized: its tokens are not the target's tokenizer's, so its conversations were taken instead.
    """

    samples: list[Sample] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_at: dict[str, list[str]] = field(default_factory=dict)
    header: dict[str, Any] | None = None
    unused: Counter[str] = field(default_factory=Counter)
    num_merged: int = 0
    is_retokenized: bool = False

    def skip(self, where: str, reason: str) -> None:
        self.skipped[reason] += 1
        self.skipped_at.setdefault(reason, []).append(where)

    @property
    def skipped_note(self) -> str:
        """The rows that are left out, in a line; empty if there are none."""
        kinds = [f"{count} {reason} (first: {self.skipped_at[reason][0]})" for reason, count in self.skipped.most_common()]
        return "; ".join(kinds)

    @property
    def notes(self) -> list[str]:
        """A line for each kind of thing in the source that does not train."""
        notes = []
        if self.is_retokenized:
            notes.append("the tokens of the data are another tokenizer's, so its conversations were tokenized again")
        if self.skipped:
            notes.append(f"{self.skipped.total()} rows were left out: {self.skipped_note}")
        if self.unused:
            notes.append(unused_note(self.unused))
        if self.num_merged:
            notes.append(
                f"{self.num_merged} earlier answers have a token that reaches over their border, which is not supervised; "
                "those inside are"
            )
        return notes


def render(
    messages: Sequence[Message],
    tokenizer: Any,
    max_length: int | None = None,
    *,
    tools: Any = None,
    eos_token_ids: Iterable[int] | None = None,
    **template_kwargs: Any,
) -> Rendered:
    """Tokens and loss mask of one conversation.

    messages: {"role", "content"} in order, an assistant's with "tool_calls" beside or instead of content; an assistant's turn
        of "weight" 0 is not supervised, and what comes after the last supervised turn is left out.
    max_length: most tokens; the rest is cut off, which may leave nothing supervised.
    tools: JSON schemas of functions for the template, or their JSON text.
    eos_token_ids: what ends a generation of the target; None: the tokenizer's eos token.
    template_kwargs: further arguments of the template.

    Up to each supervised turn the tokens are those of `apply_chat_template(messages before it, add_generation_prompt=True,
    **template_kwargs)`; only where that opens a thinking block, and the one answer has none, the turn begins as the template
    begins it. What a template puts in front of the content by itself, such as an empty thinking block, is not supervised.

    Raises ValueError, one line, if there is no turn to supervise, or the template refuses the messages or does not show one;
    UnstableTemplate if it renders a turn differently once later ones follow.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages={short_repr(messages)} are not a list of objects")
    conversation = Conversation([parse_message(message) for message in messages], parse_tools(tools))
    template = ChatTemplate(tokenizer, template_kwargs, tools=conversation.tools, eos_token_ids=eos_token_ids)
    messages = spelled_for(conversation, template).messages
    return render_turns(messages, supervised_turns(messages), template).truncated(max_length)


def load(
    source: str | Path,
    tokenizer: Any,
    vocab_size: int,
    max_length: int | None = None,
    limit: int | None = None,
    split: str = "train",
    *,
    config: str | None = None,
    revision: str | None = None,
    files: Sequence[str] = (),
    columns: Sequence[str] = (),
    eos_token_ids: Iterable[int] | None = None,
    **template_kwargs: Any,
) -> Loaded:
    """Read a training set.

    source: a file (JSON lines, a JSON array, Parquet), a directory of such files, a saved data set, or a hub id.
    vocab_size: of the target; rows with other token ids are skipped.
    max_length: most tokens of a sample.
    limit: most rows to read.
    split, config, revision: of a data set.
    files: of a hub's data set, in place of a split.
    columns: the only ones that are read; empty: all.
    eos_token_ids, template_kwargs: as in `render`.

    A row is a conversation (`conversations` or `messages`, with role/content or from/value), or `prompt` and `response`, or
    `instruction`, `input` and `output` (Alpaca), or `input_ids`, `loss_mask` and perhaps `rejected_mask`, or plain `text`, of
    which every token is supervised; `id` is optional. A conversation may have `tools` (JSON schemas, or their JSON text) and
    `system`, a message in front. A row that cannot be used is skipped and counted, and so is a field that nothing reads. A
    conversation whose template changes earlier turns, or begins a turn otherwise than decoding, becomes one sample per
    assistant turn.

    Raises ValueError, one line, if nothing usable is left.
    """
    if max_length is not None and max_length < 3:
        raise ValueError(f"data.max_length={max_length}: at least 3 tokens are needed to supervise one")
    if limit is not None and limit < 1:
        raise ValueError(f"data.limit={limit}: at least 1 row is needed")
    loaded = Loaded()
    ids = UniqueIds()
    num_rows = 0
    for where, row in rows(source, split, config, revision, files, columns):
        if num_rows == limit:
            break
        if isinstance(row, dict) and set(row) == {"header"} and loaded.header is None:
            loaded.header = row["header"]
            continue
        num_rows += 1
        if num_rows == 1 and loaded.header is not None:
            loaded.is_retokenized = not _reads(tokenizer, row)
        if loaded.is_retokenized and isinstance(row, dict):
            row = {key: value for key, value in row.items() if key not in PRETOKENIZED}
        try:
            rendered, unused = _rendered_row(row, tokenizer, vocab_size, max_length, eos_token_ids, template_kwargs)
        except ValueError as error:
            loaded.skip(where, str(error))
            continue
        loaded.unused.update(sorted(unused))
        loaded.num_merged += sum(part.num_merged for part in rendered)
        name = str(row.get("id", row.get("conversation_id", where)))
        for number, part in enumerate(rendered, 1):
            if max(part.token_ids, default=0) >= vocab_size:
                loaded.skip(where, f"text with tokens that are not token ids of the target (0..{vocab_size - 1})")
                continue
            mask_n = np.array(part.loss_mask, dtype=bool)
            if not mask_n[2:].any():
                loaded.skip(where, "nothing supervised" + (f" within max_length={max_length}" if max_length else ""))
                continue
            id = ids.unique(f"{name}/{number}" if len(rendered) > 1 else name)
            part_of = where if len(rendered) > 1 else None
            rejected_n = None if part.rejected_mask is None else np.array(part.rejected_mask, dtype=bool)
            loaded.samples.append(Sample(id, np.array(part.token_ids, dtype=np.int64), mask_n, part_of, rejected_n))
    if not loaded.samples:
        raise ValueError(f"{source}: no row can be trained on ({loaded.skipped_note or 'it is empty'})")
    return loaded


class UniqueIds:
    """Ids that occur once: `a`, `a#2`, `a#3` for rows that are all called `a`."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.count: Counter[str] = Counter()

    def unique(self, base: str) -> str:
        id = base
        while id in self.used:  # a row may also be called `a#2` by itself
            self.count[base] += 1
            id = f"{base}#{self.count[base] + 1}"
        self.used.add(id)
        return id


def load_for(
    target: CausalLM,
    path: str | Path | None = None,
    *,
    max_length: int | None = None,
    limit: int | None = None,
    split: str = "train",
    config: str | None = None,
    revision: str | None = None,
    files: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    supervise: str = "generated",
    template_kwargs: dict[str, Any] | None = None,
) -> Loaded:
    """`load` for a target, with the keys of the `data` group; no sample is longer than the target can see.

    path: the source; None: the demo data.
    supervise: `generated` (what the target would generate), or `all` tokens.
    max_length, limit, split, config, revision, files, columns, template_kwargs: as in `load`.
    """
    if supervise not in ("generated", "all"):
        raise ValueError(f"data.supervise={supervise}: use generated (what the target would generate) or all (every token)")
    template_kwargs = template_kwargs or {}
    unread = unread_template_kwargs(target.tokenizer, template_kwargs, "data.template_kwargs")
    loaded = load(
        path or DEMO,
        target.tokenizer,
        target.vocab_size,
        target.max_model_len if max_length is None else min(max_length, target.max_model_len),
        limit,
        split,
        config=config,
        revision=revision,
        files=files or (),
        columns=columns or (),
        eos_token_ids=target.eos_token_ids,
        **template_kwargs,
    )
    loaded.unused.update(dict.fromkeys(unread, len(loaded.samples)))
    if supervise == "all":
        loaded.samples = [replace(sample, mask_n=np.ones_like(sample.mask_n)) for sample in loaded.samples]
    return loaded


def rows(
    source: str | Path,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    files: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> Iterator[tuple[str, Any]]:
    """(where, row) of everything in the source; a line that is not JSON comes as None. Arguments as in `load`."""
    path = Path(source).expanduser()
    if path.exists():
        all_rows = local_rows(path, "data.path", split, config, files, columns, _json_or_none)
    elif path.suffix in (".jsonl", ".json", ".gz", ".parquet") or str(source).count("/") != 1:
        raise ValueError(f"data.path={source}: no such file or directory, and not a hub id (org/name)")
    else:
        all_rows = _hub_rows(str(source), split, config, revision, files, columns, _json_or_none)
    is_first = True
    for where, row in all_rows:
        row = drop_nulls(row)
        if columns and isinstance(row, dict):
            if is_first and not row.keys() & set(columns):
                present = ", ".join(row) or "no columns"
                raise ValueError(
                    f"{source}, {where}: no column {' or '.join(columns)}; it has {present} (data=jsonl reads other forms)"
                )
            row = {name: value for name, value in row.items() if name in columns or name in METADATA}
        is_first = False
        yield where, row


def _hub_rows(hub_id: str, *arguments: Any) -> Iterator[tuple[str, Any]]:
    """Of a data set of the hub; arguments as in `hub_rows`."""
    try:
        yield from hub_rows(hub_id, *arguments)
    except ValueError as error:
        raise ValueError(f"data.path={hub_id}: {error}; give data.path=, a local copy with the same columns") from None


def _json_or_none(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _rendered_row(
    row: Any,
    tokenizer: Any,
    vocab_size: int,
    max_length: int | None,
    eos_token_ids: Iterable[int] | None,
    template_kwargs: dict[str, Any],
) -> tuple[list[Rendered], frozenset[str]]:
    """(the samples of a row, its fields that nothing reads); arguments as in `load`."""
    if isinstance(row, dict):
        check_unicode([row.get(key) for key in ("id", "conversation_id", "text")])
    if isinstance(row, dict) and "input_ids" in row:
        return [_pretokenized(row, vocab_size, max_length)], unused_fields(row, PRETOKENIZED | TEXT_COLUMNS)
    if isinstance(row, dict) and isinstance(row.get("text"), str) and not {"messages", "conversations", "prompt"} & set(row):
        ids = tokenizer(row["text"])["input_ids"][:max_length]
        return [Rendered(ids, [1] * len(ids))], unused_fields(row, {"text"})
    conversation = conversation_of(row)
    if not tokenizer.chat_template and isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        conversation = conversation.with_unused(["tools"] if conversation.tools else [])
        return [_plain_pair(conversation.messages, tokenizer).truncated(max_length)], conversation.unused
    template = ChatTemplate(tokenizer, template_kwargs, tools=conversation.tools, eos_token_ids=eos_token_ids)
    conversation = spelled_for(conversation, template)
    turns = supervised_turns(conversation.messages)
    try:
        rendered = [render_turns(conversation.messages, turns, template)]
    except UnstableTemplate:
        if len(turns) == 1:
            raise
        rendered = [render_turns(conversation.messages, [index], template) for index in turns]
    return [part.truncated(max_length) for part in rendered], conversation.unused


def _reads(tokenizer: Any, row: Any) -> bool:
    """Whether the token ids of a row that train/prepare.py wrote are this tokenizer's: they hold what its messages say."""
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        return True
    try:
        text = tokenizer.decode(row["input_ids"])
        return any(message["content"].strip() in text for message in row["messages"] if message.get("content"))
    except Exception:  # whatever a tokenizer does with ids that it does not have
        return False


def _plain_pair(messages: Sequence[Message], tokenizer: Any) -> Rendered:
    """A prompt, perhaps with a system message, and its response, for a tokenizer without a chat template."""
    *prompt, response = (message["content"] for message in messages)
    prompt_ids = list(tokenizer("\n\n".join(prompt))["input_ids"])
    answer_ids = list(tokenizer(response, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        answer_ids.append(tokenizer.eos_token_id)
    return Rendered(prompt_ids + answer_ids, [0] * len(prompt_ids) + [1] * len(answer_ids))


def _pretokenized(row: dict[str, Any], vocab_size: int, max_length: int | None) -> Rendered:
    ids = row["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ValueError(f"input_ids are not token ids of the target (0..{vocab_size - 1})")
    masks = {"loss_mask": row.get("loss_mask"), "rejected_mask": row.get("rejected_mask", [0] * len(ids))}
    for key, mask in masks.items():
        if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
            raise ValueError(f"{key} is not a list of 0 and 1, as long as input_ids")
    loss_mask, rejected_mask = ([int(value) for value in mask] for mask in masks.values())
    return Rendered(ids, loss_mask, rejected_mask=rejected_mask if "rejected_mask" in row else None).truncated(max_length)
