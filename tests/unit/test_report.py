"""What is printed: tables of any width, and progress where there is no terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from specdec.measure.report import console
from specdec.measure.report.figure import integer_ticks, saved_figure
from specdec.measure.report.table import fitted, method_words, new_table
from specdec.measure.report.training import plot_training


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_is_stacked_and_never_cut(width: int) -> None:
    heads = ["tokens/s", "mean acceptance length", "speedup", "95 %", "efficiency"]
    table = new_table("title", ["run"], heads, "a caption of several words that is as wide as the console, not as the table")
    numbers = {"one": ["1234.5", "1.23", "1.68x", "1.40-1.90", "0.98"], "another": ["99.9", "2.34", "0.91x", "-", "1.02"]}
    for name, cells in numbers.items():
        table.add_row(name, *cells)
    out = Console(width=width, record=True, file=None)
    with out.capture() as captured:
        for piece in fitted(table, out):
            out.print(piece)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for name, cells in numbers.items():
        lines = [line.split() for line in text.splitlines() if line.split()[:1] == [name]]
        assert [word for line in lines for word in line[1:]] == cells
    assert text.count("title") == text.count("a caption") == 1
    if width == 200:
        assert len([line for line in text.splitlines() if line.startswith(" one")]) == 1


def test_every_piece_of_a_stacked_table_names_its_rows() -> None:
    table = new_table("title", ["dtype", "ours"], ["tokens/s", "ratio"])
    table.add_row("float32", "ngram with its default", "1234.5", "1.84")
    table.add_row("bfloat16", "none", "999.5", "0.84")
    out = Console(width=34)
    with out.capture() as captured:
        for piece in fitted(table, out):
            out.print(piece)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 34
    for number in ("1234.5", "1.84"):
        assert len([line for line in text.splitlines() if line.split()[:2] == ["float32", "ngram"] and number in line]) == 1
    for number in ("999.5", "0.84"):
        assert [line.split() for line in text.splitlines() if number in line] == [["bfloat16", "none", number]]


def test_lines_are_folded_on_a_terminal_but_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which are copied; and in a file nothing is folded."""
    note = "note: " + "a word " * 20
    command = "python eval/run.py " + "task.path=somewhere " * 8
    console.show(note.strip(), command.strip())
    assert capsys.readouterr().out.splitlines() == [note.strip(), command.strip()]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    console.show(note.strip(), command.strip())
    *folded, last = capsys.readouterr().out.splitlines()
    assert len(folded) == 2
    assert " ".join(folded) == note.strip()
    assert last == command.strip()


def test_a_users_words_are_no_formula(tmp_path: Path) -> None:
    with saved_figure(tmp_path / "words.png", "prices from $1 to $_", 1, 1, (2, 2)) as (_, axis):
        axis.set_title("$^")
    assert (tmp_path / "words.png").read_bytes().startswith(b"\x89PNG")


def test_ticks_are_whole_numbers_for_a_single_one_too() -> None:
    axis = Figure().subplots()
    axis.plot([1], [0.5], marker="o")
    integer_ticks(axis)
    low, high = axis.get_xlim()
    assert [tick for tick in axis.get_xticks() if low <= tick <= high] == [1]


def test_progress_in_a_log_file_is_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    with console.one_bar("requests", 3) as advance:
        advance(note="10 tokens/s")
        advance()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["requests 1/3", "requests 2/3"]
    assert lines[1].endswith("left, 10 tokens/s")


def test_short_work_leaves_one_line_in_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress(2, ngram=0) as advance:
        advance("ngram")
        advance("ngram")
    assert capsys.readouterr().err.startswith("ngram 2/2, 0:00:00")


def test_the_plot_of_a_training_that_goes_on_shows_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first evaluation, too."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: (figures.append(figure), path.write_bytes(b"")))
    rows = [{"step": step, "lr": 1e-3, "grad_norm": 1.0, "step_loss": [9.0 - step], "accuracy": [0.1]} for step in (1, 2)]
    plot_training(rows, "eagle3", tmp_path / "train.png")
    loss, accuracy, acceptance, _ = figures[0].axes[:4]
    assert list(loss.lines[0].get_ydata()) == [8.0, 7.0]
    assert accuracy.lines
    assert [text.get_text() for text in acceptance.texts] == ["no evaluation"]


def test_a_method_in_a_title() -> None:
    """Trees by what was drafted, where the settings leave them to the method; plain decoding drafts nothing."""
    run = {"method": "token_recycling", "num_speculative_tokens": 32, "rejection": "standard", "speculative_config": {}}
    assert method_words(run) == "token_recycling (K=32, standard)"
    assert method_words(run | {"overall": {"nodes_per_draft": 30.5}}) == "token_recycling (K=32 nodes, standard)"
    chain = run | {"speculative_config": {"tree_topk": 1}}
    assert method_words(chain) == "token_recycling (K=32, standard)"
    assert method_words({"method": "none", "num_speculative_tokens": 0, "rejection": "standard"}) == "none"
