"""The documents' Python runs, and they build as a site. Their commands are parsed in test_scripts.py, and the files of
docs/extending.md are run in test_extending.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT, short

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"# \S+\.py\n")  # the first line of a block that is a file


def blocks(path: Path) -> list[tuple[int, str]]:
    """(line, code) of the Python blocks of a document."""
    text = path.read_text()
    matches = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in matches if not FILE.match(block[1])]


@pytest.mark.embedded
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path)], ids=short)
def test_the_python_of_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, with the names of the blocks before."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(path):
        exec(compile("\n" * line + code, str(path), "exec"), names)  # an error names the document's line


def test_documents_have_python() -> None:
    assert {"README.md", "docs/methods.md"} <= {short(path) for path in DOCUMENTS if blocks(path)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. --strict: a link, an anchor or a page of the navigation that there is not ends the build."""
    directory = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(build, cwd=ROOT, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_site_has_every_document(site: Path) -> None:
    assert "<h1" in (site / "index.html").read_text()
    for path in [*DOCUMENTS[1:], ROOT / "LOG.md"]:
        assert (site / short(path)).with_suffix("").joinpath("index.html").is_file(), short(path)
    assert (site / "docs" / "speedup.png").is_file()


def test_its_navigation_has_the_order_of_the_readme(site: Path) -> None:
    listed = re.findall(r"\[([\w./]+\.md)\]\(", (ROOT / "README.md").read_text().partition("## More")[2])
    shown = re.findall(r'<a href="([\w./]+)/" class="md-nav__link', (site / "index.html").read_text())
    shown = [f"{name}.md" for name in shown]
    assert [name for name in shown if name in listed] == listed


def test_it_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="?(?:https?:)?//[^>]*', page.read_text()), page
