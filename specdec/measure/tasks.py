"""Prompts to decode: the demo set of the package, or JSON lines; conversations of several turns; and decoding them with an
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
from specdec.chat.conversation import parse_tools, unused_note
from specdec.checked import short_repr
from specdec.core import Request
from specdec.engine import Engine
from specdec.files import parse_json
from specdec.params import SamplingParams
from specdec.prompts import derived_seed, render_chat

_FIELDS = {"turns", "id", "question_id", "category", "system", "tools"}
DEMO = Path(__file__).parents[1] / "assets" / "demo.jsonl"


@dataclass(frozen=True)
class Task:
    """A conversation to decode.

    id, category: for the records.
    turns: user turns, answered one after the other.
    system: a message in front of them.
    tools: JSON text of the functions that may be called, for the chat template.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    tools: str | None = None


def load(path: Path | str, limit: int | None = None) -> list[Task]:
    """Tasks of a JSON-lines file with `turns` and, optionally, `category`, `id` (or `question_id`), `system` and `tools` (JSON
    schemas, or their JSON text). A note on stderr counts fields that nothing reads.

    limit: number of tasks, taken from the categories in turn (None: all). A malformed line is a ValueError with its number.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"task.path={short_repr(path)} is no path of a file")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"limit={short_repr(limit)}: at least 1 task is needed")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"task.path={path}: no such file")
    tasks: list[Task] = []
    ids: set[str] = set()
    unused: Counter[str] = Counter()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                task, unused_fields = _parse(line, f"{path}, line {number}", number)
                unused.update(unused_fields)
                if task.id in ids:
                    raise ValueError(f"{path}, line {number}: the id {task.id!r} has been used before; make ids unique")
                ids.add(task.id)
                tasks.append(task)
    if not tasks:
        raise ValueError(f"{path}: no tasks in the file")
    if unused and script.is_main_process():
        print(f"note: {path}: {unused_note(unused)}", file=sys.stderr)
    return tasks if limit is None else _by_category_in_turn(tasks, limit)


def _parse(line: bytes, where: str, number: int) -> tuple[Task, list[str]]:
    """The task of a line, and the fields that nothing reads."""
    row = parse_json(line, where)
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: needs 'turns', a list of non-empty user turns")
    name = row.get("id", row.get("question_id", number))
    category = row.get("category", "all")
    for key, value, kinds in (("id", name, str | int), ("category", category, str)):
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"{where}: {key}={short_repr(value)} must be text{' or a number' if key == 'id' else ''}")
    system = row.get("system")
    if not isinstance(system, str | None):
        raise ValueError(f"{where}: system={short_repr(system)} must be text")
    try:
        tools = parse_tools(row.get("tools"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    unused = sorted({key for key, value in row.items() if value is not None} - _FIELDS)
    return Task(str(name), category, tuple(turns), system or None, json.dumps(tools) if tools else None), unused


def _by_category_in_turn(tasks: list[Task], limit: int) -> list[Task]:
    """The first task of every category, then the second of every category, ..., up to limit; in the file's order."""
    count_of: dict[str, int] = defaultdict(int)
    order = []
    for place, task in enumerate(tasks):
        order.append((count_of[task.category], place))
        count_of[task.category] += 1
    return [tasks[place] for place in sorted(place for _, place in sorted(order)[:limit])]


def first_prompt_ids(tokenizer: Any, task: Task) -> list[int]:
    """Token ids of a task up to its first user turn."""
    return prompt_ids(tokenizer, list(task.turns[:1]), [], task.system, task.tools)


def check_shown(tokenizer: Any, task: Task) -> None:
    """Raise ValueError, one line, if the chat template does not show a task's system message or its tools."""
    ids = first_prompt_ids(tokenizer, task)
    for key, without in (("system", replace(task, system=None)), ("tools", replace(task, tools=None))):
        if without != task and first_prompt_ids(tokenizer, without) == ids:
            raise ValueError(f"task {task.id}: the chat template does not show its {key}; leave {key} out of the row")


def prompt_ids(
    tokenizer: Any, turns: list[str], answers: list[str], system: str | None = None, tools: str | None = None
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
    text = render_chat(tokenizer, messages, tools=schemas, add_generation_prompt=True)
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
            ids = prompt_ids(tokenizer, list(task.turns[:turn]), answers, task.system, task.tools)
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
        entries.append((task.id, task.turns, *system, *tools))
    text = json.dumps(entries)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepare(engine: Engine, tasks: list[Task], params: SamplingParams) -> None:
    """Check the tasks' first turns and reserve memory for them: errors come before anything runs."""
    tokenizer = engine.target.tokenizer
    for task in tasks:
        check_shown(tokenizer, task)
    engine.prepare(*(Request(request_id(task, 1), first_prompt_ids(tokenizer, task), params) for task in tasks))
