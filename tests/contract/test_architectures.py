"""Every small model of `architectures.py` decodes what `generate` does, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.architectures import CASES, FEW, Case, check, try_out


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    """What is refused takes no time; of the others, one of every kind is enough for an ordinary run."""
    return () if case.refused or case.label in FEW else (pytest.mark.prove,)


def test_the_few_are_in_the_list() -> None:
    assert set(FEW) <= {case.label for case in CASES if not case.refused}
    assert len({case.label for case in CASES}) == len(CASES)
    assert len({case.model_type for case in CASES if not case.refused}) >= 40


@pytest.mark.parametrize("case", [pytest.param(case, id=case.label, marks=marks(case)) for case in CASES])
def test_it_is_as_generate_or_refused(case: Case, tmp_path: Path) -> None:
    assert not check(case, try_out(case, tmp_path))
