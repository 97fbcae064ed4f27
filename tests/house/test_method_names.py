"""A method is named in its own file and YAML, in tests and in documents; everything else reads `facts` of its class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import method
from support.tree import ROOT, short

FILES = sorted(path for room in ("specdec", "eval", "train") for path in (ROOT / room).rglob("*.py"))
ELSEWHERE = [path for path in FILES if not path.is_relative_to(ROOT / "specdec" / "method")]
# A format of checkpoints names the methods whose drafters it holds, in its own file: that is what a format is of.
FORMATS = sorted((ROOT / "specdec" / "checkpoint").glob("*.py"))
# Where a name of a method is the word for something else, or a choice of what a benchmark measures.
ALLOWED: dict[str, set[str]] = {
    "specdec/params.py": {"none"},  # PLAIN, the value that a request's own speculative_config may have
    "specdec/checked.py": {"none"},  # pydantic's word for a type
    "specdec/measure/logger.py": {"none"},  # no logger
    "specdec/measure/report/choose.py": {"none"},  # matplotlib: no marker, no edge
    "specdec/model/packed_linear.py": {"none"},  # oneDNN: no activation
    "specdec/model/fused.py": {"mlp"},  # a part of a decoder layer
    "specdec/measure/report/bench.py": {"suffix"},  # key of bench.json: speed of the suffix tree
    "eval/bench.py": {"suffix", "none", "ngram", "draft_model"},  # the methods that are compared with transformers
    "train/bench.py": {"specdec.method.eagle3"},  # the drafter whose training is measured
    "train/extract.py": {"specdec.method.eagle3"},  # whose layers are extracted unless others are given
}


def docstrings(tree: ast.AST) -> set[int]:
    """ids of the expressions that are only text."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def method_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of a method's name as a string, and of imports of its module."""
    text = docstrings(tree)
    names = set(method.names())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names and id(node) not in text:
            yield node.lineno, str(node.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec.method."):
            yield node.lineno, str(node.module)
        if isinstance(node, ast.ImportFrom) and node.module == "specdec.method":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in names)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("specdec.method."))


@pytest.mark.parametrize("path", [path for path in ELSEWHERE if path not in FORMATS], ids=short)
def test_no_method_is_named_outside_its_room(path: Path) -> None:
    allowed = ALLOWED.get(short(path), set())
    named = [f"{line}: {name}" for line, name in method_names(ast.parse(path.read_text())) if name not in allowed]
    assert not named


@pytest.mark.parametrize("name", method.names())
def test_a_method_declares_its_own_facts(name: str) -> None:
    """A subclass of another method, such as PEagle of Eagle3, would else have the facts of that one."""
    parents = [parent for parent in method.find(name).__mro__[1:] if parent.__module__.startswith("specdec.method.")]
    assert not parents or "facts" in vars(method.find(name))
