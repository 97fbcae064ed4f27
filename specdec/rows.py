"""Rows of data sets: JSON lines, JSON arrays, Parquet, directories of these, data sets that `datasets` saved, and the hub's."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdec.chat.conversation import drop_nulls
from specdec.checked import first_line
from specdec.files import parse_json
from specdec.hub import cache_dir

# The value of a JSON text; `where` names it in errors.
Parse = Callable[[bytes, str], Any]
SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
SPLITS = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")


def local_rows(
    path: Path,
    key: str,
    split: str | None,
    config: str | None = None,
    files: Sequence[str] = (),
    columns: Sequence[str] = (),
    parse: Parse = parse_json,
) -> Iterator[tuple[str, Any]]:
    """(where, row) of everything in a file or directory.

    key: the setting that has the path, for errors.
    split: of a directory: the files whose path names it, or those of one that names no split; None: all.
    config: of a directory: those in the folder of this name, if there is one.
    files: of a directory: those of the hub's files that it has, if it has any, in place of a split.
    columns: that Parquet files are read for; empty: all.
    parse: of JSON lines.

    Raises ValueError, one line, for a path that cannot be read.
    """
    if path.is_file():
        yield from _file_rows(path, key, columns, parse)
    elif not path.is_dir():
        raise ValueError(f"{key}={path}: no such file or directory")
    elif (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        import datasets

        try:
            saved: Any = datasets.load_from_disk(str(path))
            table = saved[split] if isinstance(saved, dict) else saved  # of no split: an error that names those there are
        except Exception as error:
            raise ValueError(f"{key}={path}: cannot be read as a dataset ({first_line(error)})") from None
        yield from _table_rows(table)
    else:
        present = [copy for file in files for copy in (path / file, path / Path(file).name) if copy.is_file()]
        present = list(dict.fromkeys(present)) or _files_of(path, key, split, config)
        for file in present:
            for where, row in _file_rows(file, key, columns, parse):
                yield (where if len(present) == 1 else f"{file.relative_to(path)}, {where}"), row


def hub_rows(
    hub_id: str | None,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    files: Sequence[str] = (),
    columns: Sequence[str] = (),
    parse: Parse = parse_json,
) -> Iterator[tuple[str, Any]]:
    """(where, row) of a data set of the hub, from its cache where that has it.

    hub_id: org/name; None: `files` are addresses.
    split, config, revision: of it.
    files: its files to read, in place of a split.
    columns, parse: as in `local_rows`.

    Raises ValueError, one line without the fix, if it cannot be had.
    """
    import datasets
    import huggingface_hub

    name = hub_id or files[0]
    try:
        if hub_id is None:
            paths = [_download(file) for file in files]
        elif files:
            get: Any = partial(huggingface_hub.hf_hub_download, hub_id, repo_type="dataset", revision=revision)
            paths = [Path(get(file)) for file in files]
        else:
            table: Any = datasets.load_dataset(hub_id, config, split=split, revision=revision)
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded ({first_line(error)})") from None
    if not files:
        yield from _table_rows(table)
        return
    for file, path in zip(files, paths, strict=True):
        for where, row in _file_rows(path, name, columns, parse, suffixes=Path(file).suffixes):
            yield (where if len(files) == 1 else f"{file}, {where}"), row


def _download(address: str) -> Path:
    """The file of an address, from the cache if it is there."""
    name = f"{hashlib.sha256(address.encode()).hexdigest()[:16]}-{address.rpartition('/')[2]}"
    path = cache_dir() / "rows" / name
    if not path.exists():
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise ValueError("not in the cache, and HF_HUB_OFFLINE is set")
        with urllib.request.urlopen(address, timeout=30) as response:
            content = response.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
    return path


def _table_rows(table: Any) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(table):
        yield f"row {number}", drop_nulls(row, deep=True)


def _file_rows(
    path: Path, key: str, columns: Sequence[str], parse: Parse, suffixes: Sequence[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """suffixes: of the file's name, where the path is that of a cache."""
    suffixes = path.suffixes if suffixes is None else suffixes
    try:
        if ".parquet" in suffixes[-1:]:
            yield from _parquet_rows(path, columns)
        else:
            yield from _json_rows(path, parse, ".json" in suffixes[-2:], gzip.open if ".gz" in suffixes[-1:] else open)
    except (OSError, EOFError, zlib.error) as error:  # pyarrow's errors are OSErrors, and those of ValueErrors ours
        raise ValueError(f"{key}={path}: cannot be read, or is cut short ({first_line(error)})") from None


def _json_rows(path: Path, parse: Parse, is_json: bool, open_file: Any) -> Iterator[tuple[str, Any]]:
    """Of JSON lines, or of a text that is one list. is_json: the file's name does not say that it has lines."""
    with open_file(path, "rb") as lines:
        begin = lines.read(64).lstrip()
        lines.seek(0)
        if begin.startswith(b"["):
            listed = _json_array(lines.read(), path, is_json)
            if listed is not None:
                for number, row in enumerate(listed, 1):
                    yield f"row {number}", row
                return
            lines.seek(0)
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"line {number}", parse(line, f"{path}, line {number}")


def _json_array(text: bytes, path: Path, is_json: bool) -> list[Any] | None:
    """The elements of a text that is one list of objects; None for lines that each are a list."""
    try:
        value = parse_json(text, str(path))
    except ValueError:
        if is_json:
            raise
        return None
    return value if all(isinstance(row, dict) for row in value) else None


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file: Any = pyarrow.parquet.ParquetFile(path)
        present = [name for name in columns if name in file.schema_arrow.names] or None
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=present):
            for row in batch.to_pylist():
                yield f"row {number}", drop_nulls(row, deep=True)
                number += 1
    except pyarrow.ArrowException as error:
        raise OSError(first_line(error)) from None


def _files_of(path: Path, key: str, split: str | None, config: str | None) -> list[Path]:
    """The files of a directory that hold a split. Raises ValueError if there are none."""
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and not _is_hidden(file.relative_to(path)))
    if config is not None and (inside := [file for file in files if config in file.relative_to(path).parts[:-1]]):
        files = inside
    if not files:
        raise ValueError(f"{key}={path}: no {', '.join(SUFFIXES[:3])} files in this directory; give one that has some")
    if split is None:
        return files
    splits = {file: set(SPLITS.findall(str(file.relative_to(path)).lower())) for file in files}
    as_word = re.compile(rf"(?<![a-z0-9]){re.escape(split.lower())}(?![a-z0-9])")
    named = [file for file in files if split.lower() in splits[file] or as_word.search(file.name.lower())]
    if not named and any(splits.values()):
        others = ", ".join(sorted(set().union(*splits.values())))
        raise ValueError(f"{key}={path}: its files are of {others}, none of split {split}; give a file, or another split")
    return named or files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
