"""Malformed inputs over every door: each must end in one error line that says what is wrong, with an exit code that is not 0.

    python tests/support/malformed.py                 # all cases, and a table: cases, tracebacks, hangs, wrong acceptances
    python tests/support/malformed.py llm files       # the doors whose name begins so
    python tests/support/malformed.py --list

A case is a door, a name and an action. Most are the product of the fields of a door and the values that are none of theirs;
the rest are things that were met. What is not refused as it should be is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

from specdec import LLM, SamplingParams, artifact, checkpoint, hub, method
from specdec.checked import Checked
from specdec.checkpoint import lint, native
from specdec.config import CONF
from specdec.drafter.base import Init
from specdec.llm import EngineArgs
from specdec.measure import acceptance, arrivals, records, serving, tasks
from specdec.policy import cost_table
from specdec.sharing import measured
from specdec.speculative_config import SpeculativeConfig
from specdec.training import data, features, prepare, synthesize

ROOT = CONF.parent
SECONDS = 60  # a case that takes longer hangs
DEEP = "[" * 100_000 + "]" * 100_000
HALF = "\ud800"  # of a surrogate pair
FAST = (
    "llm",
    "generate",
    "chat",
    "sampling",
    "speculative",
    "hub",
    "drafters",
    "prompts",
    "rows",
    "render",
    "prepare",
    "traces",
    "costs",
    "summaries",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """action: called with an empty directory; raises ValueError with one line, or SystemExit after one line on stderr.
    words: what the line must contain."""

    door: str
    name: str
    action: Callable[[Path], Any]
    words: tuple[str, ...] = ()


class Accepted(BaseException):
    """A command line came through to the weights."""


class Hang(BaseException):
    pass


def outcome(case: Case, scratch: Path) -> tuple[str, str]:
    """(verdict, what was said): "refused", or "traceback", "hang", "accepted", "several lines", "says nothing"."""

    def late(*_: Any) -> None:
        raise Hang

    err = io.StringIO()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            case.action(scratch)
        return "accepted", ""
    except Hang:
        return "hang", ""
    except Accepted:
        return "accepted", "came through to the weights"
    except SystemExit as end:
        if not end.code:
            return "accepted", "exit code 0"
        message = err.getvalue() + (end.code if isinstance(end.code, str) else "")
        lines = [line for line in message.strip().splitlines() if not line.startswith(("note: ", "warning: "))]
        if not lines or not lines[-1].startswith("error: "):
            return "says nothing" if len(lines) < 2 else "several lines", message
    except ValueError as error:
        lines = str(error).splitlines() or [""]
        if type(error) is not ValueError and not isinstance(error, lint.TargetError):
            return "traceback", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if any("SPECDEC_DEBUG" in line for line in lines):  # the last catch of a script, which nobody should reach
        return "traceback", "\n".join(lines)
    if len(lines) > 1:
        return "several lines", "\n".join(lines)
    if len(lines[0]) < 12 or "Traceback" in lines[0]:
        return "says nothing", lines[0]
    if missing := [word for word in case.words if word not in lines[0]]:
        return "says nothing", f"{lines[0]} (without {missing[0]!r})"
    return "refused", lines[0]


# ------------------------------------------------------------------------------------------------------ values

VALUES: dict[str, Any] = {
    "none": None, "true": True, "float": 1.5, "nan": float("nan"), "inf": float("inf"), "minus": -1, "zero": 0, "huge": 2**70,
    "number": 7, "digits": "8", "word": "banana", "empty": "", "half": HALF, "list": [1], "words": ["a"], "mapping": {"a": 1},
    "nested": [[["a"]]], "object": object(), "bytes": b"x", "deep": [],
}  # fmt: skip
for _ in range(10_000):
    VALUES["deep"] = [VALUES["deep"]]


def writable(value: Any) -> bool:
    """Whether JSON has such a value."""
    return not isinstance(value, bytes) and type(value) is not object and value is not VALUES["deep"]


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type; an int is a float too, and a bool is nothing but a bool."""
    if kind is Any:
        return True
    origin = typing.get_origin(kind)
    inside = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inside)
    if origin is typing.Annotated:
        return fits(value, inside[0])
    if origin is typing.Literal:
        return value in inside
    if origin is list:
        return isinstance(value, list) and all(fits(each, inside[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inside[0]) and fits(v, inside[1]) for k, v in value.items())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is None or kind is type(None):
        return value is None
    return isinstance(value, kind)


def wrong(kind: Any, *more: str) -> Iterator[tuple[str, Any]]:
    """The values that are not of a type, and `more` of those that are."""
    for name, value in VALUES.items():
        if name in more or not fits(value, kind):
            yield name, value


def of_record(
    door: str, record: type[Checked], build: Callable[..., Any], limits: dict[str, tuple[str, ...]]
) -> Iterator[Case]:
    """Every field of a record with values of other types; limits: and with those of its type beyond its limits."""
    hints = typing.get_type_hints(record, include_extras=True)
    for field in record.model_fields:
        for name, value in wrong(hints[field], *limits.get(field, ())):
            yield Case(door, f"{field}={name}", lambda _, field=field, value=value: build(**{field: value}), (field,))
    if build is not record:
        return
    yield Case(door, "unknown key", lambda _: build(**{next(iter(record.model_fields)) + "x": 1}), ("did you mean",))


# --------------------------------------------------------------------------------------------------- the Python API


@cache
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", max_batch_size=2)


def llm_cases() -> Iterator[Case]:
    build = lambda **settings: LLM(**({"model": "tiny", "device": "cpu"} | settings))
    limits = {
        "model": ("empty", "word"), "dtype": ("word", "digits"), "device": ("word", "digits"), "max_batch_size": ("zero",
        "minus", "huge"), "max_num_seqs": ("zero", "minus", "huge"),
        "max_model_len": ("zero", "minus", "huge"), "prefill_chunk_size": ("zero", "minus"), "seed": ("huge",),
        "num_threads": ("zero", "minus", "huge"), "tensor_parallel_size": ("zero", "minus", "number", "huge"),
        "speculative_config": ("word", "digits", "empty", "mapping"),
    }  # fmt: skip
    numbers = {"seed": ("minus", "zero", "number")}
    for case in of_record("llm", EngineArgs, build, limits):
        key, _, name = case.name.partition("=")
        if name in numbers.get(key, ()) or (key == "revision" and name in ("half",)):
            continue
        yield dataclasses.replace(case, words=()) if name in ("huge", "word", "half", "mapping", "empty") else case
    for name in (
        "/nowhere",
        "a/b/c",
        "tiny-nope",
        "random-nope",
        "no\0name",
        "~nobody-at-all/x",
        "a" * 5000,
        "/etc/passwd",
        " ",
    ):
        yield Case("llm", f"model {name[:12]!r}", lambda _, name=name: build(model=name))
    for dtype in (torch.int64, torch.bool, torch.float64, torch.complex64):
        yield Case("llm", f"dtype {dtype}", lambda _, dtype=dtype: build(dtype=dtype), ("dtype",))
    for text in ("{", "[]", '"x"', DEEP, '{"method": 5}', '{"method": "eagle"}', '{"a": 1}', "null,", f'{{"model": "{HALF}"}}'):
        yield Case("llm", f"speculative_config {text[:20]}", lambda _, text=text: build(speculative_config=text))
    yield Case("llm", "max_batch_size=10**12", lambda _: build(max_batch_size=10**12), ("max_batch_size", "GiB"))


def generate_cases() -> Iterator[Case]:
    prompts: dict[str, Any] = {
        "number": 123, "none": None, "true": True, "float": 1.5, "object": object(), "bytes": b"abc", "mixed list": [1, "a"],
        "list of none": [None], "list of lists": [["a"]], "nothing in it": {}, "text is a number": {"prompt": 5},
        "text is null": {"prompt": None}, "text is a list": {"prompt": ["a"]}, "another key": {"promt": "a"},
        "key is a number": {5: "a"}, "empty text": "", "empty ids": {"prompt_token_ids": []}, "half a pair": HALF,
        "half a pair inside": {"prompt": f"a{HALF}b"}, "second is wrong": ["a", 5], "both, text wrong": {"prompt": 5,
        "prompt_token_ids": [1]},
    }  # fmt: skip
    ids: dict[str, Any] = {
        "text": "123", "floats": [1.7], "whole floats": [1.0], "booleans": [True], "texts": ["1"], "none": None, "number": 5,
        "list of none": [None], "nested": [[1]], "negative": [-1], "beyond": [10**6], "huge": [2**70], "mapping": {1: 2},
        "array of floats": np.array([1.5]), "array of booleans": np.array([True]), "two dimensions": np.array([[1]]),
        "tensor of floats": torch.tensor([1.0]), "bytes": b"12", "nan": [float("nan")], "object": [object()],
        "too many": [1] * 5000,
    }  # fmt: skip
    params: dict[str, Any] = {
        "mapping": {"temperature": 0}, "text": "greedy", "number": 5, "true": True, "too many": [SamplingParams()] * 2,
        "none in a list": [None], "numbers": [5], "empty": [],
    }  # fmt: skip
    for name, prompt in prompts.items():
        yield Case("generate", f"prompt: {name}", lambda _, prompt=prompt: tiny().generate(prompt, use_tqdm=False))
    for name, prompt_value in ids.items():
        action = lambda _, prompt_value=prompt_value: tiny().generate({"prompt_token_ids": prompt_value}, use_tqdm=False)
        yield Case("generate", f"prompt_token_ids: {name}", action)
    for name, values in params.items():
        yield Case(
            "generate",
            f"sampling_params: {name}",
            lambda _, values=values: tiny().generate("a", values, use_tqdm=False),
            ("sampling_params",),
        )
    for name, values in {
        "K over the engine's": {"num_speculative_tokens": 5},
        "K of text": {"num_speculative_tokens": "1"},
    }.items():
        action = lambda _, values=values: tiny().generate("a", SamplingParams(speculative_config=values), use_tqdm=False)
        yield Case("generate", f"speculative_config: {name}", action)
    outside = lambda _: tiny().generate("a", SamplingParams(logit_bias={10**6: 1.0}), use_tqdm=False)
    yield Case("generate", "logit_bias outside the vocabulary", outside)


def chat_cases() -> Iterator[Case]:
    user = {"role": "user", "content": "Hi."}
    messages: dict[str, Any] = {
        "text": "hello", "number": 5, "none": None, "empty": [], "numbers": [5], "texts": ["hello"], "an empty one": [[]],
        "empty message": [{}], "role is a number": [{"role": 5, "content": "a"}], "no content": [{"role": "user"}],
        "content is null": [{"role": "user", "content": None}], "content is a number": [{"role": "user", "content": 5}],
        "no role": [{"content": "a"}], "half a pair": [{"role": "user", "content": HALF}], "mapping": user, "mixed": [user, 5],
        "true": True, "second is empty": [[user], []], "role is a list": [{"role": ["user"], "content": "a"}],
    }  # fmt: skip
    templates: dict[str, Any] = {
        "number": 5, "list": ["a"], "syntax": "{% for", "raises": "{{ raise_exception('no') }}", "divides by 0": "{{ 1 / 0 }}",
        "unknown": "{{ nothing.of.this }}", "includes": "{% include 'x' %}", "unknown filter": "{{ messages | nope }}",
        "unsafe": "{{ messages.__class__.__mro__[1].__subclasses__()[0]() }}", "half a pair": HALF, "renders nothing": "{# #}",
        "index": "{{ messages[99].content.strip() }}", "arithmetic": "{{ 'a' + 1 }}",
        "endless range": "{% for i in range(10**12) %}a{% endfor %}",
        "deep": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    }  # fmt: skip
    for name, conversation in messages.items():
        yield Case("chat", f"messages: {name}", lambda _, conversation=conversation: tiny().chat(conversation, use_tqdm=False))
    for name, text in templates.items():
        action = lambda _, text=text: tiny().chat([user], chat_template=text, use_tqdm=False)
        yield Case("chat", f"chat_template: {name}", action)
    for name, conversation in {"number": 5, "list": ["a"], "text": "a"}.items():
        action = lambda _, conversation=conversation: tiny().chat([user], chat_template_kwargs=conversation, use_tqdm=False)
        yield Case("chat", f"chat_template_kwargs: {name}", action)


def sampling_cases() -> Iterator[Case]:
    limits: dict[str, tuple[str, ...]] = {
        "temperature": ("minus", "nan", "inf"), "top_p": ("minus", "zero", "float", "nan"), "top_k": (), "min_p": ("minus",
        "float"),
        "repetition_penalty": ("zero", "minus", "nan", "inf"), "presence_penalty": ("number", "inf"),
        "frequency_penalty": ("number", "nan"), "seed": ("huge",), "max_tokens": ("zero", "minus"), "min_tokens": ("minus",),
        "n": ("zero", "minus"),  # logprobs=-1 is all of them
        "stop": (), "stop_token_ids": (), "speculative_config": ("mapping",),
    }  # fmt: skip
    allowed = {("stop", "none"), ("stop", "word"), ("stop", "digits"), ("stop_token_ids", "none"), ("bad_words", "none")}
    for case in of_record("sampling", SamplingParams, SamplingParams, limits):
        key, _, name = case.name.partition("=")
        if (key, name) not in allowed:
            yield dataclasses.replace(case, words=()) if name == "half" else case
    for name, values in {
        "stop is empty": {"stop": ""}, "a stop is empty": {"stop": ["a", ""]}, "a stop is a number": {"stop": ["a", 5]},
        "max_new_tokens differs": {"max_tokens": 4, "max_new_tokens": 5}, "max_new_tokens is text": {"max_new_tokens": "4"},
        "min over max": {"min_tokens": 5, "max_tokens": 4}, "bias of text": {"logit_bias": {"5": 1.0}},
        "bias is true": {"logit_bias": {5: True}}, "bias is beyond": {"logit_bias": {5: 1e9}},
        "a bias list": {"logit_bias": [5]},
        "stop id is true": {"stop_token_ids": [True]}, "stop id is text": {"stop_token_ids": ["5"]},
        "K below 0": {"speculative_config": {"num_speculative_tokens": -1}},
        "K is true": {"speculative_config": {"num_speculative_tokens": True}},
        "a method": {"speculative_config": {"method": "ngram"}}, "array of floats": {"stop_token_ids": np.array([1.5])},
    }.items():  # fmt: skip
        yield Case("sampling", name, lambda _, values=values: SamplingParams(**values))


def speculative_cases() -> Iterator[Case]:
    def build(**settings: Any) -> Any:
        return (
            SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3} | settings).resolve().build(tiny().target)
        )

    limits: dict[str, tuple[str, ...]] = {
        "num_speculative_tokens": ("zero", "minus", "word", "huge"), "method": ("word", "digits", "empty"),
        "rejection_sample_method": ("word", "digits", "empty"), "draft_sample_method": ("word",), "model": ("word", "empty"),
        "max_model_len": ("zero", "minus", "huge"), "draft_tensor_parallel_size": ("zero", "minus", "number"),
        "synthetic_acceptance_length": ("number", "nan"), "prompt_lookup_min": ("zero", "minus"),
        "prompt_lookup_max": ("zero", "minus"), "proposers": (), "cost_table": ("word", "empty"),
        "num_speculative_tokens_per_batch_size": ("list", "words", "nested", "word"),
    }  # fmt: skip
    nothing = {"none"}  # null is what an absent key is, but for a method that must be named
    passed = {("num_speculative_tokens_per_batch_size", "mapping")}
    for case in of_record("speculative", SpeculativeConfig, build, limits):
        key, _, name = case.name.partition("=")
        if name not in nothing and (key, name) not in passed:
            yield dataclasses.replace(case, words=())
    for name, invalid in {
        "parse a number": 5, "parse a list": [], "parse true": True, "keys are numbers": {5: 1}, "parse bytes": b"{}",
        "deep": DEEP, "empty text": "",
    }.items():  # fmt: skip
        yield Case("speculative", name, lambda _, invalid=invalid: SpeculativeConfig.parse(invalid))
    dotted = "some_module_that_would_be.imported"
    objects: dict[str, dict[str, Any]] = {
        "hybrid of nothing": {"method": "hybrid", "proposers": []}, "hybrid of numbers": {"method": "hybrid",
        "proposers": [{"method": 5}]},
        "hybrid inside hybrid": {"method": "hybrid", "proposers": [{"method": "hybrid", "proposers": []}]},
        "custom_class without a module": {"method": "custom_class", "model": "NoModule"},
        "custom_class that is not there": {"method": "custom_class", "model": dotted},
        "eagle3 without a model": {"method": "eagle3"}, "dflash without a model": {"method": "dflash"},
        "quantization": {"quantization": "fp8"},
        "layers twice": {
            "method": "extract_hidden_states", "num_speculative_tokens": 1, "shared_storage_path": "x",
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 1]}},
        },
        "rates that rise": {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.1, 0.5, 0.6]},
        "too few rates": {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]},
        "schedule of text": {"num_speculative_tokens_per_batch_size": "banana"},
        "a schedule with a gap": {"num_speculative_tokens_per_batch_size": [[2, 4, 1]]},
    }  # fmt: skip
    for name, invalid_object in objects.items():
        yield Case("speculative", name, lambda _, invalid_object=invalid_object: build(**invalid_object))


