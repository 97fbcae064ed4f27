"""The field's words in identifiers, and assignments that bind one thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tree import PYTHON, short

# Words that this project once used for what the field has a term for, and participles that name nothing. They stay out of
# identifiers; the term to use is in the comment of its line.
PRIVATE = {
    "law", "laws",  # distribution, target_probs, draft_probs
    "stands", "stood",  # accepted
    "evidence",  # confidence
    "noised",  # add_feature_noise
    "silent", "steady",  # StatelessProposer, FixedLengthPolicy
    "costly", "paid",  # cost_proposer, num_model_drafted
    "trims",  # prunes
    "taught", "teach", "learner",  # labelled, target_labels, TrainableDrafter
    "adopt", "drawing", "drawn",  # init_from_target, sampler, sampled
    "rising",  # isotonic
    "derive",  # acceptance_metrics
    "foreign", "capped", "judge", "picks", "begun", "leads", "among", "forget", "wish",
}  # fmt: skip
PARTICIPLES = {"told", "said", "asked", "found", "given", "own", "theirs", "whole", "made"}  # of what? name the thing
KEYS = {"own_embedding"}  # of configs on disk
MAX_PACKED = 0.03  # of all assignments


def words(identifier: str) -> set[str]:
    return set(re.sub(r"([a-z])([A-Z])", r"\1_\2", identifier).lower().split("_"))


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, identifier) of what a file defines or assigns to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def private_words(tree: ast.AST) -> list[str]:
    """`line: identifier`. The name of a test is a sentence, in which a participle is none but a verb's."""
    return [
        f"{line}: {identifier}"
        for line, identifier in bound_names(tree)
        if identifier not in KEYS and words(identifier) & (PRIVATE if identifier.startswith("test_") else PRIVATE | PARTICIPLES)
    ]


def is_packed(assignment: ast.Assign) -> bool:
    """Whether one assignment binds several unrelated values: `a, b = x, y` or `a = b = x`."""
    target, value = assignment.targets[0], assignment.value
    if len(assignment.targets) > 1:
        return True
    sequences = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
    return sequences and not any(isinstance(element, ast.Starred) for element in value.elts)


@pytest.mark.parametrize("path", PYTHON, ids=short)
def test_no_private_words_in_identifiers(path: Path) -> None:
    assert not private_words(ast.parse(path.read_text()))


def test_one_assignment_binds_one_thing() -> None:
    total = 0
    packed = []
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                total += 1
                if isinstance(node, ast.Assign) and is_packed(node):
                    packed.append(f"{short(path)}:{node.lineno}")
    assert len(packed) <= MAX_PACKED * total, packed


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("a, b = 1, f(2)", 1), ("a = b = 0", 1), ("[a, b] = (1, 2)", 1), ("a, b = f()", 0), ("a, b = [*c, *d]", 0),
        ("a = 1, 2", 0),
    ],
)  # fmt: skip
def test_a_packed_assignment_is_recognised(line: str, count: int) -> None:
    assert sum(is_packed(node) for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Assign)) == count


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("law_BV = 1", 1), ("def f(given): ...", 1), ("class OwnLaw: ...", 1), ("self.told = 1", 1),
        ("def test_a_law(): ...", 1),
        ("def test_a_file_is_found(): ...", 0), ("flaw = told", 0), ("owner = f(given=1)", 0),
    ],
)  # fmt: skip
def test_a_private_word_is_recognised(line: str, count: int) -> None:
    assert len(private_words(ast.parse(line))) == count
