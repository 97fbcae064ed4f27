"""The cases of tests/support/malformed.py that need no process: each ends in one line. `make malformed` runs all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support import malformed


@pytest.mark.parametrize("door", malformed.FAST)
def test_what_is_malformed_is_refused_in_one_line(door: str) -> None:
    cases = list(malformed.MAKERS[door]())
    verdicts = [(case.name, *malformed.verdict_of(case)) for case in cases]
    assert [verdict for verdict in verdicts if verdict[1] != "refused"] == []
    assert len(cases) > 10


@pytest.mark.parametrize(
    ("action", "verdict"),
    [
        (lambda _: None, "accepted"),
        (lambda _: 1 / 0, "traceback"),
        (lambda _: int("x\ny"), "refused"),
        (lambda scratch: (scratch / "nothing").read_text(), "traceback"),
    ],
)
def test_verdicts_can_tell(action: object, verdict: str, tmp_path: Path) -> None:
    assert malformed.outcome(malformed.Case("none", "x", action), tmp_path)[0] == verdict  # type: ignore[arg-type]


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    def raises(text: str) -> str:
        def action(_: Path) -> None:
            raise ValueError(text)

        return malformed.outcome(malformed.Case("none", "x", action, ("limit",)), tmp_path)[0]

    assert raises("limit=0: at least 1 is needed") == "refused"
    assert raises("limit=0: at least 1\nis needed") == "several lines"
    assert raises("something else is wrong") == "says nothing"


def test_a_hang_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(_: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(malformed, "SECONDS", 1)
    assert malformed.outcome(malformed.Case("none", "x", forever), tmp_path)[0] == "hang"


def test_cases_have_names_of_their_own() -> None:
    for door in malformed.FAST:
        twice = [name for name, count in Counter(case.name for case in malformed.MAKERS[door]()).items() if count > 1]
        assert not twice, f"{door}: {twice}"
