"""Docstrings and YAML, folded to the width of a terminal: what is longer than it would be broken anywhere."""

from __future__ import annotations

import shutil
import textwrap
from functools import partial

_wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def docstring(text: str, width: int | None = None) -> str:
    """Paragraphs are filled anew; in commands, which are indented, a comment goes above its line, and words after a backslash.

    width: columns; None: those of the terminal, 80 without one
    """
    width = width or _columns()
    blocks = text.strip().split("\n\n")
    return "\n\n".join(
        block if all(len(line) <= width for line in block.splitlines())
        else _commands(block, width) if block.startswith(" ")
        else "\n".join(_wrap(" ".join(block.split()), width))
        for block in blocks
    )  # fmt: skip


def yaml(text: str, width: int | None = None) -> str:
    """A comment that makes its line too long goes above it, in lines of its own.

    width: columns; None: those of the terminal, 80 without one
    """
    width = width or _columns()
    return "\n".join(part for line in text.splitlines() for part in _comment_above(line, width))


def items(label: str, names: list[str], width: int | None = None) -> str:
    """`label: name, name, ...` with the lines after the first further to the right.

    width: columns; None: those of the terminal, 80 without one
    """
    indent = " " * (len(label) - len(label.lstrip()) + 4)
    return "\n".join(_wrap(f"{label}: {', '.join(names)}", width or _columns(), subsequent_indent=indent))


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _commands(block: str, width: int) -> str:
    lines = []
    for line in block.splitlines():
        *comments, command = _comment_above(line, width)
        if len(command) > width:
            indent = " " * (len(command) - len(command.lstrip()))
            command = " \\\n".join(_wrap(command, width - 2, subsequent_indent=indent + "    "))
        lines += [*comments, command]
    return "\n".join(lines)


def _comment_above(line: str, width: int) -> list[str]:
    """The line, after lines with its comment if it is too long with it."""
    if len(line) <= width:
        return [line]
    code, mark, comment = (" " + line).partition(" # ")
    if not mark:
        return [line]
    indent = " " * (len(line) - len(line.lstrip())) + "# "
    wrapped = _wrap(comment, width, initial_indent=indent, subsequent_indent=indent)
    return wrapped + ([code[1:].rstrip()] if code.strip() else [])
