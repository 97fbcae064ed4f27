"""Data sets as tasks, by what a file of conf/task/ declares: where the rows come from, and which columns make a prompt."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from specdec.checked import Checked, nearest, short_repr
from specdec.measure import tasks
from specdec.measure.tasks import Task
from specdec.rows import hub_rows, local_rows

SHUFFLE_SEED = 980406  # DeepSpec's, for which rows a style with num_rows takes


class Conditional(Checked):
    """A part of a template that depends on whether a column is empty."""

    what: ClassVar[str] = "part"

    column: str
    filled: str = ""
    empty: str = ""


class Style(Checked):
    """How a paper makes prompts of rows, and how many rows it takes.

    prompt: a template of the user turn in which {column} is a column's text; or a list of parts, some of which may be
        `Conditional`.
    turns: in place of a template: the column with all user turns.
    num_turns: of these, the first so many; None: all.
    num_rows: so many rows at random, always the same; None: all.
    """

    what: ClassVar[str] = "style key"

    prompt: str | list[str | Conditional] | None = None
    turns: str | None = None
    num_turns: int | None = Field(None, ge=1)
    num_rows: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _has_one(self) -> Style:
        if (self.prompt is None) == (self.turns is None):
            raise ValueError("a style of a task has either prompt (a template) or turns (a column)")
        return self

    def turns_of(self, row: dict[str, Any], where: str) -> tuple[str, ...]:
        """The user turns of a row. Raises ValueError, one line, for a column that is not there or holds something else."""
        if self.turns is not None:
            turns = _column(row, self.turns, where)
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
                raise ValueError(f"{where}: {self.turns}={short_repr(turns)} must be a list of non-empty user turns")
            return tuple(turns[: self.num_turns])
        parts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        text = "".join(_filled(part, row, where) for part in parts if part is not None)
        if not text.strip():
            raise ValueError(f"{where}: its prompt is empty; take the row out")
        return (text,)


class TaskSet(Checked):
    """The rows of a data set as tasks.

    path: a local copy with the same columns; None: the hub.
    hub_id, config, split, revision: of the hub's data set.
    files: its files to read in place of a split; of no hub_id, their addresses.
    id, category: columns; None: the number of the row, and the name of the task.
    system: a message in front of every prompt.
    thinking: `enable_thinking` of the chat template; None: the template's default.
    style: one of styles.
    placeholder: text in place of prompts that the data set does not hold itself.
    """

    what: ClassVar[str] = "task key"

    name: str
    path: str | None = None
    hub_id: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    files: list[str] | None = None
    id: str | None = None
    category: str | None = None
    system: str | None = None
    thinking: bool | None = None
    style: str | None = None
    styles: dict[str, Style] | None = None
    placeholder: str | None = None

    @model_validator(mode="after")
    def _has_the_style(self) -> TaskSet:
        if self.styles is None and (self.hub_id or self.files):
            raise ValueError(f"task.styles=null: {self.name} needs a style, which says how its rows become prompts")
        if self.styles is not None and self.style not in self.styles:
            raise ValueError(f"task.style={self.style}: {self.name} has no such style; {nearest(str(self.style), self.styles)}")
        return self

    def load(self, limit: int | None = None) -> list[Task]:
        """The tasks of the style's rows, at most `limit`, taken from the categories in turn. Raises ValueError, one line."""
        assert self.styles is not None
        assert self.style is not None
        style = self.styles[self.style]
        source = self.path or self.hub_id or self.name
        common: dict[str, Any] = {"thinking": self.thinking} | ({} if self.system is None else {"system": self.system})
        all_tasks: dict[str, Task] = {}
        unused: Counter[str] = Counter()
        for number, (where, row) in enumerate(self._rows()):
            if not isinstance(row, dict):
                raise ValueError(f"{source}, {where}: no object with columns, but {short_repr(row)}")
            if self.path is not None and "turns" in row and style.turns != "turns":  # a paper's own file: prompts already
                task, unused_columns = tasks.parse_row(row, f"{source}, {where}", number)
                task = replace(task, turns=task.turns[: style.num_turns])
                unused.update(unused_columns)
            else:
                task = self._task(row, style, f"{source}, {where}", number)
            if self.placeholder is not None and any(self.placeholder in turn for turn in task.turns):
                raise ValueError(f"{source}, {where}: a placeholder, no prompt; fill the set with its authors' script first")
            tasks.add(all_tasks, replace(task, **common), f"{source}, {where}")
        if not all_tasks:
            raise ValueError(f"{source}: no rows")
        tasks.note_unused(unused, source)
        chosen = list(all_tasks.values())
        if style.num_rows is not None and style.num_rows < len(chosen):
            random.Random(SHUFFLE_SEED).shuffle(chosen)
            chosen = chosen[: style.num_rows]
        return tasks.limited(chosen, limit)

    def _rows(self) -> Iterator[tuple[str, Any]]:
        files = self.files or ()
        if self.path is not None:
            yield from local_rows(Path(self.path).expanduser(), "task.path", self.split, self.config, files)
            return
        if self.hub_id is None and self.files is None:
            raise ValueError(f"task={self.name} has no source of its own; give task.path=, a file or directory with its rows")
        try:
            yield from hub_rows(self.hub_id, self.split or "train", self.config, self.revision, files)
        except ValueError as error:
            fix = "without a network give task.path=, a file or directory with the same columns"
            raise ValueError(f"task={self.name}: {error}; {fix}") from None

    def _task(self, row: dict[str, Any], style: Style, where: str, number: int) -> Task:
        id = number if self.id is None else _column(row, self.id, where)
        category = None if self.category is None else _column(row, self.category, where)
        return Task(str(id), self.name if category in (None, "") else str(category), style.turns_of(row, where))


def _column(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise ValueError(f"{where}: no column {name!r}; it has {', '.join(row) or 'no columns'}")
    return row[name]


def _filled(part: str | Conditional, row: dict[str, Any], where: str) -> str:
    """A part of a template with its columns filled in. Braces around anything but a word stay as they are."""
    if isinstance(part, Conditional):
        is_filled = bool(str(row.get(part.column) or "").strip())
        part = part.filled if is_filled else part.empty
    return re.sub(r"\{(\w+)\}", lambda match: _text(row, match[1], where), part)


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = _column(row, name, where)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where}: {name}={short_repr(value)} must be text")
    return str(value)
