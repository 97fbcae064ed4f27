"""What `--help` shows fits a terminal, and says what the docstrings and YAML files say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from specdec import fold
from specdec.config import CONF
from support.cli import EVAL

SCRIPTS = sorted(path for folder in ("eval", "train") for path in (EVAL.parent / folder).glob("*.py"))
PAGES = sorted(CONF.rglob("*.yaml"))


def words(text: str) -> list[str]:
    """Of a text, in any order: a comment may change its place."""
    return sorted(word for word in text.split() if word not in ("#", "\\"))


def name_of(path: Path) -> str:
    return str(path.relative_to(path.parents[1]))


@pytest.mark.parametrize("columns", [70, 80, 400])
@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_docstrings(path: Path, columns: int) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    folded = fold.docstring(text, columns)
    assert words(folded) == words(text)
    assert all(len(line) <= columns or len(words(line)) == 1 for line in folded.splitlines())
    if columns == 400:
        assert folded == text.strip()


@pytest.mark.parametrize("columns", [70, 80, 400])
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_yaml(path: Path, columns: int) -> None:
    """It stays the same YAML; keys and values are not broken."""
    text = path.read_text()
    folded = fold.yaml(text, columns)
    assert words(folded) == words(text)
    assert yaml.safe_load(folded) == yaml.safe_load(text)
    comments = [line for line in folded.splitlines() if "# " in line]
    assert all(len(line) <= columns for line in comments), "a comment is what can be folded"
    if columns == 400:
        assert folded == text.rstrip("\n")


def test_a_long_list_goes_on_further_to_the_right() -> None:
    assert fold.items("  kinds", ["chain", "[tree]", "block-wise"], 24) == "  kinds: chain, [tree],\n      block-wise"


def test_a_long_command_is_still_one() -> None:
    text = "Do it.\n\n    python do.py first=1 second=2 third=3   # as it was"
    assert fold.docstring(text, 40) == ("Do it.\n\n    # as it was\n    python do.py first=1 second=2 \\\n        third=3")
