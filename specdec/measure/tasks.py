"""Prompts to decode: the demo set of the package, or a file's; conversations of several turns; and decoding them with an
engine."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec import script
from specdec.chat.conversation import drop_nulls, parse_message, parse_tools, prompt_of, unused_fields, unused_note
from specdec.checked import short_repr
from specdec.core import Request
from specdec.engine import Engine
from specdec.files import ASSETS
from specdec.params import SamplingParams
from specdec.prompts import derived_seed, render_chat
from specdec.rows import local_rows

FIELDS = frozenset(("id", "question_id", "category", "system", "tools"))
# Columns that hold prompts, the first that a row has; `instruction` may have an `input`.
PROMPTS = ("turns", "messages", "conversations", "prompt", "question", "instruction")
DEMO = ASSETS / "demo.jsonl"


@dataclass(frozen=True)
class Task:
    """A conversation to decode.

    id, category: for the records.
    turns: user turns, answered one after the other.
    system: a message in front of them.
    tools: JSON text of the functions that may be called, for the chat template.
    thinking: `enable_thinking` of the chat template; None: the template's default.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    tools: str | None = None
    thinking: bool | None = None


def load(path: Path | str, limit: int | None = None, thinking: bool | None = None) -> list[Task]:
    """Tasks of a file: JSON lines, a JSON array, or Parquet. A row has `turns`, or one of the other columns of PROMPTS, and,
    optionally, `category`, `id` (or `question_id`), `system` and `tools` (JSON schemas, or their JSON text). A note on stderr
    counts fields that nothing reads.

    limit: number of tasks, taken from the categories in turn (None: all).
    thinking: of the tasks.

    A malformed row is a ValueError with its place.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"task.path={short_repr(path)} is no path of a file")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"limit={short_repr(limit)}: at least 1 task is needed")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"task.path={path}: no such file")
    tasks: dict[str, Task] = {}
    unused: Counter[str] = Counter()
    for where, row in local_rows(path, "task.path", None):
        task, unused_columns = parse_row(row, f"{path}, {where}", int(where.split()[-1]))
        add(tasks, replace(task, thinking=thinking), f"{path}, {where}")
        unused.update(unused_columns)
    if not tasks:
        raise ValueError(f"{path}: no tasks in the file")
    note_unused(unused, str(path))
    return limited(list(tasks.values()), limit)


def add(tasks: dict[str, Task], task: Task, where: str) -> None:
    """Add a task under its id. Raises ValueError, which begins with `where`, if the id is there already."""
    if task.id in tasks:
        raise ValueError(f"{where}: the id {task.id!r} has been used before; make ids unique")
    tasks[task.id] = task


def note_unused(unused: Counter[str], source: str) -> None:
    """A note on stderr with the columns of a source that nothing reads."""
    if unused and script.is_main_process():
        print(f"note: {source}: {unused_note(unused)}", file=sys.stderr)


def parse_row(row: Any, where: str, number: int) -> tuple[Task, list[str]]:
    """The task of a row, and its columns that nothing reads. where, number: of the row, for errors and as its id."""
    row = drop_nulls(row) if isinstance(row, dict) else {}
    try:
        turns, system, used, unused = _turns(row)
        tools = parse_tools(row.get("tools"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: needs 'turns', a list of non-empty user turns, or one of {', '.join(PROMPTS[1:])}")
    name = row.get("id", row.get("question_id", number))
    category = row.get("category", "all")
    for key, value, kinds in (("id", name, str | int), ("category", category, str)):
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"{where}: {key}={short_repr(value)} must be text{' or a number' if key == 'id' else ''}")
    if not isinstance(system, str | None):
        raise ValueError(f"{where}: system={short_repr(system)} must be text")
    task = Task(str(name), category, tuple(turns), system or None, json.dumps(tools) if tools else None)
    return task, sorted(set(row) - FIELDS - used | unused)


def _turns(row: dict[str, Any]) -> tuple[Any, Any, set[str], set[str]]:
    """(user turns, system message, names of the columns that hold them, names of what is not used of messages), unchecked.
    Raises ValueError with the reason for a message that would be lost."""
    system = row.get("system")
    column = next((name for name in PROMPTS if name in row), "")
    value = row.get(column)
    if column in ("prompt", "question", "instruction"):
        prompt, columns = prompt_of(row)
        if prompt is not None:
            return [prompt], system, columns, set()
    if column == "turns" or not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return value, system, {column}, set()
    turns = []
    unused: set[str] = set()
    for place, message in enumerate(map(parse_message, value)):
        if message["role"] == "system" and place == 0 and system in (None, message["content"]):
            system = message["content"]
        elif message["role"] == "user":
            turns.append(message["content"])
        elif message["role"] == "assistant":  # the target gives its own answer
            unused.add(f"answers in {column}")
            continue
        else:
            raise ValueError(f"a message of role {message['role']!r} between the turns, which would be lost")
        unused |= {f"{column}.{key}" for key in unused_fields(message, ("role", "content"))}
    return turns, system, {column}, unused


def limited(tasks: list[Task], limit: int | None) -> list[Task]:
    """The first task of every category, then the second of every category, ..., up to limit (None: all); in their order."""
    count_of: dict[str, int] = defaultdict(int)
    order = []
    for place, task in enumerate(tasks):
        order.append((count_of[task.category], place))
        count_of[task.category] += 1
    return [tasks[place] for place in sorted(place for _, place in sorted(order)[:limit])]


def first_prompt_ids(tokenizer: Any, task: Task) -> list[int]:
    """Token ids of a task up to its first user turn."""
    return prompt_ids(tokenizer, list(task.turns[:1]), [], task.system, task.tools, task.thinking)


def check_shown(tokenizer: Any, task: Task) -> None:
    """Raise ValueError, one line, if the chat template does not show a task's system message or its tools, or cannot think
    where the task asks for it. A template that cannot think needs no switch for it."""
    ids = first_prompt_ids(tokenizer, task)
    if task.thinking and first_prompt_ids(tokenizer, replace(task, thinking=False)) == ids:
        raise ValueError("task.thinking=true: the chat template has no enable_thinking; leave it out")
    for key, without in (("system", replace(task, system=None)), ("tools", replace(task, tools=None))):
        if without != task and first_prompt_ids(tokenizer, without) == ids:
            raise ValueError(f"task {task.id}: the chat template does not show its {key}; leave {key} out of the row")


def prompt_ids(
    tokenizer: Any,
    turns: list[str],
    answers: list[str],
    system: str | None = None,
    tools: str | None = None,
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of a conversation up to its last user turn: by the chat template if there is one, else as plain text."""
    if not tokenizer.chat_template:
        text = f"{system}\n\n" if system else ""
        text += "".join(f"{turn}{answer}\n\n" for turn, answer in zip(turns, answers, strict=False)) + turns[-1]
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "system", "content": system}] if system else []
    for turn, answer in zip(turns, [*answers, None], strict=True):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    schemas = json.loads(tools) if tools else None
    options = {} if thinking is None else {"enable_thinking": thinking}
    text = render_chat(tokenizer, messages, tools=schemas, add_generation_prompt=True, **options)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(
    engine: Engine, tasks: list[Task], params: SamplingParams, seed: int, answered: dict[str, list[int]] | None = None
) -> Iterator[tuple[Task, int, Request]]:
    """Decode every turn of every task; yields (task, turn number from 1, request) as each finishes.

    A request's id is the task's id and the turn; its seed depends on these and `seed` only, not on which other tasks there are.

    engine: decodes.
    tasks: to decode, in this order.
    params, seed: of the requests.
    answered: output tokens of requests that an earlier run finished, by request id; they are not decoded again.
    """
    tokenizer = engine.target.tokenizer
    answered = dict(answered or {})
    origin: dict[str, tuple[Task, int]] = {}  # task and turn by request id

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    def next_request(task: Task) -> Request | None:
        """The first turn without an answer."""
        answers: list[str] = []
        for turn in range(1, len(task.turns) + 1):
            name = request_id(task, turn)
            if name in answered:
                answers.append(text_of(answered[name]))
                continue
            ids = prompt_ids(tokenizer, list(task.turns[:turn]), answers, task.system, task.tools, task.thinking)
            origin[name] = (task, turn)
            request_seed = derived_seed(seed, zlib.crc32(name.encode())) if params.seed is None else params.seed
            return Request(name, ids, params, request_seed, task.category)
        return None

    def fits(request: Request | None) -> bool:
        """Whether the engine can decode it. A later turn has the answers before it in its prompt, so its length is known only
        now; one that is too long ends the conversation."""
        if request is None:
            return False
        try:
            engine.check(request)
        except ValueError as error:
            if origin[request.id][1] == 1:
                raise
            if engine.target.processes.is_main:
                print(f"note: {error}; the conversation ends here", file=sys.stderr)
            return False
        return True

    first = [request for task in tasks if fits(request := next_request(task)) and request]
    for request in engine.run(first):
        task, turn = origin.pop(request.id)
        answered[request.id] = request.output_token_ids
        if turn < len(task.turns):
            following = next_request(task)
            if following is not None and fits(following):
                engine.add(following)
        yield task, turn, request


