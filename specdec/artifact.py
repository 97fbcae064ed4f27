"""Artifacts: the target's hidden states of training samples, on disk.

An artifact is a directory of safetensors files with `hidden_states [tokens, layers, width]` and `token_ids [tokens]`, the
layout that vLLM's extraction writes per request. Our files hold many samples end to end; their headers list where each begins
and the hash of its bytes, and a `manifest.json` is beside them. Files that vLLM wrote are read as they are. Layer ids are
vLLM's: id i is what enters layer i, id num_layers what leaves the last one, before the final norm. Samples are found by their
tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec import __version__
from specdec.checked import first_line
from specdec.drafter.batch import Features, Sample
from specdec.files import apply_umask, parse_json, read_json_object, writing
from specdec.model.target import CausalLM

FORMAT = "specdec-hidden-states"
PREFIX = "hidden-"
SHARD = re.compile(rf"{PREFIX}(\d+)")  # stem of a shard's name
MANIFEST = "manifest.json"


def manifest_of(target: CausalLM, layers: tuple[int, ...], revision: str | None = None) -> dict[str, Any]:
    """What a manifest records of the origin of its hidden states."""
    tokenizer_digest: str | None = None
    template_digest: str | None = None
    try:
        tokenizer: Any = target.tokenizer
        tokenizer_digest = _sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        template_digest = _sha256((tokenizer.chat_template or "").encode())
    except ValueError:  # a target without a tokenizer takes token ids
        pass
    return {
        "format": FORMAT,
        "version": 1,
        "target": target.name,
        "revision": revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "layer_ids": list(layers),
        "layer_numbering": "vllm: id i enters layer i, id num_layers leaves the last one",
        "last_hidden_kind": "pre_norm",
        "tokenizer_sha256": tokenizer_digest,
        "chat_template_sha256": template_digest,
        "producer": f"specdec {__version__}",
    }


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an artifact. Raises ValueError if it is of another format or cannot be read."""
    path = directory / MANIFEST
    manifest = read_json_object(path, "the directory cannot be used")
    if manifest.get("format") != FORMAT or manifest.get("version") != 1:
        raise ValueError(f"{path}: format {manifest.get('format')!r} version {manifest.get('version')!r} is not {FORMAT!r} 1")
    return dict(manifest)


def num_bytes(target: CausalLM, layers: Sequence[int], samples: Iterable[Sample]) -> int:
    """What the artifacts of these samples take on disk: itemsize x width x layers per token, and what is stored beside it."""
    per_token = target.dtype.itemsize * target.hidden_size * len(layers) + 8 + 1 + 8 + 4
    return sum(len(sample.token_n) for sample in samples) * per_token


class Writer:
    """Writes samples into shards of an artifact directory. A shard appears complete, under its name, or not at all.

    directory: made if it is not there.
    manifest: of `manifest_of`; must agree with that of the directory, if it has one.
    shard_bytes: a shard is closed when it holds this many; 0 writes a file per sample.
    plain: only hidden_states and token_ids, in a file per sample that is named after it, as vLLM writes them per request.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], shard_bytes: int = 1 << 28, plain: bool = False):
        self.directory = directory
        self.shard_bytes = 0 if plain else shard_bytes
        self.plain = plain
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / MANIFEST
        if path.exists():
            stored = read_manifest(directory)
            for key, value in manifest.items():
                if key != "producer" and stored.get(key) != json.loads(json.dumps(value)):
                    raise ValueError(f"{path}: {key} is {stored.get(key)!r}, not {value!r}; use another out_dir=")
        else:
            _write_text(path, json.dumps(manifest, indent=1))
        self.pending: list[tuple[Sample, Features]] = []
        self.pending_bytes = 0
        shards = [SHARD.fullmatch(path.stem) for path in directory.glob(f"{PREFIX}*.safetensors")]
        self.number = max((int(shard[1]) for shard in shards if shard), default=-1) + 1

    def add(self, sample: Sample, features: Features) -> None:
        self.pending.append((sample, features))
        self.pending_bytes += features.num_bytes
        if self.pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self.pending:
            return
        tensors = [_tensors(sample, features) for sample, features in self.pending]
        entries = []
        offset = 0
        for (sample, _), sample_tensors in zip(self.pending, tensors, strict=True):
            length = len(sample.token_n)
            entries.append({"id": sample.id, "offset": offset, "length": length, "sha256": _digest(sample_tensors)})
            offset += length
        keys = ("hidden_states", "token_ids") if self.plain else tuple(tensors[0])
        joined = {key: torch.cat([sample_tensors[key] for sample_tensors in tensors]).contiguous() for key in keys}
        metadata = None if self.plain else {"format": FORMAT, "samples": json.dumps(entries)}
        name = self.plain_name(self.pending[0][0]) if self.plain else f"{PREFIX}{self.number:05d}.safetensors"
        # a directory of its own: safetensors too writes under temporary names beside the file, which nobody else knows
        temporary = self.directory / f".{PREFIX}{os.getpid()}.tmp" / name
        try:
            temporary.parent.mkdir(exist_ok=True)
            save_file(joined, temporary, metadata=metadata)
            apply_umask(temporary)
            if self.plain:
                temporary.replace(self.directory / name)
            else:
                self._place(temporary)
        except (SafetensorError, OSError) as error:
            raise OSError(f"{self.directory / name} could not be written ({first_line(error)}); is the disk full?") from None
        finally:
            shutil.rmtree(temporary.parent, ignore_errors=True)
        self.pending = []
        self.pending_bytes = 0

    def _place(self, temporary: Path) -> None:
        """Give a shard the next free number; other processes may write into the directory, too."""
        while True:
            final = self.directory / f"{PREFIX}{self.number:05d}.safetensors"
            self.number += 1
            if final.exists():
                continue
            try:
                os.link(temporary, final)
            except FileExistsError:
                continue
            except OSError:  # a file system without links
                temporary.replace(final)
            return

    def plain_name(self, sample: Sample) -> str:
        """The name of a sample's file, if `plain`."""
        stem = re.sub(r"^\.|[^A-Za-z0-9._-]", "_", sample.id)[:100]
        if stem != sample.id:  # other ids may come to the same stem
            stem += f"-{token_key(sample.token_n)[:8]}"
        return f"{stem}.safetensors"

    def stored_keys(self, samples: Sequence[Sample]) -> set[str]:
        """Keys of the samples that the directory holds already. Removes damaged files of earlier runs and what they left under
        temporary names.

        samples: those to be written, by which the files of a plain directory are known.
        Raises ValueError for a damaged file that no writer made.
        """
        for temporary in self.directory.glob(f".{PREFIX}*.tmp"):
            shutil.rmtree(temporary)
        plain_names = {self.plain_name(sample) for sample in samples} if self.plain else set()
        keys: set[str] = set()
        for path in sorted(self.directory.glob("*.safetensors")):
            try:
                stored = list(locations(path))
                for location, _ in stored:
                    read(location)
            except ValueError:
                if path.name not in plain_names and not SHARD.fullmatch(path.stem):
                    raise ValueError(f"{path} holds no hidden states; use a directory of its own") from None
                path.unlink()
                continue
            keys |= {token_key(token_n) for _, token_n in stored}
        return keys


