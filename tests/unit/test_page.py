"""report.html: what it holds is what the records say, and what a user or a model wrote cannot leave its place."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec import hub, method
from specdec.drafter import token_bytes
from specdec.measure.report import page
from specdec.measure.report.figure import method_color, run_colors
from specdec.measure.tasks import Task
from support.pages import example_rows, example_texts, write_example_run

HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp; \u2028 \U0001f600"


class Elements(HTMLParser):
    """Tags of a page, its text outside of scripts, and the content of its scripts."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def data_of(path: Path) -> dict[str, Any]:
    data, _ = Elements(path).scripts
    embedded: dict[str, Any] = json.loads(data)
    return embedded


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return example_rows(4, 30)


def test_the_page_holds_what_the_records_say(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    rows[1]["trimmed"][0] = 2
    rows[1]["proposer"] = ["ngram"] + [""] * (len(rows[1]["drafted"]) - 1)
    rows[2]["batch_size"][0] = 3
    texts = example_texts(rows)
    data = data_of(page.write_run(write_example_run(tmp_path / "run", rows), texts))
    (run,) = data["runs"]
    assert run["label"] == "run"
    assert run["color"] == method_color("ngram")
    assert [request["id"] for request in data["requests"]] == [row["id"] for row in rows]
    assert data["requests"][2] == {"id": "chat-2/1", "category": "chat", "prompt": "prompt of chat-2/1"}
    for row, shown in zip(rows, run["rows"], strict=True):
        assert [data["ids"][place] for place in shown["output"]] == row["output_token_ids"]
        assert [data["texts"][place] for place in shown["output"]] == [
            texts.tokens[i].decode() for i in row["output_token_ids"]
        ]
        assert [[data["ids"][place] for place in draft] for draft in shown["drafts"]] == row["draft_token_ids"]
        for key in ("drafted", "accepted", "emitted", "num_prompt_tokens", "finish_reason"):
            assert shown[key] == row[key]
        for key in ("draft", "verify"):
            assert shown[f"{key}_us"] == [round(1e6 * value) for value in row[f"{key}_s"]]
        assert shown["rest_us"] == [1000] * len(row["drafted"])
        drafts = [accepted for drafted, accepted in zip(row["drafted"], row["accepted"], strict=True) if drafted]
        assert shown["mean_acceptance_length"] == pytest.approx(1 + sum(drafts) / len(drafts))
    assert len(set(data["ids"])) == len(data["ids"]), "every text is there once"
    assert [row.get("trimmed") for row in run["rows"]] == [None, rows[1]["trimmed"], None, None]
    assert [row.get("batch_size") for row in run["rows"]] == [None, None, rows[2]["batch_size"], None]
    assert [data["proposers"][place]["name"] for place in run["rows"][1]["proposer"][:2]] == ["ngram", "none"]


def test_old_records_have_no_drafts(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    for row in rows:
        del row["draft_token_ids"]
    directory = write_example_run(tmp_path / "run", rows)
    summary = json.loads((directory / "summary.json").read_text())
    del summary["mean_over_categories"]
    (directory / "summary.json").write_text(json.dumps(summary))
    data = data_of(page.write_run(directory, example_texts(rows)))
    assert all("drafts" not in row for row in data["runs"][0]["rows"])


def test_nothing_that_was_written_by_others_leaves_its_place(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    harmless = Elements(page.write_run(write_example_run(tmp_path / "a", rows), page.Texts()))
    rows[0]["category"] = HOSTILE
    rows[0]["id"] = HOSTILE
    directory = write_example_run(tmp_path / "b", rows)
    (directory / "config.yaml").write_text(HOSTILE, encoding="utf-8")
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps(summary | {"target": HOSTILE, "lossless_said": HOSTILE}))
    output = rows[0]["output_token_ids"]
    written = page.write_run(directory, page.Texts({output[0]: b"</script>", output[1]: b"<!--"}, {HOSTILE: "$data </script>"}))
    hostile = Elements(written)
    assert hostile.tags.count("script") == harmless.tags.count("script") == 2
    assert hostile.tags.count("b") == 0
    assert hostile.scripts[1] == harmless.scripts[1], "the page's script is whole"
    data = data_of(written)
    assert data["requests"][0]["prompt"] == "$data </script>"
    assert [data["texts"][place] for place in data["runs"][0]["rows"][0]["output"][:2]] == ["</script>", "<!--"]
    assert "<script>alert(1)</script>" in hostile.text, "shown as it is"


def test_a_page_is_a_function_of_the_records(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    directory = write_example_run(tmp_path / "run", rows)
    first = page.write_run(directory, example_texts(rows)).read_bytes()
    assert page.write_run(directory, example_texts(rows)).read_bytes() == first
    assert not re.search(rb"https?://(?!www.w3.org/2000/svg)", first), "nothing is loaded"


def test_texts_are_read_back(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    rows[0]["output_token_ids"][:2] = [1, 2]  # pieces of a character
    texts = example_texts(rows)
    saved = page.saved_texts(page.write_run(write_example_run(tmp_path / "run", rows), texts))
    ids = {i for row in rows for part in (row["output_token_ids"], *row["draft_token_ids"]) for i in part}
    assert saved == page.Texts({i: texts.tokens[i] for i in ids}, texts.prompts)
    assert page.saved_texts(tmp_path / "nothing.html") is None


def test_several_runs_have_the_same_requests_side_by_side(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    other = example_rows(5, 30, seed=1)[1:]
    paths = (write_example_run(tmp_path / "a", rows), write_example_run(tmp_path / "b", other))
    runs = {path.name: page.read_run(path) for path in paths}
    data = data_of(page.write_runs(runs, [example_texts(rows), page.Texts()], tmp_path))
    assert [request["id"] for request in data["requests"]] == [f"chat-{i}/1" for i in range(5)]
    assert [[row is None for row in run["rows"]] for run in data["runs"]] == [[False] * 4 + [True], [True] + [False] * 4]
    places = data["runs"][1]["rows"][1]["output"]
    assert [(data["ids"][place], data["texts"][place]) for place in places] == [(i, None) for i in other[0]["output_token_ids"]]
    assert data["runs"][0]["color"] != data["runs"][1]["color"], "two runs of one method"


def test_runs_that_do_not_compare_say_so(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    runs = {name: page.read_run(write_example_run(tmp_path / name, rows)) for name in ("a", "b")}
    assert "warning" not in Elements(page.write_runs(runs, [page.Texts()] * 2, tmp_path)).text
    runs["b"].summary.update(prompts="1", seed=1, busy=["it was hot"])
    text = Elements(page.write_runs(runs, [page.Texts()] * 2, tmp_path)).text
    assert "warning: a and b decoded different prompts (task, file or limit); such runs do not compare" in text
    assert "warning: a has seed=0 and b has 1; such runs do not compare" in text
    assert "b: note: the machine was busy with other work (it was hot)" in text


def test_a_training_run_has_its_numbers(tmp_path: Path) -> None:
    summary = {
        "method": "eagle",
        "target": "<i>",
        "step": 2,
        "num_steps": 2,
        "best": {"step": 2, "mean_acceptance_length": 1.5},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    measured = {"step": 2, "loss": 1.25, "mean_acceptance_length": 1.5, "acceptance_rate_per_position": [0.5, 0.125]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n" + json.dumps(measured) + "\n")
    elements = Elements(page.write_training(tmp_path))
    assert "best: step 2, mean acceptance length 1.500" in elements.text
    assert "1.250-1.5000.50 0.12" in elements.text
    assert "i" not in elements.tags


@pytest.mark.parametrize(("name", "text"), [("tiny-llama", "é \n<s>"), ("tiny-gemma3", "é x")])
def test_tokens_have_the_bytes_of_their_text(name: str, text: str) -> None:
    tokenizer = hub.load_tokenizer(hub.resolve(name))
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = page.collect_texts(
        [{"output_token_ids": ids, "draft_token_ids": [[10**6]]}], tokenizer, [Task("a", "b", ("x", "y"))]
    )
    assert b"".join(texts.tokens[i] for i in ids) == text.encode()
    assert 10**6 not in texts.tokens
    assert texts.prompts == {"a/1": "x", "a/2": "y"}


def test_byte_tokens_are_a_byte() -> None:
    class SentencePiece:
        def get_vocab(self) -> dict[str, int]:
            return {"▁a": 0, "<0x0A>": 1, "b": 2} | {f"<0x{byte:02X}>": 10 + byte for byte in range(256) if byte != 10}

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [0]

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["▁a"]

    assert token_bytes.bytes_by_id(SentencePiece(), [0, 1, 2, 9]) == {0: b" a", 1: b"\n", 2: b"b"}


def test_a_method_has_one_color() -> None:
    names = method.names()
    assert len({method_color(name) for name in names}) == len(names)
    assert run_colors({"x": "ngram", "y": "suffix"}) == {"x": method_color("ngram"), "y": method_color("suffix")}
    twice = run_colors({"a": "ngram", "b": "suffix", "c": "ngram"})
    assert twice["a"] == method_color("ngram")
    assert len(set(twice.values())) == 3
