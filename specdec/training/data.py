"""Conversations to tokens and a loss mask; reading a training set; the draft vocabulary; which samples a step sees.

A conversation is rendered by the tokenizer's own template, as evaluation renders it, and the mask covers the tokens that the
target would generate: the assistant's content and the token that ends its turn. They are found by comparing renderings of
growing prefixes, not by patterns.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specdec.core import first_line

DEMO = Path(__file__).parents[1] / "assets" / "train.jsonl.gz"
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "model": "assistant"}
_STAND_IN = "specdec0stand0in"  # plain letters: templates that trim or split content leave it alone


@dataclass(frozen=True)
class Rendered:
    """token_ids of a conversation; loss_mask: 1 where the token is one that the target would have generated."""

    token_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class Sample:
    """A rendered conversation with a name. token_n: int64 [n]; mask_n: bool [n], as in `Rendered`; part_of: the conversation,
    where that makes several samples."""

    id: str
    token_n: np.ndarray
    mask_n: np.ndarray
    part_of: str | None = None


class UnstableTemplate(ValueError):
    """A template that renders an assistant's turn differently once later turns follow."""


def render(
    messages: Sequence[dict[str, Any]], tokenizer: Any, max_length: int | None = None, **template_kwargs: Any
) -> Rendered:
    """Tokens and loss mask of one conversation.

    messages: {"role", "content"} in order; what comes after the last assistant turn is left out. Up to each assistant turn the
    tokens are those of `apply_chat_template(messages before it, add_generation_prompt=True, **template_kwargs)`. What a
    template puts between that and the content by itself, such as an empty thinking block, is not supervised. max_length: most
    tokens; the rest is cut off, which may leave nothing supervised.
    Raises ValueError, one line, if there is no assistant turn or the template refuses the messages; UnstableTemplate if it
    renders a turn differently once later ones follow.
    """
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    token_ids, loss_mask = _render(messages, turns, tokenizer, template_kwargs)
    return Rendered(token_ids[:max_length], loss_mask[:max_length])


