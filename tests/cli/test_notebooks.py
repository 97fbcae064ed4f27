"""Every notebook runs from top to bottom."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a kernel: in a module `__main__`, where `custom_class` finds a class, with `display`. Files go to a temporary
    directory."""
    main = ModuleType("__main__")
    main.display = lambda data, raw: print(data["text/plain"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), vars(main))
        assert capsys.readouterr().out or number == 1, f"code cell {number} shows nothing"
        assert not cell["outputs"], "outputs are not kept in the repository"
    plt.close("all")


def test_there_is_one() -> None:
    assert NOTEBOOKS
