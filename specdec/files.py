"""Reading JSON and writing files, with errors that name the file; and where the folders of the project are."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from specdec.checked import first_line

ASSETS = Path(__file__).resolve().parent / "assets"  # of the package


def folder(name: str) -> Path:
    """conf/, eval/ or train/: beside the package in a checkout, inside it where a wheel was installed (setup.py)."""
    package = Path(__file__).resolve().parent
    return package / name if (package / name).is_dir() else package.parent / name


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError within the block, which one of a write or a flush does not have."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that nobody ever sees a part of it: under another name first."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """As `write_atomically`; what JSON does not know becomes text."""
    write_atomically(path, json.dumps(value, indent=1, default=str) + "\n")


def apply_umask(path: Path) -> None:
    """Set the permissions with which `open` makes files: safetensors makes private ones."""
    umask = os.umask(0o077)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text. Raises ValueError, one line that begins with `where`, for any mistake in it: syntax, encoding,
    half of a surrogate pair, brackets that are nested hundreds deep."""
    try:
        return from_json(text.encode() if isinstance(text, str) else text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({first_line(error).removeprefix('ValueError: ')})") from None


def read_json(path: str | Path, fix: str = "") -> Any:
    """The value in a JSON file. Raises ValueError, one line with the path and the fix, if it is not there or not JSON."""
    path = Path(path)
    try:
        return from_json(path.read_bytes())
    except OSError as error:
        reason = error.strerror or first_line(error)
    except ValueError as error:
        reason = f"not JSON: {error}"
    raise ValueError(f"{path.parent}: {path.name} cannot be read ({reason}){fix and f'; {fix}'}")


def read_json_object(path: str | Path, fix: str = "") -> dict[str, Any]:
    """As `read_json`, of a file that holds a JSON object."""
    value = read_json(path, fix)
    if not isinstance(value, dict):
        actual = f"{type(value).__name__} {str(value)[:40]!r}"
        raise ValueError(f"{Path(path).parent}: {Path(path).name} holds no JSON object, but a {actual}{fix and f'; {fix}'}")
    return value