def hub_cases() -> Iterator[Case]:
    names: dict[str, Any] = {name: value for name, value in VALUES.items() if name not in ("digits", "word")}
    names |= {
        "digits": "8",
        "word": "banana",
        "file": "/etc/passwd",
        "nul": "a\0b",
        "long": "x" * 100_000,
        "dots": "..",
        "root": "/",
    }
    for name, value in names.items():
        yield Case("hub", f"resolve {name}", lambda _, value=value: hub.resolve(value))
        yield Case("hub", f"checkpoint {name}", lambda _, value=value: checkpoint.load(value))


# ------------------------------------------------------------------------------------------------------------ files


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


BROKEN: dict[str, bytes] = {
    "empty": b"", "cut": b'{"a": ', "text": b"hello", "a list": b"[]", "a number": b"5", "null": b"null", "a word": b'"x"',
    "deep": DEEP.encode(), "deep inside": b'{"a": ' + DEEP.encode() + b"}", "not UTF-8": b'{"a": "\xff\xfe"}',
    "zeros": b"\0" * 64,
    "half a pair": b'{"\\ud800": 1}', "a long number": b'{"a": ' + b"9" * 5000 + b"}", "two values": b"{} {}",
}  # fmt: skip


def relabelled(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a safetensors file, and nothing of its data."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        first = next(name for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) > 1)
        header[first][key] = value

    return change


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "F32 as I32": _set("dtype", "I32"), "F32 as U32": _set("dtype", "U32"), "unknown dtype": _set("dtype", "F31"),
    "dtype is a number": _set("dtype", 5), "negative shape": _set("shape", [-1, 2]), "other shape": _set("shape", [1]),
    "huge shape": _set("shape", [2**62, 2**62]), "offsets reversed": _set("data_offsets", [64, 0]),
    "offsets beyond": _set("data_offsets", [0, 2**60]), "shape is text": _set("shape", "x"),
    "a tensor is gone": lambda header: header.pop(next(name for name in header if name != "__metadata__")),
}  # fmt: skip


