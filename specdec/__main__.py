"""`specdec NAME ...` is `python eval/NAME.py ...` or `python train/NAME.py ...`, from any directory.

specdec eval method=suffix           eval/run.py
specdec train eagle model=llama      train/eagle.py; also mtp, mlp, medusa, dflash, draft_model, pard
specdec compare RUN RUN              every other script by its own name
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import textwrap
from pathlib import Path

from specdec import __version__, script
from specdec.files import folder

EVAL = "eval"  # the name of eval/run.py here
# of a word with a =, bash replaces what follows it (= is in COMP_WORDBREAKS)
BASH_COMPLETION = """\
_specdec() {
    local line=${COMP_LINE:0:COMP_POINT}
    mapfile -t COMPREPLY < <(COMP_LINE=$line specdec -sc query=bash 2> /dev/null)
    [[ ${line##* } == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]##*=}")
}
complete -o nospace -o default -F _specdec specdec"""


def main() -> None:
    """The command."""
    with script.one_line():
        words = sys.argv[1:]
        if not words or words[0] in ("-h", "--help"):
            print(usage())
            return
        if words[0] == "--version":
            print(f"specdec {__version__}")
            return
        if words == ["-sc", "install=bash"]:
            print(BASH_COMPLETION)
            return
        if words[0] == "-sc" and words[1:] != ["query=bash"]:
            raise ValueError(f"{' '.join(words)}: use -sc install=bash; the scripts of train/ and eval/ have zsh and fish too")
        if words == ["-sc", "query=bash"]:
            for word in completions(os.environ.get("COMP_LINE", "")):
                print(word)
            return
        path, rest = chosen(words)
    sys.argv[:] = [str(path), *rest]
    runpy.run_path(str(path), run_name="__main__")


def chosen(words: list[str]) -> tuple[Path, list[str]]:
    """The script that a command line means, and its arguments. Raises ValueError for none."""
    from specdec.checked import nearest

    first, *rest = words
    if first == "train":
        scripts = scripts_of("train")
        if not rest or rest[0] not in scripts:
            if not rest or "=" in rest[0]:
                raise ValueError(f"specdec train: which script? give one of {', '.join(scripts)}, as in `specdec train eagle`")
            raise ValueError(f"specdec train {rest[0]}: no such script; {nearest(rest[0], scripts)}")
        return scripts[rest[0]], rest[1:]
    scripts = scripts_of("train") | scripts_of("eval")
    if first not in scripts:
        hint = f"eval/run.py is `specdec {EVAL}`" if first == "run" else nearest(first, [*scripts, "train"])
        raise ValueError(f"specdec {first}: no such command; {hint}")
    return scripts[first], rest


def completions(line: str) -> list[str]:
    """What the last word of a command line may become: a command; or a key, a choice or a file, which Hydra knows."""
    words = line.split()[1:]
    last = "" if line[-1:].isspace() or not words else words.pop()
    if words in ([], ["train"]):
        names = scripts_of("train") if words else scripts_of("train") | scripts_of("eval") | {"train": Path()}
        return sorted(name for name in names if name.startswith(last))
    path, rest = chosen(words)
    if "config.launch" not in path.read_text():
        return []  # it has no keys
    os.environ["COMP_LINE"] = " ".join(["specdec", *rest, last])
    sys.argv[:] = [str(path), "-sc", "query=bash"]
    with contextlib.redirect_stdout(io.StringIO()) as answer:
        runpy.run_path(str(path), run_name="__main__")
    return [word for word in answer.getvalue().split() if word.startswith(last)]


def scripts_of(room: str) -> dict[str, Path]:
    """The scripts of eval/ or train/, by the names that the command has for them."""
    names = {path.stem: path for path in sorted(folder(room).glob("*.py"))}
    if room == "eval":
        names[EVAL] = names.pop("run")
    return names


def usage() -> str:
    """All commands, with the first sentence of each script."""
    lines = ["specdec COMMAND [key=value ...]", ""]
    for room, prefix in (("eval", ""), ("train", "train ")):
        for name, path in sorted(scripts_of(room).items()):
            lines += textwrap.wrap(
                first_sentence(path), 79, initial_indent=f"  {prefix + name:20} ", subsequent_indent=" " * 23
            )
    return "\n".join([*lines, "", "specdec COMMAND --help lists its keys; docs: README.md"])


def first_sentence(path: Path) -> str:
    """Of a script's docstring."""
    text = " ".join(path.read_text().split('"""')[1].split("\n\n")[0].split())
    return text.split(". ")[0].split("? ")[0].split(": ")[0].rstrip(".")


if __name__ == "__main__":
    main()