@dataclass(frozen=True)
class SampleLocation:
    """Where a sample is stored. sha256: of its tensors, None if the file records none."""

    path: Path
    offset: int
    length: int
    sha256: str | None
    id: str


def locations(path: Path) -> Iterator[tuple[SampleLocation, np.ndarray]]:
    """The samples of a file and their tokens. Raises ValueError if the file is not complete."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            token_N = file.get_tensor("token_ids").numpy()
            shape = file.get_slice("hidden_states").get_shape()
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: cut short or not hidden states ({first_line(error)}); extract again with resume=true"
        ) from None
    if shape[0] != len(token_N):
        raise ValueError(f"{path}: {shape[0]} states for {len(token_N)} tokens; extract again with resume=true")
    if "samples" not in metadata and FORMAT not in metadata.values():
        yield SampleLocation(path, 0, len(token_N), None, path.stem), token_N
        return
    try:
        records = parse_json(metadata["samples"], str(path))
        entries = [(int(e["offset"]), int(e["length"]), e["sha256"], str(e["id"])) for e in records]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: its list of samples is damaged; extract again with resume=true") from None
    for offset, length, sha256, name in entries:
        yield SampleLocation(path, offset, length, sha256, name), token_N[offset : offset + length]


def read(location: SampleLocation) -> dict[str, Tensor]:
    """Everything stored of a sample. Raises ValueError if its hash is not that of what was written."""
    start = location.offset
    end = start + location.length
    try:
        with safe_open(location.path, framework="pt") as file:
            tensors = {key: file.get_slice(key)[start:end] for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{location.path}: cannot be read ({first_line(error)}); extract again with resume=true") from None
    if location.sha256 is not None and _digest(tensors) != location.sha256:
        raise ValueError(f"{location.path}: sample {location.id} is not what was written; extract again with resume=true")
    return tensors


def token_key(token_n: np.ndarray) -> str:
    """What a sample is found by: the hash of its tokens."""
    return _sha256(np.ascontiguousarray(token_n, dtype=np.int64).tobytes())


def _tensors(sample: Sample, features: Features) -> dict[str, Tensor]:
    tensors = {
        "hidden_states": features.hidden_nTD.cpu(),
        "token_ids": torch.from_numpy(sample.token_n),
        "loss_mask": torch.from_numpy(sample.mask_n.astype(np.uint8)),
    }
    if features.argmax_n is not None and features.logsumexp_n is not None:
        tensors |= {"argmax": features.argmax_n.cpu(), "logsumexp": features.logsumexp_n.cpu()}
    return tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    """A hash of names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].contiguous()
        digest.update(f"{key} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.ndim else b"")
    return digest.hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        temporary.write_text(text + "\n")
        temporary.replace(path)
