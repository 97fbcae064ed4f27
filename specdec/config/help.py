"""`--help` of a script: what it does, what can be chosen, and every key with the comment that its YAML has."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specdec import fold


def of_page(conf: Path, page: str, docstring: str, words: list[str]) -> str:
    """The text.

    conf: the directory of YAML files
    page: the name of the script's file there
    docstring: of the script
    words: of the command line, whose choices of groups are shown
    """
    chosen = dict(word.partition("=")[::2] for word in words if "=" in word)
    text = (conf / f"{page}.yaml").read_text().split("\nhydra:")[0]
    groups = groups_of_page(conf, page, chosen)
    parts = [fold.docstring(docstring), "Choices (key=value; the one in use is marked):"]
    for group, choice in groups.items():
        names = sorted(path.stem for path in (conf / group).glob("*.yaml"))
        parts[-1] += "\n" + fold.items(f"  {group}", [f"[{name}]" if name == choice else name for name in names])
    parts.append(f"Keys:\n{_indented(_after_defaults(text))}")
    for group, choice in groups.items():
        path = conf / group / f"{choice}.yaml"
        if path.exists():
            parts.append(f"Keys of {group}={choice} ({group}.KEY=value):\n{_indented(path.read_text())}")
    parts.append(
        fold.docstring("-m sweeps over values with commas; --cfg job shows the composed config; --info shows Hydra's own.")
    )
    return "\n\n".join(parts)


def groups_of_page(conf: Path, page: str, chosen: dict[str, str]) -> dict[str, str]:
    """The page's own groups, with the choice of each. A default may name an earlier group's choice: `${method}_demo`."""
    choices: dict[str, str] = {}
    defaults: Any = OmegaConf.to_container(OmegaConf.load(conf / f"{page}.yaml").defaults, resolve=False)
    for entry in defaults:
        for group, default in entry.items() if isinstance(entry, dict) else []:
            if str(group).startswith("override "):
                continue
            choice = str(default)
            for earlier, name in choices.items():
                choice = choice.replace(f"${{{earlier}}}", name)
            choices[str(group)] = chosen.get(str(group), choice)
    return choices


def _after_defaults(text: str) -> str:
    """A page's keys, without its list of defaults and the comment above it."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("defaults:")) + 1
    while first < len(lines) and lines[first].startswith((" ", "-")):
        first += 1
    return "\n".join(lines[first:]).strip()


def _indented(text: str) -> str:
    """YAML, to the right, and folded to the terminal."""
    return fold.yaml(textwrap.indent(text.strip(), "  "))
