"""The files of the tree, and what a Python file imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from specdec.config import CONF

ROOT = CONF.parent
PACKAGE = ROOT / "specdec"
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for folder in ("eval", "train") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PYTHON = MODULES + SCRIPTS + TESTS
YAMLS = sorted(CONF.glob("*/*.yaml"))


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}:{node.lineno}: a relative import hides where it leads"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
