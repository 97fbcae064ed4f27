"""For mkdocs: the site has README.md and all files of the repository that links lead to from there, at their own paths."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"\]\(([^)\s#:]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).resolve().parent
    linked = [root / "README.md"]
    for path in linked:  # which grows
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED))
        if path.suffix == ".md":
            targets = [(path.parent / link).resolve() for link in LINK.findall(path.read_text())]
            linked += [target for target in dict.fromkeys(targets) if target.is_file() and target not in linked]
    return files