def _render(
    messages: Sequence[dict[str, Any]], turns: list[int], tokenizer: Any, template_kwargs: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """As `render`, supervising the assistant turns at these places only, and ending with the last of them."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; give rows with prompt and response, or input_ids and loss_mask")
    if not turns:
        raise ValueError("no assistant turn")

    def text_of(part: Sequence[dict[str, Any]], generate: bool = False) -> str:
        try:
            text = tokenizer.apply_chat_template(list(part), tokenize=False, add_generation_prompt=generate, **template_kwargs)
        except Exception as error:
            raise ValueError(f"the chat template refuses the messages ({first_line(error)})") from None
        return str(text)

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    whole = text_of(messages[: turns[-1] + 1])
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []  # of supervised tokens
    for place in turns:
        before, through = text_of(messages[:place], True), text_of(messages[: place + 1])
        # what stands in front of the content by itself, without a message's other fields, and behind it with them
        head = text_of([*messages[:place], {"role": "assistant", "content": _STAND_IN}]).rpartition(_STAND_IN)[0]
        closing = text_of([*messages[:place], {**messages[place], "content": _STAND_IN}]).rpartition(_STAND_IN)[2]
        if not (through.startswith(before) and head.startswith(before) and through.endswith(closing)):
            raise UnstableTemplate(
                "the chat template renders an answered turn otherwise than its generation prompt and the content; "
                "keep the token ids when generating, as train/prepare.py does"
            )
        if not whole.startswith(through):
            raise UnstableTemplate(
                "the chat template renders an assistant turn otherwise once later turns follow; give one sample per turn"
            )
        # the turn ends with the first special token of what closes it; if there is none, with the content
        closing_ids = ids_of(closing)
        special = [i for i, token in enumerate(closing_ids) if _is_special(tokenizer, token)]
        if not special:
            through = through[: len(through) - len(closing)]
        num_tail = len(closing_ids) - special[0] - 1 if special else 0

        prefix, joint = ids_of(before), ids_of(through)
        # a token may reach over the border that decoding has between prompt and answer: then the answer stands alone
        answer = joint[len(prefix) :] if joint[: len(prefix)] == prefix else ids_of(through[len(before) :])
        inserted: list[int] = []
        if (opening := head[len(before) :]).strip() and through.startswith(head):
            opened = ids_of(head)
            inserted = opened[len(prefix) :] if opened[: len(prefix)] == prefix else ids_of(opening)
            if answer[: len(inserted)] != inserted:  # a token reaches over this border: likewise
                answer = [*inserted, *ids_of(through[len(head) :])]
        answer = answer[: len(answer) - num_tail]

        # an earlier answer whose tokens are others as part of this prompt is history only
        common = next((i for i, (a, b) in enumerate(zip(token_ids, prefix, strict=False)) if a != b), len(token_ids))
        spans = [span for span in spans if span[1] <= common]
        spans.append((len(prefix) + len(inserted), len(prefix) + len(answer)))
        token_ids = prefix + answer

    loss_mask = np.zeros(len(token_ids), dtype=np.int64)
    for first, last in spans:
        loss_mask[first:last] = 1
    return token_ids, loss_mask.tolist()


def user_frame(tokenizer: Any) -> tuple[str, list[int]]:
    """What the chat template puts in front of a first user turn, and the special token that ends one (a list: there may be
    none)."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _STAND_IN}], tokenize=False)
    before, _, closing = text.rpartition(_STAND_IN)
    ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
    return before, [token for token in ids if _is_special(tokenizer, token)][:1]


def _is_special(tokenizer: Any, token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or bool(added is not None and added.special)


# ---------------------------------------------------------------- reading


@dataclass
class Loaded:
    """What a source held. skipped: how many rows were left out, by reason; listed: where they were."""

    samples: list[Sample] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    listed: dict[str, list[str]] = field(default_factory=dict)
    header: dict[str, Any] | None = None

    def skip(self, where: str, reason: str) -> None:
        self.skipped[reason] += 1
        self.listed.setdefault(reason, []).append(where)

    @property
    def said(self) -> str:
        """The rows that were left out, in a line; empty if there are none."""
        kinds = [f"{count} {reason} (first: {self.listed[reason][0]})" for reason, count in self.skipped.most_common()]
        return "; ".join(kinds)


def load(
    source: str | Path,
    tokenizer: Any,
    vocab_size: int,
    max_length: int | None = None,
    limit: int | None = None,
    split: str = "train",
    **template_kwargs: Any,
) -> Loaded:
    """Read a training set: a JSON-lines file (.jsonl, .jsonl.gz), a datasets directory, or a hub id.

    A row is a conversation (`conversations` or `messages`, with role/content or from/value), or `prompt` and `response`, or
    `input_ids` and `loss_mask`, or plain `text`, of which every token is supervised; `id` is optional. A row that cannot be
    used is skipped and counted. A conversation whose template changes earlier turns becomes one sample per assistant turn.
    limit: most rows to read. Raises ValueError, one line, if nothing usable is left.
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
            parts = _rendered(row, tokenizer, vocab_size, max_length, template_kwargs)
        except ValueError as error:
            loaded.skip(where, str(error))
            continue
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
    loaded = load(
        given["path"] or DEMO,
        target.tokenizer,
        target.vocab_size,
        min(given["max_length"] or most, most),
        given["limit"],
        given["split"],
        **(given["template_kwargs"] or {}),
    )
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
        yield f"row {number}", _given(row)


def _given(row: Any) -> Any:
    """A table has every column in every row, and every key in every message; null says that it was not given."""
    return {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else row


def messages_of(row: Any) -> list[dict[str, Any]]:
    """The conversation of a row, as role/content. Raises ValueError with the reason if there is none."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    given = row.get("messages", row.get("conversations"))
    if given is None:
        prompt, response = row.get("prompt"), row.get("response")
        if prompt is None or response is None:
            raise ValueError("no messages, conversations, prompt and response, input_ids and loss_mask, or text")
        given = [*(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])]
        given += response if isinstance(response, list) else [{"role": "assistant", "content": response}]
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise ValueError("messages are not a list of objects")
    messages = []
    for message in map(_given, given):
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a message without role and text content")
        try:
            (role + content).encode()
        except UnicodeEncodeError:
            raise ValueError("a message with half of a surrogate pair, which is no text") from None
        messages.append({**message, "role": _ROLES.get(role, role), "content": content})
    return messages


def _rendered(row: Any, tokenizer: Any, vocab_size: int, max_length: int | None, kwargs: dict[str, Any]) -> list[Rendered]:
    if isinstance(row, dict) and "input_ids" in row:
        return [_pretokenized(row, vocab_size, max_length)]
    if isinstance(row, dict) and isinstance(row.get("text"), str) and not {"messages", "conversations", "prompt"} & set(row):
        ids = tokenizer(row["text"])["input_ids"][:max_length]
        return [Rendered(ids, [1] * len(ids))]
    messages = messages_of(row)
    if not tokenizer.chat_template and isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        prefix, answer = (
            tokenizer(row["prompt"])["input_ids"],
            tokenizer(row["response"], add_special_tokens=False)["input_ids"],
        )
        answer = [*answer, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        return [Rendered([*prefix, *answer][:max_length], ([0] * len(prefix) + [1] * len(answer))[:max_length])]
    try:
        return [render(messages, tokenizer, max_length, **kwargs)]
    except UnstableTemplate:
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) == 1:
            raise
        parts = [_render(messages, [place], tokenizer, kwargs) for place in turns]
        return [Rendered(ids[:max_length], mask[:max_length]) for ids, mask in parts]


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
    turns = [{"role": role, "content": _STAND_IN} for role in ("system", "user", "assistant")]
    for messages in (turns, turns[1:]) if tokenizer.chat_template else ():
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # some know no system turn
            continue
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return []


def picks(step: int, num_samples: int, batch_size: int, seed: int) -> list[int]:
    """The samples of optimiser step `step` (from 0): a function of these numbers alone, so there is no state to save.

    Every epoch runs over all samples in an order of its own.
    """
    places = range(step * batch_size, (step + 1) * batch_size)
    return [int(_order(seed, place // num_samples, num_samples)[place % num_samples]) for place in places]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)
