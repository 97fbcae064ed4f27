"""Values that come from outside, checked: a mistake is one line with the key, the value, the limit and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, ClassVar, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo


def nearest(key: str, valid: Iterable[str], listed: Iterable[str] | None = None, cutoff: float = 0.5) -> str:
    """The end of an error line about an unknown key: the valid key that looks most like it, or all (of `listed`). cutoff: how
    alike they must be, up to 1."""
    options = sorted(set(valid))
    close = difflib.get_close_matches(key, options, n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(options if listed is None else listed)}"


def first_line(error: Exception) -> str:
    """Another library's error, short enough for a part of our line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def short_repr(value: Any, width: int = 80) -> str:
    """A value for an error line, cut to `width` characters."""
    try:
        text = repr(value) if len(str(value)) < 10 * width else repr(str(value)[: 2 * width])
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep"
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width]}..."


def builtin(value: Any) -> Any:
    """A value with numpy's numbers and arrays, and tuples, as the numbers and lists that JSON has."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [builtin(each) for each in value]
    return {builtin(key): builtin(each) for key, each in value.items()} if isinstance(value, dict) else value


def check_text(text: str, what: str) -> str:
    """The text. Raises ValueError for one with half of a surrogate pair, which no tokenizer can read. what: names it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start : error.start + 1]!r} at character {error.start}"
        raise ValueError(f"{what} holds {half}, half of a surrogate pair, which is no text; remove it") from None
    return text


class Checked(BaseModel):
    """A record whose mistakes are one line: the key, the value, the limit, and for an unknown key the nearest one.

    Types are strict: true is not 1, nor "5" 5, nor 5.0 5. An int where a float is wanted, and numpy's numbers, are what they
    are. A field whose type has a description, such as Annotated[int, Field(ge=1, description="a number of at least 1")], is
    described in its error line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    what: ClassVar[str] = "key"  # what a field is called in messages; of a group of a config file, "NAME key"
    aliases: ClassVar[tuple[str, ...]] = ()  # further keys that a "before" validator accepts
    not_built: ClassVar[frozenset[str]] = frozenset()  # keys of vLLM's that we lack; None and False ask for nothing

    def __init__(self, **values: Any) -> None:
        for key in [key for key in values if key in self.not_built]:
            if values.pop(key) not in (None, False):
                raise ValueError(f"{self.what} {key!r} is not built here; leave it out")
        known = {*type(self).model_fields, *self.aliases}
        for key in values:
            if key not in known:
                # where a key may be one of vLLM's, only what looks like a typo is taken for one
                hint = nearest(key, known, type(self).model_fields, cutoff=0.8 if self.not_built else 0.5)
                not_built = ", or not built here" if self.not_built and hint.startswith("valid") else ""
                raise ValueError(f"unknown {self.what} {key!r}{not_built}; {hint}")
        for key, value in values.items():
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str):
                    check_text(text, f"{self.what} {key}")
            try:
                values[key] = builtin(value)
            except RecursionError:
                raise ValueError(f"{self.what} {key} is nested too deep; give a value, or a list of values") from None
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(first_mistake(error, self.prefix(), type(self), values)) from None

    @classmethod
    def prefix(cls) -> str:
        """Text before a key in messages: `train.` for the group train."""
        group = cls.what.removesuffix("key").rstrip()
        return "" if cls.what == "key" else f"{group}." if group != cls.what else f"{cls.what} "


def first_mistake(
    error: ValidationError, prefix: str = "", record: type[BaseModel] | None = None, values: dict[str, Any] | None = None
) -> str:
    """pydantic's report as one line: the first key that is wrong, its value, and the limit.

    prefix: text before the key
    record, values: the class of the record and what it was given, for the descriptions of its fields
    """
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    limit = "not empty" if first["type"] == "string_pattern_mismatch" else first["msg"].removeprefix("Input should be ")
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "missing" and record is not None:
        return f"{prefix}{name} is missing; give {prefix}{name}=..."
    if record is not None and values is not None and (wanted := _description(record.model_fields[name])):
        value = values[name]
        wanted = wanted.format(key=f"{prefix}{name}", value=value if isinstance(value, int | float) else "NAME")
        more = "" if limit.startswith("a valid ") else f" ({limit})"  # the description says what type
        return f"{prefix}{name}={short_repr(value)} must be {wanted}{more}"
    # a field of several types has the failing type behind its name
    types = ("int", "str", "float", "bool", "none")
    parts = [part for part in first["loc"] if part not in types and not re.search(r"\[|constrained", str(part))]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if first["type"] in ("model_type", "dict_type"):
        return f"{prefix}{key}={short_repr(first['input'])} must be a mapping, such as {prefix}{key}={{name: ...}}"
    return f"{prefix}{key}={short_repr(first['input'])}: {first['msg'].lower()}"


def _description(field: FieldInfo) -> str | None:
    """What the value of a field must be, in words, if its type says so."""
    if field.description is not None:
        return field.description
    options = get_args(field.annotation)
    for option in options:
        for metadata in getattr(option, "__metadata__", ()):
            if isinstance(metadata, FieldInfo) and metadata.description is not None:
                kind, semicolon, hint = metadata.description.partition(";")
                return f"{kind}{', or null' if type(None) in options else ''}{semicolon}{hint}"
    return None
