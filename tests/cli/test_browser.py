"""report.html in a real browser: what it shows, and that a large run stays usable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.measure.report import page
from support.browser import CHROMIUM, Browser
from support.pages import example_rows, example_texts, write_example_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
LIMIT_S = 2.0
DETAIL = "document.querySelector('.detail').innerText"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started
        assert not started.errors
        assert all(url.startswith(("file:", "data:")) for url in started.requests), "nothing of a network"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    rows = example_rows(1000, 256)
    step = rejecting_step(rows[17])
    for key, seconds in (("draft_s", 0.0012), ("verify_s", 0.0034), ("wall_s", 0.0056)):
        rows[17][key][step] = seconds
    return rows


@pytest.fixture(scope="module")
def report(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page.write_run(write_example_run(tmp_path_factory.mktemp("large") / "run", rows), example_texts(rows))


def rejecting_step(row: dict[str, Any]) -> int:
    """The first step of which two draft tokens were rejected."""
    return next(s for s, n in enumerate(row["drafted"]) if n - row["accepted"][s] == 2 and row["accepted"][s] > 0)


def shown(token: int) -> str:
    return example_texts([]).tokens[token].decode().replace("\n", "\u21b5").strip()


def test_a_large_run_opens_and_switches_at_once(browser: Browser, report: Path, rows: list[dict[str, Any]]) -> None:
    assert report.stat().st_size < 12e6
    began = time.monotonic()
    browser.open(report)
    assert browser.run("document.getElementById('name').textContent") == "chat-0/1 (chat)"
    assert time.monotonic() - began < LIMIT_S
    assert browser.run("document.querySelectorAll('.text').length") == 1, "only the chosen request is drawn"
    assert browser.run("document.querySelectorAll('.tok').length") < 300
    for key, name in (("n", "chat-1/1"), ("n", "chat-2/1"), ("p", "chat-1/1")):
        began = time.monotonic()
        browser.press(key)
        assert browser.run("document.getElementById('name').textContent.split(' ')[0]") == name
        assert time.monotonic() - began < LIMIT_S
    began = time.monotonic()
    browser.run("byId = id => document.getElementById(id); byId('search').value = 'code chat-77'")
    browser.run("byId('search').dispatchEvent(new Event('input'))")
    assert browser.run("byId('count').textContent") == "6 of 1000 requests"  # 77, 771, 773, ...
    browser.run("document.querySelector('#items .item:nth-child(2)').click()")
    assert browser.run("byId('name').textContent") == "chat-771/1 (code)"
    assert time.monotonic() - began < LIMIT_S
    assert browser.run("location.hash") == "#request=chat-771%2F1"
    assert browser.run("byId('prompt-text').textContent") == "prompt of chat-771/1"


def test_the_tokens_are_those_of_the_record(browser: Browser, report: Path, rows: list[dict[str, Any]]) -> None:
    row = rows[17]
    browser.open(report, "#request=chat-17/1")
    tokens = browser.run("[...document.querySelectorAll('.text .tok')].map(t => [t.className, t.textContent])")
    assert [text.replace("\u21b5\n", "\n") for _, text in tokens] == [
        example_texts([]).tokens[i].decode() for i in row["output_token_ids"]
    ]
    kinds = ["prefill"]
    for drafted, accepted in zip(row["drafted"], row["accepted"], strict=True):
        last = "plain" if not drafted else "recovered" if accepted < drafted else "bonus"
        kinds += ["accepted"] * accepted + [last]
    assert [name.split()[1] for name, _ in tokens] == kinds
    assert browser.run("document.querySelectorAll('.text .step').length") == len(row["drafted"])
    assert browser.run("document.querySelectorAll('.times rect.verify').length") == len(row["drafted"])


def test_the_last_token_of_a_tree(browser: Browser, tmp_path: Path) -> None:
    """Nodes 1 and 2 follow node 0, node 3 is beside it. After a leaf nothing was rejected, though more was drafted."""
    [row] = example_rows(1, 10)
    steps = [([0, 1], "bonus"), ([3], "bonus"), ([0], "recovered"), ([], "recovered")]
    row["output_token_ids"] = row["output_token_ids"][: 1 + sum(len(nodes) + 1 for nodes, _ in steps)]
    row["drafted"] = [4] * len(steps)
    row["draft_token_ids"] = [[5, 6, 7, 8]] * len(steps)
    row["draft_parents"] = [[-1, 0, 0, -1]] * len(steps)
    row["accepted_nodes"] = [nodes for nodes, _ in steps]
    row["accepted"] = [len(nodes) for nodes, _ in steps]
    row["emitted"] = [len(nodes) + 1 for nodes, _ in steps]
    for key in ("trimmed", "draft_s", "verify_s", "wall_s", "cpu_s", "batch_size"):
        row[key] = [1] * len(steps)
    browser.open(page.write_run(write_example_run(tmp_path / "run", [row]), example_texts([row])))
    last = browser.run("[...document.querySelectorAll('.text .step')].map(s => s.lastElementChild.className)")
    assert [name.split()[1] for name in last] == [kind for _, kind in steps]


def test_a_step_shows_what_was_rejected(browser: Browser, report: Path, rows: list[dict[str, Any]]) -> None:
    row = rows[17]
    step = rejecting_step(row)
    first, second = row["draft_token_ids"][step][row["accepted"][step] :]
    browser.open(report, f"#request=chat-17/1&step={step + 1}")
    detail = browser.run(DETAIL)
    assert f"Step {step + 1} of {len(row['drafted'])}" in detail
    assert browser.run("document.querySelector('.detail .rejected').textContent.trim()") == shown(first)
    assert browser.run("document.querySelector('.detail .unread').textContent.trim()") == shown(second)
    assert "draft 1.20 ms, verify 3.40 ms, rest 1.00 ms" in detail

    browser.run("document.querySelector('.text').scrollIntoView()")
    browser.move(".text .step:nth-child(2)")
    assert browser.run(DETAIL).startswith("Step 1 of"), "by the mouse"
    browser.run("document.querySelector('.text .step').focus()")
    browser.press("ArrowRight")
    assert browser.run(DETAIL).startswith("Step 2 of"), "by the keyboard"
    assert browser.run("location.hash").endswith("&step=2"), "a link to the step"


def test_two_runs_side_by_side(browser: Browser, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    new_rows = [dict(row) for row in rows[:3]]
    old_rows = [dict(row) for row in rows[:3]]
    old_rows[0]["output_token_ids"] = [*new_rows[0]["output_token_ids"][:40], 1, 2, *new_rows[0]["output_token_ids"][42:]]
    for row in old_rows:
        del row["draft_token_ids"]  # as an older version wrote them
    runs = {
        name: page.read_run(write_example_run(tmp_path / name, some, method))
        for name, some, method in (("a", new_rows, "ngram"), ("b", old_rows, "suffix"))
    }
    browser.open(page.write_runs(runs, [example_texts(new_rows), example_texts(old_rows)], tmp_path))
    assert browser.run("[...document.querySelectorAll('.answer h3')].map(h => h.textContent)") == ["a", "b"]
    assert "first difference from a: token 41" in browser.run("document.querySelectorAll('.answer')[1].innerText")
    assert browser.run("document.querySelectorAll('.differs').length") == 1
    halves = browser.run(
        "[...document.querySelectorAll('.answer')[1].querySelectorAll('.tok')].slice(40, 42).map(t => t.textContent)"
    )
    assert halves == ["\u00b7", "\U0001f600"], "a character of two tokens is shown at the second"
    step = rejecting_step(old_rows[0])
    browser.run(f"document.querySelectorAll('.answer')[1].querySelectorAll('.step')[{step}].click()")
    details = browser.run("[...document.querySelectorAll('.detail')].map(d => d.innerText)")
    assert "drafts were not recorded" in details[1]
    assert details[0].startswith(f"Step {step + 1} of"), "the step of the other run at the same place"
    browser.press("n")
    assert "the same tokens as a" in browser.run("document.querySelectorAll('.answer')[1].innerText")


def test_hostile_text_is_text(browser: Browser, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    hostile = "<img src=x onerror='document.title=1'></script><script>document.title=2</script>"
    row = rows[0] | {"id": hostile, "category": hostile}
    texts = page.Texts(dict.fromkeys(range(400), hostile.encode()), {hostile: hostile})
    browser.open(page.write_run(write_example_run(tmp_path / "run", [row]), texts))
    assert browser.run("document.title") == "run"
    assert browser.run("document.querySelector('.text .tok').textContent") == hostile
    assert browser.run("document.getElementById('prompt-text').textContent") == hostile
    assert browser.run("document.querySelectorAll('#viewer img').length") == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 700])
def test_text_can_be_read(width: int, dark: bool, report: Path) -> None:
    """Every colour behind text has a contrast of 4.5 at least, and nothing is wider than the window."""
    script = """(() => {
      const numbers = c => c.match(/[\\d.]+/g).map(Number);
      const light = c => { const [r, g, b] = numbers(c).map(v => v / 255).map(v => v <= .04045 ? v / 12.92
        : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
      const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        const n = numbers(c); if (n.length < 4 || n[3] > 0) return c; } return "rgb(255, 255, 255)"; };
      let least = 21;
      for (const e of document.querySelectorAll(".tok, p, th, td, summary, h1, h2, h3, .item span, .chip")) {
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
        least = Math.min(least, (a + .05) / (b + .05));
      }
      return [least, document.documentElement.scrollWidth];
    })()"""
    with Browser(width, 900, dark) as started:
        started.open(report, "#request=chat-17/1&step=3")
        contrast, shown_width = started.run(script)
    assert contrast >= 4.5
    assert shown_width <= width