def groups(tasks: list[Task], max_batch_size: int) -> list[list[Task]]:
    """The tasks in pieces that methods decode in turn, so that a slow moment of the machine hits them alike. A piece is one
    task, or several times as many as there are rows, so that batches stay full for most of it."""
    size = 1 if max_batch_size == 1 else 4 * max_batch_size
    return [tasks[i : i + size] for i in range(0, len(tasks), size)]


def request_id(task: Task, turn: int) -> str:
    return f"{task.id}/{turn}"


def prompt_texts(tasks: list[Task]) -> dict[str, str]:
    """The last user turn of every request, by its id."""
    return {request_id(task, turn): text for task in tasks for turn, text in enumerate(task.turns, 1)}


def fingerprint(tasks: list[Task]) -> str:
    """A hash of the prompts, to see whether two runs had the same."""
    entries = []
    for task in tasks:
        system = (task.system,) if task.system else ()
        tools = ("tools", task.tools) if task.tools else ()
        thinking = () if task.thinking is None else ("thinking", task.thinking)
        entries.append((task.id, task.turns, *system, *tools, *thinking))
    text = json.dumps(entries)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepare(engine: Engine, tasks: list[Task], params: SamplingParams) -> None:
    """Check the tasks' first turns and reserve memory for them: errors come before anything runs."""
    tokenizer = engine.target.tokenizer
    for task in tasks:
        check_shown(tokenizer, task)
    engine.prepare(*(Request(request_id(task, 1), first_prompt_ids(tokenizer, task), params) for task in tasks))