def broken_weights(path: Path) -> dict[str, Callable[[], Any]]:
    content = path.read_bytes()
    makers: dict[str, Callable[[], Any]] = {
        "empty": lambda: path.write_bytes(b""), "cut": lambda: path.write_bytes(content[: len(content) // 2]),
        "text": lambda: path.write_text("hello"), "header of 2**60": lambda: path.write_bytes((2**60).to_bytes(8,
        "little") + content[8:]),
        "header is no JSON": lambda: path.write_bytes((4).to_bytes(8, "little") + b"nope" + content),
        "gone": path.unlink, "a directory": lambda: (path.unlink(), path.mkdir()),
    }  # fmt: skip
    return makers | {name: partial(relabelled, path, change) for name, change in HEADERS.items()}


def copied(source: Path, directory: Path) -> Path:
    shutil.copytree(source, directory / "model")
    return directory / "model"


def target_cases() -> Iterator[Case]:
    """A target's directory with one file that is not what it should be."""
    source = hub.tiny()

    def opened(directory: Path) -> Any:
        llm = LLM(directory, dtype="float32", device="cpu", max_batch_size=1)
        out = llm.chat([{"role": "user", "content": "Hi."}], SamplingParams(max_tokens=1), use_tqdm=False)
        return llm.generate("Hi.", SamplingParams(max_tokens=1), use_tqdm=False), out

    def with_file(name: str, content: bytes) -> Callable[[Path], Any]:
        def action(scratch: Path) -> Any:
            directory = copied(source, scratch)
            (directory / name).write_bytes(content)
            return opened(directory)

        return action

    for kind, content in BROKEN.items():
        for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            if (name, kind) in ACCEPTED_FILES:
                continue
            yield Case("files of a target", f"{name}: {kind}", with_file(name, content))
    config = json.loads((source / "config.json").read_text())
    for key, values in {
        "model_type": (5, None, "nope", [], ""), "hidden_size": ("64", 0, -1, 1.5, 2**31, [64], None),
        "num_hidden_layers": ("4", 0, -1, 1.5, [4], 2**31), "vocab_size": ("320", 0, -1, 1.5, [320], 2**40),
        "num_attention_heads": ("4", 0, -1, 3, [4], 2**31), "max_position_embeddings": ("x", -5, [4096]),
        "layer_types": (5, ["nope"] * 4), "hidden_act": (5, "nope"),
        "rms_norm_eps": ("x", [1]),
    }.items():  # fmt: skip
        for value in values:
            content = as_json(config | {key: value})
            yield Case("files of a target", f"config.json: {key}={value!r}", with_file("config.json", content))
    generation = {"eos_token_id": (1.5, "x", True, [1.5], ["x"], {"a": 1}, [[1]])}
    for key, values in generation.items():
        for value in values:
            content = as_json({key: value})
            yield Case(
                "files of a target", f"generation_config.json: {key}={value!r}", with_file("generation_config.json", content)
            )
    for name, content in BROKEN.items():
        if name not in ("deep inside", "half a pair", "a long number"):
            yield Case("files of a target", f"generation_config.json: {name}", with_file("generation_config.json", content))
    weight_map = {
        "weight_map is a number": 5,
        "weight_map is a list": [1],
        "a file is a number": {"a": 5},
        "a file is elsewhere": {"a": "../x"},
    }
    for name, value in weight_map.items():

        def indexed(scratch: Path, value: Any = value) -> Any:
            directory = copied(source, scratch)
            (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
            (directory / "model.safetensors.index.json").write_bytes(as_json({"weight_map": value}))
            return opened(directory)

        yield Case("files of a target", f"index: {name}", indexed)
    for name in broken_weights(source / "model.safetensors"):

        def damaged(scratch: Path, name: str = name) -> Any:
            directory = copied(source, scratch)
            broken_weights(directory / "model.safetensors")[name]()
            return opened(directory)

        yield Case("files of a target", f"model.safetensors: {name}", damaged)
    yield Case("files of a target", "adapter_config.json beside the weights", with_file(hub.ADAPTER, b"{}"), (hub.ADAPTER,))
    for name, text in {
        "syntax": "{% for",
        "raises": "{{ raise_exception('no') }}",
        "divides": "{{ 1/0 }}",
        "unknown": "{{ a.b.c }}",
    }.items():
        yield Case(
            "files of a target", f"chat_template.jinja: {name}", with_file("chat_template.jinja", text.encode()), ("template",)
        )


# a file that nothing reads while another is there, or that is one of its kind all the same
ACCEPTED_FILES = {("model.safetensors.index.json", kind) for kind in BROKEN} | {("config.json", "never")}


@cache
def drafters() -> dict[str, Path]:
    """A directory of each native drafter, and of every foreign format."""
    root = Path(tempfile.mkdtemp())
    target = tiny().target
    directories: dict[str, Path] = {}
    for name in ("eagle3", "mlp", "medusa", "mtp", "eagle", "peagle", "dflash", "dspark"):
        init = Init(train_lm_head=name not in ("eagle", "mtp", "dflash", "dspark"))
        initial = method.find(name).init_checkpoint(target, {}, init)  # type: ignore[attr-defined]
        directories[name] = root / name
        directories[name].mkdir()
        native.save(directories[name], initial, {}, "")
    for name, engine in (
        ("eagle3", "vllm"),
        ("eagle", "vllm"),
        ("eagle3", "speculators"),
        ("mlp", "vllm"),
        ("medusa", "vllm"),
        ("medusa", "medusa"),
        ("peagle", "vllm"),
    ):
        directory = root / f"{name}-{engine}"
        directory.mkdir()
        checkpoint.write(native.load(directories[name]), directory, engine, target)
        directories[directory.name] = directory
    shutil.copytree(hub.tiny(), root / "draft_model")
    directories["draft_model"] = root / "draft_model"
    return directories


def drafter_cases() -> Iterator[Case]:
    def opened(name: str, change: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def action(scratch: Path) -> Any:
            directory = copied(drafters()[name], scratch)
            change(directory)
            return SpeculativeConfig(model=str(directory), num_speculative_tokens=1).resolve().build(tiny().target)

        return action

    def configured(keys: tuple[str, ...], value: Any) -> Callable[[Path], Any]:
        def change(directory: Path) -> None:
            config = json.loads((directory / "config.json").read_text())
            inner = config
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value
            (directory / "config.json").write_bytes(as_json(config))

        return change

    for name, content in BROKEN.items():
        write = lambda directory, content=content: (directory / "config.json").write_bytes(content)
        yield Case("drafters", f"native config.json: {name}", opened("eagle3", write))
    for name in ("eagle3-vllm", "draft_model"):
        for kind in ("deep", "a list", "empty", "not UTF-8"):
            write = lambda directory, kind=kind: (directory / "config.json").write_bytes(BROKEN[kind])
            yield Case("drafters", f"{name} config.json: {kind}", opened(name, write))
    named = ("custom_class", "ngram", "none", "hybrid", "suffix", "extract_hidden_states", "nope", "", 5, None, ["eagle3"])
    for value in named:
        yield Case("drafters", f"method={value!r}", opened("eagle3", configured(("method",), value)))
    for key, values in {
        "format_version": (2, "1", None), "drafter": (5, None, []), "target": (5, None, []),
    }.items():  # fmt: skip
        for value in values:
            yield Case("drafters", f"{key}={value!r}", opened("eagle3", configured((key,), value)))
    sizes: tuple[Any, ...] = (2**31, 2**62, 0, -1, "2", 1.5, True, [1], {"a": 1})
    fields = {
        "eagle3": ("num_hidden_layers", "draft_vocab_size", "layer_type", "norm_output", "geometry", "own_lm_head"),
        "mlp": ("n_predict", "inner_dim", "draft_vocab_size", "tie_weights"),
        "medusa": ("num_heads", "num_hidden_layers", "draft_vocab_size"), "mtp": ("num_modules", "last_hidden_kind"),
        "peagle": ("mask_token_id", "num_hidden_layers", "num_depths"),
        "dflash": ("mask_token_id", "num_hidden_layers", "block_size", "layer_type"),
        "dspark": ("markov_rank", "markov_head_type"),
    }  # fmt: skip
    for name, keys in fields.items():
        for key in keys:
            for value in sizes:
                if (key, value) in (("norm_output", True), ("own_lm_head", True), ("tie_weights", True), ("mask_token_id", 0)):
                    continue
                yield Case("drafters", f"{name}: {key}={value!r}", opened(name, configured(("drafter", key), value)))
    for key in ("intermediate_size", "num_attention_heads", "head_dim", "num_key_value_heads"):
        for value in sizes:
            action = opened("eagle3", configured(("drafter", "geometry", key), value))
            yield Case("drafters", f"eagle3: geometry.{key}={value!r}", action)
    for value in ([1, 1, 1], [], [9, 10, 11], ["1"], 5, [1.5, 2, 3], [True, 2, 3], [-1, 0, 1]):
        action = opened("eagle3", configured(("drafter", native.LAYER_IDS), value))
        yield Case("drafters", f"eagle3: {native.LAYER_IDS}={value!r}", action)
    formats = {
        "eagle3-vllm": ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "draft_vocab_size",
        "intermediate_size"),
        "eagle-vllm": ("hidden_size", "num_hidden_layers", "vocab_size"), "mlp-vllm": ("n_predict", "emb_dim", "inner_dim",
        "vocab_size"),
        "medusa-vllm": ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size", "truncated_vocab_size"),
        "medusa-medusa": ("medusa_num_heads", "medusa_num_layers"),
        "eagle3-speculators": ("transformer_layer_config", "draft_vocab_size", "speculators_config"),
        "peagle-vllm": ("ptd_token_id", "num_hidden_layers"),
    }  # fmt: skip
    for name, keys in formats.items():
        for key in keys:
            for value in (2**31, -1, "2", 1.5, [1]):
                if key == "speculators_config" and value == 2**31:
                    continue
                yield Case("drafters", f"{name}: {key}={value!r}", opened(name, configured((key,), value)))
    for name in ("eagle3", "eagle3-vllm", "eagle3-speculators", "mlp-vllm"):
        for kind in broken_weights(drafters()[name] / "model.safetensors"):
            action = opened(name, lambda directory, kind=kind: broken_weights(directory / "model.safetensors")[kind]())
            yield Case("drafters", f"{name} model.safetensors: {kind}", action)
    adapter = lambda directory: (directory / hub.ADAPTER).write_text("{}")
    for name in ("eagle3", "eagle3-vllm", "draft_model"):
        yield Case("drafters", f"{name}: adapter_config.json", opened(name, adapter), (hub.ADAPTER,))
    index = lambda directory: (directory / "model.safetensors.index.json").write_bytes(as_json({"weight_map": {"a": 5}}))
    yield Case("drafters", "eagle3-vllm: index with a number", opened("eagle3-vllm", index))
    yield Case(
        "drafters", "draft_model: another tokenizer", opened("draft_model", other_tokenizer), ("use_heterogeneous_vocab=true",)
    )


def other_tokenizer(directory: Path) -> None:
    """The same tokens, other ids."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    names = list(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = {name: i for i, name in enumerate(names[1:] + names[:1])}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def lint_cases() -> Iterator[Case]:
    """The lint reports what it finds; it refuses nothing, and must not fail either."""

    def held(name: str, change: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def action(scratch: Path) -> Any:
            directory = copied(drafters()[name], scratch)
            change(directory)
            errors = [finding.text for finding in lint.check(directory) if finding.severity == "error"]
            if not any(lint.loads(lint.check(directory)).values()):
                raise ValueError(errors[0])

        return action

    for name in ("eagle3-vllm", "eagle3-speculators", "eagle-vllm"):
        for kind, content in BROKEN.items():
            write = lambda directory, content=content: (directory / "config.json").write_bytes(content)
            yield Case("lint", f"{name} config.json: {kind}", held(name, write))
        for kind in broken_weights(drafters()[name] / "model.safetensors"):
            action = held(name, lambda directory, kind=kind: broken_weights(directory / "model.safetensors")[kind]())
            yield Case("lint", f"{name} model.safetensors: {kind}", action)


# ------------------------------------------------------------------------------------------------- prompts, rows, tables


def prompt_cases() -> Iterator[Case]:
    lines: dict[str, bytes] = BROKEN | {
        "no turns": b'{"id": 1}', "turns is text": b'{"turns": "a"}', "turns is empty": b'{"turns": []}',
        "a turn is empty": b'{"turns": [" "]}',
        "a turn is a number": b'{"turns": [5]}', "a turn is null": b'{"turns": [null]}',
        "id is a mapping": b'{"turns": ["a"], "id": {}}',
        "id is true": b'{"turns": ["a"], "id": true}', "category is a list": b'{"turns": ["a"], "category": []}',
        "half a pair": b'{"turns": ["\\ud800"]}', "id twice": b'{"turns": ["a"], "id": 1}\n{"turns": ["b"], "id": 1}',
        "not UTF-8": b'{"turns": ["\xff"]}',
    }  # fmt: skip
    for name, line in lines.items():

        def action(scratch: Path, line: bytes = line) -> Any:
            (scratch / "tasks.jsonl").write_bytes(line + b"\n")
            return tasks.load(scratch / "tasks.jsonl")

        yield Case("prompts", name, action)
    for name, value in VALUES.items():
        yield Case("prompts", f"path {name}", lambda _, value=value: tasks.load(value))
        if name not in ("none", "number", "huge"):
            yield Case("prompts", f"limit {name}", lambda _, value=value: tasks.load(tasks.DEMO, value), ("limit",))


def row_cases() -> Iterator[Case]:
    """Training rows: a file of which no row can be used."""
    message = {"role": "assistant", "content": "a"}
    rows: dict[str, bytes] = BROKEN | {name: as_json(row) for name, row in {
        "nothing": {}, "messages is text": {"messages": "a"}, "messages is empty": {"messages": []},
        "a message is text": {"messages": ["a"]},
        "no role": {"messages": [{"content": "a"}]}, "role is a number": {"messages": [{"role": 5, "content": "a"}]},
        "content is a number": {"messages": [{"role": "user", "content": 5}, message]},
        "user only": {"messages": [{"role": "user", "content": "a"}]},
        "prompt only": {"prompt": "a"}, "ids are text": {"input_ids": "12", "loss_mask": [1, 1]},
        "ids are floats": {"input_ids": [1.5, 2, 3], "loss_mask": [1, 1, 1]},
        "ids beyond": {"input_ids": [1, 2, 10**6], "loss_mask": [1, 1, 1]}, "ids negative": {"input_ids": [1, 2, -1],
        "loss_mask": [1, 1, 1]},
        "ids are true": {"input_ids": [True, 2, 3], "loss_mask": [1, 1, 1]}, "mask too short": {"input_ids": [1, 2, 3],
        "loss_mask": [1]},
        "mask of twos": {"input_ids": [1, 2, 3], "loss_mask": [2, 2, 2]}, "mask is text": {"input_ids": [1, 2, 3],
        "loss_mask": "111"},
        "text is a number": {"text": 5}, "text is empty": {"text": ""}, "response is a number": {"prompt": "a", "response": 5},
    }.items()}  # fmt: skip
    for name, row in rows.items():

        def action(scratch: Path, row: bytes = row) -> Any:
            (scratch / "rows.jsonl").write_bytes(row + b"\n")
            return data.load(scratch / "rows.jsonl", tiny().target.tokenizer, 320)

        yield Case("rows", name, action)


def render_cases() -> Iterator[Case]:
    """What training makes tokens of, given by hand."""
    user = {"role": "user", "content": "Hi."}
    answer = {"role": "assistant", "content": "Ho."}
    conversations: dict[str, Any] = {
        "text": "hello", "number": 5, "none": None, "empty": [], "numbers": [5], "texts": ["hello"], "empty message": [{}],
        "role is a number": [user, {"role": 5, "content": "a"}], "no role": [user, {"content": "a"}],
        "content is a number": [user, answer | {"content": 5}], "no content": [user, {"role": "assistant"}],
        "no answer": [user], "mapping": user, "half a pair": [user, answer | {"content": HALF}], "true": True,
        "tool_calls is text": [user, {"role": "assistant", "tool_calls": "x"}],
        "weight is text": [user, answer | {"weight": "x"}],
    }  # fmt: skip
    for name, conversation in conversations.items():
        yield Case("render", name, lambda _, conversation=conversation: data.render(conversation, tiny().target.tokenizer))


def prepare_cases() -> Iterator[Case]:
    """Prompt sets and openings of train/prepare.py."""

    def case(name: str, door: str, content: bytes) -> Case:
        def action(scratch: Path) -> Any:
            (scratch / "file.jsonl").write_bytes(content)
            if door == "openings":
                return synthesize.read_openings(scratch / "file.jsonl")
            return prepare.read_prompts(scratch / "file.jsonl", None, tiny().target.tokenizer)

        return Case("prepare", f"{door}: {name}", action)

    for kind, content in BROKEN.items():
        yield case(kind, "prompts", content)
        yield case(kind, "openings", content)
    opening = {"text": "Tell me", "category": "a", "weight": 1, "ends": "?"}
    for key, kind in (("text", str), ("category", str), ("weight", int), ("ends", str)):
        for name, value in wrong(kind, *(("minus", "huge") if key == "weight" else ())):
            if writable(value) and not (name in ("none", "zero") and key in ("ends", "weight")):
                yield case(f"{key}={name}", "openings", as_json(opening | {key: value}))
    for name, row in {
        "turns is text": {"turns": "a"},
        "turns of numbers": {"turns": [5]},
        "messages is text": {"messages": "a"},
        "nothing": {},
        "no user": {"messages": [{"role": "assistant", "content": "a"}]},
        "content is a number": {"messages": [{"role": "user", "content": 5}]},
    }.items():
        yield case(name, "prompts", as_json(row))


def trace_cases() -> Iterator[Case]:
    lines: dict[str, bytes] = BROKEN | {
        "no time": b"{}", "time is text": b'{"arrival_s": "1"}', "time is true": b'{"arrival_s": true}',
        "time is negative": b'{"arrival_s": -1}',
        "time is nan": b'{"arrival_s": NaN}', "time is inf": b'{"arrival_s": Infinity}',
        "time is huge": b'{"arrival_s": 1e300}',
        "max_tokens is text": b'{"arrival_s": 1, "max_tokens": "5"}', "max_tokens is 0": b'{"arrival_s": 1, "max_tokens": 0}',
        "max_tokens is true": b'{"arrival_s": 1, "max_tokens": true}',
        "id twice": b'{"arrival_s": 1, "id": "a"}\n{"arrival_s": 2, "id": "a"}',
    }  # fmt: skip
    for name, line in lines.items():

        def action(scratch: Path, line: bytes = line) -> Any:
            (scratch / "trace.jsonl").write_bytes(line + b'\n{"arrival_s": 3.0}\n' if line else b"")
            return arrivals.read_trace(scratch / "trace.jsonl")

        yield Case("traces", name, action)
    rates: dict[str, Any] = {
        name: value for name, value in VALUES.items() if name not in ("none", "inf", "number", "float", "huge")
    }
    for name, value in (
        rates | {"phase of text": [["a", 1]], "phase of three": [[1, 2, 3]], "phase of 0 s": [[0, 1]], "pause only": [[1, 0]]}
    ).items():
        yield Case(
            "traces", f"request_rate {name}", lambda _, value=value: arrivals.parse_request_rate(value), ("request_rate",)
        )
        yield Case("traces", f"rates {name}", lambda _, value=value: serving.parse_rates(value), ("rates",))


def cost_cases() -> Iterator[Case]:
    table = {
        "format": cost_table.FORMAT, "format_version": 1, "batch_sizes": [1, 2], "draft_lengths": [0, 3], "verify_s": [[1.0,
        2.0]] * 2,
        "draft_s": [[0.0, 1.0]] * 2, "about": {}, "schedule": None,
    }  # fmt: skip
    contents: dict[str, bytes] = dict(BROKEN)
    for key, value in table.items():
        for name, other in wrong(type(value) if value is not None else list[list[int]] | None):
            if not writable(other):
                continue
            contents[f"{key}={name}"] = as_json(table | {key: other})
        contents[f"without {key}"] = as_json({k: v for k, v in table.items() if k != key}) if key != "schedule" else b"{}"
    more = {
        "rows too few": {"verify_s": [[1.0, 2.0]]}, "ragged": {"verify_s": [[1.0], [1.0, 2.0]]}, "texts": {"verify_s": [["1",
        "2"]] * 2},
        "negative": {"draft_s": [[0.0, -1.0]] * 2}, "no time": {"verify_s": [[0.0, 1.0]] * 2}, "nan": {"draft_s": [[0.0,
        float("nan")]] * 2},
        "sizes fall": {"batch_sizes": [2, 1]}, "sizes are true": {"batch_sizes": [True, 2]},
        "lengths from 1": {"draft_lengths": [1, 3]},
        "sizes of text": {"batch_sizes": ["1", "2"]}, "unknown key": {"more": 1},
    }  # fmt: skip
    contents |= {name: as_json(table | changes) for name, changes in more.items()}
    for name, content in contents.items():

        def action(scratch: Path, content: bytes = content) -> Any:
            (scratch / "cost.json").write_bytes(content)
            return cost_table.load(scratch / "cost.json")

        yield Case("costs", name, action, ("cost.json",))
    yield Case("costs", "not there", lambda scratch: cost_table.load(scratch / "none.json"), ("none.json",))
    yield Case("costs", "a directory", lambda scratch: cost_table.load(scratch))


SUMMARY: dict[str, Any] = {
    "target": "tiny", "dtype": "float32", "prompts": "x", "sampling": {}, "seed": 0, "rejection": "standard", "method": "ngram",
    "num_speculative_tokens": 3, "speculative_config": {}, "lossless": True, "lossless_short": "yes", "max_batch_size": 1,
    "max_model_len": None, "prefill_chunk_size": 512, "environment": {}, "categories": {},
    "overall": dict.fromkeys(
        ("mean_acceptance_length", "tokens_per_step", "decode_tokens_per_s", "draft_s_per_step", "verify_s_per_step", "speedup",
         "speedup_model", "efficiency"), 1.0,
    ) | {"acceptance_rate_per_position": [0.5]},
}  # fmt: skip


def summary_cases() -> Iterator[Case]:
    """What eval/run.py wrote, read by eval/compare.py, eval/profile_cost.py and train/share.py."""
    compare = runpy.run_path(str(ROOT / "eval/compare.py"))
    readers: dict[str, Callable[[Path], Any]] = {
        "compare": lambda directory: compare["read"](directory),
        "profile_cost": lambda directory: acceptance.read_run(directory, "ngram"),
        "share": lambda directory: measured.of_evaluation(directory, directory, "ngram"),
    }  # fmt: skip
    hints = typing.get_type_hints(records.Summary)
    numbers = typing.get_type_hints(records.Numbers)

    def case(reader: str, name: str, content: bytes) -> Case:
        def action(scratch: Path) -> Any:
            (scratch / "summary.json").write_bytes(content)
            (scratch / "requests.jsonl").write_text("{}\n")
            return readers[reader](scratch)

        return Case("summaries", f"{reader}: {name}", action)

    assert not [name for name in readers if readers[name] is None]
    for reader in readers:
        for kind, content in BROKEN.items():
            if kind != "deep inside" or reader:
                yield case(reader, kind, content)
    for place, (key, value) in enumerate(SUMMARY.items()):
        others = [other for _, other in wrong(hints[key]) if writable(other)]
        for number, reader in enumerate(readers):
            other = others[(place + number) % len(others)]
            yield case(reader, f"{key}={other!r}", as_json(SUMMARY | {key: other}))
        yield (
            case("compare", f"without {key}", as_json({k: v for k, v in SUMMARY.items() if k != key}))
            if key not in ("lossless", "speculative_config")
            else case("compare", f"{key} is a number", as_json(SUMMARY | {key: 5}))
        )
        del value
    for place, key in enumerate(SUMMARY["overall"]):
        others = [other for _, other in wrong(numbers[key]) if writable(other)]
        overall = SUMMARY["overall"] | {key: others[place % len(others)]}
        yield case("compare", f"overall.{key}={others[place % len(others)]!r}", as_json(SUMMARY | {"overall": overall}))
        yield case("share", f"categories.chat.{key}", as_json(SUMMARY | {"categories": {"chat": overall}}))


@cache
def finished_run() -> Path:
    """The directory of a run of eval/run.py that is through."""
    directory = Path(tempfile.mkdtemp())
    called("eval/run.py", *RESUMED, f"out_dir={directory / 'run'}", weights=True)(directory)
    return directory / "run"


RESUMED = ("model=tiny", "limit=2", "sampling.max_tokens=4", "baseline=false", "method=ngram")


def resume_cases() -> Iterator[Case]:
    """A run that is to go on from files that are not as they were left, and one whose acceptance is asked for."""
    (first, *rest) = [json.loads(line) for line in (finished_run() / "requests.jsonl").read_text().splitlines()]

    def case(name: str, file: str, content: bytes, *words: str) -> Iterator[Case]:
        def resumed(scratch: Path) -> Any:
            shutil.copytree(finished_run(), scratch / "run")
            (scratch / "run" / file).write_bytes(content)
            called("eval/run.py", *RESUMED, f"out_dir={scratch / 'run'}", "resume=true", weights=True)(scratch)

        def profiled(scratch: Path) -> Any:
            shutil.copytree(finished_run(), scratch / "run")
            (scratch / "run" / file).write_bytes(content)
            return acceptance.read_run(scratch / "run", "ngram")

        yield Case("resumed runs", f"resume, {file}: {name}", resumed, words)
        if file == "requests.jsonl":
            yield Case("resumed runs", f"profile_cost, {file}: {name}", profiled, words)

    tail = b"".join(as_json(row) + b"\n" for row in rest)
    for kind, content in BROKEN.items():
        yield from case(kind, "run.json", content)
        if content:
            yield from case(kind, "requests.jsonl", content + b"\n" + tail)
    for place, (key, value) in enumerate(first.items()):
        if key not in records.RequestRow.model_fields:
            continue
        without = {k: v for k, v in first.items() if k != key}
        if records.RequestRow.model_fields[key].is_required():
            yield from case(f"without {key}", "requests.jsonl", as_json(without) + b"\n" + tail, key)
        others = [other for _, other in wrong(type(value)) if writable(other)]
        other = others[place % len(others)]
        words = () if other == HALF else (key,)  # half of a pair is no JSON
        yield from case(f"{key}={other!r}", "requests.jsonl", as_json(first | {key: other}) + b"\n" + tail, *words)
    shorter = first | {"drafted": first["drafted"][:-1]}
    yield from case("lists of two lengths", "requests.jsonl", as_json(shorter) + b"\n" + tail, "not of one length")
    unlike = first | {"draft_token_ids": [[1] * (count + 1) for count in first["drafted"]]}
    yield from case("drafts of other lengths", "requests.jsonl", as_json(unlike) + b"\n" + tail, "draft_token_ids")


def manifest_cases() -> Iterator[Case]:
    target = tiny().target
    identity = artifact.manifest_of(target, (1, target.num_layers))

    def case(name: str, content: bytes, weights: bool = False) -> Case:
        def action(scratch: Path) -> Any:
            (scratch / "manifest.json").write_bytes(content)
            if weights:
                save_file({"token_ids": torch.zeros(3, dtype=torch.int64)}, scratch / "hidden_states_00000.safetensors")
            return features.StoredFeatures(scratch, target, (1,))

        return Case("manifests", name, action)

    for kind, content in BROKEN.items():
        yield case(kind, content)
    for key in ("format", "version", "hidden_size", "num_layers", "vocab_size", "layer_ids", "dtype"):
        for name, value in VALUES.items():
            if not writable(value) or (key, name) in (("version", "true"),):
                continue
            yield case(f"{key}={name}", as_json(identity | {key: value}))
    yield case("nothing beside it", as_json(identity))
    yield case("no states in the file", as_json(identity), weights=True)


# ------------------------------------------------------------------------------------------------------- command lines

SCRIPTS = {
    "eval/run.py": ("eval", ("model=tiny", "limit=1", "sampling.max_tokens=2")),
    "eval/load.py": ("load", ("model=tiny", "limit=1")),
    "eval/choose.py": ("choose", ("model=tiny", "limit=1")),
    "eval/profile_cost.py": ("profile_cost", ("model=tiny",)),
    "eval/bench.py": ("bench", ("model=tiny", "limit=1")),
    "train/eagle.py": ("train", ("model=tiny",)),
    "train/mtp.py": ("train", ("model=tiny",)),
    "train/mlp.py": ("train", ("model=tiny",)),
    "train/medusa.py": ("train", ("model=tiny",)),
    "train/dflash.py": ("train", ("model=tiny",)),
    "train/pard.py": ("train", ("model=tiny",)),
    "train/draft_model.py": ("train", ("model=tiny",)),
    "train/prepare.py": ("prepare", ("model=tiny", "out=made.jsonl")),
    "train/extract.py": ("extract", ("model=tiny",)),
    "train/share.py": ("share", ("checkpoint=nowhere", "out_dir=shared")),
}
METHOD_OF = {
    "train/mtp.py": "mtp",
    "train/mlp.py": "mlp",
    "train/medusa.py": "medusa",
    "train/dflash.py": "dflash",
    "train/pard.py": "pard",
    "train/draft_model.py": "draft_model",
}
NAMES = ("name", "size", "shape", "architecture")  # keys whose value is a name, of whatever form


def called(script: str, *arguments: str, weights: bool = False) -> Callable[[Path], Any]:
    """A script in this process, from an empty directory. What comes through to the weights of a model is an acceptance, but
    where `weights` says that they are looked at first."""

    def action(scratch: Path) -> None:
        def through(*_: Any, **__: Any) -> None:
            raise Accepted

        here = Path.cwd()
        os.chdir(scratch)
        try:
            with (
                mock.patch.object(sys, "argv", [str(ROOT / script), *arguments]),
                contextlib.nullcontext() if weights else mock.patch("specdec.model.target.load_weights", through),
                mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
            ):
                runpy.run_path(str(ROOT / script), run_name="__main__")
        finally:
            os.chdir(here)

    return action


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value and key not in ("sizes",):
            yield from leaves(value, f"{prefix}{key}.")
        elif key != "sizes":
            yield f"{prefix}{key}", value


def written(value: Any) -> list[tuple[str, str]]:
    """What is not of a default's kind, as the command line has it."""
    number = [("word", "banana"), ("list", "[1]"), ("true", "true"), ("mapping", "{a: 1}")]
    text = [("list", "[1]"), ("number", "5"), ("mapping", "{a: 1}"), ("empty", "''")]
    if isinstance(value, bool):
        return [("word", "maybe"), ("number", "5"), ("list", "[1]"), ("empty", "''")]
    if isinstance(value, int):
        return [*number, ("float", "1.5"), ("nan", "nan")]
    if isinstance(value, float):
        return [*number, ("nan", "nan"), ("inf", "inf")]
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [("word", "banana"), ("number", "5"), ("mapping", "{a: 1}"), ("true", "true")]
    return [("true", "true"), ("nested", "[[{a: 1}]]"), ("nan", "nan")]


def command_cases() -> Iterator[Case]:
    """Every key of every script with a value that is none of its kind, one after the other; and what was met."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    turn = Counter[str]()
    for script, (name, base) in SCRIPTS.items():
        chosen = ["model=tiny", f"method={METHOD_OF[script]}"] if script in METHOD_OF else []
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = OmegaConf.to_container(compose(name, chosen), throw_on_missing=False)
        for key, value in leaves(composed):
            last = key.split(".")[-1]
            if last in NAMES or (key.startswith("model.") and "model" not in base[0]) or key == "request_rate":
                continue
            if isinstance(value, str) and value in ("???",):
                value = None
            wrong_ones = written(None if isinstance(value, str) and value.startswith("${") else value)
            kind, text = wrong_ones[turn[last] % len(wrong_ones)]
            if (last, kind) in (("stop", "word"), ("zero_first_embedding", "true")):
                continue
            turn[last] += 1
            arguments = [*(argument for argument in base if argument.partition("=")[0] != key), f"{key}={text}"]
            yield Case("command lines", f"{script} {key}={text}", called(script, *arguments), (last,))
    run = partial(called, "eval/run.py")
    small = ("model=tiny", "limit=1")
    for words in (
        ("nonsense",), ("=5",), ("limit",), ("limit=",), ("limit=1=2",), ("limit=[1",), ("limit={a",), ("'",), ("limit='",),
        ("+limt=3",), ("~sampling",),
        ("methud=ngram",), ("method=ngrma",), ("method=null",), ("method=[ngram]",), ("method=ngram,suffix",), ("method/x=y",),
        ("../eval=x",),
        ("hydra/launcher=nope",), ("hydra/sweeper=nope",), ("hydra.nope=1",), ("hydra.run=5",), ("hydra/job_logging=nope",),
        ("--nope",), ("--config-name=nope",), ("--config-dir", "/nowhere"), ("--cfg", "nope"), ("--info", "nope"), ("-x",),
        ("--multirun=5",),
        ("method=hybrid", "method.proposers={}"), ("method=hybrid", "method.proposers=5"), ("method=hybrid",
        "method.proposers=[5]"),
        ("method=hybrid", "method.proposers=[{}]"), ("model.path=''",), ("model.path=5",), ("model.path=[a]",), ("model=llama",
        "model.path=''"),
        ("model.path=null",), ("model.path=/nowhere",), ("task=jsonl",), ("task.path=''",), ("task.path=[a]",),
        ("task.path=/nowhere",),
        ("checkpoint=''",), ("checkpoint=[a]",), ("checkpoint=/nowhere",), ("checkpoint=5",), ("out_dir=''",), ("out_dir=[a]",
        ), ("out_dir=5",),
        ("resume=true",), ("seed=1180591620717411303424",), ("max_batch_size=0",), ("num_threads=0",), ("num_threads=1000000",
        ), ("num_threads=1.5",),
        ("sampling.temperature=nan",), ("sampling.temperature=true",), ("sampling.top_p=2",), ("sampling.stop=5",),
        ("sampling.stop=['']",),
        ("sampling.logit_bias=[5]",), ("sampling.logit_bias={a: 1}",), ("sampling.ignore_eos=yes",),
        ("sampling.skip_special_tokens=1",),
        ("sampling.max_tokens=0",), ("sampling=5",), ("sampling=[]",), ("method.num_speculative_tokens=auo",),
        ("method.num_speculative_tokens=[3]",),
        ("method.num_speculative_tokens=1.5",), ("rejection=synthetic",), ("rejection.synthetic_acceptance_rates=[1]",),
        ("speculative_config=5",), ("speculative_config={",), ("speculative_config={method: 5}",),
        ('speculative_config={"method": "ngram",}',),
        (f"speculative_config={DEEP[:2000]}",), ("speculative_config={}",), ("num_speculative_tokens_per_batch_size=5",),
        ("num_speculative_tokens_per_batch_size=[[1]]",), ("cost_table=/nowhere", "enable_adaptive_verification=true"),
        ("cost_table=5",),
        ("experiment=nope",), ("logger=nope",), ("tensor_parallel_size=0",), ("tensor_parallel_size=2",), ("-m",
        "limit=1,maybe"), ("-m", "seed=1,1.5"),
        ("-m", "method=ngram,nope"), ("limit=9999999999999999999999999x",), ("limit=${nowhere}",), ("limit=${",), ("limit=???",
        ),
    ):  # fmt: skip
        keys = {word.partition("=")[0] for word in words}
        rest = [argument for argument in small if argument.partition("=")[0] not in keys]
        yield Case("command lines", f"run.py {' '.join(words)[:60]}", run(*rest, *words))
    others: dict[str, list[tuple[str, ...]]] = {
        "train/eagle.py": [
            ("method.num_speculative_tokens=auto",), ("method.num_speculative_tokens=1.5",), ("train.lr=nan",),
            ("train.lr=fast",), ("train.max_steps=0",),
            ("train.drafter.eagle_aux_hidden_state_layer_ids=5",), ("train.init.train_lm_head=yes",),
            ("train.objective.loss={ce: x}",), ("method=ngram",),
            ("method=none",), ("train=nope",), ("train.drafter=5",), ("train.objective.loss={nope: 1}",),
            ("train.drafter.geometry=5",), ("data.max_length=0",),
            ("data.limit=0",), ("data.path=/nowhere", "data=jsonl"), ("data=jsonl",), ("eval.max_batch_size=0",), ("seed=-1",),
            ("checkpoint=[a]",),
            ("features.path=5",), ("features.path=/nowhere",), ("train.global_batch_size=0",), ("train.mixed_precision=fp8",),
            ("data.template_kwargs=5",),
        ],
        "train/share.py": [
            ("num_speculative_tokens=1.5",), ("num_speculative_tokens=true",), ("num_speculative_tokens=0",), ("format=5",),
            ("format=nope",), ("push=nope",),
            ("dtype=5",), ("target=[a]",), ("eval=5",), ("eval=/nowhere",), ("lint=/nowhere",), ("lint=5",), ("revision=5",),
            ("out_dir=''",), ("private=yes",),
        ],
        "train/prepare.py": [
            ("answers.temperatures=[]",), ("answers.temperatures=5",), ("answers.temperatures=[x]",),
            ("answers.temperatures=[-1]",), ("limit=0",),
            ("synthesize.count=0",), ("prompts=5",), ("prompts=/nowhere",), ("synthesize.openings=/nowhere",),
            ("max_batch_size=0",), ("seed=1.5",),
        ],
        "train/extract.py": [("layout=nope",), ("shard_mb=-1",), ("layer_ids=5",), ("layer_ids=[x]",), ("layer_ids=[1.5]",),
        ("data.path=5",)],
        "eval/load.py": [
            ("arrivals=nope",), ("request_rate=x",), ("request_rate=-1",), ("request_rate=[]",), ("request_rate={a: 1}",),
            ("trace=5",), ("arrivals=trace",),
            ("num_requests=0",), ("resume=true",), ("arrivals=trace", "trace=/nowhere"), ("seed=-1",),
        ],
        "eval/choose.py": [
            ("methods=[nope]",), ("methods=ngram",), ("rates=[one]",), ("rates=[one,x]",), ("rates=5",), ("runs=[a]",),
            ("runs={a: 5}",), ("runs={a: {method: nope}}",),
            ("checkpoints={ngram: x}",), ("checkpoints={eagle3: [a]}",), ("repeats=0",), ("methods=[ngram,ngram]",),
        ],
        "eval/profile_cost.py": [("repeats=0",), ("context=0",), ("max_draft=0",), ("acceptance=/nowhere",), ("acceptance=5",),
        ("max_batch_size=x",)],
        "eval/bench.py": [("dtypes=[1]",), ("dtypes=[nope]",), ("dtypes=[]",), ("num_threads=[0]",), ("num_threads=[x]",),
        ("batch_sizes=[0]",), ("draft_model=5",), ("batch_sizes=5",)],
    }  # fmt: skip
    for script, lists in others.items():
        base = SCRIPTS[script][1]
        for words in lists:
            rest = [
                argument for argument in base if argument.partition("=")[0] not in {word.partition("=")[0] for word in words}
            ]
            late = any("/nowhere" in word for word in words)  # files that are opened when the target is there
            yield Case("command lines", f"{script} {' '.join(words)}", called(script, *rest, *words, weights=late))
    for script, words in (
        ("eval/compare.py", ()), ("eval/compare.py", ("nowhere", "nowhere2")), ("eval/compare.py", ("--nope",)),
        ("eval/prove.py", ("--nope",)),
        ("eval/prove.py", ("--prompts", "x")), ("eval/prove.py", ("--methods", "nope")), ("eval/prove.py", ("--checkpoint",
        "/nowhere")),
        ("eval/prove.py", ("--model", "/nowhere")), ("eval/prove.py", ("--prompts", "0")), ("eval/prove.py", ("--max-tokens",
        "0")),
        ("eval/gpu.py", ("--nope",)), ("train/bench.py", ("--nope",)), ("train/bench.py", ("--length", "x")),
        ("train/bench.py", ("--only", "nope")),
    ):  # fmt: skip
        yield Case("command lines", f"{script} {' '.join(words)}", called(script, *words))


def process_cases() -> Iterator[Case]:
    """A few as processes of their own: what the interpreter and the shell see."""

    def started(script: str, *arguments: str) -> Callable[[Path], Any]:
        def action(scratch: Path) -> None:
            command = [sys.executable, str(ROOT / script), *arguments]
            env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=SECONDS)
            sys.stderr.write(done.stderr)
            sys.exit(done.returncode)

        return action

    for script, *arguments in (
        ("eval/run.py", "limt=3"), ("eval/run.py", "hydra/launcher=nope"), ("eval/run.py", "--nope"), ("eval/run.py",
        "model=tiny", "method=hybrid", "method.proposers={}"),
        ("eval/run.py", "model=tiny", f"speculative_config={DEEP[:4000]}"), ("eval/run.py", "model=tiny",
        "max_batch_size=1000000000000"),
        ("train/eagle.py", "model=tiny", "method.num_speculative_tokens=auto"), ("train/share.py", "checkpoint=x", "out_dir=y",
        "num_speculative_tokens=1.5"),
        ("eval/compare.py", "nowhere", "other"), ("eval/prove.py", "--nope"), ("train/prepare.py", "out=x.jsonl",
        "model.path=''"),
    ):  # fmt: skip
        yield Case("processes", f"{script} {' '.join(arguments)[:60]}", started(script, *arguments))


MAKERS: dict[str, Callable[[], Iterator[Case]]] = {
    "llm": llm_cases, "generate": generate_cases, "chat": chat_cases, "sampling": sampling_cases,
    "speculative": speculative_cases,
    "hub": hub_cases, "files of a target": target_cases, "drafters": drafter_cases, "lint": lint_cases, "prompts": prompt_cases,
    "rows": row_cases, "render": render_cases, "prepare": prepare_cases, "traces": trace_cases, "costs": cost_cases,
    "summaries": summary_cases, "manifests": manifest_cases,
    "resumed runs": resume_cases,
    "command lines": command_cases, "processes": process_cases,
}  # fmt: skip


def verdict_of(case: Case) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as scratch:
        return outcome(case, Path(scratch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("doors", nargs="*", help="those whose name begins so; all unless given")
    parser.add_argument("--list", action="store_true", help="name the cases, and try none")
    parser.add_argument("--say", action="store_true", help="print every line that was said")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    chosen = [door for door in MAKERS if not arguments.doors or door.startswith(tuple(arguments.doors))]
    verdicts: dict[str, Counter[str]] = {}
    for door in chosen:
        began = time.monotonic()
        cases = list(MAKERS[door]())
        verdicts[door] = Counter()
        for case in cases:
            if arguments.list:
                print(f"{door}: {case.name}")
                continue
            verdict, message = verdict_of(case)
            verdicts[door][verdict] += 1
            if verdict != "refused":
                print(f"{verdict.upper()}: {door}: {case.name}\n    {message.strip()[-1500:]}", flush=True)
            elif arguments.say:
                print(f"{door}: {case.name}: {message}")
        verdicts[door]["seconds"] = round(time.monotonic() - began)
    if arguments.list:
        return
    columns = ("refused", "traceback", "hang", "accepted", "several lines", "says nothing", "seconds")
    print(f"{'door':20} {'cases':>6} " + " ".join(f"{column:>13}" for column in columns))
    for door, verdicts_of_door in [*verdicts.items(), ("all", sum(verdicts.values(), Counter()))]:
        count = verdicts_of_door.total() - verdicts_of_door["seconds"]
        print(f"{door:20} {count:>6} " + " ".join(f"{verdicts_of_door[column]:>13}" for column in columns))
    sys.exit(
        any(
            verdicts_of_door.total() - verdicts_of_door["seconds"] - verdicts_of_door["refused"]
            for verdicts_of_door in verdicts.values()
        )
    )


if __name__ == "__main__":
    main()
